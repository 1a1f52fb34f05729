"""Console blocks of the documentation as terminal sessions: what is typed, what stands in for what is not here."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.host.guard import HOST_VARIABLES, NODE_PATHS
from tests.net import free_port

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))
BIN = Path(sys.executable).parent
PATIENCE = 60.0

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_NAMED_FILE = re.compile(r"# ([\w.-]+\.yaml)\b")
_OWN_ADDRESS = re.compile(r"(?<==):\d{4}\b")
_LISTENS = {
    "exporter": {"-a": 9400},
    "demo": {"-a": 9400, "--cluster-address": 9401},
    "cluster": {"-a": 9401},
}
_OTHERS_ADDRESS = re.compile(r"\b(?:localhost|node-\d):(\d{4})\b")
_PLACES = {"/var/lib/node_exporter/textfile/": "textfile/", "/run/prometheus/": ""}
"""What lies elsewhere on a real machine, and where it lies in the folder of a session."""


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
                body = "\n".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines())
                yield Block(page, text.count("\n", 0, match.start()) + 1, tuple(_commands(body)))


def _commands(body: str) -> Iterator[str]:
    """Lines that begin with `$ `; the others are what was answered."""
    for line in body.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            yield re.sub(r"\s+# .*$", "", line.removeprefix("$ ")).strip()


def yaml_files(page: Path) -> dict[str, str]:
    """The page's YAML blocks whose first line names a file."""
    found: dict[str, str] = {}
    for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
        if match["language"] == "yaml" and (name := _NAMED_FILE.match(match["body"])):
            found[name[1]] = match["body"]
    return found


# --- what a command is


def bare(command: str) -> str:
    """What can be run of it: without sudo, outside its container, rendered and not installed, told and not made."""
    command = re.sub(r"^kubectl .* exec \S+ -- ", "", command)
    command = re.sub(r"^sudo (?=(?:\S*/)?podgpu )", "", command)
    command = command.replace("/opt/podgpu/bin/podgpu ", "podgpu ")
    command = re.sub(r"^helm upgrade --install (\S+) (?=deploy/)", r"helm template \1 ", command)
    command = command.replace(" --reuse-values", " --set image.repository=registry.example.com/podgpu")
    return re.sub(r"^make ", "make -n ", command)


def program(command: str) -> str:
    """The first word that is no setting of a variable."""
    return next(word for word in command.split() if not re.match(r"[A-Z_]+=", word))


def serves(command: str) -> dict[str, int]:
    """Flag -> port it is documented to listen on; nothing for what ends by itself or does not listen."""
    words = command.split()
    if "podgpu" not in words or "--once" in words or "|" in words:
        return {}
    ports = _LISTENS.get(words[words.index("podgpu") + 1], {})
    return {flag: int(_said(command, flag) or port) for flag, port in ports.items()}


def _said(command: str, flag: str) -> str:
    found = re.search(rf" {flag} :(\d{{4}})\b", command)
    return found[1] if found else ""


def runs_on(command: str) -> bool:
    return bool(serves(command)) or (command.startswith("podgpu enrich ") and "--once" not in command)


# --- a session


@dataclass
class Background:
    process: subprocess.Popen[str]
    output: Path

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8")


@dataclass
class Session:
    """One block, in a folder that looks like the root of the repository. Ports are whatever is free."""

    folder: Path
    block: Block
    stand_in: Callable[[int], int] | None = None
    """From a documented port to where somebody answers as if there: for blocks that take a server for granted."""
    ports: dict[int, int] = field(default_factory=dict)
    running: list[Background] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path in ROOT.iterdir():
            (self.folder / path.name).symlink_to(path)
        (self.folder / "textfile").mkdir()
        shutil.copy(ROOT / "tests" / "fixtures" / "seeds" / "000-sample.prom", self.folder / "dcgm.prom")
        for name, text in yaml_files(self.block.page).items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def type(self, command: str) -> None:
        """Runs it to its end; what does not end by itself is ended once it is seen to work."""
        stays = command.endswith(" &")
        command = bare(command.removesuffix(" &"))
        text = self._here(command)
        if not stays and not runs_on(command):
            self._run(text)
            return
        background = self._start(text)
        self.running.append(background)
        self._await(background, [self.ports[port] for port in serves(command).values()])
        if not stays:
            self.running.remove(background)
            self.ports = {port: there for port, there in self.ports.items() if port not in serves(command).values()}
            code = background.stop()
            assert code == 0, f"{self.block}: {command}: ended with {code}: {background.said()}"

    def close(self) -> None:
        for background in self.running:
            background.stop()

    def _here(self, command: str) -> str:
        """The command with the ports and places it has here."""
        own = serves(command)
        command = _OTHERS_ADDRESS.sub(lambda m: f"127.0.0.1:{self._reached(int(m[1]))}", command)
        for flag, port in own.items():
            self.ports[port] = free_port()
            command = f"{command.replace(f' {flag} :{port}', '')} {flag} 127.0.0.1:{self.ports[port]}"
        for there, here in _PLACES.items():
            command = command.replace(there, here)
        return _OWN_ADDRESS.sub("127.0.0.1:0", command)

    def _reached(self, port: int) -> int:
        if port not in self.ports:
            assert self.stand_in is not None, f"{self.block}: nobody listens on {port}"
            self.ports[port] = self.stand_in(port)
        return self.ports[port]

    def _run(self, text: str) -> None:
        done = subprocess.run(
            _shell(text), cwd=self.folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE
        )
        said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert done.returncode == 0, f"{self.block}: {text}: exit code {done.returncode}\n{said}"

    def _start(self, text: str) -> Background:
        output = self.folder / f"output-{len(self.running)}.txt"
        with output.open("w") as sink:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {text}"],
                cwd=self.folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return Background(process, output)

    def _await(self, background: Background, ports: Sequence[int]) -> None:
        """Until it listens; what does not, until it has written its file."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            assert background.process.poll() is None, f"{self.block}: it ended: {background.said()}"
            if all(map(answers, ports)) if ports else any((self.folder / "textfile").iterdir()):
                return
            time.sleep(0.05)
        raise AssertionError(f"{self.block}: nothing came of it in {PATIENCE} s: {background.said()}")


def _shell(text: str) -> list[str]:
    """A pipe fails with any of its parts, and a page that is not there fails curl."""
    return ["bash", "-c", f'set -euo pipefail; curl() {{ command curl --fail "$@"; }}; {text}']


MACHINE: dict[str, str] = {}
"""Variables that stand for what else this machine has."""


def environment() -> dict[str, str]:
    """A machine with two simulated GPUs that is no node, and nothing else of ours set."""
    ours = {name for name in os.environ if name.startswith(HOST_VARIABLES)} - NODE_PATHS.keys()
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PATH": f"{BIN}:{os.environ['PATH']}", "PODGPU_TELEMETRY": "simulated:2xH100", **MACHINE}


def answers(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(1.0)
        return one.connect_ex(("127.0.0.1", port)) == 0
