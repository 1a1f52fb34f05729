"""This module makes the local driver a source of `top`: an agent's turns taken one after another, and the processes
they saw."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from podgpu.agent.allocation_turn import ReadIdentities
from podgpu.agent.loop import Agent
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import build_single_node_state
from podgpu.cluster.view import make_view
from podgpu.errors import MOST_NAMED, SourceError
from podgpu.gpu.source import ErrorEvent, FollowsSchedule, GpuAnswer, Inventory, Lane, Telemetry, UsageFlaws
from podgpu.metrics.fields import Field
from podgpu.model import Device, DeviceUsage, ProcessUsage, Workload, has_readings
from podgpu.top.figures import FlatView, ProcessFigures, flat_view
from podgpu.usage.containers import ContainerFinder

_ALLOCATION_SECONDS = 1.0


class OverheardTelemetry:
    """Any telemetry, with its last answers about use kept: the agent sums them up, `--processes` wants each process."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.name = telemetry.name
        self.usages: dict[str, tuple[DeviceUsage, ...]] = {}
        """By GPU's UUID."""

    @property
    def expected(self) -> int | None:
        return self._telemetry.expected

    @expected.setter
    def expected(self, number: int | None) -> None:
        self._telemetry.expected = number

    def inventory(self) -> Inventory:
        inventory = self._telemetry.inventory()
        here = {gpu.uuid for gpu in inventory.gpus}
        for gone in self.usages.keys() - here:
            self.usages.pop(gone, None)
        return inventory

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        return self._telemetry.read(gpu, fields)

    def schedule(self, lanes: Sequence[Lane]) -> None:
        if isinstance(self._telemetry, FollowsSchedule):
            self._telemetry.schedule(lanes)

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        return self._telemetry.processes(gpu)

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        self.usages.pop(gpu.uuid, None)
        self.usages[gpu.uuid] = usages = self._telemetry.usage(gpu, shared)
        return usages

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        return self._telemetry.usage_flaws(gpu)

    def error_events(self) -> Sequence[ErrorEvent]:
        return self._telemetry.error_events()

    def release(self, wait: float) -> bool:
        return self._telemetry.release(wait)


class ProcessWatch:
    """What runs on each device, with the container it runs in."""

    def __init__(self, telemetry: OverheardTelemetry, finder: ContainerFinder, identities: ReadIdentities) -> None:
        self._telemetry = telemetry
        self._finder = finder
        self._identities = identities

    def read(self) -> dict[str, list[ProcessFigures]]:
        """By device key, as of the last usage turn."""
        complete = self._identities().complete
        usages = [usage for gpu in list(self._telemetry.usages.values()) for usage in gpu]
        return {u.device.key: [self._figures(p, u, complete) for p in u.processes or ()] for u in usages}

    def _figures(
        self, process: ProcessUsage, usage: DeviceUsage, complete: Callable[[Workload], Workload]
    ) -> ProcessFigures:
        busy = None if usage.process_busy_ns is None else usage.process_busy_ns.get(process.pid, 0)
        utilization = busy / usage.window_ns if busy is not None and usage.window_ns else None
        return ProcessFigures(process.pid, process.memory, utilization, self._owner(process.pid, complete))

    def _owner(self, pid: int, complete: Callable[[Workload], Workload]) -> Workload | None:
        whereabouts = self._finder.find(pid)
        if whereabouts.sight != "found":
            return None
        try:
            return complete(whereabouts.workload)
        except SourceError:
            return None  # its parts contradict each other: nobody's


class LocalSource:
    name = "this node"
    has_rates = True
    api = None
    """It is no server."""

    def __init__(
        self,
        agent: Agent,
        node: str,
        processes: ProcessWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._node = node
        self._processes = processes
        self._clock = clock
        self._allocated_at = float("-inf")
        # Each turn keeps its own deadline; this one is for their sum.
        self.deadline = 4 * agent.settings.deadline

    def read(self) -> FlatView:
        """Raises SourceError when no GPU answers, StartError when none ever will."""
        self._agent.read_telemetry()
        if self._clock() - self._allocated_at >= _ALLOCATION_SECONDS:
            self._allocated_at = self._clock()
            self._agent.read_allocation()
        self._agent.read_usage()
        state = self._agent.published.state
        failing = [source for source in state.sources if source.up is False]
        if not has_readings(state):
            failed = [source.message for source in failing]
            why = "; ".join(failed[:MOST_NAMED]) or "there is none here"
            raise SourceError("no_gpu", f"no GPU could be read: {why}. Another machine's: --url, or --cluster")
        state = replace(state, node=self._node, taken_at=None)
        notes = [f"{source.name}: {source.message or source.error}" for source in failing]
        whole = build_single_node_state(state, ViewSettings(), 0.0, 0.0, notes=notes)
        serious = tuple(alert for alert in whole.alerts if alert.uuid or alert.severity == "broken")
        view = make_view(dataclasses.replace(whole, alerts=serious))
        return flat_view(view, self._processes.read() if self._processes else None)

    def close(self) -> None:
        self._agent.stop()
