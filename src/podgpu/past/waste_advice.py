"""Says what to do about the waste of a row of a bill, for `/api/v1/waste` and `podgpu waste`.

The measured savings (`past/savings/`) need a day of history, and leave out what is doubtful. This
is only a hint what to look at, from the figures of the row.
"""

from __future__ import annotations

from podgpu.charge import Waste
from podgpu.past.bills.bill import RangeRow
from podgpu.past.time_steps import HOUR
from podgpu.past.verdict import GOOD_USE

_LEAST_RATIO = 0.1  # of the allocated hours; less is normal
_ALL = 0.995  # of the allocated hours
_LEAST_HOURS = 0.05  # GPU-hours; less is shown as 0.0


def advise_row(row: RangeRow, to: float) -> str:
    """Returns an empty text if little is wasted. `to`: end of the range, as Unix time."""
    if row.hidden or row.unallocated or not row.allocated_hours:
        return ""
    waste = Waste() if row.waste is None else row.waste.hours
    idle = waste.idle or 0.0
    underused = waste.underused or 0.0
    wasted = idle + underused
    if wasted < max(_LEAST_HOURS, _LEAST_RATIO * row.allocated_hours):
        return ""
    if idle >= underused:
        return _advise_idle(row, to, idle)
    return _advise_underused(row)


def _advise_underused(row: RangeRow) -> str:
    if row.mean_use is None or row.mean_use >= GOOD_USE:
        return ""
    if row.gpus == 0:
        return "next time, request less"
    return "look whether it needs so much: a shared GPU or a MIG instance may do"


def _advise_idle(row: RangeRow, to: float, idle_hours: float) -> str:
    if row.idle_since is not None:
        hours = (to - row.idle_since) / HOUR
        length = f"{hours:.0f} h"
        if hours < 1:
            length = "less than 1 h"
        elif hours >= 48:
            length = f"{hours / 24:.0f} days"

        return f"stop it, or ask its owner: idle for {length} now"
    if row.gpus == 0:
        return "nothing now: it holds no GPU any more"
    if idle_hours >= _ALL * row.allocated_hours:
        return "stop it, or ask its owner: it was idle all the time"
    return "let it release its GPUs between its work: it is idle at times"
