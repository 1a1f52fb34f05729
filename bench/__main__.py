"""`python -m bench [NAME ...] [--json FILE]`: runs the benchmarks; exit code 1 when a limit is missed."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import (
    allocation,
    calls,
    cluster,
    history,
    hook,
    largest,
    memory,
    page,
    parser,
    prometheus,
    rendering,
    serving,
    switches,
    tick,
    usage,
    watching,
)
from bench.figures import Figure, any_missed, heading, row

Benchmarks = Mapping[str, Callable[[], list[Figure]]]
BENCHMARKS: Benchmarks = {
    "serving": serving.measure,
    "rendering": rendering.measure,
    "parser": parser.measure,
    "tick": tick.measure,
    "allocation": allocation.measure,
    "usage": usage.measure,
    "switches": switches.measure,
    "largest": largest.measure,
    "watching": watching.measure,
    "calls": calls.measure,
    "memory": memory.measure,
    "cluster": cluster.measure,
    "prometheus": prometheus.measure,
    "page": page.measure,
    "hook": hook.measure,
    "history": history.measure,
}


def main(given_arguments: Sequence[str] | None = None, benchmarks: Benchmarks = BENCHMARKS) -> int:
    arguments = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(benchmarks)}; default: all")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    given = arguments.parse_args(given_arguments)
    unknown = [name for name in given.names if name not in benchmarks]
    if unknown:
        arguments.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(benchmarks)}")
    logging.disable(logging.WARNING)  # simulated GPUs leave some fields out, and the agent says so
    measured = {name: _run(name, benchmarks[name]) for name in given.names or benchmarks}
    if given.json:
        plain = {name: [figure.as_json() for figure in figures] for name, figures in measured.items()}
        given.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    missed = any_missed(figure for figures in measured.values() for figure in figures)
    print("\na limit was MISSED" if missed else "\nevery limit holds")
    return int(missed)


def _run(name: str, measure: Callable[[], list[Figure]]) -> list[Figure]:
    began = time.monotonic()
    figures = measure()
    print(f"\n{heading()}\n{name} ({time.monotonic() - began:.0f} s)")
    for figure in figures:
        print(row(figure), flush=True)
    return figures


if __name__ == "__main__":
    sys.exit(main())
