"""What an XID number means, in a few words: the err_msg label beside err_code. The table is xids.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

UNKNOWN = "unknown error"


def xid_text(xid: int) -> str:
    """The short text for this number; unused, reserved and newer numbers are unknown errors."""
    return _texts().get(xid, UNKNOWN)


@cache
def _texts() -> Mapping[int, str]:
    table = files("podgpu.catalog").joinpath("xids.csv").read_text(encoding="utf-8")
    return {int(row["number"]): row["text"] for row in csv.DictReader(table.splitlines())}
