"""Counts what is held and idle, in GPU-hours and money, by pod, owner or namespace (`/api/v1/waste`).

Time counts from one reading of a node to the next, for holders that are in both.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple, get_args

import msgspec

from podgpu.cluster.parts import HeldPart
from podgpu.cluster.state import ClusterState, gpu_id
from podgpu.errors import UsageError
from podgpu.history.queries import UsageRow
from podgpu.model import Workload, WorkloadKey, WorkloadOwner

GroupBy = Literal["pod", "owner", "namespace"]
Format = Literal["json", "csv"]
ENDED_SECONDS = 24 * 3600.0  # a pod that ended has its own row for so long
MAX_ENDED = 10_000
MAX_OWNERS = 20_000
RESTORED = ("namespace", "pod", "job", "uid", "container_id", "owner_kind", "owner_name")
"""Dimensions by which usage is read from a history file."""
_DIGITS = 4
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")


class PodId(NamedTuple):
    namespace: str
    pod: str = ""
    job: str = ""
    uid: str = ""
    container_id: str = ""


@dataclass(slots=True)
class _Account:
    owner: WorkloadOwner | None = None
    allocated: float = 0.0  # GPU-seconds
    idle: float = 0.0
    wasted: float | None = None
    held: list[HeldPart] = field(default_factory=list)  # in the last round; empty: the pod ended
    ended: float | None = None  # monotonic

    def charge(self, part: HeldPart, seconds: float, idle_seconds: float) -> None:
        self.allocated += part.part * seconds
        self.idle += part.part * idle_seconds
        if part.cost_per_hour is not None:
            self.wasted = (self.wasted or 0.0) + part.cost_per_hour * idle_seconds / 3600


class WasteLedger:
    """One account per pod. Pods that ended a day ago are added to the sum of their owner."""

    def __init__(self, max_ended: int = MAX_ENDED, max_owners: int = MAX_OWNERS) -> None:
        self._max_ended = max_ended
        self._max_owners = max_owners
        self._seen: dict[tuple[str, int | None, WorkloadKey], float] = {}  # monotonic time of the last reading
        self._accounts: dict[PodId, _Account] = {}
        self._ended: dict[tuple[str, WorkloadOwner | None], _Account] = {}
        self._currency: str | None = None

    def update(self, state: ClusterState, now: float, longest_gap: float) -> None:
        """Charges one round. `now` is monotonic. Longer gaps between two readings of a node are not charged."""
        if self._currency is not None and state.prices.currency != self._currency:
            for account in (*self._accounts.values(), *self._ended.values()):
                account.wasted = None  # amounts of another currency cannot be added
        self._currency = state.prices.currency
        seen: dict[tuple[str, int | None, WorkloadKey], float] = {}
        held: dict[PodId, list[HeldPart]] = {}
        for node in state.nodes:
            at = node.read_at + state.clock_offset
            for part in node.held:
                gpu = part.gpu.uuid or f"{node.name} {gpu_id(part.gpu)}"
                key = gpu, None if part.instance is None else part.instance.id, part.holder.key
                before = self._seen.get(key)
                seen[key] = node.read_at
                pod = _pod_id(part.holder)
                held.setdefault(pod, []).append(part)
                account = self._accounts.get(pod) or self._accounts.setdefault(pod, _Account())
                seconds = 0.0 if before is None else node.read_at - before
                if not 0 < seconds <= longest_gap:
                    seconds = 0.0
                account.charge(part, seconds, idle_seconds(part, seconds, at))
        self._seen = seen
        for pod, account in self._accounts.items():
            account.held = held.get(pod, [])
            if account.held:
                account.ended = None
                account.owner = account.held[0].owner or account.owner
            elif account.ended is None:
                account.ended = now
        self._close_ended(now)

    def answer(
        self, by: GroupBy, offset: float, counting_since: float | None, prices: str, simulated: bool
    ) -> WasteAnswer:
        """`offset`: Unix time minus monotonic time. Rows: the most expensive first, then the longest idle."""
        groups: dict[tuple[PodId, WorkloadOwner | None], list[_Account]] = {}
        for pod, account in self._accounts.items():
            groups.setdefault(_group(pod, account.owner, by), []).append(account)
        if by != "pod":
            for (namespace, owner), account in self._ended.items():
                groups.setdefault((PodId(namespace), owner if by == "owner" else None), []).append(account)
        rows = [_row(name, owner, accounts, offset) for (name, owner), accounts in groups.items()]
        rows.sort(key=lambda row: (-(row.wasted or 0.0), -row.idle_hours, row.namespace, _name(row)))
        return WasteAnswer(
            counting_since=counting_since,
            currency=self._currency or "",
            prices=prices,
            simulated=simulated,
            by=by,
            rows=rows,
        )

    def restore(self, rows: Iterable[UsageRow], now: float, wall: float) -> None:
        """Continues from the usage in a history file, grouped by RESTORED and currency."""
        for (namespace, pod, job, uid, container_id, kind, name), currency, last_seen, amounts in rows:
            key = PodId(namespace, pod, job, uid, container_id)
            account = self._accounts.get(key)
            if account is None:
                account = self._accounts[key] = _Account(ended=now - max(0.0, wall - last_seen))
            account.owner = account.owner or (WorkloadOwner(kind, name) if name else None)
            account.allocated += amounts.allocated_seconds
            account.idle += amounts.idle_seconds
            if currency and self._currency in (None, currency):
                self._currency = currency
                account.wasted = (account.wasted or 0.0) + amounts.idle_cost
        self._close_ended(now)

    def _close_ended(self, now: float) -> None:
        ended = [(account.ended, pod) for pod, account in self._accounts.items() if account.ended is not None]
        too_many = len(ended) - self._max_ended
        if too_many > 0:
            ended.sort()
        for number, (at, pod) in enumerate(ended):
            if number < too_many or now - at > ENDED_SECONDS:
                account = self._accounts.pop(pod)
                key = pod.namespace, account.owner
                total = self._ended.pop(key, None) or _Account()  # moves it to the end: the oldest goes first
                total.allocated += account.allocated
                total.idle += account.idle
                if account.wasted is not None:
                    total.wasted = (total.wasted or 0.0) + account.wasted
                self._ended[key] = total
        for key in list(self._ended)[: max(0, len(self._ended) - self._max_owners)]:
            del self._ended[key]


def idle_seconds(part: HeldPart, seconds: float, at: float) -> float:
    """The idle part of the last `seconds` before the Unix time `at`."""
    if part.use != "idle":
        return 0.0
    return seconds if part.idle_since is None else max(0.0, min(seconds, at - part.idle_since))


def _pod_id(holder: Workload) -> PodId:
    if holder.pod:
        return PodId(holder.namespace, holder.pod)
    return PodId(holder.namespace, "", holder.job, holder.uid, holder.container_id)


# `/api/v1/waste`


class WasteRow(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One pod, or several together. Unknown members are left out."""

    namespace: str
    pod: str = ""
    job: str = ""
    uid: str = ""
    container_id: str = ""
    owner: WorkloadOwner | None = None
    gpus: float
    idle_gpus: float
    idle_hours: float
    allocated_hours: float
    wasted: float | None = None
    cost_per_hour: float | None = None
    idle_since: int | None = None
    ended_at: int | None = None


class WasteAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    counting_since: float | None = None
    currency: str = ""
    prices: str = ""
    simulated: bool = False
    by: str
    rows: list[WasteRow]


ReadWaste = Callable[[GroupBy], WasteAnswer]


def _group(pod: PodId, owner: WorkloadOwner | None, by: GroupBy) -> tuple[PodId, WorkloadOwner | None]:
    if by == "namespace":
        return PodId(pod.namespace), None
    return (PodId(pod.namespace) if by == "owner" and owner is not None else pod), owner


def _name(row: WasteRow) -> tuple[str, ...]:
    owner = ("", "") if row.owner is None else (row.owner.kind, row.owner.name)
    return *owner, row.pod, row.job, row.uid, row.container_id


def _row(name: PodId, owner: WorkloadOwner | None, accounts: Sequence[_Account], offset: float) -> WasteRow:
    held = [part for account in accounts for part in account.held]
    idle = [part for part in held if part.use == "idle"]
    since = [part.idle_since for part in idle if part.idle_since is not None]
    ended = [account.ended for account in accounts if account.ended is not None]
    wasted = [account.wasted for account in accounts if account.wasted is not None]
    costs = [part.cost_per_hour for part in held if part.cost_per_hour is not None]
    return WasteRow(
        **name._asdict(),
        owner=owner,
        gpus=round(sum(part.part for part in held), _DIGITS),
        idle_gpus=round(sum(part.part for part in idle), _DIGITS),
        idle_hours=round(sum(account.idle for account in accounts) / 3600, _DIGITS),
        allocated_hours=round(sum(account.allocated for account in accounts) / 3600, _DIGITS),
        wasted=round(sum(wasted), _DIGITS) if wasted else None,
        cost_per_hour=round(sum(costs), _DIGITS) if costs else None,
        idle_since=round(max(since)) if since and len(since) == len(held) else None,
        ended_at=round(max(ended) + offset) if ended and not held else None,
    )


_COLUMNS = (
    *("namespace", "pod", "owner_kind", "owner_name", "job", "uid", "container_id"),
    *("gpus", "idle_gpus", "idle_hours", "allocated_hours", "wasted", "cost_per_hour"),
    *("currency", "prices", "idle_since", "ended_at"),
)


def encode_waste_csv(answer: WasteAnswer) -> bytes:
    """With a header. Unknown values are empty cells, times are in UTC."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, restval="", lineterminator="\r\n", extrasaction="ignore")
    writer.writeheader()
    for row in answer.rows:
        cells = {name: value for name, value in msgspec.structs.asdict(row).items() if value is not None}
        cells |= {"currency": answer.currency, "prices": answer.prices}
        if row.owner is not None:
            cells |= {"owner_kind": row.owner.kind, "owner_name": row.owner.name}
        for column in ("idle_since", "ended_at"):
            if column in cells:
                cells[column] = datetime.fromtimestamp(cells[column], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        writer.writerow({name: escape_cell(v) if isinstance(v, str) else v for name, v in cells.items()})
    return text.getvalue().encode()


def escape_cell(text: str) -> str:
    """Prevents that a spreadsheet runs the cell as a formula."""
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA_STARTS) else text


def csv_name(answer: WasteAnswer) -> str:
    return f"podgpu-waste-by-{answer.by}{'-SIMULATED' if answer.simulated else ''}.csv"


def parse_waste_query(query: Mapping[str, str]) -> tuple[GroupBy, Format]:
    """Raises UsageError."""
    by, form = query.get("by", "pod"), query.get("format", "json")
    for name, value, allowed in (("by", by, get_args(GroupBy)), ("format", form, get_args(Format))):
        if value not in allowed:
            raise UsageError(f"{name}={value[:60]!r}: use {', '.join(allowed[:-1])} or {allowed[-1]}")
    return by, form  # type: ignore[return-value]
