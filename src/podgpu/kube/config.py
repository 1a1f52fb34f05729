"""Finds the API server and the credentials for it.

A server tries the pod's service account, then $KUBECONFIG, then ~/.kube/config. A command of a user
reads only kubeconfigs, as kubectl does. Kubeconfig files are merged as kubectl merges them. Error
messages never quote values of a kubeconfig, because these may be secrets.
"""

from __future__ import annotations

import base64
import ipaddress
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from podgpu.decode import convert, decode_yaml, format_error
from podgpu.errors import UsageError, few_of
from podgpu.tls import NO_PEM, Pem

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_SERVER = re.compile(r"https?://([^\s/@:\[\]]+|\[[0-9a-fA-F:.]+\])(:\d+)?(/[^\s@]*)?")
_PLUGIN_CONFIG = "client.authentication.k8s.io/exec"  # name of an extension of a cluster
_UNSUPPORTED = ("username", "password", "auth-provider", "as")
_log = logging.getLogger(__name__)


class NoApi(UsageError):
    """The API server is not configured, or its configuration cannot be used."""


class ExecVariable(msgspec.Struct, frozen=True):
    name: str = ""
    value: str | None = None


class ExecPlugin(msgspec.Struct, rename="camel", frozen=True):
    """A command that prints a credential. Configured in `users[].user.exec` of a kubeconfig."""

    command: str
    api_version: str
    args: tuple[str, ...] | None = None
    env: tuple[ExecVariable, ...] | None = None
    install_hint: str | None = None
    interactive_mode: str | None = None
    provide_cluster_info: bool = False

    def __repr__(self) -> str:
        """Omits arguments and variables, which may be secrets."""
        return f"ExecPlugin({self.command!r})"


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """One API server and the credentials to use with it."""

    server: str  # URL without a trailing slash
    # Where the configuration was found, for messages: `/root/.kube/config (context kind)`.
    origin: str
    ca: Pem = NO_PEM  # if empty, the system's certificate authorities are used
    verify: bool = True
    tls_server_name: str = ""
    certificate: Pem = NO_PEM
    key: Pem = NO_PEM
    token: str = field(default="", repr=False)
    token_file: str = ""  # overrides `token`
    plugin: ExecPlugin | None = None
    namespace: str = ""  # of the kubeconfig's context; empty if it has none
    # Of the cluster, for plugins that ask for information about it. Numbers are texts.
    plugin_config: Any = None


def load_config(kubeconfig: str = "", *, service_account: str = SERVICE_ACCOUNT) -> ApiConfig:
    """Returns the API server to use.

    The file `kubeconfig`, if given, overrides the service account. Raises NoApi if no API server
    is configured, or if the configuration cannot be used.
    """
    config = _find_config(kubeconfig, service_account)
    if not config.verify:
        _log.warning(
            "%s: insecure-skip-tls-verify is set: podgpu sends its credentials to %s without "
            "verifying the server",
            config.origin,
            config.server,
        )

    _check_secrecy(config)
    return config


def load_user_config(kubeconfig: str = "", context: str = "") -> ApiConfig:
    """Returns the API server of a person who uses kubectl.

    `context`: a context of the kubeconfig. Default: the current one. Raises NoApi.
    """
    files = [kubeconfig] if kubeconfig else _list_files()
    existing = [name for name in files if os.path.exists(name)]
    if not existing:
        raise NoApi(
            f"there is no kubeconfig: {' and '.join(files)} cannot be found: set $KUBECONFIG or "
            "--kubeconfig to the file that you use with kubectl"
        )

    config = _read_kubeconfig(existing, context, is_attended=True)
    _check_secrecy(config)
    return config


def _check_secrecy(config: ApiConfig) -> None:
    """Raises NoApi if a token would be sent without encryption."""
    address = urlsplit(config.server)
    has_token = bool(config.token or config.token_file or config.plugin)
    is_local = is_loopback(address.hostname or "")
    if address.scheme != "https" and has_token and not is_local:
        raise NoApi(
            f"{config.origin}: the server {config.server} is plain HTTP, so the user's token "
            "could be read on the network: write https:// in clusters[].cluster.server"
        )


def _find_config(kubeconfig: str, service_account: str) -> ApiConfig:
    if kubeconfig:
        return _read_kubeconfig([kubeconfig])

    in_cluster = _find_service_account(service_account)
    if in_cluster is not None:
        return in_cluster

    files = _list_files()
    # kubectl skips missing files, too.
    existing = [name for name in files if os.path.exists(name)]
    if existing:
        return _read_kubeconfig(existing)

    raise NoApi(
        f"no Kubernetes API server is configured: there is neither {service_account}/token nor "
        f"{' nor '.join(files)}: in a pod, set automountServiceAccountToken: true in its spec; "
        "elsewhere, set $KUBECONFIG to a kubeconfig"
    )


def _list_files() -> list[str]:
    """Returns the kubeconfigs that kubectl would read. They may not exist."""
    names = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    files = [name for name in names if name]
    return files or [os.path.expanduser("~/.kube/config")]


def _find_service_account(directory: str) -> ApiConfig | None:
    """Returns None outside a pod, and in a pod without a service account."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT")
    token = os.path.join(directory, "token")
    ca = os.path.join(directory, "ca.crt")
    if not host or not port:
        return None
    if not os.path.exists(token) or not os.path.exists(ca):
        return None
    # an IPv6 address
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"

    server = f"https://{host}:{port}"
    return ApiConfig(server, "the pod's service account", ca=Pem(file=ca), token_file=token)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Named(msgspec.Struct):
    name: str
    context: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    user: dict[str, Any] | None = None


class _Kubeconfig(msgspec.Struct, rename="kebab"):
    current_context: str | None = None
    contexts: list[_Named] | None = None
    clusters: list[_Named] | None = None
    users: list[_Named] | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    file: str
    where: str  # path in the file, for messages
    values: Mapping[str, Any]

    def error(self, name: str, problem: str) -> NoApi:
        return NoApi(f"{self.file}: {self.where}.{name}: {problem}")

    def text(self, name: str) -> str:
        """Returns the value of a key, or an empty text if the key is not set."""
        value = self.values.get(name) or ""
        if not isinstance(value, str):
            raise self.error(name, "is not a text")
        return value

    def path(self, name: str) -> str:
        """Resolves a path relative to the kubeconfig."""
        if not name:
            return ""
        folder = os.path.dirname(os.path.abspath(self.file))
        return os.path.join(folder, name)

    def pem(self, name: str) -> Pem:
        """Returns the PEM text of the key NAME-data.

        Without that key, returns the PEM file of the key NAME.
        """
        key = f"{name}-data"
        data = self.text(key)
        if not data:
            return Pem(file=self.path(self.text(name)))

        try:
            text = base64.b64decode("".join(data.split()), validate=True).decode("ascii")
        # Without the original error, which quotes the value.
        except ValueError:
            raise self.error(key, "is not PEM in base64") from None

        return Pem(text=text, origin=f"{self.file}: {self.where}.{key}")


def _read_kubeconfig(
    paths: Sequence[str], context_name: str = "", is_attended: bool = False
) -> ApiConfig:
    """Merges the files. Without `context_name`, uses the current context.

    `is_attended`: a person can use the terminal of a credential plugin.
    """
    files: dict[str, _Kubeconfig] = {}
    for path in paths:
        try:
            # Pipes are accepted, as in kubectl.
            content = Path(path).read_bytes()
            files[path] = decode_yaml(content, path, _Kubeconfig)
        except OSError as error:
            raise NoApi(f"cannot read the kubeconfig {path}: {error.strerror}") from error
        except UsageError as error:
            raise NoApi(f"{error}: is it a kubeconfig?") from None

    if context_name:
        _require_context(files, context_name)
        chosen = context_name
    else:
        chosen = _find_current_context(files)

    context = _find_entry(files, "contexts", chosen)
    cluster = _find_entry(files, "clusters", context.text("cluster"))
    user = _Entry(context.file, "user", {})
    if context.text("user"):
        user = _find_entry(files, "users", context.text("user"))

    origin = f"{context.file} (context {chosen})"
    return _make_config(cluster, user, context.text("namespace"), origin, is_attended)


def _find_current_context(files: Mapping[str, _Kubeconfig]) -> str:
    """Returns the first `current-context` that is set, as kubectl does."""
    for content in files.values():
        if content.current_context:
            return content.current_context
    raise NoApi(f"{', '.join(files)}: current-context is not set: run kubectl config use-context")


def _require_context(files: Mapping[str, _Kubeconfig], name: str) -> None:
    names = []
    for content in files.values():
        names += [named.name for named in content.contexts or ()]
    if name not in names:
        raise NoApi(
            f"--context {name}: {', '.join(files)} has no such context; it has {few_of(names)}"
        )


def _find_entry(files: Mapping[str, _Kubeconfig], section: str, name: str) -> _Entry:
    """Returns the first entry with this name. Entries of different files are never merged."""
    key = section.removesuffix("s")
    for file, content in files.items():
        for named in getattr(content, section) or ():
            if named.name == name:
                path = f"{section}[{name}].{key}"
                values = getattr(named, key) or {}
                return _Entry(file, path, values)

    raise NoApi(
        f"{', '.join(files)}: {section} has no entry {name!r}, which the current context needs"
    )


def _make_config(
    cluster: _Entry, user: _Entry, namespace: str, origin: str, is_attended: bool
) -> ApiConfig:
    for name in _UNSUPPORTED:
        if user.values.get(name):
            raise user.error(
                name, "is not supported: use a token, a client certificate or an exec plugin"
            )

    url = cluster.text("server").rstrip("/")
    if not _SERVER.fullmatch(url):
        raise cluster.error("server", "is not a URL such as https://10.0.0.1:6443")

    if cluster.text("proxy-url"):
        raise cluster.error(
            "proxy-url", "is not supported: connect podgpu directly, or run kubectl proxy"
        )

    return ApiConfig(
        server=url,
        origin=origin,
        ca=cluster.pem("certificate-authority"),
        verify=not cluster.values.get("insecure-skip-tls-verify"),
        tls_server_name=cluster.text("tls-server-name"),
        certificate=user.pem("client-certificate"),
        key=user.pem("client-key"),
        token=user.text("token").strip(),
        token_file=user.path(user.text("tokenFile")),
        plugin=_make_plugin(user, is_attended) if user.values.get("exec") else None,
        namespace=namespace,
        plugin_config=_find_plugin_config(cluster),
    )


def _find_plugin_config(cluster: _Entry) -> Any:
    for extension in cluster.values.get("extensions") or ():
        if isinstance(extension, dict) and extension.get("name") == _PLUGIN_CONFIG:
            return extension.get("extension")
    return None


def _make_plugin(user: _Entry, is_attended: bool) -> ExecPlugin:
    try:
        plugin = convert(user.values["exec"], ExecPlugin)
    except msgspec.ValidationError as error:
        raise user.error("exec", format_error(error)) from None

    if plugin.api_version not in _EXEC_VERSIONS:
        versions = " or ".join(_EXEC_VERSIONS)
        raise user.error(
            "exec.apiVersion", f"is not {versions}: update the plugin and its kubeconfig entry"
        )

    if plugin.interactive_mode == "Always" and not is_attended:
        raise user.error(
            "exec.interactiveMode", "is Always: podgpu needs a plugin that works without a terminal"
        )

    # As in kubectl, a name without a slash is searched in $PATH, and a path is relative to the
    # kubeconfig.
    if os.sep in plugin.command:
        plugin = msgspec.structs.replace(plugin, command=user.path(plugin.command))

    return plugin
