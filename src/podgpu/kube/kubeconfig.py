"""This module reads kubeconfig files as kubectl does: several are merged, the first to name a thing wins. It touches
files only.

Complaints never quote what stands in a field: it may be a secret.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from podgpu.errors import SourceError, one_line
from podgpu.kube.access import ApiConfig, ExecPlugin
from podgpu.strict_yaml import StrictMapping, parse_mapping
from podgpu.tls import Pem

EXEC_API = "client.authentication.k8s.io"
EXEC_VERSIONS = (f"{EXEC_API}/v1", f"{EXEC_API}/v1beta1")

_UNSUPPORTED = {
    "username": "is not supported: API servers dropped passwords in Kubernetes 1.19; use a token or a certificate",
    "password": "is not supported: API servers dropped passwords in Kubernetes 1.19; use a token or a certificate",
    "auth-provider": "is not supported: kubectl dropped it in 1.26; use an exec plugin, as your provider's docs say",
    "as": "is not supported: podgpu does not act as somebody else; give it a user of its own",
    "as-uid": "is not supported: podgpu does not act as somebody else; give it a user of its own",
    "as-groups": "is not supported: podgpu does not act as somebody else; give it a user of its own",
    "as-user-extra": "is not supported: podgpu does not act as somebody else; give it a user of its own",
}


_LARGEST_FILE = 8 * 1024 * 1024


class Section(StrictMapping):
    """A mapping of a kubeconfig. Unknown keys are other programs'; names like 0123, 1e3 or on stay what they are."""

    takes_merges = True

    @staticmethod
    def error(message: str) -> SourceError:
        return SourceError("bad_kubeconfig", one_line(message))

    def path(self, name: str) -> str:
        """A file named in this file is looked for beside it."""
        text = self.text(name)
        return os.path.join(os.path.dirname(os.path.abspath(self.file)), text) if text else ""

    def decoded(self, name: str) -> str:
        """The text inside a base64 field."""
        try:
            return base64.b64decode("".join(self.text(name).split()), validate=True).decode("ascii")
        except (binascii.Error, ValueError):  # without its cause, which quotes the field
            raise self.complaint(name, "is not PEM in base64") from None


def read_sections(file: str) -> Section:
    """The whole file as a section. A pipe will do, as for kubectl: it is read once, at start."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError("bad_kubeconfig", f"cannot read the kubeconfig {file}: {reason}") from error
    if len(content) > _LARGEST_FILE:
        raise SourceError("bad_kubeconfig", f"{file} is larger than 8 MiB: it is not a kubeconfig")
    return parse_sections(content, file)


def parse_sections(content: bytes, file: str) -> Section:
    return parse_mapping(content, file, Section)


def read_kubeconfig(files: Sequence[str], context: str | None = None) -> ApiConfig:
    """The server and user of one context: the one named, else the files' `current-context`."""
    return parse_kubeconfig([read_sections(file) for file in files], context)


def parse_kubeconfig(files: Sequence[Section], context: str | None = None) -> ApiConfig:
    chosen = context or next((name for file in files if (name := file.text("current-context"))), "")
    names = ", ".join(file.file for file in files)
    contexts = _merge(files, "contexts", "context")
    if not chosen:
        raise SourceError(
            "bad_kubeconfig", f"{names}: current-context is not set: run kubectl config use-context, or name a context"
        )
    if chosen not in contexts:
        known = ", ".join(map(repr, sorted(contexts)[:10])) or "none"
        raise SourceError("bad_kubeconfig", f"{names}: contexts has no {chosen!r} (there are: {known})")
    section = contexts[chosen]
    cluster = _named(files, section, "cluster")
    user = _named(files, section, "user") if section.has("user") else Section(section.file, "user", {})
    return _config(section, cluster, user, origin=f"{section.file} (context {chosen})")


def _merge(files: Sequence[Section], many: str, part: str) -> dict[str, Section]:
    """Entries by name. An entry is taken whole from the first file that has it: kubectl never mixes two."""
    merged: dict[str, Section] = {}
    for file in files:
        found: dict[str, Section] = {}
        for entry in file.mappings(many):
            name = entry.text("name")
            if name in found:
                raise entry.complaint("name", "is there twice")
            found[name] = entry.mapping(part).called(f"{many}[{name}].{part}")
        merged = found | merged
    return merged


def _named(files: Sequence[Section], context: Section, kind: str) -> Section:
    name = context.text(kind)
    found = _merge(files, f"{kind}s", kind).get(name)
    if found is None:
        raise context.complaint(kind, f"names {name!r}, which is not in {kind}s" if name else "is missing")
    return found


def _config(context: Section, cluster: Section, user: Section, origin: str) -> ApiConfig:
    for name, why in _UNSUPPORTED.items():
        if user.has(name):
            raise user.complaint(name, why)
    if cluster.has("proxy-url"):
        raise cluster.complaint(
            "proxy-url", "is not supported: let podgpu reach the API server directly, or run kubectl proxy"
        )
    ca, verify = _pem(cluster, "certificate-authority"), not cluster.flag("insecure-skip-tls-verify")
    if ca and not verify:
        raise cluster.complaint("insecure-skip-tls-verify", "is set beside certificate-authority: remove one of them")
    certificate, key = _pem(user, "client-certificate"), _pem(user, "client-key")
    if bool(certificate) != bool(key):
        raise user.complaint("client-key" if certificate else "client-certificate", "is missing: the two go together")
    return ApiConfig(
        server=_server(cluster),
        origin=origin,
        namespace=context.text("namespace") or "default",
        ca=ca,
        verify=verify,
        tls_server_name=cluster.text("tls-server-name"),
        certificate=certificate,
        key=key,
        token=user.text("token").strip(),
        token_file=user.path("tokenFile"),
        plugin=_plugin(user.mapping("exec"), cluster) if user.has("exec") else None,
    )


def _server(cluster: Section) -> str:
    text = cluster.text("server").rstrip("/")
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(letter.isspace() or not letter.isprintable() for letter in text):
        raise cluster.complaint("server", "is not a URL such as https://10.0.0.1:6443")
    if parts.username is not None or parts.query or parts.fragment:
        raise cluster.complaint(
            "server", "has a user, a query or a fragment: only scheme, host, port and path belong there"
        )
    return text


def _pem(section: Section, name: str) -> Pem:
    """`NAME-data` wins over the file that NAME names, as in kubectl."""
    if section.has(f"{name}-data"):
        return Pem(text=section.decoded(f"{name}-data"), origin=f"{section.file}: {section.where}.{name}-data")
    return Pem(file=section.path(name))


def _plugin(plugin: Section, cluster: Section) -> ExecPlugin:
    version, command = plugin.text("apiVersion"), plugin.text("command")
    if version not in EXEC_VERSIONS:
        raise plugin.complaint(
            "apiVersion", f"is not {' or '.join(EXEC_VERSIONS)}: update the plugin and its entry here"
        )
    if not command:
        raise plugin.complaint("command", "is missing")
    if plugin.text("interactiveMode") == "Always":
        raise plugin.complaint(
            "interactiveMode", "is Always: podgpu cannot ask anybody; use a plugin that needs no terminal"
        )
    return ExecPlugin(
        # A bare name is looked for in $PATH, anything with a slash beside the kubeconfig.
        command=plugin.path("command") if os.sep in command else command,
        api_version=version,
        args=plugin.texts("args"),
        env=tuple(_variable(entry) for entry in plugin.mappings("env")),
        install_hint=" ".join(plugin.text("installHint").split()),
        cluster=_cluster_info(cluster) if plugin.flag("provideClusterInfo") else None,
    )


def _variable(entry: Section) -> tuple[str, str]:
    name = entry.text("name")
    if not name or "=" in name:
        raise entry.complaint("name", "is not the name of a variable")
    return name, entry.text("value")


def _cluster_info(cluster: Section) -> Mapping[str, Any]:
    """`spec.cluster` of the ExecCredential a plugin is given."""
    info: dict[str, Any] = {"server": _server(cluster)}
    if cluster.has("tls-server-name"):
        info["tls-server-name"] = cluster.text("tls-server-name")
    if cluster.flag("insecure-skip-tls-verify"):
        info["insecure-skip-tls-verify"] = True
    if authority := _authority(cluster):
        info["certificate-authority-data"] = base64.b64encode(authority).decode()
    for extension in cluster.mappings("extensions"):
        if extension.text("name") == f"{EXEC_API}/exec":
            info["config"] = extension.plain("extension")
    return info


def _authority(cluster: Section) -> bytes:
    try:
        return _pem(cluster, "certificate-authority").read()
    except SourceError as error:
        raise cluster.complaint("certificate-authority", f"cannot be read: {error}") from error
