"""Tests health, NVLink peers, and the devices of `-s` and `-p`: NVSwitches, NVLinks and Grace
CPUs.
"""

from __future__ import annotations

import pytest

from podgpu.model import Detail, EntityState
from podgpu.node.agent.device_selection import parse_selection
from tests.gpu.dcgm.double import CORE, CPU, LINK, PLAIN, SWITCH, Bench, Double, fields_named

HEALTH, P2P = "DCGM_EXP_GPU_HEALTH_STATUS", "DCGM_EXP_P2P_STATUS"
SWITCH_TEMP, SWITCH_LINK_FLIT, LINK_STATE, CPU_POWER, CPU_UTIL = 858, 786, 1508, 1130, 1100
OTHERS = (
    "DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT",
    "DCGM_FI_DEV_NVSWITCH_LINK_FLIT_ERRORS",
    "DCGM_FI_DEV_NVLINK_GET_STATE",
    "DCGM_FI_DEV_CPU_POWER_UTIL_CURRENT",
    "DCGM_FI_DEV_CPU_UTIL_TOTAL",
)
PCIE, MEM, ALL = 0x1, 0x10, 0xFFFFFFFF


def judged(bench: Bench, name: str, index: int = 0) -> tuple[Detail, ...]:
    """Returns the details of a condition. Reads twice, because the first reading has no health."""
    bench.read(*PLAIN, name)
    return bench.read(*PLAIN, name, index=index).details


def test_the_worst_incident_of_each_watch_and_gpu(bench: Bench) -> None:
    bench.double.call("incident", 0, PCIE, 20, 3)
    bench.double.call("incident", 0, PCIE, 10, 46)
    bench.double.call("incident", 0, MEM, 10, 10)
    bench.double.call("incident", 1, ALL, 20, 9999)
    names = ("health_watch", "health_error_code", "health_error_severity", "health_error_category")
    found = {
        (*(dict(labels)[name] for name in names), value)
        for _, labels, value in judged(bench, HEALTH)
    }
    assert {f for f in found if f[-1]} == {
        ("PCIE", "DCGM_FR_PCI_REPLAY_RATE", "ISOLATE", "HARDWARE_PCIE", 20),
        ("MEM", "DCGM_FR_CLOCK_THROTTLE_THERMAL", "MONITOR", "HARDWARE_THERMAL", 10),
    }
    assert {f[1:] for f in found if not f[-1]} == {("DCGM_FR_OK", "NONE", "NONE", 0)}
    assert "ALL" in {watch for watch, *_, value in found if not value}
    (other,) = (labels for _, labels, value in judged(bench, HEALTH, index=1) if value)
    assert [dict(other)[name] for name in names] == [
        "ALL",
        "DCGM_FR_UNKNOWN(9999)",
        "UNKNOWN",
        "UNKNOWN",
    ]


def test_peers_over_nvlink(bench: Bench) -> None:
    bench.double.call("peer", 0, 1, 0)
    bench.double.call("peer", 1, 0, 3)
    assert judged(bench, P2P) == (
        ("DCGM_EXP_P2P_STATUS", {"link_status": "OK", "peer_gpu": "1"}, 0),
    )
    assert judged(bench, P2P, 1) == (
        ("DCGM_EXP_P2P_STATUS", {"link_status": "TopologyNotSupported", "peer_gpu": "0"}, 3),
    )


def test_a_state_of_a_newer_dcgm(bench: Bench) -> None:
    bench.double.call("peer", 0, 1, 9)
    assert judged(bench, P2P) == ((P2P, {"link_status": "Unknown", "peer_gpu": "1"}, 9),)


@pytest.fixture
def fabric(double: Double) -> Double:
    """Adds a GPU with links 0 and 2 up, two switches with links, and two CPUs with two cores
    each.
    """
    double.gpu(0)
    double.speak(0)
    for link, state in ((0, 3), (1, 2), (2, 3)):
        double.call("gpu_link", 0, link, state)
        double.int((LINK, 1 | link << 8), LINK_STATE, 1)
    for switch in (0, 1):
        double.call("switch", switch)
        double.int((SWITCH, switch), SWITCH_TEMP, 50 + switch)
        for link, state in ((4, 3), (5, 1)):
            double.call("switch_link", switch, link, state)
            double.int((LINK, 3 | link << 8 | switch << 24), SWITCH_LINK_FLIT, 10 * switch + link)
    for cpu, cores in ((0, (0, 1)), (1, (72, 73))):
        double.double((CPU, cpu), CPU_POWER, 100.0 + cpu)
        for core in cores:
            double.call("cpu", cpu, core)
            double.double((CORE, core), CPU_UTIL, 0.5)
    return double


def others(bench: Bench) -> tuple[EntityState, ...]:
    bench.telemetry.inventory()
    return bench.telemetry.read_others(fields_named(*PLAIN, *OTHERS)).entities


@pytest.mark.parametrize(
    ("switches", "cpus", "kinds"),
    [
        ("g", "g", ["SWITCH", "SWITCH", "CPU", "CPU"]),
        ("i", "i:72-80", ["LINK", "LINK", "CPU_CORE", "CPU_CORE"]),
        ("g:1", "g:0", ["SWITCH", "CPU"]),
        ("i:9", "i:0", ["CPU_CORE"]),
        ("g:1+i", "g:0+i:1-73", ["SWITCH", "LINK", "CPU", "CPU_CORE"]),
    ],
)
def test_selections(fabric: Double, switches: str, cpus: str, kinds: list[str]) -> None:
    bench = Bench(
        fabric, switches=parse_selection(switches, "-s"), cpus=parse_selection(cpus, "-p")
    )
    assert [o.kind for o in others(bench)] == kinds


def test_numbers_that_do_not_exist_are_logged(
    fabric: Double, caplog: pytest.LogCaptureFixture
) -> None:
    switches, cpus = parse_selection("g:0,7+i:4-5", "-s"), parse_selection("g:1+i:72,99", "-p")
    bench = Bench(fabric, switches=switches, cpus=cpus)
    for _ in range(2):
        bench.telemetry.inventory()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warnings == [
        "-s: this node has no NVSwitch 7",
        "-s: this node has no active NVLink of a selected NVSwitch 5",
        "-p: this node has no core of a selected CPU 99",
    ]


def test_utilization_of_a_cpu_and_its_cores(fabric: Double) -> None:
    fabric.double((CPU, 0), CPU_UTIL, 0.25)
    bench = Bench(fabric, switches=parse_selection("g"), cpus=parse_selection("g:0+i"))
    values = {
        tuple(entity.labels.values()): entity.fields.get("DCGM_FI_DEV_CPU_UTIL_TOTAL")
        for entity in others(bench)
        if entity.kind != "SWITCH"
    }
    assert values == {("0",): 0.25, ("0", "0"): 0.5, ("1", "0"): 0.5}
