"""Holders while the kubelet restarts, is absent, or lists no pods: real gRPC and files, and the
whole agent.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from podgpu.clock import Clock
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.model import Device
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.node.holders.reader import AllocationReader, HolderSources
from podgpu.workers import ErrorCounts, Workers
from tests.nodes.clock import FakeClock
from tests.nodes.node import Description, Node, node_of
from tests.simulated_kubelet import RATE_LIMITED, FaultyKubelet

GPUS = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(2)]
UIDS = {
    "train": "0f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a10",
    "serve": "1f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a11",
}
IDS = {"train": "a" * 64, "serve": "b" * 64}
PODS = tuple(
    SimulatedPod("ns", name, {"main": {"nvidia.com/gpu": [gpu]}})
    for name, gpu in zip(UIDS, GPUS, strict=True)
)
LOGS = {
    name: (f"pods/ns_{name}_{uid}", f"containers/{name}_ns_main-{IDS[name]}.log")
    for name, uid in UIDS.items()
}
TURN = 5.0


class Kubelet:
    """Controls the kubelet of a node whose two GPUs are held."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node, self.folder = node, folder

    def restarts(self, knows: tuple[SimulatedPod, ...] = ()) -> None:
        """Restarts the kubelet. Like a real one, it then lists no pods and reports no error."""
        self.node.kubelet.pods = knows
        self.node.kubelet.restart()

    def turn(self, seconds: float = TURN) -> list[str]:
        """Runs a turn and returns the pods that hold a GPU in the metrics."""
        self.node.clock.advance(seconds)
        self.node.agent.read_allocation()
        self.node.agent.read_usage()
        return sorted(re.findall(r'podgpu_allocation_info\{.*?pod="([^"]*)"', self.exposition))

    @property
    def exposition(self) -> str:
        return self.node.agent.published.fresh.plain.decode()

    def allocated(self, pod: str) -> float:
        (value,) = re.findall(
            rf'gpu_allocated_seconds_total\{{.*?pod="{pod}".*?\}} (\S+)', self.exposition
        )
        return float(value)

    def remove_logs(self, pod: str) -> None:
        for name in LOGS[pod]:
            shutil.rmtree(self.folder / "log" / name)


@contextmanager
def held(folder: Path, logs: bool = True, processes: bool = False) -> Iterator[Kubelet]:
    description = Description(
        "two GPUs, two pods",
        "2xH100",
        ["-k", "-f", "none", "--allocation", "kubelet"],
        uuids=GPUS,
        logs=[name for names in LOGS.values() for name in names] if logs else [],
        processes=(
            {
                str(41 + n): {"uid": UIDS[name], "container_id": IDS[name]}
                for n, name in enumerate(UIDS)
            }
            if processes
            else None
        ),
    )
    with node_of(description, folder) as node:
        node.kubelet.pods = PODS
        node.take_turns()
        kubelet = Kubelet(node, folder)
        assert kubelet.turn() == ["serve", "train"]
        yield kubelet


@pytest.mark.fault(
    (
        "the kubelet restarts while the API server is away: it lists no pods, and says no error, "
        "for "
        "ten minutes"
    ),
    "every holder stays, its counters go on, because its log files are there; source_up is 1",
)
def test_holders_stay_while_their_containers_are_plainly_there(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with held(folder) as kubelet:
        before = kubelet.allocated("train")
        kubelet.restarts()
        for turn in range(1, 121):
            assert kubelet.turn() == ["serve", "train"]
            assert kubelet.allocated("train") == pytest.approx(before + turn * TURN), (
                "the counter was reset"
            )
            assert 'podgpu_exporter_source_up{source="kubelet"} 1' in kubelet.exposition
        kubelet.node.kubelet.pods = PODS
        assert kubelet.turn() == ["serve", "train"]
        (said,) = (
            message for message in caplog.messages if "restarted and no longer lists" in message
        )
        assert "no longer lists 2 GPU containers" in said


@pytest.mark.fault(
    "all containers on the GPUs end while the kubelet does not answer",
    "they are removed from the metrics when their log files are removed, and do not return",
)
def test_ended_holders_do_not_return_while_the_kubelet_does_not_answer(folder: Path) -> None:
    with held(folder) as kubelet:
        kubelet.node.kubelet.refusal = RATE_LIMITED
        assert kubelet.turn() == ["serve", "train"]
        (
            folder / "log" / "pods" / "ns_other_2f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a12"
        ).mkdir()  # a pod without a GPU
        for pod in UIDS:
            kubelet.remove_logs(pod)
        assert [kubelet.turn() for _ in range(3)] == [[], [], []]


@pytest.mark.fault(
    (
        "the kubelet restarts and lists no pods, on a node where podgpu can look at neither logs "
        "nor "
        "processes"
    ),
    "every holder stays for 60 s after it was last named, and is then withdrawn",
)
def test_where_nothing_tells_time_does(folder: Path) -> None:
    with held(folder, logs=False) as kubelet:
        kubelet.restarts()
        for _ in range(12):
            assert kubelet.turn() == ["serve", "train"]
        assert kubelet.turn() == []


@pytest.mark.fault(
    "a pod ends while the kubelet restarts",
    "it disappears as soon as its log files or its processes are gone; the others stay",
)
@pytest.mark.parametrize("processes", [False, True], ids=["by its logs", "by its processes"])
def test_a_pod_that_ended_meanwhile(folder: Path, processes: bool) -> None:
    with held(folder, processes=processes) as kubelet:
        kubelet.restarts()
        assert kubelet.turn() == ["serve", "train"]
        if processes:
            shutil.rmtree(folder / "proc" / "41")
        else:
            kubelet.remove_logs("train")
        assert kubelet.turn() == ["serve"]


@pytest.mark.fault(
    "the kubelet restarts, and the first it lists is a new pod on a GPU that another pod held",
    "the new pod is that GPU's holder at once, the old one is not; the holders of other GPUs stay",
)
@pytest.mark.parametrize("logs", [False, True], ids=["", "the old pod's logs are still there"])
def test_a_new_pod_takes_the_gpu(folder: Path, logs: bool) -> None:
    with held(folder, logs=logs) as kubelet:
        new = SimulatedPod("ns", "tune", {"main": {"nvidia.com/gpu": [GPUS[0]]}})
        kubelet.restarts(knows=(new,))
        assert kubelet.turn() == ["serve", "tune"]


@pytest.mark.fault(
    "the kubelet is stopped for ten minutes",
    (
        "source_up is 0; holders whose containers run on stay, with their counters; those that end "
        "meanwhile disappear"
    ),
)
def test_a_kubelet_that_is_away_for_long(folder: Path) -> None:
    with held(folder) as kubelet:
        before = kubelet.allocated("serve")
        kubelet.node.kubelet.stop()
        for _ in range(120):
            assert kubelet.turn() == ["serve", "train"]
        assert 'podgpu_exporter_source_up{source="kubelet"} 0' in kubelet.exposition
        kubelet.remove_logs("train")
        assert kubelet.turn() == ["serve"]
        kubelet.node.kubelet.pods = PODS[1:]
        kubelet.node.kubelet.start()
        assert kubelet.turn() == ["serve"]
        assert kubelet.allocated("serve") == pytest.approx(before + 122 * TURN)


NODE = tuple(Device(number, uuid, "", "H100", minor=number) for number, uuid in enumerate(GPUS))
SLICES = tuple(
    SimulatedPod("ns", name, {"main": {"nvidia.com/gpu": [f"{GPUS[0]}::{number}"]}})
    for number, name in enumerate(UIDS)
)
REGISTERED = {"nvidia.com/gpu": [f"{GPUS[0]}::{number}" for number in range(4)]}


@pytest.mark.fault(
    "the device plugin is away for five minutes: the kubelet tells of no time slices any more",
    "the share of a holder stays what it was, 0.25 of a GPU in four slices",
)
@pytest.mark.parametrize("left", [0, 3], ids=["none left", "three are healthy"])
def test_the_number_of_slices_stands_while_the_gpu_is_held(folder: Path, left: int) -> None:
    clock, isolation = FakeClock(), Workers()
    with FaultyKubelet(str(folder / "kubelet.sock"), SLICES) as kubelet:
        source = KubeletAllocation(kubelet.socket, clock=clock.monotonic)
        reader = AllocationReader(
            HolderSources([source]), isolation, ErrorCounts(), Clock(clock.monotonic)
        )

        def shares_after(seconds: float) -> dict[str, float | None]:
            clock.advance(seconds)
            return {one.holder.pod: one.share for one in reader.read(NODE).assignments}

        kubelet.allocatable = REGISTERED
        assert shares_after(0.0) == {"train": 0.25, "serve": 0.25}
        kubelet.allocatable = {"nvidia.com/gpu": REGISTERED["nvidia.com/gpu"][:left]}
        for _ in range(5):
            assert shares_after(61.0) == {"train": 0.25, "serve": 0.25}
        kubelet.pods = SLICES[:1]
        assert shares_after(61.0) == {"train": 0.25}, (
            "the only holder still has the share of one slice"
        )
        assert kubelet.calls.count("/v1.PodResourcesLister/GetAllocatableResources") == 7, (
            "counted once a minute"
        )
    isolation.close()


@pytest.mark.fault(
    "the kubelet takes 1.5 s for every answer, and figures are collected every second (-c 1000)",
    (
        "holders are there: their sources have a deadline of their own, 5 s, and a later answer is "
        "taken when it comes"
    ),
)
def test_a_kubelet_slower_than_the_collect_interval(folder: Path) -> None:
    arguments = ["-k", "-f", "none", "--allocation", "kubelet", "-c", "1000"]
    with node_of(Description("a slow kubelet", "2xH100", arguments, uuids=GPUS), folder) as node:
        node.agent.read_telemetry()
        node.kubelet.pods = PODS
        node.kubelet.hang()
        answering = threading.Timer(1.5, node.kubelet.resume)
        answering.start()
        node.agent.read_allocation()
        answering.join()
        assert Kubelet(node, folder).turn(0.0) == ["serve", "train"]
        assert (
            'podgpu_exporter_source_errors_total{source="kubelet"'
            not in node.agent.published.fresh.plain.decode()
        )
