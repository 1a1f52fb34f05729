"""The process that `bench/autoscale.py` measures: the store, full of rounds of made-up nodes, behind both listeners,
with certificates and the API server's reviews as in a cluster."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from sys import intern

import podgpu.cli.autoscale  # noqa: F401  (what the command imports is part of its memory)
from podgpu.autoscale.api_tls import ApiContexts, pair_of_files
from podgpu.autoscale.external_scaler import Callers, ExternalScaler, start_scaler
from podgpu.autoscale.front_proxy import Trust
from podgpu.autoscale.gate import ApiGate
from podgpu.autoscale.metrics import FIELDS_BESIDE
from podgpu.autoscale.metrics_api import MetricsApi
from podgpu.autoscale.pods import PodSeen, index_pods
from podgpu.autoscale.reviews import Reviews
from podgpu.autoscale.scaler_tls import ScalerFiles, ScalerTls
from podgpu.autoscale.scene import Store
from podgpu.clock import Clock
from podgpu.cluster.collect import ClusterReading, NodeReading
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import build_cluster_state
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.metrics.fields import fields
from podgpu.model import DeviceState, Holder, HolderUsage, NodeState
from podgpu.tls import Pem
from podgpu.web.app import Listener, listening
from podgpu.web.connections import ConnectionLimits
from podgpu.web.sockets import Address

GPUS = 8
WORKLOADS = 100
"""Deployments, each with its part of all pods; every pod has the label `all` too."""
_ROUNDS = 44
_BEGAN = 1_700_000_100.0


class _Time:
    now = 0.0


def _workload(number: int) -> str:
    return f"inference-{number % WORKLOADS}"


def namespace_of(number: int, namespaces: int) -> str:
    """Deployments have their namespaces in turn."""
    return intern(f"serving-{number % WORKLOADS % namespaces}")


def _pods(count: int, namespaces: int) -> list[PodSeen]:
    return [
        PodSeen(
            namespace_of(number, namespaces),
            intern(f"pod-{number}"),
            f"node-{number // GPUS}",
            _BEGAN - 3600,
            "Deployment",
            _workload(number),
            True,
            (("all", "pods"), ("app", _workload(number))),
        )
        for number in range(count)
    ]


def _reading(count: int, namespaces: int, turn: int, now: float) -> ClusterReading:
    nodes = []
    for first in range(0, count, GPUS):
        devices = tuple(_device(n, namespaces, turn) for n in range(first, min(first + GPUS, count)))
        name = f"node-{first // GPUS}"
        state = NodeState(node=name, producer="podgpu", exporter_id=name, devices=devices, usage_at=_BEGAN + now)
        nodes.append(NodeReading(f"http://{name}:9400/metrics", state, read_at=now))
    return ClusterReading(tuple(nodes))


def _device(number: int, namespaces: int, turn: int) -> DeviceState:
    ratio = (number * 7 + turn * 13) % 100 / 100
    values = {fields()[field].name: ratio for field in FIELDS_BESIDE}
    usage = HolderUsage(
        utilization_ratio=ratio,
        memory_used_bytes=10**10,
        processes=1,
        busy_ns=round(turn * 15 * ratio * 1e9),
        idle_ns=0,
        energy_mj=turn * 5_000_000,
    )
    pod = namespace_of(number, namespaces), intern(f"pod-{number}"), "main"
    return DeviceState(
        uuid=intern(f"GPU-{number}"),
        index=number % GPUS,
        model="NVIDIA H100 80GB HBM3",
        utilization_ratio=ratio,
        memory_used_bytes=10**10,
        memory_total_bytes=8 * 10**10,
        power_mw=400_000,
        fields={**values, ViewSettings().used_field_name: 100 * ratio},
        holders=(Holder(*pod, source="kubelet", share_ratio=1.0, usage=usage),),
    )


def _filled(count: int, namespaces: int) -> tuple[Store, float]:
    """With a window's worth of rounds; and the seconds that the last one took to be taken in."""
    loop_time, clock = asyncio.get_running_loop().time, Clock(lambda: _Time.now, lambda: _BEGAN + _Time.now)
    settings = ViewSettings(fields_beside=FIELDS_BESIDE, window=ViewSettings().interval)
    running = index_pods(_pods(count, namespaces))
    store, state, seconds = Store(settings, 600.0, lambda: running, clock=clock), None, 0.0
    for turn in range(1, _ROUNDS + 1):
        _Time.now = turn * settings.interval
        reading = _reading(count, namespaces, turn, _Time.now)
        state = build_cluster_state(reading, state, settings, _Time.now, _BEGAN + _Time.now)
        began = loop_time()
        store.take(state)
        seconds = loop_time() - began
    _Time.now += settings.interval / 2
    return store, seconds


def _front_proxy(folder: Path) -> Trust:
    return Trust(
        (folder / "front-proxy.crt").read_text(),
        (folder / "client-ca.crt").read_text(),
        frozenset({"front-proxy-client"}),
        ("X-Remote-User",),
        ("X-Remote-Group",),
    )


async def main(count: int, namespaces: int, folder: Path, api_url: str) -> None:
    """`folder` has the certificates of tests/autoscale/authorities.py; `api_url` answers reviews."""
    store, seconds = _filled(count, namespaces)
    certificate, key = (Pem(file=str(folder / f"server.{ending}")) for ending in ("crt", "key"))
    client_ca = Pem(file=str(folder / "client-ca.crt"))
    credentials = ScalerTls(ScalerFiles(certificate, key, client_ca)).credentials()
    scaler = ExternalScaler(store, Callers(by_certificate=True))
    _, keda = await start_scaler(scaler, Address("127.0.0.1", 0), credentials, "--keda-address")
    trust = _front_proxy(folder)
    async with ApiClient(ApiConfig(api_url, "the benchmark")) as client:
        reviews = Reviews(client)
        app = MetricsApi(store, ApiGate(lambda: trust, lambda: reviews)).application()
        tls = ApiContexts(pair_of_files(certificate, key), lambda: trust).now
        async with listening(Listener(app, Address("127.0.0.1", 0), tls=tls), ConnectionLimits()) as bound:
            print(json.dumps({"https": bound.port, "grpc": keda.port, "take_seconds": seconds}), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
