"""The summary of a pod, from a simulated history."""

from __future__ import annotations

from typing import Any

import pytest

from podgpu.charge import Amounts, Charge, Figures, UsageAccount
from podgpu.fleet.readings import ClusterReading, NodeReading
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state
from podgpu.model import (
    DeviceState,
    DeviceTotals,
    Holder,
    HolderUsage,
    NodeState,
    WaitPart,
    WorkloadOwner,
)
from podgpu.past.books.gpu_sample import ConditionRecord, GpuSample
from podgpu.past.books.store import HistoryStore
from podgpu.past.job import JobSummary
from podgpu.past.sqlite.sqlite_job import read_summary
from podgpu.past.verdict import judge_use

GIB = 1024**3
START, MINUTES = 1_800_000_000, 60
POD = UsageAccount("ml", "job-0")
Values = dict[str, int | float | str]


def make_state(
    gpus: int, model: str, fields: Values | None = None, is_owned: bool = True, **device: Any
) -> ClusterState:
    holders = () if fields is None else (Holder("ml", "job-0", "main"),)
    device.setdefault("holders", holders)
    use = (fields or {}).get("utilization")
    devices = tuple(
        DeviceState(
            uuid=f"GPU-{i}",
            index=i,
            model=model,
            memory_total_bytes=80 * GIB,
            fields=fields,
            utilization_ratio=None if use is None else float(use),
            **device,
        )
        for i in range(gpus)
    )
    reading = NodeReading(
        "http://node-1", NodeState(producer="podgpu", node="node-1", devices=devices), 0.0
    )
    owners = {("ml", "job-0"): WorkloadOwner("Deployment", "job")}
    cluster = ClusterReading((reading,), owners=owners if is_owned else {})
    return build_cluster_state(cluster, None, ViewSettings(), 0.0, START)


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


CONTAINERS = (Charge(POD, "main"), Charge(POD, "sidecar"))


def summarize_conditions(
    conditions: dict[str, tuple[int, int]],
    hours: float = 1,
    waited: float = 0.0,
    gpus: int = 1,
    fields: Values | None = None,
    **device: Any,
) -> JobSummary:
    """Two containers of a pod hold GPUs until now. `conditions`: name -> start and end in seconds."""
    store = HistoryStore()
    seconds = round(hours * 3600)
    step = 15 if hours <= 1 else 300
    amounts = Amounts(step / 2, busy_seconds=0.4 * step, waited_seconds=waited * step)
    for at in range(0, seconds + 1, step):
        present = []
        for name, (begin, end) in conditions.items():
            if begin <= at < end:
                present.append(ConditionRecord(name, name))
        charges = [charge._replace(amounts=amounts) for charge in CONTAINERS]
        samples = []
        for index in range(gpus):
            uuid = f"GPU-{index}"
            figures = Figures(0.8, GIB, 300.0, 50.0)
            first = present if index == 0 else []
            samples.append(GpuSample(uuid, "", "node-1", index, figures, charges, first))
        store.append(START + at, samples)
    with store.reader() as db:
        state = make_state(gpus, "NVIDIA H100 80GB HBM3", fields, **device)
        summary = read_summary(db, "ml", "job-0", START + seconds, state)
    store.close()
    assert summary is not None
    return summary


def list_causes(summary: JobSummary) -> list[tuple[str, float | None, float | None]]:
    return [(cause.cause, cause.seconds, cause.ratio) for cause in summary.causes]


def test_overlapping_conditions_and_containers_count_once() -> None:
    hot = {"thermal": (600, 1200), "power_brake": (900, 1500)}
    summary = summarize_conditions(hot, gpus=2)
    assert summary.throttled_seconds == 900
    assert list_causes(summary) == [("throttling", 900, 0.125)]
    failing = summarize_conditions({"xid": (600, 1200), "ecc": (900, 1500)})
    assert list_causes(failing) == [("failing", 900, 0.25)]


def test_containers_of_a_pod_wait_no_longer_than_the_pod_ran() -> None:
    summary = summarize_conditions({}, waited=1.0)
    assert summary.wait_seconds == 3600
    assert list_causes(summary) == [("waiting", 3600, 1)]


def test_twenty_minutes_are_named_in_a_long_run() -> None:
    hot = {"thermal": (3600, 4800)}
    assert list_causes(summarize_conditions(hot, hours=20)) == [("throttling", 1200, 0.0167)]
    short = {"thermal": (3600, 4500)}
    assert list_causes(summarize_conditions(short, hours=20)) == []
    other = summarize_conditions(hot, hours=20, gpus=2)
    assert list_causes(other) == [], "10 minutes per GPU"


BUSY: Values = {"utilization": 0.9}
IDLE_CORES = BUSY | {"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.02}
QUIET = IDLE_CORES | {"DCGM_FI_PROF_DRAM_ACTIVE": 0.1}
LOW = ("low_activity", 0.02)


def _traffic(kind: str, each_way: float) -> Values:
    name = f"DCGM_FI_PROF_{kind}"
    return QUIET | {f"{name}_TX_BYTES": each_way, f"{name}_RX_BYTES": each_way}


@pytest.mark.parametrize(
    ("fields", "causes"),
    [
        (QUIET, [LOW]),
        (IDLE_CORES, [LOW]),
        (BUSY, []),
        (QUIET | {"DCGM_FI_PROF_DRAM_ACTIVE": 0.37}, []),  # limited by memory
        (QUIET | {"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.1}, []),
        (QUIET | {"utilization": 0.1}, []),  # hardly used
        (_traffic("PCIE", 16e9), [LOW, ("pcie", 32e9)]),
        (_traffic("PCIE", 14e9), [LOW]),
        (_traffic("NVLINK", 200e9), [LOW, ("nvlink", 400e9)]),
        (_traffic("NVLINK", 100e9), [LOW]),
    ],
)
def test_low_activity_and_traffic_are_known_only_now(
    fields: Values, causes: list[tuple[str, float]]
) -> None:
    summary = summarize_conditions({"thermal": (0, 1800)}, fields=fields)
    throttling, *current = summary.causes
    assert (throttling.cause, throttling.now) == ("throttling", False)
    assert [(cause.cause, cause.value) for cause in current] == causes
    assert all(cause.now and cause.ratio is None for cause in current)


@pytest.mark.parametrize(
    ("use", "verdict"),
    [(0.6, "well_used"), (0.59, "partly_used"), (0.2, "partly_used"), (0.19, "hardly_used")],
)
def test_the_verdict_on_a_pod_that_nothing_slowed_down(use: float, verdict: str) -> None:
    assert judge_use(use, use, None, []) == verdict


def test_the_verdict_names_what_weighs_most() -> None:
    hot = {"thermal": (0, 1800)}
    assert summarize_conditions(hot, fields=QUIET).verdict == "slowed_down"
    assert summarize_conditions({}, fields=QUIET).verdict == "little_computed"
    assert summarize_conditions({}, fields=ACTIVE).verdict == "well_used"

    brief = summarize_conditions({"thermal": (3600, 4800)}, hours=20)
    assert [cause.brief for cause in brief.causes] == [True]
    assert brief.verdict == "well_used"
    assert [cause.brief for cause in summarize_conditions(hot).causes] == [False]


def test_low_power_counts_only_if_the_activity_of_tensor_cores_is_not_known() -> None:
    limits = {"power_limit_mw": 1_000_000}  # of 300 W
    assert summarize_conditions({}, fields=BUSY, **limits).verdict == "little_computed"
    assert summarize_conditions({}, fields=ACTIVE, **limits).verdict == "well_used"
    enough = {"power_limit_mw": 800_000}
    assert summarize_conditions({}, fields=BUSY, **enough).verdict == "well_used"
    assert judge_use(0.1, 0.1, 0.3, []) == "hardly_used", "a GPU that rests needs little power"


def test_the_use_of_a_share_is_judged_by_the_share() -> None:
    assert judge_use(0.7, 0.1, None, []) == "well_used"
    assert judge_use(None, None, None, []) is None, "an unknown use is not 0"


def states_of(summary: JobSummary) -> dict[str, str]:
    return {check.cause: check.state for check in summary.checks}


ACTIVE: Values = BUSY | {"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.5, "DCGM_FI_PROF_DRAM_ACTIVE": 0.3}


def test_nothing_slowed_it_down_only_if_all_causes_were_measured() -> None:
    counted = {"thermal": 0, "hw_power_brake": 0}
    measured = summarize_conditions({}, fields=ACTIVE, throttled_ns=counted)
    assert states_of(measured) == {
        "waiting": "none",
        "throttling": "none",
        "failing": "none",
        "low_use": "none",
        "slow_gpu": "not_applicable",
        "low_activity": "none",
    }
    assert measured.why_slow.startswith("Nothing slowed it down, of all that podgpu measures.")

    unmeasured = summarize_conditions({}, fields=BUSY, is_owned=False)
    assert states_of(unmeasured)["throttling"] == "not_measured", "the driver counts none"
    assert states_of(unmeasured)["low_activity"] == "not_measured"
    assert unmeasured.why_slow == (
        "Nothing that was measured slowed it down. Not measured: throttling by heat or power brake,"
        " a slower GPU of its job, low activity of tensor cores and memory."
    )
    assert all(check.do for check in unmeasured.checks if check.state == "not_measured")


def test_what_slowed_it_down_comes_first_and_says_what_to_do() -> None:
    hot = {"thermal": (600, 1200), "xid": (600, 3000)}
    summary = summarize_conditions(hot, fields=QUIET)
    found = [check.cause for check in summary.checks if check.state == "found"]
    assert found == ["failing", "throttling", "low_activity"]
    assert [check.cause for check in summary.checks][:3] == found
    assert summary.checks[0].says == "A GPU was lost or failing 67 % of the time (40m)"
    assert summary.why_slow.startswith("A GPU was lost or failing 67 % of the time (40m); ")
    assert "pcie" in states_of(summary), "traffic may explain low activity"
    assert states_of(summary)["pcie"] == "not_measured"


@pytest.mark.parametrize(
    ("method", "wait_ns", "limit", "state"),
    [
        ("exact", 0, "", "none"),
        ("switches", None, "hidden_users", "not_measured"),
        ("samples", None, "no_capability", "not_measured"),
        ("mps", None, "", "not_measured"),
    ],
)
def test_waiting_on_a_shared_gpu_must_be_measured(
    method: str, wait_ns: int | None, limit: str, state: str
) -> None:
    usage = HolderUsage(utilization_ratio=0.4, wait_ns=wait_ns)
    holders = (Holder("ml", "job-0", "main", usage=usage), Holder("ml", "job-1", "main"))
    totals = DeviceTotals(method=method, method_limit=limit)
    summary = summarize_conditions({}, fields=BUSY, holders=holders, usage=totals)
    [waiting] = [check for check in summary.checks if check.cause == "waiting"]
    assert waiting.state == state
    assert bool(waiting.do) == (state == "not_measured")


def test_for_whom_it_waits_now_is_said_within_its_namespace() -> None:
    waits = (
        WaitPart("ml", "job-1", "main", ratio=0.2),
        WaitPart("secret", "vault", "main", ratio=0.3),
    )
    usage = HolderUsage(utilization_ratio=0.4, wait_ns=0, waits_for=waits)
    holders = (Holder("ml", "job-0", "main", usage=usage), Holder("ml", "job-1", "main"))
    totals = DeviceTotals(method="exact")
    summary = summarize_conditions({}, fields=BUSY, holders=holders, usage=totals)
    check = summary.checks[0]
    assert (check.cause, check.state) == ("waiting", "found")
    assert check.says.endswith("; now 30 % for a pod of another namespace, 20 % for ml/job-1/main")


def test_an_idle_pod_was_not_slowed_down_but_had_no_work() -> None:
    summary = summarize(0.05, 10)
    assert states_of(summary)["low_use"] == "found"
    assert states_of(summary)["slow_gpu"] == "not_applicable", "it has ended"


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
