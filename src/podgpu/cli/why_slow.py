"""The part of `podgpu why` for a pod that runs or has ended: why is it slow?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

from podgpu.cli.tables import count_gpus
from podgpu.errors import SourceError, UsageError, few_of, one_line
from podgpu.fleet.pod_list import PodsResponse
from podgpu.past.job import JobSummary
from podgpu.past.slow_checks import CheckState
from podgpu.top.table import format_duration
from podgpu.view_address import ViewClient, decode_answer, read_answer

_PODS_PATH = "api/v1/pods"
_NO_RECORD = "http_404"
_WORDS: dict[CheckState, str] = {
    "found": "YES",
    "none": "no",
    "not_measured": "not measured",
    "not_applicable": "does not apply",
}


class ReasonsAnswer(NamedTuple):
    body: bytes  # JSON
    lines: Iterator[str]


def explain_slow(client: ViewClient, namespace: str, pod: str) -> ReasonsAnswer:
    """`namespace`: empty if not given. Raises SourceError if the pod has held no GPU."""
    if not namespace:
        namespace = _find_namespace(client, pod)
    path = f"api/v1/summary/{quote(namespace, safe='')}/{quote(pod, safe='')}"
    try:
        body = client.get_blocking(path)
    except SourceError as error:
        if error.reason == _NO_RECORD:
            message = f"{namespace}/{pod} is not pending, and why it may be slow is not known: "
            raise SourceError("not_pending", message + str(error)) from error
        raise
    summary = decode_answer(body, path, JobSummary, client.shown)
    return ReasonsAnswer(body, _write_slow(summary))


def _find_namespace(client: ViewClient, pod: str) -> str:
    """Returns the namespace of the pod of this name that holds a GPU now."""
    answer = read_answer(client, _PODS_PATH, PodsResponse)
    names = sorted({row.namespace for row in answer.pods if row.pod == pod})
    if len(names) > 1:
        raise UsageError(f"{len(names)} namespaces have a pod {pod} ({few_of(names)}): give -n")
    if not names:
        raise SourceError(
            "not_pending",
            f"{pod} is not pending and holds no GPU now: for a pod that has ended, give -n; for"
            " others, check the name, and that you may see it",
        )
    return names[0]


def _write_slow(summary: JobSummary) -> Iterator[str]:
    if summary.simulated:
        yield "SIMULATED GPUs"
    yield one_line(_write_head(summary))
    if not summary.checks:
        yield "This podgpu says nothing about what slowed it down: update podgpu cluster."
        return
    yield one_line(summary.why_slow)
    yield ""
    width = max(len(_WORDS[check.state]) for check in summary.checks)
    for check in summary.checks:
        word = _WORDS[check.state]
        yield f"{word:{width}}  {one_line(check.title)}: {one_line(check.says)}."
        if check.do:
            todo = "To do" if check.state == "found" else "To measure it"
            yield f"{'':{width}}  {todo}: {one_line(check.do)}."
    if summary.hint:
        yield ""
        yield one_line(summary.hint)


def _write_head(summary: JobSummary) -> str:
    owner = f" ({summary.owner.text})" if summary.owner else ""
    gpus = count_gpus(summary.gpus)
    if summary.shared:
        gpus = f"a part of {gpus}"
    verb = "has held" if summary.to is None else "held"
    place = f" of {few_of(summary.nodes, 3)}" if any(summary.nodes) else ""
    length = format_duration(summary.duration_seconds)
    return f"{summary.namespace}/{summary.pod}{owner} {verb} {gpus}{place} for {length}"
