"""Builds the alert texts that the web pages, `/health` and `top` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from podgpu.cluster.parts import is_shown
from podgpu.metrics.conditions import DRIVER_AWAY, LOST, NODE_GONE, UNREADABLE, conditions, words_for
from podgpu.model import Condition, DeviceState, NodeState, SourceStatus

MAX_ALERTS = 200
_NOT_ANSWERING = {LOST, UNREADABLE, DRIVER_AWAY}
_DRIVER_SOURCES = {"nvml", "dcgm", "exporter", "simulated", "usage", "switches"}


class Alert(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem in plain text, and the node and GPU that have it."""

    severity: str  # broken or warning
    text: str
    node: str = ""
    uuid: str = ""


def severity_of(condition: Condition) -> str:
    spec = conditions().get(condition.name)
    return "broken" if spec is None else spec.severity


def sort_alerts(alerts: Iterable[Alert]) -> tuple[Alert, ...]:
    """Sorts "broken" before "warning" and keeps at most MAX_ALERTS."""
    ordered = sorted(alerts, key=lambda alert: alert.severity != "broken")
    if len(ordered) <= MAX_ALERTS:
        return tuple(ordered)
    return (*ordered[:MAX_ALERTS], Alert(ordered[MAX_ALERTS].severity, f"and {len(ordered) - MAX_ALERTS} more"))


def describe_node(name: str, state: NodeState, gone: bool = False) -> Iterator[Alert]:
    """Yields one alert per condition of a GPU, and one alert for a problem that all GPUs of the node share."""
    broken = [gpu for gpu in state.devices if gpu.conditions and is_shown(gpu)]
    silent = sum(any(c.name in _NOT_ANSWERING for c in gpu.conditions) for gpu in broken)
    lost = state.gpus_lost or 0
    if gone:
        gpus = sum(map(is_shown, state.devices))
        with_it = f", with its {count_gpus(gpus)}" if gpus else ""
        yield Alert("broken", f"node {name} does not answer{with_it}: {words_for(NODE_GONE)[1]}", name)
    elif lost > silent:
        verb = "does" if lost - silent == 1 else "do"
        yield Alert(
            "broken",
            f"node {name}: {count_gpus(lost - silent)} on its PCI bus {verb} not answer and cannot be identified: "
            "run nvidia-smi on the node and see dmesg",
            name,
        )
    without_driver = [c for gpu in broken for c in gpu.conditions if c.name == DRIVER_AWAY]
    if len(without_driver) > 1:
        says, do = words_for(DRIVER_AWAY, without_driver[0].detail)
        says = says.replace("for it", f"for its {count_gpus(len(without_driver))}")
        yield Alert("broken", f"node {name}: {says}: {do}", name)
    for gpu in broken:
        for condition in gpu.conditions:
            if condition.name != NODE_GONE and not (condition.name == DRIVER_AWAY and len(without_driver) > 1):
                yield _describe_gpu(name, gpu, condition)
    if not gone:
        yield from _describe_sources(name, state.sources, broken, bool(without_driver))


def count_gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _describe_gpu(node: str, gpu: DeviceState, condition: Condition) -> Alert:
    says, do = describe_condition(condition)
    label = "a GPU" if gpu.index is None else f"GPU {gpu.index}"
    return Alert(
        severity_of(condition), f"{label} of node {node} ({gpu.uuid or 'no UUID'}): {says}: {do}", node, gpu.uuid
    )


def describe_condition(condition: Condition) -> tuple[str, str]:
    """Returns the problem and the advice. For an unknown condition of a newer exporter, returns only its name."""
    return words_for(condition.name, condition.detail) if condition.name in conditions() else (condition.name, "")


def _describe_sources(
    node: str, sources: Iterable[SourceStatus], broken: Sequence[DeviceState], driver_away: bool
) -> Iterator[Alert]:
    """Reports failing sources, unless a condition of a GPU already reports the failure."""
    named = {f"gpu{gpu.index}" for gpu in broken}
    uuids = {gpu.uuid for gpu in broken}
    failing = [
        source.name
        for source in sources
        if source.up is False
        and source.name not in named
        and not (source.device and source.device in uuids)
        and not (driver_away and source.name in _DRIVER_SOURCES)
    ]
    if failing:
        yield Alert(
            "warning", f"node {node}: podgpu cannot read {', '.join(failing)}: see the log of podgpu on this node", node
        )
