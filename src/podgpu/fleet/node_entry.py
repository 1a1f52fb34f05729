"""`NodeEntry`: a node of the cluster state. Every view, bill and metric is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from podgpu.fleet.parts import HeldPart, is_shown
from podgpu.fleet.prices import NO_PRICES, Prices
from podgpu.fleet.readings import NodeReading
from podgpu.model import DeviceState, NodeState, WorkloadKey, group_by

HeldByHolder = dict[tuple[str, WorkloadKey], HeldPart]
"""By device and holder."""


class NodeEntry(msgspec.Struct, frozen=True, gc=False):
    """A node of a `ClusterState`: the reading that is shown, and the values computed from it."""

    reading: NodeReading
    state: NodeState  # `reading.state` with the GPUs and conditions that are shown
    age_seconds: float | None = None
    stale: bool = False  # the values are too old
    gone: bool = False  # its exporter has not answered for longer than --stale-after
    notes: tuple[str, ...] = ()
    # last reading of the podgpu that reported the holders and no longer answers
    silent: NodeReading | None = None
    # The GPUs (UUID -> node) that it took over while their own nodes did not answer.
    taken: Mapping[str, str] = {}
    prices: Prices = NO_PRICES  # the prices that apply to the labels of this node
    held: tuple[HeldPart, ...] = ()
    counted_at: float = 0.0  # monotonic time of the reading in which the counters last changed
    charged_seconds: float = 0.0  # time since the last round; 0 if it is unknown
    # By device, if both rounds have it: joules that no holder used. None if they are not counted.
    unattributed_joules: Mapping[str, float | None] = {}
    rejected: Mapping[str, int] = {}  # counter -> number of impossible increases

    @property
    def name(self) -> str:
        return self.state.node

    @property
    def gpus(self) -> Iterator[DeviceState]:
        """Yields the GPUs for which `is_shown` is True."""
        return (gpu for gpu in self.state.devices if is_shown(gpu))

    def held_by_holder(self) -> HeldByHolder:
        return {(part.device_key, part.holder.key): part for part in self.held}

    def held_by_device(self) -> dict[str, list[HeldPart]]:
        return group_by(self.held, lambda part: part.device_key)
