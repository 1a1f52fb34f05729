"""`podgpu demo`: runs exporters with simulated GPUs, and the cluster view.

In each cycle a job ends, GPUs and an exporter fail, and everything recovers.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from statistics import fmean
from typing import NamedTuple

import click
from aiohttp import web

from podgpu.charge import UNALLOCATED, Charge, Figures, HeldTime, UsageAccount, charge, charge_rest
from podgpu.cli.options import make_command
from podgpu.cli.sources import read_simulated
from podgpu.cli.terminal import configure_logging
from podgpu.clock import Clock
from podgpu.fleet.hold import describe_idle
from podgpu.fleet.prices import Prices, ReadPrices, read_prices
from podgpu.fleet.read.scrape import ScrapeCollector
from podgpu.fleet.readings import ViewSettings
from podgpu.fleet.round import Cluster
from podgpu.labs.simulate.gpu import DRAM, Activity, SimulatedGpu, compute_watts, final_celsius
from podgpu.labs.simulate.simulated_node import DemoNode, Tenant
from podgpu.metrics.conditions import LOST, NODE_GONE
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.model import (
    Pairs,
    PodLabels,
    PodName,
    Workload,
    WorkloadOwner,
)
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.holders.identity import IdentityReader
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder
from podgpu.node.usage.ledger import Ledger
from podgpu.past.record import SqlitePast, cluster_recorder
from podgpu.past.recorder import HistoryRecorder
from podgpu.past.schema import COARSE, DAY, FINE, HOUR, IDLE, floor_time
from podgpu.past.store import ConditionRecord, GpuSample
from podgpu.web.app import Address, Listener, Service, run
from podgpu.web.cluster_app import cluster_application
from podgpu.web.exporter_app import application, build_state, node_recorder

OTHER_GPUS = ("6xH100,2xH100/1x3g.40gb+1x2g.20gb+1x1g.10gb", "4xH200", "2xRTX4090")
"""GPUs of all nodes but the first."""
_PLAIN = 3  # index of the node without Kubernetes
CLUSTER = ViewSettings(
    interval=2.0, stale_after=6.0, drop_after=120.0, window=60.0, idle_after=30.0
)
_PODS_PER_NODE = 8
_LOOPBACK = "127.0.0.1"
CYCLE_SECONDS = 150.0
_XID = 48  # a double-bit memory error, after which the GPU must be reset
_LOST_GPU = 3
_JOB = "llm-train"
_FIRST_JOB = 2  # number in the name of the job that runs on the third node at the start
_OWNERS = {
    _JOB: "Job",
    "finetune": "Job",
    "diffusion": "Job",
    "chat": "Deployment",
    "embed": "Deployment",
    "ocr": "Deployment",
    "jupyter-ada": "Notebook",
    "jupyter-ben": "Notebook",
    "jupyter": "StatefulSet",
}
"""Prefix of a pod's name -> kind of its owner."""
_TEAMS = {"research": "nlp", "serving": "chat", "batch": "search"}
"""Namespace -> value of the label team of its pods. Other pods belong to the team data-science."""


@make_command(
    "demo",
    ("podgpu demo", "open http://localhost:9401/ in a browser"),
    ("podgpu demo --calm", "the same without faults"),
    ("podgpu top --cluster localhost:9401", "in a second terminal: show the demo as a table"),
)
def command(address: Address, cluster_address: Address, gpus: str, calm: bool, prices: str) -> None:
    """Run exporters on SIMULATED GPUs, three with simulated kubelets and one without Kubernetes,
    and the cluster view.

    Needs no GPU and no cluster. Within a minute, a job ends, a GPU reports an XID error, another
    falls off the bus and a node goes down. After two minutes everything works again. --calm turns
    this off.
    """
    configure_logging("text", debug=False)
    log = logging.getLogger("podgpu")
    # Simulated GPUs without some values would fill the screen before the addresses.
    log.setLevel(logging.ERROR)
    read = read_prices(prices)
    with ExitStack() as stack:
        nodes = []
        for number, spec in enumerate([gpus, *OTHER_GPUS]):
            node = stack.enter_context(make_node(number, spec, Clock()))
            nodes.append(node)
            pods = len(node.kubelet.pods)
            content = f"{pods} pods" if pods else "a node without Kubernetes"
            click.echo(f"SIMULATED {node.name}: {spec}, {content}")

        exporters = [make_exporter(node, read) for node in nodes]
        # In parallel, because each exporter waits a second between its first two readings.
        with ThreadPoolExecutor(len(exporters)) as pool:
            list(pool.map(lambda exporter: exporter.agent.warm_up(), exporters))

        targets: list[str] = []
        make_collector = partial(
            ScrapeCollector, lambda: targets, CLUSTER, read_owners=partial(find_owners, nodes)
        )
        cluster = Cluster(make_collector, CLUSTER, read)
        recorder = cluster_recorder(cluster)
        write_past(exporters, recorder, read()[0], time.time())
        for exporter in exporters:
            exporter.agent.read_telemetry()  # the last values may be too old by now
        past = SqlitePast(recorder, lambda: cluster.published.state)
        app = cluster_application(cluster, past=past)

        services: list[Service] = []
        listeners = []
        for number, exporter in enumerate(exporters):
            services += [exporter.agent, exporter.recorder]
            where = address
            if number:
                # After the port of the cluster view, so that Prometheus can scrape the node.
                where = Address(address.host, address.port and address.port + 1 + number)
            listeners.append(Listener(exporter.application, where))
        services += [cluster, recorder]
        listeners.append(Listener(app, cluster_address, "--cluster-address"))

        script = [] if calm else make_script(nodes)
        stopping = threading.Event()
        stack.callback(stopping.set)

        def on_listening(bound: Sequence[Address]) -> None:
            for where in bound[:-1]:
                targets.append(f"http://{where.host or _LOOPBACK}:{where.port}/metrics")
            _print_overview(nodes, bound, script)
            log.setLevel(logging.NOTSET)
            arguments = (script, stopping)
            threading.Thread(target=perform, args=arguments, name="demo", daemon=True).start()

        run(services, listeners, on_listening)
    click.echo("demo ended")


def make_node(number: int, gpus: str, clock: Clock) -> DemoNode:
    """`number`: position of the node, from 0."""
    name = "workstation-1" if number == _PLAIN else f"node-{number + 1}"
    return DemoNode(name, gpus, clock, number * _PODS_PER_NODE, number == _PLAIN)


def _print_overview(
    nodes: Sequence[DemoNode], bound: Sequence[Address], script: Sequence[Act]
) -> None:
    *addresses, cluster = bound
    click.echo("All values come from a simulated driver.\n")
    _print_address("the cluster", cluster)
    for node, address in zip(nodes, addresses, strict=True):
        _print_address(node.name, address)
    podgpu = os.path.relpath(sys.argv[0]) if sys.argv[0].endswith("/podgpu") else "podgpu"
    click.echo(f"  a terminal     {podgpu} top --cluster {cluster.url}\n")
    if script:
        click.echo(f"Events, repeated every {CYCLE_SECONDS:.0f} s (turn them off with --calm):")
        for act in script:
            click.echo(f"  {act.at:4.0f} s  {act.message}")
    click.echo("Ctrl-C ends the demo.")


def _print_address(name: str, address: Address) -> None:
    click.echo(f"  {name:13}  {address.url}/          a page; {address.url}/metrics")


class Act(NamedTuple):
    at: float  # seconds since the start of the cycle
    message: str
    do: Callable[[], object]


def make_script(nodes: Sequence[DemoNode]) -> list[Act]:
    """Returns the events of the nodes with Kubernetes.

    Between 30 and 90 seconds, all faults are present.
    """
    first, second, third, *_ = nodes
    ill = min(6, len(first.driver.gpus) - 1)
    job = [tenant for tenant in third.tenants if tenant.pod == f"{_JOB}-{_FIRST_JOB}"]
    numbers = itertools.count(_FIRST_JOB + 1)

    def end_job() -> None:
        third.remove_pod(job[0].namespace, job[0].pod)

    def begin_next_job() -> None:
        name = f"{_JOB}-{next(numbers)}"
        job[:] = [replace(tenant, pod=name) for tenant in job]
        third.add_tenants(*job)

    raise_xid = partial(first.driver.raise_xid, ill, _XID)
    reset = partial(first.reset, ill)
    lose = partial(second.driver.lose, _LOST_GPU)
    recover = partial(second.driver.recover, _LOST_GPU)
    stop_answers = partial(setattr, third, "answers", False)
    start_answers = partial(setattr, third, "answers", True)
    return [
        Act(10.0, f"{third.name}: a training job ends", end_job),
        Act(15.0, f"{first.name}: GPU {ill} reports XID {_XID}", raise_xid),
        Act(20.0, f"{second.name}: GPU {_LOST_GPU} falls off the bus", lose),
        Act(30.0, f"{third.name}: the exporter stops answering", stop_answers),
        Act(90.0, f"{third.name}: the exporter answers again", start_answers),
        Act(95.0, f"{third.name}: the next training job begins", begin_next_job),
        Act(105.0, f"{second.name}: GPU {_LOST_GPU} answers again", recover),
        Act(115.0, f"{first.name}: GPU {ill} is reset", reset),
    ]


def schedule(script: Sequence[Act]) -> Iterator[tuple[float, Act]]:
    """Yields each event with its time since the start, cycle after cycle."""
    if not script:
        return
    for cycle in itertools.count():
        for act in script:
            yield cycle * CYCLE_SECONDS + act.at, act


def perform(script: Sequence[Act], stopping: threading.Event) -> None:
    began = time.monotonic()
    for at, act in schedule(script):
        if stopping.wait(max(0.0, began + at - time.monotonic())):
            return
        act.do()
        click.echo(f"demo: {act.message}")


class DemoExporter(NamedTuple):
    node: DemoNode
    agent: Agent
    ledger: Ledger
    recorder: HistoryRecorder
    application: web.Application


def make_exporter(node: DemoNode, prices: ReadPrices) -> DemoExporter:
    names = IdentityReader(str(node.root / "pods"), str(node.root / "containers"))
    sources = [] if node.is_plain else [KubeletAllocation(node.kubelet.socket)]
    policy = Policy(counters=shipped_counters("dcp") or (), hostname=node.name)
    ledger = Ledger()
    agent = Agent(
        read_simulated(node.driver, {"usage_from": "exact"}, node.clock),
        HolderSources(sources, names.read),
        Settings(interval=1.0, allocation_interval=1.0, policy=policy),
        node.clock,
        containers=ContainerFinder(str(node.root / "proc"), finds_users=node.is_plain),
        ledger=ledger,
        pod_labels=partial(_label_pods, node),
    )
    recorder = node_recorder(agent, prices=prices)
    past = SqlitePast(recorder, lambda: build_state(agent, prices))
    app = application(agent, past=past, prices=prices)

    @web.middleware
    async def close_while_down(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not node.answers and request.transport is not None:
            request.transport.abort()
        return await handler(request)

    app.middlewares.insert(0, close_while_down)
    return DemoExporter(node, agent, ledger, recorder, app)


def _label_pods(node: DemoNode) -> PodLabels:
    labels: dict[PodName, Pairs] = {}
    for tenant in node.tenants:
        if tenant.pod:
            labels[tenant.namespace, tenant.pod] = (("team", team_of(tenant.namespace)),)
    return labels


# Owners and teams. In a real cluster, these are read from the API server.


def team_of(namespace: str) -> str:
    return _TEAMS.get(namespace, "data-science")


def find_owners(nodes: Sequence[DemoNode]) -> dict[PodName, WorkloadOwner]:
    owners: dict[PodName, WorkloadOwner] = {}
    for node in nodes:
        for tenant in node.tenants:
            owner = _owner_of(tenant.pod)
            if owner is not None:
                owners[tenant.namespace, tenant.pod] = owner
    return owners


def _owner_of(pod: str) -> WorkloadOwner | None:
    for prefix, kind in _OWNERS.items():
        if pod.startswith(f"{prefix}-"):
            return WorkloadOwner(kind, pod if kind == "Job" else prefix)
    return None


# Simulated history of the day before the demo

_JOB_HOURS = 4.0
_PAUSE_HOURS = 0.5
_JOB_BEGAN = 0.3  # hours ago; an hour ago, an earlier job ran
_NIGHT = 0.6  # load of services at night, relative to the day
_IDLE_ALARM = 24.0  # hours ago
_FAULTS = (  # node, GPU (None: all), begin and end (hours ago), condition, message
    ("node-3", None, 5.15, 4.95, NODE_GONE, "its node does not answer"),  # between two jobs
    ("node-1", 6, 11.0, 10.3, "xid", "it reported XID 48 (double-bit ECC error)"),
    (
        "node-2",
        3,
        1.1,
        0.85,
        LOST,
        "the driver no longer lists it: it fell off the bus or was removed",
    ),
    ("node-2", 0, 3.2, 2.9, "thermal", "thermal throttling for most of the last minute"),
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


def write_past(
    exporters: Sequence[DemoExporter], cluster: HistoryRecorder, prices: Prices, now: float
) -> None:
    """Writes the usage of 30 days, and samples of the last day and hour.

    Call it after the first two readings.
    """
    runs = {}
    for exporter in exporters:
        exporter.ledger.assume_idle(DAY)
        for gpu in exporter.node.driver.gpus:
            gpu.celsius = final_celsius(gpu.model, gpu.activity.watts)
        runs[exporter.node.name] = list(_list_runs(exporter.node))

    for at, seconds in _list_times(now):
        step = _Step(at, seconds, now, prices)
        samples: list[GpuSample] = []
        for exporter in exporters:
            tenants = []
            for tenant, begin, end in runs[exporter.node.name]:
                if end < step.hours_ago <= begin:
                    tenants.append(tenant)
            own = _sample_node(exporter.node, tenants, step)
            exporter.recorder.append(at, own)
            samples += own
        cluster.append(at, samples)


def _list_times(now: float) -> list[tuple[int, int]]:
    """Returns the start and length of each round.

    Samples with the time `at` are stored in the interval that begins at `at`, so they contain the
    usage after `at`.
    """
    last_day = floor_time(now - DAY, COARSE)
    last_hour = floor_time(now - HOUR, COARSE)
    first = floor_time(last_day, DAY) - 29 * DAY
    times = [(at, min(6 * HOUR, last_day - at)) for at in range(first, last_day, 6 * HOUR)]
    times += [(at, COARSE) for at in range(last_day, last_hour, COARSE)]
    times += [(at, FINE) for at in range(last_hour, int(now) - FINE, FINE)]
    return times


def _list_runs(node: DemoNode) -> Iterator[_Run]:
    """Yields the time of each pod.

    Includes earlier jobs on the GPUs of the third node's training job, and earlier notebooks on the
    GPUs of idle pods.
    """
    jobs = []
    for tenant in node.tenants:
        if node.name == "node-3" and tenant.pod.startswith(f"{_JOB}-"):
            jobs.append(tenant)
            yield _Run(tenant, _JOB_BEGAN)
        elif tenant.duty:
            yield _Run(tenant, math.inf)
        else:
            yield _Run(tenant, 24.0)
            notebook = replace(tenant, pod=tenant.pod.replace("ada", "ben"), duty=0.3)
            yield _Run(notebook, math.inf, 24.5)

    for number in range(5):
        end = _JOB_BEGAN + _PAUSE_HOURS + number * (_JOB_HOURS + _PAUSE_HOURS)
        for tenant in jobs:
            duty = 0.25 if number == 1 else tenant.duty
            past = replace(tenant, pod=f"finetune-{5 - number}", duty=duty)
            yield _Run(past, end + _JOB_HOURS, end)


def _sample_node(node: DemoNode, tenants: Sequence[Tenant], step: _Step) -> list[GpuSample]:
    samples = []
    for gpu in node.driver.gpus:
        on_gpu = [tenant for tenant in tenants if tenant.gpu == gpu.number]
        for instance, size in _divide(gpu):
            own = [tenant for tenant in on_gpu if tenant.gi_id == instance]
            users = on_gpu if instance is None else own
            samples.append(_PastDevice(node, gpu, instance, size, own, users, step).sample())
    return samples


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
        loads = {tenant: 0.0 if is_blind else self._load(tenant) for tenant in self.users}
        activity = self._compute_activity(loads)
        watts = compute_watts(self.gpu.model, activity)

        prices = self.step.prices
        hour = prices.of(self.gpu.model.name).gpu_hour
        price = (hour or 0.0) * self.size
        currency = "" if hour is None else prices.currency
        charges: list[Charge] = []
        if not is_gone:
            for tenant in self.tenants:
                time = self._measure(tenant, loads, activity, is_blind)
                own = None
                if len(self.tenants) > 1:
                    own = Figures(loads[tenant], float(tenant.memory))
                amounts = charge(time, self.size, price)
                account = _account_of(tenant)
                charges.append(Charge(account, tenant.container, amounts, own, currency))
            if not charges:
                rest = charge_rest(self.step.seconds, self.size, 0.0, price)
                joules = self.gpu.model.power[0] * self.step.seconds * self.size
                amounts = rest._replace(energy_joules=joules)
                charges.append(Charge(UNALLOCATED, amounts=amounts, currency=currency))

        figures = None
        if not is_blind:
            most = self.gpu.model.memory // 2
            memory = float(sum(min(tenant.memory, most) for tenant in self.users))
            figures = Figures(activity.busy, memory)
            if self.instance is None:
                celsius = final_celsius(self.gpu.model, watts)
                figures = figures._replace(power_watts=watts, temperature_celsius=celsius)
        return GpuSample(
            uuid=self.gpu.uuid,
            instance="" if self.instance is None else str(self.instance),
            node=self.node.name,
            gpu_index=self.gpu.number,
            figures=figures,
            charges=charges,
            conditions=conditions,
        )

    def _list_conditions(self) -> Iterator[ConditionRecord]:
        ago = self.step.hours_ago
        for node, gpu, begin, end, name, message in _FAULTS:
            is_here = node == self.node.name and gpu in (None, self.gpu.number)
            if is_here and end < ago <= begin:
                yield ConditionRecord(name, message)
        for tenant in self.tenants:
            if not tenant.duty and ago <= _IDLE_ALARM:
                text = describe_idle(Workload(tenant.namespace, tenant.pod, tenant.container))
                yield ConditionRecord(IDLE, text, account=_account_of(tenant))

    def _load(self, tenant: Tenant) -> float:
        """Returns the load.

        That of services follows the time of day; notebooks rest at night and at weekends.
        """
        at, seconds, now, _ = self.step
        if tenant.pod.startswith("jupyter-ben-"):
            is_day = 6 <= at % DAY / HOUR < 18
            is_weekend = (at // DAY + 3) % 7 > 4
            if not is_day or is_weekend:
                return 0.0
        load = tenant.duty
        # Longer means are constant.
        if seconds <= COARSE:
            process = self.node.load_of(tenant)
            times = range(at, at + seconds, 60)
            load = fmean(process.demand(time - self.gpu.epoch) for time in times)
        if tenant.namespace in ("serving", "batch"):
            load *= _day_load(at) / _day_load(now)
        return min(1.0, load)

    def _compute_activity(self, loads: Mapping[Tenant, float]) -> Activity:
        sizes: dict[int | None, float] = {}
        if self.instance is None and self.gpu.instances:
            sizes.update(_divide(self.gpu))
        use = 0.0
        tensor = 0.0
        for tenant, load in loads.items():
            work = load * sizes.get(tenant.gi_id, 1.0)
            use += work
            tensor += work * self.node.load_of(tenant).tensor
        return Activity(use, tensor, DRAM * use)

    def _measure(
        self, tenant: Tenant, loads: Mapping[Tenant, float], activity: Activity, is_blind: bool
    ) -> HeldTime:
        seconds = self.step.seconds
        load = loads[tenant]
        share = 1 / len(self.tenants)
        all_loads = sum(loads[other] for other in self.tenants)
        part = load / all_loads if all_loads else share
        joules = compute_watts(self.gpu.model, activity) * self.size * seconds * part
        if is_blind:
            return HeldTime(seconds, share, joules=joules)
        busy = load * seconds
        return HeldTime(
            held=seconds,
            share=share,
            busy=busy,
            busy_min=busy,
            busy_max=busy,
            idle=0.0 if load else float(seconds),
            waited=load * (activity.busy - load) * seconds,
            joules=joules,
        )


def _day_load(at: float) -> float:
    return _NIGHT + (1 - _NIGHT) * (0.5 - 0.5 * math.cos(math.tau * (at % DAY) / DAY))


@cache
def _account_of(tenant: Tenant) -> UsageAccount:
    if tenant.user:
        if tenant.job:
            return UsageAccount(job=tenant.job)
        return UsageAccount(job=f"user {tenant.user}", user=tenant.user)
    owner = _owner_of(tenant.pod) or WorkloadOwner("", "")
    labels = json.dumps({"team": team_of(tenant.namespace)})
    return UsageAccount(tenant.namespace, tenant.pod, "", "", "", owner.kind, owner.name, labels)
