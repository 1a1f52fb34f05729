"""One identity of a workload, wherever it is asked for: in the merge, the ledger, the join, in `top`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cli.main import run
from podgpu.holders.merge import merge
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.render import Policy, join
from podgpu.model import (
    Allocation,
    Assignment,
    ContainerUsage,
    Device,
    Reading,
    Snapshot,
    Usage,
    Workload,
)
from podgpu.usage.presence import holdings_of
from tests.nodes.node import Description, node_of
from tests.web.server import running

UUID = "GPU-00000000-1111-2222-3333-444444444444"
POD_UID = "11111111-2222-3333-4444-555555555555"

parts = st.sampled_from(["", "a", "b", "uid", "job", "pod"])
workloads = st.builds(Workload, parts, parts, parts, parts, parts, parts)


@pytest.mark.parametrize(
    ("workload", "who"),
    [
        (Workload("ns", "pod", "main", "u", "c"), ("pod", "ns", "pod", "main")),
        (Workload("ns", "pod"), ("pod", "ns", "pod", "")),
        (Workload("ns", "pod", "main", job="7"), ("job", "7")),
        (Workload(container="main", uid="u", container_id="c"), ("uid", "u", "main")),
        (Workload(uid="u", container_id="c"), ("uid", "u", "c")),
        (Workload(container_id="c"), ("uid", "", "c")),
        (Workload("ns", "", "main"), ()),
        (Workload(), ()),
    ],
)
def test_what_a_workload_goes_by(workload: Workload, who: tuple[str, ...]) -> None:
    assert workload.who == who


def rule_of_the_ledger_and_the_merge(workload: Workload) -> tuple[object, ...]:
    """As both had it, each for itself, before there was one rule."""
    if workload.job:
        return "a job", workload.job
    if workload.pod:
        return "a pod", (workload.namespace, workload.pod, workload.container)
    return "nameless", (workload.uid, workload.container if workload.uid or workload.container_id else "") + (
        () if workload.container else (workload.container_id,)
    )


@given(workloads, workloads)
def test_two_are_the_same_when_they_were_before(one: Workload, other: Workload) -> None:
    nobody = [not (w.job or w.pod or w.uid or w.container_id) for w in (one, other)]
    same = rule_of_the_ledger_and_the_merge(one) == rule_of_the_ledger_and_the_merge(other)
    assert (one.who == other.who) == (all(nobody) or (same and not any(nobody)))


@given(workloads, workloads)
def test_the_merge_and_the_ledger_see_as_many_holders(one: Workload, other: Workload) -> None:
    """Of two sources that each name one of the two on another GPU."""
    held = {"podlist": _allocation("GPU-0", one, "podlist"), "kubelet": _allocation("GPU-1", other, "kubelet")}
    merged = {assignment.holder.who for assignment in merge(held).assignments}
    accounts = holdings_of(a for allocation in held.values() for a in allocation.assignments)
    assert merged >= {who for holders in accounts.values() for who in holders if one.who != other.who}
    assert (len(merged) == 2) == (one.who != other.who)


def _allocation(device: str, holder: Workload, source: str) -> Allocation:
    return Allocation((Assignment(device, holder, source),))


def test_a_holder_has_its_own_figures_whoever_knows_its_uid() -> None:
    """The kubelet names no uid and the ledger learns it from the processes: it is the same holder all the same."""
    device = Device(0, UUID, "0000:1", "NVIDIA H100", minor=0)
    named, known = Workload("ml", "train", "main"), Workload("ml", "train", "main", POD_UID, "c" * 64)
    snapshot = Snapshot(
        1.0,
        (device,),
        (Reading(device, {203: 80, 252: 4096}),),
        (Assignment(UUID, named, "kubelet"), Assignment(UUID, Workload("ml", "serve", "main"), "kubelet")),
        usage=Usage((ContainerUsage(UUID, known, utilization=0.25, memory=1024**3),)),
    )
    policy = Policy(counters=shipped_counters("default") or (), virtual_gpus=True)
    util = next(family for family in join(snapshot, policy) if family.name == "DCGM_FI_DEV_GPU_UTIL")
    by_pod = {dict(sample.labels.pairs).get("pod", ""): sample.value for sample in util.samples}
    assert by_pod == {"": 80, "train": 25}


def test_two_nameless_containers_of_a_pod_are_two_on_every_screen(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the kubelet's checkpoint says who holds the GPU, and nothing on the node says the pod's name."""
    entries = [
        {
            "PodUID": POD_UID,
            "ContainerName": name,
            "ResourceName": "nvidia.com/gpu",
            "DeviceIDs": {"0": [f"{UUID}::{n}"]},
        }
        for n, name in enumerate(("trainer", "sidecar"))
    ]
    registered = {"nvidia.com/gpu": [f"{UUID}::0", f"{UUID}::1"]}
    described = Description(
        about="one shared GPU, two containers of one pod without a name",
        gpus="1xH100",
        uuids=[UUID],
        arguments=["-k", "--allocation", "checkpoint:{folder}/checkpoint"],
        files={"checkpoint": {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}, "Checksum": 1}},
    )
    with node_of(described, folder) as node:
        node.take_turns()
        with running(node.agent) as client:
            lines = [line for line in client.ask("/metrics").text.splitlines() if "podgpu_allocation_info{" in line]
            assert len(lines) == 2
            assert run(["top", "--once", "--url", f"{client.address.url}/metrics"]) == 0
    table = capsys.readouterr().out
    assert [table.count(name) for name in ("trainer", "sidecar")] == [1, 1], table
