"""The samples that seed 002 (pod gpu metrics exporter) prints, from its own data: each distinct line to the letter.

Its samples are made by hand: rows come twice, and the two texts do not have the same ones. Each text's own rows are the
data here. Its abandoned names are numbered in no order, so there the number is not compared.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from podgpu.cluster.metrics import cluster_families, node_families
from podgpu.cluster.reading import NodeReading
from podgpu.cluster.scraping.exposition import ExpositionReader
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView
from podgpu.figures.device import DeviceFigures, HolderFigures
from podgpu.metrics.encode import encode
from podgpu.metrics.parse import parse_text
from podgpu.model import Workload
from tests.cluster.view_readings import duplicates, view_of

DATA = Path(__file__).parents[1] / "data"
Row = tuple[str, str, str, str, str]
LABELS = ("gpu_id", "gpu_model", "namespace", "node", "pod_name")


def printed(sample: str) -> list[str]:
    return (DATA / f"cluster_seed_002_{sample}.prom").read_text(encoding="utf-8").splitlines()


def rows(sample: str) -> list[Row]:
    families = parse_text("\n".join(printed(sample)) + "\n")
    found = dict.fromkeys(tuple(s.labels[name] for name in LABELS) for family in families for s in family.samples)
    return list(found)  # type: ignore[arg-type]


def nodes(sample: str) -> list[NodeReading]:
    """One GPU of the seed's has three models on one node: as no exporter could tell it, so without one."""
    found: dict[str, dict[tuple[str, str], list[HolderFigures]]] = {}
    for uuid, model, namespace, node, pod in rows(sample):
        devices = found.setdefault(node, {})
        devices.setdefault((uuid, model), []).append(HolderFigures(Workload(namespace, pod, "main")))
    return [
        NodeReading(f"http://{node}:9400", node, devices=tuple(
            DeviceFigures(uuid, index, model, holders=tuple(holders))
            for index, ((uuid, model), holders) in enumerate(devices.items())
        ))
        for node, devices in found.items()
    ]  # fmt: skip


def lines(view: ClusterView, exposition: str) -> set[str]:
    families = node_families(view) if exposition == "nodes" else cluster_families(view)
    text = encode(families).decode()
    assert duplicates(parse_text(text)) == []
    return {line for line in text.splitlines() if "map" in line.lower() or "_info" in line}


def test_metrics() -> None:
    ours = lines(view_of(*nodes("metrics")), "metrics")
    assert {line for line in ours if "pod_and_gpu_map_info" in line} == set(printed("metrics"))


def test_metrics_nodes() -> None:
    assert lines(view_of(*nodes("nodes")), "nodes") == set(printed("nodes"))


def unnumbered(text: set[str]) -> set[str]:
    return {re.sub(r"POD_GPU_MAP_INFO_\d+", "POD_GPU_MAP_INFO_n", line) for line in text if "POD_GPU_MAP_INFO_" in line}


def test_the_abandoned_metrics() -> None:
    view = view_of(*nodes("legacy"), settings=ViewSettings(legacy_map_metrics=True))
    ours = lines(view, "metrics")
    assert unnumbered(ours) == unnumbered(set(printed("legacy")))
    assert {line for line in printed("legacy") if "INFO_0" in line} <= ours
    numbers = {int(number) for number in re.findall(r"^POD_GPU_MAP_INFO_(\d+)", "\n".join(sorted(ours)), re.MULTILINE)}
    assert numbers == set(range(len(rows("legacy"))))


# The same from exporters' expositions


def exposition(node: str, held: list[Row]) -> bytes:
    """What dcgm-exporter would say on that node."""
    series = (
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{uuid}",device="nvidia0",modelName="{model}",Hostname="{node}",'
        f'container="main",namespace="{namespace}",pod="{pod}"}} 42\n'
        for uuid, model, namespace, _, pod in held
    )
    return ("# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n" + "".join(series)).encode()


@pytest.mark.parametrize("row", rows("metrics"), ids="/".join)
def test_each_line_from_an_exporters_exposition(row: Row) -> None:
    node = row[3]
    reader = ExpositionReader(f"http://{node}:9400/metrics", f"{node}:9400")
    view = view_of(reader.read(exposition(node, [row]), 0.0, 1_700_000_000.0))
    (line,) = [line for line in printed("metrics") if line.startswith(map_line(row))][:1]
    assert line in lines(view, "metrics")


def map_line(row: Row) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in zip(LABELS, row, strict=True))
    return f"pod_and_gpu_map_info{{{pairs}}} "


def test_several_pods_of_one_node_from_one_exposition() -> None:
    """Those rows that one node can have: one UUID, one model."""
    held = [row for row in rows("metrics") if (row[1], row[3]) == ("2080ti", "ti2")]
    assert len(held) == 3
    reader = ExpositionReader("http://ti2:9400/metrics", "ti2:9400")
    view = view_of(reader.read(exposition("ti2", held), 0.0, 1_700_000_000.0))
    ours = {line for line in lines(view, "metrics") if line.startswith("pod_and_gpu_map_info")}
    assert ours == {line for line in printed("metrics") for row in held if line.startswith(map_line(row))}
