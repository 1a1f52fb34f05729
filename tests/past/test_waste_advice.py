"""What `/api/v1/waste` advises for a row."""

from __future__ import annotations

import pytest

from podgpu.charge import Waste
from podgpu.past.bills.bill import RangeRow, RangeWaste
from podgpu.past.waste_advice import advise_row

NOW = 1_000_000.0
HOUR = 3600


def row(idle: float, underused: float | None, **fields: object) -> RangeRow:
    values = {"allocated_hours": 100.0, "mean_use": 0.3, "gpus": 2.0} | fields
    waste = RangeWaste(Waste(idle=idle, underused=underused))
    return RangeRow(namespace="ml", pod="a", waste=waste, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "advice"),
    [
        (row(90, 5, idle_since=round(NOW - 5 * HOUR)), "stop it, or ask its owner: idle for 5 h"),
        (row(90, 5, idle_since=round(NOW - 72 * HOUR)), "idle for 3 days now"),
        (row(90, 5), "let it release its GPUs between its work"),
        (row(99.8, 0), "stop it, or ask its owner: it was idle all the time"),
        (row(90, 5, gpus=0.0), "nothing now: it holds no GPU any more"),
        (row(5, 60), "a shared GPU or a MIG instance may do"),
        (row(5, 60, gpus=0.0), "next time, request less"),
    ],
)
def test_the_larger_part_decides_what_to_do(one: RangeRow, advice: str) -> None:
    assert advice in advise_row(one, NOW)


@pytest.mark.parametrize(
    "one",
    [
        row(3, 6),  # less than a tenth of what it held
        row(0, 30, mean_use=0.7),  # well used
        row(0, 60, mean_use=None),
        row(0, None),
        row(0.02, 0.01, allocated_hours=0.04),  # too short
        RangeRow(unallocated=True, waste=RangeWaste(Waste(unallocated=9.0))),
        RangeRow(hidden=True, allocated_hours=10.0, waste=RangeWaste(Waste(idle=9.0))),
    ],
)
def test_little_waste_needs_nothing(one: RangeRow) -> None:
    assert advise_row(one, NOW) == ""
