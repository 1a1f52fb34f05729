"""The sources over real HTTP: podgpu's view, other exporters' metrics, and bad answers."""

from __future__ import annotations

import pytest

from podgpu.cli.main import run
from podgpu.errors import SourceError, UsageError
from podgpu.top.feed import Feed
from podgpu.top.source import ClusterSource, ExporterSource, PodgpuApi, SourceReading, decode_history
from tests.top.scene import HEADER, LOST, gpu, holder, node, view
from tests.top.servers import EXPOSITION, HTML, answer, history, podgpu_server, serving, unused_url

DCGM = b'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n",namespace="a",pod="p",container="c"} %d\n'


def gpus_of(reading: SourceReading) -> list[str]:
    return [gpu.uuid for node in reading.view.nodes for gpu in node.gpus]


# podgpu


def test_a_podgpu_exporter_is_read_by_its_view() -> None:
    shown = view(node(gpu(0, holder()), gpu(1, conditions=[LOST], absent=True)), currency="EUR")
    with podgpu_server({"/metrics": EXPOSITION, "/api/v1/view": shown}) as server:
        source = ExporterSource(server.url)
        assert source.read().view == shown
        assert source.api is not None
        assert ClusterSource(server.address).read().view == shown
    assert set(server.paths) == {"/api/v1/view"}


@pytest.mark.parametrize("answers", [{}, {"/api/v1/view": view()}, {"/api/v1/view": {"api": "other"}}])
def test_without_a_view_of_gpus_the_metrics_are_read(answers: dict[str, object]) -> None:
    with podgpu_server({"/metrics": EXPOSITION, **answers}) as server:
        source = ExporterSource(server.url)
        assert len(gpus_of(source.read())) == 2
        assert source.api is None
        source.read()
    assert server.paths == ["/api/v1/view", "/metrics"] * 2


def test_a_cluster_without_podgpus_view_is_an_error() -> None:
    with serving(answer(b"{}")) as server, pytest.raises(SourceError, match="is it the address of podgpu cluster"):
        ClusterSource(server.address).read()


def test_history() -> None:
    with podgpu_server({"/api/v1/history?points=60": history(GPU_1=[0, 100, 200, 255, 201])}) as server:
        found = PodgpuApi(server.url, "podgpu", 5.0).history(60)
    assert (found.step, found.devices) == (15.0, {("GPU-1", ""): bytes([0, 100, 200, 255, 255])})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"api":"podgpu/v1"}',
        b'{"api":"other","step_seconds":15,"devices":{}}',
        b'{"api":"podgpu/v1","step_seconds":0,"devices":{}}',
        b'{"api":"podgpu/v1","step_seconds":15,"devices":[]}',
        b'{"api":"podgpu/v1","step_seconds":15,"devices":{"a":"!"}}',
    ],
)
def test_bad_histories(body: bytes) -> None:
    with pytest.raises(SourceError):
        decode_history(body)


def test_a_uuid_cannot_change_the_path() -> None:
    with podgpu_server({"/": {"api": "podgpu/v1"}}) as server:
        api = PodgpuApi(server.url, "podgpu", 5.0)
        for uuid in ("../x", "..", "", "a/b", "a?b=c", "ü", "a%2Fb", "x" * 200):
            with pytest.raises(SourceError):
                api.gpu(uuid)
        api.gpu("gpu 0")
    assert server.paths == ["/api/v1/gpus/gpu%200"]


# Other exporters


def test_a_dcgm_exporter_is_asked_for_a_view_only_once() -> None:
    with podgpu_server({"/metrics": DCGM % 3}) as server:
        source = ExporterSource(server.address)
        source.read()
        source.read()
    assert server.paths == ["/api/v1/view", "/metrics", "/metrics"]


def test_idle_holders_and_lost_gpus_of_a_dcgm_exporter_are_found_from_reading_to_reading() -> None:
    other = b'DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-2",Hostname="n"} 5\n'
    answers = {"/metrics": DCGM % 3 + other}
    with podgpu_server(answers) as server:
        source = ExporterSource(server.url)
        assert source.read().view.nodes[0].gpus[0].holders[0].use == "used"
        answers["/metrics"] = DCGM % 0
        first, second = source.read().view.nodes[0].gpus
    assert first.holders[0].use == "idle"
    assert first.holders[0].idle_since is not None
    assert second.absent


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer(HTML), "not_prometheus"),
        (answer(b"", b"HTTP/1.1 503 Oops\r\n"), "http_503"),
        (answer(EXPOSITION[:-5]), "malformed"),
        (answer(b"\xff\xfe\n"), "malformed"),
        (answer(b"what is this\n"), "malformed"),
        (answer(b"up 1\n"), "no_gpu"),
        (answer(b'podgpu_exporter_source_up{source="nvml"} 0\n'), "no_gpu"),
        (b"", "unreachable"),
    ],
)
def test_bad_answers(reply: bytes, reason: str) -> None:
    with serving(reply) as server, pytest.raises(SourceError) as caught:
        ExporterSource(server.url).read()
    assert caught.value.reason == reason
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["node", "ftp://node/x", "file:///etc/passwd", "http://", "http://n:99999", "http://n/a b", "http://[::"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(UsageError, match="write HOST:PORT, http://HOST:PORT"):
        ExporterSource(url)


def test_a_silent_server_is_left_at_the_deadline() -> None:
    with serving(b"") as server:
        server.silent = True
        source = ExporterSource(server.url)
        source.deadline = 0.05
        feed = Feed(source, 1.0)
        for message in ("no answer within", "has not returned"):
            with pytest.raises(SourceError, match=message):
                feed.read()
        feed.close()


# The command


def test_another_exporter_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answer(EXPOSITION)) as server:
        assert run(["top", "--url", server.address, "--once"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "\x1b" not in output.out
    assert output.out.splitlines()[0].split() == HEADER
    assert "batch/two-slices/worker" in output.out


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    url = unused_url()
    assert run(["top", "--once", "--url", url]) == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"podgpu: {url} cannot be reached (nothing listens there)")
    assert (output.out, output.err.count("\n")) == ("", 1)
