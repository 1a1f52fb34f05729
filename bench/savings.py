"""Savings: what is found in a cluster with a planted truth, and the time for 8,000 pods.

`tests/past/planted.py` makes the pods: idle, oversized, shareable, and those that only look so.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from bench.figures import Figure, cpu_seconds
from podgpu.charge import Charge
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import NodeReading
from podgpu.fleet.state import ClusterState
from podgpu.model import MIB, DeviceState, PodName, WorkloadOwner
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.store import HistoryStore
from podgpu.past.busy_steps import HOUR_BYTES
from podgpu.past.savings.advice import make_savings
from podgpu.past.savings.savings import PodLoad, SavingsAnswer, SavingsQuery
from podgpu.past.sqlite.sqlite_loads import read_fleet_load
from podgpu.past.time_steps import HOUR
from tests.fleet.states import gpu, holder, node, state_of
from tests.past.planted import Truth, make_cluster

MIN_PRECISION = 95.0
MAX_SECONDS = 5.0
_SEEDS = range(44, 49)
_START = 1_794_700_800  # a UTC day begins
_GPUS_PER_NODE = 8
_PRICES = Prices("EUR", {"*": Price(2.0)}, "file")
_PER_POD = 1.7  # GPUs; the mean of planted pods is a little less


def measure(gpus: int = 1000, pods: int = 8000) -> list[Figure]:
    return [*_measure_truth(gpus), *_measure_sqlite(pods)]


def _measure_truth(gpus: int) -> Iterator[Figure]:
    """Counts the pods of several clusters."""
    meant: Counter[str] = Counter()
    right: Counter[str] = Counter()
    recommended = 0
    for seed in _SEEDS:
        truth = make_cluster(gpus, seed)
        answer = make_savings(SavingsQuery(), truth.fleet, "EUR")
        meant.update(kind for kind in truth.kinds.values() if kind != "keep")
        right.update(_find_right(truth, answer))
        recommended += sum(len(line.pods) for line in answer.advice)
    name = f"planted truth, {len(_SEEDS)} clusters of {gpus:,} GPUs"
    precision = 100 * right.total() / recommended
    yield Figure(f"{name}: precision", precision, "%", at_least=MIN_PRECISION)
    yield Figure("  recommended pods", recommended)
    for kind in meant:
        missed = 100 * (1 - right[kind] / meant[kind])
        yield Figure(f"  missed of {meant[kind]} pods to {kind}", missed, "%")


def _find_right(truth: Truth, answer: SavingsAnswer) -> Iterator[str]:
    for line in answer.advice:
        for pod in line.pods:
            if truth.kinds[pod.pod] == line.kind:
                yield line.kind


def _measure_sqlite(pods: int) -> Iterator[Figure]:
    truth = make_cluster(round(pods * _PER_POD), most_pods=pods)
    state = _make_state(truth)
    answers: list[SavingsAnswer] = []
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder:
        path = Path(folder) / "history.db"
        _write(path, truth)
        megabytes = path.stat().st_size / 1e6
        with closing(sqlite3.connect(path)) as db:

            def ask() -> None:
                end = _START + truth.fleet.end
                fleet = read_fleet_load(db, SavingsQuery(), end, state)
                answers.append(make_savings(SavingsQuery(), fleet, "EUR"))

            seconds = cpu_seconds(ask)
    name = f"{len(truth.fleet.pods):,} pods from SQLite, 7 days"
    yield Figure(f"{name}: CPU", seconds, "s", at_most=MAX_SECONDS)
    yield Figure("  file", megabytes, "MB")
    yield Figure("  lines", len(answers[0].advice))
    right = sum(1 for _ in _find_right(truth, answers[0]))
    recommended = sum(len(line.pods) for line in answers[0].advice if line.kind != "pack")
    yield Figure("  precision", 100 * right / recommended, "%", at_least=MIN_PRECISION)


def _place(truth: Truth) -> Iterator[tuple[str, list[PodLoad]]]:
    """Yields nodes with the pods that hold their GPUs."""
    pods: list[PodLoad] = []
    held = 0
    number = 0
    for pod in truth.fleet.pods:
        if held + pod.devices > _GPUS_PER_NODE:
            yield f"node-{number}", pods
            number += 1
            pods = []
            held = 0
        pods.append(pod)
        held += pod.devices
    yield f"node-{number}", pods


def _make_state(truth: Truth) -> ClusterState:
    owners: dict[PodName, WorkloadOwner] = {}
    nodes: list[NodeReading] = []
    number = 0
    for name, pods in _place(truth):
        devices: list[DeviceState] = []
        for pod in pods:
            account = pod.account
            if account.owner_kind:
                owner = WorkloadOwner(account.owner_kind, account.pod)
                owners[account.namespace, account.pod] = owner
            for _ in range(pod.devices):
                devices.append(_make_gpu(number, pod))
                number += 1
        nodes.append(node(name, *devices))
    return state_of(*nodes, prices=_PRICES, owners=owners)


def _make_gpu(number: int, pod: PodLoad) -> DeviceState:
    return gpu(
        number,
        holder(pod.account.pod, pod.account.namespace),
        model=pod.model,
        memory_total_bytes=round(pod.gpu_bytes or 0),
    )


def _write(path: Path, truth: Truth) -> None:
    """Writes a week of steps, and the cost of the pods by hour."""
    samples: list[GpuSample] = []
    for name, pods in _place(truth):
        for pod in pods:
            for _ in range(pod.devices):
                number = len(samples)
                charges = [Charge(pod.account, "main")]
                samples.append(GpuSample(f"GPU-{number}", "", name, number, charges=charges))
    store = HistoryStore(path)
    store.append(_START, samples)
    store.close()

    pods_by_name = {pod.account.pod: pod for pod in truth.fleet.pods}
    hours = round(truth.fleet.end) // HOUR
    with closing(sqlite3.connect(path)) as db:
        for account_id, name in db.execute("SELECT id, pod FROM account").fetchall():
            if name in pods_by_name:
                _write_pod(db, account_id, pods_by_name[name], hours)
        times = [(HOUR, _START + hour * HOUR) for hour in range(hours)]
        db.executemany("INSERT OR IGNORE INTO period VALUES (?, ?)", times)
        db.commit()


def _write_pod(db: sqlite3.Connection, account_id: int, pod: PodLoad, hours: int) -> None:
    memory = round((pod.peak_bytes or 0) / MIB)
    loads = []
    usage = []
    for hour in range(hours):
        at = _START + hour * HOUR
        steps = pod.steps[hour * HOUR_BYTES : (hour + 1) * HOUR_BYTES]
        loads.append((at, account_id, steps, memory))
        usage.append((HOUR, at, account_id, "EUR", HOUR * pod.devices, 2.0 * pod.devices))
    db.executemany("INSERT INTO load VALUES (?, ?, ?, ?)", loads)
    db.executemany(
        "INSERT INTO usage (resolution, time, account, currency, allocated, cost)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        usage,
    )
