"""`podgpu fields`: lists DCGM fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from podgpu.cli.options import make_command
from podgpu.cli.terminal import print_out
from podgpu.metrics.fields import Field, FieldValue, Gpm, NvmlCall, Recorded, fields

_HEAD = ("id", "name", "unit", "mig", "from")


@make_command(
    "fields",
    (),
    ("podgpu fields", "list all fields that a counter file can contain"),
    ("podgpu fields power", "list the fields with POWER in their names"),
)
@click.argument("pattern", required=False, default="", metavar="[TEXT]")
def command(pattern: str) -> None:
    """List the DCGM fields that podgpu reads from NVML: id, name, unit, whether MIG instances have their own value,
    and the NVML function. TEXT filters by name, also by the names of dcgm-exporter 1.x and 4.9.
    """
    rows = [_make_row(field) for field in fields().values() if field.recipe is not None and _matches(field, pattern)]
    print_out(format_table(_HEAD, rows))


def _matches(field: Field, pattern: str) -> bool:
    return any(pattern.lower() in name.lower() for name in field.names)


def _make_row(field: Field) -> tuple[str, ...]:
    return str(field.id), field.name, field.unit, "own value" if field.per_instance else "", _describe_source(field)


def _describe_source(field: Field) -> str:
    match field.recipe:
        case NvmlCall(function=function):
            return function
        case FieldValue(ids=ids):
            return f"NVML field {'+'.join(map(str, ids))}"
        case Gpm(metric=metric):
            return f"GPM metric {metric} (Hopper and later)"
        case Recorded():
            return "counted by podgpu"
    return ""


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in lines
    )
    return "".join(f"{line}\n" for line in padded)
