"""The line of totals: the sums of figures/totals.py, in the page's words, on a terminal of any width."""

from __future__ import annotations

import re

import pytest

from podgpu.figures.device import Condition, DeviceFigures, View
from podgpu.figures.totals import totals_of_devices
from podgpu.top.cells import PLAIN, width_of
from podgpu.top.history import History
from podgpu.top.lines import flatten, lines_of
from podgpu.top.summary import totals_line, totals_of_view
from podgpu.top.table import Printed, as_text
from tests.top.scene import BATCH, SERVER, TRAINER, holder

LOST = Condition.of("lost", 900.0)
USED = DeviceFigures(
    "GPU-0", 0, "NVIDIA L4", "n", utilization=0.5, power_watts=70.0, holders=(holder(TRAINER, cost_per_hour=0.8),)
)
IDLE = DeviceFigures(
    "GPU-1", 1, "NVIDIA L4", "n", utilization=0.0, power_watts=20.0, holders=(holder(SERVER, cost_per_hour=0.8),)
)
AWAY = DeviceFigures(
    "GPU-2", 2, "NVIDIA L4", "n", utilization=0.9, conditions=(LOST,), present=False, holders=(holder(BATCH),)
)
FREE = DeviceFigures("GPU-3", 3, "NVIDIA L4", "n", utilization=0.0, power_watts=20.0)
ALL = View((USED, IDLE, AWAY, FREE), currency="EUR")


def text(view: View, width: int = 200) -> str:
    return as_text(drawn(view, width))


def drawn(view: View, width: int) -> Printed:
    return totals_line(totals_of_view(view), view.currency, width, PLAIN)


def test_all_of_it() -> None:
    assert text(ALL) == ("3/4 allocated  1 used  1 idle  1 not known  1 free  1 broken  110 W  1.60 EUR/h, 0.80 wasted")


def test_they_are_the_totals_of_the_page() -> None:
    totals = totals_of_devices(ALL.devices, priced=True)
    numbers = [float(number) for number in re.findall(r"[\d.]+", text(ALL))]
    assert numbers == [
        *(totals.allocated, totals.gpus, totals.used, totals.idle, totals.unknown, totals.free),
        *(totals.broken, totals.power_watts, totals.cost_per_hour, totals.wasted_per_hour),
    ]


def test_without_prices_there_is_no_money_and_nothing_known_of_the_power_is_no_zero() -> None:
    assert text(View((DeviceFigures("GPU-0", 0),))) == "0/1 allocated  0 used  0 idle  1 free  0 broken  – W"


@pytest.mark.parametrize("width", [10, 40, 60, 80, 100, 132, 200])
def test_what_is_wrong_idle_and_paid_for_stays_longest(width: int) -> None:
    line = drawn(ALL, width)
    assert sum(width_of(part) for part, _ in line) <= width
    if width >= 60:
        for word in ("1 idle", "1 broken", "110 W", "1.60 EUR/h"):
            assert word in as_text(line)


def test_an_old_nodes_use_is_not_known() -> None:
    old = View((USED, FREE), old_nodes=frozenset({"n"}))
    assert text(old) == "1/2 allocated  0 used  0 idle  1 not known  1 free  0 broken  – W"
    (line, *_) = lines_of(old, History())
    assert (line.utilization, line.power, line.idle) == (None, None, None)


def test_mig_instances_are_parts_of_a_gpu_and_it_has_their_mean() -> None:
    """By compute slices, as on the page: three sevenths at 0.8 and one at 0.0 are 0.6."""
    large = DeviceFigures("GPU-0", 0, "NVIDIA H100", "n", "1", "3g.40gb", utilization=0.8, holders=(holder(TRAINER),))
    small = DeviceFigures("GPU-0", 0, "NVIDIA H100", "n", "7", "1g.10gb", utilization=0.0)
    view = View((large, small))
    assert text(view).startswith("0.43/1 allocated  0.43 used  0 idle  0.57 free")
    (line, *_) = (line for _, line in flatten(lines_of(view, History())))
    assert line.utilization == pytest.approx(0.6)
