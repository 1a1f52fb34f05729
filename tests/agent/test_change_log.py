"""What the log says of assignments that came to nothing: once per change, in words for whoever holds them."""

from __future__ import annotations

import logging

import pytest

from podgpu.agent.change_log import MOST_LINES, ChangeLog
from podgpu.model import Outcome, Snapshot, Unmapped, Workload

CONTAINER = "0123456789abcdef" * 4


def said(caplog: pytest.LogCaptureFixture, *unmapped: Unmapped) -> list[str]:
    caplog.set_level(logging.INFO)
    ChangeLog().report(Snapshot(1.0, unmapped=unmapped))
    return caplog.messages


@pytest.mark.parametrize(
    ("unmapped", "description", "advice"),
    [
        (
            Unmapped("kubelet", "unknown_device", "GPU-x", "nvidia.com/gpu", Workload("ns", "p", "main")),
            "ns/p/main holds nvidia.com/gpu GPU-x",
            "podgpu doctor",
        ),
        (
            Unmapped("hpc", "unknown_device", "9", "hpc", Workload(job="4711")),
            "job 4711 is in the job file 9",
            "named by nvidia-smi's index",
        ),
        (Unmapped("hpc", "too_many_jobs", "0", "hpc", Workload()), "job file 0", "prolog"),
        (
            Unmapped("processes", "identity_conflict", "GPU-x", "", Workload(uid="u-1", container_id=CONTAINER)),
            "pod u-1/0123456789ab uses GPU-x",
            "/var/log/pods",
        ),
        (
            Unmapped("podlist", "unrecognised_id", "a\ncard", "podlist", Workload("ns", "p")),
            "ns/p holds a\\ncard",
            "report the id",
        ),
    ],
    ids=lambda value: f"{value.source}-{value.reason}" if isinstance(value, Unmapped) else "",
)
def test_one_line_per_unmapped_assignment(
    unmapped: Unmapped, description: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = said(caplog, unmapped)
    assert line.startswith(f"{unmapped.source}: {description}: ")
    assert f"({unmapped.reason}); " in line
    assert advice in line


def test_a_contradiction_is_worth_a_word_but_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Where HAMi hands out GPUs there is one for every pod."""
    said(caplog, Unmapped("kubelet", "contradicted", "GPU-x", "", Workload("ns", "p", "main")))
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    log, first, second = (
        ChangeLog(),
        *(Unmapped("podlist", "unknown_device", name, "podlist", Workload("ns", "p")) for name in ("GPU-x", "GPU-y")),
    )
    for unmapped in ((first,), (first,), (first, second), (second,), (first, second)):
        log.report(Snapshot(1.0, unmapped=unmapped))
    assert [": ".join(message.split(": ")[:2]) for message in caplog.messages] == [
        "podlist: ns/p holds GPU-x",
        "podlist: ns/p holds GPU-y",
        "podlist: ns/p holds GPU-x",
    ]


def test_a_source_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    ChangeLog().report(
        Snapshot(1.0, outcomes=(Outcome("kubelet", 5.0, "deadline", "kubelet: no answer within 5.0 s"),))
    )
    assert caplog.messages == ["kubelet: no answer within 5.0 s; podgpu goes on and tries again"]


def test_a_thousand_at_once_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    many = [Unmapped("podlist", "unknown_device", f"GPU-{n}", "podlist", Workload("ns", "p")) for n in range(1000)]
    messages = said(caplog, *many)
    assert len(messages) == MOST_LINES + 1
    assert messages[-1] == "podlist: and 995 more of that kind (unknown_device): podgpu doctor names all"


GPU_A, GPU_B = "GPU-a", "GPU-b"


def failing(reason: str, device: str = GPU_A) -> Outcome:
    return Outcome("gpu1", 1.0, reason, f"gpu1: {reason}", device)


def well(device: str = GPU_A) -> Outcome:
    return Outcome("gpu1", 0.1, device=device)


class Log:
    """A change log whose time the test turns, a second for each outcome."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.now = 0.0
        self._log = ChangeLog(lambda: self.now)

    def report(self, *outcomes: Outcome) -> None:
        for outcome in outcomes:
            self.now += 1
            self._log.report(Snapshot(1.0, outcomes=(outcome,)))


def test_a_late_call_is_one_fault_by_whichever_name(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    log.report(*(failing(reason) for _ in range(100) for reason in ("deadline", "hung")))
    assert caplog.messages == [f"gpu1 ({GPU_A}): deadline; podgpu goes on and tries again"]
    log.report(well())
    assert caplog.messages[1:] == [f"gpu1 ({GPU_A}): answers again"]


def test_a_fault_that_comes_and_goes_is_two_lines_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = Log(caplog)
    log.report(*(outcome for _ in range(90) for outcome in (failing("deadline"), well())))
    assert len(caplog.messages) == 2 * 3
    log.report(*(failing("deadline") for _ in range(61)))
    assert caplog.messages[-1].startswith(f"gpu1 ({GPU_A}): deadline"), "one that stays is told in the end"


def test_another_fault_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    Log(caplog).report(failing("deadline"), failing("gpu_lost"), failing("gpu_lost"))
    assert [message.split(": ")[1] for message in caplog.messages] == [
        "deadline; podgpu goes on and tries again",
        "gpu_lost; podgpu goes on and tries again",
    ]


def test_a_fault_that_changes_its_name_again_and_again_is_told_once_by_each(caplog: pytest.LogCaptureFixture) -> None:
    Log(caplog).report(*(failing(reason) for _ in range(100) for reason in ("timeout", "gpu_lost")))
    assert len(caplog.messages) == 2


def test_only_the_same_gpu_answers_again(caplog: pytest.LogCaptureFixture) -> None:
    """Another has its number now."""
    log = Log(caplog)
    log.report(failing("gpu_lost"), well(GPU_B))
    assert len(caplog.messages) == 1
    log.report(failing("gpu_lost", GPU_B), well(GPU_B))
    assert caplog.messages[1:] == [
        f"gpu1 ({GPU_B}): gpu_lost; podgpu goes on and tries again",
        f"gpu1 ({GPU_B}): answers again",
    ]
