"""The join: who gets pod labels, and that no series is ever printed twice."""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.metrics.counters import parse_counters, shipped_counters
from podgpu.metrics.named_counters import Naming
from podgpu.metrics.render import Policy, join
from podgpu.metrics.text import encode
from podgpu.model import (
    Assignment,
    ContainerUsage,
    Device,
    Reading,
    Snapshot,
    Usage,
    Workload,
    XidTally,
)
from podgpu.snapshot_json import dump_snapshot, load_snapshot

COUNTERS = (shipped_counters("dcp") or ()) + parse_counters("DCGM_EXP_XID_ERRORS_COUNT,gauge,n\n", "test")
POLICY = Policy(counters=COUNTERS, hostname="h")

GPUS = [Device(i, f"GPU-{i}", f"0000:{i}", "NVIDIA H100", minor=i) for i in range(3)]
INSTANCE = Device(2, "GPU-2", "0000:2", "NVIDIA H100", 2, True, 7, "1g.10gb", ("MIG-a",))
DEVICES = [*GPUS, INSTANCE]
HOLDERS = [Workload("ns", f"p{i}", c) for i in range(3) for c in ("a", "b")]

assignments = st.lists(
    st.builds(
        Assignment,
        device=st.sampled_from([d.key for d in DEVICES]),
        holder=st.sampled_from(HOLDERS),
        source=st.sampled_from(["kubelet", "podlist"]),
    ),
    max_size=12,
    unique_by=lambda a: (a.device, a.holder),
)
values = st.dictionaries(
    st.sampled_from([c.field.id for c in Naming("both").shipped("dcp") or () if c.field.type != "text"]),
    st.integers(0, 100),
    max_size=8,
)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    readings = tuple(Reading(d, draw(values) | {1: "580.1"}) for d in DEVICES if draw(st.booleans()))
    xids = draw(st.sets(st.tuples(st.sampled_from([d.key for d in DEVICES]), st.integers(1, 172)), max_size=4))
    tallies = tuple(XidTally(key, xid, 2, 5.0, draw(st.integers(0, 2))) for key, xid in sorted(xids))
    return Snapshot(1.0, tuple(DEVICES), readings, tuple(draw(assignments)), xids=tallies, last_xid={"GPU-0": 79})


def series(exposition: bytes) -> list[str]:
    return [line.rsplit(" ", 1)[0] for line in exposition.decode().splitlines() if not line.startswith("#")]


OWN_COLLECTORS = "DCGM_EXP_XID_ERRORS_COUNT,gauge,n\nDCGM_EXP_XID_ERRORS_TOTAL,counter,n\n"
NAMINGS = [Naming("4.8"), Naming("4.9"), Naming("both")]


def no_series_twice_and_one_head_per_family(
    snapshot: Snapshot, old: bool, copy: bool, virtual: bool, naming: Naming
) -> None:
    policy = Policy(
        (naming.shipped("dcp") or ()) + naming.parse(OWN_COLLECTORS, "test"),
        "h",
        naming.host_labels,
        old_namespace=old,
        copy_parent_values=copy,
        virtual_gpus=virtual,
    )
    exposition = encode(join(snapshot, policy))
    assert not [s for s, n in Tally(series(exposition)).items() if n > 1]
    heads = [line for line in exposition.decode().splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


def pod_labels_only_where_exactly_one_workload_holds(snapshot: Snapshot) -> None:
    held = {d.key: {a.holder for a in snapshot.assignments if a.device == d.key} for d in DEVICES}
    for name in series(encode(join(snapshot, POLICY))):
        if not name.startswith("DCGM_FI"):
            continue
        device = next(
            d
            for d in DEVICES
            if f'UUID="{d.uuid}"' in name
            and (f'GPU_I_ID="{d.gi_id}"' in name) == d.is_instance
            and ("GPU_I_ID" in name) == d.is_instance
        )
        (holder,) = held[device.key] if len(held[device.key]) == 1 else (None,)
        assert ('pod="' in name) == (holder is not None)
        if holder is not None:
            pairs = {"container": holder.container, "namespace": holder.namespace, "pod": holder.pod}
            assert all(f'{label}="{value}"' in name for label, value in pairs.items())


def the_order_of_assignments_does_not_matter(snapshot: Snapshot) -> None:
    turned = Snapshot(
        snapshot.taken_at,
        snapshot.devices,
        snapshot.readings,
        snapshot.assignments[::-1],
        xids=snapshot.xids,
        last_xid=snapshot.last_xid,
    )
    assert sorted(series(encode(join(turned, POLICY)))) == sorted(series(encode(join(snapshot, POLICY))))


def a_dump_is_a_fixture(snapshot: Snapshot) -> None:
    loaded = load_snapshot(dump_snapshot(snapshot))
    assert loaded == snapshot
    assert encode(join(loaded, POLICY)) == encode(join(snapshot, POLICY))


@given(snapshots(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from(NAMINGS))
def test_any_snapshot(snapshot: Snapshot, old: bool, copy: bool, virtual: bool, naming: Naming) -> None:
    no_series_twice_and_one_head_per_family(snapshot, old, copy, virtual, naming)
    pod_labels_only_where_exactly_one_workload_holds(snapshot)
    the_order_of_assignments_does_not_matter(snapshot)
    a_dump_is_a_fixture(snapshot)


@pytest.mark.parametrize(
    "text", ["[]", "3", "[" * 5000, '{"version": 1, "taken_at": 1, "devices": {}, "readings": [[]]}']
)
def test_what_is_no_dump_is_said_to_be_none(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        load_snapshot(text)


def test_label_type_fields_stay_off_podgpu_families() -> None:
    snapshot = Snapshot(1.0, (GPUS[0],), (Reading(GPUS[0], {1: "580.1", 240: 5, 150: 40}),))
    exposition = encode(join(snapshot, POLICY)).decode()
    assert 'DCGM_FI_DEV_GPU_TEMP{gpu="0"' in exposition
    assert all("DCGM_FI_DRIVER_VERSION" not in x for x in exposition.splitlines() if x.startswith("podgpu_"))


def test_xid_attributes_stand_sorted_among_the_pod_labels() -> None:
    snapshot = Snapshot(
        1.0, (GPUS[0],), (Reading(GPUS[0], {}),), (Assignment("GPU-0", Workload("ns", "p", "c"), "kubelet"),)
    )
    exposition = encode(join(snapshot, POLICY)).decode()
    assert 'Hostname="h",container="c",err_code="0",err_msg="no error",namespace="ns",pod="p"} 0' in exposition


def test_holders_without_names_are_told_apart_by_uid() -> None:
    holders = [Workload(uid=f"u-{n}", container_id=str(n) * 64) for n in range(2)]
    usage = Usage(tuple(ContainerUsage("GPU-0", holder, allocated_ns=1) for holder in holders))
    snapshot = Snapshot(1.0, (GPUS[0],), (Reading(GPUS[0], {150: 40}),), usage=usage)
    exposition = encode(join(snapshot, POLICY))
    assert len(series(exposition)) == len(set(series(exposition)))
    assert 'pod_uid="u-1"' in exposition.decode()


def test_a_gpu_whose_number_nobody_knows_has_an_empty_one_in_every_family() -> None:
    """Known by its UUID alone, from the kubelet: families that named it -1 could be joined with none that did not."""
    lost, holder = replace(GPUS[0], index=-1), Workload("ns", "p", "c")
    usage = Usage((ContainerUsage("GPU-0", holder, allocated_ns=1),))
    given = (Assignment("GPU-0", holder, "kubelet", share=1.0),)
    snapshot = Snapshot(1.0, (lost,), (Reading(lost, {150: 40}),), given, unsupported=(("GPU-0", 150),), usage=usage)
    named = [line for line in series(encode(join(snapshot, POLICY))) if 'UUID="GPU-0"' in line]
    assert len(named) > 4
    assert [line for line in named if 'gpu=""' not in line] == []
