"""Everything a web config file asks for, checked at start and ready for every listener.

Imported only when there is such a file: YAML and bcrypt cost memory that a plain exporter need not spend.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp.typedefs import Middleware

from podgpu.serve.auth import Passwords, TokenBucket, guard
from podgpu.serve.tls import Contexts, per_connection
from podgpu.serve.web_config import ClientAuth, TlsSettings, WebConfig, WebConfigFile

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Protection:
    tls: ssl.SSLContext | None
    """None: plain HTTP, for as long as the process runs."""
    middleware: Middleware
    close: Callable[[], None]


def protect(path: str, clock: Callable[[], float] = time.monotonic) -> Protection:
    """Raises UsageError where podgpu would not be protected as the file says."""
    file = WebConfigFile(path)
    config = file.read()
    contexts = Contexts(file.current)
    if config.tls is not None:
        contexts.make(config.tls)
    _say_what_may_surprise(config, path)
    bucket = TokenBucket(config.rate_limit, clock) if config.rate_limit else None
    passwords = Passwords()
    return Protection(
        tls=per_connection(contexts) if config.tls is not None else None,
        middleware=guard(file.current, bucket, passwords),
        close=passwords.close,
    )


def _say_what_may_surprise(config: WebConfig, path: str) -> None:
    if config.tls_keys_without_effect:
        _log.warning("%s: tls_server_config names no certificate: podgpu serves plain HTTP", path)
    if config.users and config.tls is None:
        _log.warning("%s: basic auth without TLS: passwords cross the network readable", path)
    if config.tls is not None:
        _say_what_tls_may_surprise(config.tls)


def _say_what_tls_may_surprise(tls: TlsSettings) -> None:
    if len(tls.curves) > 1:
        _log.warning("%s: curve_preferences: Python can set one curve; of several, OpenSSL chooses", tls.origin)
    verifies = tls.client_auth in (ClientAuth.VERIFY_IF_GIVEN, ClientAuth.REQUIRE_AND_VERIFY)
    if verifies and tls.client_ca is None:
        _log.warning("%s: no client_ca_file: certificates of every authority this system trusts are taken", tls.origin)
