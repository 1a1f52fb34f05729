"""`podgpu why`: prints why pods that request GPUs are pending, or why a pod that runs is slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from podgpu.cli.options import make_command
from podgpu.cli.tables import count_gpus, write_table
from podgpu.cli.terminal import print_lines, print_out
from podgpu.cli.view_options import open_view
from podgpu.cli.why_slow import ReasonsAnswer, explain_slow
from podgpu.errors import SourceError, UsageError, few_of, one_line, plural
from podgpu.money import write_money
from podgpu.pending.cluster_index import FreeGpus
from podgpu.pending.idle_pods import IdlePod
from podgpu.pending.queue import QueueAnswer, QueuedPod, QueueGroup, UnblockView
from podgpu.pending.reasons import number
from podgpu.top.table import format_duration
from podgpu.view_address import ViewClient, decode_answer

_PATH = "api/v1/queue"
_TIMEOUT = 60.0
_QUEUE = ("Pods", "GPUs", "Oldest pod", "Waits for", "Needs", "Why")
_FREE = ("Resource", "Model", "Free", "Total", "Most on a node", "Nodes", "Free on closed nodes")
_NAMED = 3


@make_command(
    "why",
    ("podgpu why", "all pods that wait for GPUs, grouped by reason"),
    ("podgpu why train-7 -n research", "one pod: why it is pending or, if it runs, slow"),
)
@click.argument("pod", metavar="[POD]", required=False)
@click.pass_context
def command(ctx: click.Context, /, pod: str | None, **options: Any) -> None:
    """Print why a pod that requests GPUs is pending, and which idle pods could make room. If it
    runs or has ended, print what slowed it down, what did not, and what was not measured.

    Without POD, prints all pods that wait. Reads the API of `podgpu cluster`, with --queue for
    pods that wait.
    """
    namespace = options["namespace"]
    name = ""
    if pod is not None:
        prefix, slash, name = pod.rpartition("/")
        if not name or "/" in prefix:
            raise UsageError(f"'{pod}' is no pod: write POD or NAMESPACE/POD")
        if slash and namespace and namespace != prefix:
            raise UsageError(f"{pod} and --namespace {namespace} contradict each other")
        if slash:
            namespace = prefix

    client = open_view(ctx, _TIMEOUT)
    explanation = _explain_pending(client, namespace, name)
    if explanation is None:
        explanation = explain_slow(client, namespace, name)

    if options["output"] == "json":
        print_out(explanation.body + b"\n")
    else:
        print_lines(explanation.lines)


def _explain_pending(client: ViewClient, namespace: str, pod: str) -> ReasonsAnswer | None:
    """Returns None if the pod is not pending. Without a pod, explains the whole queue."""
    query = {}
    if namespace:
        query["ns"] = namespace
    if pod:
        query["pod"] = pod
    try:
        body = client.get_blocking(_PATH, query)
    except SourceError as error:
        # Without --queue, the server has no queue, but knows pods that run.
        if pod and error.reason == "http_404":
            return None
        raise

    answer = decode_answer(body, _PATH, QueueAnswer, client.shown)
    if not pod:
        return ReasonsAnswer(body, _write_queue(answer))
    if not answer.groups:
        return None
    return ReasonsAnswer(body, _write_pods(answer))


def _write_notes(answer: QueueAnswer) -> Iterator[str]:
    if answer.simulated:
        yield "SIMULATED GPUs"
    for note in answer.notes:
        yield f"- {one_line(note)}"


def _write_queue(answer: QueueAnswer) -> Iterator[str]:
    yield from _write_notes(answer)
    verb = "waits" if answer.pods == 1 else "wait"
    yield f"{plural(answer.pods, 'pod')} {verb} for {number(answer.gpus)} GPUs."

    if answer.hidden_pods:
        hidden = plural(answer.hidden_pods, "pod")
        yield f"{hidden} of them in namespaces that you may not see."

    if answer.free:
        yield ""
        free = [_write_free(row) for row in answer.free]
        yield from write_table(_FREE, free, text_columns=2)

    if answer.groups:
        yield ""
        rows = [_write_group(group, answer.taken_at) for group in answer.groups]
        yield from write_table(_QUEUE, rows, text_columns=len(_QUEUE))

    if answer.omitted_groups:
        yield f"and {plural(answer.omitted_pods, 'pod')} for other reasons"


def _write_free(row: FreeGpus) -> list[str]:
    figures = [row.free, row.total, row.largest, row.nodes, row.closed]
    return [row.resource, row.model, *map(number, figures)]


def _write_group(group: QueueGroup, now: float) -> list[str]:
    oldest = group.examples[0]  # the server sorts them by age
    return [
        str(group.pods),
        number(group.gpus),
        _name_pod(oldest),
        format_duration(max(0.0, now - group.since)),
        _name_needs(group),
        group.reasons[0].says,
    ]


def _name_needs(group: QueueGroup) -> str:
    return ", ".join(need.says for need in group.needs)


def _write_pods(answer: QueueAnswer) -> Iterator[str]:
    """Writes each group in full: several pods of different namespaces may have the name."""
    yield from _write_notes(answer)
    for group in answer.groups:
        for pod in group.examples:
            yield _write_head(pod, group, answer.taken_at)
        yield from _write_reasons(group)
        yield from _write_unblock(group.unblock, answer)

        if group.message:
            speaker = "Kueue" if group.examples[0].kind else "The scheduler"
            yield f"{speaker} says: {one_line(group.message)}"


def _write_head(pod: QueuedPod, group: QueueGroup, now: float) -> str:
    name = _name_pod(pod)
    if pod.owner:
        name += f" ({pod.owner.text})"

    since = format_duration(max(0.0, now - pod.since))
    needs = _name_needs(group) or "no resources"
    if pod.kind:
        pods = plural(pod.pods, "pod")
        return one_line(f"{name} has had {pods} held back for {since}; each needs {needs}")
    return one_line(f"{name} has been pending for {since}: {needs}")


def _name_pod(pod: QueuedPod) -> str:
    """Returns NAMESPACE/POD, or the kind and name of the object that stands for pods."""
    name = f"{pod.namespace}/{pod.pod}"
    return f"{pod.kind} {name}" if pod.kind else name


def _write_reasons(group: QueueGroup) -> Iterator[str]:
    for place, reason in enumerate(group.reasons, 1):
        yield f"{place}. {one_line(reason.says)}"
        if reason.do:
            yield f"   {one_line(reason.do)}"


def _write_unblock(nodes: Sequence[UnblockView], answer: QueueAnswer) -> Iterator[str]:
    if nodes:
        yield "Idle pods. It would fit if all pods of one line ended:"
    for node in nodes:
        names = few_of((_name_idle(pod, answer.taken_at) for pod in node.pods), _NAMED)
        cost = ""
        if node.cost_per_hour is not None:
            cost = f", {write_money(node.cost_per_hour, answer.currency)}/h"
        yield one_line(f"- {node.node}: {names}{cost}")


def _name_idle(pod: IdlePod, now: float) -> str:
    name = f"{pod.namespace}/{pod.pod}"
    if pod.hidden:
        name = "a pod that you may not see"
    owner = f" ({pod.owner.text})" if pod.owner else ""
    seconds = max(0.0, now - pod.idle_since)
    return f"{name}{owner}, {count_gpus(pod.gpus)} idle for {format_duration(seconds)}"
