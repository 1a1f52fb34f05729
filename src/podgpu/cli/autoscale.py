"""`podgpu autoscale`: GPU metrics of workloads for KEDA and the HPA."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import click

from podgpu.autoscale.authentication import CONFIG_NAME, CONFIG_NAMESPACE, TrustConfig, parse_trust_config
from podgpu.autoscale.certificates import CaBundleUpdater, CertificateIssuer, ServiceName, remove_api_service
from podgpu.autoscale.keda import KEDA_OPTION, ExternalScaler, KedaCallers, KedaTls
from podgpu.autoscale.metrics import PROFILING_METRICS
from podgpu.autoscale.metrics_api import API_OPTION
from podgpu.autoscale.pods import NodeWatcher, PodWatcher
from podgpu.autoscale.requests import CUSTOM_GROUP, CUSTOM_VERSIONS, EXTERNAL_GROUP, EXTERNAL_VERSION
from podgpu.autoscale.server import ApiPart, AutoscaleServer, KedaPart, make_api_tls
from podgpu.autoscale.store import SampleStore
from podgpu.cli.cluster import check_backend, choose_ages, choose_collector
from podgpu.cli.options import EXPORTER_ACCESS_FLAGS, make_command, options_of
from podgpu.cli.terminal import configure_logging
from podgpu.cluster.loop import Cluster, MakeCollector
from podgpu.cluster.settings import MAX_ROUNDS, ViewSettings, check_settings, duration_text
from podgpu.errors import SourceError, StartError, UsageError
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig, require_config
from podgpu.kube.reflector import Informer
from podgpu.tls import Pem
from podgpu.web.app import PROBE_OPTION, run
from podgpu.web.sockets import Address, parse_address

_CONFIGMAPS = f"/api/v1/namespaces/{CONFIG_NAMESPACE}/configmaps"
_log = logging.getLogger("podgpu")


@make_command(
    "autoscale",
    options_of("autoscale", ("kubeconfig", "debug", "log-format", *EXPORTER_ACCESS_FLAGS)),
    (
        "podgpu autoscale --discover-kubernetes podgpu/app.kubernetes.io/name=podgpu --keda-namespaces serving",
        "serve KEDA on this machine, with metrics read from the exporters",
    ),
    (
        "podgpu autoscale --prometheus prometheus:9090 --api-address :6443 --api-service podgpu/podgpu-autoscale",
        "serve the custom metrics API of the Service podgpu-autoscale, with a certificate created by podgpu",
    ),
    (
        "podgpu autoscale --unregister --api-service podgpu/podgpu-autoscale",
        "remove podgpu's APIServices before uninstalling it",
    ),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Provide GPU metrics to KEDA (external scaler) and to the HPA (custom metrics API).

    Give exactly one of --prometheus, --scrape and --discover-kubernetes. Running pods are read from the API server.
    """
    configure_logging(options["log_format"], options["debug"])
    probe_address = parse_address(options["probe_address"], PROBE_OPTION)
    if options["unregister"]:
        unregister(options)
        return
    settings = _make_settings(options, *choose_ages(ctx, options))
    check_backend(ctx, options)
    _run(options, settings, probe_address)


def _make_settings(options: Mapping[str, Any], stale_after: float, drop_after: float) -> ViewSettings:
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
            extra_fields=tuple(metric.field for metric in PROFILING_METRICS),
            window=interval,
        )
    )


def _run(options: Mapping[str, Any], settings: ViewSettings, probe_address: Address) -> None:
    """Runs until SIGINT or SIGTERM. Raises UsageError and StartError."""
    with ExitStack() as stack:
        make_collector = choose_collector({**options, "owners": "none"}, settings, stack)
        server = make_server(options, settings, make_collector, stack)
        run(server.cluster, server.listeners(probe_address))


def make_server(
    options: Mapping[str, Any], settings: ViewSettings, make_collector: MakeCollector, stack: ExitStack
) -> AutoscaleServer:
    """Raises UsageError."""
    keda = _parse_keda(options)
    api_address = _parse_optional_address(options["api_address"], API_OPTION)
    _check_api(options, api_address)
    if keda is None and api_address is None:
        raise UsageError(f"{KEDA_OPTION} and {API_OPTION} are both none: there is nothing to serve")
    config = require_config(options["kubeconfig"])
    pods, nodes = PodWatcher(config), NodeWatcher(config)
    stack.callback(pods.close)
    stack.callback(nodes.close)
    store = SampleStore(settings, options["longest_window"], pods.current, nodes.current)
    cluster = Cluster(make_collector, settings, on_round=store.add_round)
    return AutoscaleServer(
        store,
        cluster,
        KedaPart(ExternalScaler(store, keda[1]), keda[0], keda[2]) if keda is not None else None,
        _make_api(options, api_address, config, stack) if api_address is not None else None,
    )


def _parse_optional_address(text: str, option: str) -> Address | None:
    return None if text.strip().lower() in ("none", "") else parse_address(text, option)


def _parse_keda(options: Mapping[str, Any]) -> tuple[Address, KedaCallers, Callable[[], Any] | None] | None:
    address = _parse_optional_address(options["keda_address"], KEDA_OPTION)
    files = [options[name] for name in ("keda_cert_file", "keda_key_file", "keda_client_ca_file")]
    if address is None:
        return None
    names, namespaces = _split_names(options["keda_client_name"]), _split_names(options["keda_namespaces"])
    if all(files):
        if namespaces:
            raise UsageError("--keda-namespaces applies only without client certificates: remove it")
        certificate, key, client_ca = (Pem(file=file) for file in files)
        tls = KedaTls(certificate, key, client_ca)
        return address, KedaCallers(by_certificate=True, names=names), tls.make_credentials
    if any(files) or names:
        raise UsageError(
            "client certificates need all of --keda-cert-file, --keda-key-file and --keda-client-ca-file: "
            "give them all, or none"
        )
    if not _is_loopback(address.host):
        raise UsageError(
            f"{KEDA_OPTION} {address.host or '(every interface)'}:{address.port} can be reached by other machines, "
            "and any client could read any namespace: set --keda-cert-file, --keda-key-file and --keda-client-ca-file, "
            f"listen on 127.0.0.1, or disable it with {KEDA_OPTION} none"
        )
    if not namespaces:
        _log.warning("%s: no namespace is served: give client certificates or --keda-namespaces", KEDA_OPTION)
    return address, KedaCallers(by_certificate=False, namespaces=namespaces), None


def _split_names(text: str) -> frozenset[str]:
    return frozenset(filter(None, (name.strip() for name in text.split(","))))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        raise UsageError(
            f"{given[0]} and --api-service cannot be combined: use certificate files, or podgpu's own certificate"
        )
    if not given and not service:
        raise UsageError(
            f"{API_OPTION} needs a certificate: --api-cert-file and --api-key-file, or --api-service NAMESPACE/NAME "
            "for podgpu's own certificate"
        )


def _make_api(options: Mapping[str, Any], address: Address, config: ApiConfig, stack: ExitStack) -> ApiPart:
    trust = _watch_trust(config, stack)
    make_updater = None
    if options["api_service"]:
        service = _parse_service(options["api_service"])
        issuer = CertificateIssuer(service.host_names, socket.gethostname())
        services = api_services(options["external_metrics"])

        def make_updater(client: ApiClient) -> CaBundleUpdater:
            return CaBundleUpdater(client, issuer, services, service)

        def pair() -> tuple[Pem, Pem]:
            issued = issuer.current
            return Pem(text=issued.certificate, origin="podgpu's certificate"), Pem(text=issued.key, origin="its key")

    else:
        files = Pem(file=options["api_cert_file"]), Pem(file=options["api_key_file"])

        def pair() -> tuple[Pem, Pem]:
            return files

    tls = make_api_tls(pair, lambda: trust() or TrustConfig())
    return ApiPart(
        address,
        tls,
        trust,
        lambda: ApiClient(config),
        make_updater,
        options["external_metrics"],
    )


def api_services(external: bool) -> tuple[str, ...]:
    """Returns the names of podgpu's APIServices."""
    custom = tuple(f"{version}.{CUSTOM_GROUP}" for version in CUSTOM_VERSIONS)
    return (*custom, f"{EXTERNAL_VERSION}.{EXTERNAL_GROUP}") if external else custom


def unregister(options: Mapping[str, Any]) -> None:
    """Removes podgpu's APIServices, but not those of other Services. Raises StartError."""
    service, config = _parse_service(options["api_service"]), require_config(options["kubeconfig"])

    async def remove_all() -> None:
        async with ApiClient(config) as client:
            for name in api_services(options["external_metrics"]):
                _log.info("APIService %s: %s", name, await remove_api_service(client, name, service))

    try:
        asyncio.run(remove_all())
    except SourceError as error:
        names = " ".join(api_services(options["external_metrics"]))
        raise StartError(f"{error}; remove them with: kubectl delete apiservice {names}") from error


def _parse_service(text: str) -> ServiceName:
    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name or "/" in name or not text.isascii():
        raise UsageError(f"--api-service {text!r}: must be NAMESPACE/NAME of the Service")
    return ServiceName(namespace, name)


def _watch_trust(config: ApiConfig, stack: ExitStack) -> Callable[[], TrustConfig | None]:
    selector = {"fieldSelector": f"metadata.name={CONFIG_NAME}"}
    watcher: Informer[TrustConfig] = Informer(config, _CONFIGMAPS, selector, parse_trust_config)
    stack.callback(watcher.close)
    return lambda: next(iter(watcher.items()), None)
