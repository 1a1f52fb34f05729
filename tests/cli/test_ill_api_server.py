"""An API server that is absent, refuses, hangs or sends bad data affects only the data that it
provides.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent.test_command import errors, exposition
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import wait_until
from tests.nodes.node import (
    Description,
    Node,
    kubeconfig,
    node_of,
    only_these_variables,
    read_description,
)
from tests.process import EXPORTER, podgpu

UUID = "GPU-00000000-1111-2222-3333-444444444444"
POD = {
    "metadata": {"namespace": "ns", "name": "train", "uid": "u-1", "labels": {"team": "vision"}},
    "spec": {"nodeName": "node-1", "containers": [{"name": "main"}]},
    "status": {"phase": "Running"},
}
HELD = {"namespace": "ns", "name": "train", "containers": {"main": {"nvidia.com/gpu": [UUID]}}}
SERIES = 'team="vision",container="main",namespace="ns",pod="train"} '
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP, gauge, t\n"


@pytest.fixture(autouse=True)
def _no_variables() -> Iterator[None]:
    with only_these_variables({}):
        yield


@contextmanager
def watched_node(folder: Path) -> Iterator[tuple[Node, SimulatedApiServer]]:
    """Yields a node with one pod. Its labels come from the API server, and its GPU from the
    kubelet.
    """
    arguments = [
        "-f",
        "{folder}/counters.csv",
        "--usage-from=none",
        "--kubeconfig",
        "{folder}/kubeconfig",
    ]
    arguments += ["--allocation", "kubelet,annotations", "--kubernetes-enable-pod-labels"]
    files = {"counters.csv": TEMPERATURE}
    described = Description(
        "", "1xT4", arguments, uuids=[UUID], pods=[HELD], files=files, api_objects={"pods": [POD]}
    )
    with node_of(described, folder) as node:
        assert node.api_server is not None
        node.take_turns()
        assert SERIES in exposition(node.agent)
        yield node, node.api_server


def up(node: Node, *sources: str) -> list[str]:
    """Returns the value of source_up for each source."""
    text = exposition(node.agent)
    return [text.partition(f'source_up{{source="{source}"}} ')[2][:1] for source in sources]


@pytest.mark.fault(
    "podgpu's role lets it list pods, but not watch them",
    "what was listed would stand for ever: the sources api-server and annotations are not up, "
    "with the reason"
    " forbidden and the missing permission; GPUs and the kubelet's holders stay",
)
def test_a_source_that_may_list_but_not_watch_is_not_up(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with watched_node(folder) as (node, server):
        (feed,) = node.api.feeds
        server.refuse_watches_only = True
        server.refusal = (
            403,
            'pods is forbidden: User "podgpu" cannot watch resource "pods" in API group ""',
        )
        server.cut_watches()
        wait_until(
            lambda: feed.error is not None and feed.error.reason == "forbidden",
            "the watch is refused",
        )
        for turn in (1, 2, 3):
            node.clock.advance(5.0)
            node.agent.read_allocation()
            assert [
                errors(node.agent, name)["forbidden"] for name in ("api-server", "annotations")
            ] == [turn] * 2
            assert up(node, "api-server", "annotations", "kubelet", "gpu0") == ["0", "0", "1", "1"]
        assert SERIES in exposition(node.agent)
        said = [line for line in caplog.messages if line.startswith("annotations: ")]
        assert len(said) == 1
        assert 'cannot watch resource "pods"' in said[0]
        assert "add this permission to podgpu's ClusterRole" in said[0]
        server.refusal = None
        wait_until(lambda: feed.error is None, "the watch stands again")
        for _ in range(2):
            node.agent.read_allocation()
        assert up(node, "annotations", "api-server") == ["1", "1"]


@contextmanager
def dra_node(folder: Path) -> Iterator[tuple[Node, SimulatedApiServer]]:
    """Yields the scenario nodes/dra with an API server that is not started yet."""
    described = read_description(Path(__file__).parents[1] / "nodes" / "dra")
    with node_of(replace(described, api_away=True), folder) as node:
        assert node.api_server is not None
        yield node, node.api_server


@pytest.mark.fault(
    (
        "the API server is away when podgpu starts, and offers DRA in an older version (Kubernetes "
        "1.31 to 1.33)"
    ),
    "podgpu starts without waiting; claims are unmapped as slices_not_synced until the server is "
    "back, and then name"
    " their GPUs, whichever version it has",
)
@pytest.mark.parametrize("version", ["v1alpha3", "v1beta1", "v1beta2", "v1"])
def test_dra_comes_with_the_api_server(version: str, folder: Path) -> None:
    with dra_node(folder) as (node, server):
        node.take_turns()
        assert 'reason="slices_not_synced"' in exposition(node.agent)
        assert 'pod="train"' not in exposition(node.agent)
        server.resource_api_versions = (version,)
        server.start()

        def mapped() -> bool:
            node.agent.read_allocation()
            return 'pod="train"' in exposition(node.agent)

        wait_until(mapped, "the claim names its GPU")
        assert 'reason="slices_not_synced"' not in exposition(node.agent)
        (listed, watched) = (
            [r for r in server.requests if r.path.endswith("slices") and r.watches == w]
            for w in (0, 1)
        )
        assert {request.path for request in [*listed, *watched]} == {
            f"/apis/resource.k8s.io/{version}/resourceslices"
        }
        assert len(listed) == 1


@pytest.mark.parametrize("group", [(), ("v1alpha2",)], ids=["none", "too old"])
def test_dra_comes_with_the_upgrade_of_the_api_server(group: tuple[str, ...], folder: Path) -> None:
    with dra_node(folder) as (node, server):
        server.resource_api_versions = group
        server.start()
        (feed,) = node.api.feeds
        wait_until(
            lambda: feed.error is not None and feed.error.reason == "not_found",
            "the server has none",
        )
        assert "DRA needs Kubernetes 1.31" in str(feed.error)
        server.resource_api_versions = ("v1beta1",)
        wait_until(lambda: feed.synced, "it was asked again")
        node.take_turns()
        assert 'pod="train"' in exposition(node.agent)


def test_who_may_not_ask_what_there_is_may_still_read_the_slices(folder: Path) -> None:
    """Some clusters do not grant system:discovery."""
    with dra_node(folder) as (node, server):
        server.forbidden_paths = frozenset({"/apis/resource.k8s.io"})
        server.start()
        (feed,) = node.api.feeds
        wait_until(lambda: feed.synced, "the slices are read as v1")


def counters(text: str) -> dict[str, Any]:
    return {"metadata": {"namespace": "gpu", "name": "counters"}, "data": {"metrics": text}}


@pytest.mark.fault(
    "the ConfigMap of the counters is wrong, and the change meant to mend it is wrong too",
    "the last good counters stay; the log says each mistake once, the second as well as the first",
)
def test_one_malformed_configmap_after_another_is_said_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["-m", "gpu:counters", "--kubeconfig", "{folder}/kubeconfig", "--usage-from=none"]
    objects = {"configmaps": [counters(TEMPERATURE)]}
    with node_of(Description("", "1xT4", arguments, api_objects=objects), folder) as node:
        server, (feed,) = node.api_server, node.api.feeds
        assert server is not None
        node.take_turns()
        for wrong in ("DCGM_FI_NO_SUCH_FIELD, gauge, x\n", "DCGM_FI_DEV_GPU_TEMP, gorge, x\n"):
            caplog.clear()
            server.put("configmaps", counters(wrong))
            wait_until(lambda text=wrong: feed.items() == (text,), ("the change arrived"))  # type: ignore[misc]
            for _ in range(3):
                node.clock.advance(5.0)
                node.agent.read_counters()
                node.agent.read_telemetry()
            (said,) = (line for line in caplog.messages if line.startswith("counters: "))
            assert ("gorge" if "gorge" in wrong else "DCGM_FI_NO_SUCH_FIELD") in said
            assert "DCGM_FI_DEV_GPU_TEMP{" in exposition(node.agent), "the last valid counters stay"
            assert 'source_up{source="counters"} 0' in exposition(node.agent)
        server.put("configmaps", counters("DCGM_FI_DEV_SM_CLOCK, gauge, c\n"))
        wait_until(lambda: _has_clock(node), "the mended one is taken up")


def _has_clock(node: Node) -> bool:
    node.clock.advance(1.0)
    node.agent.read_counters()
    node.agent.read_telemetry()
    return "DCGM_FI_DEV_SM_CLOCK{" in exposition(node.agent)


def pods_of(*pods: Mapping[str, Any], times: int = 1) -> bytes:
    """Returns a PodList in which these pods are repeated `times` times."""
    items = ", ".join([json.dumps(pod) for pod in pods] * times)
    return (
        f'{{"kind": "PodList", "metadata": {{"resourceVersion": "900"}}, "items": [{items}]}}'
    ).encode()


def many(count: int) -> bytes:
    return pods_of(
        *({"metadata": {"name": f"p{n}", "uid": f"u{n}", "namespace": "n"}} for n in range(count))
    )


HOSTILE: Mapping[str, tuple[Callable[[], bytes], Mapping[str, str], bool]] = {
    "an object of 40 MiB": (
        lambda: pods_of({"metadata": {"uid": "u", "name": "x" * (40 << 20)}}),
        {},
        False,
    ),
    "a list without end": (
        lambda: b'{"metadata": {"resourceVersion": "900"}, "items": [' + b"{}," * 9000,
        {},
        True,
    ),
    "a list cut short": (lambda: many(50)[:-9], {}, False),
    "a page to log in": (
        lambda: b"<html>please log in</html>",
        {"Content-Type": "text/html"},
        False,
    ),
    "a compressed 200 MiB": (
        lambda: gzip.compress(b" " * (200 << 20), 1),
        {"Content-Encoding": "gzip"},
        False,
    ),
    "nothing": (lambda: b"", {}, False),
}
"""Body, headers, and whether the body is endless. A function builds the body only when a test needs
it.
"""


@pytest.mark.fault(
    (
        "the API server answers with nonsense: objects of 40 MiB, endless lists, broken JSON, a "
        "log-in page, a gzip bomb"
    ),
    "the answer is refused within its bounds and the source api-server is not up (bad_answer); "
    "the last pod labels, the"
    " kubelet's holders and all GPUs stay",
)
@pytest.mark.parametrize("case", HOSTILE)
def test_nonsense_costs_the_api_server_only(case: str, folder: Path) -> None:
    make, headers, endless = HOSTILE[case]
    with watched_node(folder) as (node, server):
        (feed,) = node.api.feeds
        server.raw_answer, server.raw_endless = make(), endless
        server.raw_headers = {"Content-Type": "application/json", **headers}
        server.send(b"nonsense\n")
        before = len(server.requests)
        wait_until(lambda: len(server.requests) >= before + 2, "the list was refused too")
        node.clock.advance(1.0)
        node.agent.read_telemetry()
        node.agent.read_allocation()
        assert errors(node.agent, "api-server")["bad_answer"] >= 1
        assert up(node, "api-server", "kubelet", "gpu0") == ["0", "1", "1"]
        assert SERIES in exposition(node.agent)
        server.raw_answer = None
        wait_until(lambda: feed.error is None, "all is well again")


@pytest.mark.fault(
    "the API server hangs, or sends lists of 60 MiB",
    "/livez answers: nothing waits for the API server",
)
@pytest.mark.parametrize("ill", ["hangs", "sends 60 MiB"])
def test_probes_are_answered_whatever_the_api_server_does(ill: str, folder: Path) -> None:
    with SimulatedApiServer() as server:
        (folder / "kubeconfig").write_text(kubeconfig(server.url))
        if ill == "hangs":
            server.hang()
        else:
            server.raw_answer = pods_of(POD, times=330_000)
            assert 60 << 20 < len(server.raw_answer) < 64 << 20
        options = [
            "--allocation",
            "annotations",
            "--kubernetes-enable-pod-labels",
            "--usage-from=none",
        ]
        with podgpu(
            (*EXPORTER, *options, "--kubeconfig", f"{folder}/kubeconfig"), folder
        ) as exporter:
            wait_until(lambda: server.requests, "the API server is asked")
            assert [exporter.client.ask("/livez").status for _ in range(20)] == [200] * 20
        server.resume()
