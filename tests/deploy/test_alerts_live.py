"""Every shipped alert in a real Alertmanager: a fault on a simulated node fires it, and the repair
resolves it.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.node.agent.health import PastFailure
from tests.deploy.fleet import RULES, Fleet, Series, fleet_in, needs_servers
from tests.engine import BurstLoad
from tests.nodes.clock import wait_until

Alert = tuple[str, str, str, str]
"""Name, node, GPU, pod."""
_HW_POWER_BRAKE, _THERMAL = 271, 75
"""NVML field values that count nanoseconds of throttling."""
_HOST_PID = 9999
"""A process of the host, outside Kubernetes, on both nodes."""
_RESET = 1
"""Value of NVML's recovery action."""
_GIB = 1024**3


@dataclass
class Growing:
    """A throttling counter that grows with the clock, as if the GPU were throttled all the time."""

    fleet: Fleet
    field: int
    gpu: int

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> None:
        elapsed = int(1e9 * (time.monotonic() - self._began))
        self.fleet.nodes[0].driver.faults.answer(self.field, elapsed, self.gpu)


@dataclass
class Recurring:
    """An XID that recurs every second until its alert fires. The rule looks back two seconds here
    instead of ten minutes, so a slow machine could miss a single XID.
    """

    fleet: Fleet
    xid: int
    gpu: int

    def __post_init__(self) -> None:
        self._due = time.monotonic()
        self()

    def __call__(self) -> None:
        if time.monotonic() >= self._due:
            self.fleet.nodes[0].driver.faults.raise_xid(self.gpu, self.xid)
            self._due = time.monotonic() + 1.0


Meanwhile = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    expected: tuple[Alert, ...]
    inject: Callable[[Fleet], Meanwhile | None]
    """May return a function that is called repeatedly until the alert fires."""
    remove: Callable[[Fleet], object]
    told: str = ""
    """Pattern that the alert's description must match."""


def _take_down(fleet: Fleet) -> None:
    for node in fleet.nodes:
        node.down()


def _lose_gpu(fleet: Fleet) -> None:
    fleet.nodes[0].driver.faults.lose(1)


def _bring_gpu_back(fleet: Fleet) -> None:
    """Resets the GPU and reloads the driver, like an operator."""
    faults = fleet.nodes[0].driver.faults
    faults.recover(1)
    faults.reload_driver()


def _let_one_idle(fleet: Fleet) -> None:
    """Stops the process of one of the two pods on GPU 2. The pod keeps its share."""
    fleet.nodes[0].driver.remove(_pid(fleet, "ocr-0"))


def _set_it_to_work(fleet: Fleet) -> None:
    fleet.nodes[0].driver.place(SimulatedLoad(2, _pid(fleet, "ocr-0"), duty=0.15, memory=5 * _GIB))


def _pid(fleet: Fleet, pod: str) -> int:
    return 4000 + [tenant.pod for tenant in fleet.nodes[0].tenants].index(pod)


def _name_a_strange_gpu(fleet: Fleet) -> None:
    stranger = SimulatedPod(
        "research",
        "astray",
        {"main": {"nvidia.com/gpu": ["GPU-00000000-dead-beef-0000-000000000000"]}},
    )
    fleet.nodes[0].kubelet.pods += (stranger,)


def _forget_the_strange_gpu(fleet: Fleet) -> None:
    fleet.nodes[0].kubelet.pods = fleet.nodes[0].kubelet.pods[:-1]


def _use_a_free_gpu(fleet: Fleet) -> None:
    fleet.nodes[0].driver.place(SimulatedLoad(3, _pid(fleet, "ocr-0"), duty=0.15, memory=_GIB))


def _advise(action: int, gpu: int = 1) -> Callable[[Fleet], None]:
    """Returns a function that lets the driver advise this recovery action for a GPU."""
    return lambda fleet: fleet.nodes[0].driver.faults.advise(gpu, action)


def _fail_twice(fleet: Fleet) -> None:
    """GPU 1 had two uncorrectable memory errors in the last hours."""
    node = fleet.nodes[0]
    hours_ago = [time.time() - 3600 * hours for hours in (1, 5)]
    node.agent.restore_failures(
        [PastFailure(node.uuid(1), "ecc", at, is_present=False) for at in hours_ago]
    )


def _forget_failures(gpu: int) -> Callable[[Fleet], None]:
    def forget(fleet: Fleet) -> None:
        node = fleet.nodes[0]
        assert node.agent.forget(node.uuid(gpu)) == "xids"

    return forget


def _leave_memory_behind(fleet: Fleet) -> None:
    """A process of the host holds memory of GPU 3, which no pod has."""
    fleet.nodes[0].driver.place(SimulatedLoad(3, _HOST_PID, duty=0.0, memory=2 * _GIB))


def _end_the_process(fleet: Fleet) -> None:
    fleet.nodes[0].driver.remove(_HOST_PID)


def _compete(fleet: Fleet) -> None:
    """Gives both pods on GPU 2 and a host process permanent work."""
    pids = _pid(fleet, "ocr-0"), _pid(fleet, "embed-0")
    for pid in pids:
        fleet.nodes[0].driver.remove(pid)
    for pid in (*pids, _HOST_PID):
        fleet.nodes[0].driver.place(BurstLoad(2, pid, duty=1.0, memory=5 * _GIB))


def _stop_competing(fleet: Fleet) -> None:
    # From now on the driver has a log of switches of this GPU, which lists no other kind of load.
    ocr, embed = _pid(fleet, "ocr-0"), _pid(fleet, "embed-0")
    for pid in (ocr, embed, _HOST_PID):
        fleet.nodes[0].driver.remove(pid)
    fleet.nodes[0].driver.place(BurstLoad(2, ocr, duty=0.15, memory=5 * _GIB))
    fleet.nodes[0].driver.place(BurstLoad(2, embed, duty=0.35, memory=9 * _GIB))


def _use_its_own_gpu_only(fleet: Fleet) -> None:
    fleet.nodes[0].driver.remove(_pid(fleet, "ocr-0"))
    _set_it_to_work(fleet)


FAULTS = {
    "xid of an application": Fault(
        (("PodgpuXidError", "node-1", "0", ""),),
        lambda fleet: Recurring(fleet, 31, 0),
        lambda fleet: None,  # no repair needed: the alert ends ten minutes after the XID
        r"XID 31 .*research/train-0",
    ),
    "xid of the hardware": Fault(
        (("PodgpuXidHardwareError", "node-1", "2", ""),),
        lambda fleet: Recurring(fleet, 95, 2),
        _forget_failures(2),
        r"batch/embed-0 batch/ocr-0|batch/ocr-0 batch/embed-0",
    ),
    "row remapping": Fault(
        (("PodgpuRowRemapFailure", "node-1", "3", ""),),
        lambda fleet: fleet.nodes[0].driver.faults.answer(
            "nvmlDeviceGetRemappedRows", (0, 1, 0, 1), 3
        ),
        lambda fleet: fleet.nodes[0].driver.faults.clear("nvmlDeviceGetRemappedRows", 3),
        "Held by: nobody",
    ),
    "row remapping waits": Fault(
        (("PodgpuGpuBroken", "node-1", "3", ""),),
        lambda fleet: fleet.nodes[0].driver.faults.answer(
            "nvmlDeviceGetRemappedRows", (0, 1, 1, 0), 3
        ),
        lambda fleet: fleet.nodes[0].driver.faults.clear("nvmlDeviceGetRemappedRows", 3),
        "row_remap_pending for five minutes.*Held by: nobody",
    ),
    "heat": Fault(
        (("PodgpuThermalThrottling", "node-1", "0", ""),),
        lambda fleet: Growing(fleet, _THERMAL, 0),
        lambda fleet: None,  # the counter stops growing
        "research/train-0",
    ),
    "power brake": Fault(
        (("PodgpuPowerBrake", "node-1", "1", ""),),
        lambda fleet: Growing(fleet, _HW_POWER_BRAKE, 1),
        lambda fleet: None,
    ),
    "memory": Fault(
        (("PodgpuMemoryNearlyFull", "node-2", "0", "eval-0"),),
        lambda fleet: fleet.nodes[1].driver.place(
            SimulatedLoad(0, _HOST_PID, duty=0.1, memory=31 * _GIB)
        ),
        lambda fleet: fleet.nodes[1].driver.remove(_HOST_PID),
        "research/eval-0",
    ),
    "idle": Fault(
        (("PodgpuAllocatedButIdle", "node-1", "2", "ocr-0"),),
        _let_one_idle,
        _set_it_to_work,
        "batch/ocr-0",
    ),
    "a GPU that was not given": Fault(
        (("PodgpuUnallocatedUse", "node-1", "3", "ocr-0"),),
        _use_a_free_gpu,
        _use_its_own_gpu_only,
        "batch/ocr-0 has used GPU 3 .*Allocated to: nobody",
    ),
    "three that want the whole GPU": Fault(
        (
            ("PodgpuContainerWaits", "node-1", "2", "ocr-0"),
            ("PodgpuContainerWaits", "node-1", "2", "embed-0"),
        ),
        _compete,
        _stop_competing,
        "waits .* of the time for GPU 2 .*batch/embed-0",
    ),
    "advice of the driver": Fault(
        (("PodgpuRecoveryAction", "node-1", "1", ""),),
        _advise(_RESET),
        _advise(0),
        "needs the recovery action .*Held by: serving/chat-0",
    ),
    # The kubelet still gives the GPU to new pods.
    "advice that Kubernetes does not know": Fault(
        (
            ("PodgpuRecoveryAction", "node-1", "0", ""),
            ("PodgpuKubernetesDisagrees", "node-1", "0", ""),
        ),
        _advise(_RESET, 0),
        _advise(0, 0),
        "has recovery_action, but Kubernetes calls it healthy .*Held by: research/train-0",
    ),
    "a GPU that keeps failing": Fault(
        (("PodgpuGpuKeepsFailing", "node-1", "1", ""),),
        _fail_twice,
        _forget_failures(1),
        "ecc 2 times.*Held by: serving/chat-0",
    ),
    "memory of an ended process": Fault(
        (("PodgpuOrphanedMemory", "node-1", "3", ""),),
        _leave_memory_behind,
        _end_the_process,
        f"pid {_HOST_PID} 2GiB",
    ),
    "kubelet away": Fault(
        (("PodgpuMappingBroken", "node-2", "", ""),),
        lambda fleet: fleet.nodes[1].kubelet.stop(),
        lambda fleet: fleet.nodes[1].kubelet.start(),
        "Reason: socket_missing",
    ),
    "a strange id": Fault(
        (("PodgpuAssignmentsUnmapped", "node-1", "", ""),),
        _name_a_strange_gpu,
        _forget_the_strange_gpu,
        "unknown_device",
    ),
    "lost GPU": Fault(
        (("PodgpuGpuLost", "node-1", "", ""),), _lose_gpu, _bring_gpu_back, "do not answer: gpu1"
    ),
    "driver away": Fault(
        (("PodgpuExporterStale", "node-2", "", ""),),
        lambda fleet: fleet.nodes[1].driver.faults.unload_driver(),
        lambda fleet: fleet.nodes[1].driver.faults.load_driver(),
        "nvml",
    ),
    "exporter down": Fault(
        (("PodgpuExporterDown", "node-2", "", ""),),
        lambda fleet: fleet.nodes[1].down(),
        lambda fleet: fleet.nodes[1].up(),
    ),
    "a node that nobody looks at": Fault(
        (("PodgpuNodeWithoutExporter", "node-3", "", ""),),
        lambda fleet: setattr(fleet.third_node, "gpus", 8),
        lambda fleet: setattr(fleet.third_node, "gpus", 0),
        "GPUs of node-3",
    ),
    "a job without the relabelings": Fault(
        (("PodgpuPodLabelsOverwritten", "", "", ""),),
        lambda fleet: fleet.scrape_carelessly(True),
        lambda fleet: fleet.scrape_carelessly(False),
    ),
    "every exporter down": Fault(
        (
            ("PodgpuExporterAbsent", "", "", ""),
            ("PodgpuExporterDown", "node-1", "", ""),
            ("PodgpuExporterDown", "node-2", "", ""),
        ),
        _take_down,
        lambda fleet: [node.up() for node in fleet.nodes],
    ),
}
TOGETHER = (
    (
        "idle",
        "xid of an application",
        "power brake",
        "row remapping",
        "memory",
        "a node that nobody looks at",
    ),
    ("xid of the hardware", "heat", "row remapping waits"),
    ("a strange id", "kubelet away", "a GPU that was not given"),
    ("lost GPU", "exporter down"),
    ("three that want the whole GPU", "advice of the driver"),
    (
        "advice that Kubernetes does not know",
        "a GPU that keeps failing",
        "memory of an ended process",
    ),
    ("a job without the relabelings", "driver away"),
    ("every exporter down",),
)
"""Faults that are injected together to save time. Their alerts have different labels."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder,
        # Like the durations of the rules.
        patch("podgpu.node.agent.orphans.ORPHAN_SECONDS", 1.0),
        patch("podgpu.node.agent.health._DISAGREES_SECONDS", 1.0),
        fleet_in(Path(folder)) as running,
    ):
        for node in running.nodes:
            node.proc.add(_HOST_PID, "0::/system.slice\n")
        yield running


@needs_servers
# asyncio does not close a connection that it accepts while the server closes. Here Prometheus may
# connect at that time.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_faults_fire_their_alerts_and_no_others_and_their_ends_resolve_them(
    fleet: Fleet, names: tuple[str, ...]
) -> None:
    _come_and_go(fleet, [FAULTS[name] for name in names])


def _come_and_go(fleet: Fleet, faults: Sequence[Fault]) -> None:
    """Injects the faults and removes each one when its alert fires. No other alert may fire
    meanwhile.
    """
    expected = {alert for fault in faults for alert in fault.expected}
    wait_until(lambda: not fleet.firing(), "nothing fires before")
    going_on: dict[Fault, Meanwhile] = {}

    def all_told() -> bool:
        alerts = fleet.alertmanager.firing()
        for fault in [fault for fault in going_on if _is_told(fleet, fault, alerts, expected)]:
            del going_on[fault]
            fault.remove(fleet)
        for goes_on in going_on.values():
            goes_on()
        return not going_on

    try:
        for fault in faults:
            going_on[fault] = fault.inject(fleet) or (lambda: None)
        wait_until(all_told, "all told")
    except AssertionError as e:
        e.add_note(
            f"not told of: {[fault.expected for fault in going_on]}; firing: {fleet.firing()}"
        )
        raise
    finally:
        for fault in going_on:
            fault.remove(fleet)
    try:
        wait_until(lambda: not fleet.firing(), "all resolved")
    except AssertionError as e:
        e.add_note(f"still firing: {fleet.firing()}")
        raise


def _is_told(
    fleet: Fleet, fault: Fault, alerts: Sequence[dict[str, Any]], expected: set[Alert]
) -> bool:
    own = [alert for alert in alerts if fleet.short([alert]) <= set(fault.expected)]
    told = any(re.search(fault.told, alert["annotations"]["description"]) for alert in own)
    return told and fleet.short(own) == set(fault.expected) and fleet.short(alerts) <= expected


@needs_servers
def test_a_pods_series_has_its_own_pod_and_an_idle_gpus_has_none(fleet: Fleet) -> None:
    """The chart's relabelings put the exporter's own pod into another label."""
    scraped: list[Series] = []

    def every_device() -> bool:
        scraped[:] = fleet.prometheus.ask("DCGM_FI_DEV_FB_FREE")
        return len(scraped) == 8

    wait_until(every_device, "every device is scraped")
    found = {
        (one.labels["Hostname"], one.labels["gpu"], one.labels.get("GPU_I_ID", "")): one.labels
        for one in scraped
    }
    assert {key: labels.get("pod") for key, labels in found.items()} == {
        ("node-1", "0", ""): "train-0",
        ("node-1", "1", ""): "chat-0",
        ("node-1", "2", ""): None,  # shared by two pods
        ("node-1", "3", ""): None,  # free
        ("node-2", "0", ""): "eval-0",
        ("node-2", "1", ""): None,  # in MIG mode
        ("node-2", "1", "7"): "ada-0",
        ("node-2", "1", "8"): None,
    }
    assert {labels["exporter_pod"] for labels in found.values()} == {
        "podgpu-exporter-node-1",
        "podgpu-exporter-node-2",
    }
    for labels in found.values():
        assert ("pod" in labels) == ("namespace" in labels) == ("container" in labels)
        assert not {"exported_pod", "exported_namespace", "exported_container"} & labels.keys()
    assert fleet.prometheus.ask('podgpu_device_count{pod!=""}') == []


def rules_of(file: Path) -> list[dict[str, object]]:
    return [
        rule
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def test_every_alert_is_brought_about() -> None:
    shipped = {rule["alert"] for file in RULES for rule in rules_of(file) if "alert" in rule}
    brought = {alert[0] for fault in FAULTS.values() for alert in fault.expected}
    # No fault of a node brings these about. promtool tests them (tests/deploy/rules).
    of_the_cluster = {"PodgpuBudgetExceeded", "PodgpuBudgetForecastExceeded", "PodgpuSlowGpu"}
    assert brought == shipped - of_the_cluster
    assert sorted(name for names in TOGETHER for name in names) == sorted(FAULTS)
