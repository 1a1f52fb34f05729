"""This module finds the API server: the pod's service account, else $KUBECONFIG, else ~/.kube/config. It asks
nobody."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from podgpu.errors import SourceError
from podgpu.kube.access import ApiConfig, ExecPlugin
from podgpu.kube.kubeconfig import read_kubeconfig
from podgpu.tls import Pem

__all__ = ["SERVICE_ACCOUNT", "ApiConfig", "ExecPlugin", "load_config"]

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

_log = logging.getLogger(__name__)


def load_config(
    kubeconfig: str | None = None,
    context: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    service_account: str = SERVICE_ACCOUNT,
) -> ApiConfig:
    """The API server to talk to. A kubeconfig or a context that was named wins over the service account.

    Raises SourceError: `no_api_config` when there is none, `bad_kubeconfig` when one cannot be used.
    """
    config = _find(kubeconfig, context, environ, service_account)
    if not config.verify:
        _log.warning(
            "%s: insecure-skip-tls-verify is set: podgpu trusts whatever answers at %s, and sends it the credentials",
            config.origin,
            config.server,
        )
    _refuse_secrets_in_the_clear(config)
    return config


def _find(kubeconfig: str | None, context: str | None, environ: Mapping[str, str], service_account: str) -> ApiConfig:
    if kubeconfig:
        return read_kubeconfig([kubeconfig], context)
    if not context and (found := _read_service_account(environ, service_account)) is not None:
        return found
    files = [name for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    if not files:
        files = [os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".kube", "config")]
    there = [name for name in files if os.path.exists(name)]  # kubectl, too, passes over those that are not
    if not there:
        raise _no_config(files, environ, service_account)
    return read_kubeconfig(there, context)


def _read_service_account(environ: Mapping[str, str], folder: str) -> ApiConfig | None:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    token, ca, namespace = (os.path.join(folder, name) for name in ("token", "ca.crt", "namespace"))
    if not host or not port or not os.path.exists(token) or not os.path.exists(ca):
        return None
    return ApiConfig(
        server=f"https://{_bracketed(host)}:{port}",
        origin="the pod's service account",
        namespace=_read_namespace(namespace),
        ca=Pem(file=ca),
        token_file=token,
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _read_namespace(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(300).strip() or "default"
    except (OSError, UnicodeDecodeError):
        return "default"


def _no_config(files: list[str], environ: Mapping[str, str], service_account: str) -> SourceError:
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return SourceError(
            "no_api_config",
            f"this pod has no service-account token in {service_account}: set automountServiceAccountToken: true"
            " in its spec, or name a kubeconfig in $KUBECONFIG",
        )
    return SourceError(
        "no_api_config",
        f"no Kubernetes API server is known: not in a pod, and there is no {' nor '.join(files)}:"
        " run in the cluster, or name a kubeconfig in $KUBECONFIG",
    )


def _refuse_secrets_in_the_clear(config: ApiConfig) -> None:
    """A bearer token over plain HTTP is everybody's. On this machine (kubectl proxy, tests) it stays at home."""
    address = urlsplit(config.server)
    has_token = bool(config.token or config.token_file or config.plugin)
    if address.scheme == "https" or not has_token or _is_loopback(address.hostname or ""):
        return
    raise SourceError(
        "bad_kubeconfig",
        f"{config.origin}: the server {config.server} is plain HTTP and the user has a token, which anyone on the"
        " way could read: write https:// in clusters[].cluster.server",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
