"""A failing kubelet and files that change while they are read, with real gRPC, files and
threads.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nodes.clock import wait_until
from tests.nodes.node import Description, Node, node_of

GPUS = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(2)]
HELD = {"namespace": "ns", "name": "train", "containers": {"main": {"nvidia.com/gpu": [GPUS[0]]}}}
UID = "0f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a10"


def exposition(node: Node) -> str:
    return node.agent.published.fresh.plain.decode()


def holders(node: Node) -> list[str]:
    return re.findall(r'podgpu_allocation_info\{.*?pod="([^"]*)"', exposition(node))


def answers(node: Node) -> bool:
    return 'podgpu_exporter_source_up{source="kubelet"} 1' in exposition(node)


@contextmanager
def held(folder: Path) -> Iterator[Node]:
    """Yields a node on which the kubelet reports a pod on GPU 0."""
    arguments = ["-k", "--allocation", "kubelet", "-c", "1000"]
    with node_of(
        Description("two GPUs", "2xH100", arguments, uuids=GPUS, pods=[HELD]), folder
    ) as node:
        node.take_turns()
        assert holders(node) == ["train"]
        yield node


def check_devices(node: Node) -> None:
    """Checks that both GPUs have values, and that only those of GPU 0 have the pod label."""
    node.clock.advance(1.0)
    node.agent.read_telemetry()
    lines = [
        line for line in exposition(node).splitlines() if line.startswith("DCGM_FI_DEV_GPU_TEMP{")
    ]
    assert ['pod="train"' in line for line in lines] == [True, False]


def survive(node: Node, ends: Callable[[], object], turns: int = 3) -> None:
    """Checks that the holder stays during the fault and after its end."""
    node.agent.read_allocation()
    for _ in range(turns):
        node.clock.advance(5.0)
        node.agent.read_allocation()
        assert holders(node) == ["train"]
        assert not answers(node)
        check_devices(node)
    ends()
    node.clock.advance(5.0)
    wait_until(lambda: node.agent.read_allocation() or answers(node), "the kubelet answers")
    assert holders(node) == ["train"]


@pytest.mark.fault(
    "the kubelet accepts calls and answers none",
    (
        "the last mapping stands, figures come on time, one call waits and no second is made; its "
        "answer is taken at last"
    ),
)
def test_a_kubelet_that_hangs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held(folder) as node:
        node.kubelet.hang()
        node.kubelet.calls.clear()
        survive(node, node.kubelet.resume)
        assert node.kubelet.calls.count("/v1.PodResourcesLister/List") <= 2, (
            "no second call is made during the hang"
        )
        said = [message for message in caplog.messages if message.startswith("kubelet: ")]
        assert len([message for message in said if "answers again" not in message]) == 1


# Files that change while they are read


def podlist(pod: str) -> str:
    entry = {"name": pod, "namespace": "ns", "container": "main", "gpu_list": [GPUS[0]]}
    spam = {"name": "idle", "namespace": "ns", "container": "main", "gpu_list": []}
    return json.dumps([spam] * 2000 + [entry])


def checkpoint(pod: str) -> str:
    entry = {
        "PodUID": f"{UID[:-1]}{len(pod) % 10}",
        "ContainerName": pod,
        "ResourceName": "nvidia.com/gpu",
    }
    spam = {"PodUID": UID, "ContainerName": "x", "ResourceName": "cpu", "DeviceIDs": {"0": []}}
    entries = [*[spam] * 2000, {**entry, "DeviceIDs": {"0": [GPUS[0]]}}]
    return json.dumps(
        {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}
    )


def replace_whole(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def write_in_pieces(path: Path, text: str) -> None:
    with path.open("w") as file:
        for start in range(0, len(text), 50_000):
            file.write(text[start : start + 50_000])
            file.flush()


@pytest.mark.fault(
    (
        "podlist.json or the kubelet's checkpoint is replaced, or written over in pieces, while "
        "it is "
        "read"
    ),
    (
        "one of its whole contents is in every exposition, never a part, never nobody; after the "
        "last "
        "change the newest"
    ),
)
@pytest.mark.parametrize("write", [replace_whole, write_in_pieces])
@pytest.mark.parametrize("content", [podlist, checkpoint])
def test_a_file_that_changes_while_it_is_read(
    folder: Path, content: Callable[[str], str], write: Callable[[Path, str], None]
) -> None:
    path = folder / content.__name__
    arguments = ["--allocation", f"{content.__name__}:{path}", "-f", "none"]
    files = {content.__name__: content("one")}
    with node_of(Description("", "2xH100", arguments, uuids=GPUS, files=files), folder) as node:
        node.take_turns()
        done = threading.Event()

        def rewrite() -> None:
            for number in range(60):
                write(path, content("three" if number % 2 else "one"))
            done.set()

        writer = threading.Thread(target=rewrite)
        writer.start()
        seen = set()
        while not done.is_set():
            node.agent.read_allocation()
            (line,) = (
                one
                for one in exposition(node).splitlines()
                if one.startswith("podgpu_allocation_info{")
            )
            seen.add("three" if "three" in line else "one" if "one" in line else line)
        writer.join()
        assert seen <= {"one", "three"}
        wait_until(
            lambda: node.agent.read_allocation() or "three" in exposition(node),
            "the newest is read",
        )
