"""The view as metrics: every family declared once, nothing for promtool to find, labels kept between renderings."""

from __future__ import annotations

import shutil
import subprocess
from fractions import Fraction

import pytest

from podgpu.cluster.labels import LabelMemory
from podgpu.cluster.metrics import cluster_families, node_families, self_families
from podgpu.cluster.reading import ClusterReading, NamespaceCounters, TargetOutcome
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble
from podgpu.figures.device import DeviceFigures, HolderFigures, Owner
from podgpu.figures.prices import Price, Prices
from podgpu.metrics.encode import encode
from podgpu.metrics.families import CLUSTER_DEVICE_HEALTH, CLUSTER_FAMILIES, OWN_FAMILIES, SEED_FAMILIES
from podgpu.metrics.parse import parse_text
from podgpu.model import Workload
from tests.cluster.view_readings import H100, WALL, gpu, holder, node, value

PROMTOOL = shutil.which("promtool")
DECLARED = {spec.name: spec for spec in (*CLUSTER_FAMILIES, *SEED_FAMILIES)}


def everything() -> ClusterView:
    """A view with a sample in every family."""
    memory, settings = Memory(), ViewSettings(idle_after=1.0)
    job = HolderFigures(Workload(job="17"), utilization=0.0)
    instance = DeviceFigures(
        "GPU-2", 2, H100, instance="1", profile="1g.10gb", holders=(holder(utilization=0.0),), measured=3.0
    )
    prices = Prices("EUR", {H100: Price(Fraction(1), Fraction(1))})
    for at in (0.0, 15.0):
        nodes = (
            node(
                "n1",
                gpu(0, holder(utilization=0.0), measured=30.0),
                gpu(1, job, measured=0.0),
                instance,
                read_at=at,
                namespaces=(
                    NamespaceCounters("ml", H100, at, at, at),
                    NamespaceCounters("ml", "NVIDIA A30", at, at, at),
                ),
            ),
            node("old", gpu(9, holder("p")), read_at=at - 100),
        )
        reading = ClusterReading(
            nodes,
            outcomes=(TargetOutcome("http://n1:9400/metrics", 0.02), TargetOutcome("x", 5.0, "timeout", "slow")),
            errors={("x", "timeout"): 2},
            owners={("ml", "train"): Owner("Job", "train")},
        )
        view = assemble(reading, memory, settings, at, WALL + at, prices=prices)
    return view


def test_every_family_is_declared_with_its_labels_and_every_declared_one_comes() -> None:
    found = {family.name: family for family in cluster_families(everything())}
    assert DECLARED.keys() - found.keys() == {"<node>_info", "POD_GPU_MAP_INFO_<n>"}
    for name, family in found.items():
        spec = DECLARED[name]
        assert (family.type, family.help) == (spec.type, spec.help)
        assert family.samples, name
        for sample in family.samples:
            labels = [label for label, _ in sample.labels.pairs]
            assert labels == [label for label in spec.labels if label in labels]


def test_no_name_is_the_exporters_too() -> None:
    """Both may be scraped by one Prometheus: sum() of either must not count the other. A GPU's health is one metric for
    all: the exporters tell of every condition but the one that the cluster tells of."""
    shared = DECLARED.keys() & {spec.name for spec in OWN_FAMILIES}
    assert shared == {CLUSTER_DEVICE_HEALTH.name}
    told = {dict(sample.labels.pairs)["condition"] for f in cluster_families(everything()) for sample in f.samples
            if f.name == CLUSTER_DEVICE_HEALTH.name}  # fmt: skip
    assert told == {"node_gone"}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here; on Debian: apt-get install prometheus")
def test_promtool_finds_no_fault_with_our_own_names() -> None:
    view = everything()
    for families in (cluster_families(view), node_families(view)):
        text = encode(families)
        checked = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, timeout=60)
        findings = (checked.stdout + checked.stderr).decode()
        assert checked.returncode in (0, 3), findings
        assert [line for line in findings.splitlines() if "podgpu_" in line] == []


def test_cluster_on_itself() -> None:
    view = everything()
    assert value(view, "podgpu_cluster_target_up", target="http://n1:9400/metrics") == 1
    assert value(view, "podgpu_cluster_target_up", target="x") == 0
    assert value(view, "podgpu_cluster_target_duration_seconds", target="x") == 5
    assert value(view, "podgpu_cluster_target_errors_total", target="x", reason="timeout") == 2
    assert value(view, "podgpu_cluster_node_up", node="n1") == 1
    assert value(view, "podgpu_cluster_node_up", node="old") == 0
    assert value(view, "podgpu_cluster_node_last_seen_timestamp_seconds", node="old") == WALL - 85
    assert value(view, "podgpu_cluster_round_timestamp_seconds") == WALL + 15
    own = {family.name for family in self_families(view)}
    assert all(name.startswith("podgpu_cluster_") for name in own)


def test_before_the_first_round_there_is_cluster_alone() -> None:
    families = parse_text(encode(cluster_families(ClusterView(ViewSettings(), WALL))).decode())
    assert {family.name for family in families} == {
        "podgpu_cluster_build_info",
        "podgpu_cluster_round_timestamp_seconds",
    }


def test_labels_are_kept_from_one_rendering_to_the_next_and_no_longer() -> None:
    labels, view = LabelMemory(), everything()
    first = encode(cluster_families(view, labels))
    labels.next_rendering()
    known = len(labels)
    again = cluster_families(view, labels)
    assert encode(again) == first
    assert len(labels) == known
    before = {id(sample.labels) for family in again for sample in family.samples}
    labels.next_rendering()
    third = {id(sample.labels) for family in cluster_families(view, labels) for sample in family.samples}
    assert third == before
    for _ in range(2):
        labels.next_rendering()
    assert len(labels) == 0
