"""`podgpu report`: prints cost, waste and broken GPUs for a period.

Reads the API of `podgpu cluster`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import click

from podgpu.cli.bills import (
    COLUMNS,
    RANGE_PATH,
    list_bill_notes,
    make_range_query,
    name_group,
    name_row,
    write_cells,
    write_titles,
)
from podgpu.cli.options import make_command
from podgpu.cli.savings import (
    ADVICE_HEADER,
    SAVINGS_PATH,
    TOTALS_HEADER,
    describe_savings,
    list_notes,
    make_advice,
    make_totals,
)
from podgpu.cli.tables import UNKNOWN, write_amount, write_period
from podgpu.cli.terminal import print_out
from podgpu.cli.view_options import PERIOD_SECONDS, make_at_query, open_view, parse_at
from podgpu.errors import SourceError, utc_text
from podgpu.fleet.settings import duration_text
from podgpu.fleet.view import View, decode_view
from podgpu.metrics.conditions import KUBERNETES_UNHEALTHY, breaks_gpu
from podgpu.past.bills.bill import RangeAnswer, RangeFigures, describe_row
from podgpu.past.bills.token_costs import TokenFigures
from podgpu.past.queries import parse_range
from podgpu.past.savings.savings import SavingsAnswer
from podgpu.view_address import ViewClient, decode_answer, read_answer

_TOP_OWNERS = 10
_SIMILAR_LENGTH = 0.02  # fraction of the period; a smaller difference is not worth a note
_ALL_COLUMNS = tuple(COLUMNS)
_TOKEN_COSTS = (
    "per million tokens",
    "used",
    "waiting",
    "idle",
    "per million of the time used",
    "of these, prompt",
    "generated",
)
_MARKUP = re.compile(r"[\\`*_~\[\]<>|&@]|:(?=//)|(?<=www)\.", re.IGNORECASE)
"""Matches the characters to escape in Markdown: those of markup, HTML, cells and bare addresses."""
_CODE = re.compile("`([^`]+)`")
_STYLE = """<style>
:root { color-scheme: light dark; --even: #eee }
body { font: 16px/1.4 sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em }
h1 { font-size: 1.4em }
h2 { font-size: 1.15em }
div { overflow-x: auto }
table { border-collapse: collapse }
td, th { padding: .3em .8em; text-align: right; vertical-align: top }
td { font-variant-numeric: tabular-nums; white-space: nowrap }
tr { background: Canvas }
tr:nth-child(even) { background: var(--even) }
td:first-child, th:first-child { text-align: left; position: sticky; left: 0; background: inherit }
.prose :is(td, th) { text-align: left; white-space: normal; min-width: 5em; position: static }
@media (max-width: 45em) {
  td, th { padding: .3em .5em }
  td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 8em }
}
@media (prefers-color-scheme: dark) { :root { --even: #2a2a2a } }
</style>"""


class _Table(NamedTuple):
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_prose: bool = False  # sentences of podgpu instead of names and figures


@make_command(
    "report",
    (
        "podgpu report --range month --by label:team",
        "the cost of each team in this month",
    ),
    (
        "podgpu report --range 7d --by namespace --format html > report.html",
        "an HTML page to share",
    ),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Print GPU-hours, energy, cost and waste for a period, the owners with the most idle time, and
    broken GPUs.

    Reads the API of `podgpu cluster`, or of an exporter with --history-dir.
    """
    period = options["range"]
    at = parse_at(options["at"])
    query = make_range_query(period, options["by"], at)

    client = open_view(ctx, PERIOD_SECONDS)
    if options["format"] == "csv":
        print_out(client.get_blocking(RANGE_PATH, {**query, "format": "csv"}))
        return

    answer = _read_range(client, query)
    owners = _read_range(client, {**query, "by": "owner"})
    view = _read_view(client, at)

    start = answer.from_ if answer.recorded_from is None else answer.recorded_from
    title = write_period("GPU report", start, answer.to, answer.simulated)

    notes = []
    if period != "month":
        notes += _explain_length(answer.to - start, parse_range(period))
    notes += list_bill_notes(answer)

    tables = _make_tables(answer, owners)
    if view is None:
        notes.append("Which GPUs were broken at that time is not recorded")
    else:
        tables += _make_health_tables(view, at)
    if answer.totals.tokens is not None:
        models = _read_range(client, {**query, "by": "model"})
        tables.append(_make_token_table(models))
    if at is None:
        # Savings are about the pods of now.
        tables += _make_savings_tables(client, period)

    write = _write_html if options["format"] == "html" else _write_markdown
    print_out(write(title, notes, tables))


def _read_view(client: ViewClient, at: float | None) -> View | None:
    """Returns None if there is no record of this time. Bills go further back."""
    try:
        return decode_view(client.get_blocking("api/v1/view", make_at_query(at)))
    except SourceError as error:
        if at is None or error.reason != "http_400":
            raise
        return None


def _make_health_tables(view: View, at: float | None) -> list[_Table]:
    if at is None:
        title = "Broken GPUs now"
        texts = _list_broken(view)
    else:
        title = f"Broken GPUs at {utc_text(at)}"
        texts = _list_broken_in_past(view)
    tables = [_list_texts(title, "Problem", texts)]
    only_kubernetes = _list_kubernetes_unhealthy(view)
    if only_kubernetes:
        tables.append(_list_texts("Only Kubernetes calls them unhealthy", "GPU", only_kubernetes))
    return tables


def _list_texts(title: str, header: str, texts: Iterable[str]) -> _Table:
    return _Table(title, [header], [[text] for text in texts], is_prose=True)


def _read_range(client: ViewClient, query: dict[str, str]) -> RangeAnswer:
    return read_answer(client, RANGE_PATH, RangeAnswer, query)


def _make_savings_tables(client: ViewClient, period: str) -> list[_Table]:
    """Returns no table if the server is too old, or has no history of single pods."""
    # Savings are computed for one to eight days. Other periods of a report get the default.
    days = "24h" if period == "24h" else "7d"
    try:
        body = client.get_blocking(SAVINGS_PATH, {"range": days})
    except SourceError:
        return []

    savings = decode_answer(body, SAVINGS_PATH, SavingsAnswer, client.shown)
    title = write_period("Savings", savings.from_, savings.to, is_simulated=False)
    texts = describe_savings(savings) + list_notes(savings)
    tables = [_list_texts(title, "In short", texts)]
    if not savings.advice:
        return tables

    reasons = []
    for line in savings.advice:
        reasons.append([line.kind, line.says, line.assumes, line.falsified_by])
    header = ["Do", "Why", "Assumes", "Falsified by"]
    tables.append(_Table("Before and after", TOTALS_HEADER, make_totals(savings)))
    tables.append(_Table("What could be given back", ADVICE_HEADER, make_advice(savings)))
    tables.append(_Table("Why", header, reasons, is_prose=True))
    return tables


def _list_broken(view: View) -> list[str]:
    """Returns what is wrong now with the GPUs that the page counts as broken, and with nodes."""
    broken = _find_gpus(view, breaks_gpu)
    texts = []
    for alert in view.alerts:
        # An alert about a job compares GPUs that work.
        if alert.severity == "broken" or (alert.uuid in broken and not alert.job):
            texts.append(alert.text)
    return texts


def _list_broken_in_past(view: View) -> list[str]:
    """Like `_list_broken`, for a view of the past. It has no alerts."""
    texts = []
    for node in view.nodes:
        for gpu in node.gpus:
            for each in gpu.conditions:
                if breaks_gpu(each.condition):
                    texts.append(f"GPU {gpu.index} of {node.name} ({gpu.uuid}): {each.says}")
    return texts


def _list_kubernetes_unhealthy(view: View) -> list[str]:
    """Returns the alerts about GPUs that only Kubernetes calls unhealthy."""
    uuids = _find_gpus(view, lambda condition: condition == KUBERNETES_UNHEALTHY)
    return [alert.text for alert in view.alerts if alert.uuid in uuids and not alert.job]


def _find_gpus(view: View, is_wanted: Callable[[str], bool]) -> set[str]:
    """Returns the UUIDs of the GPUs with such a condition."""
    uuids = set()
    for node in view.nodes:
        for gpu in node.gpus:
            if any(is_wanted(each.condition) for each in gpu.conditions):
                uuids.add(gpu.uuid)
    return uuids


def _explain_length(covered: float, requested: float) -> list[str]:
    """Returns a note if the report does not cover the requested time. Both are in seconds."""
    covered = 60 * round(covered / 60)
    if abs(covered - requested) <= _SIMILAR_LENGTH * requested:
        return []
    why = "there are no older records"
    if covered > requested:
        why = "older usage is stored in whole hours or days"
    lengths = f"{duration_text(covered)} instead of {duration_text(requested)}"
    return [f"The report covers {lengths}: {why}"]


def _make_tables(answer: RangeAnswer, owners: RangeAnswer) -> list[_Table]:
    columns = write_titles(_ALL_COLUMNS, answer.currency)
    group = name_group(answer)
    rows = [[name_row(answer, row), *write_cells(_ALL_COLUMNS, row)] for row in answer.rows]

    idle = [row for row in owners.rows if row.idle_hours]
    idle.sort(key=lambda row: (row.wasted or 0, row.idle_hours), reverse=True)
    idle_rows = []
    for row in idle[:_TOP_OWNERS]:
        idle_rows.append([describe_row(row), *write_cells(_ALL_COLUMNS, row)])

    return [
        _Table("Total", columns, [write_cells(_ALL_COLUMNS, answer.totals)]),
        _Table(f"By {group}", [group.capitalize(), *columns], rows),
        _Table("Most idle owners", ["Owner", *columns], idle_rows),
    ]


def _make_token_table(models: RangeAnswer) -> _Table:
    cost = f"Cost {models.currency}".rstrip()
    columns = ["Model", "Prompt tokens", "Generated tokens", "J per token"]
    columns += [f"{cost}, {part}" for part in _TOKEN_COSTS]
    rows = []
    for row in models.rows:
        if row.tokens is not None:
            rows.append([describe_row(row), *_make_token_cells(row, row.tokens)])
    return _Table("Tokens", columns, rows)


def _make_token_cells(row: RangeFigures, tokens: TokenFigures) -> list[str]:
    joules = UNKNOWN
    if tokens.joules_per_token is not None:
        joules = f"{tokens.joules_per_token:.3g}"
    # In the order of `_TOKEN_COSTS`.
    costs: list[float | None] = []
    parts = tokens.cost_per_million
    if parts is None:
        costs += [None, None, None, None]
    else:
        costs += [parts.total, parts.used, parts.waiting, parts.idle]
    costs.append(tokens.cost_per_million_at_use)
    split = tokens.per_million
    if split is None:
        costs += [None, None]
    else:
        costs += [split.prompt_cost, split.generated_cost]

    cells = [f"{row.prompt_tokens or 0:,}", f"{row.generated_tokens or 0:,}", joules]
    cells += map(write_amount, costs)
    return cells


def _write_markdown(title: str, notes: Iterable[str], tables: Iterable[_Table]) -> str:
    lines = [f"# {title}", ""]
    lines += [f"- {_escape_markdown(note)}" for note in notes]
    for table in tables:
        lines += ["", f"## {_escape_markdown(table.title)}", ""]
        if not table.rows:
            lines.append("None.")
            continue
        lines.append(_write_markdown_row(table.header))
        lines.append("| --- " * len(table.header) + "|")
        lines += [_write_markdown_row(row) for row in table.rows]
    return "\n".join(lines) + "\n"


def _write_markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escape_markdown, cells))} |"


def _escape_markdown(text: str) -> str:
    """Makes any text one line that is shown as it is: tenants choose the names in a report."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _write_html(title: str, notes: Iterable[str], tables: Iterable[_Table]) -> str:
    heading = html.escape(title)
    parts = [
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{heading}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        _STYLE,
        f"<main><h1>{heading}</h1><ul>{_write_prose('li', notes)}</ul>",
    ]
    parts += map(_write_html_table, tables)
    return "\n".join(parts) + "\n</main></html>\n"


def _write_html_table(table: _Table) -> str:
    name = html.escape(table.title)
    title = f"<h2>{name}</h2>"
    if not table.rows:
        return f"{title}<p>None.</p>"

    write = _write_prose if table.is_prose else _write_elements
    rows = [f"<tr>{_write_elements('th', table.header)}</tr>"]
    rows += [f"<tr>{write('td', row)}</tr>" for row in table.rows]
    kind = ' class="prose"' if table.is_prose else ""
    content = f"<table{kind}>{''.join(rows)}</table>"
    # The keyboard can scroll a wide table.
    return f'{title}<div tabindex="0" role="region" aria-label="{name}">{content}</div>'


def _write_elements(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _write_prose(tag: str, texts: Iterable[str]) -> str:
    """Like `_write_elements`, for sentences of podgpu, which may contain `commands`."""
    return _CODE.sub(r"<code>\1</code>", _write_elements(tag, texts))
