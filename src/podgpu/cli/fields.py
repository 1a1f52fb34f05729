"""`podgpu fields`: lists DCGM fields."""

from __future__ import annotations

import click

from podgpu.cli.options import make_command
from podgpu.cli.tables import write_table
from podgpu.cli.terminal import print_lines
from podgpu.errors import UsageError
from podgpu.metrics.fields import Field, FieldValue, Gpm, NvmlCall, Recorded, fields, rename_of

_HEADER = ("id", "name", "unit", "mig", "from", "in 4.9")


@make_command(
    "fields",
    ("podgpu fields", "list all fields that a counter file can contain"),
    ("podgpu fields power", "list the fields with POWER in their names"),
)
@click.argument("pattern", required=False, default="", metavar="[TEXT]")
def command(pattern: str) -> None:
    """List the DCGM fields: id, name, unit, whether MIG instances have their own value, where
    podgpu reads the field, and its name and unit in dcgm-exporter 4.9. TEXT filters by name, also
    by the names of dcgm-exporter 1.x and 4.9.
    """
    wanted = pattern.lower()
    rows = []
    for field in fields().values():
        if not any(wanted in name.lower() for name in field.names):
            continue
        own = "own value" if field.per_instance else ""
        source = _describe_source(field)
        successor = _describe_successor(field)
        rows.append((str(field.id), field.name, field.unit, own, source, successor))
    if not rows:
        raise UsageError(
            f"no field has {pattern!r} in its name; podgpu fields without a text lists all fields"
        )

    print_lines(write_table(_HEADER, rows, text_columns=len(_HEADER)))


def _describe_successor(field: Field) -> str:
    rename = rename_of(field.name)
    if rename is None or rename.new_name == field.name:
        return ""
    if rename.new.unit:
        return f"{rename.new_name} ({rename.new.unit})"
    return rename.new_name


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
    return "only with DCGM"
