"""The listeners of `podgpu autoscale`: KEDA's, the metrics API, and plain HTTP for probes and podgpu's own metrics."""

from __future__ import annotations

import asyncio
import logging
import platform
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

from podgpu import __version__
from podgpu.autoscale.authentication import ApiGate, Reviews, TrustConfig
from podgpu.autoscale.certificates import CaBundleUpdater
from podgpu.autoscale.keda import ExternalScaler, start_scaler, stop_scaler
from podgpu.autoscale.metrics_api import API_OPTION, MetricsApi
from podgpu.autoscale.refusal import Refusal
from podgpu.autoscale.store import SampleStore
from podgpu.cluster.loop import Cluster
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.metrics.encode import NO_LABELS, Exposition, Family, Labels, Sample, encode
from podgpu.metrics.families import make_families
from podgpu.tls import ContextCache, Pem, load_pair
from podgpu.web.app import PROBE_OPTION, Listener, make_application
from podgpu.web.connections import MakeTlsContext
from podgpu.web.responses import metrics_response, probe_routes
from podgpu.web.sockets import Address
from podgpu.web.web_config import LastValid

_REVIEW_SECONDS = 5.0
_log = logging.getLogger("podgpu")


# TLS of the metrics API


class ApiTlsMaterial(NamedTuple):
    certificate: bytes
    key: bytes
    names: str  # names of the certificate and key files, for messages
    client_cas: str


def make_api_context(material: ApiTlsMaterial) -> ssl.SSLContext:
    """Client certificates must be from one of `client_cas`. Clients may send a token instead. Raises SourceError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # No session resumption: resumed sessions have no verified chain, which identifies the front proxy.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    load_pair(context, material.certificate, material.key, material.names)
    if material.client_cas:
        context.verify_mode = ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in Go, an intermediate CA is sufficient
        try:
            context.load_verify_locations(cadata=material.client_cas)
        except (ssl.SSLError, ValueError) as error:
            raise SourceError("tls", "OpenSSL cannot parse the API server's CAs") from error
    return context


def make_api_tls(pair: Callable[[], tuple[Pem, Pem]], trust: Callable[[], TrustConfig]) -> MakeTlsContext:
    """`pair` returns the current certificate and key. Raises UsageError."""
    cache = ContextCache(make_api_context)

    def read() -> ssl.SSLContext:
        certificate, key = pair()
        names = f"{certificate.name} and {key.name}"
        return cache.get(ApiTlsMaterial(certificate.read(), key.read(), names, trust().client_cas))

    return LastValid(read, "the metrics API keeps its previous certificate and CAs").get


# The listeners


@dataclass(frozen=True, slots=True)
class KedaPart:
    scaler: ExternalScaler
    address: Address
    make_credentials: Callable[[], Any] | None  # None to serve without TLS


@dataclass(frozen=True, slots=True)
class ApiPart:
    address: Address
    tls: MakeTlsContext
    trust: Callable[[], TrustConfig | None]  # returns None until the ConfigMap has been read
    make_client: Callable[[], ApiClient]
    make_updater: Callable[[ApiClient], CaBundleUpdater] | None = None
    external: bool = False


@dataclass(slots=True)
class AutoscaleServer:
    """Creates the listeners. Objects that need a running event loop are created in `_run_services`."""

    store: SampleStore
    cluster: Cluster
    keda: KedaPart | None = None
    api: ApiPart | None = None
    _reviews: Reviews | None = None
    _updater: CaBundleUpdater | None = None
    _api_calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def listeners(self, probe_address: Address) -> list[Listener]:
        plain = make_application(
            [
                web.get("/metrics", self._get_metrics),
                *probe_routes(self._check_live, self._check_ready),
            ],
            None,
        )
        plain.cleanup_ctx.append(self._run_services)
        text = "serving probes and podgpu's own metrics on %s/metrics"
        listeners = [Listener(plain, probe_address, PROBE_OPTION, announcement=text)]
        if self.api is not None:
            served = MetricsApi(self.store, ApiGate(self._trust, self._get_reviews), external=self.api.external)
            self._api_calls = served.calls
            text = "serving the custom metrics API on %s"
            listeners.append(Listener(served.application(), self.api.address, API_OPTION, self.api.tls, text))
        return listeners

    async def _run_services(self, _app: web.Application) -> AsyncIterator[None]:
        """Runs KEDA's server and the updater of CA bundles while the plain listener is open."""
        async with AsyncExitStack() as stack:
            if self.api is not None:
                client = self.api.make_client()
                client.deadline = _REVIEW_SECONDS
                stack.push_async_callback(client.close)
                self._reviews = Reviews(client)
                if self.api.make_updater is not None:
                    self._updater = self.api.make_updater(client)
                    stack.push_async_callback(_cancel, asyncio.create_task(self._updater.run()))
            if self.keda is not None:
                make = self.keda.make_credentials
                credentials = make() if make is not None else None
                server, bound = await start_scaler(self.keda.scaler, self.keda.address, credentials)
                stack.push_async_callback(stop_scaler, server)
                _log.info("serving KEDA's external scaler on %s", bound.url)
            yield

    def _get_reviews(self) -> Reviews:
        assert self._reviews is not None, "requests are accepted only after the start"
        return self._reviews

    def _trust(self) -> TrustConfig:
        trust = self.api.trust() if self.api is not None else None
        return trust or TrustConfig()

    def _check_live(self) -> tuple[bool, str]:
        return (True, "OK\n") if self.cluster.turns else (False, "the cluster loop is stuck\n")

    def _check_ready(self) -> tuple[bool, str]:
        if self.api is not None and self.api.trust() is None:
            return False, "the ConfigMap extension-apiserver-authentication has not been read yet\n"
        if self._updater is not None and not self._updater.ready:
            return False, "the APIServices do not have podgpu's CA yet\n"
        return True, "OK\n"

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return await metrics_response(request, Exposition.of(encode(self.families())))

    def families(self) -> list[Family]:
        calls = Counter(self._api_calls)
        if self.keda is not None:
            calls.update({(f"keda {method}", code): count for (method, code), count in self.keda.scaler.calls.items()})
        requests = [
            Sample(Labels((("api", api), ("code", code))), float(count)) for (api, code), count in sorted(calls.items())
        ]
        version = Labels((("version", __version__), ("python_version", platform.python_version())))
        samples = {
            "podgpu_autoscale_build_info": [Sample(version, 1.0)],
            "podgpu_autoscale_requests_total": requests,
            **self._snapshot_samples(),
        }
        return make_families("autoscale", samples)

    def _snapshot_samples(self) -> dict[str, list[Sample]]:
        try:
            snapshot = self.store.snapshot()
        except Refusal:
            return {}
        values = {
            "podgpu_autoscale_round_timestamp_seconds": snapshot.ends_at,
            "podgpu_autoscale_pods": len(snapshot.holding),
            "podgpu_autoscale_old_nodes": len(snapshot.stale_nodes),
            "podgpu_autoscale_pods_synced": 0 if snapshot.pods.trouble else 1,
        }
        return {name: [Sample(NO_LABELS, float(value))] for name, value in values.items()}


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
