"""Adds the labels of holders to recorded texts and compares the results with goldens/."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.metrics.labels import Policy
from podgpu.metrics.parse import encode_parsed
from podgpu.model import Assignment, Workload
from podgpu.node.gpu.remote_exporter import parse_exposition
from podgpu.tools.enrich import relabel

FIXTURES = Path(__file__).parents[1] / "fixtures"
GOLDENS = Path(__file__).parent / "goldens"
H200 = "GPU-11111111-2222-3333-4444-555555555555"
SEED_0 = ("GPU-2b399198-c670-a848-173b-d3400051a200", "GPU-9567a9e7-341e-bb7e-fcf5-788d8caa50f9")
QUICKSTART = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
A100 = "GPU-34319582-d595-d1c7-d1d2-179bcfa61660"
NEW, OLD = Policy(), Policy(old_namespace=True)


def held(
    *devices: str, pod: str = "other", container: str = "main", namespace: str = "team"
) -> list[Assignment]:
    return [
        Assignment(device, Workload(namespace, pod, container), "kubelet") for device in devices
    ]


CASES = {
    "default": ("h200/default.prom", held(H200), NEW),
    "old-namespace": ("h200/old.prom", held(H200), OLD),
    "replaced": ("h200/dcp_pod.prom", held(H200), NEW),
    "given-back": ("h200/dcp_pod.prom", [], NEW),
    "copies-to-one-holder": ("h200/dcp_shared.prom", held(H200), NEW),
    "copies-to-two-holders": (
        "h200/dcp_shared.prom",
        [*held(H200), *held(H200, pod="second")],
        NEW,
    ),
    "shared-noflag": ("h200/shared_noflag.prom", held(H200), NEW),
    "seed-000": (
        "seeds/000-sample.prom",
        held(*SEED_0, pod="pod1", container="pod1-ctr", namespace="default"),
        OLD,
    ),
    "seed-001-quickstart": ("seeds/001-quickstart.prom", held(QUICKSTART), NEW),
    "seed-001-mig": ("seeds/001-mig.prom", held(f"{A100}/gi13"), NEW),
}


def enriched(exposition: bytes, assignments: list[Assignment], policy: Policy) -> str:
    return encode_parsed(
        relabel(parse_exposition(exposition, "exposition"), assignments, policy)[0]
    ).decode()


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    exposition, assignments, policy = CASES[name]
    text = enriched((FIXTURES / exposition).read_bytes(), assignments, policy)
    golden = GOLDENS / f"{name}.prom"
    if request.config.getoption("--rewrite-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_samples_without_a_gpu_are_not_changed() -> None:
    exposition = b'# TYPE node_load1 gauge\nnode_load1{pod="x"} 1\nlink{nvswitch="0",pod="y"} 2\n'
    assert enriched(exposition, held("GPU-1"), NEW).encode() == exposition


def test_copies_with_different_values_are_removed_and_counted() -> None:
    exposition = (
        b'a{UUID="GPU-1",gpu="0",pod="x"} 1\na{UUID="GPU-1",gpu="0",pod="y"} '
        b'2\nb{UUID="GPU-1",gpu="0"} 3\n'
    )
    families, ambiguous = relabel(parse_exposition(exposition, "exposition"), [], NEW)
    assert ambiguous == 1
    assert encode_parsed(families).decode().splitlines()[-1] == 'b{UUID="GPU-1",gpu="0"} 3'
