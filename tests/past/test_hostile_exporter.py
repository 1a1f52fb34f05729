"""One hostile exporter cannot stop the history, and cannot take usage of other nodes' pods."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from podgpu.charge import Amounts, Charge, Figures, UsageAccount
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.spent import MAX_WATTS
from podgpu.model import NodeState, decode_node
from podgpu.past.books.gpu_sample import ConditionRecord, GpuSample
from podgpu.past.books.record import make_gpu_samples
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.books.store import HistoryStore
from podgpu.past.sqlite.sqlite_charges import read_range
from tests.fleet.states import World, gpu, holder, node, uuids

START = 1_800_000_000 // 86_400 * 86_400
PRICES = Prices("EUR", {"*": Price(1.0)})
POD = UsageAccount("ml", "train")


def decode(**values: Any) -> NodeState:
    state = NodeState(producer="podgpu", node="evil", devices=(gpu(0),))
    document = msgspec.to_builtins(state)
    document["devices"][0].update(values)
    return decode_node(msgspec.json.encode(document))


def test_unusual_but_possible_numbers_are_accepted() -> None:
    [device] = decode(temperature_celsius=-40, utilization_ratio=1.01).devices
    assert device.temperature_celsius == -40
    assert device.utilization_ratio == 1.01
    [device] = decode(temperature_celsius=61.5).devices
    assert device.temperature_celsius == 61.5


def test_estimates_from_impossible_ratios_and_power_are_limited() -> None:
    """Without counters, busy time and energy are estimated from utilisation and power."""
    world = World()
    total = Amounts()
    for second in (15, 30):
        one = gpu(0, holder("pod"), busy=1e6, power_mw=2**63 - 1)
        free = gpu(1, power_mw=2**63 - 1)
        state = world.round(node("evil", one, free, read_at=second), at=second, prices=PRICES)
        for sample in make_gpu_samples(state):
            for charge in sample.charges:
                total = total.plus(charge.amounts)
    assert all(math.isfinite(amount) for amount in total)
    assert total.busy_seconds == 15.0
    assert total.energy_joules == 2 * 15 * MAX_WATTS


def run_attack(make: Any, rounds: int = 60) -> float:
    """Records an honest pod and a hostile node in a small file. Returns the pod's seconds."""
    store = HistoryStore(max_bytes=600_000)
    honest = GpuSample("GPU-1", "", "n1", 0, None, [Charge(POD, amounts=Amounts(300.0))])
    for number in range(rounds):
        store.append(START + 300 * number, [honest, make(number)])
    store.append(START + 300 * rounds + 86_400, [honest._replace(charges=())])
    with store.reader() as db:
        charges = read_range(db, START, START + 10 * 86_400)
    store.close()
    return sum(one.amounts.allocated_seconds for one in charges if one.account == POD)


def test_new_conditions_in_every_round_delete_no_usage() -> None:
    def make(number: int) -> GpuSample:
        conditions = [ConditionRecord("xid", f"{number} {text}" * 50) for text in range(64)]
        return GpuSample("GPU-evil", "", "evil", 0, None, (), conditions)

    assert run_attack(make) == 60 * 300


def test_new_gpus_in_every_round_delete_no_usage() -> None:
    store = HistoryStore(max_bytes=600_000)
    honest = GpuSample("GPU-1", "", "n1", 0, None, [Charge(POD, amounts=Amounts(300.0))])
    for number in range(60):
        evil = [
            GpuSample(f"GPU-{number}-{index}" + "x" * 200, "", "evil", 0, Figures(0.5))
            for index in range(200)
        ]
        store.append(START + 300 * number, [honest, *evil])
    with store.reader() as db:
        charges = read_range(db, START, START + 86_400)
    store.close()
    assert sum(one.amounts.allocated_seconds for one in charges) == 60 * 300


def test_a_new_method_in_every_round_deletes_no_usage() -> None:
    def make(number: int) -> GpuSample:
        charges = [
            Charge(UsageAccount("evil", f"p{pod}", methods=f"{number}" + "x" * 250))
            for pod in range(100)
        ]
        return GpuSample("GPU-evil", "", "evil", 0, None, charges)

    assert run_attack(make) == 60 * 300


def test_a_gpu_goes_back_to_its_node_also_after_a_restart_of_podgpu(tmp_path: Path) -> None:
    """Another node takes it while its own node does not answer, and podgpu restarts meanwhile."""
    lie = holder("liar", "evil")
    owner_of: list[str] = []
    world = World()
    recorder = HistoryRecorder(directory=str(tmp_path))
    for number in range(12):
        at = 15.0 * number
        if number == 8:
            recorder.stop()
            world = World()
            recorder = HistoryRecorder(directory=str(tmp_path))
        # The node does not answer from 30 s to 135 s.
        read_at = 30.0 if 30 <= at < 135 else at
        honest = node("n1", gpu(0, holder()), read_at=read_at, listed=True)
        evil = node("evil", gpu(0, lie), read_at=at, listed=True)
        nodes = [honest, evil] if number else [honest]
        state = world.round(*nodes, at=at, recorded=recorder.list_nodes())
        recorder.add(make_gpu_samples(state))
        recorder.record()
        owner_of += [name for name, found in uuids(state).items() if found]
    recorder.stop()
    assert owner_of == ["n1"] * 6 + ["evil"] * 3 + ["n1"] * 3
    with closing(sqlite3.connect(tmp_path / "history.db")) as db:
        assert db.execute("SELECT node, taken_from FROM gpu").fetchall() == [("n1", "")]
