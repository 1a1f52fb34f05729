"""Finds pods that could share a GPU, from what each of them did in every 5 minutes of a range.

The steps of a pod are an integer with a lane of 16 bits for each step. So whether two pods fit is
found by a few operations on long integers (2 µs for a week), and only likely mixes are computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import add, itemgetter, mul
from typing import NamedTuple

from podgpu.past.busy_steps import (
    FULL,
    STEP_BYTES,
    STEPS_PER_HOUR,
    UNKNOWN,
    UNKNOWN_STEP,
    read_steps,
)
from podgpu.past.savings.slowdown import MAX_BUSY, MAX_PODS, stretch, weigh

LEAST_KNOWN = 0.95  # of the range, of one pod and of all pods of a mix together
_LANE_BITS = 16
_NO_STEP = b"\0\0"
_LIMIT = round(MAX_BUSY * FULL)
_HIGH = 0x8000  # the highest bit of a lane
_WEIGHTS = [weigh(value / FULL) for value in range(FULL + 1)]
# Times a `stretch`, the slowdown of a pod in a step. An idle pod is not slowed down: 0 / 1.
_RATIOS = [weigh(value / FULL) / max(1, value) * FULL for value in range(FULL + 1)]
_HOURS = 24
# A pod is compared with this many open mixes, and those that overlap least are computed. With
# 8,000 pods, twice as many cost 2 s more and save 1 % more GPUs.
_COMPARED = 32
_COMPUTED = 3
_MARGIN = 1.1  # mixes that are computed may overlap by so much more than the limit allows


@dataclass(slots=True)
class Candidate:
    """A pod that holds one whole GPU alone. `steps`: 0 to `FULL`, or `UNKNOWN`."""

    steps: bytes
    memory: float
    wait_factor: float = 1.0  # it waits so many times as long as predicted
    lanes: int = field(init=False)  # the values of the steps; unknown steps are 0
    known: int = field(init=False)  # lanes of ones for known steps
    active: int = field(init=False)  # lanes of ones for steps in which it was busy
    profile: list[int] = field(init=False)  # sums by hour of the range, modulo a day
    total: int = field(init=False)

    def __post_init__(self) -> None:
        # A known value has a high byte below 255, so both bytes that are found belong to one step.
        zeroed = self.steps.replace(UNKNOWN_STEP, _NO_STEP)
        count = len(self.steps) // STEP_BYTES
        high = _all_lanes(count, _HIGH)
        self.lanes = int.from_bytes(zeroed, "little")

        # Only an unknown value is large enough to have the high bit.
        unknown = int.from_bytes(self.steps, "little") & high
        self.known = _all_lanes(count, UNKNOWN) ^ _fill_lanes(unknown)

        # The sum has the high bit in each lane that is not 0.
        below_high = _all_lanes(count, _HIGH - 1)
        self.active = _fill_lanes((self.lanes + below_high) & high)

        values = read_steps(zeroed)
        self.profile = [0] * _HOURS
        for start in range(0, count, STEPS_PER_HOUR):
            hour = start // STEPS_PER_HOUR % _HOURS
            busy = values[start : start + STEPS_PER_HOUR]
            self.profile[hour] += sum(busy)

        self.total = sum(self.profile)


class Shared(NamedTuple):
    """What one pod of a mix would do, as shares of the time in which all of them are known."""

    busy: float
    wait: float

    @property
    def slowdown(self) -> float:
        if not self.busy:
            return 1.0
        return 1 + self.wait / self.busy


@dataclass(slots=True)
class Mix:
    """Pods that would share one GPU. The sums over its members have the names of their parts."""

    pods: list[int]  # positions in the list of candidates
    members: list[Candidate]
    memory: float
    lanes: int
    known: int  # of the steps in which all members are known
    active: int  # of the steps in which any member was busy
    profile: list[int]
    shared: list[Shared] = field(default_factory=list)  # empty while there is only one member


def find_mixes(candidates: Sequence[Candidate], memory: float, most_slowdown: float) -> list[Mix]:
    """Returns mixes of at least two pods. A pod is in at most one of them.

    `memory`: what may be used of one GPU. The busiest pods are placed first.
    """
    places = range(len(candidates))
    busiest_first = sorted(places, key=lambda place: candidates[place].total, reverse=True)
    open_mixes: list[Mix] = []
    full: list[Mix] = []
    for place in busiest_first:
        candidate = candidates[place]
        if candidate.memory > memory:
            continue

        joined = _join(open_mixes, place, candidate, memory, most_slowdown)
        if joined is None:
            open_mixes.append(
                Mix(
                    pods=[place],
                    members=[candidate],
                    memory=candidate.memory,
                    lanes=candidate.lanes,
                    known=candidate.known,
                    active=candidate.active,
                    profile=candidate.profile,
                )
            )
        elif len(joined.pods) == MAX_PODS:
            open_mixes.remove(joined)
            full.append(joined)

    mixed = [mix for mix in open_mixes if len(mix.pods) > 1]
    return full + mixed


def predict_mix(members: Sequence[Candidate]) -> list[Shared]:
    """Applies the model to every step in which all pods are known."""
    count = len(members[0].steps) // STEP_BYTES
    known = _all_lanes(count, UNKNOWN)
    for member in members:
        known &= member.known
    return _predict(members, known)


def _join(
    mixes: Sequence[Mix], place: int, candidate: Candidate, memory: float, most_slowdown: float
) -> Mix | None:
    """Adds the pod to the mix with which it overlaps least. Returns None if it fits in none."""
    steps = len(candidate.steps) / STEP_BYTES
    for mix in _find_possible(mixes, candidate, memory, most_slowdown):
        if not _is_below_limit(mix, candidate):
            continue

        known = mix.known & candidate.known
        if known.bit_count() < LEAST_KNOWN * _LANE_BITS * steps:
            continue

        members = [*mix.members, candidate]
        shared = _predict(members, known)
        if all(member.slowdown < most_slowdown for member in shared):
            mix.pods.append(place)
            mix.members = members
            mix.memory += candidate.memory
            mix.known = known
            mix.lanes += candidate.lanes
            mix.active |= candidate.active
            mix.profile = list(map(add, mix.profile, candidate.profile))
            mix.shared = shared
            return mix

    return None


def _find_possible(
    mixes: Sequence[Mix], candidate: Candidate, memory: float, most_slowdown: float
) -> list[Mix]:
    """Returns mixes that have enough memory, those with the least overlap first."""
    # A pod waits at least for what the others do while it is busy. The overlap is the sum over
    # hours of the product of both sums of an hour, so the limit is scaled to this unit.
    steps = len(candidate.steps) / STEP_BYTES
    most_overlap = candidate.total * (most_slowdown - 1) * _MARGIN
    most_overlap *= FULL * steps / _HOURS
    possible: list[tuple[float, Mix]] = []
    for mix in mixes[-_COMPARED:]:
        if mix.memory + candidate.memory > memory:
            continue

        products = map(mul, mix.profile, candidate.profile)
        overlap = float(sum(products))
        # Pods that alternate within an hour overlap less than its sums say.
        if overlap > most_overlap:
            overlap = _estimate_overlap(mix, candidate)
        if overlap <= most_overlap:
            possible.append((overlap, mix))

    possible.sort(key=itemgetter(0))
    return [mix for _, mix in possible[:_COMPUTED]]


def _estimate_overlap(mix: Mix, candidate: Candidate) -> float:
    """Estimates the overlap by the steps in which both are busy.

    Assumes that each is equally busy in all of its steps.
    """
    both = (mix.active & candidate.active).bit_count() // _LANE_BITS
    if not both:
        return 0.0

    steps = len(candidate.steps) // STEP_BYTES
    active = mix.active.bit_count() // _LANE_BITS
    candidate_active = candidate.active.bit_count() // _LANE_BITS
    pairs = active * candidate_active
    overlap_of_pair = sum(mix.profile) * candidate.total / pairs
    return overlap_of_pair * both * steps / _HOURS


def _is_below_limit(mix: Mix, candidate: Candidate) -> bool:
    """Returns whether the busy shares add up to less than `MAX_BUSY` in every step that counts.

    Those are the steps in which at least two of the pods are busy, even if another is unknown.
    """
    count = len(candidate.steps) // STEP_BYTES
    counted = mix.active & candidate.active
    sums = (mix.lanes & counted) + (candidate.lanes & counted)
    # Adding this sets the high bit of each lane that reaches the limit.
    to_high = _all_lanes(count, _HIGH - _LIMIT)
    at_limit = (sums + to_high) & _all_lanes(count, _HIGH)
    return at_limit == 0


class _MixSteps(NamedTuple):
    values: list[array[int]]  # of each pod; 0 in a step in which another pod is unknown
    stretches: list[float]  # `slowdown.stretch` of each step


def _read_mix(members: Sequence[Candidate], known: int) -> _MixSteps:
    """`known`: lanes of ones for the steps in which all members are known."""
    length = len(members[0].steps)
    steps = []
    sums = [0.0] * (length // STEP_BYTES)
    for member in members:
        lanes = member.lanes & known
        values = read_steps(lanes.to_bytes(length, "little"))
        steps.append(values)
        weights = [_WEIGHTS[value] for value in values]
        sums = list(map(add, sums, weights))

    stretches = [stretch(weights) for weights in sums]
    return _MixSteps(steps, stretches)


def _predict(members: Sequence[Candidate], known: int) -> list[Shared]:
    steps = max(1, known.bit_count() // _LANE_BITS)
    mix = _read_mix(members, known)
    shared = []
    for member, values in zip(members, mix.values, strict=True):
        # Times are in steps.
        alone = sum(values) / FULL
        weights = [_WEIGHTS[value] for value in values]
        together = sum(map(mul, weights, mix.stretches))
        wait = max(0.0, together - alone) * member.wait_factor
        shared.append(Shared(alone / steps, wait / steps))

    return shared


def find_worst(mix: Mix) -> list[float]:
    """Returns the largest slowdown of each pod in one step."""
    steps = _read_mix(mix.members, mix.known)
    worst = []
    for member, values in zip(mix.members, steps.values, strict=True):
        ratios = [_RATIOS[value] for value in values]
        largest = max(map(mul, ratios, steps.stretches))
        predicted = max(1.0, largest)
        worst.append(1 + (predicted - 1) * member.wait_factor)

    return worst


@lru_cache(maxsize=64)
def _all_lanes(count: int, value: int) -> int:
    """Returns this value in each lane."""
    lane = value.to_bytes(STEP_BYTES, "little")
    return int.from_bytes(lane * count, "little")


def _fill_lanes(high: int) -> int:
    """Returns lanes of ones where `high` has the highest bit of a lane, and no other bit."""
    return (high - (high >> (_LANE_BITS - 1))) | high
