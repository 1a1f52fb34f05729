"""Conditions of broken GPUs over real HTTP. The metric, the JSON and /health agree."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from podgpu.cli.main import run
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.metrics.conditions import breaks_gpu, conditions
from podgpu.metrics.labels import Policy
from podgpu.node.agent.agent import Settings
from podgpu.node.agent.health import RECURRING_SECONDS, XID_SECONDS
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.web.exporter_app import node_recorder
from tests.agent.gpu_bench import GpuBench, bench_of
from tests.agent.simulated_node import SimulatedNode
from tests.nodes.clock import wait_until
from tests.simulated import FaultyNvml
from tests.simulated_kubelet import FaultyKubelet
from tests.web.server import Client, running

GPU = "nvidia.com/gpu"


FORGET = {"X_Podgpu_Request": "forget"}


def view(bench: GpuBench | Restarted) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench.client.ask("/api/v1/view").body)
    return found


def gpu(bench: GpuBench, number: int) -> dict[str, Any]:
    (found,) = (g for g in view(bench)["nodes"][0]["gpus"] if g["uuid"] == bench.uuid(number))
    return dict(found)


def broken(bench: GpuBench, number: int) -> list[str]:
    """Returns the conditions in the JSON. Checks that the metric and /health agree."""
    of = gpu(bench, number)
    found = [c["condition"] for c in of.get("conditions", ())]
    for name in conditions():
        value = bench.value("podgpu_device_health", number, f'condition="{name}"')
        assert (value == 1) == (name in found), (
            f"{name}: {value} in the metric, {found} in the JSON"
        )
    health = bench.client.ask("/health").text.splitlines()
    told = [a["text"] for a in view(bench)["alerts"] if a.get("uuid") == bench.uuid(number)]
    assert [text for text in told if text not in health] == []
    assert (health == ["OK"]) == (not view(bench)["alerts"])
    return found


def known(bench: GpuBench, number: int, condition: str) -> bool:
    return bench.value("podgpu_device_health", number, f'condition="{condition}"') is not None


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[GpuBench]:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as made:
        yield made


def test_a_gpu_that_is_well(bench: GpuBench) -> None:
    assert broken(bench, 0) == []
    assert "conditions" not in gpu(bench, 0)
    assert view(bench)["alerts"] == []
    assert not known(bench, 0, "thermal"), "throttling is known after a minute"
    bench.turn(0, 1, 2, 3, seconds=61.0)
    for condition in conditions():
        # Nobody says what Kubernetes thinks.
        is_unknown = condition == "node_gone" or condition.startswith("kubernetes_")
        is_checked = breaks_gpu(condition) and not is_unknown
        assert known(bench, 0, condition) == is_checked, condition
    assert broken(bench, 0) == []


@pytest.mark.fault(
    "A GPU falls off the bus, and the driver does not list it any more",
    "It stays in the metrics, in the JSON and in podgpu_device_health as lost: with its number, "
    "its holder for as"
    " long as the kubelet names it, since when and what to do; /health says the same words; when "
    "it is back it is well",
)
def test_a_lost_gpu_stays_until_it_is_back(bench: GpuBench) -> None:
    lost_at = bench.wall() + 1.0
    bench.faults.lose(1)
    bench.turn(0, 2, 3)
    assert broken(bench, 1) == ["lost"]
    bench.faults.lose(1, enumerated=False)
    bench.expected = 3
    bench.turns(150)
    assert bench.driver.calls["nvmlInit"] > 1, (
        "the driver was opened again, so it no longer lists the GPU"
    )
    found = gpu(bench, 1)
    assert broken(bench, 1) == ["lost"]
    assert (found["index"], found["model"], found["absent"]) == (1, "NVIDIA H100 80GB HBM3", True)
    assert found["conditions"][0]["since"] == pytest.approx(lost_at, abs=1.0)
    assert [h["pod"] for h in found["holders"]] == ["p1"], "the kubelet still lists the holder"
    assert "utilization_ratio" not in found
    assert "utilization_ratio" not in found["holders"][0]
    assert 'namespace="ns",pod="p1"' in bench.scraped
    totals = view(bench)["totals"]
    assert (totals["gpus"], totals["allocated"], totals["broken"]) == (4, 4, 1)
    assert totals["allocated"] == totals["used"] + totals["idle"] + totals["unknown"]
    bench.expected = 4
    bench.faults.recover(1)
    bench.turns(150)
    assert broken(bench, 1) == []
    assert "absent" not in gpu(bench, 1)


@pytest.mark.fault(
    "A GPU that is lost is not held any more",
    (
        "Who held it last stays beside it, until it is back or an operator has podgpu forget it "
        "(POST "
        "/-/forget)"
    ),
)
def test_the_last_holder_of_a_lost_gpu_and_forgetting_it(
    bench: GpuBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.faults.lose(1, enumerated=False)
    bench.expected = 3
    bench.turns(40)
    assert [h["pod"] for h in gpu(bench, 1)["holders"]] == ["p1"]
    bench.crowd(1, 0)
    bench.turn(seconds=5.0)
    found = gpu(bench, 1)
    assert "holders" not in found
    assert "podgpu_container_gpu_processes" not in "".join(
        line for line in bench.scraped.splitlines() if bench.uuid(1) in line
    )
    assert [h["pod"] for h in found["last_holders"]] == ["p1"]
    last = bench.value("podgpu_device_last_holder_info", 1, 'pod="p1"')
    assert last == 1
    path = f"/-/forget?gpu={bench.uuid(1)}"
    assert bench.client.ask(path, "POST").status == 403, "the request needs the confirmation header"
    command = ["forget", bench.uuid(1), "--url", bench.client.address.url]
    assert (run(command), capsys.readouterr().out) == (0, f"removed {bench.uuid(1)}\n")
    assert [g["index"] for g in view(bench)["nodes"][0]["gpus"]] == [0, 1, 2]
    bench.turns(15)
    assert bench.uuid(1) not in bench.scraped
    assert bench.client.ask("/health").text == "OK\n"
    assert run(command) == 1
    assert "has never had one" in capsys.readouterr().err


def test_a_document_is_made_of_one_allocation(bench: GpuBench) -> None:
    """A lost GPU has either holders or last holders, also if they change during a publication."""
    bench.faults.lose(1, enumerated=False)
    bench.expected = 3
    bench.turns(40)
    readings = []
    holders = 0

    def read_allocation() -> None:
        nonlocal holders
        if threading.current_thread() is not threading.main_thread():
            return
        holders = 1 - holders
        bench.crowd(1, holders)
        reading = threading.Thread(target=bench.agent.read_allocation)
        readings.append(reading)
        reading.start()
        reading.join(0.2)

    bench.on_time = read_allocation
    bench.agent.read_telemetry()
    published = bench.agent.published
    bench.on_time = lambda: None
    for reading in readings:
        reading.join()

    [lost] = [gpu for gpu in published.state.devices if gpu.uuid == bench.uuid(1)]
    assert bool(lost.holders) != bool(lost.last_holders)


@pytest.mark.fault(
    "The driver is unloaded under podgpu, or its library is gone",
    "Every known GPU stays, with the condition driver_away and without figures; one alert names "
    "all of them; when the"
    " driver is back they are well, and podgpu's counters continue",
)
def test_the_driver_goes_away(bench: GpuBench) -> None:
    bench.faults.unload_driver()
    bench.turns(20)
    assert [broken(bench, n) for n in range(4)] == [["driver_away"]] * 4
    assert "absent" not in gpu(bench, 0)
    assert [h["pod"] for h in gpu(bench, 0)["holders"]] == ["p0"]
    (alert,) = view(bench)["alerts"]
    assert alert["text"].startswith(
        "node h: no driver answers for its 4 GPUs (driver_not_loaded): "
    )
    assert alert["text"] in bench.client.ask("/health").text.splitlines()
    assert not bench.shown(0)
    assert bench.client.ask("/ready").status == 503
    bench.faults.load_driver()
    bench.turns(150)
    assert [broken(bench, n) for n in range(4)] == [[]] * 4
    assert all(map(bench.shown, range(4)))
    assert bench.client.ask("/ready").status == 200


def test_a_gpu_that_hangs_is_unreadable(bench: GpuBench) -> None:
    bench.faults.hang("nvmlDeviceGetTemperature", 2)
    bench.turn(0, 1, 3)
    assert broken(bench, 2) == ["unreadable"]
    (condition,) = gpu(bench, 2)["conditions"]
    assert condition["says"] == "it does not answer the driver (hung)"
    assert not known(bench, 2, "ecc"), "the condition is unknown"
    assert broken(bench, 0) == []


@pytest.mark.parametrize(
    ("function", "answer", "condition"),
    [
        ("nvmlDeviceGetRemappedRows", (0, 1, 0, 1), "row_remap_failure"),
        ("nvmlDeviceGetRemappedRows", (0, 1, 1, 0), "row_remap_pending"),
        ("nvmlDeviceGetTotalEccErrors", 2, "ecc"),
    ],
)
def test_memory_that_fails(bench: GpuBench, function: str, answer: object, condition: str) -> None:
    bench.faults.answer(function, answer, 1)
    bench.turn(0, 1, 2, 3)
    assert broken(bench, 1) == [condition]
    assert broken(bench, 0) == []
    bench.faults.unsupported(function, 1)
    bench.turn(0, 1, 2, 3)
    assert not known(bench, 1, condition), "the condition is unknown if the GPU does not support it"
    bench.faults.clear(function, 1)


def test_nvlinks_that_are_down(bench: GpuBench) -> None:
    bench.faults.cut_link(1, 3)
    bench.faults.cut_link(1, 4)
    bench.turn(0, 1, 2, 3, seconds=60.0)
    assert broken(bench, 1) == ["nvlink"]
    assert gpu(bench, 1)["conditions"][0]["says"] == "2 of its 18 NVLinks are down"
    assert broken(bench, 0) == []


@pytest.mark.parametrize(("field", "condition"), [(270, "thermal"), (271, "power_brake")])
def test_throttled_for_a_while(bench: GpuBench, field: int, condition: str) -> None:
    """A GPU is throttled if clocks are reduced for at least half of a minute."""
    held = 0
    for second in range(0, 60, 10):
        held += 2 * 10**9
        bench.faults.answer(field, held, 1)
        bench.turn(seconds=10.0)
        assert broken(bench, 1) == [], f"after {second} s"
    for _ in range(8):
        held += 8 * 10**9
        bench.faults.answer(field, held, 1)
        bench.turn(seconds=10.0)
    assert broken(bench, 1) == [condition]
    since = gpu(bench, 1)["conditions"][0]["since"]
    for _ in range(3):
        held += 3 * 10**9
        bench.faults.answer(field, held, 1)
        bench.turn(seconds=10.0)
    assert broken(bench, 1) == [condition], "the condition does not flap"
    assert gpu(bench, 1)["conditions"][0]["since"] == since
    for _ in range(8):
        bench.turn(seconds=10.0)
    assert broken(bench, 1) == []


@pytest.mark.parametrize("xid", [13, 94, 999])
def test_an_application_s_fault_breaks_no_gpu(bench: GpuBench, xid: int) -> None:
    raise_xid(bench, 1, xid)
    assert broken(bench, 1) == []
    assert known(bench, 1, "xid")


def test_the_start_of_a_condition_follows_the_clock_only_if_it_jumps(bench: GpuBench) -> None:
    """A correction of a second, as NTP makes it, must not look like a new condition."""

    def since() -> float:
        bench.turn()
        return float(gpu(bench, 1)["conditions"][0]["since"])

    raise_xid(bench, 1, 48)
    first = since()
    bench.leap(1.5)
    assert since() == first
    bench.leap(-1.5)
    assert since() == first
    bench.leap(3600.0)
    assert since() == pytest.approx(first + 3600.0, abs=0.1)


def raise_xid(bench: GpuBench, number: int, xid: int) -> None:
    bench.faults.raise_xid(number, xid)
    for _ in range(200):
        bench.turn(seconds=0.05)
        if bench.value("podgpu_xid_errors_total", number, f'xid="{xid}"'):
            return
    raise AssertionError("the XID was never heard of")


@pytest.mark.fault(
    "A GPU tells of an XID that needs somebody's hands (48, 64, 74, 79, 95, 119 and the like)",
    "It is broken, in the XID's words and with what to do, until it is reset, its driver is "
    "loaded anew, an operator"
    " has podgpu forget it, or a day after the last one",
)
def test_an_xid_that_needs_action_stays_until_the_gpu_is_reset(bench: GpuBench) -> None:
    raise_xid(bench, 1, 48)
    raise_xid(bench, 1, 119)
    assert broken(bench, 1) == ["xid"]
    (condition,) = gpu(bench, 1)["conditions"]
    assert (
        condition["says"] == "it reported XID 48 (double-bit ECC error), XID 119 (GSP RPC timeout)"
    )
    assert "reset the GPU" in condition["do"]
    bench.turn(seconds=3600.0)
    assert broken(bench, 1) == ["xid"]
    assert gpu(bench, 1)["conditions"][0]["since"] == condition["since"]
    bench.faults.reset(1)
    bench.turns(15)
    assert broken(bench, 1) == []
    raise_xid(bench, 1, 74)
    bench.turn(seconds=XID_SECONDS - 60.0)
    assert broken(bench, 1) == ["xid", "recurring"], "the second failure"
    bench.turn(seconds=120.0)
    assert broken(bench, 1) == [], "the condition ends after a day"


def test_an_operator_forgets_an_xid(bench: GpuBench) -> None:
    raise_xid(bench, 1, 79)
    assert broken(bench, 1) == ["xid"]
    answer = bench.client.ask(f"/-/forget?gpu={bench.uuid(1)}", "POST", **FORGET)
    assert (answer.status, answer.text) == (200, f"removed the XIDs of {bench.uuid(1)}\n")
    assert "conditions" not in gpu(bench, 1)
    raise_xid(bench, 1, 95)
    assert broken(bench, 1) == ["xid"], "a new XID sets the condition again"


# Removed by an operator


def forget(bench: GpuBench, number: int) -> int:
    return bench.client.ask(f"/-/forget?gpu={bench.uuid(number)}", "POST", **FORGET).status


def test_a_forgotten_gpu_that_the_bus_still_shows(bench: GpuBench) -> None:
    bench.faults.lose(1, enumerated=False)
    bench.expected = 3
    bench.turns(40)
    bench.expected = 4
    bench.turns(40)
    assert broken(bench, 1) == ["lost"]
    assert forget(bench, 1) == 200
    assert view(bench)["alerts"] == []
    bench.turns(10)
    assert view(bench)["alerts"] == []
    assert bench.client.ask("/health").text == "OK\n"
    assert 'podgpu_device_count{state="lost",Hostname="h"} 0' in bench.scraped
    bench.faults.lose(3)
    bench.turns(150)
    assert [alert["uuid"] for alert in view(bench)["alerts"]] == [bench.uuid(3)]
    assert 'podgpu_device_count{state="lost",Hostname="h"} 1' in bench.scraped


def numbers(bench: GpuBench) -> list[int]:
    return [shown["index"] for shown in view(bench)["nodes"][0]["gpus"]]


def test_a_lost_gpu_that_the_driver_still_lists_is_forgotten_until_it_answers(
    bench: GpuBench,
) -> None:
    bench.faults.lose(1)
    bench.turns(10)
    assert broken(bench, 1) == ["lost"]
    assert forget(bench, 1) == 200
    assert numbers(bench) == [0, 2, 3]
    bench.turns(25)
    assert numbers(bench) == [0, 2, 3]
    assert f'podgpu_device_health{{gpu="1",UUID="{bench.uuid(1)}"' not in bench.scraped
    assert bench.client.ask("/health").text == "OK\n"
    assert forget(bench, 1) == 404
    bench.faults.recover(1)
    bench.turns(15)
    assert numbers(bench) == [0, 1, 2, 3]
    assert broken(bench, 1) == []


def test_a_forgotten_gpu_leaves_the_document_although_it_had_xids(bench: GpuBench) -> None:
    raise_xid(bench, 1, 79)
    bench.faults.lose(1, enumerated=False)
    bench.expected = 3
    bench.turns(40)
    assert bench.value("podgpu_xid_errors_total", 1, 'xid="79"') == 1
    assert forget(bench, 1) == 200
    bench.turns(10)
    assert bench.uuid(1) not in [gpu.uuid for gpu in bench.agent.published.state.devices]
    bench.faults.recover(1)
    bench.expected = 4
    bench.turns(150)
    assert bench.value("podgpu_xid_errors_total", 1, 'xid="79"') == 1, (
        "a GPU that returns keeps its counters"
    )


# GPUs that were lost before the start


class Restarted(SimulatedNode):
    """Three GPUs are on the bus, but the driver lists two. The second one was lost before this
    exporter started.
    """

    def __init__(self, folder: Path) -> None:
        self.kubelet = FaultyKubelet(str(folder / "k.sock"))
        source = KubeletAllocation(self.kubelet.socket, clock=self.monotonic)
        super().__init__(
            "3xH100", Settings(interval=2.0, policy=Policy(hostname="h")), sources=[source]
        )
        self.uuids = [gpu.uuid for gpu in self.driver.gpus]
        self.faults.lose(1, enumerated=False)
        self.client: Client

    def turns(self, number: int = 2) -> dict[str, Any]:
        for _ in range(number):
            self.turn(2.0)
        return view(self)


@pytest.fixture
def restarted(folder: Path) -> Iterator[Restarted]:
    made = Restarted(folder)
    with made.kubelet, running(made.agent) as made.client:
        yield made


def lost_in(view: dict[str, Any]) -> list[dict[str, Any]]:
    return [g for g in view["nodes"][0]["gpus"] if g.get("absent")]


@pytest.mark.fault(
    "The exporter is started anew while a GPU is lost",
    "It is a tile all the same, by the kubelet's allocatable list: with its UUID, who holds it, "
    "and what to do;"
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
    assert alert["text"].startswith(
        f"a GPU of node h ({restarted.uuids[1]}): the driver no longer lists it"
    )
    assert alert["text"] in restarted.client.ask("/health").text.splitlines()
    exposition = restarted.client.ask("/metrics").text
    assert f'podgpu_device_health{{gpu="",UUID="{restarted.uuids[1]}"' in exposition
    assert "podgpu_exporter_unmapped_assignments{" not in exposition
    answer = restarted.client.ask(f"/-/forget?gpu={restarted.uuids[1]}", "POST", **FORGET)
    assert answer.status == 200
    restarted.expected = 2
    restarted.time += 60.0
    assert lost_in(restarted.turns(8)) == [], (
        "the removed GPU stays removed although the kubelet still allocates it"
    )


def test_an_id_that_names_no_gpu_is_no_lost_gpu(restarted: Restarted) -> None:
    """If the driver lists every GPU on the bus, the unknown UUID belongs to a GPU that was
    replaced.
    """
    restarted.expected = 2
    restarted.kubelet.allocatable = {GPU: [restarted.uuids[0], restarted.uuids[2]]}
    restarted.kubelet.pods = (SimulatedPod("ns", "train", {"main": {GPU: [restarted.uuids[1]]}}),)
    view = restarted.turns(3)
    assert lost_in(view) == []
    assert 'podgpu_exporter_unmapped_assignments{source="kubelet",reason="unknown_device"} 1' in (
        restarted.client.ask("/metrics").text
    )


def test_a_gpu_that_is_slow_to_say_its_name_is_not_lost(restarted: Restarted) -> None:
    """The kubelet allocates the GPU and the driver lists it, but its UUID is not yet known."""
    restarted.faults.recover(1)
    hang = restarted.faults.hang("nvmlDeviceGetUUID", 1)
    restarted.kubelet.allocatable = {GPU: restarted.uuids}
    restarted.kubelet.pods = (SimulatedPod("ns", "train", {"main": {GPU: [restarted.uuids[1]]}}),)
    view = restarted.turns(3)
    assert lost_in(view) == []
    assert restarted.uuids[1] not in "".join(alert["text"] for alert in view["alerts"])
    hang.release()
    wait_until(lambda: len(restarted.turns(1)["nodes"][0]["gpus"]) == 3, "it is met late")
    assert lost_in(restarted.turns(1)) == []
    assert [h["pod"] for h in restarted.turns(1)["nodes"][0]["gpus"][1]["holders"]] == ["train"]


# The view of one GPU


def calls_but_waiting(bench: GpuBench) -> dict[str, int]:
    """Returns the driver calls without those of the XID watch, which runs in a thread in real
    time.
    """
    return {
        name: calls
        for name, calls in bench.driver.calls.items()
        if not name.startswith("nvmlEventSetWait")
    }


def test_everything_that_is_known_of_a_gpu(bench: GpuBench) -> None:
    raise_xid(bench, 1, 48)
    raise_xid(bench, 1, 13)
    bench.faults.hang("nvmlDeviceGetTemperature", 2)
    bench.turn()
    calls = calls_but_waiting(bench)
    answer = bench.client.ask(f"/api/v1/gpus/{bench.uuid(1)}")
    assert calls_but_waiting(bench) == calls, "no request calls the driver"
    found = json.loads(answer.body)
    assert (answer.status, found["api"], found["node"]) == (200, "podgpu/v1", "h")
    assert found["gpu"] == gpu(bench, 1)
    fields = {field["name"]: field for field in found["fields"]}
    assert fields["DCGM_FI_DEV_MAX_SM_CLOCK"]["value"] == 1980
    limit = fields["DCGM_FI_DEV_ENFORCED_POWER_LIMIT"]
    assert (limit["unit"], limit["value"], limit["source"]) == ("W", 700, "nvml")
    assert fields["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"]["value"] in (
        "nothing",
        "power_cap",
        "gpu_idle",
    )
    assert fields["nvlinks_up"]["value"] == 18
    assert [(x["xid"], x["class"], x["says"], x["total"]) for x in found["xids"]] == [
        (13, "application", "graphics engine exception", 1),
        (48, "hardware", "double-bit ECC error", 1),
    ]
    sources = {source["source"]: source["ok"] for source in found["sources"]}
    assert sources["nvml"]
    assert sources["gpu1"]
    assert sources["kubelet"]
    assert "gpu2" not in sources, "sources of other GPUs are left out"
    assert found["method"] == "samples"


@pytest.mark.fault(
    "The driver advises a recovery action (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)",
    "It is a condition until a reset, and the first source of what to do: the list of XIDs then "
    "only explains",
)
def test_the_drivers_recovery_action_decides_what_to_do(bench: GpuBench) -> None:
    bench.driver.raise_xid(1, 48)
    wait_until(lambda: bench.turn() and broken(bench, 1) == ["xid"], "the XID is there")
    before = gpu(bench, 1)["conditions"][0]["do"]
    assert "advises no recovery" in before
    assert "reset the GPU" in before, "the advice of the list, if the driver is wrong"

    bench.driver.advise(1, pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT)
    bench.turn()
    assert broken(bench, 1) == ["recovery_action", "xid"]
    recovery, xid = gpu(bench, 1)["conditions"]
    assert recovery["detail"] == "reboot"
    assert recovery["says"] == "the driver advises: reboot the node"
    assert recovery["do"] == "drain the node and reboot it"
    assert "XID 48" in xid["says"]
    assert xid["do"] == "drain the node and reboot it, as the driver advises"
    assert xid["do"] in bench.client.ask("/health").text
    repair = gpu(bench, 1)["repair"]
    assert (repair["action"], repair["evicts"]) == ("reboot", [f"ns/p{n}" for n in range(4)])
    assert repair["commands"][0] == {"place": "terminal", "command": "kubectl cordon h"}
    name = "podgpu_device_condition_since_timestamp_seconds"
    assert bench.value(name, 1, 'condition="recovery_action"', 'detail="reboot"') is not None
    assert broken(bench, 2) == []

    bench.driver.reset(1)
    bench.turns(30)
    assert broken(bench, 1) == []


def test_a_driver_without_recovery_actions_leaves_it_to_the_xids(tmp_path: Path) -> None:
    def without_field(faults: FaultyNvml) -> None:
        faults.unsupported(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)

    with bench_of(tmp_path, "1xH100", before=without_field) as bench:
        bench.driver.raise_xid(0, 48)
        wait_until(lambda: bench.turn() and broken(bench, 0) == ["xid"], "the XID is there")
        assert not known(bench, 0, "recovery_action")
        do = gpu(bench, 0)["conditions"][0]["do"]
        assert do.startswith("drain the node and reset the GPU")


def test_an_unknown_recovery_action_is_a_problem(bench: GpuBench) -> None:
    bench.driver.advise(1, 99)
    bench.turn()
    assert broken(bench, 1) == ["recovery_action"]
    assert gpu(bench, 1)["conditions"][0]["says"] == "the driver advises: action 99"


@pytest.mark.parametrize(
    ("state", "links", "expected"),
    [
        (pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED, 18, ["fabric"]),
        (pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, 18, ["fabric"]),
        (pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 18, []),
        (pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, 18, None),
    ],
)
def test_a_gpu_that_waits_for_the_fabric_manager(
    bench: GpuBench, state: int, links: int, expected: list[str] | None
) -> None:
    for one in bench.driver.gpus:
        one.fabric_state = state
        one.nvlinks = links
    bench.turn()
    assert broken(bench, 1) == (expected or [])
    assert known(bench, 1, "fabric") == (expected is not None)


def test_a_gpu_without_nvlinks_needs_no_fabric(tmp_path: Path) -> None:
    """A single H200 of a virtual machine has NVLinks, but none is active."""
    with bench_of(tmp_path, "1xH200") as bench:
        bench.driver.gpus[0].fabric_state = pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS
        bench.turn()
        assert broken(bench, 0) == []
        assert not known(bench, 0, "fabric")


def lose_and_recover(bench: GpuBench, number: int) -> None:
    bench.faults.lose(number)
    bench.turn()
    assert "lost" in broken(bench, number)
    bench.faults.recover(number)
    bench.turns(30)


@pytest.mark.fault(
    "A GPU fails again and again, and works in between",
    "After the third time within a day (the second for memory errors and XIDs) it has the "
    "condition recurring, until it is quiet for a day or an operator has podgpu forget it",
)
def test_a_gpu_that_keeps_failing_is_not_well_in_between(
    bench: GpuBench, capsys: pytest.CaptureFixture[str]
) -> None:
    first = bench.wall() + 1.0
    lose_and_recover(bench, 1)
    bench.turn(seconds=300.0)
    lose_and_recover(bench, 1)
    assert broken(bench, 1) == []
    assert bench.value("podgpu_device_recent_failures", 1, 'condition="lost"') == 2
    bench.turn(seconds=300.0)
    last = bench.wall() + 1.0
    lose_and_recover(bench, 1)
    assert broken(bench, 1) == ["recurring"]
    assert bench.value("podgpu_device_recent_failures", 1, 'condition="lost"') == 3
    name = "podgpu_device_last_failure_timestamp_seconds"
    assert bench.value(name, 1, 'condition="lost"') == pytest.approx(last, abs=1.0)
    (condition,) = gpu(bench, 1)["conditions"]
    assert condition["since"] == pytest.approx(first, abs=1.0)
    assert condition["says"].startswith(
        "it failed repeatedly: lost 3 times within 24 hours; last at 2023-11-14T"
    )
    assert broken(bench, 2) == []

    assert run(["forget", bench.uuid(1), "--url", bench.client.address.url]) == 0
    bench.turn()
    assert broken(bench, 1) == []
    assert bench.value("podgpu_device_recent_failures", 1, 'condition="lost"') is None


def test_failures_are_forgotten_after_a_quiet_day(bench: GpuBench) -> None:
    for _ in range(3):
        lose_and_recover(bench, 1)
        bench.turn(seconds=80_000.0)
    assert bench.value("podgpu_device_recent_failures", 1, 'condition="lost"') == 2, "in one day"
    assert broken(bench, 1) == []
    lose_and_recover(bench, 1)
    assert broken(bench, 1) == []
    bench.turn(seconds=60.0)
    last = bench.time + 1.0
    lose_and_recover(bench, 1)
    assert broken(bench, 1) == ["recurring"]
    bench.turn(seconds=last + RECURRING_SECONDS - bench.time - 1.0)
    assert broken(bench, 1) == ["recurring"]
    bench.turn(seconds=2.0)
    assert broken(bench, 1) == []


def test_two_memory_errors_in_five_minutes(bench: GpuBench) -> None:
    for expected in ([], ["recurring"]):
        for _ in range(10):
            bench.driver.raise_xid(1, 48)
        wait_until(partial(count_xids, bench, 1, 10 + 10 * len(expected)), "the XIDs are there")
        assert broken(bench, 1) == ["xid", *expected]
        bench.turn(seconds=300.0)
    bench.driver.raise_xid(2, 13)
    wait_until(partial(count_xids, bench, 2, 1), "the XID is there")
    failures = bench.value("podgpu_device_recent_failures", 2, 'condition="xid"')
    assert failures is None, "an application caused it"


def count_xids(bench: GpuBench, number: int, expected: int) -> bool:
    bench.turn()
    return bench.value("podgpu_xid_errors_total", number) == expected


@pytest.mark.parametrize("is_present", [False, True])
def test_failures_before_a_restart_are_in_the_history(tmp_path: Path, is_present: bool) -> None:
    settings = Settings(interval=2.0, policy=Policy(hostname="h"))
    before = SimulatedNode("2xH100", settings)
    recorder = node_recorder(before.agent, str(tmp_path))

    def record(action: int) -> None:
        before.driver.advise(1, action)
        for _ in range(6):
            before.turn(20.0)
            assert recorder.record()

    reset = pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    record(0)
    record(reset)
    record(0)
    if is_present:
        record(reset)
    recorder.stop()

    after = SimulatedNode("2xH100", settings)
    after.time = before.time + 60.0
    after.driver.advise(1, reset)
    restarted = node_recorder(after.agent, str(tmp_path))
    after.turn()
    gpu = after.agent.published.state.devices[1]
    assert [(one.condition, one.count) for one in gpu.failures] == [("recovery_action", 2)]
    assert {condition.name for condition in gpu.conditions} == {"recovery_action", "recurring"}
    assert not after.agent.published.state.devices[0].failures
    restarted.stop()
