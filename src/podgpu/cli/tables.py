"""Writes tables for the terminal and for text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from podgpu.errors import one_line

UNKNOWN = "–"
_GAP = "  "


def write_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    text_columns: int,
    last_texts: int = 0,
) -> Iterator[str]:
    """Yields the lines. The first `text_columns` columns and the last `last_texts` are texts; the
    others are numbers.
    """
    table = [list(header)]
    for row in rows:
        table.append([one_line(cell) for cell in row])

    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for line in table:
        cells = []
        for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
            is_text = column < text_columns or column >= len(line) - last_texts
            cells.append(cell.ljust(width) if is_text else cell.rjust(width))
        yield _GAP.join(cells).rstrip()
