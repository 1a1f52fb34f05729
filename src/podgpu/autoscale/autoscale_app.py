"""This module puts `podgpu autoscale` on its addresses: KEDA's, the metrics API's, and a plain one for probes and own
metrics."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from podgpu import __version__
from podgpu.autoscale.external_scaler import ExternalScaler, start_scaler, stop_scaler
from podgpu.autoscale.front_proxy import Trust
from podgpu.autoscale.gate import ApiGate
from podgpu.autoscale.metrics_api import MetricsApi
from podgpu.autoscale.own_ca import BundleKeeper
from podgpu.autoscale.refusal import Refusal
from podgpu.autoscale.reviews import Reviews
from podgpu.autoscale.scene import Store
from podgpu.cluster.loop import Cluster
from podgpu.kube.client import ApiClient
from podgpu.metrics import families as f
from podgpu.metrics.encode import NO_LABELS, Exposition, Family, Labels, Sample, encode
from podgpu.web.app import PROBE_OPTION, Listener, make_application
from podgpu.web.connections import MakeTlsContext
from podgpu.web.responses import metrics_response, probe_routes
from podgpu.web.sockets import Address

KEDA_OPTION = "--keda-address"
API_OPTION = "--api-address"
_REVIEW_SECONDS = 5.0
_log = logging.getLogger("podgpu")


@dataclass(frozen=True, slots=True)
class KedaPart:
    scaler: ExternalScaler
    address: Address
    credentials: Callable[[], Any] | None
    """gRPC's, for a listener that asks for certificates."""


@dataclass(frozen=True, slots=True)
class ApiPart:
    address: Address
    tls: MakeTlsContext
    trust: Callable[[], Trust | None]
    """None: the API server has not told yet."""
    make_client: Callable[[], ApiClient]
    make_keeper: Callable[[ApiClient], BundleKeeper] | None = None
    external: bool = False


@dataclass(slots=True)
class Autoscale:
    """Everything that answers. What belongs to an event loop is made when that runs."""

    store: Store
    cluster: Cluster
    keda: KedaPart | None = None
    api: ApiPart | None = None
    _client: ApiClient | None = None
    _reviews: Reviews | None = None
    _keeper: BundleKeeper | None = None
    _api_calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def listeners(self, probe_address: Address) -> list[Listener]:
        plain = make_application(
            [
                web.get("/metrics", self._metrics),
                *probe_routes(self._live, self._ready),
            ],
            None,
        )
        plain.cleanup_ctx.append(self._beside)
        listeners = [Listener(plain, probe_address, PROBE_OPTION, announcement="probes and own metrics on %s/metrics")]
        if self.api is not None:
            gate = ApiGate(self._trust, self._current_reviews)
            served = MetricsApi(self.store, gate, external=self.api.external)
            self._api_calls = served.calls
            words = "the custom metrics API on %s"
            listeners.append(Listener(served.application(), self.api.address, API_OPTION, self.api.tls, words))
        return listeners

    async def _beside(self, _app: web.Application) -> AsyncIterator[None]:
        """While the plain listener stands: KEDA's server, and what asks the API server."""
        async with AsyncExitStack() as at_the_end:
            if self.api is not None:
                self._client = self.api.make_client()
                self._client.deadline = _REVIEW_SECONDS
                at_the_end.push_async_callback(self._client.close)
                self._reviews = Reviews(self._client)
                if self.api.make_keeper is not None:
                    self._keeper = self.api.make_keeper(self._client)
                    at_the_end.push_async_callback(_cancelled, asyncio.create_task(self._keeper.run()))
            if self.keda is not None:
                credentials = self.keda.credentials() if self.keda.credentials is not None else None
                server, bound = await start_scaler(self.keda.scaler, self.keda.address, credentials, KEDA_OPTION)
                at_the_end.push_async_callback(stop_scaler, server)
                _log.info("KEDA's external scaler on %s", bound.url)
            yield

    def _current_reviews(self) -> Reviews:
        assert self._reviews is not None, "requests come after the start"
        return self._reviews

    def _trust(self) -> Trust:
        trust = self.api.trust() if self.api is not None else None
        return trust or Trust()

    # Probes

    def _live(self) -> tuple[bool, str]:
        """Nodes that are away are no reason to restart us; a loop that stands still is."""
        return (True, "OK\n") if self.cluster.turns else (False, "the rounds stand still\n")

    def _ready(self) -> tuple[bool, str]:
        """I can answer. Whether there are figures is each metric's own answer."""
        if self.api is not None and self.api.trust() is None:
            return (
                False,
                "the API server has not yet said whom to trust (ConfigMap extension-apiserver-authentication)\n",
            )
        if self._keeper is not None and not self._keeper.are_known:
            return False, "the APIServices do not know podgpu's authority yet\n"
        return True, "OK\n"

    # Metrics

    async def _metrics(self, request: web.Request) -> web.Response:
        return await metrics_response(request, Exposition.of(encode(self.families())))

    def families(self) -> list[Family]:
        calls = Counter(self._api_calls)
        if self.keda is not None:
            calls.update({(f"keda {method}", code): count for (method, code), count in self.keda.scaler.calls.items()})
        requests = [
            Sample(Labels((("api", api), ("code", code))), float(count)) for (api, code), count in sorted(calls.items())
        ]
        version = Labels((("version", __version__), ("python_version", platform.python_version())))
        return [
            f.AUTOSCALE_BUILD_INFO.of([Sample(version, 1.0)]),
            f.AUTOSCALE_REQUESTS.of(requests),
            *self._scene_families(),
        ]

    def _scene_families(self) -> list[Family]:
        try:
            scene = self.store.scene()
        except Refusal:
            return []
        values = {
            f.AUTOSCALE_ROUND_TIMESTAMP: scene.ends_at,
            f.AUTOSCALE_PODS: len(scene.holding),
            f.AUTOSCALE_PODS_LEFT_OUT: scene.pod_rings.left_out,
            f.AUTOSCALE_OLD_NODES: len(scene.old_nodes),
            f.AUTOSCALE_PODS_SYNCED: 0 if scene.pods.trouble else 1,
        }
        return [spec.of([Sample(NO_LABELS, float(value))]) for spec, value in values.items()]


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
