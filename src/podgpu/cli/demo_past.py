"""Simulates the history of the day before the demo started: values, usage, cost, earlier jobs and faults."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from podgpu.cluster.collect import Owners
from podgpu.cluster.prices import Prices
from podgpu.history.store import (
    COARSE,
    DAY,
    FINE,
    HOUR,
    Amounts,
    Figures,
    GpuSample,
    HistoryRound,
    HolderSample,
    UsageAccount,
)
from podgpu.model import WorkloadOwner
from podgpu.simulate.gpu import SimulatedGpu
from podgpu.simulate.node import StageNode, Tenant

_MINUTE = 60
_JOB_HOURS = 4.0
_PAUSE_HOURS = 0.2
_NIGHT = 0.6  # load of services at night, relative to the day
_GONE_HOURS = (8.0, 7.8)  # the third node did not answer; hours ago, from and to
_FAULTS = (  # node, GPU, from and to (hours ago), condition, message
    (0, 6, 5.0, 4.6, "xid", "it reported XID 48 (double-bit ECC error)"),
    (1, 3, 11.0, 10.3, "lost", "the driver no longer lists it: it fell off the bus or was removed"),
    (1, 0, 3.0, 2.6, "thermal", "thermal throttling for most of the last minute"),
    (0, 5, 19.0, 2.0, "idle", "notebooks/jupyter-ada-0/notebook holds it and does not use it"),
)


class _Stay(NamedTuple):
    """The time when a container held a device. Begin and end are hours before now."""

    tenant: Tenant
    begin: float = math.inf
    end: float = 0.0


def make_past(
    nodes: Sequence[StageNode],
    owners: Callable[[Sequence[Tenant]], Owners],
    team_of: Callable[[str], str],
    prices: Prices,
    now: float,
) -> Iterator[HistoryRound]:
    """Yields rounds until `now`: every 5 minutes of the day, and every minute of the last hour."""
    stays = [list(_stays(number, node)) for number, node in enumerate(nodes)]
    known = owners([stay.tenant for node_stays in stays for stay in node_stays])
    start = int(now) // COARSE * COARSE - DAY
    times = [*range(start, int(now) - HOUR, COARSE), *range(int(now) // FINE * FINE - HOUR, int(now) - FINE, _MINUTE)]

    @cache
    def account_of(tenant: Tenant) -> UsageAccount:
        owner = known.get((tenant.namespace, tenant.pod), WorkloadOwner("", ""))
        labels = json.dumps({"team": team_of(tenant.namespace)})
        return UsageAccount(tenant.namespace, tenant.pod, "", "", "", owner.kind, owner.name, labels)

    for before, time in zip([start - COARSE, *times], times, strict=False):
        ago = (now - time) / HOUR
        samples = []
        for number, node in enumerate(nodes):
            present = [stay.tenant for stay in stays[number] if stay.end < ago <= stay.begin]
            for gpu in node.driver.gpus:
                held = [tenant for tenant in present if tenant.gpu == gpu.number]
                for instance, size in _divide(gpu):
                    own = [tenant for tenant in held if tenant.gi_id == instance]
                    device = _Device(number, node.name, gpu, instance, size, own, held if instance is None else own)
                    samples.append(device.sample(time, ago, time - before, prices, account_of))
        yield HistoryRound(time, samples)


def _divide(gpu: SimulatedGpu) -> list[tuple[int | None, float]]:
    """Returns the MIG instances with their part of the GPU, and the GPU itself with the rest."""
    instances: list[tuple[int | None, float]] = [(one.gi_id, one.profile.compute_slices / 7) for one in gpu.instances]
    return [*instances, (None, 1.0 - sum(size for _, size in instances))]


def _stays(number: int, node: StageNode) -> Iterator[_Stay]:
    """Returns the pods of the demo, and the earlier jobs on the GPUs of the third node's training job."""
    jobs = [tenant for tenant in node.tenants if tenant.pod.startswith("llm-train-")] if number == 2 else []
    for tenant in node.tenants:
        yield _Stay(tenant, 1.5 if tenant in jobs else math.inf)
    for job in range(5):
        end = 1.5 + _PAUSE_HOURS + job * (_JOB_HOURS + _PAUSE_HOURS)
        for tenant in jobs:
            past = replace(tenant, pod=f"finetune-{5 - job}", duty=0.25 if job == 1 else tenant.duty)
            yield _Stay(past, end + _JOB_HOURS, end)


class _Device(NamedTuple):
    """A GPU or MIG instance with its holders at one time."""

    number: int  # index on the node
    node: str
    gpu: SimulatedGpu
    instance: int | None
    size: float  # part of the GPU
    tenants: list[Tenant]
    users: list[Tenant]  # also contains the conditions of the GPU's MIG instances

    def sample(
        self,
        time: int,
        ago: float,
        seconds: float,
        prices: Prices,
        account_of: Callable[[Tenant], UsageAccount],
    ) -> GpuSample:
        gone = self.number == 2 and _GONE_HOURS[1] < ago <= _GONE_HOURS[0]
        conditions = [
            (name, text)
            for node, gpu, begin, end, name, text in _FAULTS
            if (node, gpu) == (self.number, self.gpu.number) and end < ago <= begin
        ]
        if gone:
            conditions = [("node_gone", "its node does not answer")]
        is_blind = gone or any(name == "lost" for name, _ in conditions)
        size = self.size
        price = (prices.of(self.gpu.model.name).gpu_hour or 0.0) * size if prices.currency else 0.0
        loads = {tenant: 0.0 if is_blind else _load(tenant, time) for tenant in self.users}
        use = sum(loads.values()) / (max(1, len(loads)) if self.instance is None and self.gpu.instances else 1)
        idle_watts, _, most_watts = self.gpu.model.power
        watts = idle_watts + (most_watts - idle_watts) * 0.7 * use
        memory = float(sum(min(tenant.memory, self.gpu.model.memory // 2) for tenant in self.users))
        holders = []
        for tenant in () if gone else self.tenants:
            load, part = loads[tenant], seconds / len(self.tenants)
            amounts = Amounts(
                allocated_seconds=part * size,
                idle_seconds=0.0 if tenant.duty else part * size,
                cost=price * part / HOUR,
                idle_cost=0.0 if tenant.duty else price * part / HOUR,
                measured_seconds=part * size,
                busy_seconds=load * seconds * size,
                busy_max_seconds=load * seconds * size,
                energy_joules=watts * part * size,
            )
            own = Figures(load, float(tenant.memory)) if len(self.tenants) > 1 else None
            holders.append(HolderSample(account_of(tenant), tenant.container, amounts, own, prices.currency))
        rest = Amounts(seconds * size, cost=price * seconds / HOUR, energy_joules=idle_watts * seconds * size)
        is_whole = self.instance is None
        return GpuSample(
            uuid=self.gpu.uuid,
            instance="" if is_whole else str(self.instance),
            node=self.node,
            gpu_index=self.gpu.number,
            figures=None
            if is_blind
            else Figures(use, memory, watts if is_whole else None, 30 + 35 * use if is_whole else None),
            holders=holders,
            conditions=conditions,
            unallocated=Amounts() if holders else rest,
            currency=prices.currency,
        )


def _load(tenant: Tenant, time: int) -> float:
    """Services follow the time of day, and every load varies over minutes."""
    day = 1.0
    if tenant.namespace in ("serving", "batch"):
        day = _NIGHT + (1 - _NIGHT) * (0.5 - 0.5 * math.cos(2 * math.pi * (time % DAY) / DAY))
    phase = sum(map(ord, tenant.pod)) + tenant.gpu
    wave = 0.06 * math.sin(time / 700 + phase) + 0.05 * math.sin(time / 97 + 2 * phase)
    return max(0.0, min(1.0, tenant.duty * (day + wave)))
