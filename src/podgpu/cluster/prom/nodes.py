"""This module makes nodes of a round's samples: whose sample it is, and which copy is the newest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from podgpu.cluster.prom.layouts import AllSeries, Round, TargetLayout, TargetSeries
from podgpu.cluster.prom.targets import PodName, Target, Targets
from podgpu.cluster.reading import NodeReading
from podgpu.cluster.scraping.exposition import LONGEST_NAME, beyond
from podgpu.figures.device import DeviceFigures


class _Kept(NamedTuple):
    series: TargetSeries
    told: frozenset[PodName]
    """What its series tell of the exporter's pod."""
    own_pods: frozenset[PodName]
    layout: TargetLayout


class LayoutMemory:
    """Of the targets of the last round in which the same was asked."""

    def __init__(self) -> None:
        self._kept: dict[Target, _Kept] = {}

    def nodes(
        self,
        by_target: Mapping[Target, TargetSeries],
        targets: Targets,
        sampled_at: Mapping[Target, float],
        of: Round,
        keep: bool = True,
    ) -> Iterator[tuple[Target, NodeReading]]:
        """`sampled_at`: Unix time of each target's newest sample. `keep`: for the next round."""
        kept = {target: self._kept[target] for target, series in by_target.items() if self._has(target, series)}
        told = {
            target: kept[target].told if target in kept else series.own_pods() for target, series in by_target.items()
        }
        own = dict(targets.own_pods)
        for target, pods in told.items():
            if pods:
                own[target[:2]] = own.get(target[:2], frozenset()) | pods
        self._kept = {}
        for target, series in by_target.items():
            pods = own.get(target[:2], frozenset())
            known = kept.get(target)
            if known is None or known.own_pods != pods:
                known = _Kept(series.without_values(), told[target], pods, TargetLayout(series, pods, of))
            if keep and known.layout.lasts:  # with this round's labels: those it was made of may be forgotten meanwhile
                self._kept[target] = known._replace(series=series.without_values())
            for node in known.layout.nodes(series.values, target, sampled_at.get(target, of.at), of):
                yield target, node

    def _has(self, target: Target, series: TargetSeries) -> bool:
        known = self._kept.get(target)
        return known is not None and known.series.is_like(series)


def nodes_of(
    series: AllSeries,
    sampled_at: Mapping[Target, float],
    targets: Targets,
    of: Round,
    layouts: LayoutMemory | None = None,
) -> tuple[NodeReading, ...]:
    """`sampled_at`: Unix time of each target's newest sample. `layouts`: of rounds that asked the same."""
    made = (layouts or LayoutMemory()).nodes(series.by_target, targets, sampled_at, of, keep=layouts is not None)
    found: dict[tuple[str, str], list[NodeReading]] = {}
    for target, node in made:
        found.setdefault((f"{target.job}/{target.instance}", node.node), []).append(node)
    return tuple(node for copies in found.values() for node in newest_copies(copies))


def accepted(nodes: Iterable[NodeReading]) -> tuple[tuple[NodeReading, ...], list[str]]:
    """Those with no more than a node has, and a note on each of the others: any target may make figures up, and the
    server stores what it is told."""
    kept: list[NodeReading] = []
    notes: list[str] = []
    for node in nodes:
        excess = next(beyond((node.node,), node.devices, node.namespaces), None)
        if excess is None:
            kept.append(node)
        else:
            count, most, what = excess
            notes.append(
                f"{node.target[:LONGEST_NAME]}: node {node.node[:LONGEST_NAME]} has {count:,} {what}, and at most"
                f" {most:,} are accepted of one node; all of it is ignored: see what is scraped there"
            )
    return tuple(kept), notes


# Copies


def newest_copies(copies: Sequence[NodeReading]) -> list[NodeReading]:
    """Readings of one target and node that are about the same GPUs are one: the newest; of equally new ones the higher
    figures. Those about other GPUs are other nodes under the same name (two clusters), and stay."""
    if len(copies) == 1:
        return list(copies)
    kept: list[NodeReading] = []
    for reading in sorted(copies, key=lambda r: (-r.read_at, repr(r.devices))):
        at = next((n for n, other in enumerate(kept) if _same_gpus(reading, other)), None)
        if at is None:
            kept.append(reading)
        elif reading.read_at == kept[at].read_at:
            kept[at] = _higher(kept[at], reading)
    return kept


def _same_gpus(a: NodeReading, b: NodeReading) -> bool:
    keys = {device.key for device in a.devices}
    return not keys or not b.devices or not keys.isdisjoint(device.key for device in b.devices)


def _higher(a: NodeReading, b: NodeReading) -> NodeReading:
    devices = {device.key: device for device in a.devices}
    for device in b.devices:
        devices[device.key] = max(devices.get(device.key, device), device, key=_load)
    return replace(a, devices=tuple(devices.values()))


def _load(device: DeviceFigures) -> tuple[float, float]:
    return device.utilization or 0.0, device.measured or 0.0
