"""A podlist.json whose writer was turned off, on a whole node."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from tests.nodes.node import Description, Node, node_of

GPUS = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(2)]
UID = "0f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a10"
OTHER_UID = "1f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a11"
CONTAINER_ID = "a" * 64
LOG = f"pods/ns_train_{UID}"
OTHER_LOG = f"pods/ns_other_{OTHER_UID}"
ENTRY = {"name": "train", "namespace": "ns", "container": "main", "gpu_list": [GPUS[0]]}
"""An entry as koordinator's hook writes it."""
TRAIN = SimulatedPod("ns", "train", {"main": {}})
OTHER = SimulatedPod("ns", "other", {"main": {}})
ARGUMENTS = ["-k", "-f", "none"]
GRACE_SECONDS = 60.0


@contextmanager
def node_with(
    folder: Path, entry: Mapping[str, object], age: float = 0.0, **more: object
) -> Iterator[Node]:
    """A node whose podlist.json has this entry, and was last written `age` seconds ago."""
    description = Description("", "2xH100", ARGUMENTS, uuids=GPUS, **more)  # type: ignore[arg-type]
    (folder / "podlist.json").write_text(json.dumps([entry]))
    written_at = time.time() - age
    os.utime(folder / "podlist.json", (written_at, written_at))
    with node_of(description, folder) as node:
        node.agent.read_telemetry()
        yield node


def exposition(node: Node) -> str:
    return node.agent.published.fresh.plain.decode()


def find_holders(node: Node, seconds: float = 0.0) -> list[str]:
    node.clock.advance(seconds)
    node.agent.read_allocation()
    return re.findall(r'podgpu_allocation_info\{.*?pod="([^"]*)"', exposition(node))


def count_ended(node: Node) -> bool:
    sample = 'podgpu_exporter_unmapped_assignments{source="podlist",reason="ended"} 1'
    return sample in exposition(node)


@pytest.mark.fault(
    "podlist.json lists a pod that was deleted, because its writer was turned off",
    "the pod's log directory is gone, so the pod is no holder, and is counted as `ended`",
)
@pytest.mark.parametrize("entry", [ENTRY, {**ENTRY, "uid": UID}], ids=["koordinator's", "podgpu's"])
def test_a_deleted_pod_is_no_holder(folder: Path, entry: Mapping[str, object]) -> None:
    with node_with(folder, entry, logs=[LOG, OTHER_LOG]) as node:
        assert find_holders(node) == ["train"]
        assert not count_ended(node)
        shutil.rmtree(folder / "log" / LOG)
        assert find_holders(node) == []
        assert count_ended(node)


def test_a_pod_with_the_name_of_a_deleted_one_is_another_pod(folder: Path) -> None:
    new_log = f"pods/ns_train_{OTHER_UID}"
    with node_with(folder, {**ENTRY, "uid": UID}, logs=[new_log]) as node:
        assert find_holders(node) == []
        assert count_ended(node)


@pytest.mark.fault(
    "podlist.json lists a deleted pod, and podgpu sees neither logs nor processes",
    "the pod is no holder 60 s after the kubelet listed it last",
)
def test_a_pod_that_the_kubelet_no_longer_lists(folder: Path) -> None:
    with node_with(folder, ENTRY) as node:
        node.kubelet.pods = (TRAIN, OTHER)
        assert find_holders(node) == ["train"]
        assert find_holders(node, 2 * GRACE_SECONDS) == ["train"]
        node.kubelet.pods = (OTHER,)
        # A restarted kubelet does not know all of its pods yet.
        assert find_holders(node, 1.0) == ["train"]
        assert find_holders(node, GRACE_SECONDS - 1.0) == ["train"]
        assert find_holders(node, 1.0) == []
        assert count_ended(node)
        node.kubelet.pods = (TRAIN, OTHER)
        assert find_holders(node, 1.0) == ["train"]


@pytest.mark.parametrize("is_down", [False, True], ids=["lists no pods", "does not answer"])
def test_a_kubelet_without_pods_is_no_evidence(folder: Path, is_down: bool) -> None:
    with node_with(folder, ENTRY) as node:
        node.kubelet.pods = (OTHER,)
        assert find_holders(node) == ["train"]
        node.kubelet.pods = ()
        if is_down:
            node.kubelet.stop()
        for _ in range(4):
            assert find_holders(node, GRACE_SECONDS) == ["train"]


def test_a_pod_that_runs_is_a_holder_though_the_kubelet_does_not_list_it(folder: Path) -> None:
    entry = {**ENTRY, "uid": UID}
    processes = {
        "41": {"uid": UID, "container_id": CONTAINER_ID},
        "42": {"uid": OTHER_UID, "container_id": "b" * 64},
    }
    with node_with(folder, entry, processes=processes) as node:
        node.kubelet.pods = (OTHER,)
        assert find_holders(node) == ["train"]
        assert find_holders(node, 2 * GRACE_SECONDS) == ["train"]
        shutil.rmtree(folder / "proc" / "41")
        assert find_holders(node, 1.0) == []


@pytest.mark.fault(
    "podgpu's own hook was turned off, and podlist.json stays",
    "source_up is 0, and the file's pods are no holders; the kubelet's are",
)
def test_a_file_without_a_heartbeat_is_an_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {**ENTRY, "uid": UID}
    with node_with(folder, entry, age=120.0) as node:
        node.kubelet.pods = (SimulatedPod("ns", "new", {"main": {"nvidia.com/gpu": [GPUS[0]]}}),)
        assert find_holders(node) == ["new"]
        assert 'podgpu_exporter_source_up{source="podlist"} 0' in exposition(node)
        assert 'source_errors_total{source="podlist",reason="stale"} 1' in exposition(node)
        assert "podlist.json has not been updated since" in caplog.text
        assert "delete the file" in caplog.text

        os.utime(folder / "podlist.json")
        assert "train" in find_holders(node, 1.0)
        assert 'podgpu_exporter_source_up{source="podlist"} 1' in exposition(node)


def test_a_file_of_koordinator_needs_no_heartbeat(folder: Path) -> None:
    """Its hook writes the file only if a container with a GPU starts."""
    with node_with(folder, ENTRY, age=1e6, logs=[LOG]) as node:
        assert find_holders(node) == ["train"]
        assert 'podgpu_exporter_source_up{source="podlist"} 1' in exposition(node)
