"""`podgpu autoscale`: serves GPU metrics of workloads to KEDA and the HPA."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any

import click
from aiohttp import web

from podgpu.cli.cluster import choose_collector, make_settings
from podgpu.cli.options import Options, make_command, split_list
from podgpu.errors import UsageError
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings, check_window
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig, is_loopback, load_config
from podgpu.kube.reflector import Informer
from podgpu.metrics.encode import NO_LABELS, VERSIONS, Family, Labels, Sample, make_families
from podgpu.scale.catalogue import PROFILING_METRICS
from podgpu.scale.keda import KEDA_OPTION, ExternalScaler, load_credentials
from podgpu.scale.metrics_api import (
    API_OPTION,
    CaBundleUpdater,
    FrontProxy,
    MetricsApi,
    issue,
    parse_front_proxy,
)
from podgpu.scale.pods import PodWatcher
from podgpu.scale.requests import API_GROUP, API_VERSIONS, Refusal
from podgpu.scale.samples import SampleStore
from podgpu.tls import Pem
from podgpu.web.app import PROBE_OPTION, Address, Listener, make_application, run
from podgpu.web.responses import metrics_route, probe_routes

API_SERVICES = tuple(f"{version}.{API_GROUP}" for version in API_VERSIONS)
_CONFIGMAP = "extension-apiserver-authentication"
_CONFIGMAPS = "/api/v1/namespaces/kube-system/configmaps"
_log = logging.getLogger("podgpu")


@make_command(
    "autoscale",
    (
        "podgpu autoscale --discover-kubernetes podgpu/app.kubernetes.io/name=podgpu",
        "serve KEDA on this machine, with metrics read from the exporters",
    ),
    (
        "podgpu autoscale --prometheus prometheus:9090 --api-address :6443 "
        "--api-service podgpu/podgpu-autoscale",
        "serve the custom metrics API of the Service podgpu-autoscale, "
        "with a certificate created by podgpu",
    ),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Provide GPU metrics to KEDA (external scaler) and to the HPA (custom metrics API).

    Give exactly one of --prometheus, --scrape or --discover-kubernetes. Running pods are read from
    the API server.
    """
    interval = options["interval"]
    check_window("--longest-window", options["longest_window"], interval)
    extra_fields = tuple(metric.field for metric in PROFILING_METRICS)
    settings = make_settings(
        ctx, options, extra_fields=extra_fields, window=interval, one_cluster=True
    )

    with ExitStack() as stack:
        server = _make_server(options, settings, stack)
        run([server.cluster], server.listeners(options["probe_address"], options["api_address"]))


def _make_server(options: Options, settings: ViewSettings, stack: ExitStack) -> AutoscaleServer:
    make_collector = choose_collector(options, settings, stack)
    keda_address = options["keda_address"]
    api_address = options["api_address"]
    if keda_address is None and api_address is None:
        raise UsageError(f"{KEDA_OPTION} and {API_OPTION} are both none: there is nothing to serve")
    # All options are checked before the API server is used.
    keda_tls = None
    if keda_address is not None:
        keda_tls = _make_keda_tls(options, keda_address)
    _check_api_certificate(options)

    config = load_config(options["kubeconfig"])
    pods = PodWatcher(config)
    stack.callback(pods.informer.close)
    store = SampleStore(settings, options["longest_window"], pods.current)
    scaler = None
    api = None
    updater = None
    if keda_address is not None:
        client_names = frozenset(split_list(options["keda_client_name"]))
        scaler = ExternalScaler(store, keda_address, keda_tls, client_names)
    if api_address is not None:
        api, updater = _make_api(options, config, store, stack)

    cluster = Cluster(make_collector, settings)
    cluster.readers.append(store.add_round)
    return AutoscaleServer(store, cluster, scaler, api, updater)


def _make_api(
    options: Options, config: ApiConfig, store: SampleStore, stack: ExitStack
) -> tuple[MetricsApi, CaBundleUpdater | None]:
    selector = {"fieldSelector": f"metadata.name={_CONFIGMAP}"}
    watcher: Informer[FrontProxy] = Informer(config, _CONFIGMAPS, selector, parse_front_proxy)
    stack.callback(watcher.close)

    def find_proxy() -> FrontProxy | None:
        # The field selector matches at most one object.
        for proxy in watcher.items():
            return proxy
        return None

    pem = Pem(file=options["api_cert_file"])
    key = Pem(file=options["api_key_file"])
    updater = None
    service = options["api_service"]
    if service:
        namespace, _, name = service.partition("/")
        certificate, pem, key = issue(f"{name}.{namespace}.svc", socket.gethostname())
        # The API server trusts only what is in the caBundle of the APIService.
        updater = CaBundleUpdater(ApiClient(config), certificate, API_SERVICES, service)
    return MetricsApi(store, pem, key, find_proxy), updater


def _make_keda_tls(options: Options, address: Address) -> Any:
    """Returns the TLS credentials, or None for plain gRPC.

    Plain gRPC is allowed only on a loopback address.
    """
    files = [options[name] for name in ("keda_cert_file", "keda_key_file", "keda_client_ca_file")]
    if all(files):
        certificate, key, client_ca = [Pem(file=file) for file in files]
        return load_credentials(certificate, key, client_ca)
    if any(files) or options["keda_client_name"] or not is_loopback(address.host):
        raise UsageError(
            f"{KEDA_OPTION} {address.host or '(every interface)'}:{address.port} needs all of "
            "--keda-cert-file, --keda-key-file and --keda-client-ca-file. "
            f"Without certificates, use 127.0.0.1:{address.port} or none"
        )
    return None


def _check_api_certificate(options: Options) -> None:
    files = [options["api_cert_file"], options["api_key_file"]]
    service = options["api_service"]
    if options["api_address"] is None:
        if any(files) or service:
            ignored = "--api-cert-file, --api-key-file and --api-service"
            raise UsageError(f"{ignored} have no effect if {API_OPTION} is none")
        return

    is_missing = not service and not all(files)
    is_doubled = service and any(files)
    if is_missing or is_doubled:
        raise UsageError(
            f"{API_OPTION} needs a certificate: either --api-cert-file and --api-key-file, "
            "or --api-service NAMESPACE/NAME for podgpu's own certificate"
        )

    if service and not re.fullmatch("[^/]+/[^/]+", service):
        raise UsageError(f"--api-service {service!r}: must be NAMESPACE/NAME of the Service")


# The servers: KEDA's scaler, the metrics API, and HTTP for probes and podgpu's own metrics


@dataclass(frozen=True, slots=True)
class AutoscaleServer:
    store: SampleStore
    cluster: Cluster
    scaler: ExternalScaler | None = None
    api: MetricsApi | None = None
    # None if the certificate of the metrics API comes from files.
    updater: CaBundleUpdater | None = None

    def listeners(self, probe_address: Address, api_address: Address | None) -> list[Listener]:
        routes = [metrics_route(self.families), *probe_routes(self._check_live, self._check_ready)]
        plain = make_application(routes, None)
        plain.cleanup_ctx.append(self._run_services)
        text = "serving probes and podgpu's own metrics on %s/metrics"
        listeners = [Listener(plain, probe_address, PROBE_OPTION, announcement=text)]

        if self.api is not None and api_address is not None:
            app = self.api.application()
            text = "serving the custom metrics API on %s"
            listeners.append(Listener(app, api_address, API_OPTION, self.api.tls, text))
        return listeners

    async def _run_services(self, _app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self.updater is not None:
                stack.push_async_callback(self.updater.client.close)
                stack.callback(asyncio.create_task(self.updater.run()).cancel)

            if self.scaler is not None:
                bound = await self.scaler.start()
                stack.push_async_callback(self.scaler.stop)
                _log.info("serving KEDA's external scaler on %s", bound.url)
            yield

    def _check_live(self) -> tuple[bool, str]:
        if self.cluster.is_on_time:
            return True, "OK\n"
        return False, "the cluster loop is stuck\n"

    def _check_ready(self) -> tuple[bool, str]:
        if self.api is not None and self.api.find_proxy() is None:
            return False, "the ConfigMap extension-apiserver-authentication has not been read yet\n"
        if self.updater is not None and not self.updater.ready:
            return False, "the APIServices do not have podgpu's certificate yet\n"
        return True, "OK\n"

    def families(self) -> list[Family]:
        samples = {
            "podgpu_autoscale_build_info": [Sample(VERSIONS, 1.0)],
            "podgpu_autoscale_requests_total": self._sample_calls(),
        }
        try:
            snapshot = self.store.snapshot()
        except Refusal:
            # There is no snapshot yet.
            return make_families("autoscale", samples)

        pods = [pod for _, pod in snapshot.last.rows if pod]
        values = {
            "podgpu_autoscale_round_timestamp_seconds": snapshot.ends_at,
            "podgpu_autoscale_pods": len(pods),
            "podgpu_autoscale_old_nodes": len(snapshot.stale_nodes),
            "podgpu_autoscale_pods_synced": 0 if snapshot.pods.trouble else 1,
        }
        for name, value in values.items():
            samples[name] = [Sample(NO_LABELS, float(value))]
        return make_families("autoscale", samples)

    def _sample_calls(self) -> list[Sample]:
        calls: list[tuple[tuple[str, str], int]] = []
        if self.api is not None:
            calls += self.api.calls.items()
        if self.scaler is not None:
            calls += self.scaler.calls.items()

        samples = []
        for (api, code), count in sorted(calls):
            labels = Labels((("api", api), ("code", code)))
            samples.append(Sample(labels, float(count)))
        return samples
