"""This module owns how to be let in at a URL: what the options say, and what is sent because of it. It shows no
secret."""

from __future__ import annotations

import base64
import re
import ssl
import unicodedata
from dataclasses import dataclass

from podgpu.errors import SourceError, UsageError
from podgpu.files import FileIdentity, ReadOnChange, look_at
from podgpu.http.tls import KeptContext, Pem, client_context

_LARGEST_SECRET = 64 * 1024
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name in RFC 9110."""
_LOGIN = re.compile(r".*(?:@|%40)", re.DOTALL | re.IGNORECASE)
_QUERY = re.compile(r"[?#]")


@dataclass(frozen=True)
class Access:
    """How to be let in. Secrets are read anew when their files change: they are renewed under their names."""

    ca_file: str = ""
    insecure: bool = False
    """Take any certificate."""
    username: str = ""
    password_file: str = ""
    token_file: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    """More to send with every request, such as a tenant's name."""
    prefix: str = "exporter"
    """The options are --PREFIX-ca-file and so on; empty: there are none, only a login in the URL."""
    server: str = "the exporter"
    """Who answers there, for messages."""

    def check(self) -> None:
        """Raises UsageError."""
        if self.token_file and self.username:
            raise UsageError(f"{self.option('token-file')} and {self.option('username')}: only one of them can be sent")
        if bool(self.username) != bool(self.password_file):
            raise UsageError(f"{self.option('username')} and {self.option('password-file')} go together")
        if self.ca_file and self.insecure:
            unchecked = self.option("insecure-skip-verify")
            raise UsageError(f"{self.option('ca-file')}: nothing is checked against it with {unchecked}")
        for name, value in self.headers:
            if not _TOKEN.fullmatch(name) or not value.isprintable() or value != value.strip():
                raise UsageError(f"the header {name!r}: {value!r} cannot be sent in one line of HTTP")

    @property
    def wants_tls(self) -> bool:
        """Who says how a certificate is to be judged expects one."""
        return bool(self.ca_file or self.insecure)

    def option(self, name: str) -> str:
        return f"--{self.prefix}-{name}"

    def login_advice(self) -> str:
        if not self.prefix:
            return "write the login into the URL, http://USER:PASSWORD@HOST:PORT"
        return f"see {self.option('username')}, {self.option('password-file')} and {self.option('token-file')}"

    def tls_advice(self) -> str:
        if not self.prefix:
            return "name its CA in the variable SSL_CERT_FILE"
        return f"see {self.option('ca-file')}"


class Credentials:
    """What goes along with requests. One for all places with the same access: secrets and certificates are kept."""

    def __init__(self, access: Access | None = None) -> None:
        """Raises UsageError for what does not go together."""
        self.access = access or Access()
        self.access.check()
        self._secrets: ReadOnChange[str] = ReadOnChange(_parse_secret, _LARGEST_SECRET)
        self._tls = KeptContext(self._make_context)

    def headers(self, login: str = "") -> dict[str, str]:
        """`login`: USER:PASSWORD of the URL. Raises SourceError for a secret that cannot be had."""
        access = self.access
        headers = dict(access.headers)
        if access.token_file:
            headers["Authorization"] = f"Bearer {self._secrets.read(access.token_file)}"
            return headers
        if access.username:
            login = f"{access.username}:{self._secrets.read(access.password_file)}"
        if login:
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        return headers

    def reads_files(self, https: bool) -> bool:
        """Whether the next `headers` or `tls` looks at a file, which may take its time."""
        access = self.access
        of_tls = https and (bool(access.ca_file) or not self._tls.is_made)
        return bool(access.token_file or access.password_file) or of_tls

    @property
    def has_login(self) -> bool:
        return bool(self.access.username or self.access.token_file)

    def tls(self) -> ssl.SSLContext:
        """Made again only when the file of authorities changed."""
        file = self.access.ca_file
        return self._tls.of(look_at(file) if file else None)

    def _make_context(self, _identity: FileIdentity | None) -> ssl.SSLContext:
        authorities = Pem(self.access.ca_file)
        return client_context(authorities.read() if authorities else None, authorities.name, not self.access.insecure)


def _parse_secret(content: bytes, path: str) -> str:
    try:
        secret = content.decode().strip()
    except UnicodeDecodeError:
        secret = ""
    if not secret or not secret.isprintable():  # a line break would begin another header
        raise SourceError("unauthorized", f"{path} holds no secret that could be sent: one line of text is wanted")
    return secret


def without_secrets(url: str) -> str:
    """What may be said of anything that was meant as a URL: its host and path, as far as they can be told.

    All before the last @ may be a login, whatever is wrong with it, and all behind a ? a key.
    """
    scheme, separator, rest = unicodedata.normalize("NFKC", url).partition("://")
    rest = rest if separator else scheme
    behind_login = _LOGIN.sub("", rest)
    shown = _QUERY.split(behind_login, maxsplit=1)[0]
    known = separator and scheme.isalnum() and "@" not in scheme
    return ascii(f"{scheme}://{shown}" if known else shown)[:200]
