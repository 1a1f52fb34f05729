"""The agent logs each change once, with the reason and the advice."""

from __future__ import annotations

import logging

import pytest

from podgpu.model import SourceStatus, Unmapped, Workload
from podgpu.node.agent.publish import ChangeLog

GPU_A, GPU_B = "GPU-a", "GPU-b"


class Log:
    """A change log whose clock advances by a second with each report."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._now = 0.0
        self._log = ChangeLog(lambda: self._now)

    def report(self, *sources: SourceStatus) -> None:
        for source in sources:
            self._now += 1
            self._log.report([source], (), ())

    def report_unmapped(self, *unmapped: Unmapped) -> None:
        self._log.report((), (), unmapped)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


def unknown(device: str) -> Unmapped:
    return Unmapped("podlist", "unknown_device", device, "podlist", Workload("ns", "p"))


def failing(reason: str, device: str = GPU_A) -> SourceStatus:
    return SourceStatus("gpu1", False, 1.0, reason, f"gpu1: {reason}", device)


def well(device: str = GPU_A) -> SourceStatus:
    return SourceStatus("gpu1", True, 0.1, device=device)


def test_unmapped_assignments_are_logged_once_per_change(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    for devices in (["GPU-x"], ["GPU-x"], ["GPU-x", "GPU-y"], ["GPU-y"], ["GPU-x", "GPU-y"]):
        log.report_unmapped(*map(unknown, devices))
    subjects = [": ".join(message.split(": ")[:2]) for message in caplog.messages]
    assert subjects == [f"podlist: ns/p holds GPU-{letter}" for letter in "xyx"]
    assert "podgpu doctor" in caplog.messages[0]


def test_a_thousand_at_once_are_one_line(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    log.report_unmapped(*(unknown(f"GPU-{n}") for n in range(1000)))
    (message,) = caplog.messages
    assert "995 more" in message


def test_a_fault_that_comes_and_goes_is_two_lines_a_minute(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    log.report(*(source for _ in range(90) for source in (failing("deadline"), well())))
    assert len(caplog.messages) == 2 * 3
    log.report(*(failing("deadline") for _ in range(61)))
    assert caplog.messages[-1].startswith(f"gpu1 ({GPU_A}): deadline"), "a lasting fault is logged"


def test_only_the_same_gpu_answers_again(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    """A different GPU with the same index does not count as the recovery of the lost one."""
    log.report(failing("gpu_lost"), well(GPU_B))
    assert len(caplog.messages) == 1
    log.report(failing("gpu_lost", GPU_B), well(GPU_B))
    assert caplog.messages[2:] == [f"gpu1 ({GPU_B}): answers again"]
