"""Finds GPUs that could be given back: pods to stop, to shrink, or to put on a shared GPU.

The input is what every pod did in each 5 minutes. A pod is in at most one line, except that it may
also be moved to free a node. Everything doubtful is left out and counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from podgpu.charge import UsageAccount, price_hours
from podgpu.errors import few_of, plural, utc_text
from podgpu.fleet.jobs import JOB_KINDS
from podgpu.fleet.settings import duration_text
from podgpu.known import round_known, select_known, sum_all
from podgpu.metrics.mig import list_mig_sizes
from podgpu.model import group_by
from podgpu.past.busy_steps import FULL, UNKNOWN, read_steps, write_steps
from podgpu.past.savings.mixes import (
    LEAST_KNOWN,
    Candidate,
    Mix,
    Shared,
    find_mixes,
    find_worst,
    predict_mix,
)
from podgpu.past.savings.savings import (
    ALL_READ,
    KINDS,
    MONTH_HOURS,
    SHORTEST,
    Advice,
    FleetLoad,
    Kind,
    LeftOut,
    Monthly,
    NodeRoom,
    PodAdvice,
    PodLoad,
    SavedKind,
    SavingsAnswer,
    SavingsLimits,
    SavingsQuery,
    SavingsTotals,
    SharedLoad,
    SharedPod,
    SharedPodLoad,
    UnreadPods,
)
from podgpu.past.savings.slowdown import MAX_BUSY
from podgpu.past.time_steps import COARSE, HOUR

COMPUTE_HEADROOM = 0.2
MEMORY_HEADROOM = 0.1
REASONS = {
    "annotation": 'annotation podgpu.io/savings: "false"',
    "namespace": "namespace of --savings-skip-namespaces",
    "training": "job that uses several GPUs",
    "model": "GPUs of several models, or of another model before",
    "devices": "another number of GPUs before",
    "unknown": "use known for less than 95 % of this time (a pod that began later, for example)",
    "part": "a MIG instance or a part of a GPU already",
    "memory": "memory not known",
    "many": "not examined, because there are too many pods",
    "needed": "needs what it holds",
}
"""Why pods are in no line."""
# Their pods work together, so none of them can be shrunk or slowed down alone. The pods of a
# StatefulSet are often single services.
_TRAINING_KINDS = JOB_KINDS - {"StatefulSet"}
_LEAST_ERROR = 0.03  # of the time; a waiting time that differs less is as predicted
_OwnerKey = tuple[str, str, str, str]  # cluster, namespace, kind and name
_GIB = 1024**3
_DIGITS = 4


@dataclass(slots=True)
class _Pod:
    """A pod that may be recommended, with figures of its known steps."""

    load: PodLoad
    mean: float  # busy GPUs
    peak: float  # busy GPUs
    idle_seconds: float = 0.0  # up to the end of the range
    pause_seconds: float = 0.0  # the longest one after which it worked again
    worked: float = 0.0  # share of the steps before `idle_seconds` in which it worked


def make_savings(query: SavingsQuery, fleet: FleetLoad, currency: str) -> SavingsAnswer:
    """`fleet`: what pods did in the range of the query, or since the oldest record."""
    # From the pods of all namespaces, because a user only sees the factors of his own pods.
    wait_factors = _find_wait_factors(fleet.shared)
    if query.visible is not None:
        fleet = _select_visible(fleet, query.visible)

    is_computed = fleet.seconds >= SHORTEST
    lines: list[Advice] = []
    left: dict[str, list[PodLoad]] = defaultdict(list)
    shared: list[SharedPod] = []
    if is_computed:
        rules = _Rules(query, fleet.seconds, left, wait_factors)
        lines = rules.run(fleet.pods)
        lines += _pack(fleet, currency)
        for group in fleet.shared:
            shared += _compare_waits(group)

    errors = [abs(pod.predicted_wait - pod.measured_wait) for pod in shared]
    return SavingsAnswer(
        from_=fleet.start,
        to=fleet.end,
        step_seconds=COARSE,
        month_hours=MONTH_HOURS,
        currency=currency,
        is_computed=is_computed,
        notes=_make_notes(fleet, currency),
        limits=SavingsLimits(
            slowdown=query.slowdown,
            idle_seconds=query.idle,
            busy=MAX_BUSY,
            known=LEAST_KNOWN,
            compute_headroom=COMPUTE_HEADROOM,
            memory_headroom=MEMORY_HEADROOM,
        ),
        totals=_make_totals(fleet, lines),
        kinds=[_sum_kind(kind, lines) for kind in KINDS],
        advice=_sort_lines(lines),
        left_out=_count_left_out(left, fleet.unread),
        shared=shared,
        prediction_error_ratio=round(fmean(errors), _DIGITS) if errors else None,
    )


def _select_visible(fleet: FleetLoad, visible: frozenset[str]) -> FleetLoad:
    """Returns the pods of some namespaces, and the GPUs that only these share."""
    pods = [pod for pod in fleet.pods if pod.account.namespace in visible]
    shared = []
    for group in fleet.shared:
        if all(pod.account.namespace in visible for pod in group.pods):
            shared.append(group)

    # The pods of a node, and those that are only counted, belong to others, too.
    return replace(fleet, pods=pods, shared=shared, rooms=[], unread=ALL_READ)


def _make_notes(fleet: FleetLoad, currency: str) -> list[str]:
    notes = []
    if fleet.seconds < SHORTEST:
        notes.append(_explain_short(fleet))
    elif fleet.known_from is not None:
        notes.append(_explain_start(fleet, fleet.known_from))

    notes += fleet.notes
    if not currency:
        notes.append("there are no prices, so savings are in GPUs only: start podgpu with --prices")
    return notes


def advise_pod(load: PodLoad, seconds: float) -> str:
    """Returns what could be done with one pod, for its page. Empty if there is nothing."""
    if seconds < SHORTEST:
        return ""

    rules = _Rules(SavingsQuery(), seconds, left=defaultdict(list), wait_factors={})
    pod = rules.examine(load)
    if pod is None:
        return ""

    line = rules.stop(pod)
    if line is None and rules.may_change(load):
        line = rules.shrink(pod)
    if line is None:
        return ""

    if line.kind == "stop":
        return f"It could be stopped: {line.says}"
    # A target may begin with "a".
    target = line.target[0].upper() + line.target[1:]
    return f"{target} would be enough: {line.says}"


def _explain_short(fleet: FleetLoad) -> str:
    if fleet.known_from is None:
        return "the range is shorter than a day: nothing is recommended from so little"
    return (
        f"{_explain_start(fleet, fleet.known_from)}: nothing is recommended from"
        f" {duration_text(max(0, round(fleet.seconds)))} of known use; it needs a day"
    )


def _explain_start(fleet: FleetLoad, known_from: float) -> str:
    """Says whether there is no record before, or records in which the use of no GPU is known."""
    if fleet.recorded_from is None:
        return f"there is no record before {utc_text(known_from)}"

    since = f"although there are records since {utc_text(fleet.recorded_from)}"
    if known_from >= fleet.end:
        return f"no use of a GPU is known, {since}"
    return f"no use of a GPU is known before {utc_text(known_from)}, {since}"


# Rules


class _Rules:
    def __init__(
        self,
        query: SavingsQuery,
        seconds: float,
        left: dict[str, list[PodLoad]],
        wait_factors: Mapping[_OwnerKey, float],
    ) -> None:
        """Pods that are in no line are added to `left`, by reason."""
        self._query = query
        self._wait_factors = wait_factors
        self._seconds = seconds
        self._left = left

    def run(self, pods: Iterable[PodLoad]) -> list[Advice]:
        lines: list[Advice] = []
        single: list[_Pod] = []
        for load in pods:
            pod = self.examine(load)
            if pod is None:
                continue

            line = self.stop(pod)
            if line is not None:
                lines.append(line)
            elif not self.may_change(load):
                continue
            elif load.devices == 1:
                single.append(pod)
            else:
                lines += self._shrink_if_possible(pod)

        return lines + self._share(single)

    def examine(self, load: PodLoad) -> _Pod | None:
        """Returns None if too little is known about the pod, or if it must not be changed."""
        if load.problem:
            self._left[load.problem].append(load)
            return None

        values = read_steps(load.steps)
        known = [value for value in values if value != UNKNOWN]
        if len(known) < LEAST_KNOWN * len(values) or not known:
            self._left["unknown"].append(load)
            return None

        peak = max(known)
        if peak > FULL * load.devices:
            self._left["devices"].append(load)
            return None

        mean = sum(known) / len(known)
        pod = _Pod(load, mean / FULL, peak / FULL)
        # Most pods work at the end. For these, the slow search is not needed.
        if values[-1] in (0, UNKNOWN):
            _add_idle(pod, values)
        return pod

    def may_change(self, load: PodLoad) -> bool:
        """Returns whether it may run on a part of what it holds. If so, its memory is known."""
        reason = ""
        if not load.is_whole:
            reason = "part"
        elif load.job_gpus > 1 and _is_training(load):
            reason = "training"
        elif load.peak_bytes is None or not load.gpu_bytes:
            reason = "memory"
        if reason:
            self._left[reason].append(load)
        return not reason

    def stop(self, pod: _Pod) -> Advice | None:
        # 5 % of the whole range may be unknown.
        least = min(self._query.idle, LEAST_KNOWN * self._seconds)
        # A pod that worked again after such a pause is likely to do so again.
        if pod.idle_seconds < least or pod.pause_seconds >= pod.idle_seconds:
            return None

        load = pod.load
        has = "its GPU" if load.devices == 1 else f"its {load.devices} GPUs"
        says = f"Nothing ran on {has} for the last {_days(pod.idle_seconds)}."
        assumes = "Nobody needs what the pod keeps in GPU memory, and it can be started again."
        if pod.worked:
            says += f" Before, it worked in {_percent(pod.worked)} of all intervals of 5 minutes."
            assumes = f"Its work does not start again, as after a weekend. {assumes}"

        described = _describe_pod(pod)
        described.idle_seconds = pod.idle_seconds
        return Advice(
            kind="stop",
            model=load.model,
            says=says,
            assumes=assumes,
            falsified_by="Any busy time on its GPU since the end of this range.",
            pods=[described],
            gpus_before=round(load.gpus, _DIGITS),
            gpus_after=0.0,
            saved=_rounded(_monthly(load.gpus, load.price)),
            cost=load.cost,
        )

    def shrink(self, pod: _Pod) -> Advice | None:
        """Call it only for a pod that `may_change`."""
        load = pod.load
        assert load.peak_bytes is not None
        assert load.gpu_bytes
        memory = load.peak_bytes * (1 + MEMORY_HEADROOM) / load.gpu_bytes
        after, target = _find_target(pod, memory, load.gpu_bytes)
        if not target:
            return None

        saved = (load.devices - after) / load.devices
        assumes = f"Its work can run on {target}, and it keeps its habits."
        if load.devices == 1:
            assumes += " Others use the rest of the GPU."

        price = price_hours(saved, load.price)
        verb = "has" if after <= 1 else "have"
        most_busy = after / (1 + COMPUTE_HEADROOM)
        return Advice(
            kind="shrink",
            model=load.model,
            target=target,
            says=_describe_peaks(pod),
            assumes=assumes,
            falsified_by=(
                f"A mean of 5 minutes above {most_busy:.2f} busy GPUs, or more"
                f" memory than {target} {verb}."
            ),
            pods=[_describe_pod(pod)],
            gpus_before=round(load.gpus, _DIGITS),
            gpus_after=round(after, _DIGITS),
            saved=_rounded(_monthly(load.gpus * saved, price)),
            cost=load.cost,
        )

    def _shrink_if_possible(self, pod: _Pod) -> list[Advice]:
        line = self.shrink(pod)
        if line is None:
            self._left["needed"].append(pod.load)
            return []
        return [line]

    def _share(self, single: Sequence[_Pod]) -> list[Advice]:
        """Mixes pods of the same model, of which each holds a single GPU.

        Those that fit in no mix may fit a MIG instance.
        """
        lines = []
        groups = group_by(single, lambda pod: (pod.load.cluster, pod.load.model))
        for (_, model), pods in groups.items():
            mixed: set[int] = set()
            for mix in self._find_mixes(pods):
                mixed.update(mix.pods)
                members = [pods[place] for place in mix.pods]
                lines.append(self._make_mix(model, members, mix))

            for place, pod in enumerate(pods):
                if place not in mixed:
                    lines += self._shrink_if_possible(pod)
        return lines

    def _find_mixes(self, pods: Sequence[_Pod]) -> list[Mix]:
        candidates = []
        for pod in pods:
            load = pod.load
            factor = self._wait_factors.get(_owner_of(load.cluster, load.account), 1.0)
            candidates.append(Candidate(load.steps, load.peak_bytes or 0.0, factor))

        smallest_gpu = min(pod.load.gpu_bytes or 0.0 for pod in pods)
        memory = smallest_gpu / (1 + MEMORY_HEADROOM)
        return find_mixes(candidates, memory, self._query.slowdown)

    def _make_mix(self, model: str, pods: Sequence[_Pod], mix: Mix) -> Advice:
        """`pods`: the members of the mix, in its order."""
        slowest = max(shared.slowdown for shared in mix.shared)
        price = None
        prices = select_known(pod.load.price for pod in pods)
        if len(prices) == len(pods):
            # GPUs of one model may differ in price, by node. The most expensive one may stay.
            price = sum(prices) - max(prices)

        worst = find_worst(mix)
        described = []
        for number, pod in enumerate(pods):
            advice = _describe_pod(pod)
            advice.wait = round(mix.shared[number].wait, _DIGITS)
            advice.slowdown = round(mix.shared[number].slowdown, _DIGITS)
            advice.worst_slowdown = round(worst[number], _DIGITS)
            factor = mix.members[number].wait_factor
            if factor > 1:
                advice.wait_factor = round(factor, _DIGITS)
            described.append(advice)

        return Advice(
            kind="share",
            model=model,
            target="1 GPU",
            says=(
                f"{len(pods)} pods would need one GPU: while two of them ran, they were busy for"
                f" less than {_percent(MAX_BUSY)} of any 5 minutes together. Their memory peaks add"
                f" up to {mix.memory / _GIB:.1f} GiB. The slowest would take {slowest:.2f} times as"
                f" long, and {max(worst):.2f} times in the worst 5 minutes."
            ),
            assumes=_assume_mix(pods, described),
            falsified_by=(
                f"After they share: a waiting time above {_percent(self._query.slowdown - 1)} of a"
                " pod's busy time, or memory above the sum of the peaks."
            ),
            pods=described,
            gpus_before=float(len(pods)),
            gpus_after=1.0,
            saved=_rounded(_monthly(len(pods) - 1.0, price)),
            cost=_sum_known([pod.load.cost for pod in pods]),
        )


def _assume_mix(pods: Sequence[_Pod], described: Sequence[PodAdvice]) -> str:
    texts = [
        "Their work stays as it was in each 5 minutes of this range, and they do not start their"
        " work at the same moments within them. The GPU is shared by time slices. A pod that"
        " synchronises with the GPU very often waits longer."
    ]
    for pod in described:
        if pod.wait_factor is not None and pod.owner is not None:
            texts.append(
                f"{pod.pod} waits {pod.wait_factor:.1f} times as long as the model says, as other"
                f" pods of {pod.owner.text} that share a GPU already."
            )
    if len({pod.load.node for pod in pods}) > 1:
        texts.append("All of them can run on one node.")
    if len({pod.load.account.namespace for pod in pods}) > 1:
        texts.append("They are of different namespaces, and memory errors of one may end all.")
    return " ".join(texts)


def _is_training(load: PodLoad) -> bool:
    if load.account.owner_kind:
        return load.account.owner_kind in _TRAINING_KINDS
    return bool(load.account.job)


def _add_idle(pod: _Pod, values: Sequence[int]) -> None:
    """Finds for how long before the end the pod was certainly idle, and what it did before.

    `values`: use in each step. Sets nothing if too many of the last steps are unknown.
    """
    worked_steps = 0
    longest_pause = 0
    # Since it worked last. Unknown steps may be idle, so a pause may be as long as this.
    pause = 0
    idle_steps = 0
    for value in values:
        if value in (0, UNKNOWN):
            pause += 1
            if value == 0:
                idle_steps += 1
        else:
            worked_steps += 1
            longest_pause = max(longest_pause, pause)
            pause = 0
            idle_steps = 0

    if idle_steps < LEAST_KNOWN * pause:
        return

    pod.idle_seconds = idle_steps * COARSE
    if worked_steps:
        pod.pause_seconds = longest_pause * COARSE
        pod.worked = worked_steps / (len(values) - pause)


def _find_target(pod: _Pod, memory: float, gpu_bytes: float) -> tuple[float, str]:
    """Returns the GPUs that are enough, and their name. Empty if the pod needs all it has.

    `memory`: in memories of one GPU, with headroom.
    """
    load = pod.load
    compute = pod.peak * (1 + COMPUTE_HEADROOM)
    gpus = max(1, math.ceil(compute), math.ceil(memory))
    if gpus < load.devices:
        return float(gpus), plural(gpus, "GPU")
    if load.devices == 1:
        return _find_mig_size(load.model, compute, memory, gpu_bytes)
    return float(gpus), ""


def _find_mig_size(
    model: str, compute: float, memory: float, gpu_bytes: float
) -> tuple[float, str]:
    """Returns the part of a GPU and the name of the smallest instance. The name may be empty."""
    for size in list_mig_sizes(model):
        if compute <= size.compute and memory <= size.memory:
            # Two instances with half of the memory each leave no room for a third one, also if
            # they have less than half of the compute.
            part = max(size.compute, size.memory)
            gib = size.memory * gpu_bytes / _GIB
            return part, f"a MIG instance {size.name} ({gib:.0f} GiB)"
    return 1.0, ""


def _describe_peaks(pod: _Pod) -> str:
    load = pod.load
    busy = f"{_percent(pod.peak)} busy"
    has = "Its GPU was"
    if load.devices > 1:
        busy = f"{pod.peak:.2f} busy GPUs"
        has = f"Its {load.devices} GPUs were together"
    return (
        f"{has} at most {busy} in a mean of 5 minutes, and its memory at most"
        f" {(load.peak_bytes or 0) / _GIB:.1f} GiB."
    )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def _days(seconds: float) -> str:
    """Writes whole minutes, hours from 2 hours on, and days from 48 hours on."""
    # The interval of 5 minutes that is not complete yet counts: 23:55 are 24 hours.
    hours = int((seconds + COARSE) // HOUR)
    if hours < 2:
        return plural(int(seconds // 60), "minute")
    if hours < 48:
        return plural(hours, "hour")

    days, rest = divmod(hours, 24)
    if not rest:
        return plural(days, "day")
    return f"{plural(days, 'day')} and {plural(rest, 'hour')}"


def _describe_pod(pod: _Pod) -> PodAdvice:
    advice = _identify_pod(pod.load)
    advice.busy = round(pod.mean, _DIGITS)
    advice.peak_busy = round(pod.peak, _DIGITS)
    advice.peak_memory_bytes = pod.load.peak_bytes
    return advice


def _identify_pod(load: PodLoad) -> PodAdvice:
    account = load.account
    return PodAdvice(
        cluster=load.cluster,
        namespace=account.namespace,
        pod=account.pod,
        job=account.job,
        owner=account.owner,
        node=load.node,
        gpus=round(load.gpus, _DIGITS),
    )


# Free GPUs


class _PackPlan(NamedTuple):
    """The pods that would leave a node."""

    room: NodeRoom
    moves: list[PodAdvice]

    @property
    def effort(self) -> tuple[float, int, str]:
        """Moved GPUs and pods. The name of a node decides between equal plans."""
        gpus = sum(move.gpus for move in self.moves)
        return gpus, len(self.moves), self.moves[0].node


def _pack(fleet: FleetLoad, currency: str) -> list[Advice]:
    lines = []
    groups = group_by(fleet.rooms, lambda room: (room.cluster, room.model))
    for key, rooms in groups.items():
        sizes = fleet.sizes.get(key, set())
        largest_first = sorted(sizes, reverse=True)
        line = _pack_model(rooms, largest_first, currency)
        if line is not None:
            lines.append(line)
    return lines


def _pack_model(rooms: Sequence[NodeRoom], sizes: Sequence[int], currency: str) -> Advice | None:
    """Makes room for the largest size that was used in the range, and that fits nowhere now."""
    free = sum(room.free for room in rooms)
    most_free = max(room.free for room in rooms)
    for size in sizes:
        fits_already = size <= most_free
        if fits_already or size > free:
            continue

        plans = []
        large_enough = [room for room in rooms if room.gpus >= size]
        for room in large_enough:
            moves = _plan_moves(room, rooms, size)
            if moves:
                plans.append(_PackPlan(room, moves))
        if plans:
            easiest = min(plans, key=lambda plan: plan.effort)
            return _make_pack(easiest, rooms, size, currency)
    return None


def _plan_moves(room: NodeRoom, rooms: Sequence[NodeRoom], size: int) -> list[PodAdvice]:
    """Moves pods to the fullest nodes on which they fit. Empty if this does not free enough."""
    free = {other.node: other.free for other in rooms}
    del free[room.node]
    moves = []
    for pod in _choose_pods(room, size):
        fitting = [node for node, left in free.items() if left >= pod.devices]
        if not fitting:
            return []

        fullest = min(fitting, key=lambda node: (free[node], node))
        free[fullest] -= pod.devices
        move = _identify_pod(pod)
        move.to_node = fullest
        moves.append(move)
    return moves


def _choose_pods(room: NodeRoom, size: int) -> list[PodLoad]:
    """Returns the smallest pods that must leave the node, so that it has `size` free GPUs.

    Empty if all of its pods are not enough.
    """
    missing = size - room.free
    chosen: list[PodLoad] = []
    movable = [pod for pod in room.pods if _is_movable(pod)]
    for pod in sorted(movable, key=lambda pod: (pod.devices, pod.account.key)):
        if missing > 0:
            chosen.append(pod)
            missing -= pod.devices
    if missing > 0:
        return []

    # Large pods are placed first, because they fit on fewer nodes.
    chosen.sort(key=lambda pod: pod.account.key)
    chosen.sort(key=lambda pod: pod.devices, reverse=True)
    return chosen


def _is_movable(pod: PodLoad) -> bool:
    if not pod.is_whole or pod.problem in ("annotation", "namespace"):
        return False
    return pod.job_gpus <= 1 or not _is_training(pod)


def _make_pack(plan: _PackPlan, rooms: Sequence[NodeRoom], size: int, currency: str) -> Advice:
    with_free = [room for room in rooms if room.free]
    free = sum(room.free for room in with_free)
    costs = [price_hours(room.free, room.price) for room in with_free]
    per_month = price_hours(MONTH_HOURS, sum_all(costs))
    cost = ""
    if currency and per_month is not None:
        cost = f" They cost {per_month:,.0f} {currency} per month."

    names = few_of(f"{room.free} on {room.node}" for room in with_free)
    verb = "is" if free == 1 else "are"
    return Advice(
        kind="pack",
        model=plan.room.model,
        target=f"{plural(size, 'free GPU')} on {plan.room.node}",
        says=(
            f"{plural(free, 'GPU')} {verb} free ({names}), but no node has"
            f" the {size} that pods of this range held.{cost}"
        ),
        assumes="The pods can be started on another node, and none of them needs its own node.",
        falsified_by=f"A node with {size} free GPUs, or no more pods of this size.",
        pods=plan.moves,
        gpus_before=0.0,
        gpus_after=0.0,
        freed_gpus=size,
        saved=Monthly(cost=0.0 if currency else None),
    )


# Pods that share already


def _compare_waits(group: SharedLoad) -> Iterator[SharedPod]:
    """Compares measured waiting times with the model."""
    for pod, predicted in _predict_shared(group):
        yield SharedPod(
            cluster=group.cluster,
            namespace=pod.account.namespace,
            pod=pod.account.pod,
            job=pod.account.job,
            node=group.node,
            busy=round(predicted.busy, _DIGITS),
            predicted_wait=round(predicted.wait, _DIGITS),
            measured_wait=round(pod.waited, _DIGITS),
        )


def _predict_shared(group: SharedLoad) -> Iterator[tuple[SharedPodLoad, Shared]]:
    """Yields nothing if the model does not hold for the mix."""
    steps = _select_predictable([read_steps(pod.steps) for pod in group.pods])
    if steps is None:
        return

    members = [Candidate(write_steps(values), memory=0.0) for values in steps]
    yield from zip(group.pods, predict_mix(members), strict=True)


def _find_wait_factors(shared: Iterable[SharedLoad]) -> dict[_OwnerKey, float]:
    """Returns how many times as long as predicted the pods of an owner waited: the largest.

    A load that synchronises with the GPU very often gives away the rest of each time slice. Other
    pods of its owner are likely to do the same.
    """
    factors: dict[_OwnerKey, float] = {}
    for group in shared:
        for pod, predicted in _predict_shared(group):
            error = pod.waited - predicted.wait
            if error <= _LEAST_ERROR or predicted.wait <= 0 or not pod.account.owner_name:
                continue

            owner = _owner_of(group.cluster, pod.account)
            factor = pod.waited / predicted.wait
            factors[owner] = max(factors.get(owner, 1.0), factor)

    return factors


def _owner_of(cluster: str, account: UsageAccount) -> _OwnerKey:
    return cluster, account.namespace, account.owner_kind, account.owner_name


def _select_predictable(steps: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """Returns the steps of each pod in which the model holds. None if those are less than 95 %, or
    an hour.
    """
    total = len(steps[0])
    numbers = []
    for number, values in enumerate(zip(*steps, strict=True)):
        if UNKNOWN not in values and sum(values) < MAX_BUSY * FULL:
            numbers.append(number)

    seconds = len(numbers) * COARSE
    if len(numbers) < LEAST_KNOWN * total or seconds < HOUR:
        return None
    return [[values[number] for number in numbers] for values in steps]


# Sums


def _monthly(gpus: float, price: float | None) -> Monthly:
    """`price`: of an hour of these GPUs."""
    cost = price_hours(MONTH_HOURS, price)
    return Monthly(gpus=gpus, gpu_hours=gpus * MONTH_HOURS, cost=cost)


def _add_up(parts: Sequence[Monthly]) -> Monthly:
    return Monthly(
        gpus=math.fsum(part.gpus for part in parts),
        gpu_hours=math.fsum(part.gpu_hours for part in parts),
        cost=_sum_known([part.cost for part in parts]),
    )


def _sum_known(values: Sequence[float | None]) -> float | None:
    """Returns None if no value is known."""
    known = select_known(values)
    if not known:
        return None
    return math.fsum(known)


def _subtract(whole: Monthly, part: Monthly) -> Monthly:
    cost = whole.cost
    if cost is not None:
        cost -= part.cost or 0.0

    return Monthly(
        gpus=whole.gpus - part.gpus,
        gpu_hours=whole.gpu_hours - part.gpu_hours,
        cost=cost,
    )


def _rounded(amounts: Monthly) -> Monthly:
    return Monthly(
        gpus=round(amounts.gpus, _DIGITS),
        gpu_hours=round(amounts.gpu_hours, 1),
        cost=round_known(amounts.cost, 2),
    )


def _make_totals(fleet: FleetLoad, lines: Sequence[Advice]) -> SavingsTotals:
    held = [_monthly(pod.gpus, pod.price) for pod in fleet.pods]
    held.append(_monthly(fleet.unread.gpus, fleet.unread.price))
    before = _add_up(held)
    saved = _add_up([line.saved for line in lines])
    return SavingsTotals(
        before=_rounded(before),
        after=_rounded(_subtract(before, saved)),
        saved=_rounded(saved),
        packed_gpus=sum(line.freed_gpus for line in lines),
    )


def _sum_kind(kind: Kind, lines: Sequence[Advice]) -> SavedKind:
    saved = [line.saved for line in lines if line.kind == kind]
    return SavedKind(kind=kind, lines=len(saved), saved=_rounded(_add_up(saved)))


def _sort_lines(lines: Iterable[Advice]) -> list[Advice]:
    """The lines that save most come first. Of equal ones, kind and name decide."""
    by_name = sorted(lines, key=_rank_name)
    return sorted(by_name, key=_rank_saved, reverse=True)


def _rank_name(line: Advice) -> tuple[int, str]:
    pod = line.pods[0]
    name = f"{pod.cluster}/{pod.namespace}/{pod.pod}/{pod.job}"
    return KINDS.index(line.kind), name


def _rank_saved(line: Advice) -> tuple[float, float]:
    return line.saved.cost or 0.0, line.saved.gpus


def _count_left_out(left: dict[str, list[PodLoad]], unread: UnreadPods) -> list[LeftOut]:
    rows = []
    for reason, says in REASONS.items():
        pods = left.get(reason, [])
        number = len(pods)
        gpus = math.fsum(pod.gpus for pod in pods)
        if reason == "many":
            number += unread.pods
            gpus += unread.gpus

        if number:
            gpus = round(gpus, _DIGITS)
            rows.append(LeftOut(reason=reason, says=says, pods=number, gpus=gpus))

    return rows
