"""`podgpu cluster` and `podgpu demo` as a person starts them: what is refused, and what comes up."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from podgpu.cli.main import run
from tests.cluster.real_servers import needs, prometheus

_PATIENCE = 60.0


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command sets logging up for its process, which here goes on."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "needs a source: give exactly one of --prometheus HOST:9090, --scrape HOST:9400,… and"),
        (["--scrape", "http://a", "--prometheus", "http://b"], "--prometheus and --scrape cannot be combined"),
        (["--scrape", "htp://a"], "--scrape 'htp://a': not the URL of an HTTP server; write HOST:PORT"),
        (["--scrape", ","], "--scrape names no exporter"),
        (["--prometheus", "nowhere"], "--prometheus 'nowhere': not the URL of an HTTP server; write HOST:PORT"),
        (["--prometheus", "http://b", "--node-label", " , "], "--node-label is empty"),
        (["--prometheus", "http://b", "--prometheus-username", "me"], "password-file must be set together"),
        (["--prometheus", "http://b", "--prometheus-tenant", "a\nb"], "must be one line without"),
        (["--scrape", "http://a", "--match", 'a="b"'], "--match is used only with --prometheus"),
        (
            ["--prometheus", "http://b", "--exporter-username", "a"],
            "is used only with --scrape or --discover-kubernetes",
        ),
        (["--scrape", "http://a", "--used-field", "DCGM_FI_DEV_MEM_COPY_UTL"], "is it DCGM_FI_DEV_MEM_COPY_UTIL?"),
        (["--scrape", "http://a", "--used-field", "DCGM_FI_DEV_POWER_USAGE"], "is not a utilisation"),
        (["--scrape", "http://a", "--window", "24h", "--interval", "1s"], "holds more than"),
        (["--scrape", "http://a", "--prices", "/nowhere"], "--prices: /nowhere does not exist"),
        (["--scrape", "http://a", "-a", "9401"], "must be HOST:PORT"),
        (["--discover-kubernetes", "app=podgpu", "--kubeconfig", "/nowhere"], "/nowhere"),
        (["--scrape", "http://a", "--owners", "api", "--kubeconfig", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cluster", *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


class Demo(NamedTuple):
    """The URLs that it prints."""

    exporter: str
    cluster: str


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """One for all; in the end it ends as it should."""
    with _started("demo", "--calm", "-a", "127.0.0.1:0", "--cluster-address", "127.0.0.1:0") as process:
        cluster = _url(process, "the cluster")  # printed first
        yield Demo(_url(process, "node-1"), cluster)
        process.send_signal(signal.SIGINT)
        assert process.wait(_PATIENCE) == 0


def test_the_port_of_the_exporter_is_not_taken_twice(demo: Demo) -> None:
    result = _run("cluster", "-a", demo.cluster.removeprefix("http://"), "--scrape", "http://127.0.0.1:1")
    assert result.returncode == 1
    assert "cannot listen on" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_demo_has_three_nodes_and_top_shows_them(demo: Demo) -> None:
    view = _until(lambda: _nodes(demo.cluster, 3))
    top = _run("top", "--cluster", _host_port(demo.cluster), "--once", "--interval", "100ms")
    assert view["simulated"] is True
    assert [node["name"] for node in view["nodes"]] == ["node-1", "node-2", "node-3"]
    assert any("instances" in gpu for node in view["nodes"] for gpu in node["gpus"])
    assert top.returncode == 0, top.stderr
    assert top.stdout.startswith("NODE ")
    assert {line.split()[0] for line in top.stdout.splitlines() if line.startswith("node-")} == {
        "node-1",
        "node-2",
        "node-3",
    }


def test_cluster_over_exporters_one_of_them_dead(demo: Demo) -> None:
    arguments = ("-a", "127.0.0.1:0", "--interval", "1s", "--scrape", f"{_host_port(demo.exporter)},http://127.0.0.1:1")
    with _started("cluster", *arguments) as cluster:
        url = _until(lambda: _logged_url(cluster))
        view = _until(lambda: _nodes(url, 1))
        cluster.send_signal(signal.SIGTERM)
        assert cluster.wait(_PATIENCE) == 0
    assert any("nothing listens there" in note for note in view["notes"])
    assert (view["simulated"], [node["simulated"] for node in view["nodes"]]) == (True, [True])


@needs("prometheus", "promtool")
def test_the_map_by_way_of_prometheus_is_the_one_by_scraping(tmp_path: Path, demo: Demo) -> None:
    _until(lambda: _nodes(demo.cluster, 3))
    exporters = re.findall(r'target_up\{target="http://(\S+)/metrics"\} 1', _metrics(demo.cluster))
    jobs = {"job_name": "gpus", "honor_labels": True, "static_configs": [{"targets": exporters}]}
    configuration = json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [jobs]})
    with (
        prometheus(tmp_path, configuration=configuration) as server,
        _started("cluster", "-a", "127.0.0.1:0", "--interval", "1s", "--prometheus", _host_port(server)) as cluster,
    ):
        asking = _until(lambda: _logged_url(cluster))
        wanted = _lines(demo.cluster)
        _until(lambda: _lines(asking) == wanted)
        view = _nodes(asking, 3)
    assert view is not None
    assert (view["simulated"], [node["simulated"] for node in view["nodes"]]) == (True, [True] * 3)
    assert len(exporters) == 3
    assert any(line.startswith("pod_and_gpu_map_info{") for line in wanted)
    assert 'podgpu_node_gpus{node="node-3",model="NVIDIA H200"} 4' in wanted


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cluster", "x"], "not the URL of an HTTP server; write HOST:PORT"),
        (["--cluster", "x:99999"], "not the URL of an HTTP server; write HOST:PORT"),
        (["--cluster", "http://a", "--url", "http://b"], "give one of them"),
        (["--cluster", "http://a", "--kubernetes"], "cannot be combined with --cluster"),
    ],
)
def test_top_refuses_what_cannot_be_meant(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_top_says_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--once", "--cluster", "http://127.0.0.1:1"]) == 1
    assert "check that the server runs there" in capsys.readouterr().err


# Processes


def _host_port(url: str) -> str:
    return url.removeprefix("http://").rstrip("/")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "podgpu", *arguments]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=_PATIENCE, check=False)


@contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with process:
            try:
                yield process
            finally:
                process.terminate()  # not kill: it has folders to take away
                process.communicate(timeout=_PATIENCE)
    finally:
        process.kill()


def _url(process: subprocess.Popen[str], name: str) -> str:
    """From the line of the demo's output that begins with it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().startswith(name) and (found := re.search(r"http://\S+?(?=/\s)", line)):
            return found[0]
    raise AssertionError("the demo ended without a word about it")


def _logged_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"listening on (http://\S+)/metrics", line):
            return found[1]
    raise AssertionError("the cluster ended without listening")


def _nodes(url: str, number: int) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/view", timeout=30) as response:
            view = json.load(response)
    except OSError:
        return None
    return view if len(view["nodes"]) >= number else None


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        return str(response.read(), "utf-8")


def _lines(url: str) -> list[str]:
    """What does not change while nobody comes or goes."""
    steady = ("pod_and_gpu_map_info{", "podgpu_node_gpus{", "podgpu_node_allocated_gpus{", "podgpu_node_free_gpus{")
    return [line for line in _metrics(url).splitlines() if line.startswith(steady)]


def _until(look):  # type: ignore[no-untyped-def]
    """What it finds, once it finds something."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come up in time")
