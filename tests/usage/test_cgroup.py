"""Tests how the container of a process is found in its cgroup file."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.model import Workload
from podgpu.node.usage.containers import parse_cgroup
from tests.simulated import Driver, Qos, Runtime, cgroup_text, container_cgroup

UID = "3f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a11"
UID_ = UID.replace("-", "_")
OTHER_UID = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
HASH = "89f4f2cb511c3b0b7e5272cff5ec37bf"
ID = "0123456789abcdef" * 4
OTHER_ID = "fedcba9876543210" * 4

IN_POD = {
    "cgroupfs": f"/kubepods/burstable/pod{UID}/{ID}",
    "systemd, guaranteed, CRI-O": f"/kubepods.slice/kubepods-pod{UID_}.slice/crio-{ID}.scope",
    (
        "CRI-O, in a cgroup inside the container"
    ): f"/kubepods.slice/kubepods-pod{UID_}.slice/crio-{ID}.scope/container",
    (
        "a cgroup in the container"
    ): f"/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope/sub/child",
    "docker in a container": f"/kubepods/burstable/pod{UID}/{ID}/docker/{OTHER_ID}",
    (
        "a cluster in a container"
    ): f"/kubepods/pod{UID}/{ID}/kubelet/kubepods/pod{OTHER_UID}/{OTHER_ID}",
    "containerd with systemd, runc without": (
        f"/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{ID}"
    ),
    "another pod, from a cgroup namespace, cgroupfs": f"/../../pod{UID}/{ID}",
    "deleted": f"/kubepods/pod{UID}/{ID} (deleted)",
}

OUTSIDE = {
    "nerdctl": f"/system.slice/nerdctl-{ID}.scope",
    "docker in docker": f"/docker/{ID}/docker/{OTHER_ID}",
    "a sibling, from a cgroup namespace": f"/../{ID}",
    "a sibling under systemd": f"/../cri-containerd-{ID}.scope",
    "the kubelet's own process, in kind": f"/docker/{ID}/kubelet.slice/kubelet.service",
}

NOT_IN_CONTAINER = {
    "the root": "/",
    "a service": "/system.slice/containerd.service",
    "a pod's own cgroup": f"/kubepods.slice/kubepods-pod{UID_}.slice",
    "conmon of CRI-O": f"/kubepods.slice/kubepods-pod{UID_}.slice/crio-conmon-{ID}.scope",
    "conmon of podman": f"/machine.slice/libpod-conmon-{ID}.scope",
    "an unknown name and a hash": f"/system.slice/build-{ID}.scope",
    "a hash too short": f"/process_api/{HASH}",
}


CASES = {
    **dict.fromkeys(IN_POD.items(), Workload(uid=UID, container_id=ID)),
    **dict.fromkeys(OUTSIDE.items(), Workload(container_id=ID)),
    **dict.fromkeys(NOT_IN_CONTAINER.items()),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_container_of_a_path(case: tuple[str, str], version: Literal[1, 2]) -> None:
    assert parse_cgroup(cgroup_text(case[1], version)) == CASES[case]


def test_a_hierarchy_with_the_pod_is_preferred() -> None:
    text = f"4:memory:/docker/{OTHER_ID}\n2:freezer:/kubepods/pod{UID}/{ID}\n"
    assert parse_cgroup(text) == Workload(uid=UID, container_id=ID)


HEX = "0123456789abcdef"
uids = st.uuids().map(str) | st.text(HEX, min_size=32, max_size=32)
container_ids = st.text(HEX, min_size=64, max_size=64)


@given(
    uids,
    container_ids,
    st.sampled_from([1, 2]),
    st.sampled_from(["systemd", "cgroupfs"]),
    st.sampled_from(["guaranteed", "burstable", "besteffort"]),
    st.sampled_from(["containerd", "crio", "docker"]),
    st.sampled_from(
        ["", "/docker/" + OTHER_ID, "/kubelet.slice", "/../..", "/system.slice/containerd.service"]
    ),
    st.sampled_from(
        [
            "",
            "/sub/child",
            "/init.scope",
            "/docker/" + OTHER_ID,
            f"/kubepods/pod{OTHER_UID}/{OTHER_ID}",
        ]
    ),
)
def test_every_combination(
    uid: str,
    container_id: str,
    version: Literal[1, 2],
    driver: Driver,
    qos: Qos,
    runtime: Runtime,
    around: str,
    inside: str,
) -> None:
    text = container_cgroup(
        uid, container_id, version=version, driver=driver, qos=qos, runtime=runtime
    )
    text = text.replace(":/kubepods", f":{around}/kubepods").replace("\n", f"{inside}\n")
    assert parse_cgroup(text) == Workload(uid=uid, container_id=container_id)


PIECES = (
    "0::",
    "4:memory:",
    "/",
    ":",
    "..",
    "\n",
    "pod",
    "kubepods",
    "docker",
    "cri-containerd-",
    "crio-",
    "conmon",
)
ENDS = (".scope", ".slice", " (deleted)", "\0", "é", UID, UID_, HASH, ID)


@given(st.text() | st.lists(st.sampled_from([*PIECES, *ENDS]), max_size=30).map("".join))
def test_any_text_gives_a_container_in_it_or_none(text: str) -> None:
    found = parse_cgroup(text)
    if found is not None:
        assert found.container_id in text
        assert found.uid.replace("-", "_") in text.replace("-", "_")
