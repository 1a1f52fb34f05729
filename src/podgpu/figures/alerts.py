"""This module owns the words for what is wrong on a node: the same on its own page, the cluster's, `/health` and `top`.

A GPU's conditions are told one by one; what all of a node's GPUs share (the node is gone, its driver is) is told once.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from podgpu.figures.device import Alert, Condition, DeviceFigures, Trouble
from podgpu.metrics.conditions import DRIVER_AWAY, NODE_GONE, words_for

MOST_ALERTS = 200
"""Nobody reads more, and a page has to carry them."""
OF_DRIVER = frozenset({"nvml", "dcgm", "exporter", "simulated", "usage", "switches"})
"""What those of an exporter's sources are called that are nothing without a driver."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """All that is said of a node here."""

    name: str
    devices: Sequence[DeviceFigures] = ()
    gone: bool = False
    trouble: Trouble = field(default_factory=Trouble)


def alerts_of(nodes: Iterable[NodeState]) -> tuple[Alert, ...]:
    """The worst first, by node and GPU."""
    found = [alert for node in nodes for alert in node_alerts(node)]
    found.sort(key=lambda alert: alert.severity != "broken")
    if len(found) <= MOST_ALERTS:
        return tuple(found)
    return (*found[:MOST_ALERTS], Alert(found[MOST_ALERTS].severity, f"and {len(found) - MOST_ALERTS} more"))


def node_alerts(node: NodeState) -> Iterator[Alert]:
    gpus = _gpus(node.devices)
    broken = [gpu for gpu in gpus if gpu.conditions]
    if node.gone:
        yield Alert("broken", _gone(node.name, len(gpus)), node.name)
    elif node.trouble.lost > (named := sum(not _answers(gpu) for gpu in broken)):
        yield Alert("broken", _unnamed(node.name, node.trouble.lost - named), node.name)
    if not broken and not node.trouble.down:
        return
    away = [(gpu, c) for gpu in broken for c in gpu.conditions if c.name == DRIVER_AWAY]
    if len(away) > 1:
        says = away[0][1].says.replace("for it", f"for its {counted(len(away))}")
        yield Alert("broken", f"node {node.name}: {says}: {away[0][1].do}", node.name)
    for gpu in broken:
        for condition in gpu.conditions:
            if condition.name != NODE_GONE and not (condition.name == DRIVER_AWAY and len(away) > 1):
                yield _of_gpu(node.name, gpu, condition)
    if not node.gone:
        yield from _unread(node.name, node.trouble.down, broken, bool(away))


def counted(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def _gpus(devices: Iterable[DeviceFigures]) -> list[DeviceFigures]:
    """Each GPU once, by its own figures or those of an instance."""
    found: dict[str, DeviceFigures] = {}
    for device in devices:
        if not device.instance or device.uuid not in found:
            found[device.uuid] = device
    return sorted(found.values(), key=lambda device: device.place)


def _answers(gpu: DeviceFigures) -> bool:
    return all(condition.name not in ("lost", "unreadable", DRIVER_AWAY) for condition in gpu.conditions)


def _of_gpu(node: str, gpu: DeviceFigures, condition: Condition) -> Alert:
    name = f"GPU {gpu.index}" if gpu.index >= 0 else "a GPU"
    return Alert(
        condition.severity, f"{name} of node {node} ({gpu.uuid}): {condition.says}: {condition.do}", node, gpu.uuid
    )


def _gone(node: str, gpus: int) -> str:
    with_it = f"; {counted(gpus)} went with it" if gpus else ""
    return f"node {node} does not answer{with_it}: {words_for(NODE_GONE)[1]}"


def _unnamed(node: str, lost: int) -> str:
    those = "does not answer, and nobody can say which" if lost == 1 else "do not answer, and nobody can say which"
    return f"node {node}: {counted(lost)} on its PCI bus {those}: run nvidia-smi on the node and see dmesg"


def _unread(node: str, down: Iterable[str], broken: Sequence[DeviceFigures], away: bool) -> Iterator[Alert]:
    """Sources that fail; those left out whose failure was told as a GPU's condition."""
    told = {f"gpu{gpu.index}" for gpu in broken} | (OF_DRIVER if away else frozenset())
    left = [source for source in down if source not in told]
    if left:
        yield Alert("warning", f"node {node}: podgpu cannot read {', '.join(left)}: its log says why", node)
