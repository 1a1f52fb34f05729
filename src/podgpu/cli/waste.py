"""`podgpu waste`: prints who holds GPUs without using them."""

from __future__ import annotations

from typing import Any

import click

from podgpu.cli.bills import WASTE_PATH, print_bill
from podgpu.cli.options import make_command

_COLUMNS = ("allocated", "idle", "underused", "use", "wasted_idle", "wasted_underused")


@make_command(
    "waste",
    ("podgpu waste", "the pods that wasted most in the last 24 hours"),
    ("podgpu waste --range 7d --by owner", "the same for Deployments, Jobs and other owners"),
)
@click.pass_context
def command(ctx: click.Context, /, **_options: Any) -> int:
    """Print how long GPUs were held and idle or under-used in a period, the largest waste first.

    Reads the API of `podgpu cluster`, or of an exporter with --history-dir.
    """
    return print_bill(ctx, WASTE_PATH, "Waste", _COLUMNS)
