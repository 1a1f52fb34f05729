"""`python -m bench [NAME ...]`: runs benchmarks and prints a table. Exits with 1 if a limit was
exceeded.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence

from bench import (
    cluster,
    history,
    memory,
    months,
    page,
    savings,
    scale,
    serving,
    stragglers,
    text,
    usage,
    webhook,
    writers,
)
from bench.figures import Figure, heading, row

Benchmarks = Mapping[str, Callable[[], list[Figure]]]
BENCHMARKS: Benchmarks = {
    "serving": serving.measure,
    "text": text.measure,
    "usage": usage.measure,
    "memory": memory.measure,
    "cluster": cluster.measure,
    "page": page.measure,
    "history": history.measure,
    "months": months.measure,
    "scale": scale.measure,
    "stragglers": stragglers.measure,
    "savings": savings.measure,
    "writers": writers.measure,
    "webhook": webhook.measure,
}


def main(arguments: Sequence[str] | None = None, benchmarks: Benchmarks = BENCHMARKS) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(benchmarks)}; default: all"
    )
    names: list[str] = parser.parse_args(arguments).names
    unknown = [name for name in names if name not in benchmarks]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(benchmarks)}")
    logging.disable(
        logging.WARNING
    )  # simulated GPUs do not support some fields, and the agent logs that
    print(heading())
    missed = False
    for name in names or benchmarks:
        print(name)
        for figure in benchmarks[name]():
            print(row(figure), flush=True)
            missed |= figure.missed
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
