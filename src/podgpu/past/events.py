"""Lists events: conditions of GPUs that began or ended, pods that started or ended, idle alarms.

`make_events` makes them of spans, which `sqlite_events.py` or `prometheus_events.py` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import msgspec

from podgpu.errors import UsageError, few_of
from podgpu.metrics.conditions import DRIVER_AWAY, NODE_GONE, conditions
from podgpu.past.queries import parse_range, parse_time
from podgpu.past.spans import HOLDER, IDLE, Span

MOST_EVENTS = 1000
MAX_SPANS = 20_000
_NODE_WIDE = (NODE_GONE, DRIVER_AWAY)
_SELECTORS = ("gpu", "node", "pod")


class EventQuery(NamedTuple):
    """Selects events. If `selector` is empty, selects all. A pod is written `NAMESPACE/POD`."""

    seconds: int  # before `end`
    selector: str = ""
    value: str = ""
    end: float | None = None  # Unix time; None: now


class Event(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An event of a GPU or pod. `kind` is started, ended, recovered, or the name of a condition."""

    at: float
    kind: str
    condition: str = ""  # which condition ended, if `kind` is recovered
    text: str
    seconds: float | None = None  # how long the condition lasted, or the pod ran
    node: str = ""
    uuid: str = ""  # empty if the event concerns several GPUs
    namespace: str = ""
    pod: str = ""


class EventsAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The response of `/api/v1/events`. Events are sorted by time, newest first."""

    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    truncated: bool = False  # True if older events in the range were omitted
    events: list[Event]


def parse_events_query(query: Mapping[str, str]) -> EventQuery:
    selectors = [name for name in _SELECTORS if name in query]
    if len(selectors) > 1:
        raise UsageError(f"{' and '.join(selectors)}: give only one of gpu, node and pod")

    seconds = parse_range(query.get("range", "24h"))
    end = parse_time(query, "to")
    if not selectors:
        return EventQuery(seconds, end=end)
    [selector] = selectors
    return EventQuery(seconds, selector, query[selector], end)


def _condition_events(spans: Iterable[Span]) -> Iterator[Event]:
    conditions = [span for span in spans if span.kind != HOLDER]
    for started, group in _group(conditions, lambda span: span.started):
        yield _condition_event(started, group)

    # The end of an idle time is not a recovery.
    faults = [span for span in conditions if span.name != IDLE]
    for ended, group in _group(faults, lambda span: span.ended):
        event = _condition_event(ended, group)
        event.condition = event.kind
        event.kind = "recovered"
        event.text = _recovery_text(group)
        event.seconds = _length(group[0].started, ended)
        yield event


def _pod_events(spans: Sequence[Span], known_since: float) -> Iterator[Event]:
    for run, ended in _find_runs(spans):
        started = run[0].started
        if started >= known_since:
            yield _pod_event("started", started, run)
        if ended < math.inf:
            yield _pod_event("ended", ended, run, _length(started, ended))


def make_events(
    spans: Sequence[Span], start: float, end: float, known_since: float
) -> EventsAnswer:
    """Returns the events from `start` to `end`. The spans must be the newest `MAX_SPANS` of these.

    It is unknown when the pods of the first reading started. So pods that started before
    `known_since` have no event of their start.
    """
    events = []
    for event in chain(_condition_events(spans), _pod_events(spans, known_since)):
        if start <= event.at <= end:
            events.append(event)

    events.sort(key=lambda event: (-event.at, event.text))

    return EventsAnswer(
        from_=start,
        to=end,
        truncated=len(events) > MOST_EVENTS or len(spans) == MAX_SPANS,
        events=events[:MOST_EVENTS],
    )


def _find_runs(spans: Sequence[Span]) -> Iterator[tuple[list[Span], float]]:
    """Yields the spans and end of each uninterrupted run of a pod.

    An unreachable node does not interrupt a run.
    """
    # Node and start of its absence -> end of its absence.
    absences: dict[tuple[str, float | None], float] = {}
    held = []
    for span in spans:
        if span.kind == HOLDER:
            held.append(span)
        elif span.name == NODE_GONE:
            absences[span.node, span.started] = _end_of(span)

    held.sort(key=lambda span: (span.account, span.node, span.started))
    for _, spans_of_pod in groupby(held, lambda span: (span.account, span.node)):
        run: list[Span] = []
        run_end = 0.0
        for span in spans_of_pod:
            if run and span.started > run_end:
                yield run, run_end
                run = []

            # If the node went away at the end of the span, the run lasts until it is back.
            span_end = absences.get((span.node, span.ended), _end_of(span))
            run_end = max(run_end, span_end)
            run.append(span)

        yield run, run_end


def _end_of(span: Span) -> float:
    return math.inf if span.ended is None else span.ended


def _length(started: float, ended: float) -> float | None:
    if math.isinf(started):
        return None
    return ended - started


def _group(
    spans: Iterable[Span], time_of: Callable[[Span], float | None]
) -> Iterator[tuple[float, list[Span]]]:
    """Yields the time and the spans of each event. Omits spans without this time.

    A condition of a whole node is one event of all its GPUs.
    """

    def key(span: Span) -> tuple[Any, ...]:
        condition = (span.uuid, span.name)
        if span.name in _NODE_WIDE:
            condition = (span.name, span.message)
        return time_of(span), span.node, condition

    known = [span for span in spans if time_of(span) is not None]
    known.sort(key=key)
    for (time, *_), members in groupby(known, key):
        yield time, list(members)


def _pod_event(kind: str, at: float, spans: list[Span], seconds: float | None = None) -> Event:
    first = spans[0]
    gpus = sorted({span.gpu for span in spans})
    names = few_of(gpus, most=8)
    pod = "/".join(filter(None, (first.namespace, first.workload)))

    return Event(
        at=at,
        kind=kind,
        text=f"{pod} {kind} on GPU {names} of {first.node}",
        seconds=seconds,
        node=first.node,
        uuid=first.uuid if len(gpus) == 1 else "",
        namespace=first.namespace,
        pod=first.pod,
    )


def _condition_event(at: float, spans: list[Span]) -> Event:
    first = spans[0]
    gpus = {span.uuid for span in spans}

    return Event(
        at=at,
        kind=first.name,
        text=f"{_name_gpus(spans)}: {first.message}",
        node=first.node,
        uuid=first.uuid if len(gpus) == 1 else "",
        namespace=first.namespace,
        pod=first.pod,
    )


def _recovery_text(spans: list[Span]) -> str:
    first = spans[0]
    past_condition = first.message
    spec = conditions().get(first.name)
    if spec:
        past_condition = spec.was
    return f"{_name_gpus(spans)}: {past_condition}"


def _name_gpus(spans: list[Span]) -> str:
    first = spans[0]
    gpus = {span.uuid for span in spans}
    if len(gpus) == 1:
        return f"GPU {first.gpu} of {first.node}"
    return f"{first.node}, {len(gpus)} GPUs"
