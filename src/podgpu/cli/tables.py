"""Writes tables and amounts for the terminal and for text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from podgpu.errors import one_line, utc_text
from podgpu.money import write_decimal
from podgpu.pending.reasons import number

UNKNOWN = "–"
_GAP = "  "


def write_amount(amount: float | None) -> str:
    return UNKNOWN if amount is None else write_decimal(amount)


def count_gpus(gpus: float) -> str:
    """Returns a text such as `1 GPU` or `2.5 GPUs`."""
    return "1 GPU" if gpus == 1 else f"{number(gpus)} GPUs"


def write_period(title: str, start: float, end: float, is_simulated: bool) -> str:
    """Returns the title of an answer about a period."""
    text = f"{title}, {utc_text(start)} to {utc_text(end)}"
    return f"{text} (SIMULATED GPUs)" if is_simulated else text


def write_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    text_columns: int,
    ends_with_text: bool = False,
) -> Iterator[str]:
    """Yields the lines. The first `text_columns` columns are texts. The others are numbers, except
    the last one if the table ends with a text.
    """
    table = [list(header)]
    for row in rows:
        table.append([one_line(cell) for cell in row])

    last = len(header) - 1
    padded = []
    for position, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        is_text = position < text_columns or (ends_with_text and position == last)
        if is_text:
            padded.append([cell.ljust(width) for cell in column])
        else:
            padded.append([cell.rjust(width) for cell in column])

    for cells in zip(*padded, strict=True):
        yield _GAP.join(cells).rstrip()
