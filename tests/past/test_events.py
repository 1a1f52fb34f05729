"""Tests the events of pods that start and end, with recorded rounds."""

from __future__ import annotations

from itertools import pairwise

from podgpu.charge import Charge, UsageAccount
from podgpu.past.books.gpu_sample import ConditionRecord, GpuSample
from podgpu.past.books.store import HistoryStore
from podgpu.past.events import EventQuery
from podgpu.past.sqlite.sqlite_events import read_events

HOUR = 3600
START = 1_800_000_000
WEB = Charge(UsageAccount("ml", "web-0"), "main")
SIDECAR = Charge(UsageAccount("ml", "web-0"), "sidecar")
GONE = "gone"


def read_pod_events(
    *changes: tuple[int, tuple[Charge, ...] | str], hours: int = 24
) -> list[tuple[str | int, ...]]:
    """Records rounds up to the last change. Returns the text, time and duration of each pod
    event.
    """
    store = HistoryStore()
    for (begin, holders), (end, _) in pairwise((*changes, (changes[-1][0] + 15, ()))):
        gone = ConditionRecord("node_gone", "its node does not answer")
        conditions = [gone] if holders == GONE else []
        gpu = GpuSample(
            "GPU-0", "", "n1", 0, None, () if isinstance(holders, str) else holders, conditions
        )
        for at in range(begin, end, 300):
            store.append(START + at, [gpu])
    with store.reader() as db:
        answer = read_events(db, EventQuery(hours * HOUR), START + changes[-1][0])
    store.close()
    return [
        (
            event.text,
            int(event.at) - START,
            *(() if event.seconds is None else (int(event.seconds),)),
        )
        for event in reversed(answer.events)
        if event.kind in ("started", "ended")
    ]


STARTED, ENDED = "ml/web-0 started on GPU 0 of n1", "ml/web-0 ended on GPU 0 of n1"


def test_each_run_of_a_pod_name_has_its_own_duration() -> None:
    first, second = 600, 600 + 5 * HOUR
    events = read_pod_events(
        (0, ()), (first, (WEB,)), (first + HOUR, ()), (second, (WEB,)), (second + 1800, ())
    )
    assert events == [
        (STARTED, first),
        (ENDED, first + HOUR, HOUR),
        (STARTED, second),
        (ENDED, second + 1800, 1800),
    ]


def test_a_pod_that_comes_back_with_its_node_did_not_start() -> None:
    lost = ((0, (WEB,)), (HOUR, GONE), (3 * HOUR, (WEB,)))
    assert read_pod_events(*lost, hours=1) == read_pod_events(*lost, hours=24) == []
    assert read_pod_events(*lost, (4 * HOUR + 60, ()), hours=1) == [
        (ENDED, 4 * HOUR + 60, 4 * HOUR + 60)
    ]


def test_a_pod_that_does_not_come_back_with_its_node_ended() -> None:
    assert read_pod_events((0, (WEB,)), (HOUR, GONE), (2 * HOUR, ())) == [
        (ENDED, 2 * HOUR, 2 * HOUR)
    ]


def test_only_pods_of_the_first_round_have_no_start() -> None:
    assert read_pod_events((0, ()), (15, (WEB,))) == [(STARTED, 15)]
    assert read_pod_events((0, (WEB,)), (15, (WEB,))) == []
    assert read_pod_events((150, (WEB,)), (4 * HOUR, (WEB,))) == [], (
        "expired first rounds must not cause a start event"
    )


def test_a_pod_ends_with_its_last_container() -> None:
    rounds = ((0, ()), (15, (WEB, SIDECAR)), (2 * HOUR, (WEB,)))
    assert read_pod_events(*rounds, hours=1) == []
    assert read_pod_events(*rounds, (3 * HOUR + 15, ()), hours=1) == [
        (ENDED, 3 * HOUR + 15, 3 * HOUR)
    ]


def test_a_container_without_a_pod_is_named_by_its_id() -> None:
    container = Charge(UsageAccount(container_id="0123456789abcdef0123456789abcdef"))
    assert read_pod_events((0, ()), (15, (container,))) == [
        ("container 0123456789ab started on GPU 0 of n1", 15)
    ]


def test_events_of_a_past_time_are_found_if_many_pods_ended_later() -> None:
    store = HistoryStore()
    many = []
    for node in range(11):
        names = [f"pod-{node}-{number}" for number in range(1900)]
        pods = [Charge(UsageAccount("ml", name)) for name in names]
        many.append(GpuSample(f"GPU-1{node}", "", f"many-{node}", 0, None, pods))
    for at, gpus, holders in ((0, many, []), (300, many, [WEB]), (315, many, []), (600, [], [])):
        store.append(START + at, [*gpus, GpuSample("GPU-0", "", "n1", 0, None, holders)])
    with store.reader() as db:
        answer = read_events(db, EventQuery(60, end=START + 330.0), START + 3600)
    store.close()
    assert [(event.text, event.at - START) for event in answer.events] == [
        (ENDED, 315),
        (STARTED, 300),
    ]
    assert not answer.truncated


def test_no_start_is_known_after_all_rounds_were_deleted() -> None:
    store = HistoryStore(max_bytes=1)
    # Every quarter of an hour, old rows are deleted until the limit is met.
    assert START % 900 == 0
    for at in range(0, 2100, 300):
        store.append(START + at, [GpuSample("GPU-0", "", "n1", 0, None, (WEB,))])
    with store.reader() as db:
        answer = read_events(db, EventQuery(24 * HOUR), START + 1800)
    store.close()
    assert answer.events == []
