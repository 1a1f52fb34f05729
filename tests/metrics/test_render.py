"""Tests the metric families of a NodeState: pod labels, unique series and stable labels."""

from __future__ import annotations

from collections import Counter as Tally

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from podgpu.metrics.counters import parse_counters, shipped_counters
from podgpu.metrics.dcgm import render_dcgm
from podgpu.metrics.encode import encode
from podgpu.metrics.fields import HOST_LABELS, NameSet
from podgpu.metrics.labels import Policy
from podgpu.metrics.render import render_own
from podgpu.model import (
    Condition,
    DeviceState,
    EntityState,
    GpuOrInstance,
    Holder,
    HolderUsage,
    MigInstance,
    NodeState,
    WaitPart,
    XidCount,
    decode_node,
    encode_node,
)

OWN_COLLECTORS = "DCGM_EXP_XID_ERRORS_COUNT,gauge,n\nDCGM_EXP_XID_ERRORS_TOTAL,counter,n\n"
NAME_SETS: list[NameSet] = ["4.8", "4.9", "both"]
COUNTERS = (shipped_counters("dcp") or ()) + parse_counters(OWN_COLLECTORS, "test")
POLICY = Policy(counters=COUNTERS, hostname="h")
FIELDS = sorted(
    {c.field.name for c in shipped_counters("dcp", "both") or () if c.field.type != "text"}
)

usages = st.none() | st.builds(
    HolderUsage, utilization_ratio=st.just(0.5), energy_mj=st.integers(0, 9)
)
holders = st.lists(
    st.builds(
        Holder,
        namespace=st.just("ns"),
        pod=st.sampled_from(["p", "q"]),
        container=st.sampled_from(["a", "b"]),
        source=st.sampled_from(["", "kubelet", "podlist"]),
        usage=usages,
    ),
    max_size=4,
    unique_by=lambda holder: holder.key,
).map(tuple)
slot_parts = {
    "holders": holders,
    "fields": st.none()
    | st.dictionaries(st.sampled_from(FIELDS), st.integers(0, 100), max_size=8).map(
        lambda values: values | {"DCGM_FI_DRIVER_VERSION": "580.1"}
    ),
    "xids": st.lists(
        st.builds(XidCount, st.integers(1, 172), st.just(2), st.just(5.0), st.integers(0, 2)),
        max_size=3,
        unique_by=lambda count: count.xid,
    ).map(tuple),
    "last_xid": st.sampled_from([None, 79]),
    "hidden": st.booleans(),
}
instances = st.lists(
    st.builds(MigInstance, id=st.integers(1, 9), profile=st.just("1g.10gb"), **slot_parts),
    max_size=2,
    unique_by=lambda instance: instance.id,
).map(tuple)
devices = st.builds(
    DeviceState, uuid=st.just(""), model=st.just("NVIDIA H100"), instances=instances, **slot_parts
)
nodes = st.lists(devices, max_size=3).map(
    lambda gpus: NodeState(
        producer="podgpu",
        devices=tuple(
            msgspec.structs.replace(gpu, index=n, uuid=f"GPU-{n}") for n, gpu in enumerate(gpus)
        ),
    )
)


def gpu(**parts: object) -> NodeState:
    given = {"index": 0, "uuid": "GPU-0", "model": "NVIDIA H100", "fields": {}} | parts
    return NodeState(producer="podgpu", devices=(DeviceState(**given),))  # type: ignore[arg-type]


def text_of(state: NodeState, policy: Policy = POLICY) -> str:
    return encode((*render_dcgm(state, policy), *render_own(state, policy))).decode()


def series(text: str) -> list[str]:
    return [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]


@given(nodes, st.booleans(), st.booleans(), st.booleans(), st.sampled_from(NAME_SETS))
def test_no_series_and_no_family_twice(
    state: NodeState, old: bool, copy: bool, virtual: bool, names: NameSet
) -> None:
    policy = Policy(
        (shipped_counters("dcp", names) or ()) + parse_counters(OWN_COLLECTORS, "test", names),
        "h",
        HOST_LABELS[names],
        old_namespace=old,
        copy_parent_values=copy,
        virtual_gpus=virtual,
    )
    text = text_of(state, policy)
    assert [one for one, times in Tally(series(text)).items() if times > 1] == []
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    assert text_of(decode_node(encode_node(state)), policy) == text


def test_the_largest_pairs_of_waiting_pods_have_series_if_wanted() -> None:
    runners = tuple(WaitPart("ns", f"r{n}", "main", ratio=n / 100) for n in range(1, 31))
    usage = HolderUsage(wait_ratio=1.0, waits_for=(*runners, WaitPart(ratio=0.5)))
    state = gpu(holders=(Holder("ns", "waiter", "main", usage=usage),))
    name = "podgpu_container_gpu_waits_for_ratio"
    assert name not in text_of(state)
    for limit, first, last in ((1, 11, 30), (25, 25, 30)):
        found = [
            line
            for line in text_of(state, Policy(wait_pairs=limit)).splitlines()
            if line.startswith(name)
        ]
        assert [line.split('runner_pod="')[1] for line in found] == [
            f'r{n}"}} {n / 100}' for n in range(last, first - 1, -1)
        ]
        assert (
            'container="main",namespace="ns",pod="waiter",runner_container="main",runner_namespace="ns"'
            in found[0]
        )


@given(nodes)
def test_pod_labels_only_if_exactly_one_workload_holds_the_device(state: NodeState) -> None:
    slots: dict[tuple[str, str], GpuOrInstance] = {}
    for device in state.devices:
        slots[device.uuid, ""] = device
        slots |= {(device.uuid, str(instance.id)): instance for instance in device.instances}
    for family in render_dcgm(state, POLICY):
        for sample in family.samples if family.name.startswith("DCGM_FI") else ():
            labels = dict(sample.labels.pairs)
            slot = slots[labels["UUID"], labels.get("GPU_I_ID", "")]
            held = [holder for holder in slot.holders if holder.source]
            assert not slot.hidden
            expected = (
                (held[0].namespace, held[0].pod, held[0].container)
                if len(held) == 1
                else (None, None, None)
            )
            assert (labels.get("namespace"), labels.get("pod"), labels.get("container")) == expected


def test_label_type_fields_are_not_on_podgpu_families() -> None:
    text = text_of(gpu(fields={"DCGM_FI_DRIVER_VERSION": "580.1", "DCGM_FI_DEV_GPU_TEMP": 40}))
    assert 'DCGM_FI_DRIVER_VERSION="580.1"' in text
    assert all(
        "DCGM_FI_DRIVER_VERSION" not in line
        for line in text.splitlines()
        if line.startswith("podgpu_")
    )


def test_holders_without_names_have_uid_and_container_id() -> None:
    unnamed = tuple(
        Holder(uid=f"u-{n}", container_id=str(n) * 64, usage=HolderUsage(allocated_ns=1))
        for n in range(2)
    )
    text = text_of(gpu(holders=unnamed))
    assert len(series(text)) == len(set(series(text)))
    assert f'container_id="{"1" * 64}",pod_uid="u-1"' in text


def test_a_gpu_without_index_has_an_empty_one_in_every_family() -> None:
    """If only the kubelet lists a GPU, its index is unknown.

    All families need the same label value for joins.
    """
    holder = Holder(
        "ns", "p", "c", source="kubelet", share_ratio=1.0, usage=HolderUsage(allocated_ns=1)
    )
    state = gpu(
        index=None,
        fields={"DCGM_FI_DEV_GPU_TEMP": 40},
        holders=(holder,),
        unsupported=("DCGM_FI_DEV_FB_USED",),
    )
    named = [line for line in series(text_of(state)) if 'UUID="GPU-0"' in line]
    assert len(named) > 4
    assert [line for line in named if 'gpu=""' not in line] == []


DIVIDED = {
    "DCGM_FI_DEV_GPU_UTIL": 80,
    "DCGM_FI_DEV_FB_USED": 4096,
    "DCGM_FI_DEV_POWER_USAGE": 400.0,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 9000,
}
MEASURED = HolderUsage(
    utilization_ratio=0.25, memory_used_bytes=1 << 30, power_ratio=0.5, energy_mj=3000
)


def values_by_pod(state: NodeState, name: str) -> dict[str | None, float]:
    """Returns the values of a DCGM family by the label `pod` or `hpc_job`, if there is one."""
    values = {}
    for family in render_dcgm(state, Policy(counters=COUNTERS, virtual_gpus=True)):
        for sample in family.samples if family.name == name else ():
            labels = dict(sample.labels.pairs)
            values[labels.get("pod", labels.get("hpc_job"))] = sample.value
    return values


def holder(pod: str, usage: HolderUsage | None = None) -> Holder:
    return Holder("ns", pod, "main", source="kubelet", share_ratio=1.0, usage=usage)


def test_the_only_holder_of_a_virtual_gpu_has_the_gpu_s_values_if_its_own_are_unknown() -> None:
    for usage in (None, HolderUsage(allocated_ns=1)):
        state = gpu(fields=DIVIDED, holders=(holder("p", usage),))
        for name, value in DIVIDED.items():
            assert values_by_pod(state, name)["p"] == value
        assert values_by_pod(state, "DCGM_FI_DEV_GPU_UTIL") == {"p": 80, None: 80}
        assert values_by_pod(state, "DCGM_FI_DEV_POWER_USAGE") == {"p": 400.0}

    state = gpu(fields=DIVIDED, holders=(holder("p", MEASURED),))
    assert values_by_pod(state, "DCGM_FI_DEV_POWER_USAGE") == {"p": 200.0}


def test_a_virtual_gpu_keeps_its_own_series_if_the_value_of_a_holder_is_unknown() -> None:
    power = "DCGM_FI_DEV_POWER_USAGE"
    energy = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
    unknown = gpu(fields=DIVIDED, holders=(holder("p"), holder("q")))
    assert values_by_pod(unknown, power) == {None: 400.0}
    assert values_by_pod(unknown, "DCGM_FI_DEV_FB_USED") == {None: 4096}

    partly = HolderUsage(power_ratio=0.25)
    one = gpu(fields=DIVIDED, holders=(holder("p", MEASURED), holder("q", partly)))
    assert values_by_pod(one, power) == {"p": 200.0, "q": 100.0}
    assert values_by_pod(one, energy) == {"p": 3000, None: 9000}


def test_jobs_that_share_a_gpu_have_a_series_each() -> None:
    jobs = [Holder(job=name, source="hpc") for name in ("4712", "4713", "4712")]
    state = gpu(fields=DIVIDED, holders=(*jobs, holder("p")), last_xid=79)
    lines = [one for one in series(text_of(state)) if one.startswith("DCGM_FI_DEV_FB_USED")]
    assert [line.partition("hpc_job")[2] for line in lines] == ['="4712"}', '="4713"}']
    assert text_of(state).count("DCGM_FI_DEV_XID_ERRORS{") == 2


def health_of(state: NodeState) -> dict[str, tuple[float, str, str, str]]:
    policy = Policy(parse_counters("DCGM_EXP_GPU_HEALTH_STATUS,gauge,h", "test"))
    found = {}
    for sample in render_dcgm(state, policy)[0].samples:
        labels = dict(sample.labels.pairs)
        kinds = labels["health_error_severity"], labels["health_error_category"]
        found[labels["health_watch"]] = (sample.value, labels["health_error_code"], *kinds)
    return found


def test_health_without_dcgm_is_that_of_the_known_conditions() -> None:
    well = 0, "DCGM_FR_OK", "NONE", "NONE"
    pending = (10, "DCGM_FR_PENDING_ROW_REMAP", "RESET", "HARDWARE_MEMORY")
    healthy = ("lost", "row_remap_failure", "ecc", "thermal", "nvlink")
    assert health_of(gpu()) == {}
    assert health_of(gpu(healthy=healthy)) == {"MEM": well, "THERMAL": well, "NVLINK": well}

    remap = Condition("row_remap_pending", 1.0)
    sick = gpu(healthy=healthy, conditions=(remap, Condition("power_brake", 1.0)))
    power = (10, "DCGM_FR_CLOCK_THROTTLE_POWER", "MONITOR", "HARDWARE_POWER")
    assert health_of(sick) == {"MEM": pending, "THERMAL": well, "POWER": power, "NVLINK": well}

    broken = gpu(healthy=("row_remap_failure",), conditions=(remap, Condition("ecc", 1.0)))
    failed = (20, "DCGM_FR_VOLATILE_DBE_DETECTED", "ISOLATE", "HARDWARE_MEMORY")
    assert health_of(broken) == {"MEM": failed}


def test_dcgm_s_own_health_checks_come_first() -> None:
    name = "DCGM_EXP_GPU_HEALTH_STATUS"
    detail = name, {"health_watch": "SM", "health_error_code": "DCGM_FR_OK"}, 0
    state = gpu(healthy=("ecc",), details=(detail,))
    policy = Policy(parse_counters(f"{name},gauge,h", "test"))
    watches = [dict(one.labels.pairs)["health_watch"] for one in render_dcgm(state, policy)[0][3]]
    assert watches == ["SM"]


def test_activity_of_a_shared_virtual_gpu_stays_with_the_gpu() -> None:
    engine = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
    tensor = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
    two = (holder("p", MEASURED), holder("q", HolderUsage(utilization_ratio=0.5)))
    state = gpu(fields={**DIVIDED, engine: 0.8, tensor: 0.3}, holders=two)
    assert values_by_pod(state, tensor) == {None: 0.3}
    assert values_by_pod(state, engine) == {"p": 0.25, "q": 0.5, None: 0.8}
    assert values_by_pod(state, "DCGM_FI_DEV_GPU_UTIL") == {"p": 25, "q": 50, None: 80}
    assert values_by_pod(state, "DCGM_FI_DEV_FB_USED") == {"p": 1024, None: 4096}

    without_engine = gpu(fields=DIVIDED, holders=two)
    assert values_by_pod(without_engine, engine) == {}


def test_clock_events_by_window_and_since_the_start() -> None:
    rows = "DCGM_EXP_CLOCK_EVENTS_COUNT,gauge,c\nDCGM_EXP_CLOCK_EVENTS_TOTAL,counter,t\n"
    policy = Policy(parse_counters(rows, "test"), clock_window_ms=5000)
    events = {"hw_thermal": (0, 3), "power_cap": (2, 0), "gpu_idle": (4, 1)}
    found = {}
    for family in render_dcgm(gpu(clock_events=events), policy):
        for sample in family.samples:
            labels = dict(sample.labels.pairs)
            window = labels.get("window_size_in_ms")
            found[family.name[-5:], labels["clock_event"], window] = sample.value
    assert found == {
        ("COUNT", "gpu_idle", "5000"): 4,
        ("COUNT", "power_cap", "5000"): 2,
        ("TOTAL", "gpu_idle", None): 1,
        ("TOTAL", "hw_thermal", None): 3,
    }


def test_links_have_their_own_labels_and_those_of_the_counter_file() -> None:
    rows = "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0,counter,c\nDCGM_FI_DRIVER_VERSION,label,v\n"
    policy = Policy(parse_counters(rows, "test"), "h", replace_blanks_in_model_name=True)
    labels = {"nvlink": "1", "gpu": "0", "model_name": "NVIDIA H100"}
    values: dict[str, int | float | str] = {"DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0": 7}
    state = NodeState(producer="podgpu", entities=(EntityState("LINK", labels, values),))
    [family] = render_dcgm(state, policy)
    [sample] = family.samples
    assert sample.value == 7
    expected = {"nvlink": "1", "gpu": "0", "model_name": "NVIDIA-H100", "Hostname": "h"}
    assert dict(sample.labels.pairs) == expected
