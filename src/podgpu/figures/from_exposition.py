"""This module makes figures of an exposition: podgpu's, or dcgm-exporter's under any of its names, without
holders' use. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from podgpu.figures.alerts import NodeState, alerts_of
from podgpu.figures.device import View
from podgpu.figures.figure_names import field_names
from podgpu.figures.layout import Layout
from podgpu.figures.sorting import HOLDER_FIGURES
from podgpu.metrics import families as f
from podgpu.metrics.parse import ParsedFamily, ParsedSample

NODE_LABELS = ("Hostname", "hostname", "node", "instance")
_OTHERS = frozenset(
    spec.name
    for spec in (
        *(f.BUILD_INFO, f.SOURCE_UP, f.DEVICE_ENERGY, f.DEVICE_MEMORY, f.ALLOCATION_INFO, f.DEVICE_COUNT),
        *(f.CONDITION_SINCE, f.LAST_HOLDER),
    )
)
"""Names beside those of fields and of what holders use."""


class ExpositionFigures(NamedTuple):
    view: View
    nodes: tuple[str, ...]
    """Every name of a node in the exposition, in its order."""
    is_podgpu: bool


def view_of_exposition(families: Iterable[ParsedFamily], measured: str = "", beside: tuple[int, ...] = ()) -> View:
    """With what is wrong in words."""
    samples = samples_named(families, figure_names(measured, beside))
    view, nodes, _ = figures_of(samples, measured, beside=beside)
    alerts = alerts_of([NodeState(nodes[0] if nodes else "", view.devices, trouble=view.trouble)])
    return replace(view, notes=(*(alert.text for alert in alerts), *view.notes), alerts=alerts)


def figures_of(
    samples: Sequence[ParsedSample],
    measured: str = "",
    node_labels: Sequence[str] = NODE_LABELS,
    address: str = "",
    beside: tuple[int, ...] = (),
) -> ExpositionFigures:
    """`samples`: those of `samples_named`; one that is not a figure is passed over. `address` stands for the node where
    no label names it. A device is known by UUID, instance and model: what names no model goes to the first that has
    one."""
    layout = Layout(samples, measured, node_labels, address, beside)
    return ExpositionFigures(layout.view([sample.value for sample in samples]), layout.nodes, layout.is_podgpu)


@lru_cache(maxsize=16)
def figure_names(measured: str = "", beside: tuple[int, ...] = ()) -> frozenset[str]:
    """Of all series that figures are made of; `measured` is a field's name of any generation, or any other series'."""
    return frozenset(field_names(measured, beside)) | HOLDER_FIGURES.keys() | _OTHERS


def samples_named(families: Iterable[ParsedFamily], names: frozenset[str]) -> list[ParsedSample]:
    """Those with a figure: what is not a number, or endless, is not there."""
    return [
        sample
        for family in families
        if family.name in names
        for sample in family.samples
        if sample.name in names and math.isfinite(sample.value)
    ]
