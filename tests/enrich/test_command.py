"""Tests the command `podgpu enrich` with a simulated kubelet on a real socket."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.node.gpu.remote_exporter import parse_exposition
from tests.cli.test_option_table import Ran, execute
from tests.enrich.test_losses import enriching
from tests.net import free_port, read_if_ready
from tests.nodes.clock import wait_until
from tests.simulated_kubelet import FaultyKubelet

FIXTURES = Path(__file__).parents[1] / "fixtures"
SEED = (FIXTURES / "seeds" / "000-sample.prom").read_text(encoding="utf-8")
NODE_EXPORTER = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
UUIDS = sorted(set(re.findall(r"GPU-[-0-9a-f]+", SEED)))
BARE = re.sub(r'container_name="[^"]*",|pod_name="[^"]*",|pod_namespace="[^"]*",', "", SEED)
"""Metrics of dcgm-exporter 1.x without pod labels."""


@pytest.fixture
def socket(folder: Path) -> Iterator[str]:
    path = str(folder / "kubelet.sock")
    pod = SimulatedPod("default", "pod1", {"pod1-ctr": {"nvidia.com/gpu": UUIDS}})
    with FaultyKubelet(path, [pod]):
        yield path


@pytest.fixture
def exposition(folder: Path) -> Path:
    path = folder / "dcgm.prom"
    path.write_text(BARE, encoding="utf-8")
    return path


@pytest.fixture
def out(folder: Path) -> Path:
    (folder / "textfile").mkdir()
    return folder / "textfile" / "gpu.prom"


def enrich(exposition: object, out: object, socket: str, *more: str) -> Ran:
    kubelet = ("--allocation", "kubelet", "--pod-resources-kubelet-socket", socket)
    return execute(["enrich", "--in", str(exposition), "--out", str(out), *kubelet, *more])


def series(text: str) -> Counter[str]:
    """Counts the lines of a metrics text. Sorts the labels, as node_exporter does."""
    return Counter(
        re.sub(r"\{(.*)\}", lambda m: "{" + ",".join(sorted(m[1].split(","))) + "}", line)
        for line in text.splitlines()
        if "podgpu_" not in line
    )


def test_seed_000(exposition: Path, out: Path, socket: str) -> None:
    ran = enrich(exposition, out, socket, "--once", "-o")
    assert (ran.code, ran.out) == (0, "")
    assert series(out.read_text()) == series(SEED)
    assert 'podgpu_exporter_source_up{source="kubelet",file="gpu.prom"} 1' in out.read_text()
    assert out.stat().st_mode & 0o777 == 0o644


def test_without_a_kubelet_values_are_written_without_pod_labels(
    exposition: Path, out: Path, folder: Path
) -> None:
    ran = enrich(exposition, out, str(folder / "nothing.sock"), "--once")
    assert ran.code == 1, "must fail, so that systemd reports the failure of a timer unit"
    assert "written without pod labels" in ran.err
    assert series(out.read_text()) == series(BARE)
    assert "kubelet: " in ran.err


def test_an_allocation_of_another_gpu_is_logged(exposition: Path, out: Path, folder: Path) -> None:
    """Without the driver, a minor number identifies no GPU of dcgm-exporter's metrics."""
    podlist = folder / "podlist.json"
    podlist.write_text(
        '[{"name": "chat", "namespace": "serving", "container": "engine", "gpu_list": ["0"]}]'
    )
    source = ("--allocation", f"podlist:{podlist}", "--once")
    ran = execute(["enrich", "--in", str(exposition), "--out", str(out), *source])
    assert ran.code == 0
    [line] = ran.err.splitlines()
    assert "podlist: serving/chat/engine holds 0: no GPU of this node has that id" in line
    assert series(out.read_text()) == series(BARE)


def test_a_bad_exposition_leaves_the_file_and_is_the_exit_code(
    exposition: Path, out: Path, socket: str
) -> None:
    out.write_text("old 1\n")
    exposition.write_text(BARE[:-3])
    ran = enrich(exposition, out, socket, "--once")
    assert ran.code == 1
    assert "ends in the middle of a line" in ran.complaint
    assert out.read_text() == "old 1\n"


@pytest.mark.parametrize(
    ("source", "complaint"), [("", "enrich needs --in URL|PATH"), ("ftp://x/", "'ftp://x/'")]
)
def test_usage_errors(source: str, complaint: str, out: Path, socket: str) -> None:
    ran = enrich(source, out, socket, "--once")
    assert ran.code == 2
    assert complaint in ran.complaint


def test_in_and_out_may_not_be_one_file(exposition: Path, socket: str) -> None:
    for other in (exposition, exposition.parent / "." / exposition.name):
        assert enrich(exposition, other, socket, "--once").code == 2
    assert exposition.read_text() == BARE


def test_it_runs_until_sigterm(exposition: Path, out: Path, socket: str) -> None:
    kubelet = ("--allocation", "kubelet", "--pod-resources-kubelet-socket", socket)
    with enriching(exposition, out, *kubelet) as process:
        wait_until(lambda: out.exists() and "pod1-ctr" in out.read_text())
        exposition.write_text(BARE.replace(" 33\n", " 99\n"))
        wait_until(lambda: " 99\n" in out.read_text())
        exposition.write_text("<html>\n")
        wait_until(lambda: "dcgm_gpu_temp" not in out.read_text())
        assert 'reason="not_prometheus",file="gpu.prom"' in out.read_text()
        exposition.write_text(BARE)
        wait_until(lambda: "dcgm_gpu_temp" in out.read_text())
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert log.count("is a web page") == 1
    assert "works again" in log
    assert os.listdir(out.parent) == ["gpu.prom"]


@pytest.mark.parametrize("scenario", ["shared", "pod-mapped"])
def test_families_of_podgpu_are_not_changed(
    scenario: str, exposition: Path, out: Path, socket: str
) -> None:
    own = (Path(__file__).parents[1] / "nodes" / scenario / "expected.prom").read_text(
        encoding="utf-8"
    )
    exposition.write_text(own, encoding="utf-8")
    assert enrich(exposition, out, socket, "--once").code == 0
    before, after = (
        parse_exposition(text.encode(), "exposition")
        for text in (own, out.read_text(encoding="utf-8"))
    )
    theirs = {f.name: f for f in before if f.name.startswith("podgpu_")}
    assert {f.name: f for f in after if f.name in theirs} == theirs


@contextmanager
def node_exporter(directory: Path) -> Iterator[str]:
    port = free_port()
    collector = [
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={directory}",
    ]
    command = [str(NODE_EXPORTER), *collector, f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}/metrics"
        finally:
            process.terminate()


@pytest.mark.skipif(NODE_EXPORTER is None, reason="prometheus-node-exporter is not installed")
def test_seed_000_through_node_exporter(exposition: Path, out: Path, socket: str) -> None:
    """Timestamps are removed, because node_exporter skips files that have them."""
    stamped = [f"{line} 1700000000000" if line[0] != "#" else line for line in BARE.splitlines()]
    exposition.write_text("\n".join(stamped) + "\n")
    assert enrich(exposition, out, socket, "--once", "-o").code == 0
    answers: list[bytes | None] = []

    def scrape() -> bool:
        answers.append(read_if_ready(url))
        return answers[-1] is not None

    with node_exporter(out.parent) as url:
        wait_until(scrape, "node_exporter answers")
    text = (answers[-1] or b"").decode()
    assert "".join(line for line in text.splitlines(keepends=True) if "dcgm" in line) == SEED
    assert "node_textfile_scrape_error 0" in text
    assert 'podgpu_exporter_source_up{file="gpu.prom",source="exporter"} 1' in text
