"""Reads what each pod did in every 5 minutes from SQLite, for savings (`advice.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from podgpu.fleet.state import ClusterState
from podgpu.known import round_known
from podgpu.metrics.usage_methods import BY_SWITCHES
from podgpu.model import MIB
from podgpu.past.accounts import account_of
from podgpu.past.books.schema import OPEN
from podgpu.past.busy_steps import HOUR_BYTES, STEP_BYTES, UNKNOWN_STEP
from podgpu.past.savings.held_pods import AccountKey, collect_held, list_rooms
from podgpu.past.savings.savings import FleetLoad, SavingsQuery, SharedLoad, SharedPodLoad
from podgpu.past.spans import HOLDER
from podgpu.past.sqlite.sqlite_charges import read_charges, read_usage_start
from podgpu.past.time_steps import COARSE, DAY, HOUR, ceil_time, floor_time

_ACCOUNTS = "SELECT id, namespace, pod, job, uid, container_id FROM account"
_LOADS = "SELECT time, account, busy, memory FROM load WHERE time >= ? AND time < ?"
_LOADS_OF_ONE = f"""
SELECT time, account, busy, memory FROM period CROSS JOIN load USING (time)
WHERE resolution = {HOUR} AND time >= ? AND time < ? AND account = ?"""
# A peak of memory that comes once a week is not in a short range.
_EARLIER_MEMORY = "SELECT account, max(memory) FROM load WHERE time < ? GROUP BY account"
_FIRST_HOUR = "SELECT time, busy FROM load WHERE time = (SELECT min(time) FROM load)"
# The GPUs of each holder in the range. The containers of a pod begin in the same round.
_HELD = f"""
SELECT account, gpu.node, group_concat(DISTINCT uuid)
FROM span JOIN gpu ON gpu.id = span.gpu
WHERE kind = '{HOLDER}' AND instance = '' AND started < ? AND (ended IS NULL OR ended > ?)
GROUP BY account, gpu.node, started"""
# Open rows are added to those of hours every quarter of an hour.
_WAITED = f"""
SELECT ifnull(sum(waited), 0) FROM (
    SELECT waited FROM period CROSS JOIN usage USING (resolution, time)
    WHERE resolution = {HOUR} AND time >= :start AND time < :end AND account = :account
    UNION ALL SELECT waited FROM usage
    WHERE resolution = {OPEN} AND time >= :start AND time < :end AND account = :account)"""
# Older hours were added up to days, such as those before the last 25 hours if nothing is on disk.
_HOURS_SINCE = f"SELECT ifnull(max(since), 0) FROM kept WHERE resolution = {HOUR}"


@dataclass(slots=True)
class _History:
    """The steps of an account in whole hours, and its largest memory since the oldest record."""

    steps: bytearray
    mib: int = 0
    is_memory_known: bool = True  # in all hours


def read_fleet_load(
    db: Connection, query: SavingsQuery, now: float, state: ClusterState
) -> FleetLoad:
    fleet = _find_range(db, query, now)
    ids: dict[int, AccountKey] = {}
    for account_id, *key in db.execute(_ACCOUNTS):
        ids[account_id] = tuple(key)

    held = collect_held(state)
    fleet.pods = [pod.load for pod in held.values()]
    _add_steps(fleet, _read_histories(db, ids, fleet))
    _add_costs(db, fleet, now)
    _check_gpus(db, fleet, ids, state)

    fleet.rooms = list(list_rooms(state, fleet.pods))
    fleet.shared = list(_read_shared(db, fleet, ids, state))
    return fleet


def read_pod_load(
    db: Connection, namespace: str, pod: str, now: float, state: ClusterState
) -> FleetLoad:
    """Returns what one pod did in the last seven days, or since it began.

    Empty if it holds no GPU.
    """
    fleet = _find_range(db, SavingsQuery(), now)
    sql = f"{_ACCOUNTS} WHERE namespace = ? AND pod = ?"
    row = db.execute(sql, (namespace, pod)).fetchone()
    if row is None:
        return fleet

    account_id, *names = row
    key = tuple(names)
    ids = {account_id: key}
    for held in collect_held(state).values():
        if held.load.account.key == key:
            fleet.pods.append(held.load)

    _add_steps(fleet, _read_histories(db, ids, fleet, account_id))
    # The range begins with the pod.
    for load in fleet.pods:
        unknown = _count_unknown(load.steps)
        load.steps = load.steps[unknown * STEP_BYTES :]
        fleet.start += unknown * COARSE

    _check_gpus(db, fleet, ids, state)
    return fleet


def _find_range(db: Connection, query: SavingsQuery, now: float) -> FleetLoad:
    end = floor_time(now, COARSE)
    fleet = FleetLoad(end - query.seconds, end)
    known_from = _find_start(db)
    if known_from is None or known_from > end:
        known_from = end
    if known_from <= fleet.start:
        return fleet

    fleet.start = known_from
    fleet.known_from = float(known_from)
    fleet.recorded_from = _find_earlier_record(db, fleet.start)
    return fleet


def _find_earlier_record(db: Connection, known_from: float) -> float | None:
    """Returns the start of the oldest record. None if it is not certainly before `known_from`."""
    recorded = read_usage_start(db)
    # A step is known only if it is complete. So the record of the first one may be as much older.
    if recorded is None or recorded + 2 * COARSE >= known_from:
        return None
    # Of old records, only the day is stored.
    is_day = recorded == floor_time(recorded, DAY)
    if is_day and known_from < recorded + DAY:
        return None
    return float(recorded)


def _add_steps(fleet: FleetLoad, histories: Mapping[AccountKey, _History]) -> None:
    count = round(fleet.seconds) // COARSE
    # A history begins with a whole hour.
    before = round(fleet.start % HOUR) // COARSE * STEP_BYTES
    after = before + count * STEP_BYTES
    for pod in fleet.pods:
        history = histories.get(pod.account.key)
        if history is None:
            pod.steps = UNKNOWN_STEP * count
            continue

        pod.steps = bytes(history.steps[before:after])
        if history.is_memory_known:
            pod.peak_bytes = float(history.mib * MIB)


def _find_start(db: Connection) -> int | None:
    """Returns the start of the first known step. A file of an older version has none."""
    rows = db.execute(_FIRST_HOUR).fetchall()
    if not rows:
        return None
    hour = int(rows[0][0])
    unknown = min(_count_unknown(busy) for _, busy in rows)
    return hour + unknown * COARSE


def _count_unknown(steps: bytes) -> int:
    """Returns the number of unknown steps at the start."""
    count = 0
    while steps.startswith(UNKNOWN_STEP, count * STEP_BYTES):
        count += 1
    return count


def _read_histories(
    db: Connection, ids: Mapping[int, AccountKey], fleet: FleetLoad, account_id: int | None = None
) -> dict[AccountKey, _History]:
    """`account_id`: of the only account to read. None: reads all."""
    first = floor_time(fleet.start, HOUR)
    last = ceil_time(fleet.end, HOUR)
    blank = UNKNOWN_STEP * ((last - first) // COARSE)
    rows = db.execute(_LOADS, (first, last))
    if account_id is not None:
        rows = db.execute(_LOADS_OF_ONE, (first, last, account_id))

    histories: dict[int, _History] = {}
    for time, account, busy, mib in rows:
        history = histories.get(account)
        if history is None:
            history = histories[account] = _History(bytearray(blank))

        offset = (time - first) // HOUR * HOUR_BYTES
        history.steps[offset : offset + HOUR_BYTES] = busy
        if mib is None:
            history.is_memory_known = False
        elif mib > history.mib:
            history.mib = mib

    for account, mib in db.execute(_EARLIER_MEMORY, (first,)):
        history = histories.get(account)
        if history is not None and mib is not None:
            history.mib = max(history.mib, mib)

    return {ids[account]: history for account, history in histories.items() if account in ids}


def _add_costs(db: Connection, fleet: FleetLoad, now: float) -> None:
    costs: dict[AccountKey, float] = {}
    for charge in read_charges(db, fleet.start, fleet.end, now):
        if charge.currency:
            key = charge.account.key
            earlier = costs.get(key, 0.0)
            costs[key] = earlier + charge.amounts.cost

    for pod in fleet.pods:
        cost = costs.get(pod.account.key)
        pod.cost = round_known(cost, 2)


def _check_gpus(
    db: Connection, fleet: FleetLoad, ids: Mapping[int, AccountKey], state: ClusterState
) -> None:
    """Finds pods that changed their model, and the numbers of GPUs that pods of the range held."""
    models = {}
    clusters = {}
    for node in state.nodes:
        clusters[node.name] = node.reading.cluster
        for gpu in node.gpus:
            models[gpu.uuid] = gpu.model

    models_held: dict[AccountKey, set[str]] = defaultdict(set)
    for account, node, joined in db.execute(_HELD, (fleet.end, fleet.start)):
        key = ids.get(account)
        if key is None:
            continue

        # The model of a GPU that is gone is not known any more. It counts as another one.
        uuids = joined.split(",")
        models_held[key].update(models.get(uuid, "") for uuid in uuids)

        # Almost all pods hold GPUs of one model. Of several, any counts.
        model = models.get(max(uuids), "")
        cluster = clusters.get(node, "")
        fleet.sizes.setdefault((cluster, model), set()).add(len(uuids))

    for pod in fleet.pods:
        has_other_model = bool(models_held[pod.account.key] - {pod.model})
        if not pod.problem and has_other_model:
            pod.problem = "model"


def _read_wait_ratio(db: Connection, account_id: int, start: int, end: int) -> float:
    window = {"start": start, "end": end, "account": account_id}
    [waited] = db.execute(_WAITED, window).fetchone()
    return float(waited / (end - start))


def _read_shared(
    db: Connection, fleet: FleetLoad, ids: Mapping[int, AccountKey], state: ClusterState
) -> Iterator[SharedLoad]:
    """Yields the GPUs that several pods share now, if their waiting times are measured."""
    account_ids = {key: account_id for account_id, key in ids.items()}
    steps = {pod.account.key: pod.steps for pod in fleet.pods}
    [hours_since] = db.execute(_HOURS_SINCE).fetchone()
    for node in state.nodes:
        if node.gone:
            continue

        for parts in node.held_by_device().values():
            pods = {}
            for part in parts:
                account = account_of(part)
                pods[account.key] = account

            is_shared = len(pods) > 1 and parts[0].instance is None
            if not is_shared or parts[0].gpu.known_usage.method not in BY_SWITCHES:
                continue

            own_steps = [steps.get(key, b"") for key in pods]
            common = _find_common(fleet, own_steps, hours_since)
            if common is None:
                continue

            first, last = common
            shared = []
            for key, account in pods.items():
                ratio = _read_wait_ratio(db, account_ids[key], first, last)
                common_steps = _cut_steps(steps[key], fleet.start, first, last)
                shared.append(SharedPodLoad(account, common_steps, ratio))

            yield SharedLoad(node.reading.cluster, node.name, shared)


def _cut_steps(steps: bytes, began: float, first: int, last: int) -> bytes:
    """Returns the steps between two times. `began`: the time of the first of `steps`."""
    start = (first - round(began)) // COARSE * STEP_BYTES
    stop = (last - round(began)) // COARSE * STEP_BYTES
    return steps[start:stop]


def _find_common(
    fleet: FleetLoad, steps: Sequence[bytes], hours_since: int
) -> tuple[int, int] | None:
    """Returns the whole hours since all pods of a GPU are known. None if there are none.

    `steps`: of each pod; empty if it is not known at all. `hours_since`: the oldest hour of which
    the waiting time is stored.
    """
    if not all(steps):
        return None

    unknown = max(map(_count_unknown, steps))
    start = max(hours_since, ceil_time(fleet.start + unknown * COARSE, HOUR))
    end = floor_time(fleet.end, HOUR)
    if start >= end:
        return None
    return start, end
