"""MissingGpus are those that a node's exporter told of before and does not tell of any more, and says nothing about it.

podgpu's own exporters say themselves what is lost; dcgm-exporter leaves it out. Such a GPU stays, as lost, with who
held it last, until it is told of again, here or on another node, or its node is not in the view any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from podgpu.cluster.nodes import NodeView, Settled, in_order
from podgpu.figures.device import Condition, DeviceFigures, has_identity
from podgpu.metrics.conditions import LOST, NODE_GONE

MOST_MISSING = 64
"""On one node: as many as any node has, and what an exporter that makes up new UUIDs all the time may cost."""


@dataclass(slots=True)
class _Node:
    """What is remembered of one."""

    seen: dict[str, tuple[DeviceFigures, ...]] = field(default_factory=dict)
    """UUID -> the GPU and its instances as they were last told of."""
    missing: dict[str, tuple[DeviceFigures, ...]] = field(default_factory=dict)
    """The same of those that are missing, as they are shown."""


class MissingGpus:
    """Looks at every round; what a node that is old had stays as it was."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def keep(self, settled: Settled, wall: float) -> Settled:
        """With those that are missing. `wall`: Unix time."""
        silent = {name for name, reading in settled.chosen.items() if not reading.tells_lost}
        if not silent:
            self._nodes = {}
            return settled
        here = {device.uuid for node in settled.nodes for device in node.devices if device.present}
        self._nodes = {
            node.name: self._nodes.get(node.name) or _Node() for node in settled.nodes if node.name in silent
        }
        nodes = tuple(
            self._look(self._nodes[node.name], node, here, wall) if node.name in silent else node
            for node in settled.nodes
        )
        return replace(settled, nodes=nodes)

    def clock_was_set(self, step: float) -> None:
        """Since when one is missing stays as long ago as it was."""
        for known in self._nodes.values():
            known.missing = {
                uuid: tuple(replace(d, conditions=tuple(_moved(c, step) for c in d.conditions)) for d in devices)
                for uuid, devices in known.missing.items()
            }

    @staticmethod
    def _look(known: _Node, node: NodeView, here: set[str], wall: float) -> NodeView:
        if not node.old:
            seen = _by_uuid(node.devices)
            left = {uuid: _lost(was, wall) for uuid, was in known.seen.items() if uuid not in seen}
            known.seen = seen
            known.missing = dict(list({**known.missing, **left}.items())[-MOST_MISSING:])
        known.missing = {uuid: devices for uuid, devices in known.missing.items() if uuid not in here}
        if not known.missing:
            return node
        gone = [device for devices in known.missing.values() for device in devices]
        if node.gone:  # what is said of the node is said of all that it had
            with_node = Condition.of(NODE_GONE, round(wall - node.age, 3))
            gone = [replace(device, conditions=(*device.conditions, with_node)) for device in gone]
        return replace(node, devices=in_order((*node.devices, *gone)))


def _by_uuid(devices: Iterable[DeviceFigures]) -> dict[str, tuple[DeviceFigures, ...]]:
    found: dict[str, list[DeviceFigures]] = {}
    for device in devices:
        if has_identity(device.uuid):
            found.setdefault(device.uuid, []).append(device)
    return {uuid: tuple(of_gpu) for uuid, of_gpu in found.items()}


def _lost(was: Sequence[DeviceFigures], wall: float) -> tuple[DeviceFigures, ...]:
    """Its name, and who held it."""
    return tuple(
        DeviceFigures(
            device.uuid,
            device.index,
            device.model,
            device.node,
            device.instance,
            device.profile,
            memory_total=device.memory_total,
            conditions=(Condition.of(LOST, round(wall, 3)),),
            present=False,
            last_holders=tuple(of.holder for of in device.holders),
        )
        for device in was
    )


def _moved(condition: Condition, step: float) -> Condition:
    return condition if condition.since is None else replace(condition, since=condition.since + step)
