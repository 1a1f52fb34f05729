"""What podgpu recommends, from loads with a known truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podgpu.charge import UsageAccount
from podgpu.past.savings.advice import advise_pod, make_savings
from podgpu.past.savings.savings import (
    FleetLoad,
    NodeRoom,
    PodLoad,
    SavingsAnswer,
    SavingsQuery,
    SharedLoad,
    SharedPodLoad,
)
from podgpu.past.savings.slowdown import MAX_BUSY
from tests.past.planted import (
    GIB,
    MODEL,
    make_cluster,
    make_fleet,
    make_pod,
    make_steps,
)
from tests.past.savings_world import predict_waits

DAY = 86_400
MONTH = 730


def ask(*pods: PodLoad, days: float = 7, **query: Any) -> SavingsAnswer:
    return answer(make_fleet(*pods, days=days), **query)


def answer(fleet: FleetLoad, **query: Any) -> SavingsAnswer:
    return make_savings(SavingsQuery(**query), fleet, "EUR")


def constant(busy: float) -> bytes:
    return make_steps(lambda step: busy, 2016)


def lines_of(found: SavingsAnswer) -> list[tuple[str, list[str]]]:
    return [(line.kind, sorted(pod.pod for pod in line.pods)) for line in found.advice]


def left_out(found: SavingsAnswer) -> dict[str, int]:
    return {row.reason: row.pods for row in found.left_out}


# The model


def test_the_prediction_solves_the_equations_of_the_model() -> None:
    busy = [0.3, 0.2, 0.1]
    waits = predict_waits(busy)
    wanted = [share + wait for share, wait in zip(busy, waits, strict=True)]
    for share, wait, own in zip(busy, waits, wanted, strict=True):
        assert wait == pytest.approx(share * 1.04 * (sum(wanted) - own))
    assert predict_waits([0.9]) == pytest.approx([0.0]), "alone, a pod never waits"


# Stop


def test_a_pod_that_was_idle_for_the_whole_range_could_be_stopped() -> None:
    found = ask(make_pod("idle", 0.0, devices=2, gpus=2.0, price=5.0))
    [line] = found.advice
    assert (line.kind, line.gpus_before, line.gpus_after) == ("stop", 2, 0)
    assert "its 2 GPUs for the last 7 days" in line.says
    assert (line.saved.gpus, line.saved.gpu_hours, line.saved.cost) == (2, 2 * MONTH, 5 * MONTH)
    assert found.totals.after.gpus == 0
    assert found.totals.after.cost == 0


@pytest.mark.parametrize(("hours", "stops"), [(23, False), (24, True), (25, True)])
def test_a_pod_is_stopped_only_after_the_limit_of_idle_time(hours: int, stops: bool) -> None:
    idle_from = 2016 - 12 * hours
    pod = make_pod("notebook", lambda step: 0.9 if step < idle_from else 0.0)
    assert [line.kind for line in ask(pod).advice] == ["stop"] * stops
    longer = ask(pod, idle=48 * 3600)
    assert not longer.advice


@pytest.mark.parametrize(
    ("steps", "idle", "text"),
    [
        (287, 23 * 3600, "24 hours"),
        (286, 23 * 3600, "23 hours"),
        (25, 7200, "2 hours"),
        (7, 1800, "35 minutes"),
    ],
)
def test_how_long_a_pod_was_idle(steps: int, idle: int, text: str) -> None:
    pod = make_pod("notebook", lambda step: 0.9 if step < 2016 - steps else 0.0)
    [line] = ask(pod, idle=idle).advice
    assert f"for the last {text}." in line.says


def test_a_little_work_at_the_end_prevents_stopping() -> None:
    pod = make_pod("cron", lambda step: 0.001 if step == 2015 else 0.0, peak_bytes=79.0 * GIB)
    assert left_out(ask(pod)) == {"needed": 1}


def test_unknown_time_is_not_idle() -> None:
    pod = make_pod("mps", lambda step: None if step % 10 == 0 else 0.0)
    found = ask(pod)
    assert not found.advice
    assert left_out(found) == {"unknown": 1}
    rare = make_pod("gap", lambda step: None if step % 25 == 0 else 0.0)
    assert lines_of(ask(rare)) == [("stop", ["gap"])]


# Shrink


def test_gpus_are_counted_by_the_peak_of_their_sum() -> None:
    # Both GPUs were fully used for 2 % of the time, as a percentile does not show.
    bursts = make_pod("bursts", lambda step: 2.0 if step % 50 == 0 else 0.3, devices=2, gpus=2.0)
    assert left_out(ask(bursts)) == {"needed": 1}

    small = make_pod("small", 0.8, devices=2, gpus=2.0, price=4.0)
    [line] = ask(small).advice
    assert (line.kind, line.target, line.gpus_after) == ("shrink", "1 GPU", 1)
    assert "0.80 busy GPUs in a mean of 5 minutes" in line.says
    assert (line.saved.gpus, line.saved.cost) == (1, 2 * MONTH)


@pytest.mark.parametrize(
    ("busy", "memory", "target"),
    [
        (0.83, 20.0, "1 GPU"),
        (0.84, 20.0, "2 GPUs"),  # with 20 % headroom, more than one GPU
        (0.5, 72.0, "1 GPU"),
        (0.5, 73.0, "2 GPUs"),  # with 10 % headroom, more than the memory of one
        (2.6, 20.0, ""),
        (0.5, 240.0, ""),
    ],
)
def test_a_smaller_number_of_gpus_has_headroom(busy: float, memory: float, target: str) -> None:
    pod = make_pod("wide", busy, devices=4, gpus=4.0, peak_bytes=memory * GIB)
    found = ask(pod)
    if busy == 2.6 or memory == 240:
        assert not found.advice
    else:
        assert [line.target for line in found.advice] == [target]


@pytest.mark.parametrize(
    ("model", "busy", "memory", "size"),
    [
        (MODEL, 0.11, 8.0, "1g"),
        (MODEL, 0.12, 8.0, "2g"),  # 12 % and 20 % headroom are more than a seventh
        (MODEL, 0.11, 17.0, "1g"),  # with a quarter of the memory
        (MODEL, 0.11, 19.0, "3g"),
        (MODEL, 0.5, 8.0, ""),
        ("NVIDIA A30", 0.2, 17.0, "1g"),
        ("NVIDIA L40S", 0.05, 4.0, ""),
        ("NVIDIA RTX A1000", 0.05, 4.0, ""),
    ],
)
def test_a_pod_with_one_gpu_may_fit_a_mig_instance(
    model: str, busy: float, memory: float, size: str
) -> None:
    found = ask(make_pod("one", busy, model=model, peak_bytes=memory * GIB))
    assert [line.target.split()[3] for line in found.advice] == [size] * bool(size)
    for line in found.advice:
        assert line.says == (
            f"Its GPU was at most {busy * 100:.0f} % busy in a mean of 5 minutes, and its memory"
            f" at most {memory:.1f} GiB."
        )


def test_a_mig_instance_is_named_with_its_memory() -> None:
    """Memory is that of the GPU, which has 80 GiB here."""
    [line] = ask(make_pod("one", 0.11, model=MODEL, peak_bytes=8.0 * GIB)).advice
    assert line.target == "a MIG instance 1g (10 GiB)"
    assert "more memory than a MIG instance 1g (10 GiB) has" in line.falsified_by


def test_the_most_money_comes_first_then_the_most_gpus() -> None:
    pods = [
        make_pod("cheap", 0.0, price=1.0),
        make_pod("dear", 0.0, price=9.0),
        make_pod("free-2", 0.0, price=None, gpus=2.0, devices=2),
        make_pod("free-1", 0.0, price=None),
    ]
    found = ask(*pods)
    assert [line.pods[0].pod for line in found.advice] == ["dear", "cheap", "free-2", "free-1"]


# Share


def test_two_quiet_pods_share_one_gpu() -> None:
    found = ask(make_pod("a", 0.15), make_pod("b", 0.15))
    [line] = found.advice
    assert (line.kind, line.gpus_before, line.gpus_after) == ("share", 2, 1)
    expected = predict_waits([0.15, 0.15])[0]
    for pod in line.pods:
        assert pod.busy == 0.15
        assert pod.wait == pytest.approx(expected, abs=1e-4)
        assert pod.slowdown == pytest.approx(1 + expected / 0.15, abs=1e-4)
        assert pod.peak_memory_bytes == 20 * GIB
    assert (line.saved.gpus, line.saved.cost) == (1, 2 * MONTH)


def test_a_limit_of_slowdown_is_kept() -> None:
    pods = [make_pod("a", 0.2), make_pod("b", 0.2)]
    assert not ask(*pods, slowdown=1.25).advice
    assert lines_of(ask(*pods, slowdown=1.3)) == [("share", ["a", "b"])]


def test_pods_that_are_busy_at_different_times_share_a_gpu() -> None:
    day = make_pod("day", lambda step: 0.7 if step % 288 < 144 else 0.0)
    night = make_pod("night", lambda step: 0.0 if step % 288 < 144 else 0.7)
    [line] = ask(day, night).advice
    assert line.kind == "share"
    assert {pod.slowdown for pod in line.pods} == {1.0}
    both = make_pod("both", lambda step: 0.7 if step % 288 < 150 else 0.0)
    assert not ask(day, both).advice


def test_one_interval_above_the_limit_prevents_sharing() -> None:
    def burst(step: int) -> float:
        return 0.8 if step == 1000 else 0.05

    assert left_out(ask(make_pod("a", burst), make_pod("b", 0.05))) == {"needed": 2}
    alone = make_pod("c", lambda step: 0.0 if step == 1000 else 0.05)
    assert lines_of(ask(make_pod("a", burst), alone)) == [("share", ["a", "c"])]


def test_memory_peaks_must_fit_with_headroom() -> None:
    fits = [make_pod(name, 0.05, peak_bytes=36.0 * GIB) for name in "ab"]
    assert lines_of(ask(*fits)) == [("share", ["a", "b"])]
    large = [make_pod(name, 0.05, peak_bytes=37.0 * GIB) for name in "ab"]
    assert not ask(*large).advice


def test_pods_of_different_models_never_share() -> None:
    assert not ask(make_pod("a", 0.05), make_pod("b", 0.05, model="NVIDIA A10")).advice
    other = make_pod("b", 0.05, cluster="other")
    assert not ask(make_pod("a", 0.05), other).advice


def test_at_most_five_pods_share_a_gpu() -> None:
    pods = [make_pod(f"p{number}", 0.01, peak_bytes=1.0 * GIB) for number in range(10)]
    assert [line.gpus_before for line in ask(*pods).advice] == [5, 5]


def test_unknown_steps_count_for_no_pod() -> None:
    gap = make_pod("gap", lambda step: None if step % 25 == 0 else 0.15)
    busy = make_pod("busy", lambda step: 0.99 if step % 25 == 0 else 0.15)
    [line] = ask(gap, busy).advice
    expected = predict_waits([0.15, 0.15])[0]
    assert [pod.wait for pod in line.pods] == pytest.approx([expected] * 2, abs=1e-4)


# Left out


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("annotation", {"problem": "annotation"}),
        ("namespace", {"problem": "namespace"}),
        ("model", {"problem": "model"}),
        ("part", {"is_whole": False}),
        ("memory", {"peak_bytes": None}),
        ("memory", {"gpu_bytes": None}),
        (
            "training",
            {"account": UsageAccount("team", "x", owner_kind="PyTorchJob"), "job_gpus": 8.0},
        ),
        ("training", {"account": UsageAccount(job="17"), "job_gpus": 2.0}),
    ],
)
def test_doubtful_pods_are_left_out_and_counted(reason: str, fields: dict[str, Any]) -> None:
    other = make_pod("other", 0.05)
    found = ask(make_pod("x", 0.05, **fields), other)
    assert left_out(found) == {reason: 1, "needed": 1}
    assert not found.advice
    assert found.totals.saved.gpus == 0


def test_a_job_with_one_gpu_may_share() -> None:
    account = UsageAccount("team", "x", owner_kind="Job")
    found = ask(make_pod("x", 0.05, account=account, job_gpus=1.0), make_pod("y", 0.05))
    assert [line.kind for line in found.advice] == ["share"]


def test_a_pod_that_had_more_gpus_before_is_left_out() -> None:
    pod = make_pod("changed", lambda step: 1.5 if step < 10 else 0.1)
    assert left_out(ask(pod)) == {"devices": 1}


def test_nothing_is_recommended_from_less_than_a_day() -> None:
    pods = [make_pod("idle", 0.0, days=0.9)]
    short = make_fleet(*pods, days=0.9)
    short.known_from = 0.0
    found = answer(short)
    assert not found.advice
    assert found.notes[0].startswith("there is no record before 1970-01-01T00:00:00Z: nothing is")
    assert "from 21h36m of known use" in found.notes[0]
    asked = ask(*pods, days=0.9)
    assert "the range is shorter than a day" in asked.notes[0]


def test_no_known_use_is_not_called_no_record() -> None:
    """Before, GPUs without a holder or with unmeasured use were recorded."""
    fleet = make_fleet(make_pod("idle", 0.0))
    fleet.known_from = 86_400.0
    fleet.recorded_from = 3600.0
    [note] = answer(fleet).notes
    assert "no record" not in note
    assert note.startswith("no use of a GPU is known before 1970-01-02T00:00:00Z")
    assert note.endswith("although there are records since 1970-01-01T01:00:00Z")

    fleet = make_fleet(days=0)
    fleet.known_from = fleet.end
    fleet.recorded_from = fleet.end - 7200
    [note] = answer(fleet).notes
    assert note.startswith("no use of a GPU is known, although there are records since ")


def test_without_prices_savings_are_in_gpus_only() -> None:
    fleet = make_fleet(make_pod("idle", 0.0, price=None, cost=None))
    found = make_savings(SavingsQuery(), fleet, "")
    totals = found.totals
    assert (totals.saved.gpus, totals.saved.cost) == (1, None)
    assert (totals.before.gpus, totals.before.cost) == (1, None)
    assert (totals.after.gpus, totals.after.cost) == (0, None)
    assert "--prices" in found.notes[-1]


def test_a_user_sees_only_his_pods() -> None:
    mine = make_pod("mine", 0.05)
    theirs = make_pod("theirs", 0.05, account=UsageAccount("other", "theirs"))
    found = ask(mine, theirs, visible=frozenset({"team"}))
    assert not found.advice
    assert found.totals.before.gpus == 1
    assert left_out(found) == {"needed": 1}


# Pack


def make_room(node: str, gpus: int, *pods: PodLoad) -> NodeRoom:
    held = sum(pod.devices for pod in pods)
    return NodeRoom("", node, "NVIDIA L40S", gpus, gpus - held, pods, 2.0)


def test_free_gpus_on_several_nodes_are_brought_together() -> None:
    pods = {name: make_pod(name, 0.9, node=f"node-{name[0]}") for name in ("a1", "a2", "a3", "b1")}
    wide = make_pod("c1", 0.9, devices=4, gpus=4.0)
    fleet = make_fleet(*pods.values())
    fleet.rooms = [
        make_room("node-a", 4, pods["a1"], pods["a2"], pods["a3"]),
        make_room("node-b", 4, pods["b1"]),
        make_room("node-c", 4, wide),
    ]
    fleet.sizes = {("", "NVIDIA L40S"): {1, 2, 4}}
    [line] = answer(fleet).advice
    assert (line.kind, line.freed_gpus, line.target) == ("pack", 4, "4 free GPUs on node-b")
    assert [(pod.pod, pod.node, pod.to_node) for pod in line.pods] == [("b1", "node-b", "node-a")]
    assert "4 GPUs are free (1 on node-a, 3 on node-b)" in line.says
    assert "5,840 EUR per month" in line.says
    assert line.saved.gpus == 0

    fleet.sizes = {("", "NVIDIA L40S"): {1, 2, 3}}
    assert not answer(fleet).advice, "the largest size fits on node-b"
    fleet.sizes = {("", "NVIDIA L40S"): {8}}
    assert not answer(fleet).advice, "no node is so large"


def test_pods_that_must_stay_are_not_moved() -> None:
    stays = make_pod("b1", 0.9, problem="annotation")
    fleet = make_fleet(stays)
    fleet.rooms = [make_room("node-a", 2, make_pod("a1", 0.9)), make_room("node-b", 2, stays)]
    fleet.sizes = {("", "NVIDIA L40S"): {2}}
    [line] = answer(fleet).advice
    assert [pod.pod for pod in line.pods] == ["a1"]


# After the fact


def test_predictions_are_compared_with_measured_waiting_times() -> None:
    pods = []
    for name, busy, waited in (("a", 0.2, 0.06), ("b", 0.3, 0.05)):
        account = UsageAccount("team", name)
        pods.append(SharedPodLoad(account, constant(busy), waited))
    fleet = make_fleet()
    fleet.shared = [SharedLoad("", "node-1", pods)]
    found = answer(fleet)
    expected = predict_waits([0.2, 0.3])
    assert [pod.predicted_wait for pod in found.shared] == pytest.approx(expected, abs=1e-4)
    assert [pod.measured_wait for pod in found.shared] == [0.06, 0.05]
    error = (abs(expected[0] - 0.06) + abs(expected[1] - 0.05)) / 2
    assert found.prediction_error_ratio == pytest.approx(error, abs=1e-4)


def test_no_prediction_is_shown_for_gpus_that_are_too_busy() -> None:
    pods = []
    for name, busy in (("a", 0.5), ("b", MAX_BUSY - 0.5)):
        account = UsageAccount("team", name)
        pods.append(SharedPodLoad(account, constant(busy), 0.1))
    fleet = make_fleet()
    fleet.shared = [SharedLoad("", "node-1", pods)]
    found = answer(fleet)
    assert (found.shared, found.prediction_error_ratio) == ([], None)


def test_pods_of_an_owner_that_waits_longer_are_corrected() -> None:
    """Its other pod synchronises with the GPU so often that it waits three times as long."""
    predicted = predict_waits([0.1, 0.2])
    account = UsageAccount("team", "sync-0", owner_kind="Deployment", owner_name="sync")
    shared = [
        SharedPodLoad(account, constant(0.1), 3 * predicted[0]),
        SharedPodLoad(UsageAccount("team", "b"), constant(0.2), predicted[1]),
    ]
    alone = account._replace(pod="sync-1")
    fleet = make_fleet(make_pod("sync-1", 0.05, account=alone), make_pod("calm", 0.05))
    fleet.shared = [SharedLoad("", "node-1", shared)]
    [line] = answer(fleet).advice
    pods = {pod.pod: pod for pod in line.pods}
    expected = predict_waits([0.05, 0.05])[0]
    assert pods["sync-1"].wait == pytest.approx(3 * expected, abs=1e-4)
    assert pods["sync-1"].slowdown == pytest.approx(1 + 3 * expected / 0.05, abs=1e-2)
    assert pods["sync-1"].worst_slowdown == pytest.approx(pods["sync-1"].slowdown, abs=1e-2)
    assert pods["sync-1"].wait_factor == pytest.approx(3, abs=0.01)
    assert "sync-1 waits 3.0 times as long as the model says" in line.assumes
    assert pods["calm"].wait == pytest.approx(expected, abs=1e-4)
    assert pods["calm"].wait_factor is None

    other = UsageAccount("other", "sync-1", owner_kind="Deployment", owner_name="sync")
    fleet.pods = [make_pod("sync-1", 0.1, account=alone), make_pod("calm", 0.1)]
    assert not answer(fleet).advice, "it would take more than 1.25 times as long"
    fleet.pods[0].account = other
    assert [line.kind for line in answer(fleet).advice] == ["share"], "another owner"


def test_a_wait_that_differs_little_corrects_nothing() -> None:
    predicted = predict_waits([0.1, 0.2])
    account = UsageAccount("team", "web-0", owner_kind="Deployment", owner_name="web")
    shared = [
        SharedPodLoad(account, constant(0.1), predicted[0] + 0.02),
        SharedPodLoad(UsageAccount("team", "b"), constant(0.2), predicted[1]),
    ]
    alone = account._replace(pod="web-1")
    fleet = make_fleet(make_pod("web-1", 0.1, account=alone), make_pod("calm", 0.1))
    fleet.shared = [SharedLoad("", "node-1", shared)]
    [line] = answer(fleet).advice
    assert {pod.wait_factor for pod in line.pods} == {None}


# All together


def test_totals_are_the_sums_of_the_lines_and_no_pod_is_in_two() -> None:
    truth = make_cluster(200)
    found = answer(truth.fleet)
    names = [pod.pod for line in found.advice for pod in line.pods]
    assert len(names) == len(set(names))
    before = sum(pod.gpus for pod in truth.fleet.pods)
    saved = sum(line.saved.gpus for line in found.advice)
    assert found.totals.before.gpus == before == 200
    assert found.totals.saved.gpus == pytest.approx(saved)
    assert found.totals.after.gpus == pytest.approx(before - saved)
    assert sum(kind.saved.gpus for kind in found.kinds) == pytest.approx(saved)
    assert len(names) + sum(row.pods for row in found.left_out) == len(truth.fleet.pods)


def test_recommendations_are_right_in_a_cluster_with_a_planted_truth() -> None:
    """Prints nothing: `python -m bench savings` shows what was missed."""
    truth = make_cluster(1000)
    found = answer(truth.fleet)
    right = wrong = 0
    for line in found.advice:
        for pod in line.pods:
            is_right = truth.kinds.get(pod.pod) == line.kind
            right += is_right
            wrong += not is_right
    meant = sum(kind != "keep" for kind in truth.kinds.values())
    assert right / (right + wrong) >= 0.95
    assert right / meant >= 0.8


def test_the_hint_of_a_pod_is_its_line() -> None:
    assert advise_pod(make_pod("wide", 0.8, devices=2, gpus=2.0), 7 * DAY) == (
        "1 GPU would be enough: Its 2 GPUs were together at most 0.80 busy GPUs in a mean of 5"
        " minutes, and its memory at most 20.0 GiB."
    )
    assert advise_pod(make_pod("hot", 0.9), 7 * DAY) == ""
    assert advise_pod(make_pod("idle", 0.0, days=0.5), DAY / 2) == ""


def test_waits_that_were_measured_on_an_h200_are_predicted_within_two_points() -> None:
    path = Path(__file__).parent.parent / "data" / "colocation.json"
    errors = []
    for mix in json.loads(path.read_text()):
        busy = [load["alone"] for load in mix]
        assert sum(busy) <= MAX_BUSY
        for load, wait in zip(mix, predict_waits(busy), strict=True):
            errors.append(abs(wait - load["wait"]))
    assert sum(errors) / len(errors) <= 0.02
