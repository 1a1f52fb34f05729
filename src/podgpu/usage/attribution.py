"""Divides the usage of one device in one turn among workloads.

The parts of the workloads and the unattributed rest always add up exactly to the value of the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from msgspec import structs

from podgpu.metrics.mig import slices_of_gpu, slices_of_profile
from podgpu.model import (
    Assignment,
    Device,
    DeviceUsage,
    WaitPart,
    Workload,
    WorkloadKey,
    parts_of,
)
from podgpu.usage.containers import OwnersByPid

K = TypeVar("K")
Owner = Workload | Literal["host", "unknown"]  # "host": not in a pod; "unknown": not determined
SHARE_UNITS = 1_000_000  # units per device; shares of time slices, HAMi and gpu-manager are 1/100 or larger


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process on one device in one turn. None means not reported."""

    pid: int
    owner: Owner
    busy_ns: int | None  # None for MPS clients
    memory: int | None = None
    ended: bool = False  # it ended during this turn, so only its busy time is used


@dataclass(frozen=True, slots=True)
class Division:
    """A value of a device, divided among workloads. If a workload is not listed, its part is unknown, not 0."""

    total: int | None = None  # None if not reported
    parts: Mapping[Workload, int] | None = None  # None if nothing is known about any workload

    @property
    def unattributed(self) -> int | None:
        return None if self.total is None else self.total - sum((self.parts or {}).values())

    @property
    def without_series(self) -> int | None:
        """The unattributed part and the parts of workloads without series, so that the series add up to the total."""
        labelled = sum(part for workload, part in (self.parts or {}).items() if workload.has_labels)
        return None if self.total is None else self.total - labelled

    def part(self, workload: Workload) -> int | None:
        return None if self.parts is None else self.parts.get(workload)


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long the workloads of a device waited for it in one turn."""

    workloads: Mapping[Workload, tuple[int, int, int]]  # estimate, minimum, maximum
    waits_for: Mapping[Workload, tuple[WaitPart, ...]]  # parts of the estimate, largest first
    pressure_ns: int  # time in which at least one workload waited


@dataclass(frozen=True, slots=True)
class DeviceTurn:
    """One allocatable device (a whole GPU or a MIG instance) in one turn."""

    usage: DeviceUsage  # the window is 0 if the device did not answer
    holders: Mapping[Workload, float | None] = field(default_factory=dict)  # share of each holder; None if unknown
    processes: tuple[ProcessSample, ...] | None = None  # None if not visible, for example without hostPID
    # busy time shared by MPS clients of several owners; None if there are no clients or they all belong to one owner
    mps_busy_ns: int | None = None

    @property
    def device(self) -> Device:
        return self.usage.device

    @property
    def slices(self) -> int:
        return slices_of_profile(self.device.profile) or 1

    def attribute_busy(self, ended_owner: Workload | None = None) -> Division:
        """Divides the device's busy time.

        The driver reports nothing about a process that has ended. If all processes that ended since the last turn
        belonged to `ended_owner`, the busy time that no running process accounts for is attributed to that owner.
        """
        usage = self.usage
        total = None if usage.busy_ns is None else min(usage.busy_ns, usage.window_ns)
        if self.processes is None:
            return Division(total)
        if usage.process_busy_ns is None:  # attribute only to a single holder without other processes
            owners = {process.owner for process in self.processes} | self.holders.keys()
            is_alone = total is not None and len(owners) == len(self.holders) == 1
            return Division(total, dict.fromkeys(self.holders, total or 0) if is_alone else None)
        reported = [(process.owner, process.busy_ns) for process in self.processes]
        parts, others = self._sum_by_owner(reported)
        measured = sum(parts.values()) + others
        if measured > usage.window_ns:  # samples are inexact, and processes can run concurrently
            scaled = divide_exactly(usage.window_ns, {**parts, None: others})
            return Division(usage.window_ns, {workload: scaled[workload] for workload in parts})
        if total is None or measured > total:
            return Division(measured, parts)
        all_reported = all(busy is not None for _, busy in reported)
        if ended_owner in parts and all_reported and usage.method == "samples":
            parts[ended_owner] += total - measured
        return Division(total, parts)

    def attribute_memory(self) -> Division:
        """Divides the memory in use. If the processes report more than the device, their sum is used as the total."""
        total = self.usage.memory_used
        if self.processes is None:
            return Division(total)
        reported = [(process.owner, 0 if process.ended else process.memory) for process in self.processes]
        parts, _ = self._sum_by_owner(reported)
        return Division(None if total is None else max(total, sum(parts.values())), parts)

    def count_processes(self) -> Mapping[Workload, int]:
        """Counts the running processes of each workload. Workloads with an unknown number are omitted."""
        if self.processes is None:
            return {}
        return self._sum_by_owner([(process.owner, int(not process.ended)) for process in self.processes])[0]

    def compute_idle(self, workload: Workload, busy: Division, elapsed_ns: int) -> int | None:
        """Returns the idle time of a workload in this turn. None if uncertain, or if the workload is not a holder.

        The driver takes about six samples per second and attributes each to one process. While another process is
        busy, a process can run for some milliseconds without a sample, so it may not be idle. Context switches are
        exact.
        """
        part = busy.part(workload)
        if part is None or workload not in self.holders:
            return None
        own = [process for process in self.processes or () if process.owner == workload]
        if part or any(process.busy_ns for process in own) or not self.usage.window_ns:
            return 0
        is_certain = not busy.total or not own or self.usage.method != "samples"
        return elapsed_ns if is_certain else None

    def bound_busy(self, busy: Division) -> dict[Workload, tuple[int | None, int]]:
        """Returns the minimum and maximum busy time of each workload. The attributed time lies between them.

        A client of MPS has only a maximum: the busy time of the server.
        """
        usage, parts = self.usage, busy.parts
        if self.mps_busy_ns is not None:
            clients = {process.owner for process in self.processes or () if process.busy_ns is None}
            return {owner: (None, self.mps_busy_ns) for owner in clients if isinstance(owner, Workload)}
        if not usage.bounded or parts is None or busy.total is None:
            return {}
        owners = {process.pid: process.owner for process in self.processes or ()}
        bounds: dict[Workload, tuple[int, int]] = {}
        if usage.resident_ns is None:  # samples: the time is certain only if one workload uses the device
            users = set(owners.values())
            for workload, part in parts.items():
                bounds[workload] = (
                    (part, part) if users == {workload} else (0, busy.total if workload in users else part)
                )
        else:  # context switches: a process can run only while its context is resident, and may be idle
            worked = max(0, busy.total - usage.switching_ns)
            for workload in parts:
                own = [pid for pid in usage.resident_ns if owners.get(pid) == workload]
                resident = sum(usage.resident_ns[pid] for pid in own)
                saving = sum(usage.saving_ns.get(pid, 0) for pid in own)
                others = sum(usage.resident_ns.values()) - resident + saving
                bounds[workload] = min(resident, max(0, worked - others)), min(resident, worked)
        return {
            workload: (min(low, parts[workload]), max(high, parts[workload]))
            for workload, (low, high) in bounds.items()
        }

    def attribute_waits(self, busy: Division) -> Waiting | None:
        """Adds up the waiting times of the processes of each workload. Returns None if they are unknown.

        A process does not wait for its own workload. Waiting plus busy time of a workload never exceeds the window.
        """
        waits, window_ns = self.usage.waits, self.usage.window_ns
        if waits is None or not window_ns:
            return None
        owners = {process.pid: process.owner for process in self.processes or ()}
        pairs: defaultdict[Workload, defaultdict[Owner, int]] = defaultdict(lambda: defaultdict(int))
        others: defaultdict[int, int] = defaultdict(int)
        for (pid, runner), ns in waits.pairs.items():
            owner, other = owners.get(pid), owners.get(runner, "host")
            if isinstance(owner, Workload) and other != owner:
                pairs[owner][other] += ns
                others[pid] += ns
        sums: dict[Workload, tuple[int, int, int]] = {}
        for pid, figures in waits.processes.items():
            owner = owners.get(pid)
            if isinstance(owner, Workload):
                part = min(1.0, others[pid] / figures[0]) if figures[0] else 0.0
                limit = window_ns - min(window_ns, busy.part(owner) or 0)
                estimate, least, most = (
                    min(limit, total + int(ns * part))
                    for total, ns in zip(sums.get(owner, (0, 0, 0)), figures, strict=True)
                )
                sums[owner] = estimate, least, most
        pressure = min(waits.pressure_ns, sum(estimate for estimate, _, _ in sums.values()), window_ns)
        waits_for = {
            workload: tuple(
                WaitPart(*parts_of(other if isinstance(other, Workload) else Workload()), ratio=ns / window_ns)
                for other, ns in sorted(runners.items(), key=lambda pair: -pair[1])
                if ns
            )
            for workload, runners in pairs.items()
        }
        return Waiting(sums, waits_for, pressure)

    def compute_shares(self) -> dict[Workload | None, int]:
        """Returns the holders' shares, and the unallocated part as None, in SHARE_UNITS.

        Shares that add up to more than 1 are scaled down. An unknown share is 1 for a single holder, else 0.
        """
        default = 1.0 if len(self.holders) == 1 else 0.0
        weights: dict[Workload | None, int] = {
            holder: round((default if share is None else share) * SHARE_UNITS) for holder, share in self.holders.items()
        }
        return divide_exactly(SHARE_UNITS, {**weights, None: max(0, SHARE_UNITS - sum(weights.values()))})

    def _sum_by_owner(self, amounts: Sequence[tuple[Owner, int | None]]) -> tuple[dict[Workload, int], int]:
        """Returns the sum of each workload whose sum is certain, and the sum of everything else.

        A workload is omitted if one of its amounts is not reported. A holder without a process is omitted while there
        is a process of unknown owner, because that process may belong to it.
        """
        workloads = {owner for owner, _ in amounts if isinstance(owner, Workload)}
        if not any(owner == "unknown" and amount != 0 for owner, amount in amounts):
            workloads |= self.holders.keys()
        workloads -= {owner for owner, amount in amounts if amount is None and isinstance(owner, Workload)}
        parts, others = dict.fromkeys(sorted(workloads, key=parts_of), 0), 0
        for owner, amount in amounts:
            if isinstance(owner, Workload) and owner in parts:
                parts[owner] += amount or 0
            else:
                others += amount or 0
        return parts, others


@dataclass(frozen=True, slots=True)
class GpuTurn:
    """One GPU in one turn. Its devices are the GPU itself, or its instances in MIG mode."""

    uuid: str
    devices: tuple[DeviceTurn, ...]
    usage: DeviceUsage | None = None  # of the whole GPU; None if it did not answer

    @property
    def free_slices(self) -> int:
        """The number of compute slices that belong to no MIG instance."""
        if self.usage is None or not self.usage.device.mig_enabled:
            return 0
        return max(0, slices_of_gpu(self.usage.device.model) - sum(device.slices for device in self.devices))


def make_turns(
    devices: Iterable[Device], usages: Iterable[DeviceUsage], assignments: Iterable[Assignment], owners: OwnersByPid
) -> list[GpuTurn]:
    """Combines the figures of the driver with the holders and the owners of processes.

    `devices` also contains devices that did not answer, because they can have holders.
    """
    answers = {usage.device.key: usage for usage in usages}
    known = {device.key: device for device in devices} | {key: usage.device for key, usage in answers.items()}
    held: defaultdict[str, list[Assignment]] = defaultdict(list)
    for assignment in assignments:
        if assignment.holder.key:
            held[assignment.device].append(assignment)
    turns: defaultdict[str, list[DeviceTurn]] = defaultdict(list)
    for key in sorted(known.keys() | held.keys()):
        uuid, _, instance = key.partition("/gi")
        gpu = known.get(uuid) or Device(None, uuid, "", "")
        device = known.get(key) or replace(gpu, gi_id=int(instance) if instance else None)
        is_whole_mig_gpu = gpu.mig_enabled and not instance
        is_unlisted = uuid in answers and key not in answers  # an instance that no longer exists
        own = turns[uuid]
        if key in held or not (is_whole_mig_gpu or is_unlisted):
            usage = None if is_whole_mig_gpu else answers.get(key)
            own.append(make_turn(usage or DeviceUsage(device, 0), held.get(key, ()), owners))
    return [GpuTurn(uuid, tuple(own), answers.get(uuid)) for uuid, own in turns.items()]


def make_turn(usage: DeviceUsage, assignments: Iterable[Assignment], owners: OwnersByPid) -> DeviceTurn:
    """Finds the holders and the processes of one device. Uses one `Workload` for each workload key.

    A recreated pod has the same name and another UID. Processes of the previous pod that still run are left
    unattributed.
    """
    listed = {process.pid: process for process in usage.processes or () if process.device == usage.device.key}
    busy = usage.process_busy_ns or {}
    pids = sorted(listed.keys() | {pid for pid, ns in busy.items() if ns != 0}) if usage.processes is not None else []
    users: defaultdict[WorkloadKey, set[Workload]] = defaultdict(set)
    for pid in pids:
        if (user := owners.workloads.get(pid)) is not None and user.key:
            users[user.key].add(user)
    shares: dict[WorkloadKey, tuple[float, Workload]] = {}
    for assignment in assignments:
        share = assignment.share if assignment.share is not None and 0 <= assignment.share <= 1 else -1.0
        entry = share, assignment.holder
        key = assignment.holder.key
        shares[key] = max(entry, shares.get(key, entry), key=lambda one: (one[0], parts_of(one[1])))
    names = {key: min(workloads, key=parts_of) for key, workloads in users.items()}
    for key, (_, holder) in shares.items():
        same = names.get(key)
        if same is not None:
            holder = structs.replace(holder, uid=holder.uid or same.uid, user=same.user)
        names[key] = holder

    def find_owner(pid: int) -> Owner:
        user = owners.workloads.get(pid)
        if user is None or not user.key or (user.user and shares and user.key not in shares):
            return "unknown" if pid in owners.unknown else "host"
        name = names[user.key]
        return "host" if user.uid and name.uid and user.uid != name.uid else name

    # The driver reports the busy time of all MPS clients for the MPS server. It is attributed if all clients have one
    # owner.
    servers = owners.mps_servers.intersection(pids)
    clients = {pid for pid, process in listed.items() if process.mps and pid not in busy}
    client_owners = {find_owner(pid) for pid in clients} if servers else set[Owner]()
    sole_owner = client_owners.pop() if len(client_owners) == 1 else None
    mps_busy_ns = None
    if clients and sole_owner is None:
        mps_busy_ns = sum(busy.get(pid) or 0 for pid in servers) if servers else usage.busy_ns or 0

    def make_sample(pid: int) -> ProcessSample:
        owner = sole_owner or "host" if pid in servers else find_owner(pid)
        is_measured = pid not in clients or sole_owner is not None
        memory = listed[pid].memory if pid in listed else None
        return ProcessSample(pid, owner, busy.get(pid, 0) if is_measured else None, memory, pid not in listed)

    return DeviceTurn(
        usage,
        {names[key]: None if shares[key][0] < 0 else shares[key][0] for key in sorted(shares)},
        None if usage.processes is None else tuple(map(make_sample, pids)),
        mps_busy_ns,
    )


def divide_exactly(total: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Divides an integer in proportion to weights.

    Rounds the running sum instead of each part. So the parts add up to the total exactly, and each part differs from
    its exact value by less than 1. If all weights are 0, all parts are 0.
    """
    whole = sum(weights.values())
    parts: dict[K, int] = {}
    weight_so_far = divided = 0
    for key, weight in weights.items():
        weight_so_far += weight
        parts[key] = (2 * total * weight_so_far + whole) // (2 * whole) - divided if whole else 0
        divided += parts[key]
    return parts
