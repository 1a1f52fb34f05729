"""The servers of `podgpu autoscale`: KEDA's scaler, the metrics API, and HTTP for probes and podgpu's own metrics."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from aiohttp import web

from podgpu import __version__
from podgpu.autoscale.certificates import CaBundleUpdater
from podgpu.autoscale.keda import ExternalScaler
from podgpu.autoscale.metrics_api import API_OPTION, MetricsApi
from podgpu.autoscale.requests import CUSTOM_GROUP, Refusal
from podgpu.autoscale.samples import SampleStore
from podgpu.cluster.loop import Cluster
from podgpu.metrics.encode import NO_LABELS, Body, Family, Labels, Sample, encode, make_families
from podgpu.web.app import PROBE_OPTION, Address, Listener, make_application
from podgpu.web.responses import metrics_response, probe_routes

_log = logging.getLogger("podgpu")


@dataclass(frozen=True, slots=True)
class AutoscaleServer:
    store: SampleStore
    cluster: Cluster
    scaler: ExternalScaler | None = None
    api: MetricsApi | None = None
    updater: CaBundleUpdater | None = None  # None if the certificate of the metrics API comes from files

    def listeners(self, probe_address: Address, api_address: Address | None) -> list[Listener]:
        routes = [web.get("/metrics", self._get_metrics), *probe_routes(self._check_live, self._check_ready)]
        plain = make_application(routes, None)
        plain.cleanup_ctx.append(self._run_services)
        text = "serving probes and podgpu's own metrics on %s/metrics"
        listeners = [Listener(plain, probe_address, PROBE_OPTION, announcement=text)]
        if self.api is not None and api_address is not None:
            text, app = "serving the custom metrics API on %s", self.api.application()
            listeners.append(Listener(app, api_address, API_OPTION, self.api.tls, text))
        return listeners

    async def _run_services(self, _app: web.Application) -> AsyncIterator[None]:
        """Runs the external scaler for KEDA and the CA bundle updater while the plain HTTP listener is open."""
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
        return (True, "OK\n") if self.cluster.turns else (False, "the cluster loop is stuck\n")

    def _check_ready(self) -> tuple[bool, str]:
        if self.api is not None and self.api.find_proxy() is None:
            return False, "the ConfigMap extension-apiserver-authentication has not been read yet\n"
        if self.updater is not None and not self.updater.ready:
            return False, "the APIServices do not have podgpu's certificate yet\n"
        return True, "OK\n"

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return metrics_response(request, Body(encode(self.families())))

    def families(self) -> list[Family]:
        calls: Counter[tuple[str, str]] = Counter()
        if self.api is not None:
            calls.update({(CUSTOM_GROUP, code): count for code, count in self.api.calls.items()})
        if self.scaler is not None:
            calls.update({(f"keda {method}", code): count for (method, code), count in self.scaler.calls.items()})
        requests = [
            Sample(Labels((("api", api), ("code", code))), float(count)) for (api, code), count in sorted(calls.items())
        ]
        version = Labels((("version", __version__), ("python_version", platform.python_version())))
        samples = {
            "podgpu_autoscale_build_info": [Sample(version, 1.0)],
            "podgpu_autoscale_requests_total": requests,
        }
        with suppress(Refusal):  # there is no snapshot yet
            snapshot = self.store.snapshot()
            values = {
                "podgpu_autoscale_round_timestamp_seconds": snapshot.ends_at,
                "podgpu_autoscale_pods": sum(1 for _, pod in snapshot.last.rows if pod),
                "podgpu_autoscale_old_nodes": len(snapshot.stale_nodes),
                "podgpu_autoscale_pods_synced": 0 if snapshot.pods.trouble else 1,
            }
            samples |= {name: [Sample(NO_LABELS, float(value))] for name, value in values.items()}
        return make_families("autoscale", samples)
