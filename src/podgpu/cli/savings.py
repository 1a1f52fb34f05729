"""`podgpu savings`: prints which GPUs could be given back, and what the pods would notice.

Reads the API of `podgpu cluster`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from podgpu.cli.options import make_command
from podgpu.cli.tables import UNKNOWN, count_gpus, write_amount, write_period, write_table
from podgpu.cli.view_options import PERIOD_SECONDS, open_view, print_answer
from podgpu.errors import UsageError, one_line, plural
from podgpu.known import divide_known
from podgpu.money import write_money
from podgpu.past.bills.bill import describe_owner
from podgpu.past.savings.savings import (
    Advice,
    Monthly,
    PodAdvice,
    SavingsAnswer,
    name_pod,
    parse_savings_query,
)
from podgpu.pending.reasons import number

SAVINGS_PATH = "api/v1/savings"
_GIB = 1024**3
TOTALS_HEADER = ("Per month", "GPUs", "GPU-hours", "Cost")
ADVICE_HEADER = (
    "Do",
    "Pods",
    "Then",
    "GPUs",
    "Cost in this time",
    "Saves GPUs",
    "GPU-hours per month",
    "Saved per month",
)
_PODS_HEADER = (
    "Do",
    "Pod",
    "Owner",
    "Node",
    "GPUs",
    "Busy GPUs",
    "Peak",
    "Wait",
    "Slowdown",
    "In the worst 5 min",
    "Memory, GiB",
    "Idle, h",
)


@make_command(
    "savings",
    ("podgpu savings", "what could be given back, from the last 7 days"),
    ("podgpu savings --range 2d --slowdown 1.1", "let pods share only if they notice little"),
    ("podgpu savings -o csv > savings.csv", "one row per pod, for a spreadsheet"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Print which GPUs could be given back, and what the pods would notice: pods to stop, to
    shrink, or to put on a shared GPU, and free GPUs to bring together.

    Reads the API of `podgpu cluster`. Nothing is changed.
    """
    query = {name: options[name] for name in ("range", "slowdown", "idle")}
    try:
        parse_savings_query(query)
    except UsageError as error:
        # range='x' becomes --range='x'
        raise UsageError(f"--{error}") from error

    client = open_view(ctx, PERIOD_SECONDS)
    print_answer(client, SAVINGS_PATH, query, options["output"], SavingsAnswer, _write)


def describe_savings(answer: SavingsAnswer) -> list[str]:
    """Returns the result in sentences. Compares predictions with pods that share already."""
    totals = answer.totals
    result = (
        f"{number(totals.saved.gpus)} of {number(totals.before.gpus)} GPUs that pods hold could"
        f" be given back: {_describe_monthly(totals.saved, answer.currency)} per month."
    )
    if totals.packed_gpus:
        result += f" Moves would bring {plural(totals.packed_gpus, 'free GPU')} together."
    if answer.prediction_error_ratio is None:
        return [result]

    shared = (
        f"{plural(len(answer.shared), 'pod')} share GPUs already. Their waiting time was predicted"
        f" with a mean error of {100 * answer.prediction_error_ratio:.1f} points."
    )
    return [result, shared]


def make_totals(answer: SavingsAnswer) -> list[list[str]]:
    """Returns the rows below `TOTALS_HEADER`: before, what each kind saves, and after."""
    totals = answer.totals
    rows = [["now", *_write_monthly(totals.before)]]
    for row in answer.kinds:
        # Packing only brings free GPUs together.
        if row.lines and row.kind != "pack":
            rows.append([f"{row.kind} saves", *_write_monthly(row.saved)])
    rows.append(["left", *_write_monthly(totals.after)])
    return rows


def _write_monthly(monthly: Monthly) -> list[str]:
    return [number(monthly.gpus), f"{monthly.gpu_hours:,.1f}", write_amount(monthly.cost)]


def make_advice(answer: SavingsAnswer) -> list[list[str]]:
    """Returns the rows below `ADVICE_HEADER`."""
    rows = []
    for line in answer.advice:
        names = ", ".join(name_pod(pod) for pod in line.pods)
        then = line.target
        if not then and line.kind == "stop":
            then = "no GPU"
        before = [number(line.gpus_before), write_amount(line.cost)]
        rows.append([line.kind, names, then, *before, *_write_monthly(line.saved)])
    return rows


def _write_pod(line: Advice, pod: PodAdvice) -> list[str]:
    owner = describe_owner(pod.owner) or UNKNOWN
    node = f"{pod.node} → {pod.to_node}" if pod.to_node else pod.node
    wait_percent = None if pod.wait is None else 100 * pod.wait
    peak_gib = divide_known(pod.peak_memory_bytes, _GIB)
    idle_hours = divide_known(pod.idle_seconds, 3600)
    return [
        line.kind,
        name_pod(pod),
        owner,
        node,
        number(pod.gpus),
        _write_known(pod.busy, "{:.3f}"),
        _write_known(pod.peak_busy, "{:.3f}"),
        _write_known(wait_percent, "{:.1f} %"),
        _write_known(pod.slowdown, "{:.2f}"),
        _write_known(pod.worst_slowdown, "{:.2f}"),
        _write_known(peak_gib, "{:.1f}"),
        _write_known(idle_hours, "{:.0f}"),
    ]


def _write_known(value: float | None, pattern: str) -> str:
    return UNKNOWN if value is None else pattern.format(value)


def list_notes(answer: SavingsAnswer) -> list[str]:
    """Returns what the answer does not include, as sentences."""
    notes = list(answer.notes)
    for row in answer.left_out:
        pods = plural(row.pods, "pod")
        notes.append(f"in no line: {pods}, {count_gpus(row.gpus)}: {row.says}")
    return notes


def _write(answer: SavingsAnswer) -> Iterator[str]:
    yield write_period("Savings", answer.from_, answer.to, answer.simulated)
    yield from describe_savings(answer)
    for note in list_notes(answer):
        yield f"- {one_line(note)}"

    if not answer.advice:
        return
    yield ""
    yield from write_table(TOTALS_HEADER, make_totals(answer), text_columns=1)
    yield ""
    yield from write_table(ADVICE_HEADER, make_advice(answer), text_columns=3)
    yield ""
    pods = []
    for line in answer.advice:
        pods += [_write_pod(line, pod) for pod in line.pods]
    yield from write_table(_PODS_HEADER, pods, text_columns=4)
    yield ""
    for place, line in enumerate(answer.advice, 1):
        yield f"{place}. {line.kind}: {one_line(line.says)}"
        yield f"   Assumes: {one_line(line.assumes)}"
        yield f"   Falsified by: {one_line(line.falsified_by)}"


def _describe_monthly(monthly: Monthly, currency: str) -> str:
    text = f"{monthly.gpu_hours:,.1f} GPU-hours"
    if monthly.cost is not None and currency:
        text += f" and {write_money(monthly.cost, currency)}"
    return text
