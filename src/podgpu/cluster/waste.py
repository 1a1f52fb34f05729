"""Computes held and idle GPU-hours and their cost, by pod, owner or namespace (`/api/v1/waste`).

Hours are read from the history file, current figures from the last state.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple, get_args

import msgspec

from podgpu.cluster.parts import HeldPart, group_held, sum_held
from podgpu.cluster.state import ClusterState
from podgpu.errors import UsageError
from podgpu.history.queries import UsageRow
from podgpu.model import WorkloadOwner

GroupBy = Literal["pod", "owner", "namespace"]
Format = Literal["json", "csv"]
ENDED_SECONDS = 24 * 3600.0  # an ended pod keeps its own row for this long
_DIGITS = 4
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")


class WasteRow(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The waste of a pod, owner or namespace. Unknown members are omitted from the JSON."""

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
    unknown_because: str = ""  # reason why the idle time of a part of its GPUs is not known


class WasteAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    counting_since: float | None = None
    currency: str = ""
    prices: str = ""
    simulated: bool = False
    by: str
    rows: list[WasteRow]


class PodId(NamedTuple):
    namespace: str
    pod: str = ""
    job: str = ""
    uid: str = ""
    container_id: str = ""


class _PodWaste(NamedTuple):
    usage: UsageRow
    held: list[HeldPart]  # in the last state
    owner: WorkloadOwner | None

    @property
    def has_ended(self) -> bool:
        return not (self.held or self.usage.is_held)

    def is_recent(self, wall: float) -> bool:
        last_seen = self.usage.last_seen if self.usage.ended is None else self.usage.ended
        return not self.has_ended or wall - last_seen <= ENDED_SECONDS


def make_waste(
    by: GroupBy, state: ClusterState, usage: Iterable[UsageRow], counting_since: float | None, wall: float
) -> WasteAnswer:
    """Computes the rows, sorted by wasted cost, then by idle hours, largest first."""
    parts = (part for node in state.nodes for part in node.held)
    held = group_held((part for part in parts if part.holder.key), _pod_id)  # excludes reservations for unknown pods
    used = {PodId(*row[:5]): row for row in usage}
    groups: dict[tuple[PodId, WorkloadOwner | None], list[_PodWaste]] = defaultdict(list)
    for name in (*held, *(name for name in used if name not in held)):
        row, own = used.get(name, UsageRow(*name)), held.get(name, [])
        known = WorkloadOwner(row.owner_kind, row.owner_name) if row.owner_name else None
        pod = _PodWaste(row, own, next((part.owner for part in own if part.owner is not None), known))
        if pod.is_recent(wall):
            groups[_group(name, pod.owner, by)].append(pod)
        elif by != "pod":
            groups[_group(PodId(name.namespace), pod.owner, by)].append(pod)
    rows = [_row(name, owner, members) for (name, owner), members in groups.items()]
    rows.sort(key=lambda row: (-(row.wasted or 0.0), -row.idle_hours, row.namespace, _name(row)))
    return WasteAnswer(
        counting_since=counting_since,
        currency=state.prices.currency,
        prices=state.prices.source,
        simulated=state.simulated,
        by=by,
        rows=rows,
    )


def _pod_id(part: HeldPart) -> PodId:
    holder = part.holder
    if holder.pod:
        return PodId(holder.namespace, holder.pod)
    return PodId(holder.namespace, "", holder.job_or_user, holder.uid, holder.container_id)


def _group(pod: PodId, owner: WorkloadOwner | None, by: GroupBy) -> tuple[PodId, WorkloadOwner | None]:
    if by == "namespace":
        return PodId(pod.namespace), None
    return (PodId(pod.namespace) if by == "owner" and owner is not None else pod), owner


def _name(row: WasteRow) -> tuple[str, ...]:
    owner = ("", "") if row.owner is None else (row.owner.kind, row.owner.name)
    return *owner, row.pod, row.job, row.uid, row.container_id


def _row(name: PodId, owner: WorkloadOwner | None, pods: Sequence[_PodWaste]) -> WasteRow:
    held = [part for pod in pods for part in pod.held]
    now = sum_held(held).rounded()
    since = [part.idle_since for part in held if part.idle_since is not None]
    ended = [pod.usage.ended for pod in pods if pod.usage.ended is not None]
    wasted = [pod.usage.idle_cost for pod in pods if pod.usage.idle_cost is not None]
    has_cost = bool(wasted) or now.cost_per_hour is not None
    return WasteRow(
        **name._asdict(),
        owner=owner,
        gpus=now.allocated,
        idle_gpus=now.idle,
        idle_hours=round(sum(pod.usage.idle_seconds for pod in pods) / 3600, _DIGITS),
        allocated_hours=round(sum(pod.usage.allocated_seconds for pod in pods) / 3600, _DIGITS),
        wasted=round(sum(wasted), _DIGITS) if has_cost else None,
        cost_per_hour=now.cost_per_hour,
        idle_since=round(max(since)) if since and len(since) == len(held) else None,
        ended_at=round(max(ended)) if ended and all(pod.has_ended for pod in pods) else None,
        unknown_because=max((part.unknown_because for part in held), default=""),
    )


_COLUMNS = (
    *("namespace", "pod", "owner_kind", "owner_name", "job", "uid", "container_id"),
    *("gpus", "idle_gpus", "idle_hours", "allocated_hours", "wasted", "cost_per_hour"),
    *("currency", "prices", "idle_since", "ended_at", "unknown_because"),
)


def encode_waste_csv(answer: WasteAnswer) -> bytes:
    """Writes CSV with a header. Unknown values are empty cells; times are in UTC."""
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
    """Prevents spreadsheets from running the cell as a formula."""
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
