"""The line of totals: the server's sums, in the page's words, on a terminal of any width."""

from __future__ import annotations

import pytest

from podgpu.cluster.parts import Totals
from podgpu.top.cells import PLAIN, width_of
from podgpu.top.figures import DeviceFigures, FlatView
from podgpu.top.history import History
from podgpu.top.lines import lines_of
from podgpu.top.summary import totals_line
from podgpu.top.table import as_text
from tests.top.scene import TRAINER, holder

ALL = Totals(4, 3.0, 1.0, 1.0, 1.0, 1.0, 1, 110.0, 1.6, 0.8)


def test_all_of_it() -> None:
    line = as_text(totals_line(ALL, "EUR", 200, PLAIN))
    assert line == "3/4 allocated  1 used  1 idle  1 not known  1 free  1 broken  110 W  1.60 EUR/h, 0.80 wasted"


def test_without_prices_there_is_no_money_and_unknown_power_is_not_zero() -> None:
    line = as_text(totals_line(Totals(1, 0.0, 0.0, 0.0, 0.0, 1.0, 0), "", 200, PLAIN))
    assert line == "0/1 allocated  0 used  0 idle  1 free  0 broken  – W"


@pytest.mark.parametrize("width", [10, 40, 60, 80, 100, 132, 200])
def test_what_is_wrong_idle_and_paid_for_stays_longest(width: int) -> None:
    line = totals_line(ALL, "EUR", width, PLAIN)
    assert sum(width_of(part) for part, _ in line) <= width
    if width >= 60:
        for word in ("1 idle", "1 broken", "110 W", "1.60 EUR/h"):
            assert word in as_text(line)


def test_figures_of_a_stale_node_are_not_shown() -> None:
    used = DeviceFigures("GPU-0", 0, "NVIDIA L4", "n", utilization=0.5, power_watts=70.0, holders=(holder(TRAINER),))
    (line, *_) = lines_of(FlatView((used,), old_nodes=frozenset({"n"})), History())
    assert (line.utilization, line.power, line.idle) == (None, None, None)
