"""The picture of one node, from its agent's snapshot: what the exporter's own page shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from podgpu.catalog.mig import billed_name, parent_and_part
from podgpu.figures.device import Alert, DeviceFigures, HolderFigures, View
from podgpu.figures.from_snapshot import view_of_snapshot
from podgpu.figures.picture import NamespacePicture, NodePicture, Picture
from podgpu.model import NamespaceTotals, Snapshot

_NS_PER_HOUR = 3_600 * 1_000_000_000
_MJ_PER_KWH = 3_600_000_000
_SIMULATED = "simulated"
"""How the simulated driver names itself among the sources."""
_Held = tuple[DeviceFigures, HolderFigures, float]
"""A device, who holds it, and what part of a GPU that is."""


def node_picture(
    snapshot: Snapshot,
    node: str,
    interval: float,
    notes: Sequence[str] = (),
    *,
    fresh: bool = True,
    version: str = "",
) -> Picture:
    """`fresh`: False when the figures are too old to be shown. Then the node is there, old, without any, and the first
    of the notes says why."""
    view = (
        view_of_snapshot(snapshot, node) if fresh else View(alerts=tuple(Alert("broken", n, node) for n in notes[:1]))
    )
    devices = view.devices
    texts = [alert.text for alert in view.alerts]
    return Picture(
        scope="node",
        taken_at=snapshot.taken_at or None,
        interval_seconds=interval,
        nodes=(NodePicture(node, devices, old=not fresh),),
        notes=tuple(dict.fromkeys((*texts, *notes))),
        alerts=view.alerts,
        namespaces=tuple(_namespaces(devices, snapshot.usage.namespaces)) if fresh else (),
        version=version,
        simulated=any(o.source == _SIMULATED for o in snapshot.outcomes),
    )


def _namespaces(devices: Sequence[DeviceFigures], totals: Sequence[NamespaceTotals]) -> Iterator[NamespacePicture]:
    parts = [(device, of, part) for device in devices for of, part in _parts(device)]
    names = {of.holder.namespace for _, of, _ in parts} | {t.namespace for t in totals}
    for name in sorted(names - {""}):
        held = [(device, of, part) for device, of, part in parts if of.holder.namespace == name]
        yield NamespacePicture(
            name,
            allocated_gpus=sum(part for *_, part in held),
            used_gpus=_used_gpus(held),
            idle_gpus=sum(part for device, of, part in held if _is_idle(device, of)),
            allocated_hours=_sum(t.allocated_ns * _part(t.model) / _NS_PER_HOUR for t in totals if t.namespace == name),
            busy_hours=_sum(
                t.busy_ns * _part(t.model) / _NS_PER_HOUR
                for t in totals
                if t.namespace == name and t.busy_ns is not None
            ),
            energy_kwh=_sum(
                t.energy_mj / _MJ_PER_KWH for t in totals if t.namespace == name and t.energy_mj is not None
            ),
        )


def _parts(device: DeviceFigures) -> Iterator[tuple[HolderFigures, float]]:
    """Each holder's part of a physical GPU: what it was given, else as much as every other holder."""
    model = billed_name(device.model, device.profile) if device.instance else device.model
    for of in device.holders:
        yield of, _part(model) * (1 / len(device.holders) if of.share is None else of.share)


def _part(model: str) -> float:
    """Of a GPU, by the name its use is billed under: `<model>` or `<model> MIG <profile>`."""
    return parent_and_part(model)[1] or 0.0


def _used_gpus(held: Sequence[_Held]) -> float | None:
    """None: of nothing that is held is it known."""
    told = [(_utilization(device, of), part) for device, of, part in held]
    known = [(ratio, part) for ratio, part in told if ratio is not None]
    return sum(part for ratio, part in known if ratio > 0) if known or not held else None


def _utilization(device: DeviceFigures, of: HolderFigures) -> float | None:
    return device.utilization if of.utilization is None else of.utilization


def _is_idle(device: DeviceFigures, of: HolderFigures) -> bool:
    """As the page judges it where nobody says from when on an idle holder is a waste (page/devices.js)."""
    if of.utilization:
        return False
    if of.idle_since is not None or of.processes is not None:
        return of.idle_since is not None or of.processes == 0
    return device.utilization == 0


def _sum(amounts: Iterable[float]) -> float | None:
    """None where there is nothing to sum."""
    known = list(amounts)
    return sum(known) if known else None
