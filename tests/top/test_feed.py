"""Readings in the background, sparklines, and the details of the selected GPU."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from podgpu.clock import Clock
from podgpu.cluster.view import GpuDetails
from podgpu.errors import SourceError
from podgpu.top.feed import POINTS, REFRESH_SECONDS, DetailsFeed, Feed, FetchedDetails, RecentUtilization
from podgpu.top.source import ClusterSource, ExporterSource, ServerHistory
from podgpu.top.text import FULL, NO_DATA
from tests.top.scene import gpu, holder, node, view
from tests.top.servers import EXPOSITION, HTML, answer, history, podgpu_server, serving

ROW = ("n", "GPU-a", "", "")
OTHER = ("n", "GPU-b", "", "")


# Readings


def test_the_last_table_stays_when_the_source_fails() -> None:
    with serving(answer(EXPOSITION)) as server:
        feed = Feed(ExporterSource(server.url), 1.0, Clock(monotonic=lambda: 7.0))
        good = feed.read()
        server.reply = answer(HTML)
        bad = feed.read()
        assert (bad.lines, bad.read_at) == (good.lines, 7.0)
        assert bad.error is not None
        server.reply = answer(EXPOSITION)
        assert feed.read().error is None
        feed.close()


def test_sparklines_begin_with_the_servers_history() -> None:
    shown = view(node(gpu(0, holder(), utilization_ratio=0.5)))
    answers = {"/api/v1/view": shown, "/api/v1/history": history(GPU_0=[50] * 60)}
    with podgpu_server(answers) as server:
        feed = Feed(ClusterSource(server.address), 1.0, Clock(monotonic=lambda: 1000.0))
        feed.read()
        feed.read_history()
        sparklines = feed.read().sparklines
        feed.close()
    assert sparklines.points["n", "GPU-0", "", ""] == bytes([50] * 59 + [100])
    assert sparklines.span == 900.0


def test_stale_nodes_are_noted() -> None:
    shown = view(node(gpu(0), name="a", old=True, age_seconds=61.0, notes=["its clock is 9 s ahead"]), notes=["first"])
    with podgpu_server({"/api/v1/view": shown}) as server:
        feed = Feed(ClusterSource(server.address), 1.0)
        assert feed.read().notes == ["first", "a is stale: 61 s", "a: its clock is 9 s ahead"]
        feed.close()


# Sparklines


def known(recent: RecentUtilization, row: tuple[str, str, str, str] = ROW) -> list[float]:
    return [point / FULL for point in recent.snapshot().points[row] if point != NO_DATA]


def test_readings_within_a_step_are_one_point_and_gaps_stay() -> None:
    recent = RecentUtilization(step=10.0)
    for second, ratio in ((0, 0.2), (4, 0.4), (8, 0.6), (10, None), (30, 0.0)):
        recent.update({ROW: ratio}, 1000.0 + second)
    assert recent.snapshot().points[ROW][-4:] == bytes([round(0.4 * FULL), NO_DATA, NO_DATA, 0])


def test_the_span_grows_with_time() -> None:
    recent = RecentUtilization()
    spans = set()
    for second in range(7200):
        recent.update({ROW: 0.5}, float(second))
        spans.add(recent.snapshot().span)
    assert spans == {60.0, 120.0, 240.0, 480.0, 960.0, 1920.0}
    assert known(recent) == [0.5] * POINTS


def test_history_replaces_what_top_has_seen() -> None:
    recent = RecentUtilization()
    recent.update({ROW: 0.9, OTHER: 0.1}, 100_000.0)
    remembered = bytes([0, 0, 50, 100, 150, 200, NO_DATA])
    recent.add_history(ServerHistory(15.0, {("GPU-a", ""): remembered}), {ROW: ("GPU-a", "")}, 100_001.0)
    recent.update({ROW: 0.5, OTHER: 0.1}, 100_001.0)
    assert recent.snapshot().span == 15.0 * POINTS
    assert known(recent) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.5]
    assert known(recent, OTHER) == [0.1]


def test_a_history_that_has_just_begun_is_ignored() -> None:
    recent = RecentUtilization()
    recent.update({ROW: 0.5}, 1000.0)
    for points, has_history in ((bytes([NO_DATA] * 55 + [100] * 5), False), (bytes([100] * 6), True)):
        recent.add_history(ServerHistory(60.0, {("GPU-a", ""): points}), {ROW: ("GPU-a", "")}, 1000.0)
        assert recent.has_history is has_history


@given(
    st.lists(st.tuples(st.floats(0, 200), st.none() | st.floats(-1, 2)), max_size=40),
    st.sampled_from([0.3, 1.0, 7.0, 15.0, 300.0]),
    st.binary(max_size=80),
)
def test_the_number_of_points_never_changes(
    readings: list[tuple[float, float | None]], step: float, remembered: bytes
) -> None:
    recent, now = RecentUtilization(), 0.0
    for wait, ratio in readings:
        now += wait
        recent.update({ROW: ratio}, now)
        recent.add_history(ServerHistory(step, {("GPU-a", ""): remembered}), {ROW: ("GPU-a", "")}, now)
        assert len(recent.snapshot().points[ROW]) == POINTS


# Details


class SlowApi:
    """Waits for `go`."""

    def __init__(self, outcome: GpuDetails | SourceError) -> None:
        self.outcome = outcome
        self.requested: list[str] = []
        self.go = threading.Event()

    def gpu(self, uuid: str) -> GpuDetails:
        self.requested.append(uuid)
        assert self.go.wait(30)
        if isinstance(self.outcome, SourceError):
            raise self.outcome
        return self.outcome


class Details:
    def __init__(self) -> None:
        self.now = 0.0
        self._answered = threading.Semaphore(0)
        self.feed = DetailsFeed(self._answered.release, lambda: self.now)

    def get(self, api: SlowApi, uuid: str = "GPU-1", wait: bool = True) -> FetchedDetails:
        """After the answer, if `wait`."""
        self.feed.get(uuid, api)
        if wait:
            assert self._answered.acquire(timeout=30)
        fetched = self.feed.get(uuid, api)
        assert fetched is not None
        return fetched


SAMPLES = GpuDetails(method="samples")


def test_details_never_wait_for_the_server() -> None:
    details, api = Details(), SlowApi(SAMPLES)
    for _ in range(10):
        assert details.get(api, wait=False) == FetchedDetails()
    api.go.set()
    assert details.get(api) == FetchedDetails(SAMPLES)
    assert api.requested == ["GPU-1"]


def test_details_stay_when_a_later_request_fails() -> None:
    details, api = Details(), SlowApi(SAMPLES)
    api.go.set()
    details.get(api)
    api.outcome = SourceError("timeout", "no answer")
    details.now += REFRESH_SECONDS
    assert details.get(api) == FetchedDetails(SAMPLES, "no answer")


def test_another_gpu_has_its_own_details() -> None:
    details, api = Details(), SlowApi(SAMPLES)
    details.get(api, "GPU-1", wait=False)
    details.get(api, "GPU-2", wait=False)
    api.go.set()
    details.get(api, "GPU-2")
    assert details.get(api, "GPU-2") == FetchedDetails(SAMPLES)
    assert api.requested == ["GPU-1", "GPU-2"]


def test_a_gpu_without_details_is_no_error() -> None:
    details, api = Details(), SlowApi(SourceError("http_404", "not found"))
    api.go.set()
    assert details.get(api) == FetchedDetails(GpuDetails())
    assert details.feed.get("GPU-1", None) is None


def test_an_unchanged_view_keeps_its_lines() -> None:
    answers = {"/api/v1/view": view(node(gpu(0), gpu(1)))}
    with podgpu_server(answers) as server:
        feed = Feed(ClusterSource(server.address), 1.0)
        first = feed.read()
        assert feed.read().lines is first.lines
        answers["/api/v1/view"] = view(node(gpu(5)), taken_at=1.0)
        assert len(feed.read().lines) == 1
        feed.close()
