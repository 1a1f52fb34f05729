"""ForgottenGpus are those an operator does not want to see any more: gone for good, or with a node that is.

One is forgotten for as long as it is away. When it is back it is a GPU like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Literal

from podgpu.cluster.nodes import NodeView, Settled
from podgpu.figures.device import Trouble

MOST = 1024
"""The last so many."""
Found = Literal["unknown", "here", "away"]


class ForgottenGpus:
    """Asked by the thread of the rounds, added to by those of requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uuids: dict[str, None] = {}

    def add(self, uuid: str) -> None:
        with self._lock:
            self._uuids[uuid] = None
            while len(self._uuids) > MOST:
                del self._uuids[next(iter(self._uuids))]

    def leave_out(self, settled: Settled) -> Settled:
        with self._lock:
            if not self._uuids:
                return settled
            for uuid in [uuid for uuid in self._uuids if state_of(settled.nodes, uuid) == "here"]:
                del self._uuids[uuid]
            nodes = [(node, _without(node, self._uuids)) for node in settled.nodes]
        # A node that is gone is told of for the sake of its GPUs.
        kept = tuple(left for node, left in nodes if left.devices or not (node.gone and node.devices))
        return replace(settled, nodes=kept)


def state_of(nodes: Iterable[NodeView], uuid: str) -> Found:
    """Whether there is such a GPU, and whether it is lost or its node gone."""
    found: Found = "unknown"
    for node in nodes:
        for device in node.devices:
            if device.uuid == uuid:
                if device.present and not node.gone:
                    return "here"
                found = "away"
    return found


def _without(node: NodeView, uuids: Collection[str]) -> NodeView:
    """Nor does anything else tell of them."""
    gone = {device.uuid: f"gpu{device.index}" for device in node.devices if device.uuid in uuids}
    if not gone:
        return node
    down = tuple(source for source in node.trouble.down if source not in gone.values())
    return replace(
        node,
        devices=tuple(device for device in node.devices if device.uuid not in gone),
        trouble=Trouble(down, max(0, node.trouble.lost - len(gone))),
    )
