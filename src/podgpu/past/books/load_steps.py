"""Adds up what each pod does in every 5 minutes. `sqlite_loads.py` reads it for savings.

Bills need sums, but whether pods can share a GPU depends on when each of them is busy, and on their
largest memory in one reading. So the table `load` has a row per pod and hour: twelve steps of 5
minutes, and the largest memory. 8,000 pods need 90 MB for eight days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from sqlite3 import Connection
from typing import NamedTuple

from podgpu.charge import UNALLOCATED, Charge, UsageAccount
from podgpu.known import add_known
from podgpu.model import MIB
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.busy_steps import (
    CERTAINLY_IDLE,
    STEP_BYTES,
    STEPS_PER_HOUR,
    UNKNOWN,
    UNKNOWN_STEP,
    step_value,
)
from podgpu.past.time_steps import COARSE, HOUR, floor_time

_MEASURED = frozenset({"samples", "switches", "exact"})  # methods of podgpu's exporters
_LEAST_MEASURED = 0.95  # of the allocated time of a step
_LEAST_COVERED = 0.8  # of a step: a pod that began or ended in it, or a restart, is unknown
_MAX_STEPS = 100_000  # not yet written; the steps of a file that cannot be written are dropped
# Puts a step into its place in the row of the hour. The row may have other steps already.
_SAVE = """
INSERT INTO load VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    busy = CAST(substr(busy, 1, {before}) || substr(excluded.busy, {place}, {length})
        || substr(busy, {after}) AS BLOB),
    memory = max(ifnull(memory, 0), ifnull(excluded.memory, memory))"""


@dataclass(slots=True)
class _StepSums:
    """What one pod did in one step. Times are in GPU seconds, except `covered`."""

    covered: float = 0.0  # seconds in which its GPUs were recorded: the mean over them
    allocated: float = 0.0
    measured: float = 0.0
    idle: float = 0.0
    busy: float = 0.0  # its upper bound
    memory: float | None = None  # bytes: the largest of the rounds; None if it is never known
    # Sums over its GPUs in the round that is being added. They are no object of their own, because
    # 8,000 of them per round would keep the garbage collector busy.
    round_gpus: int = 0
    round_seconds: float = 0.0
    round_memory: float | None = 0.0  # None if that of a GPU is unknown

    def add_gpu(self, seconds: float, memory: float | None) -> None:
        self.round_gpus += 1
        self.round_seconds += seconds
        if memory is None or self.round_memory is None:
            self.round_memory = None
        else:
            self.round_memory += memory

    def end_round(self) -> None:
        self.covered += self.round_seconds / self.round_gpus
        if self.round_memory is not None:
            self.memory = max(self.round_memory, self.memory or 0.0)
        self.round_gpus = 0
        self.round_seconds = 0.0
        self.round_memory = 0.0

    def add_charge(self, charge: Charge, is_alone: bool) -> None:
        """`is_alone`: no other pod holds the device."""
        amounts = charge.amounts
        self.allocated += amounts.allocated_seconds
        if charge.account.methods not in _MEASURED:
            return

        self.measured += amounts.measured_seconds
        self.idle += amounts.idle_seconds
        # The busy time of a pod that shares a device may have bounds. The upper one is certain.
        self.busy += amounts.busy_seconds if is_alone else amounts.busy_max_seconds

    def merge(self, other: _StepSums) -> None:
        """Adds other GPUs of the same pod. Its largest memories may be of different rounds."""
        self.covered = max(self.covered, other.covered)
        self.allocated += other.allocated
        self.measured += other.measured
        self.idle += other.idle
        self.busy += other.busy
        self.memory = add_known(self.memory, other.memory)

    def make_value(self) -> int:
        """Returns the value of the step, as `past/busy_steps.py` defines it."""
        if self.covered < _LEAST_COVERED * COARSE:
            return UNKNOWN
        if self.measured < _LEAST_MEASURED * self.allocated:
            return UNKNOWN
        is_idle = self.idle >= CERTAINLY_IDLE * self.allocated
        busy_gpus = self.busy / self.covered
        return step_value(busy_gpus, is_idle)


_Key = tuple[UsageAccount, str]  # with its node


class LoadSteps:
    """Sums of the steps that are not written yet. The caller guards `add` and `take` by a lock."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[_Key, _StepSums]] = {}

    def add(self, start: int, gpus: Iterable[GpuSample]) -> None:
        """Adds a round to the step that begins at this time."""
        pods = self._steps.setdefault(start, {})
        in_round: list[_StepSums] = []
        for gpu in gpus:
            # All charges of a whole GPU add up to the time since the last round.
            seconds = sum(charge.amounts.allocated_seconds for charge in gpu.charges)
            if gpu.instance:
                # Those of a MIG instance add up to its unknown part of this time. Its steps count
                # as complete: they are only read to see whether it was idle.
                seconds = COARSE

            held = [charge for charge in gpu.charges if charge.account != UNALLOCATED]
            accounts = {charge.account for charge in held}
            is_alone = len(accounts) == 1
            estimated: set[UsageAccount] = set()
            for charge in held:
                pod = pods.setdefault((charge.account, gpu.node), _StepSums())
                if not pod.round_gpus:
                    in_round.append(pod)

                pod.add_gpu(seconds, _find_memory(charge, gpu, estimated))
                pod.add_charge(charge, is_alone)

        for pod in in_round:
            pod.end_round()

        if sum(map(len, self._steps.values())) > _MAX_STEPS:
            self._steps = {start: pods}

    def take(self, current: int) -> dict[int, dict[_Key, _StepSums]]:
        """Returns the steps before `current`, and forgets them."""
        taken = {}
        for start in list(self._steps):
            if start < current:
                taken[start] = self._steps.pop(start)
        return taken


def _find_memory(charge: Charge, gpu: GpuSample, estimated: set[UsageAccount]) -> float | None:
    """Returns the memory of a container in bytes, or else that of its GPU.

    `estimated`: pods that already have the GPU's memory. Their other containers are part of it.
    """
    if charge.figures is not None:
        return charge.figures.memory_used_bytes
    if charge.account in estimated:
        return 0.0

    estimated.add(charge.account)
    return None if gpu.figures is None else gpu.figures.memory_used_bytes


def write_steps_of(
    db: Connection,
    steps: Mapping[int, Mapping[_Key, _StepSums]],
    find_account: Callable[[UsageAccount, str], int],
) -> None:
    """`steps`: by start. Call it in the transaction of the store."""
    for start, pods in steps.items():
        merged: dict[int, _StepSums] = {}
        for (account, node), sums in pods.items():
            account_id = find_account(account, node)
            # An account has several sums if it is a job on several nodes, or a pod of which the
            # labels became known in this step.
            merged.setdefault(account_id, _StepSums()).merge(sums)

        hour = floor_time(start, HOUR)
        before = (start - hour) // COARSE * STEP_BYTES
        after = before + STEP_BYTES
        rows = []
        for account_id, sums in merged.items():
            busy = bytearray(UNKNOWN_STEP * STEPS_PER_HOUR)
            busy[before:after] = sums.make_value().to_bytes(STEP_BYTES, "little")
            memory = None if sums.memory is None else round(sums.memory / MIB)
            rows.append((hour, account_id, bytes(busy), memory))

        # SQL counts the bytes from 1.
        sql = _SAVE.format(before=before, place=before + 1, length=STEP_BYTES, after=after + 1)
        db.executemany(sql, rows)


class PastLoad(NamedTuple):
    """An hour of one pod, such as a past one of the demo."""

    time: int  # start of the hour
    account: UsageAccount
    node: str
    busy: float  # GPUs
    memory: int  # bytes


def write_past_loads(
    db: Connection, loads: Iterable[PastLoad], find_account: Callable[[UsageAccount, str], int]
) -> None:
    rows = []
    for load in loads:
        value = step_value(load.busy, is_idle=not load.busy)
        busy = value.to_bytes(STEP_BYTES, "little") * STEPS_PER_HOUR
        memory = round(load.memory / MIB)
        account_id = find_account(load.account, load.node)
        rows.append((load.time, account_id, busy, memory))
    db.executemany("INSERT OR REPLACE INTO load VALUES (?, ?, ?, ?)", rows)
