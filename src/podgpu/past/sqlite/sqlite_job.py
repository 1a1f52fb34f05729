"""Reads what is recorded of a pod from SQLite, for its summary (`past/job.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection

from podgpu.charge import Charge
from podgpu.fleet.state import ClusterState
from podgpu.model import PodName, WorkloadOwner
from podgpu.past.bills.bill import StepCharge
from podgpu.past.job import JobSummary, RecordedPod, make_summary
from podgpu.past.savings.savings import FleetLoad
from podgpu.past.spans import HOLDER, Interval, unite
from podgpu.past.sqlite.sqlite_charges import read_range, read_token_steps
from podgpu.past.sqlite.sqlite_loads import read_pod_load
from podgpu.past.sqlite.sqlite_series import read_pod
from podgpu.past.time_steps import COARSE, DAY, FINE, floor_time

_LONGEST = 8 * DAY  # samples are stored for this many seconds
# Returns the times when a pod held a GPU.
# If the node was gone at the end, the time includes the outage.
_TIMES_HELD = f"""
SELECT span.started, iif(gone.gpu IS NULL, span.ended, gone.ended), owner_kind, owner_name
FROM span JOIN account ON account.id = span.account
LEFT JOIN span AS gone
    ON gone.gpu = span.gpu AND gone.name = 'node_gone' AND gone.started = span.ended
WHERE namespace = ? AND pod = ? AND span.kind = '{HOLDER}' ORDER BY span.started"""


def read_summary(
    db: Connection, namespace: str, pod: str, now: float, state: ClusterState
) -> JobSummary | None:
    rows = db.execute(_TIMES_HELD, (namespace, pod)).fetchall()
    if not rows:
        return None

    _, _, owner_kind, owner_name = rows[0]
    is_running = any(ended is None for _, ended, *_ in rows)
    times = [Interval(start, now if ended is None else ended) for start, ended, *_ in rows]
    runs = unite(times)
    start = runs[0].start
    end = runs[-1].end

    charges = _read_charges(db, (namespace, pod), start, end)
    token_steps: Sequence[StepCharge] = ()
    if any(charge.amounts.token_seconds for charge in charges):
        # Includes the 5 minutes in which the pod started.
        token_steps = read_token_steps(db, floor_time(start, COARSE), end, (namespace, pod))

    load = FleetLoad(now, now)
    if is_running:
        load = read_pod_load(db, namespace, pod, now, state)

    # Conditions that began or ended with the pod are included, too.
    gpus_since = max(start, end - _LONGEST) - FINE
    record = RecordedPod(
        pod=(namespace, pod),
        owner=WorkloadOwner(owner_kind, owner_name) if owner_name else None,
        runs=runs,
        is_running=is_running,
        charges=charges,
        token_steps=token_steps,
        gpus=read_pod(db, namespace, pod, gpus_since, end + FINE),
        load=load,
    )
    return make_summary(record, state)


def _read_charges(db: Connection, pod: PodName, start: float, end: float) -> list[Charge]:
    charges = []
    for charge in read_range(db, start, end):
        if (charge.account.namespace, charge.account.pod) == pod:
            charges.append(charge)
    return charges
