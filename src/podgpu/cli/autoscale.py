"""`podgpu autoscale`: GPU metrics of workloads for KEDA and the HPA."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import click

from podgpu.autoscale.certificates import CaBundleUpdater, ServiceName, issue
from podgpu.autoscale.keda import KEDA_OPTION, ExternalScaler, load_credentials
from podgpu.autoscale.metrics import PROFILING_METRICS
from podgpu.autoscale.metrics_api import API_OPTION, FrontProxy, MetricsApi, parse_front_proxy
from podgpu.autoscale.pods import PodWatcher
from podgpu.autoscale.requests import CUSTOM_GROUP, CUSTOM_VERSIONS
from podgpu.autoscale.samples import SampleStore
from podgpu.autoscale.server import AutoscaleServer
from podgpu.cli.cluster import check_backend, choose_collector, make_settings
from podgpu.cli.options import make_command, options_of
from podgpu.cli.terminal import configure_logging
from podgpu.cluster.collect import MAX_ROUNDS, ViewSettings, duration_text
from podgpu.cluster.loop import Cluster, MakeCollector
from podgpu.errors import UsageError
from podgpu.kube.client import ApiClient
from podgpu.kube.config import is_loopback, load_config
from podgpu.kube.reflector import Informer
from podgpu.tls import Pem
from podgpu.web.app import Address, run

API_SERVICES = tuple(f"{version}.{CUSTOM_GROUP}" for version in CUSTOM_VERSIONS)
_CONFIGMAP = "extension-apiserver-authentication"
_CONFIGMAPS = "/api/v1/namespaces/kube-system/configmaps"
_log = logging.getLogger("podgpu")


@make_command(
    "autoscale",
    options_of("autoscale", ("kubeconfig", "debug", "log-format")),
    (
        "podgpu autoscale --discover-kubernetes podgpu/app.kubernetes.io/name=podgpu",
        "serve KEDA on this machine, with metrics read from the exporters",
    ),
    (
        "podgpu autoscale --prometheus prometheus:9090 --api-address :6443 --api-service podgpu/podgpu-autoscale",
        "serve the custom metrics API of the Service podgpu-autoscale, with a certificate created by podgpu",
    ),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Provide GPU metrics to KEDA (external scaler) and to the HPA (custom metrics API).

    Give exactly one of --prometheus, --scrape or --discover-kubernetes. Running pods are read from the API server.
    """
    configure_logging(options["log_format"], options["debug"])
    interval, longest = options["interval"], options["longest_window"]
    if longest / interval > MAX_ROUNDS:
        raise UsageError(
            f"--longest-window {duration_text(longest)} holds more than {MAX_ROUNDS} readings of --interval "
            f"{duration_text(interval)}: make the window shorter or the interval longer"
        )
    extra_fields = tuple(metric.field for metric in PROFILING_METRICS)
    settings = make_settings(ctx, options, extra_fields=extra_fields, window=interval)
    check_backend(ctx, options)
    with ExitStack() as stack:
        make_collector = choose_collector({**options, "owners": "none"}, settings, stack)
        server = _make_server(options, settings, make_collector, stack)
        run([server.cluster], server.listeners(options["probe_address"], options["api_address"]))


def _make_server(
    options: Mapping[str, Any], settings: ViewSettings, make_collector: MakeCollector, stack: ExitStack
) -> AutoscaleServer:
    keda_address, api_address = options["keda_address"], options["api_address"]
    if keda_address is None and api_address is None:
        raise UsageError(f"{KEDA_OPTION} and {API_OPTION} are both none: there is nothing to serve")
    if api_address is None and any(options[name] for name in ("api_cert_file", "api_key_file", "api_service")):
        raise UsageError(f"--api-cert-file, --api-key-file and --api-service have no effect if {API_OPTION} is none")
    keda_tls = _make_keda_tls(options, keda_address) if keda_address is not None else None
    service = _parse_api_certificate(options) if api_address is not None else None
    config = load_config(options["kubeconfig"])
    pods = PodWatcher(config)
    stack.callback(pods.informer.close)
    store = SampleStore(settings, options["longest_window"], pods.current)
    scaler = api = updater = None
    if keda_address is not None:
        names = frozenset(filter(None, map(str.strip, options["keda_client_name"].split(","))))
        scaler = ExternalScaler(store, keda_address, keda_tls, names)
    if api_address is not None:
        selector = {"fieldSelector": f"metadata.name={_CONFIGMAP}"}
        watcher: Informer[FrontProxy] = Informer(config, _CONFIGMAPS, selector, parse_front_proxy)
        stack.callback(watcher.close)
        certificate, key = Pem(file=options["api_cert_file"]), Pem(file=options["api_key_file"])
        if service is not None:
            own, certificate, key = issue(service.host, socket.gethostname())
            updater = CaBundleUpdater(ApiClient(config), own, API_SERVICES, service)
        api = MetricsApi(store, certificate, key, lambda: next(iter(watcher.items()), None))
    cluster = Cluster(make_collector, settings, on_round=store.add_round)
    return AutoscaleServer(store, cluster, scaler, api, updater)


def _make_keda_tls(options: Mapping[str, Any], address: Address) -> Any:
    """Returns None for a server without TLS, which is allowed only on a loopback address."""
    files = [options[name] for name in ("keda_cert_file", "keda_key_file", "keda_client_ca_file")]
    if all(files):
        certificate, key, client_ca = (Pem(file=file) for file in files)
        return load_credentials(certificate, key, client_ca)
    if any(files) or options["keda_client_name"] or not is_loopback(address.host):
        raise UsageError(
            f"{KEDA_OPTION} {address.host or '(every interface)'}:{address.port} needs all of --keda-cert-file, "
            f"--keda-key-file and --keda-client-ca-file. Without certificates, use 127.0.0.1:{address.port} or none"
        )
    return None


def _parse_api_certificate(options: Mapping[str, Any]) -> ServiceName | None:
    """Returns the Service for which podgpu creates a certificate, or None if the certificate is in files."""
    files = [options[name] for name in ("api_cert_file", "api_key_file")]
    if all(files) and not options["api_service"]:
        return None
    if any(files) or not options["api_service"]:
        raise UsageError(
            f"{API_OPTION} needs a certificate: either --api-cert-file and --api-key-file, or --api-service "
            "NAMESPACE/NAME for podgpu's own certificate"
        )
    namespace, _, name = options["api_service"].partition("/")
    if not namespace or not name or "/" in name:
        raise UsageError(f"--api-service {options['api_service']!r}: must be NAMESPACE/NAME of the Service")
    return ServiceName(namespace, name)
