"""The map of pods and GPUs: its rows, their order, and the three ways it is printed."""

from __future__ import annotations

from dataclasses import replace

from podgpu.cluster.metrics import cluster_families, node_families
from podgpu.cluster.settings import ViewSettings
from podgpu.figures.device import DeviceFigures
from podgpu.metrics.encode import encode
from tests.cluster.view_readings import gpu, holder, node, view_of


def test_rows_are_by_node_index_and_the_rest_and_each_once() -> None:
    view = view_of(
        node("n2", gpu(1, holder("b"), holder("a"), holder("a", container="side")), gpu(0, holder("z"))),
        node("n1", gpu(10, holder("x")), gpu(9, holder("y"))),
    )
    assert [(row.node, row.gpu_id, row.pod_name) for row in view.rows] == [
        ("n1", "GPU-9", "y"),
        ("n1", "GPU-10", "x"),
        ("n2", "GPU-0", "z"),
        ("n2", "GPU-1", "a"),
        ("n2", "GPU-1", "b"),
    ]


def test_a_mig_instance_goes_by_its_gpu() -> None:
    def instance(number: int, pod: str) -> DeviceFigures:
        return replace(gpu(0, holder(pod)), instance=str(number), profile="1g.10gb")

    view = view_of(node("n1", gpu(0), instance(2, "b"), instance(1, "a"), instance(3, "a")))
    assert [(row.gpu_id, row.pod_name) for row in view.rows] == [("GPU-0", "a"), ("GPU-0", "b")]


def test_a_node_whose_pods_are_gone_has_no_family() -> None:
    view = view_of(node("n1", gpu(0)), node("n-2.lab", gpu(1, holder("p", "x"))))
    assert encode(node_families(view)).decode().splitlines() == [
        "# HELP n_2:lab_info Provide every node's pod and gpu mapping relationship",
        "# TYPE n_2:lab_info gauge",
        'n_2:lab_info{gpu_id="GPU-1",gpu_model="NVIDIA H100 80GB HBM3",namespace="x",node="n-2.lab",pod_name="p"} 1.0',
    ]


def test_the_abandoned_names_are_there_when_asked_for() -> None:
    nodes = node("n1", gpu(0, holder("a")), gpu(1, holder("b")))
    assert b"POD_GPU_MAP_INFO" not in encode(cluster_families(view_of(nodes)))
    families = cluster_families(view_of(nodes, settings=ViewSettings(legacy_map_metrics=True)))
    legacy = {
        family.name: dict(family.samples[0].labels.pairs)["pod_name"]
        for family in families
        if "MAP_INFO" in family.name
    }
    assert legacy == {"POD_GPU_MAP_INFO_0": "a", "POD_GPU_MAP_INFO_1": "b"}


def test_label_values_are_escaped() -> None:
    view = view_of(node("n1", gpu(0, holder('a"b\\c\nd<script>'))))
    assert r'pod_name="a\"b\\c\nd<script>"' in encode(cluster_families(view)).decode()
