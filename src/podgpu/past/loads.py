"""Reads what each pod did in every 5 minutes from SQLite, for savings (`past/advice.py`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import NamedTuple

from podgpu.charge import UsageAccount
from podgpu.fleet.hold import find_unheld
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import HeldPart, device_price, is_blind
from podgpu.fleet.state import ClusterState
from podgpu.known import round_known, sum_all
from podgpu.metrics.usage_methods import BY_SWITCHES
from podgpu.model import MIB, group_by
from podgpu.past.accounts import account_of
from podgpu.past.load_steps import HOUR_BYTES, UNKNOWN_HOUR
from podgpu.past.mixes import STEP_BYTES, UNKNOWN
from podgpu.past.savings import (
    FleetLoad,
    NodeRoom,
    PodLoad,
    SavingsQuery,
    SharedLoad,
    SharedPodLoad,
)
from podgpu.past.schema import OPEN
from podgpu.past.spans import HOLDER
from podgpu.past.sqlite_charges import read_charges, read_usage_start
from podgpu.past.time_steps import (
    COARSE,
    DAY,
    HOUR,
    ceil_time,
    floor_time,
)

_UNKNOWN_STEP = UNKNOWN.to_bytes(STEP_BYTES, "little")
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

AccountKey = tuple[str, ...]
PodKey = tuple[str, AccountKey]  # cluster and account


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
            pod.steps = _UNKNOWN_STEP * count
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
    while steps.startswith(_UNKNOWN_STEP, count * STEP_BYTES):
        count += 1
    return count


def _read_histories(
    db: Connection, ids: Mapping[int, AccountKey], fleet: FleetLoad, account_id: int | None = None
) -> dict[AccountKey, _History]:
    """`account_id`: of the only account to read. None: reads all."""
    first = floor_time(fleet.start, HOUR)
    last = ceil_time(fleet.end, HOUR)
    blank = UNKNOWN_HOUR * ((last - first) // HOUR)
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


class HeldPod(NamedTuple):
    """A pod that holds GPUs now. The steps of `load` are not read yet."""

    load: PodLoad
    parts: list[HeldPart]


def collect_held(state: ClusterState) -> dict[PodKey, HeldPod]:
    """Returns all pods and jobs that hold a GPU now, except those of nodes that do not answer."""
    parts: dict[PodKey, list[tuple[NodeEntry, HeldPart]]] = defaultdict(list)
    for node in state.nodes:
        if node.gone:
            continue
        for part in node.held:
            # Only a holder that is identified can be a pod or job.
            if part.holder.key:
                key = part.cluster, account_of(part).key
                parts[key].append((node, part))

    pods = {}
    job_gpus: dict[tuple[str, ...], float] = defaultdict(float)
    for (cluster, account), own in parts.items():
        load = _make_load(cluster, own, state)
        job_gpus[_job_of(load)] += load.gpus
        pods[cluster, account] = HeldPod(load, [part for _, part in own])

    for held in pods.values():
        held.load.job_gpus = job_gpus[_job_of(held.load)]

    return pods


def _job_of(load: PodLoad) -> tuple[str, ...]:
    """Returns the key of the owner. Without one, a pod is a job of its own."""
    account = load.account
    if account.owner_name:
        return load.cluster, account.namespace, account.owner_kind, account.owner_name
    return load.cluster, *account.key


def _make_load(
    cluster: str, own: Sequence[tuple[NodeEntry, HeldPart]], state: ClusterState
) -> PodLoad:
    devices: set[tuple[str, str]] = set()
    models = set()
    sizes = []
    costs = []
    is_whole = True
    for node, part in own:
        devices.add((node.name, part.device_key))
        models.add(part.gpu.model)
        sizes.append(part.gpu.memory_total_bytes)
        costs.append(part.cost_per_hour)
        if not _is_whole(part):
            is_whole = False

    # Of GPUs of different sizes, the smallest limits the pod. Unknown if one of them is.
    smallest = min(size or 0 for size in sizes)
    gpu_bytes = float(smallest) if smallest else None

    first_node, first_part = own[0]
    load = PodLoad(
        account_of(first_part),
        steps=b"",
        cluster=cluster,
        node=first_node.name,
        model=first_part.gpu.model,
        devices=len(devices),
        gpus=sum(part.gpu_fraction for _, part in own),
        is_whole=is_whole,
        gpu_bytes=gpu_bytes,
        price=sum_all(costs),
    )
    load.problem = _find_problem(load.account, state)
    is_model_known = len(models) == 1 and "" not in models
    if not load.problem and not is_model_known:
        load.problem = "model"

    return load


def _find_problem(account: UsageAccount, state: ClusterState) -> str:
    """Returns the reason why savings must leave out a pod. Empty if there is none."""
    if account.namespace in state.settings.savings_skip_namespaces:
        return "namespace"
    if (account.namespace, account.pod) in state.kept_pods:
        return "annotation"
    return ""


def _is_whole(part: HeldPart) -> bool:
    """Returns whether the part is a GPU that no other pod shares."""
    if part.instance is not None or part.gpu.instances:
        return False
    pods = {(holder.pod_name, holder.job_or_user) for holder in part.device.holders}
    return part.share >= 1 and len(pods) <= 1


def list_rooms(state: ClusterState, pods: Sequence[PodLoad]) -> Iterator[NodeRoom]:
    """Yields the whole GPUs of each node and model, with the pods that hold them."""
    pods_by_place = group_by(pods, lambda pod: (pod.cluster, pod.node, pod.model))
    for node in state.nodes:
        if node.gone or node.stale or node.silent is not None:
            continue

        held = node.held_by_device()
        cluster = node.reading.cluster
        whole = []
        for gpu in node.gpus:
            if not gpu.instances and not is_blind(gpu):
                whole.append(gpu)

        models = group_by(whole, lambda gpu: gpu.model)
        for model, gpus in models.items():
            free = 0
            for gpu in gpus:
                unallocated = find_unheld(node, gpu, held).unallocated
                if (unallocated.gpus.unallocated or 0.0) >= 1:
                    free += 1

            price = device_price(node.prices, gpus[0], instance=None, size=1.0)
            own = pods_by_place.get((cluster, node.name, model), [])
            total = len(gpus)
            yield NodeRoom(cluster, node.name, model, total, free, own, price)


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
