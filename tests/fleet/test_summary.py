"""The summary of a pod and the hint for a smaller share of a GPU, from a simulated history."""

from __future__ import annotations

import pytest

from podgpu.charge import Amounts, Charge, Figures, UsageAccount
from podgpu.fleet.readings import ClusterReading, NodeReading, ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state
from podgpu.model import DeviceState, NodeState
from podgpu.past.job import JobSummary, read_summary
from podgpu.past.store import ConditionRecord, GpuSample, HistoryStore

GIB = 1024**3
START, MINUTES = 1_800_000_000, 60
POD = UsageAccount("ml", "job-0")


def make_state(gpus: int, model: str) -> ClusterState:
    devices = tuple(
        DeviceState(uuid=f"GPU-{i}", index=i, model=model, memory_total_bytes=80 * GIB)
        for i in range(gpus)
    )
    reading = NodeReading(
        "http://node-1", NodeState(producer="podgpu", node="node-1", devices=devices), 0.0
    )
    return build_cluster_state(ClusterReading((reading,)), None, ViewSettings(), 0.0, START)


def summarize(
    use: float, memory: int, gpus: int = 1, model: str = "NVIDIA H100 80GB HBM3", part: float = 1.0
) -> JobSummary:
    store = HistoryStore()
    amounts = Amounts(
        15.0 * part, measured_seconds=15.0 * part, busy_seconds=15.0 * use, waited_seconds=1.5
    )
    for step in range(4 * MINUTES):
        hot = (
            [ConditionRecord("thermal", "slowed by heat")]
            if step < 8
            else [ConditionRecord("xid", "XID 48")]
            if step == 20
            else []
        )
        holder = Charge(POD, "main", amounts)
        samples = [
            GpuSample(
                f"GPU-{i}",
                "",
                "node-1",
                i,
                Figures(use, memory * GIB / (i + 1), 300.0, 50.0),
                [holder],
                hot,
            )
            for i in range(gpus)
        ]
        store.append(START + 15 * step, samples)
    store.append(START + 15 * 4 * MINUTES, [GpuSample(f"GPU-{i}") for i in range(gpus)])
    with store.reader() as db:
        summary = read_summary(db, "ml", "job-0", START + 7200, make_state(gpus, model))
    store.close()
    assert summary is not None
    return summary


def test_an_ended_pod_has_its_duration_use_waiting_throttling_and_errors() -> None:
    summary = summarize(0.9, 70)
    assert (summary.from_, summary.to, summary.duration_seconds) == (START, START + 3600, 3600)
    assert (summary.gpu_hours, summary.mean_use, summary.peak_use) == (1.0, 0.9, 0.9)
    assert (summary.peak_memory_bytes, summary.wait_seconds) == (70 * GIB, 360.0)
    assert (summary.throttled_seconds, summary.errors) == (120.0, 1)
    causes = [(cause.cause, cause.seconds, cause.ratio) for cause in summary.causes]
    assert causes == [
        ("waiting", 360.0, 0.1),
        ("throttling", 120.0, 0.0333),
    ], "an XID for 15 s is less than 1 %"
    assert summary.hint == "", "the pod needs the whole GPU"


@pytest.mark.parametrize(
    ("use", "memory", "gpus", "model", "hint"),
    [
        (
            0.04,
            4,
            1,
            "NVIDIA H100 80GB HBM3",
            "A MIG instance 1g (10 GiB) or 10 % of a GPU would be enough",
        ),
        (
            0.2,
            12,
            1,
            "NVIDIA A100-SXM4-80GB",
            "A MIG instance 2g (20 GiB) or 20 % of a GPU would be enough",
        ),
        (
            0.1,
            30,
            1,
            "NVIDIA H100 80GB HBM3",
            "A MIG instance 3g (40 GiB) or 40 % of a GPU would be enough",
        ),
        (0.2, 12, 1, "NVIDIA L40S", "20 % of a GPU would be enough"),
        (0.1, 4, 4, "NVIDIA H100 80GB HBM3", ""),
        (0.0, 0, 1, "NVIDIA H100 80GB HBM3", "Nothing ran on its GPU, so it can be released."),
        (0.0, 9, 4, "NVIDIA H100 80GB HBM3", "Nothing ran on its 4 GPUs, so they can be released."),
    ],
)
def test_a_smaller_part_that_fits_is_named_with_its_assumption(
    use: float, memory: int, gpus: int, model: str, hint: str
) -> None:
    summary = summarize(use, memory, gpus, model)
    assert summary.hint.partition(", if its use stays as before")[0] == hint
    if use and hint:
        assert (
            f"below {use * 100:.0f} % for 95 % of the time, at most {memory}.0 GiB" in summary.hint
        )


def test_a_pod_that_shares_its_gpu_already_gets_no_hint() -> None:
    shared = summarize(0.04, 4, part=0.25)
    assert (shared.hint, shared.mean_use, shared.peak_use) == ("", 0.04, 0.04)


def test_means_over_more_than_five_minutes_give_no_hint() -> None:
    """A pod that works for one of every 25 minutes has only low means after two days."""
    hints = {}
    for hours in (40, 48):
        store = HistoryStore()
        for step in range(hours * 60):
            use = 1.0 if step % 25 == 0 else 0.01
            charge = Charge(POD, "main", Amounts(60.0, busy_seconds=60.0 * use))
            sample = GpuSample("GPU-0", figures=Figures(use, GIB), charges=[charge])
            store.append(START + 60 * step, [sample])
        with store.reader() as db:
            state = make_state(1, "NVIDIA L40S")
            summary = read_summary(db, "ml", "job-0", START + hours * 3600, state)
        store.close()
        assert summary is not None
        hints[summary.step_seconds] = summary.hint
    assert [step for step, hint in hints.items() if hint] == [300]
    assert "30 % of a GPU" in hints[300]


def test_the_peak_of_a_running_pod_never_falls() -> None:
    """After three hours at 50 %, an unfinished step of 5 minutes begins with 100 % and then drops
    to 0 %.
    """
    store = HistoryStore()
    peaks = []
    for step in range(4 * 180 + 20):
        use = 0.5 if step < 4 * 180 else 1.0 if step < 4 * 180 + 4 else 0.0
        sample = GpuSample(
            "GPU-0", figures=Figures(use, GIB), charges=[Charge(POD, "main", Amounts(15.0))]
        )
        store.append(START + 15 * step, [sample])
        if step == 0 or step >= 4 * 180 - 1:
            with store.reader() as db:
                summary = read_summary(
                    db, "ml", "job-0", START + 15 * step + 1, make_state(1, "NVIDIA L40S")
                )
            assert summary is not None
            peaks.append(summary.peak_use)
    store.close()
    assert set(peaks) == {0.5}


def test_the_duration_is_the_time_when_the_pod_held_a_gpu() -> None:
    """A pod of a StatefulSet runs for 1 h, pauses for 4 h, and runs for 30 min."""
    store = HistoryStore()
    holder = Charge(POD, "main", Amounts(15.0))
    for step in range(4 * 330 + 1):
        held = step < 240 or 1200 <= step < 1320
        store.append(START + 15 * step, [GpuSample("GPU-0", charges=[holder] if held else [])])
    with store.reader() as db:
        summary = read_summary(db, "ml", "job-0", START + 7 * 3600, make_state(1, "NVIDIA L40S"))
    store.close()
    assert summary is not None
    assert (summary.from_, summary.to) == (START, START + 19_800)
    assert (summary.duration_seconds, summary.gpu_hours) == (5400, 1.5)
