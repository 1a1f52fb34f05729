"""Used-GPU utilisation, as in gpu-utilization-metric-exporter: mean of one field over devices in use; rolling mean.

A device is in use while the field is above 0. A scope with data and no device in use has the mean 0; a scope without
data is absent.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from podgpu.cluster.collect import Owners
from podgpu.cluster.nodes import NodeEntry
from podgpu.cluster.parts import holders_of, slot_model
from podgpu.cluster.settings import ViewSettings
from podgpu.model import DeviceState, Holder, MigInstance, Slot

AVERAGED = frozenset({"cluster", "namespace", "node", "model"})
_MAX_RATIO = 1.01  # a counter that is read slightly late can exceed 1


class Scope(NamedTuple):
    """The group of devices that a mean covers: a cluster, namespace, node, model or owner. Unused members are empty."""

    scope: str
    namespace: str = ""
    node: str = ""
    model: str = ""
    owner_kind: str = ""
    owner_name: str = ""


CLUSTER = Scope("cluster")


class UsedMean(NamedTuple):
    """`mean` is in the field's own unit."""

    devices: int
    mean: float


def mean_by_scope(nodes: Iterable[NodeEntry], owners: Owners, settings: ViewSettings) -> dict[Scope, UsedMean]:
    """Computes the mean of each scope over the nodes that are not stale."""
    full = settings.full
    sums: dict[Scope, list[float]] = {}  # number of devices in use, sum of their values
    for node in nodes:
        if node.stale:
            continue
        own_scope = Scope("node", node=node.name)
        for gpu, instance, value in measured_devices(node, settings):
            scopes = {CLUSTER, own_scope, Scope("model", model=slot_model(gpu, instance))}
            for holder in _all_holders(gpu, instance):
                if holder.namespace:
                    scopes.add(Scope("namespace", holder.namespace))
                    if owner := owners.get((holder.namespace, holder.pod)):
                        scopes.add(Scope("owner", holder.namespace, "", "", owner.kind, owner.name))
            for scope in scopes:
                total = sums.setdefault(scope, [0, 0.0])
                if value > 0:
                    total[0] += 1
                    total[1] += min(value, full)
    return {scope: UsedMean(int(n), total / n if n else 0.0) for scope, (n, total) in sums.items()}


def measured_devices(
    node: NodeEntry, settings: ViewSettings
) -> Iterator[tuple[DeviceState, MigInstance | None, float]]:
    """Yields devices that have --used-field. Skips a GPU if its MIG instances have the field."""
    for gpu in node.gpus:
        instances = [(instance, used_value(instance, settings)) for instance in gpu.instances if not instance.hidden]
        measured = [(instance, value) for instance, value in instances if value is not None]
        for instance, value in measured:
            yield gpu, instance, value
        own = None if measured or gpu.hidden else used_value(gpu, settings)
        if own is not None:
            yield gpu, None, own


def used_value(slot: Slot, settings: ViewSettings) -> float | None:
    value = slot.fields.get(settings.used_field_name) if slot.fields else None
    return value if isinstance(value, int | float) and 0 <= value <= settings.full * _MAX_RATIO else None


def _all_holders(gpu: DeviceState, instance: MigInstance | None) -> Sequence[Holder]:
    """Returns the holders. For a GPU in MIG mode, these are the holders of its instances."""
    if instance is not None or not gpu.instances:
        return holders_of(gpu, instance or gpu)
    return [holder for slot in (gpu, *gpu.instances) for holder in holders_of(gpu, slot)]


class RollingAverage:
    """Mean over the rounds in the window."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, dict[Scope, float]]] = deque()  # monotonic time, ratios

    def add(self, now: float, settings: ViewSettings, used: Mapping[Scope, UsedMean]) -> None:
        ratios = {scope: mean.mean / settings.full for scope, mean in used.items() if scope.scope in AVERAGED}
        self._rounds.append((now, ratios))
        while self._rounds[0][0] < now - settings.window + settings.interval / 2:
            self._rounds.popleft()

    def means(self) -> dict[Scope, float]:
        values: dict[Scope, list[float]] = defaultdict(list)
        for _, ratios in self._rounds:
            for scope, ratio in ratios.items():
                values[scope].append(ratio)
        return {scope: math.fsum(ratios) / len(ratios) for scope, ratios in values.items()}
