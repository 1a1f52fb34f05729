"""`podgpu cost`: prints GPU-hours, energy and cost of a period."""

from __future__ import annotations

from typing import Any

import click

from podgpu.cli.bills import RANGE_PATH, print_bill
from podgpu.cli.options import make_command

_COLUMNS = (
    "gpu_hours",
    "allocated",
    "idle",
    "use",
    "energy",
    "cost",
    "wasted_idle",
    "wasted_underused",
    "wasted_unallocated",
)


@make_command(
    "cost",
    ("podgpu cost", "the cost of each namespace in the last 24 hours"),
    ("podgpu cost --range month --by label:team", "the cost of each team in this month"),
    ("podgpu cost --by pod -n research", "the cost of each pod of a namespace"),
)
@click.pass_context
def command(ctx: click.Context, /, **_options: Any) -> None:
    """Print GPU-hours, energy and cost of a period.

    Reads the API of `podgpu cluster`, or of an exporter with --history-dir.
    """
    print_bill(ctx, RANGE_PATH, "Cost", _COLUMNS)
