"""Tests background readings, sparklines, and the details of the selected GPU."""

from __future__ import annotations

from typing import Any

from podgpu.fleet.view import GpuDetails
from podgpu.past.gpu_history import NO_DATA
from podgpu.past.job import JobSummary
from podgpu.top.feed import ClusterSource, ExporterSource, Feed, FetchedDetails
from podgpu.view_address import UrlAddress
from tests.top.scene import gpu, holder, node, view
from tests.top.servers import EXPOSITION, HTML, answer, history, podgpu_server, serving


def test_the_last_table_stays_when_the_source_fails() -> None:
    with serving(answer(EXPOSITION)) as server:
        feed = Feed(ExporterSource(server.url), 1.0)
        good = feed.read()
        server.reply = answer(HTML)
        bad = feed.read()
        assert (bad.lines, bad.read_at) == (good.lines, good.read_at)
        assert bad.error is not None
        server.reply = answer(EXPOSITION)
        assert feed.read().error is None


def test_sparklines_are_the_servers_history() -> None:
    shown = view(node(gpu(0, holder(), utilization_ratio=0.5)))
    answers = {"/api/v1/view": shown, "/api/v1/history": history(GPU_0=[50] * 59 + [NO_DATA])}
    with podgpu_server(answers) as server:
        feed = Feed(ClusterSource(UrlAddress(server.address)), 1.0)
        sparklines = feed.read().sparklines
    assert sparklines.points == {("GPU-0", ""): bytes([50] * 59 + [NO_DATA])}
    assert sparklines.span == 900.0


def test_stale_nodes_are_noted() -> None:
    shown = view(
        node(gpu(0), name="a", old=True, age_seconds=61.0, notes=["its clock is 9 s ahead"]),
        notes=["first"],
    )
    with podgpu_server({"/api/v1/view": shown}) as server:
        feed = Feed(ClusterSource(UrlAddress(server.address)), 1.0)
        assert feed.read().notes == ["first", "a is stale: 61 s", "a: its clock is 9 s ahead"]


def test_without_a_history_the_readings_are_drawn() -> None:
    answers = {"/api/v1/view": view(node(gpu(0, utilization_ratio=0.5), gpu(1)))}
    with podgpu_server(answers) as server:
        feed = Feed(ClusterSource(UrlAddress(server.address)), 2.0)
        feed.read()
        answers["/api/v1/view"] = view(node(gpu(0, utilization_ratio=7.0)), taken_at=1.0)
        sparklines = feed.read().sparklines
    assert sparklines.points == {("GPU-0", ""): bytes([100, 200])}
    assert sparklines.span == 120.0


def test_details_of_the_selected_gpu_and_what_its_holders_used() -> None:
    samples = GpuDetails(method="samples")
    job = JobSummary(namespace="research", pod="train", from_=1.0, duration_seconds=60.0)
    answers: dict[str, Any] = {
        "/api/v1/view": view(node(gpu(0), gpu(1, holder()), gpu(2))),
        "/api/v1/gpus/GPU-1": samples,
        "/api/v1/summary/research/train": job,
    }
    with podgpu_server(answers) as server:
        feed = Feed(ClusterSource(UrlAddress(server.address)), 1.0)
        assert feed.read().fetched == FetchedDetails()
        feed.select("GPU-1")
        assert feed.read().fetched == FetchedDetails("GPU-1", samples, "", [job])
        feed.read()
        assert server.paths.count("/api/v1/gpus/GPU-1") == 1, (
            "details must be cached for some seconds"
        )
        answers["/api/v1/gpus/GPU-0"] = b"up 1\n"
        feed.select("GPU-0")
        fetched = feed.read().fetched
        assert fetched is not None
        assert "not a valid response" in fetched.error
        feed.select("GPU-2")
        assert feed.read().fetched == FetchedDetails("GPU-2", jobs=[]), (
            "a GPU without details is no error"
        )


def test_usage_that_changes_between_two_telemetry_turns_is_shown() -> None:
    """`taken_at` is the time of the telemetry. An exporter reads usage more often."""
    answers = {"/api/v1/view": view(node(gpu(0, holder(), utilization_ratio=0.1)))}
    with podgpu_server(answers) as server:
        feed = Feed(ExporterSource(server.url), 1.0)
        feed.read()
        answers["/api/v1/view"] = view(node(gpu(0, holder(), utilization_ratio=0.9)))
        (line,) = feed.read().lines
        assert (line.name, line.utilization) == ("research/train/main", 0.9)
        answers["/api/v1/view"] = view(node(gpu(0, utilization_ratio=0.9)))
        assert feed.read().lines[0].name == ""
