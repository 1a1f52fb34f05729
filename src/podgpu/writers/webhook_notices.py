"""Finds what a webhook reports: broken GPUs, idle pods and exceeded budgets.

A notice is about a state, not about an event: it is sent once when the state begins, and once when
a broken GPU works again. The state that was reported is stored, so a restart repeats nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

import msgspec

from podgpu.errors import few_of, plural, utc_text
from podgpu.fleet.budgets import BudgetUse
from podgpu.fleet.choose import describe_condition
from podgpu.fleet.hold import wasteful_since
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import HeldPart, gpu_id
from podgpu.fleet.state import ClusterState
from podgpu.known import add_known, round_known
from podgpu.metrics.conditions import NODE_GONE, conditions, is_grave, rank_condition
from podgpu.model import DeviceState, list_pod_names
from podgpu.money import write_money
from podgpu.writers.gpu_changes import identify_gpu, name_gpu

STEADY_SECONDS = 300.0
"""A GPU has recovered if it has had no problem for this time. A GPU that fails again and again is
reported once, because it then has the condition `recurring` for a day.
"""
_FORGET_SECONDS = 30 * 86_400.0  # of a GPU that is never seen again
_MAX_REPORTED = 20_000
_MAX_PODS = 20


class NoticeEvent(StrEnum):
    BROKEN = "broken"
    RECOVERED = "recovered"
    IDLE = "idle"
    OVER_BUDGET = "over_budget"


class Item(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One GPU, pod or budget of a notice. `key` stays the same while the state lasts."""

    key: str
    text: str
    since: float | None = None  # Unix time
    cluster: str = ""
    node: str = ""
    uuid: str = ""
    index: int | None = None
    model: str = ""
    condition: str = ""
    detail: str = ""
    says: str = ""
    do: str = ""
    pods: tuple[str, ...] = ()  # that hold the GPU, as NAMESPACE/POD
    namespace: str = ""
    pod: str = ""
    owner: str = ""
    gpus: float | None = None
    cost_per_hour: float | None = None
    currency: str = ""
    budget: str = ""
    month: str = ""
    cost: float | None = None
    per_month: float | None = None


class ReportedNotice(msgspec.Struct, frozen=True):
    """What was reported, and when."""

    event: NoticeEvent
    item: Item
    at: float  # Unix time


class Notice(msgspec.Struct, frozen=True):
    event: NoticeEvent
    item: Item


@dataclass(frozen=True)
class Situation:
    """The states that can be reported, by key."""

    broken: Mapping[str, Item] = field(default_factory=dict)
    well: Mapping[str, DeviceState] = field(default_factory=dict)  # GPUs that certainly work
    idle: Mapping[str, Item] = field(default_factory=dict)
    used: frozenset[str] = frozenset()  # pods that use a GPU
    over_budget: Mapping[str, Item] = field(default_factory=dict)
    month: str = ""

    @property
    def notices(self) -> dict[str, Notice]:
        """What can be reported, by key."""
        groups = (
            (NoticeEvent.BROKEN, self.broken),
            (NoticeEvent.IDLE, self.idle),
            (NoticeEvent.OVER_BUDGET, self.over_budget),
        )
        notices = {}
        for event, items in groups:
            for key, item in items.items():
                notices[key] = Notice(event, item)

        return notices


def find_situation(state: ClusterState, idle_after: float, now: float) -> Situation:
    """`idle_after`: seconds. `now`: Unix time."""
    broken: dict[str, Item] = {}
    well: dict[str, DeviceState] = {}
    for node in state.nodes:
        for gpu in node.gpus:
            key = f"gpu {node.reading.cluster} {gpu_id(gpu)}"
            item = _describe_gpu(key, gpu, node)
            if item is not None:
                broken[key] = item
            elif not (node.gone or node.stale or gpu.hidden):
                well[key] = gpu

    idle, used = _find_idle_pods(state, idle_after, now)

    # Budgets are reported once a month.
    month = datetime.fromtimestamp(now, UTC).strftime("%Y-%m")
    over_budget = {}
    for use in state.budgets:
        if use.ratio > 1:
            item = _describe_budget(use, month)
            over_budget[item.key] = item

    return Situation(broken, well, idle, used, over_budget, month)


class _IdlePart(NamedTuple):
    part: HeldPart
    node: NodeEntry
    since: float  # Unix time


def _find_idle_pods(
    state: ClusterState, idle_after: float, now: float
) -> tuple[dict[str, Item], frozenset[str]]:
    """Returns the pods with idle GPUs, and those that use a GPU. No pod is in both."""
    idle: dict[str, list[_IdlePart]] = {}
    used = set()
    for node in state.nodes:
        for part in node.held:
            if not part.holder.pod:
                continue

            key = f"idle {part.cluster} {'/'.join(part.holder.pod_name)}"
            since = wasteful_since(part, now, idle_after)
            if part.use == "used":
                used.add(key)
            elif since is not None:
                idle.setdefault(key, []).append(_IdlePart(part, node, since))

    items = {}
    for key, parts in idle.items():
        if key not in used:
            items[key] = _describe_idle(key, parts, state.prices.currency)

    return items, frozenset(used)


def _name_gpu(gpu: DeviceState, node: str) -> str:
    return identify_gpu(f"{name_gpu(gpu)} of {node}", gpu.uuid)


def _describe_gpu(key: str, gpu: DeviceState, node: NodeEntry) -> Item | None:
    """Returns None if the GPU is not broken. Describes its worst problem."""
    # An exporter that is not listed any more was removed, for example with its node.
    is_removed = node.reading.listed is False
    grave = []
    for condition in gpu.conditions:
        if is_removed and condition.name == NODE_GONE:
            continue
        if is_grave(condition.name):
            grave.append(condition)

    if not grave:
        return None

    worst = min(grave, key=lambda condition: rank_condition(condition.name))
    says, do = describe_condition(worst, gpu)
    holders = [*gpu.holders, *gpu.last_holders]
    for instance in gpu.instances:
        holders += instance.holders

    pods = ["/".join(name) for name in list_pod_names(holders)]
    text = f"{_name_gpu(gpu, node.name)}: {says}"
    if do:
        text += f": {do}"
    if pods:
        text += f". Pods: {few_of(pods)}"

    return Item(
        key=key,
        text=text,
        since=round_known(worst.since, 0),
        cluster=node.reading.cluster,
        node=node.name,
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        condition=worst.name,
        detail=worst.detail,
        says=says,
        do=do,
        pods=tuple(pods)[:_MAX_PODS],
    )


def _describe_recovered(reported: Item, gpu: DeviceState) -> Item:
    was = reported.condition
    spec = conditions().get(reported.condition)
    if spec:
        was = spec.was
    says = f"works again: {was}"
    text = f"{_name_gpu(gpu, reported.node)} {says}"
    return msgspec.structs.replace(reported, text=text, says=f"it {says}", do="")


def _describe_idle(key: str, parts: Sequence[_IdlePart], currency: str) -> Item:
    """Describes the idle GPUs of a pod."""
    first = parts[0].part
    node = parts[0].node
    # All of its GPUs are idle since then.
    since = max(idle.since for idle in parts)
    gpus = round(sum(idle.part.gpu_fraction for idle in parts), 2)
    cost: float | None = None
    for idle in parts:
        cost = add_known(cost, idle.part.cost_per_hour)

    text = "/".join(first.holder.pod_name)
    owner = ""
    if first.owner:
        owner = first.owner.text
        text += f" ({owner})"

    text += f" has not used {_count_gpus(gpus)} on {node.name} since {utc_text(since)}"
    if cost is not None and currency:
        text += f", which cost {write_money(cost, currency)} per hour"

    return Item(
        key=key,
        text=text,
        since=round(since),
        cluster=first.cluster,
        node=node.name,
        namespace=first.holder.namespace,
        pod=first.holder.pod,
        owner=owner,
        gpus=gpus,
        cost_per_hour=round_known(cost, 4),
        currency=currency,
    )


def _count_gpus(number: float) -> str:
    if number == round(number):
        return plural(round(number), "GPU")
    return f"{number:g} GPUs"


def _describe_budget(use: BudgetUse, month: str) -> Item:
    return Item(
        key=f"budget {use.name} {month}",
        text=use.warning,
        namespace=use.namespace,
        budget=use.name,
        month=month,
        cost=use.cost,
        per_month=use.per_month,
        currency=use.currency,
    )


class NoticeBook:
    """Compares the situation with what was reported. Not thread-safe."""

    def __init__(self, started: float, repeats_old: bool) -> None:
        """`started`: Unix time. `repeats_old`: also report what began before, because what was
        reported is stored. Otherwise, a restart would report it again.
        """
        self._started = started
        self._repeats_old = repeats_old
        # By key: Unix time. None before the first comparison.
        self._first_seen: dict[str, float] | None = None
        self._well_since: dict[str, float] = {}  # by key: monotonic time

    def compare(
        self,
        situation: Situation,
        reported: Mapping[str, ReportedNotice],
        now: float,
        monotonic: float,
    ) -> tuple[list[Notice], list[str]]:
        """Returns the notices to send, and the keys in `reported` that are over without a notice.

        Remembers when each notice was first seen. `now`: Unix time.
        """
        present = situation.notices
        # What the first comparison finds may have begun before the start.
        earlier = self._first_seen
        if earlier is None:
            first_seen = dict.fromkeys(present, self._started)
        else:
            first_seen = {key: earlier.get(key, now) for key in present}
        self._first_seen = first_seen

        notices = []
        for key, notice in present.items():
            if key not in reported and self._is_new(notice.item, first_seen[key]):
                notices.append(notice)

        notices += self._find_recovered(situation, reported, monotonic)
        over = []
        for key, each in reported.items():
            if key not in present and _is_over(each, situation, now):
                over.append(key)

        return notices, over

    def _is_new(self, item: Item, first_seen: float) -> bool:
        if self._repeats_old:
            return True

        began = first_seen if item.since is None else item.since
        return began > self._started

    def _find_recovered(
        self, situation: Situation, reported: Mapping[str, ReportedNotice], now: float
    ) -> Iterator[Notice]:
        """Yields a notice for each GPU that has worked again for some time.

        Remembers since when the others work.
        """
        earlier = self._well_since
        self._well_since = {}
        for key, each in reported.items():
            gpu = situation.well.get(key)
            if gpu is None:
                continue
            since = earlier.get(key, now)
            self._well_since[key] = since
            if now - since >= STEADY_SECONDS:
                yield Notice(NoticeEvent.RECOVERED, _describe_recovered(each.item, gpu))


def _is_over(reported: ReportedNotice, situation: Situation, now: float) -> bool:
    """Returns True for what ended and has no notice for its end."""
    if reported.event == NoticeEvent.OVER_BUDGET:
        return reported.item.month != situation.month
    is_old = now - reported.at > _FORGET_SECONDS
    return is_old or reported.item.key in situation.used


def list_oldest(reported: Iterable[tuple[str, ReportedNotice]]) -> list[str]:
    """Returns the keys of the oldest entries, if there are too many."""
    newest_first = sorted(reported, key=lambda entry: entry[1].at, reverse=True)
    return [key for key, _ in newest_first[_MAX_REPORTED:]]
