"""Rounds of `podgpu cluster --scrape` over 1,000 nodes with eight GPUs: CPU time with documents and with text, memory.

The exporters run in one process (`fleet_process`), the collector in another (`cluster_process`) on one core, over
loopback with gzip. Every round has other figures.
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
MAX_DOCUMENT_SECONDS, MAX_TEXT_SECONDS = 1.0, 5.0
MAX_MIB = 300
MAX_RENDER_MS = 200
_ROUNDS_OF_FIGURES = 4
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


def measure(nodes: int = NODES, rounds: int = 7) -> list[Figure]:
    with process("bench.fleet_process", str(nodes), str(_ROUNDS_OF_FIGURES)) as fleet:
        made = fleet.answer()
        documents = _run_rounds(fleet, made["ports"], rounds)
        fleet.ask("text")
        texts = _run_rounds(fleet, made["ports"], rounds)
    state, memory = documents["state"][-1], documents["memory"][-1]
    judged = nodes >= NODES
    return [
        Figure(f"round of {nodes:,} documents, CPU", _median(documents, "round", "cpu"), "s", MAX_DOCUMENT_SECONDS),
        Figure(f"round of {nodes:,} texts, CPU", _median(texts, "round", "cpu"), "s", MAX_TEXT_SECONDS),
        Figure("RSS of the process", memory["rss"], "MiB", MAX_MIB if judged else None),
        Figure(
            f"/metrics of {state['devices']:,} GPUs rendered",
            _median(documents, "state", "render") * 1e3,
            "ms",
            MAX_RENDER_MS,
        ),
        Figure("  the state built", _median(documents, "state", "build") * 1e3, "ms"),
        Figure("  first round of documents, with connecting", documents["round"][0]["cpu"], "s"),
        Figure("  round of documents, wall clock", _median(documents, "round", "wall"), "s"),
        Figure("  largest RSS with texts", texts["memory"][-1]["peak"], "MiB"),
        Figure("  a document", made["document_bytes"] / 1024, "KiB"),
        Figure("  a text", made["text_bytes"] / 1024, "KiB"),
        Figure("  /metrics", state["bytes"] / 1024, "KiB"),
        Figure("  cores", len(os.sched_getaffinity(0)), ""),
    ]


def _run_rounds(fleet: Conversation, ports: list[int], rounds: int) -> dict[str, list[dict[str, Any]]]:
    took: dict[str, list[dict[str, Any]]] = {"round": [], "state": [], "memory": []}
    with process("bench.cluster_process") as cluster:
        cluster.say(json.dumps(ports))
        for _ in range(1 + rounds):
            for command, answers in took.items():
                answers.append(cluster.ask(command))
            fleet.ask("next")
    return took


def _median(took: dict[str, list[dict[str, Any]]], command: str, figure: str) -> float:
    return median(answer[figure] for answer in took[command][1:])
