"""What podgpu's own servers answer, over real HTTP: the view, its history, all that is known of one GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from podgpu.errors import SourceError
from podgpu.top.api import ClusterSource, PodgpuApi
from podgpu.top.api_answers import FieldFact, GpuFacts, SourceFact, XidFact, parse_gpu_facts, parse_history
from podgpu.top.exporter import ExporterSource
from podgpu.top.feed import REFRESH_SECONDS, DetailsFeed, Feed
from tests.top.api_server import API, LOST, gpu, history, podgpu_server, view
from tests.top.test_exporter import EXPOSITION

FACTS = {
    "api": API,
    "node": "gpu-node-1",
    "gpu": gpu(1),
    "method": "samples",
    "fields": [
        {"name": "DCGM_FI_DEV_SM_CLOCK", "help": "SM clock", "unit": "MHz", "value": 1980, "source": "nvml"},
        {"name": "DCGM_FI_DEV_NAME", "value": "H100"},
        {"name": "ratio", "value": 0.25, "unit": "%"},
    ],
    "xids": [
        {"xid": 79, "says": "GPU has fallen off the bus", "class": "hardware", "at": 1.8e9},
    ],
    "sources": [{"source": "nvml", "ok": True}, {"source": "gpu1", "ok": False, "error": "gpu_lost"}],
}


def asked(server: Any) -> list[str]:
    return [request.split(b" ", 2)[1].decode() for request in server.requests]


# Answers


def test_facts_of_a_gpu() -> None:
    with podgpu_server({"/api/v1/gpus/GPU-1": FACTS}) as server:
        facts = PodgpuApi(server.url).gpu("GPU-1")
    assert facts == GpuFacts(
        fields=(
            FieldFact("DCGM_FI_DEV_SM_CLOCK", "1980", "MHz", "nvml"),
            FieldFact("DCGM_FI_DEV_NAME", "H100"),
            FieldFact("ratio", "0.25", "%"),
        ),
        xids=(XidFact(79, "GPU has fallen off the bus", "hardware", 1.8e9),),
        sources=(SourceFact("nvml", True), SourceFact("gpu1", False, "gpu_lost")),
        method="samples",
    )


def test_a_uuid_cannot_leave_its_place_in_the_path() -> None:
    with podgpu_server({"/": FACTS}) as server:
        for name in ("../x", "..", "", "a/b", "a?b=c", "ü", "a%2Fb", "x" * 200):
            with pytest.raises(SourceError):
                PodgpuApi(server.url).gpu(name)
        PodgpuApi(server.url).gpu("gpu 0")
    assert asked(server) == ["/api/v1/gpus/gpu%200"]


def test_history() -> None:
    with podgpu_server({"/api/v1/history?points=60": history(GPU_1=[0, 100, 200, 255, 201])}) as server:
        found = PodgpuApi(server.url).history(60)
    assert (found.step, found.devices) == (15.0, {("GPU-1", ""): bytes([0, 100, 200, 255, 255])})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"api":"podgpu/v1"}',
        b'{"api":"podgpu/v1","step_seconds":0,"devices":{}}',
        b'{"api":"podgpu/v1","step_seconds":1e999,"devices":{}}',
        b'{"api":"podgpu/v1","step_seconds":15,"devices":[]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_history(body: bytes) -> None:
    with pytest.raises(SourceError):
        parse_history(body)


def test_points_that_are_none_are_left_out() -> None:
    body = b'{"api":"podgpu/v1","step_seconds":15,"devices":{"a":"!","b":3,"c":"' + b"A" * 30_000 + b'","d/7":"ZGQ="}}'
    assert parse_history(body).devices == {("d", "7"): b"dd"}


def test_what_is_no_gpu() -> None:
    assert parse_gpu_facts(b'{"api":"podgpu/v1"}') == GpuFacts()
    with pytest.raises(SourceError):
        parse_gpu_facts(b'{"api":"podgpu/v1","fields":{},"xids":3,"sources":[[]],"method":[]}')


# Sources


def test_a_podgpu_exporter_is_asked_for_its_view_which_has_words_for_what_is_wrong() -> None:
    broken = view(gpu(0, "train"), gpu(1, "chat", conditions=[LOST], absent=True), currency="EUR")
    with podgpu_server({"/metrics": EXPOSITION, "/api/v1/view": broken}) as server:
        source = ExporterSource(server.url)
        seen = source.read()
        source.read()
    assert [device.conditions[0].says for device in seen.devices if device.conditions] == [LOST["says"]]
    assert seen.currency == "EUR"
    assert source.api is not None
    assert asked(server) == ["/metrics", "/api/v1/view", "/api/v1/view"]


def test_a_podgpu_exporter_that_shows_no_view_is_read_by_its_metrics() -> None:
    now = 0.0
    with podgpu_server({"/metrics": EXPOSITION}) as server:
        source = ExporterSource(server.url, clock=lambda: now)
        assert source.read().devices
        assert source.read().devices
        assert (source.api, asked(server)) == (None, ["/metrics", "/api/v1/view", "/metrics"])
        now = 61.0
        source.read()
    assert asked(server)[-2:] == ["/metrics", "/api/v1/view"]


def test_a_view_without_gpus_does_not_hide_what_the_metrics_say() -> None:
    with podgpu_server({"/metrics": EXPOSITION, "/api/v1/view": view()}) as server:
        assert ExporterSource(server.url).read().devices


def test_another_exporter_is_not_asked_for_what_it_does_not_have() -> None:
    exposition = b'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n"} 3\n'
    with podgpu_server({"/metrics": exposition}) as server:
        ExporterSource(server.url).read()
    assert asked(server) == ["/metrics"]


def test_sparklines_are_full_when_top_opens() -> None:
    answers = {"/api/v1/view": view(gpu(0, "train")), "/api/v1/history": history(GPU_0=[50] * 60)}
    with podgpu_server(answers) as server:
        feed = Feed(ClusterSource(server.url), 1.0, clock=lambda: 1000.0)
        feed.read()
        feed.ask_history()
        watched = feed.read().watched
        feed.close()
    assert watched is not None
    assert watched.points["gpu-node-1", "GPU-0", "", ""] == bytes([50] * 59 + [100])
    assert watched.span == 900.0


def test_a_server_without_history_is_shown_all_the_same() -> None:
    with podgpu_server({"/api/v1/view": view(gpu(0, "train"))}) as server:
        feed = Feed(ClusterSource(server.url), 1.0, clock=lambda: 1000.0)
        feed.ask_history()
        seen = feed.read()
        feed.close()
    assert seen.error is None
    assert seen.watched is not None
    assert seen.watched.span == 60.0


# Details, in a thread


class Asked:
    """Waits until it is told to answer."""

    def __init__(self, outcome: GpuFacts | SourceError) -> None:
        self.outcome = outcome
        self.asked: list[str] = []
        self.go = threading.Event()

    def gpu(self, uuid: str) -> GpuFacts:
        self.asked.append(uuid)
        assert self.go.wait(30)
        if isinstance(self.outcome, SourceError):
            raise self.outcome
        return self.outcome


class Looking:
    def __init__(self) -> None:
        self.now = 0.0
        self.answered = threading.Semaphore(0)
        self.feed = DetailsFeed(self.answered.release, lambda: self.now)

    def wait(self) -> None:
        assert self.answered.acquire(timeout=30)


def test_a_server_that_does_not_answer_holds_up_nothing() -> None:
    looking, api = Looking(), Asked(GpuFacts(method="samples"))
    for _ in range(10):
        more = looking.feed.look_at("GPU-1", api)
        assert more is not None
        assert (more.facts, more.error) == (None, "")
    api.go.set()
    looking.wait()
    more = looking.feed.look_at("GPU-1", api)
    assert more is not None
    assert more.facts == GpuFacts(method="samples")
    assert api.asked == ["GPU-1"]


def test_it_is_asked_anew_after_a_while_and_keeps_what_it_had_when_that_fails() -> None:
    looking, api = Looking(), Asked(GpuFacts(method="samples"))
    api.go.set()
    looking.feed.look_at("GPU-1", api)
    looking.wait()
    api.outcome = SourceError("timeout", "no whole answer within 5 s")
    looking.now += REFRESH_SECONDS
    looking.feed.look_at("GPU-1", api)
    looking.wait()
    more = looking.feed.look_at("GPU-1", api)
    assert more is not None
    assert (more.facts, more.error) == (GpuFacts(method="samples"), "no whole answer within 5 s")


def test_another_gpu_has_nothing_of_the_one_before() -> None:
    looking, api = Looking(), Asked(GpuFacts(method="samples"))
    looking.feed.look_at("GPU-1", api)
    looking.feed.look_at("GPU-2", api)
    api.go.set()
    looking.wait()
    more = looking.feed.look_at("GPU-2", api)
    assert more is not None
    assert more.facts is None
    looking.wait()
    assert api.asked == ["GPU-1", "GPU-2"]


def test_a_server_that_knows_no_more_is_no_error() -> None:
    looking, api = Looking(), Asked(SourceError("http_404", "answers 404"))
    api.go.set()
    looking.feed.look_at("GPU-1", api)
    looking.wait()
    more = looking.feed.look_at("GPU-1", api)
    assert more is not None
    assert (more.facts, more.error) == (GpuFacts(), "")


def test_without_a_server_nobody_is_asked() -> None:
    assert Looking().feed.look_at("GPU-1", None) is None
