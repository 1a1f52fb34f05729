"""GPUs that were lost before the exporter started: known from a real kubelet's answers and the PCI bus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.agent.loop import Agent, Settings
from podgpu.clock import Clock
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.render import Policy
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod
from tests.nodes.clock import wait_until
from tests.web.server import Client, running

GPU = "nvidia.com/gpu"
FORGET = {"X_Podgpu_Request": "forget"}


class Restarted:
    """Three GPUs on the bus, of which the driver lists two: the second was lost before this exporter started."""

    def __init__(self, folder: Path) -> None:
        self.time = 1000.0
        self.expected: int | None = 3
        self.driver = SimulatedNvml("3xH100", clock=lambda: self.time, wall=lambda: 1.7e9 + self.time, unrest=0)
        self.uuids = [gpu.uuid for gpu in self.driver.gpus]
        self.driver.faults.lose(1, enumerated=False)
        self.kubelet = SimulatedKubelet(str(folder / "k.sock"))
        clock = Clock(lambda: self.time, lambda: 1.7e9 + self.time)
        telemetry = NvmlTelemetry(self.driver, "nvml", lambda: self.expected, clock.monotonic, clock.wall)
        self.agent = Agent(
            telemetry,
            [KubeletAllocation(self.kubelet.socket, clock=clock.monotonic)],
            Settings(interval=2.0, policy=Policy(hostname="h")),
            clock,
        )
        self.client: Client

    def turns(self, number: int = 2) -> dict[str, Any]:
        for _ in range(number):
            self.time += 2.0
            self.agent.read_telemetry()
            self.agent.read_allocation()
        view: dict[str, Any] = json.loads(self.client.ask("/api/v1/view").body)
        return view


@pytest.fixture
def restarted(folder: Path) -> Iterator[Restarted]:
    made = Restarted(folder)
    with made.kubelet, running(made.agent) as made.client:
        try:
            yield made
        finally:
            made.agent.stop()


def lost_in(view: dict[str, Any]) -> list[dict[str, Any]]:
    return [g for g in view["nodes"][0]["gpus"] if g.get("absent")]


@pytest.mark.fault(
    "The exporter is started anew while a GPU is lost",
    "It is a tile all the same, by the kubelet's allocatable list: with its UUID, who holds it, and what to do;"
    " without a number, which nobody knows",
)
def test_the_kubelet_gives_away_a_gpu_that_the_driver_does_not_list(restarted: Restarted) -> None:
    restarted.kubelet.allocatable = {GPU: restarted.uuids}
    restarted.kubelet.pods = (SimulatedPod("ns", "train", {"main": {GPU: [restarted.uuids[1]]}}),)
    view = restarted.turns(3)
    (lost,) = lost_in(view)
    assert lost["uuid"] == restarted.uuids[1]
    assert "index" not in lost
    assert [c["condition"] for c in lost["conditions"]] == ["lost"]
    assert [h["pod"] for h in lost["holders"]] == ["train"]
    (alert,) = view["alerts"]
    assert alert["text"].startswith(f"a GPU of node h ({restarted.uuids[1]}): the driver no longer lists it")
    assert alert["text"] in restarted.client.ask("/health").text.splitlines()
    exposition = restarted.client.ask("/metrics").text
    assert f'podgpu_device_health{{gpu="",UUID="{restarted.uuids[1]}"' in exposition
    assert "podgpu_exporter_unmapped_assignments{" not in exposition
    answer = restarted.client.ask(f"/-/forget?gpu={restarted.uuids[1]}", "POST", **FORGET)
    assert answer.status == 200
    restarted.expected = 2
    restarted.time += 60.0
    assert lost_in(restarted.turns(8)) == [], "the kubelet goes on giving it away, and the operator has spoken"


def test_an_id_that_names_no_gpu_is_no_lost_gpu(restarted: Restarted) -> None:
    """Where the bus shows no more GPUs than the driver lists, it is of a GPU that was replaced long ago."""
    restarted.expected = 2
    restarted.kubelet.allocatable = {GPU: [restarted.uuids[0], restarted.uuids[2]]}
    restarted.kubelet.pods = (SimulatedPod("ns", "train", {"main": {GPU: [restarted.uuids[1]]}}),)
    view = restarted.turns(3)
    assert lost_in(view) == []
    assert 'podgpu_exporter_unmapped_assignments{source="kubelet",reason="unknown_device"} 1' in (
        restarted.client.ask("/metrics").text
    )


def test_it_comes_back(restarted: Restarted) -> None:
    restarted.kubelet.allocatable = {GPU: restarted.uuids}
    assert len(lost_in(restarted.turns(3))) == 1
    restarted.driver.faults.recover(1)
    restarted.time += 60.0
    view = restarted.turns(8)
    assert lost_in(view) == []
    assert [g["index"] for g in view["nodes"][0]["gpus"]] == [0, 1, 2]
    assert restarted.client.ask("/health").text == "OK\n"


def test_a_gpu_that_is_slow_to_say_its_name_is_not_lost(restarted: Restarted) -> None:
    """The kubelet gives it away; the driver lists it, and has not named it yet."""
    restarted.driver.faults.recover(1)
    hang = restarted.driver.faults.hang("nvmlDeviceGetUUID", 1)
    restarted.kubelet.allocatable = {GPU: restarted.uuids}
    restarted.kubelet.pods = (SimulatedPod("ns", "train", {"main": {GPU: [restarted.uuids[1]]}}),)
    view = restarted.turns(3)
    assert lost_in(view) == []
    assert restarted.uuids[1] not in "".join(alert["text"] for alert in view["alerts"])
    hang.release()
    wait_until(lambda: len(restarted.turns(1)["nodes"][0]["gpus"]) == 3, "it is met late")
    assert lost_in(restarted.turns(1)) == []
    assert [h["pod"] for h in restarted.turns(1)["nodes"][0]["gpus"][1]["holders"]] == ["train"]
