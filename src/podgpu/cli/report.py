"""`podgpu report`: prints cost, waste and broken GPUs for a period, from the API of `podgpu
cluster`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

import msgspec

from podgpu.cli.options import make_command
from podgpu.cli.terminal import print_out
from podgpu.decode import find_decoder
from podgpu.errors import SourceError, UsageError, utc_text
from podgpu.fleet.readings import duration_text
from podgpu.fleet.view import decode_view
from podgpu.http_client import HttpClient
from podgpu.past.bill import RangeAnswer, RangeFigures, describe_row, parse_range_query

_TIMEOUT = 90.0  # longer than a query to Prometheus
_TOP_OWNERS = 10
_UNKNOWN = "–"
_EXAMPLE_PRICES = "The prices are examples: set yours with podgpu cluster --prices FILE"
_MORE_THAN_ALL = 1.005  # use from which a pod is shown to use more than its share of a shared GPU
_MARKUP = re.compile(r"[\\`*_~\[\]<>|&@]|:(?=//)|(?<=www)\.", re.IGNORECASE)
"""Matches the characters to escape in Markdown: those of markup, HTML, cells and bare addresses."""
_COLUMNS = (
    *(
        "GPU-hours",
        "Allocated, h",
        "Busy (weighted), h",
        "Idle, h",
        "Waited, h",
        "Use of what it holds",
    ),
    *("Energy, kWh", "Cost", "Wasted"),
)


_Table = tuple[
    str, Sequence[str], Sequence[Sequence[str]]
]  # a table of the report: title, header and rows


@make_command(
    "report",
    (
        "podgpu report --url localhost:9401 --range month --by label:team",
        "the cost of each team in this month",
    ),
    (
        "podgpu report --range 7d --by namespace --format html > report.html",
        "an HTML page to share",
    ),
)
def command(url: str, range: str, by: str, format: str) -> int:
    """Print GPU-hours, energy, cost and waste for a period, the owners with the most idle time, and
    broken GPUs.

    Reads the API of `podgpu cluster`, or of an exporter with --history-dir.
    """
    query = {"range": range, "by": by}
    if range == "month":
        month = (
            datetime.now().astimezone().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        )
        query = {"from": str(month.timestamp()), "by": by}
    try:
        parsed = parse_range_query(query)
    except UsageError as error:
        raise UsageError(f"--{error}") from error  # by='x' becomes --by='x'
    client = HttpClient(url.rstrip("/"), timeout=_TIMEOUT)
    if format == "csv":
        print_out(client.get_blocking("api/v1/range", {**query, "format": "csv"}))
        return 0
    answer, owners = (_read_range(client, {**query, "by": name}) for name in (by, "owner"))
    view = decode_view(client.get_blocking("api/v1/view"))
    broken = [alert.text for alert in view.alerts if alert.severity == "broken"]
    tables = list(_make_tables(answer, owners, broken))
    start = answer.from_ if answer.recorded_from is None else answer.recorded_from
    title = (
        f"GPU report, {utc_text(start)} to "
        f"{utc_text(answer.to)}{' (SIMULATED GPUs)' if answer.simulated else ''}"
    )
    notes = [*((_EXAMPLE_PRICES,) if answer.prices == "example" else ()), *answer.notes]
    covered, asked = 60 * round((answer.to - start) / 60), parsed.seconds
    if range != "month" and abs(covered - asked) > 0.02 * asked:
        why = (
            "older usage is stored in whole hours or days"
            if covered > asked
            else "there are no older records"
        )
        notes.insert(
            0,
            f"The report covers {duration_text(covered)} instead of {duration_text(asked)}: {why}",
        )
    print_out((_write_html if format == "html" else _write_markdown)(title, notes, tables))
    return 0


def _read_range(client: HttpClient, query: dict[str, str]) -> RangeAnswer:
    try:
        return find_decoder(RangeAnswer).decode(client.get_blocking("api/v1/range", query))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = (
            f"{client.shown} returned no valid /api/v1/range: is it the address of podgpu "
            f"cluster? ({error})"
        )
        raise SourceError("malformed", text) from error


def _make_tables(
    answer: RangeAnswer, owners: RangeAnswer, broken: Sequence[str]
) -> Iterator[_Table]:
    columns = [*_COLUMNS[:-2], *(f"{name} {answer.currency}".rstrip() for name in _COLUMNS[-2:])]
    yield "Total", columns, [_cells(answer.totals)]
    nameless = "(no namespace)" if answer.by == "namespace" else "(without this label)"
    rows = [(describe_row(row, nameless), *_cells(row)) for row in answer.rows]
    yield f"By {answer.by}", (answer.by, *columns), rows
    idle = sorted(
        (row for row in owners.rows if row.idle_hours),
        key=lambda row: (-(row.wasted or 0), -row.idle_hours),
    )
    rows = [(describe_row(row), *_cells(row)) for row in idle[:_TOP_OWNERS]]
    yield "Most idle owners", ("owner", *columns), rows
    yield "Broken GPUs now", ("problem",), [(text,) for text in broken]


def _cells(figures: RangeFigures) -> tuple[str, ...]:
    use = figures.mean_use
    return (
        *map(_number, (figures.gpu_hours, figures.allocated_hours)),
        *map(_number, (figures.used_hours, figures.idle_hours, figures.waited_hours)),
        _UNKNOWN
        if use is None
        else f"{use:.0%} of its share"
        if use >= _MORE_THAN_ALL
        else f"{use:.0%}",
        _number(figures.energy_kwh),
        *(
            f"≥ {_number(n)}" if n and figures.unpriced_hours else _number(n)
            for n in (figures.cost, figures.wasted)
        ),
    )


def _number(amount: float | None) -> str:
    return _UNKNOWN if amount is None else f"{amount:,.2f}"


def _write_markdown(title: str, notes: Iterable[str], tables: Iterable[_Table]) -> str:
    lines = [f"# {title}", "", *(f"- {_escape_markdown(note)}" for note in notes)]
    for heading, header, rows in tables:
        lines += ["", f"## {_escape_markdown(heading)}", "", *([] if rows else ["None."])]
        for row in (header, ["---"] * len(header), *rows) if rows else ():
            lines.append(f"| {' | '.join(map(_escape_markdown, row))} |")
    return "\n".join(lines) + "\n"


def _escape_markdown(text: str) -> str:
    """Makes any text one line that is shown as it is: tenants choose the names in a report."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _write_html(title: str, notes: Iterable[str], tables: Iterable[_Table]) -> str:
    def row(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    parts = [
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>',
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.3em .8em;text-align:right}",
        "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#eee}</style>",
        f"<h1>{html.escape(title)}</h1><ul>{''.join(f'<li>{html.escape(note)}</li>' for note in notes)}</ul>",
    ]
    for heading, header, rows in tables:
        body = "".join(row("td", cells) for cells in rows)
        content = f"<table>{row('th', header)}{body}</table>" if body else "<p>None.</p>"
        parts.append(f"<h2>{html.escape(heading)}</h2>{content}")
    return "\n".join(parts) + "\n</html>\n"
