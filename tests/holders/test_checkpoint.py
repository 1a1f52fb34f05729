"""The kubelet's device checkpoint: a real one of Kubernetes 1.36, older forms and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podgpu.holders.node_files import CheckpointAllocation, parse_checkpoint
from podgpu.model import Allocation, Assignment, Device, Workload
from tests.holders.devices import failure, gpu, mig_uuid, uuid

FIXTURES = Path(__file__).parents[1] / "fixtures" / "kubelet-1.36"
REAL = FIXTURES / "kubelet_internal_checkpoint"
NODE = (
    *(gpu(number) for number in range(8)),
    Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", 7, True, 12, "1g.5gb", (mig_uuid("b"),)),
)


def pod_entry(uid: str, ids: object, resource: str = "nvidia.com/gpu") -> dict[str, object]:
    return {"PodUID": uid, "ContainerName": "main", "ResourceName": resource, "DeviceIDs": ids, "AllocResp": "Cg=="}


def checkpoint(entries: object, registered: object = None) -> bytes:
    content = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}, "Checksum": 1}
    return json.dumps(content).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def read(path: Path, content: bytes) -> Allocation:
    path.write_bytes(content)
    return CheckpointAllocation(str(path)).assignments(NODE)


def test_the_real_checkpoint() -> None:
    allocation = CheckpointAllocation(str(REAL)).assignments(NODE)
    assert [(one.device, one.holder.uid[:4], one.replica, one.share) for one in allocation.assignments] == [
        (uuid(0), "e14e", "", 1.0),
        (uuid(1), "bcfd", "", 1.0),
        (uuid(4), "bcfd", "", 1.0),
        (uuid(5), "e14e", "", 1.0),
        (uuid(6), "42f8", "1", 1 / 3),
        (uuid(6), "b93d", "0", 1 / 3),
        (f"{uuid(7)}/gi12", "7854", "", 1.0),
    ]
    assert allocation.unmapped == ()
    holder = Workload(container="sidecar", uid="bcfd1eab25dc5a2c101abd9532272891")
    assert allocation.assignments[1] == Assignment(uuid(1), holder, "checkpoint", share=1.0)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([uuid(1), uuid(0)], id="before 1.20"),
        pytest.param({"-1": [uuid(1), uuid(0)]}, id="no NUMA nodes"),
        pytest.param({"0": [uuid(0), uuid(1)], "1": [uuid(0), uuid(1)]}, id="on both NUMA nodes"),
        pytest.param({"0": [uuid(0), uuid(1)], "1": None}, id="nothing on one"),
    ],
)
def test_device_ids_by_numa_node_or_not(path: Path, ids: object) -> None:
    allocation = read(path, checkpoint([pod_entry("a", ids)]))
    assert [(one.device, one.share) for one in allocation.assignments] == [(uuid(0), 1.0), (uuid(1), 1.0)]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "it is empty"),
        (REAL.read_bytes()[:-1], "truncated"),
        (b"{}", "Data"),
        (checkpoint([pod_entry("", [])]), "Data.PodDeviceEntries[0].PodUID"),
        (checkpoint([{"PodUID": "a", "ContainerName": "b"}]), "ResourceName"),
        (checkpoint([pod_entry("a", {"0": [1]})]), "DeviceIDs"),
    ],
)
def test_malformed_files(content: bytes, place: str) -> None:
    assert failure(lambda: parse_checkpoint(content, "/x/checkpoint"), "/x/checkpoint", place).reason == "malformed"
