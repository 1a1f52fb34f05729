"""This module owns what a GPU's own view shows beside the counters, in details.csv: the fields, and words for each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from podgpu.catalog.families import CLOCK_EVENTS
from podgpu.catalog.fields import Field, fields, table_rows

CLOCK_EVENTS_FIELD = 112


@cache
def detail_helps() -> Mapping[int, str]:
    """Field id -> what it is, in the order in which they are shown."""
    return {int(row["id"]): row["help"] for row in table_rows("details.csv")}


def detail_fields() -> tuple[Field, ...]:
    return tuple(fields()[number] for number in detail_helps())


def clock_events_in_words(mask: int) -> str:
    return ", ".join(event for bit, event in CLOCK_EVENTS.items() if mask & bit) or "nothing"
