"""`podgpu waste`: prints who holds GPUs without using them."""

from __future__ import annotations

from typing import Any

import click

from podgpu.cli.bills import WASTE_PATH, print_bill
from podgpu.cli.options import make_command

_COLUMNS = (
    "allocated",
    "idle",
    "underused",
    "use",
    "wasted",
    "wasted_idle",
    "wasted_underused",
    "wasted_unallocated",
)


@make_command(
    "waste",
    ("podgpu waste", "the pods that wasted most in the last 24 hours"),
    ("podgpu waste --range 7d --by owner", "the same for Deployments, Jobs and other owners"),
)
@click.pass_context
def command(ctx: click.Context, /, **_options: Any) -> None:
    """Print how much was wasted in a period, by whom, and what to do: how long GPUs were held and
    idle or under-used, the largest waste first, and what nobody held.

    Reads the API of `podgpu cluster`, or of an exporter with --history-dir.
    """
    print_bill(ctx, WASTE_PATH, "Waste", _COLUMNS)
