"""Tests the conversion of samples from dcgm-exporter, podgpu and Prometheus to `NodeState`."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.metrics.adapter import node_from_samples, nodes_from_vectors, rules_for, samples_in
from podgpu.metrics.fields import NameSet
from podgpu.metrics.parse import ParsedSample, parse_text
from podgpu.model import Condition, DeviceState, Holder, HolderUsage, NodeState, Workload
from tests.two_names import renamed

TESTS = Path(__file__).parents[1]
H200 = {path.stem: path.read_text() for path in sorted((TESTS / "fixtures/h200").glob("*.prom"))}
SEEDS = {path.stem: path.read_text() for path in sorted((TESTS / "fixtures/seeds").glob("*.prom"))}
GOLDEN = {
    path.parent.name: path.read_text() for path in sorted(TESTS.glob("nodes/*/expected.prom"))
}
TEXTS = {**H200, **SEEDS, **GOLDEN}
GPU = 'gpu="0",UUID="GPU-a",device="nvidia0",modelName="H100",Hostname="n"'
BUSY = f"DCGM_FI_DEV_GPU_UTIL{{{GPU}}} 5\n"
BUILD = 'podgpu_exporter_build_info{version="1.0"} 1\n'
TARGET: dict[str, Any] = {
    "job": "gpu",
    "instance": "10.0.0.1:9400",
    "namespace": "monitoring",
    "pod": "exporter-1",
    "container": "e",
}
NOW = 1_700_001_061.0


def read(text: str, **options: object) -> NodeState:
    (state,) = node_from_samples(samples_in(text), "address", **options)  # type: ignore[arg-type]
    return state


def read_gpu(text: str) -> DeviceState:
    (gpu,) = read(text).devices
    return gpu


def scrape(
    text: str, honor_labels: bool = True, at: float = NOW, **target: str
) -> list[ParsedSample]:
    """Returns the series that Prometheus would store for a scraped text."""
    names = {k: v for k, v in target.items() if k in ("cluster", "job", "instance", "replica")}
    series = [ParsedSample("up", target, 1.0), ParsedSample("", names, at)]
    for sample in (sample for family in parse_text(text) for sample in family.samples):
        own = {
            k if honor_labels or k not in target else f"exported_{k}": v
            for k, v in sample.labels.items()
            if v
        }
        series.append(ParsedSample(sample.name, {**target, **own}, sample.value))
    return series


def test_a_text_of_dcgm_exporter() -> None:
    state = read(H200["dcp_pod"])
    assert (state.producer, state.node, state.sources, state.simulated) == (
        "dcgm-exporter",
        "vm",
        (),
        False,
    )
    (gpu,) = state.devices
    assert (gpu.index, gpu.model, gpu.maker) == (0, "NVIDIA H200", "nvidia")
    assert None not in (
        gpu.utilization_ratio,
        gpu.memory_used_bytes,
        gpu.power_mw,
        gpu.temperature_celsius,
    )
    assert gpu.memory_total_bytes == pytest.approx(
        141 * 1024**3, rel=0.03
    )  # used + free + reserved
    assert [(h.namespace, h.pod, h.source, h.usage) for h in gpu.holders] == [
        ("research", "train-a", "dcgm-exporter", None)
    ]


@pytest.mark.parametrize("names", ["4.9", "both"])
@pytest.mark.parametrize("name", sorted(H200))
def test_both_generations_of_names_are_the_same(name: str, names: NameSet) -> None:
    assert read(renamed(H200[name], names)) == read(H200[name])


def test_virtual_gpus_have_no_usage() -> None:
    """dcgm-exporter 4.8.2 reports 0 for every holder, although the GPU is 47 % busy."""
    gpu = read_gpu(H200["dcp_shared"])
    assert gpu.utilization_ratio
    assert {h.pod: h.replica for h in gpu.holders if h.usage is None} == {
        "train-a": "0",
        "serve-b": "1",
        "idle-c": "2",
    }


@pytest.mark.parametrize(("second", "expected"), [(5, 0.05), (6, None)])
def test_copies_for_several_holders_must_agree(second: int, expected: float | None) -> None:
    pods = [f'{GPU},namespace="ml",pod="{pod}",container="c"' for pod in ("a", "b")]
    text = "".join(
        f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {value}\n"
        for labels, value in zip(pods, (5, second), strict=True)
    )
    assert read_gpu(text).utilization_ratio == expected


def test_mig_instances_are_nested() -> None:
    state = read(SEEDS["001-mig"])
    instances = {(gpu.index, part.id): part for gpu in state.devices for part in gpu.instances}
    assert instances
    assert all(part.profile for part in instances.values())
    assert all(gpu.mig_enabled for gpu in state.devices if gpu.instances)


def test_figures_of_the_gpu_that_are_repeated_on_its_instances() -> None:
    text = "".join(
        f'DCGM_FI_DEV_POWER_USAGE{{{GPU},GPU_I_ID="{n}",GPU_I_PROFILE="1g"}} 100\n' for n in (1, 2)
    )
    gpu = read_gpu(text)
    assert gpu.power_mw == 100_000
    assert [part.id for part in gpu.instances] == [1, 2]


def test_exporters_of_1x_without_a_uuid() -> None:
    assert read_gpu('dcgm_gpu_utilization{gpu="3"} 40\n').index == 3
    text = 'dcgm_gpu_utilization{gpu="3",uuid="GPU-a",pod_name="p",pod_namespace="n",container_name="c"} 40\n'
    gpu = read_gpu(text)
    assert (gpu.uuid, gpu.utilization_ratio) == ("GPU-a", 0.4)
    assert [h.key for h in gpu.holders] == [("pod", "n", "p", "c")]


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ("DCGM_FI_DEV_XID_ERRORS{%s} 79", Condition("xid", detail="79")),
        ("DCGM_FI_DEV_XID_ERRORS{%s} 31", None),  # caused by an application, not by the GPU
        ("DCGM_FI_DEV_XID_ERRORS{%s} 0", None),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE{%s} 1", Condition("row_remap_failure")),
        ("DCGM_FI_DEV_ROW_REMAP_PENDING{%s} 1", Condition("row_remap_pending")),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{%s} 3", Condition("ecc")),
        ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{%s} 9223372036854775792", None),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE{%s} NaN", None),
        ('podgpu_device_condition_since_timestamp_seconds{%s,condition="melted"} 1', None),
    ],
)
def test_conditions(series: str, expected: Condition | None) -> None:
    assert read_gpu(f"{BUSY}{series % GPU}\n").conditions == (
        () if expected is None else (expected,)
    )


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf", "2147483632", "9223372036854775794", "150"])
def test_impossible_figures_are_unknown(value: str) -> None:
    assert read_gpu(f"DCGM_FI_DEV_GPU_UTIL{{{GPU}}} {value}\n").utilization_ratio is None


def test_a_text_of_podgpu() -> None:
    state = read(GOLDEN["usage-time-sliced"])
    assert (state.producer, state.node) == ("podgpu", "node-1")
    assert state.taken_at == pytest.approx(NOW, abs=3600)
    assert state.version
    assert {source.up for source in state.sources} == {True}
    assert all(
        None not in (n.allocated_ns, n.busy_ns, n.energy_mj) and n.model for n in state.namespaces
    )
    (shared,) = [gpu for gpu in state.devices if len(gpu.holders) > 1]
    assert all(h.source and h.share_ratio and h.share_ratio < 1 for h in shared.holders)
    assert all(
        h.usage and h.usage.processes is not None and h.usage.busy_ns is not None
        for h in shared.holders
    )
    assert shared.usage
    assert shared.usage.energy_mj


def test_units_and_holders_of_podgpu() -> None:
    pod = 'namespace="a",pod="b",container="c"'
    text = BUILD + "".join(
        f"{name}{{{GPU},{pod}{more}}} {value}\n"
        for name, more, value in (
            ("podgpu_allocation_info", ',source="kubelet"', 1),
            ("podgpu_allocation_share_ratio", "", 0.5),
            ("podgpu_container_gpu_busy_seconds_total", "", 1.5),
            ("podgpu_container_gpu_energy_joules_total", "", 2.5),
            ("podgpu_container_gpu_memory_used_bytes", "", 1024),
        )
    )
    usage = HolderUsage(busy_ns=1_500_000_000, energy_mj=2500, memory_used_bytes=1024)
    assert read_gpu(text).holders == (
        Holder("a", "b", "c", source="kubelet", share_ratio=0.5, usage=usage),
    )


def test_a_lost_gpu_keeps_its_last_holders() -> None:
    text = f"""{BUILD}podgpu_device_condition_since_timestamp_seconds{{{GPU},condition="lost"}} 1.7e9
podgpu_container_gpu_processes{{{GPU},namespace="a",pod="gone",container="c"}} 1
podgpu_device_last_holder_info{{{GPU},namespace="a",pod="b",container="c"}} 1
podgpu_device_count{{state="lost"}} 1
podgpu_exporter_source_up{{source="gpu0"}} 0
podgpu_exporter_source_up{{source="simulated"}} 1\n"""
    state = read(text)
    (gpu,) = state.devices
    assert (gpu.conditions, gpu.holders) == ((Condition("lost", 1.7e9),), ())
    assert gpu.last_holders == (Workload("a", "b", "c"),)
    assert (state.gpus_lost, state.simulated) == (1, True)
    assert [(s.name, s.up, s.device) for s in state.sources] == [
        ("gpu0", False, "GPU-a"),
        ("simulated", True, ""),
    ]


def test_bills_of_mig_instances() -> None:
    text = (
        BUILD
        + 'podgpu_namespace_gpu_busy_seconds_total{namespace="a",modelName="H100 MIG 1g.10gb"} 2\n'
    )
    (usage,) = read(text).namespaces
    assert (usage.namespace, usage.model, usage.profile, usage.busy_ns) == (
        "a",
        "H100",
        "1g.10gb",
        2_000_000_000,
    )


def test_fields_that_are_kept() -> None:
    text = H200["dcp_pod"]
    name = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
    assert set(read_gpu(text).fields or ()) > {
        name,
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DRIVER_VERSION",
    }
    (gpu,) = read(text, keep_fields=frozenset({name})).devices
    assert set(gpu.fields or ()) <= {name}
    assert gpu.power_mw is not None


@pytest.mark.parametrize("honor_labels", [True, False])
@pytest.mark.parametrize("name", sorted(TEXTS))
def test_vectors_are_read_as_the_text(name: str, honor_labels: bool) -> None:
    ((target,), _) = nodes_from_vectors([scrape(TEXTS[name], honor_labels, **TARGET)])
    assert (target.instance, target.scraped_at) == (TARGET["instance"], NOW)
    if (
        name != "checkpoint" or not honor_labels
    ):  # with honor_labels, `container` is ambiguous and not used
        text = read(TEXTS[name], scraped_at=NOW)
        assert msgspec.structs.replace(target.state, node="") == msgspec.structs.replace(
            text, node=""
        )


def test_the_newest_copy_of_an_ha_pair_counts() -> None:
    copies = [scrape(BUSY.replace("5", value), at=at, replica=name, **TARGET) for value, at, name in
              (("10", NOW - 30, "a"), ("90", NOW, "b"), ("20", NOW - 60, "c"))]  # fmt: skip
    ((target,), _) = nodes_from_vectors(copies)
    assert target.state.devices[0].utilization_ratio == 0.9
    assert not target.state.devices[0].holders  # the label `pod` is the exporter's own pod


def test_the_exporter_s_own_pod_without_up() -> None:
    other = BUSY.replace("GPU-a", "GPU-b").replace('gpu="0"', 'gpu="1"').replace('"n"', '"vm"')
    ((target,), _) = nodes_from_vectors(
        [scrape(H200["dcp_pod"] + other, honor_labels=False, **TARGET)[1:]]
    )
    assert [[h.pod for h in gpu.holders] for gpu in target.state.devices] == [["train-a"], []]


def test_equal_targets_of_two_clusters() -> None:
    found, _ = nodes_from_vectors([scrape(BUSY, cluster=name, **TARGET) for name in ("a", "b")])
    assert len(found) == 2


def test_one_target_beyond_a_limit_is_left_out() -> None:
    many = re.sub("GPU-a", "x" * 300, BUSY)
    found, errors = nodes_from_vectors(
        [scrape(many, job="a", instance="bad"), scrape(BUSY, job="a", instance="good")]
    )
    assert [target.instance for target in found] == ["good"]
    assert "256" in errors["bad"]


def test_a_text_that_names_two_nodes() -> None:
    other = BUSY.replace("GPU-a", "GPU-b").replace('"n"', '"n2"')
    unnamed = 'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-b"} 7\n'
    states = node_from_samples(samples_in(BUSY + other + unnamed))
    assert [(state.node, [gpu.power_mw for gpu in state.devices]) for state in states] == [
        ("n", [None]),
        ("n2", [7000]),
    ]


NAMES = st.sampled_from(list(rules_for(frozenset())))
TEXT = st.text(max_size=5) | st.sampled_from(
    ["0", "1", "lost", "xid", "expected", "simulated", "a MIG b"]
)
LABELS = st.dictionaries(
    st.sampled_from(
        [
            "gpu",
            "UUID",
            "GPU_I_ID",
            "pod",
            "namespace",
            "exported_pod",
            "condition",
            "state",
            "source",
            "modelName",
        ]
    ),
    TEXT,
)
SAMPLES = st.lists(
    st.builds(ParsedSample, NAMES, LABELS, st.floats() | st.just(math.nan)), max_size=8
)


@given(SAMPLES)
def test_any_samples_are_read(samples: list[ParsedSample]) -> None:
    try:
        states = node_from_samples(samples, "address")
    except msgspec.ValidationError as error:
        if "is listed" not in str(error):  # two GPUs have the same index, or both have none
            raise
        return
    for state in states:
        assert state.node
