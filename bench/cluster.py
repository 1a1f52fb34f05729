"""The embedded backend of `podgpu cluster` over a thousand nodes of eight GPUs: what a round costs beyond downloading.

The exporters live in one process (`fleet_process`), the backend in another (`cluster_process`) on one core. Texts of
108 KB, gzip, over loopback, on connections that stay open; every round has other figures. A bare download of all texts
has the same headers and as many requests at a time, and throws away the texts. Bare downloads and rounds take turns, so
that both meet the same machine; judged is CPU time, of which there is one core: the ratio of the medians. The first
round has a backend that has seen nothing, and has to open its connections too, which the bare downloads have open.
Beside it stand downloads that are not even unpacked: 6 KB each, and nobody could read them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import Figure

NODES = 1000
MOST_TIMES_BARE, MOST_TIMES_BARE_FIRST = 12, 14
"""Every exposition is read in full in every round: the first only opens its connections besides."""
MOST_MIB = 400
MOST_RENDER_MS = 200
_EXPOSITIONS = 4
_ROOT = Path(__file__).parents[1]


class Conversation:
    """A process that answers a line with a line of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        self.say(line)
        return self.answer()


@contextmanager
def process(*arguments: str) -> Iterator[Conversation]:
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    with process:
        try:
            yield Conversation(process)
        finally:
            process.kill()  # nothing it could still write matters


def measure(nodes: int = NODES, rounds: int = 7, firsts: int = 3) -> list[Figure]:
    with process("bench.fleet_process", str(nodes), str(_EXPOSITIONS)) as fleet:
        made = fleet.answer()
        with process("bench.cluster_process") as cluster:
            cluster.say(json.dumps(made["ports"]))
            took = _take_turns(fleet, cluster, rounds, firsts)
    return _figures(made, took, nodes)


def _take_turns(
    fleet: Conversation, cluster: Conversation, rounds: int, firsts: int
) -> dict[str, list[dict[str, Any]]]:
    took: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("bare", "packed", "first", "steady", "render", "memory")
    }

    def have(word: str) -> None:
        took[word].append(cluster.ask(word))

    for word in ("bare", "packed"):
        cluster.ask(word)  # opens the connections
    for _ in range(firsts):
        have("first")
        have("bare")
        have("memory")
    for _ in range(rounds):
        fleet.ask("next")
        have("steady")
        have("bare")
        have("packed")
        have("render")
    have("memory")
    return took


def _figures(made: dict[str, Any], took: dict[str, list[dict[str, Any]]], nodes: int) -> list[Figure]:
    def middle(word: str, what: str) -> float:
        return median(figures[what] for figures in took[word])

    def ratio(word: str, what: str) -> float:
        return middle(word, what) / middle("bare", what)

    memory, first_memory = took["memory"][-1], took["memory"][0]
    devices = took["render"][-1]["devices"]
    of_all = f"{nodes:,} nodes"
    return [
        Figure("steady round over bare downloads: CPU", ratio("steady", "cpu"), "x", MOST_TIMES_BARE),
        Figure("first round over bare downloads: CPU", ratio("first", "cpu"), "x", MOST_TIMES_BARE_FIRST),
        Figure(f"RSS of the process after all rounds, {of_all}", memory["rss"], "MiB", MOST_MIB),
        Figure(f"/metrics of {devices:,} GPUs rendered", middle("render", "render") * 1e3, "ms", MOST_RENDER_MS),
        Figure("  steady round over bare downloads: wall", ratio("steady", "wall"), "x"),
        Figure("  first round over bare downloads: wall", ratio("first", "wall"), "x"),
        Figure(
            "  steady round over downloads not unpacked: CPU", middle("steady", "cpu") / middle("packed", "cpu"), "x"
        ),
        Figure(f"  bare downloads, {of_all}", middle("bare", "cpu") * 1e3, "ms"),
        Figure(f"  steady round, {of_all}", middle("steady", "cpu") * 1e3, "ms"),
        Figure(f"  first round, {of_all}", middle("first", "cpu") * 1e3, "ms"),
        Figure("  RSS after the first round", first_memory["rss"], "MiB"),
        Figure("  most it ever was (VmHWM)", memory["peak"], "MiB"),
        Figure("  the view assembled", middle("render", "assemble") * 1e3, "ms"),
        Figure("  /metrics rendered for the first time", took["render"][0]["render"] * 1e3, "ms"),
        Figure("  /metrics: size", took["render"][-1]["bytes"] / 1024, "KiB"),
        Figure("  an exposition", made["exposition_bytes"] / 1024, "KiB"),
        Figure("  an exposition as it travels", made["zipped_bytes"] / 1024, "KiB"),
        Figure("  cores", len(os.sched_getaffinity(0)), ""),
    ]
