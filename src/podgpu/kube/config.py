"""Finds the API server: the pod's service account, else $KUBECONFIG, else ~/.kube/config.

Kubeconfig files are merged as in kubectl. Messages never quote a field's value, because it may be a secret.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from podgpu.decode import decode_yaml
from podgpu.errors import SourceError, UsageError, few_of
from podgpu.tls import NO_PEM, Pem

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
EXEC_API = "client.authentication.k8s.io"
EXEC_VERSIONS = (f"{EXEC_API}/v1", f"{EXEC_API}/v1beta1")
_MAX_BYTES = 8 * 1024 * 1024
_UNSUPPORTED = {
    "username": "passwords were removed in Kubernetes 1.19; use a token or a certificate",
    "password": "passwords were removed in Kubernetes 1.19; use a token or a certificate",
    "auth-provider": "it was removed in kubectl 1.26; use an exec plugin, see your provider's docs",
    "as": "podgpu does not impersonate; create a user for it",
}
_log = logging.getLogger(__name__)
T = TypeVar("T")


class ExecVariable(msgspec.Struct, frozen=True):
    name: str = ""
    value: str | None = None


class ExecPlugin(msgspec.Struct, rename="camel", frozen=True):
    """A command that prints a credential (`users[].user.exec` of a kubeconfig)."""

    command: str | None = None
    api_version: str | None = None
    args: tuple[str, ...] | None = None
    env: tuple[ExecVariable, ...] | None = None
    install_hint: str | None = None
    interactive_mode: str | None = None
    provide_cluster_info: bool | None = None
    cluster: Mapping[str, Any] | None = None  # passed to the command if `provideClusterInfo` is set

    def __repr__(self) -> str:
        """Omits arguments and variables, which may be secrets."""
        return f"ExecPlugin({self.command!r})"


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """One API server and the credentials to use with it."""

    server: str  # URL without a trailing slash
    origin: str  # used in messages, such as `the pod's service account` or `/root/.kube/config (context kind)`
    ca: Pem = NO_PEM  # if empty, the system's certificate authorities are used
    verify: bool = True
    tls_server_name: str = ""
    certificate: Pem = NO_PEM
    key: Pem = NO_PEM
    token: str = field(default="", repr=False)
    token_file: str = ""  # overrides `token` if it is readable
    plugin: ExecPlugin | None = None


def load_config(
    kubeconfig: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    service_account: str = SERVICE_ACCOUNT,
) -> ApiConfig:
    """Returns the API server to use. A given kubeconfig overrides the service account.

    Raises SourceError: `no_api_config` if none is configured, `bad_kubeconfig` if the file cannot be used.
    """
    config = _find_config(kubeconfig, environ, service_account)
    if not config.verify:
        _log.warning(
            "%s: insecure-skip-tls-verify is set: podgpu sends its credentials to %s without verifying the server",
            config.origin,
            config.server,
        )
    address = urlsplit(config.server)
    has_token = bool(config.token or config.token_file or config.plugin)
    if address.scheme != "https" and has_token and not is_loopback(address.hostname or ""):
        raise _bad(
            f"{config.origin}: the server {config.server} is plain HTTP, so the user's token could be read on the"
            " network: write https:// in clusters[].cluster.server"
        )
    return config


def require_config(kubeconfig: str) -> ApiConfig:
    """Loads the configuration for commands that need the API server. Raises UsageError."""
    try:
        return load_config(kubeconfig or None)
    except SourceError as error:
        raise UsageError(f"the API server cannot be used: {error}") from error


def _find_config(kubeconfig: str | None, environ: Mapping[str, str], service_account: str) -> ApiConfig:
    if kubeconfig:
        return _read_kubeconfig([kubeconfig])
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    token, ca = os.path.join(service_account, "token"), os.path.join(service_account, "ca.crt")
    if host and port and os.path.exists(token) and os.path.exists(ca):
        server = f"https://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"
        return ApiConfig(server, "the pod's service account", ca=Pem(file=ca), token_file=token)
    files = [name for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    if not files:
        files = [os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".kube", "config")]
    existing = [name for name in files if os.path.exists(name)]  # kubectl skips missing files, too
    if existing:
        return _read_kubeconfig(existing)
    problem = (
        f"this pod has no service-account token in {service_account}: set automountServiceAccountToken: true in its"
        " spec, or set $KUBECONFIG to a kubeconfig"
        if host
        else f"no Kubernetes API server is configured: podgpu does not run in a pod, and {' and '.join(files)} does not"
        " exist: run it in the cluster, or set $KUBECONFIG to a kubeconfig"
    )
    raise SourceError("no_api_config", problem)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bad(message: str) -> SourceError:
    return SourceError("bad_kubeconfig", message)


# Kubeconfig files


class _Section(msgspec.Struct, rename="kebab"):
    pass


class _Extension(_Section):
    name: str = ""
    extension: Any = None


class _Cluster(_Section):
    server: str | None = None
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool | None = None
    tls_server_name: str | None = None
    proxy_url: str | None = None
    extensions: list[_Extension] | None = None


class _User(_Section):
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    exec: ExecPlugin | None = None
    username: Any = None
    password: Any = None
    auth_provider: Any = None
    as_: Any = msgspec.field(default=None, name="as")


class _Context(_Section):
    cluster: str | None = None
    user: str | None = None


class _Named(_Section):
    """An entry of `contexts`, `clusters` or `users`."""

    name: str
    context: _Context | None = None
    cluster: _Cluster | None = None
    user: _User | None = None


class _Kubeconfig(_Section):
    current_context: str | None = None
    contexts: list[_Named] | None = None
    clusters: list[_Named] | None = None
    users: list[_Named] | None = None


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    """An entry of a kubeconfig and its location, for messages and relative paths."""

    file: str
    where: str
    value: T

    def error(self, name: str, problem: str) -> SourceError:
        return _bad(f"{self.file}: {self.where}.{name}: {problem}")

    def path(self, name: str | None) -> str:
        """Resolves a path relative to the file that contains it."""
        return os.path.join(os.path.dirname(os.path.abspath(self.file)), name) if name else ""

    def pem(self, name: str) -> Pem:
        """Returns the content of `NAME-data` or else the file in NAME, as kubectl does."""
        attribute = name.replace("-", "_")
        data = getattr(self.value, f"{attribute}_data")
        if not data:
            return Pem(file=self.path(getattr(self.value, attribute)))
        try:
            text = base64.b64decode("".join(data.split()), validate=True).decode("ascii")
        except (binascii.Error, ValueError):  # the original error quotes the field
            raise self.error(f"{name}-data", "is not PEM in base64") from None
        return Pem(text=text, origin=f"{self.file}: {self.where}.{name}-data")


def _read_kubeconfig(files: Sequence[str]) -> ApiConfig:
    contents = {}
    for file in files:
        try:
            with open(file, "rb") as opened:  # may be a pipe, which kubectl also accepts
                contents[file] = opened.read(_MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise _bad(f"cannot read the kubeconfig {file}: {reason}") from error
        if len(contents[file]) > _MAX_BYTES:
            raise _bad(f"{file} is larger than 8 MiB, the limit for a kubeconfig")
    return parse_kubeconfig(contents)


def parse_kubeconfig(contents: Mapping[str, bytes]) -> ApiConfig:
    """Merges the files and uses the first `current-context`."""
    try:
        files = {name: decode_yaml(content, name, _Kubeconfig) for name, content in contents.items()}
    except UsageError as error:
        raise _bad(str(error)) from None
    names = ", ".join(files)
    chosen = next((file.current_context for file in files.values() if file.current_context), None)
    if not chosen:
        raise _bad(f"{names}: current-context is not set: run kubectl config use-context")
    contexts = _merge_entries(files, "contexts", "context", _Context)
    if chosen not in contexts:
        raise _bad(f"{names}: contexts has no {chosen!r} (it has: {few_of(map(repr, sorted(contexts)), 10)})")
    context = contexts[chosen]
    cluster = _find_entry(
        context, "cluster", context.value.cluster, _merge_entries(files, "clusters", "cluster", _Cluster)
    )
    user = _Entry(context.file, "user", _User())
    if context.value.user:
        user = _find_entry(context, "user", context.value.user, _merge_entries(files, "users", "user", _User))
    return _make_config(cluster, user, origin=f"{context.file} (context {chosen})")


def _merge_entries(files: Mapping[str, _Kubeconfig], many: str, one: str, kind: type[T]) -> dict[str, _Entry[T]]:
    """Returns the entries by name. The first file that has an entry is used; two files are never mixed in one entry."""
    entries: dict[str, _Entry[T]] = {}
    for file, content in files.items():
        for named in getattr(content, many) or ():
            where = f"{many}[{named.name}].{one}"
            entries.setdefault(named.name, _Entry(file, where, getattr(named, one) or kind()))
    return entries


def _find_entry(context: _Entry[_Context], kind: str, name: str | None, entries: Mapping[str, _Entry[T]]) -> _Entry[T]:
    if not name:
        raise context.error(kind, "is missing")
    if name not in entries:
        raise context.error(kind, f"names {name!r}, which is not in {kind}s")
    return entries[name]


def _make_config(cluster: _Entry[_Cluster], user: _Entry[_User], origin: str) -> ApiConfig:
    for name, why in _UNSUPPORTED.items():
        if getattr(user.value, "as_" if name == "as" else name.replace("-", "_")):
            raise user.error(name, f"is not supported: {why}")
    if cluster.value.proxy_url:
        raise cluster.error("proxy-url", "is not supported: connect podgpu directly, or run kubectl proxy")
    ca, verify = cluster.pem("certificate-authority"), not cluster.value.insecure_skip_tls_verify
    if ca and not verify:
        raise cluster.error(
            "insecure-skip-tls-verify", "is set together with certificate-authority: remove one of them"
        )
    certificate, key = user.pem("client-certificate"), user.pem("client-key")
    if bool(certificate) != bool(key):
        raise user.error("client-key" if certificate else "client-certificate", "is missing: set both or none")
    return ApiConfig(
        server=_check_server(cluster),
        origin=origin,
        ca=ca,
        verify=verify,
        tls_server_name=cluster.value.tls_server_name or "",
        certificate=certificate,
        key=key,
        token=(user.value.token or "").strip(),
        token_file=user.path(user.value.token_file),
        plugin=_make_plugin(user, user.value.exec, cluster) if user.value.exec else None,
    )


def _check_server(cluster: _Entry[_Cluster]) -> str:
    url = (cluster.value.server or "").rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(letter.isspace() or not letter.isprintable() for letter in url):
        raise cluster.error("server", "is not a URL such as https://10.0.0.1:6443")
    if parts.username is not None or parts.query or parts.fragment:
        raise cluster.error("server", "has a user, a query or a fragment: write only scheme, host, port and path")
    return url


def _make_plugin(user: _Entry[_User], plugin: ExecPlugin, cluster: _Entry[_Cluster]) -> ExecPlugin:
    if plugin.api_version not in EXEC_VERSIONS:
        versions = " or ".join(EXEC_VERSIONS)
        raise user.error("exec.apiVersion", f"is not {versions}: update the plugin and its kubeconfig entry")
    if not plugin.command:
        raise user.error("exec.command", "is missing")
    if plugin.interactive_mode == "Always":
        raise user.error("exec.interactiveMode", "is Always: podgpu needs a plugin that works without a terminal")
    for number, variable in enumerate(plugin.env or ()):
        if not variable.name or "=" in variable.name:
            raise user.error(f"exec.env[{number}].name", "must be the name of a variable")
    # A bare name is searched in $PATH; a path is relative to the kubeconfig.
    command = user.path(plugin.command) if os.sep in plugin.command else plugin.command
    info = _cluster_info(cluster) if plugin.provide_cluster_info else None
    return msgspec.structs.replace(plugin, command=command, cluster=info)


def _cluster_info(cluster: _Entry[_Cluster]) -> Mapping[str, Any]:
    """Builds `spec.cluster` of the ExecCredential that a plugin receives."""
    info: dict[str, Any] = {"server": _check_server(cluster)}
    if cluster.value.tls_server_name:
        info["tls-server-name"] = cluster.value.tls_server_name
    if cluster.value.insecure_skip_tls_verify:
        info["insecure-skip-tls-verify"] = True
    try:
        authority = cluster.pem("certificate-authority").read()
    except SourceError as error:
        raise cluster.error("certificate-authority", f"cannot be read: {error}") from error
    if authority:
        info["certificate-authority-data"] = base64.b64encode(authority).decode()
    for extension in cluster.value.extensions or ():
        if extension.name == f"{EXEC_API}/exec":
            info["config"] = extension.extension
    return info
