"""This module says which pod is on which GPU: the rows of `pod_and_gpu_map_info`, and families made of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from podgpu.cluster.labels import LabelMemory
from podgpu.cluster.nodes import NodeView
from podgpu.metrics import families as f
from podgpu.metrics.encode import Family, Sample

_DNS_PART = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_NAME = re.compile(rf"{_DNS_PART}(?:\.{_DNS_PART})*")
_NOT_PLAIN = re.compile(r"[^a-zA-Z0-9]")
_FOR_DNS = str.maketrans("-.", "_:")


class MapRow(NamedTuple):
    """In the order of its labels."""

    gpu_id: str
    """The physical GPU's, for a MIG instance too."""
    gpu_model: str
    namespace: str
    node: str
    pod_name: str


def map_rows(nodes: Iterable[NodeView]) -> tuple[MapRow, ...]:
    """By node, index and the rest, each once. Who holds a GPU and is no pod has no row."""
    rows: list[MapRow] = []
    for node in nodes:
        begin, index = len(rows), -1
        for device in node.devices:
            if device.index != index:
                _sort_from(rows, begin)
                begin, index = len(rows), device.index
            for of in device.holders:
                if of.holder.pod:
                    rows.append(MapRow(device.uuid, device.model, of.holder.namespace, node.name, of.holder.pod))
        _sort_from(rows, begin)
    return tuple(dict.fromkeys(rows))


def _sort_from(rows: list[MapRow], begin: int) -> None:
    if len(rows) - begin > 1:
        rows[begin:] = sorted(rows[begin:])


def map_family(rows: Sequence[MapRow], labels: LabelMemory) -> Family:
    return f.POD_MAP.of(_samples(rows, labels, 1.0))


def node_map_families(rows: Iterable[MapRow], labels: LabelMemory) -> list[Family]:
    """`/metrics/nodes`: one family per node, with the same rows."""
    kind, text = f.NODE_MAP.type, f.NODE_MAP.help
    return [
        Family(metric_name(node), kind, text, tuple(_samples(of_node, labels, 1.0)))
        for node, of_node in groupby(rows, key=lambda row: row.node)
    ]


def legacy_map_families(rows: Iterable[MapRow], labels: LabelMemory) -> list[Family]:
    """One family per row, as long ago, which is why it is to be asked for."""
    kind, text = f.LEGACY_MAP.type, f.LEGACY_MAP.help
    return [
        Family(f"POD_GPU_MAP_INFO_{number}", kind, text, tuple(_samples((row,), labels, 0.0)))
        for number, row in enumerate(rows)
    ]


def _samples(rows: Iterable[MapRow], labels: LabelMemory, value: float) -> list[Sample]:
    of = labels.with_names(f.POD_MAP.labels)
    return [Sample(of(row), value) for row in rows]


def metric_name(node: str) -> str:
    """`gpu-1.lab` is `gpu_1:lab_info`.

    Two nodes never share one, and a node's own never depends on which others there are. Kubernetes' names are DNS
    names: of those `-` becomes `_` and `.` becomes `:`. In any other name all but letters and digits become
    `::<hex>:`, which no DNS name gives, as it has no empty part; one of letters and digits alone has a capital, which
    no DNS name has.
    """
    if _DNS_NAME.fullmatch(node):
        name = node.translate(_FOR_DNS)
    else:
        name = _NOT_PLAIN.sub(lambda match: f"::{ord(match[0]):x}:", node)
    # No metric begins with a digit. No DNS name begins with "-", and no other name gives a "_": nothing else begins so.
    return f"_{name}_info" if name[:1].isdigit() else f"{name}_info"
