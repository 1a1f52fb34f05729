"""Tests the sources over real HTTP: podgpu's view, other exporters' metrics, and bad answers."""

from __future__ import annotations

import msgspec
import pytest

from podgpu.errors import SourceError
from podgpu.fleet.view import GpuView, View
from podgpu.top.feed import ClusterSource, ExporterSource, Sparklines
from podgpu.view_address import UrlAddress
from tests.top.scene import LOST, gpu, holder, node, view
from tests.top.servers import EXPOSITION, HTML, answer, podgpu_server, serving

DCGM = (
    b'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n",namespace="a",pod="p",container="c"} '
    b"%d\n"
)


def gpus_of(shown: View) -> list[GpuView]:
    return [gpu for node in shown.nodes for gpu in node.gpus]


def test_a_podgpu_exporter_is_read_by_its_view() -> None:
    shown = view(node(gpu(0, holder()), gpu(1, conditions=[LOST], absent=True)), currency="EUR")
    with podgpu_server({"/metrics": EXPOSITION, "/api/v1/view": shown}) as server:
        source = ExporterSource(server.url)
        assert source.read().view == shown
        assert ClusterSource(UrlAddress(server.address)).read().view == shown
    assert {path.partition("?")[0] for path in server.paths} == {"/api/v1/view", "/api/v1/history"}


def test_a_cluster_without_podgpus_view_is_an_error() -> None:
    with (
        serving(answer(b"{}")) as server,
        pytest.raises(SourceError, match="is it the address of podgpu cluster"),
    ):
        ClusterSource(UrlAddress(server.address)).read()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"api":"podgpu/v1","step_seconds":0,"devices":{}}',
        b'{"api":"podgpu/v1","step_seconds":15,"devices":[]}',
        b'{"api":"podgpu/v1","step_seconds":15,"devices":{"a":"!"}}',
    ],
)
def test_bad_histories(body: bytes) -> None:
    with podgpu_server(
        {"/api/v1/view": view(node(gpu(0))), "/api/v1/history": msgspec.Raw(body)}
    ) as server:
        assert ClusterSource(UrlAddress(server.address)).read().history == Sparklines()


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
