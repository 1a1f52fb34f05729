"""Layouts of targets that are kept from one round to the next: a figure is what it would be without them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.prom.layouts import AllSeries, Round
from podgpu.cluster.prom.nodes import LayoutMemory, nodes_of
from podgpu.cluster.prom.targets import targets_of
from podgpu.figures.from_exposition import NODE_LABELS
from podgpu.metrics.fields import field_named
from podgpu.metrics.parse import ParsedSample

_FIELD = field_named("DCGM_FI_DEV_MEM_COPY_UTIL")
assert _FIELD is not None
NOW = Round(at=5000.0, at_monotonic=100.0, node_labels=NODE_LABELS, used_field=_FIELD, beside=(1001,))
NAMES = (
    *("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_DEV_POWER_USAGE"),
    *("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "podgpu_device_memory_used_bytes"),
    *("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "podgpu_device_condition_since_timestamp_seconds"),
    *("podgpu_device_last_holder_info", "podgpu_allocation_info", "podgpu_allocation_share_ratio"),
    *("podgpu_container_gpu_processes", "podgpu_container_gpu_busy_seconds_total", "podgpu_device_energy_joules_total"),
    *("podgpu_namespace_gpu_busy_seconds_total", "podgpu_namespace_gpu_energy_joules_total", "podgpu_device_count"),
    *("podgpu_exporter_build_info", "podgpu_exporter_snapshot_timestamp_seconds", "podgpu_exporter_source_up"),
)
LABELS = st.fixed_dictionaries(
    {"job": st.just("gpu")},
    optional={
        "instance": st.sampled_from("xy"),
        "UUID": st.sampled_from(["GPU-1", "GPU-2"]),
        "GPU_I_ID": st.just("1"),
        "GPU_I_PROFILE": st.sampled_from(["1g", "2g"]),
        "modelName": st.just("H200"),
        "Hostname": st.sampled_from(["a", "b"]),
        "pod": st.sampled_from(["p", "q"]),
        "namespace": st.just("n"),
        "exported_pod": st.just("p"),
        "exported_namespace": st.just("n"),
        "condition": st.sampled_from(["lost", "xid", "other"]),
        "state": st.just("lost"),
        "source": st.sampled_from(["simulated", "nvml"]),
        "replica": st.sampled_from("rs"),
    },
)
VALUES = st.sampled_from([0.0, 0.5, 1.0, 13.0, 79.0, 300.0, float(0x7FFFFFF0), 1e19, -1.0])
UPS = st.lists(
    st.builds(
        ParsedSample,
        st.just("up"),
        st.fixed_dictionaries(
            {"job": st.just("gpu"), "instance": st.sampled_from("xy")},
            optional={"pod": st.sampled_from(["p", "q"]), "namespace": st.just("n"), "replica": st.sampled_from("rs")},
        ),
        st.just(1.0),
    ),
    max_size=3,
)
Told = tuple[list[ParsedSample], list[ParsedSample]]
"""A round's samples and its `up`."""


@st.composite
def rounds(draw: st.DrawFn) -> list[Told]:
    """Most series are there in most of them, and most have the same `up` as the one before."""
    sets = draw(st.lists(LABELS, min_size=1, max_size=5))
    series = draw(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(sets)), min_size=1, max_size=12))
    found: list[Told] = []
    for _ in range(draw(st.integers(2, 4))):
        gone = draw(st.none() | st.integers(0, len(series) - 1))
        samples = [ParsedSample(*of, draw(VALUES)) for at, of in enumerate(series) if at != gone]
        ups = draw(UPS) if not found or draw(st.booleans()) else found[-1][1]
        found.append((samples, ups))
    return found


@given(rounds(), st.booleans())
def test_the_same_as_without_a_memory(of_rounds: list[Told], has_totals: bool) -> None:
    memory = LayoutMemory()
    for number, (samples, ups) in enumerate(of_rounds):
        now = replace(NOW, at=NOW.at + number, totals={("GPU-1", ""): 1000 + number} if has_totals else {})
        targets = targets_of(ups, NODE_LABELS)
        times = {targets.of(sample.labels): now.at - 10 - number for sample in samples}
        series = AllSeries.of(samples, targets)
        assert nodes_of(series, times, targets, now, memory) == nodes_of(series, times, targets, now)


def test_a_pod_that_turns_out_to_be_the_exporters_is_no_holder_any_more() -> None:
    place = {"job": "gpu", "instance": "x", "pod": "p", "namespace": "n"}
    sample = ParsedSample("DCGM_FI_DEV_GPU_UTIL", place | {"UUID": "GPU-1"}, 50.0)
    memory = LayoutMemory()
    for up, holders in (([], 1), ([ParsedSample("up", place, 1.0)], 0), ([], 1)):
        targets = targets_of(up, NODE_LABELS)
        (node,) = nodes_of(AllSeries.of([sample], targets), {}, targets, NOW, memory)
        assert len(node.devices[0].holders) == holders
