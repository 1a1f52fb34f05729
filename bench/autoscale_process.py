"""The process that `bench/autoscale.py` measures: the store, full of rounds of made-up nodes, behind both listeners,
with certificates and the API server's reviews as in a cluster."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
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
from podgpu.cluster.reading import ClusterReading, NodeReading
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import Memory, assemble_use
from podgpu.figures.device import DeviceFigures, HolderFigures
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.model import Workload
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
        nodes.append(NodeReading(f"http://{name}:9400/metrics", name, devices=devices, read_at=now))
    return ClusterReading(tuple(nodes))


@cache
def _holder(number: int, namespaces: int) -> Workload:
    """Names are kept once however many rounds name them, as of expositions that are read."""
    return Workload(namespace_of(number, namespaces), intern(f"pod-{number}"), "main")


def _device(number: int, namespaces: int, turn: int) -> DeviceFigures:
    ratio = (number * 7 + turn * 13) % 100 / 100
    holder = HolderFigures(_holder(number, namespaces), ratio, 10**10, 1, turn * 15 * ratio, 0.0, turn * 5000.0, 1.0)
    return DeviceFigures(
        intern(f"GPU-{number}"),
        number % GPUS,
        "NVIDIA H100 80GB HBM3",
        utilization=ratio,
        memory_used=10**10,
        memory_total=8 * 10**10,
        power_watts=400.0,
        measured=100 * ratio,
        beside=tuple((field, ratio) for field in FIELDS_BESIDE),
        holders=(holder,),
    )


def _filled(count: int, namespaces: int) -> tuple[Store, float]:
    """With a window's worth of rounds; and the seconds that the last one took to be taken in."""
    loop_time, clock = asyncio.get_running_loop().time, Clock(lambda: _Time.now, lambda: _BEGAN + _Time.now)
    settings = ViewSettings(fields_beside=FIELDS_BESIDE, window=ViewSettings().interval)
    running = index_pods(_pods(count, namespaces))
    store, memory, seconds = Store(settings, 600.0, lambda: running, clock=clock), Memory(), 0.0
    for turn in range(1, _ROUNDS + 1):
        _Time.now = turn * settings.interval
        view = assemble_use(
            _reading(count, namespaces, turn, _Time.now), memory, settings, _Time.now, _BEGAN + _Time.now
        )
        began = loop_time()
        store.take(view)
        seconds = loop_time() - began
        del view  # a backend replaces one node's reading after the other
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
