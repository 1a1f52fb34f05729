"""Reads the spans of events from SQLite."""

from __future__ import annotations

import math
import sqlite3

from podgpu.past.books.schema import fetch_value
from podgpu.past.events import MAX_SPANS, EventQuery, EventsAnswer, make_events
from podgpu.past.spans import HOLDER, Span

# A span is a period in which a GPU had a holder or a condition. Selects the spans of all pods that
# started or ended between `:start` and `:end`. Their older spans are included, because `_find_runs`
# needs the beginning of each run.
_SPANS = f"""
SELECT started, ended, kind, name, message, uuid, instance, gpu.node, gpu_index, span.account,
    ifnull(namespace, ''), ifnull(pod, ''),
    coalesce(nullif(pod, ''), nullif(job, ''), nullif(uid, ''),
        'container ' || substr(container_id, 1, 12), '')
FROM span JOIN gpu ON gpu.id = span.gpu LEFT JOIN account ON account.id = span.account
WHERE started <= :end
AND (name = 'node_gone' OR span.account IN (
    SELECT account FROM span
    WHERE started BETWEEN :start AND :end OR ended BETWEEN :start AND :end))
{{where}} ORDER BY max(started, iif(ended <= :end, ended, 0)) DESC LIMIT {MAX_SPANS}"""
# Selects the spans of a pod, and the conditions that a GPU had while the pod held the GPU.
_OF_POD = f"""
AND (namespace || '/' || pod = :pod OR kind <> '{HOLDER}' AND EXISTS (
    SELECT * FROM span AS own JOIN account ON account.id = own.account
    WHERE own.gpu = span.gpu AND own.kind = '{HOLDER}' AND namespace || '/' || pod = :pod
    AND own.started <= ifnull(span.ended, own.started)
    AND ifnull(own.ended, span.started) >= span.started))"""
_WHERE = {"gpu": "AND uuid = :gpu", "node": "AND gpu.node = :node", "pod": _OF_POD}


def read_events(db: sqlite3.Connection, query: EventQuery, now: float) -> EventsAnswer:
    end = now
    if query.end is not None:
        end = min(query.end, now)

    start = end - query.seconds
    parameters: dict[str, float | str] = {"start": start, "end": end}
    where = ""
    if query.selector:
        where = _WHERE[query.selector]
        parameters[query.selector] = query.value

    spans = [Span(*row) for row in db.execute(_SPANS.format(where=where), parameters)]

    known_since = fetch_value(db, "SELECT min(time + resolution) FROM round")
    if known_since is None:
        # A full history may have deleted all rounds, but not the spans that go on.
        known_since = math.inf

    return make_events(spans, start, end, known_since)
