"""This module assembles `podgpu autoscale` as the options say: what is watched, who is answered, with which
certificates."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from podgpu.autoscale.api_paths import CUSTOM, CUSTOM_VERSIONS, EXTERNAL, EXTERNAL_VERSION
from podgpu.autoscale.api_tls import ApiContexts, pair_of_files, pair_of_own
from podgpu.autoscale.autoscale_app import API_OPTION, KEDA_OPTION, ApiPart, Autoscale, KedaPart
from podgpu.autoscale.external_scaler import Callers, ExternalScaler
from podgpu.autoscale.front_proxy import CONFIG_NAME, CONFIG_NAMESPACE, Trust, parse_trust
from podgpu.autoscale.metrics import FIELDS_BESIDE
from podgpu.autoscale.own_ca import BundleKeeper, OwnCa, Served, remove_service
from podgpu.autoscale.pods import NodeFeed, PodFeed
from podgpu.autoscale.scaler_tls import ScalerFiles, ScalerTls
from podgpu.autoscale.scene import Store
from podgpu.cluster.loop import Cluster, MakeCollector
from podgpu.cluster.settings import MAX_ROUNDS, ViewSettings, check_settings, duration_text
from podgpu.compose.cluster import api_config, choose_collector
from podgpu.errors import SourceError, StartError, UsageError
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.kube.reflector import Informer
from podgpu.tls import Pem
from podgpu.web.app import run
from podgpu.web.sockets import Address, parse_address

OFF = "none"
_CONFIGMAPS = f"/api/v1/namespaces/{CONFIG_NAMESPACE}/configmaps"
_log = logging.getLogger("podgpu")


def autoscale_settings(options: Mapping[str, Any], stale_after: float, drop_after: float) -> ViewSettings:
    """Raises UsageError."""
    interval, longest = options["interval"], options["longest_window"]
    if longest / interval > MAX_ROUNDS:
        raise UsageError(
            f"--longest-window {duration_text(longest)} holds more than {MAX_ROUNDS} rounds of --interval "
            f"{duration_text(interval)}: make the window shorter or the interval longer"
        )
    return check_settings(
        ViewSettings(
            interval=interval,
            stale_after=stale_after,
            drop_after=drop_after,
            used_field=options["used_field"],
            fields_beside=FIELDS_BESIDE,
            window=interval,
        )
    )


def run_autoscale(options: Mapping[str, Any], settings: ViewSettings, probe_address: Address) -> None:
    """Until SIGINT or SIGTERM. Raises UsageError and StartError."""
    with ExitStack() as at_the_end:
        make_collector = choose_collector({**options, "owners": "none"}, settings, at_the_end)
        parts = assemble_autoscale(options, settings, make_collector, at_the_end)
        run(parts.cluster, parts.listeners(probe_address))


def assemble_autoscale(
    options: Mapping[str, Any], settings: ViewSettings, make_collector: MakeCollector, at_the_end: ExitStack
) -> Autoscale:
    """Raises UsageError for what cannot be meant, before anything is asked."""
    keda = _keda(options)
    api_address = _address(options["api_address"], API_OPTION)
    _check_api(options, api_address)
    if keda is None and api_address is None:
        raise UsageError(f"{KEDA_OPTION} and {API_OPTION} are both none: nothing could be asked")
    config = api_config(options["kubeconfig"])
    pods, nodes = PodFeed(config), NodeFeed(config)
    at_the_end.callback(pods.close)
    at_the_end.callback(nodes.close)
    store = Store(settings, options["longest_window"], pods.now, nodes.now)
    cluster = Cluster(make_collector, settings, on_round=store.take)
    return Autoscale(
        store,
        cluster,
        KedaPart(ExternalScaler(store, keda[1]), keda[0], keda[2]) if keda is not None else None,
        _api(options, api_address, config, at_the_end) if api_address is not None else None,
    )


def _address(text: str, option: str) -> Address | None:
    return None if text.strip().lower() in (OFF, "") else parse_address(text, option)


# KEDA


def _keda(options: Mapping[str, Any]) -> tuple[Address, Callers, Callable[[], Any] | None] | None:
    address = _address(options["keda_address"], KEDA_OPTION)
    files = [options[name] for name in ("keda_cert_file", "keda_key_file", "keda_client_ca_file")]
    if address is None:
        return None
    names, namespaces = _listed(options["keda_client_name"]), _listed(options["keda_namespaces"])
    if all(files):
        if namespaces:
            raise UsageError("--keda-namespaces is for a listener without client certificates: leave it out")
        certificate, key, authorities = (Pem(file=file) for file in files)
        tls = ScalerTls(ScalerFiles(certificate, key, authorities))
        return address, Callers(by_certificate=True, names=names), tls.credentials
    if any(files) or names:
        raise UsageError(
            "client certificates need all of --keda-cert-file, --keda-key-file and --keda-client-ca-file: "
            "give them all, or none"
        )
    if not _is_loopback(address.host):
        raise UsageError(
            f"{KEDA_OPTION} {address.host or '(every interface)'}:{address.port} can be reached by others, who could "
            "say they were anybody: give --keda-cert-file, --keda-key-file and --keda-client-ca-file, listen on "
            "127.0.0.1, or turn it off with none"
        )
    if not namespaces:
        _log.warning("%s: without client certificates and --keda-namespaces no namespace is answered", KEDA_OPTION)
    return address, Callers(by_certificate=False, namespaces=namespaces), None


def _listed(text: str) -> frozenset[str]:
    return frozenset(filter(None, (name.strip() for name in text.split(","))))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# The metrics API


def _check_api(options: Mapping[str, Any], address: Address | None) -> None:
    given = [f"--{name.replace('_', '-')}" for name in ("api_cert_file", "api_key_file") if options[name]]
    service = options["api_service"]
    if address is None:
        if given or service or options["external_metrics"]:
            raise UsageError(f"{(*given, '--api-service', '--external-metrics')[0]} needs {API_OPTION}, which is none")
        return
    if len(given) == 1:
        raise UsageError(f"{given[0]} alone is not enough: give --api-cert-file and --api-key-file")
    if given and service:
        raise UsageError(f"{given[0]} and --api-service: a certificate is given, or podgpu makes its own; keep one")
    if not given and not service:
        raise UsageError(
            f"{API_OPTION} needs a certificate: --api-cert-file and --api-key-file, or --api-service NAMESPACE/NAME "
            "for one of podgpu's own"
        )


def _api(options: Mapping[str, Any], address: Address, config: ApiConfig, at_the_end: ExitStack) -> ApiPart:
    trust = _trust(config, at_the_end)
    make_keeper = None
    if options["api_service"]:
        served = _served(options["api_service"])
        ca = OwnCa(served.names, socket.gethostname())
        read_pair = pair_of_own(lambda: ca.shown)
        services = api_services(options["external_metrics"])

        def make_keeper(client: ApiClient) -> BundleKeeper:
            return BundleKeeper(client, ca, services, served)

    else:
        read_pair = pair_of_files(Pem(file=options["api_cert_file"]), Pem(file=options["api_key_file"]))
    contexts = ApiContexts(read_pair, lambda: trust() or Trust())
    return ApiPart(
        address,
        contexts.now,
        trust,
        lambda: ApiClient(config),
        make_keeper,
        options["external_metrics"],
    )


def api_services(external: bool) -> tuple[str, ...]:
    """Names of the APIServices that lead to podgpu."""
    custom = tuple(f"{version}.{CUSTOM}" for version in CUSTOM_VERSIONS)
    return (*custom, f"{EXTERNAL_VERSION}.{EXTERNAL}") if external else custom


def unregister(options: Mapping[str, Any]) -> None:
    """Those that are not there, or are somebody else's, are left alone. Raises StartError."""
    served, config = _served(options["api_service"]), api_config(options["kubeconfig"])

    async def remove_all() -> None:
        async with ApiClient(config) as client:
            for name in api_services(options["external_metrics"]):
                _log.info("the APIService %s: %s", name, await remove_service(client, name, served))

    try:
        asyncio.run(remove_all())
    except SourceError as error:
        names = " ".join(api_services(options["external_metrics"]))
        raise StartError(f"{error}; by hand: kubectl delete apiservice {names}") from error


def _served(text: str) -> Served:
    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name or "/" in name or not text.isascii():
        raise UsageError(f"--api-service {text!r}: write NAMESPACE/NAME of the Service")
    return Served(namespace, name)


def _trust(config: ApiConfig, at_the_end: ExitStack) -> Callable[[], Trust | None]:
    selector = {"fieldSelector": f"metadata.name={CONFIG_NAME}"}
    watcher: Informer[Trust] = Informer(config, _CONFIGMAPS, selector, parse_trust)
    at_the_end.callback(watcher.close)
    return lambda: next(iter(watcher.items()), None)
