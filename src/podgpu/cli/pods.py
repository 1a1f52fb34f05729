"""`podgpu pods`: prints which pod holds how many GPUs now, and how it uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

from podgpu.charge import Waste
from podgpu.cli.options import make_command
from podgpu.cli.tables import UNKNOWN, write_amount, write_table
from podgpu.cli.view_options import make_at_query, open_view, parse_at, print_answer
from podgpu.errors import UsageError, plural, utc_text
from podgpu.fleet.pod_list import PodRow, PodsResponse
from podgpu.top.table import format_duration, format_gib, format_gpus, format_percent

_PATH = "api/v1/pods"
_TIMEOUT = 30.0
_HEADER = (
    "Pod",
    "Owner",
    "Node",
    "GPUs",
    "Use of the GPU",
    "Memory, GiB",
    "Idle GPUs",
    "Idle for",
    "Waiting",
    "Cost{}/h",
    "Wasted{}/h",
)
_ORDERS: dict[str, Callable[[PodRow], float]] = {
    "gpus": lambda row: row.allocated_gpus,
    "idle": lambda row: row.idle_gpus,
    "cost": lambda row: row.cost_per_hour or 0.0,
    "wasted": lambda row: _sum_waste(row) or 0.0,
}


@make_command(
    "pods",
    ("podgpu pods", "all pods that hold a GPU"),
    ("podgpu pods --at 2h", "the pods that held a GPU two hours ago"),
    ("podgpu pods -n research --sort wasted", "the pods of a namespace, the largest waste first"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Print the pods, jobs and users that hold GPUs now, or at another time, and how they use them.

    Reads the API of `podgpu cluster` or of an exporter.
    """
    namespace = options["namespace"]
    if namespace and options["output"] == "json":
        raise UsageError("--namespace selects rows of the table: leave it out with -o json")

    at = parse_at(options["at"])
    client = open_view(ctx, _TIMEOUT)
    write = partial(_write, at, namespace, options["sort"])
    print_answer(client, _PATH, make_at_query(at), options["output"], PodsResponse, write)


def _write(at: float | None, namespace: str, order: str, answer: PodsResponse) -> Iterator[str]:
    if at is not None:
        yield f"As of {utc_text(at)}"

    rows = [row for row in answer.pods if not namespace or row.namespace == namespace]
    # The server sorts by name.
    if order != "name":
        rows.sort(key=_ORDERS[order], reverse=True)

    if answer.simulated:
        yield "SIMULATED GPUs"
    if not rows:
        where = f"in the namespace {namespace!r} " if namespace else ""
        yield f"No pod {where}holds a GPU."
        return

    now = answer.taken_at or time.time()
    money = f" {answer.currency}" if answer.currency else ""
    header = [title.format(money) for title in _HEADER]
    table = [_write_row(row, now) for row in rows]
    yield from write_table(header, table, text_columns=3)


def _write_row(row: PodRow, now: float) -> list[str]:
    name = f"{row.cluster}: {row.name}" if row.cluster else row.name
    owner = "" if row.owner is None else row.owner.text
    place = plural(len(row.nodes), "node")
    if len(row.nodes) == 1:
        place = row.nodes[0]

    # Without any GPU of known use, 0 idle GPUs would be wrong.
    idle_gpus = UNKNOWN
    if row.unknown_gpus < row.allocated_gpus:
        idle_gpus = format_gpus(row.idle_gpus)
    idle_time = UNKNOWN
    if row.idle_since is not None:
        idle_time = format_duration(max(0.0, now - row.idle_since))

    return [
        name,
        owner,
        place,
        format_gpus(row.allocated_gpus),
        format_percent(row.utilization_ratio),
        format_gib(row.memory_used_bytes),
        idle_gpus,
        idle_time,
        format_percent(row.wait_ratio),
        write_amount(row.cost_per_hour),
        write_amount(_sum_waste(row)),
    ]


def _sum_waste(row: PodRow) -> float | None:
    """Returns the cost of all parts of waste. None if no part is known."""
    waste = None if row.waste is None else row.waste.cost_per_hour
    if waste is None or waste == Waste():
        return None
    return waste.total
