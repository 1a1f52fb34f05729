"""The usage of the 30 days before the demo, simulated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import NamedTuple

from podgpu.charge import (
    UNALLOCATED,
    Charge,
    Figures,
    HeldTime,
    Tokens,
    UsageAccount,
    charge,
    charge_rest,
    price_hours,
)
from podgpu.fleet.hold import describe_idle
from podgpu.fleet.prices import Prices
from podgpu.labs.demo import JOB, DemoExporter, owner_of, team_of
from podgpu.labs.demo_engines import count_tokens, find_model
from podgpu.labs.simulate.gpu import DRAM, LoadActivity, SimulatedGpu, compute_watts, final_celsius
from podgpu.labs.simulate.simulated_node import DemoNode, Tenant
from podgpu.metrics.conditions import LOST, NODE_GONE
from podgpu.model import Workload, WorkloadOwner, group_by
from podgpu.past.books.gpu_sample import ConditionRecord, GpuSample
from podgpu.past.books.load_steps import PastLoad
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.spans import IDLE
from podgpu.past.time_steps import COARSE, DAY, FINE, HOUR, floor_time

_LOAD_DAYS = 7
_JOBS = 5  # before the one that runs now
_JOB_HOURS = 4.0
_PAUSE_HOURS = 0.5
_JOB_BEGAN = 0.3  # hours ago; an hour ago, an earlier job ran
_NIGHT = 0.6  # load of services at night, relative to the day
_IDLE_HOURS = 24.0  # since when idle pods are idle


class _Fault(NamedTuple):
    node: str
    gpu: int | None  # None: all GPUs
    begin: float  # hours ago
    end: float
    condition: str
    message: str


_FAULTS = (
    # Between two jobs.
    _Fault("node-3", None, 5.15, 4.95, NODE_GONE, "its node does not answer"),
    _Fault("node-1", 6, 11.0, 10.3, "xid", "it reported XID 48 (double-bit ECC error)"),
    _Fault(
        "node-2",
        3,
        1.1,
        0.85,
        LOST,
        "the driver no longer lists it: it fell off the bus or was removed",
    ),
    _Fault("node-2", 0, 3.2, 2.9, "thermal", "thermal throttling for most of the last minute"),
)


class _Run(NamedTuple):
    """A time in which a pod held its GPUs."""

    tenant: Tenant
    begin: float  # hours ago
    end: float = 0.0


class _Step(NamedTuple):
    """A time that is stored as one round."""

    at: int  # Unix time of its start
    seconds: int
    now: float  # Unix time
    prices: Prices

    @property
    def hours_ago(self) -> float:
        return (self.now - self.at) / HOUR

    def find_tenants(self, runs: Iterable[_Run]) -> list[Tenant]:
        return [run.tenant for run in runs if run.end < self.hours_ago <= run.begin]


def write_past(
    exporters: Sequence[DemoExporter], cluster: HistoryRecorder, prices: Prices, now: float
) -> None:
    """Writes the usage of 30 days, and samples of the last day and hour.

    Call it after the first two readings.
    """
    runs = {}
    for exporter in exporters:
        exporter.ledger.assume_idle(_IDLE_HOURS * HOUR)
        # The temperature does not begin to rise only when the demo starts.
        for gpu in exporter.node.driver.gpus:
            gpu.celsius = final_celsius(gpu.model, gpu.activity.watts)
        runs[exporter.node.name] = list(_list_runs(exporter.node))

    for at, seconds in _list_times(now):
        step = _Step(at, seconds, now, prices)
        samples = []
        for exporter in exporters:
            tenants = step.find_tenants(runs[exporter.node.name])
            node_samples = list(_sample_node(exporter.node, tenants, step))
            exporter.recorder.append(at, node_samples)
            samples += node_samples
        cluster.append(at, samples)

    nodes = [exporter.node for exporter in exporters]
    cluster.append_loads(list(_list_loads(nodes, runs, now, prices)))


def _list_loads(
    nodes: Sequence[DemoNode], runs: Mapping[str, Sequence[_Run]], now: float, prices: Prices
) -> Iterator[PastLoad]:
    """Yields what each pod did in each hour of the week before the last day."""
    last_day = floor_time(now - DAY, HOUR)
    for at in range(last_day - _LOAD_DAYS * DAY, last_day, HOUR):
        step = _Step(at, HOUR, now, prices)
        for node in nodes:
            tenants = step.find_tenants(runs[node.name])
            for account, own in group_by(tenants, _account_of).items():
                load = sum(_load_of(node, tenant, step) for tenant in own)
                memory = sum(tenant.memory for tenant in own)
                yield PastLoad(at, account, node.name, load, memory)


def _list_times(now: float) -> list[tuple[int, int]]:
    """Returns the start and length of each round.

    Samples with the time `at` are stored in the interval that begins at `at`, so they contain the
    usage after `at`.
    """
    # The page calls a day complete if each of its hours has a record.
    first_day = floor_time(now, DAY) - 30 * DAY
    last_day = floor_time(now - DAY, HOUR)
    last_hour = floor_time(now - HOUR, COARSE)

    periods = (
        (first_day, last_day, HOUR),
        (last_day, last_hour, COARSE),
        (last_hour, int(now) - FINE, FINE),
    )

    times = []
    for begin, end, step in periods:
        for at in range(begin, end, step):
            times.append((at, min(step, end - at)))
    return times


def _list_runs(node: DemoNode) -> Iterator[_Run]:
    """Yields the time of each pod.

    Includes earlier jobs on the GPUs of the third node's training job, and earlier notebooks on the
    GPUs of idle pods.
    """
    workers = []
    for tenant in node.tenants:
        if node.name == "node-3" and tenant.pod.startswith(f"{JOB}-"):
            workers.append(tenant)
            yield _Run(tenant, _JOB_BEGAN)
        elif node.name == "node-1" and not tenant.duty:
            yield _Run(tenant, _IDLE_HOURS)
            notebook = replace(tenant, pod=tenant.pod.replace("ada", "ben"), duty=0.3)
            yield _Run(notebook, math.inf, _IDLE_HOURS + _PAUSE_HOURS)
        else:
            yield _Run(tenant, math.inf)

    end = _JOB_BEGAN + _PAUSE_HOURS
    for number in range(_JOBS, 0, -1):
        begin = end + _JOB_HOURS
        for worker in workers:
            job = replace(worker, pod=f"finetune-{number}")
            # One job uses little of its GPUs.
            if number == _JOBS - 1:
                job = replace(job, duty=0.25)
            yield _Run(job, begin, end)
        end = begin + _PAUSE_HOURS


def _sample_node(node: DemoNode, tenants: Sequence[Tenant], step: _Step) -> Iterator[GpuSample]:
    for gpu in node.driver.gpus:
        on_gpu = [tenant for tenant in tenants if tenant.gpu == gpu.number]
        for instance, size in _divide(gpu):
            # `_divide` ends with the GPU itself. It holds the rest, but its use is that of all.
            holders = [tenant for tenant in on_gpu if tenant.gi_id == instance]
            users = on_gpu if instance is None else holders
            device = _PastDevice(node, gpu, instance, size, holders, users, step)
            yield device.sample()


def _divide(gpu: SimulatedGpu) -> list[tuple[int | None, float]]:
    """Returns the id of each MIG instance with its fraction of the GPU.

    The last id is None: the GPU itself, with the remainder.
    """
    devices: list[tuple[int | None, float]] = []
    rest = 1.0
    for instance in gpu.instances:
        size = instance.profile.compute_slices / gpu.model.compute_slices
        devices.append((instance.gi_id, size))
        rest -= size
    devices.append((None, rest))
    return devices


class _PastDevice(NamedTuple):
    """A GPU or MIG instance in one step."""

    node: DemoNode
    gpu: SimulatedGpu
    instance: int | None
    size: float  # fraction of the GPU
    tenants: Sequence[Tenant]
    users: Sequence[Tenant]  # its tenants and, for a GPU, those of its MIG instances
    step: _Step

    def sample(self) -> GpuSample:
        conditions = list(self._list_conditions())
        names = {condition.name for condition in conditions}
        is_gone = NODE_GONE in names
        is_blind = is_gone or LOST in names
        loads = {}
        for tenant in self.users:
            loads[tenant] = 0.0 if is_blind else _load_of(self.node, tenant, self.step)

        activity = self._compute_activity(loads)
        # Nothing is charged for a node that did not answer. A lost GPU keeps its holders.
        charges = []
        if not is_gone:
            charges = self._charge(loads, activity, is_blind)

        return GpuSample(
            uuid=self.gpu.uuid,
            instance="" if self.instance is None else str(self.instance),
            node=self.node.name,
            gpu_index=self.gpu.number,
            figures=None if is_blind else self._make_figures(activity),
            charges=charges,
            conditions=conditions,
        )

    def _charge(
        self, loads: Mapping[Tenant, float], activity: LoadActivity, is_blind: bool
    ) -> list[Charge]:
        """Charges the tenants. Without tenants, the whole time is unallocated."""
        prices = self.step.prices
        hour_price = prices.of(self.gpu.model.name).gpu_hour
        price = price_hours(self.size, hour_price)
        currency = "" if hour_price is None else prices.currency

        if not self.tenants:
            seconds = self.step.seconds
            joules = self.gpu.model.power[0] * seconds * self.size
            rest = charge_rest(seconds, self.size, 0.0, price)
            amounts = rest._replace(energy_joules=joules)
            return [Charge(UNALLOCATED, amounts=amounts, currency=currency)]

        charges = []
        for tenant in self.tenants:
            time = self._measure(tenant, loads, activity, is_blind)
            amounts = charge(time, self.size, price)
            # The figures of a tenant without others are those of the device.
            own_figures = None
            if len(self.tenants) > 1:
                own_figures = Figures(loads[tenant], float(tenant.memory))
            account = _account_of(tenant)
            charges.append(Charge(account, tenant.container, amounts, own_figures, currency))
        return charges

    def _make_figures(self, activity: LoadActivity) -> Figures:
        # As `load_of` limits the memory of the simulated processes.
        most = self.gpu.model.memory // 2
        memory = sum(min(tenant.memory, most) for tenant in self.users)
        figures = Figures(activity.busy, float(memory))
        if self.instance is not None:
            return figures

        watts = compute_watts(self.gpu.model, activity)
        celsius = final_celsius(self.gpu.model, watts)
        return figures._replace(power_watts=watts, temperature_celsius=celsius)

    def _list_conditions(self) -> Iterator[ConditionRecord]:
        ago = self.step.hours_ago
        for fault in _FAULTS:
            is_here = fault.node == self.node.name and fault.gpu in (None, self.gpu.number)
            if is_here and fault.end < ago <= fault.begin:
                yield ConditionRecord(fault.condition, fault.message)

        for tenant in self.tenants:
            if not tenant.duty and ago <= _IDLE_HOURS:
                workload = Workload(tenant.namespace, tenant.pod, tenant.container)
                text = describe_idle(workload)
                yield ConditionRecord(IDLE, text, account=_account_of(tenant))

    def _compute_activity(self, loads: Mapping[Tenant, float]) -> LoadActivity:
        # For an instance, or a GPU without instances, loads are fractions of the device itself.
        sizes: dict[int | None, float] = {}
        if self.instance is None and self.gpu.instances:
            sizes.update(_divide(self.gpu))

        use = 0.0
        tensor = 0.0
        for tenant, load in loads.items():
            work = load * sizes.get(tenant.gi_id, 1.0)
            use += work

            process = self.node.load_of(tenant)
            tensor += work * process.tensor

        return LoadActivity(busy=use, tensor=tensor, dram=DRAM * use)

    def _has_engine(self, pod: str) -> bool:
        return any(tenant.pod == pod and find_model(tenant) for tenant in self.node.tenants)

    def _measure(
        self, tenant: Tenant, loads: Mapping[Tenant, float], activity: LoadActivity, is_blind: bool
    ) -> HeldTime:
        seconds = self.step.seconds
        load = loads[tenant]
        share = 1 / len(self.tenants)

        # Energy is divided by load.
        energy_part = share
        all_loads = sum(loads[other] for other in self.tenants)
        if all_loads:
            energy_part = load / all_loads

        watts = compute_watts(self.gpu.model, activity) * self.size
        joules = watts * seconds * energy_part
        if is_blind:
            return HeldTime(seconds, share, joules=joules)

        busy = load * seconds
        idle = 0.0 if load else float(seconds)
        underused: float | None
        if tenant.user:
            # A user without Kubernetes reserves nothing.
            underused = None
        elif not load:
            underused = 0.0
        else:
            underused = max(0.0, share - load) * seconds

        tokens = count_tokens(tenant, busy, self.step.at)
        if tokens is None and self._has_engine(tenant.pod):
            # Its reranker belongs to the cost of its tokens.
            tokens = Tokens()

        # A process waits while others run on the GPU.
        others = activity.busy - load
        return HeldTime(
            held=seconds,
            share=share,
            busy=busy,
            busy_min=busy,
            busy_max=busy,
            idle=idle,
            waited=busy * others,
            joules=joules,
            underused=underused,
            tokens=tokens,
        )


def _load_of(node: DemoNode, tenant: Tenant, step: _Step) -> float:
    """Returns the load.

    That of services follows the time of day; notebooks rest at night and at weekends.
    """
    at = step.at
    if tenant.pod.startswith("jupyter-ben-"):
        hour_of_day = at % DAY / HOUR
        # 0 is a Monday: Unix time began on a Thursday.
        weekday = (at // DAY + 3) % 7
        if not 6 <= hour_of_day < 18 or weekday >= 5:
            return 0.0

    load = tenant.duty
    # Longer means are constant.
    if step.seconds <= COARSE:
        process = node.load_of(tenant)
        epoch = node.driver.gpus[tenant.gpu].epoch
        times = range(at, at + step.seconds, 60)
        load = fmean(process.demand(time - epoch) for time in times)

    # The simulated load is that of the time of day at which the demo starts.
    if tenant.namespace in ("serving", "batch"):
        load *= _day_load(at) / _day_load(step.now)
    return min(1.0, load)


def _day_load(at: float) -> float:
    time_of_day = at % DAY / DAY
    daylight = 0.5 - 0.5 * math.cos(math.tau * time_of_day)
    return _NIGHT + (1 - _NIGHT) * daylight


@cache
def _account_of(tenant: Tenant) -> UsageAccount:
    methods = _method_of(tenant)
    if tenant.user and tenant.job:
        return UsageAccount(job=tenant.job, methods=methods)
    if tenant.user:
        return UsageAccount(job=f"user {tenant.user}", user=tenant.user, methods=methods)

    owner = owner_of(tenant.pod) or WorkloadOwner("", "")
    labels = {"team": team_of(tenant.namespace)}
    return UsageAccount(
        namespace=tenant.namespace,
        pod=tenant.pod,
        owner_kind=owner.kind,
        owner_name=owner.name,
        labels=json.dumps(labels),
        methods=methods,
        model=find_model(tenant),
    )


def _method_of(tenant: Tenant) -> str:
    """Returns how the exporter measures it now."""
    if tenant.resource.endswith(".shared") or tenant.user:
        return "exact"
    return "samples"
