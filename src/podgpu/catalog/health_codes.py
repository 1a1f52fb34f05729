"""What DCGM's health checks find, by number: the health_error_code label. The table is health_codes.csv.

Where DCGM 4 renamed a code (10, 12, 43) the name is the one dcgm-exporter still prints.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files


def health_code(number: int) -> str:
    return _names().get(number, f"DCGM_FR_UNKNOWN({number})")


@cache
def _names() -> Mapping[int, str]:
    table = files("podgpu.catalog").joinpath("health_codes.csv").read_text(encoding="utf-8")
    return {int(row["number"]): row["name"] for row in csv.DictReader(table.splitlines())}
