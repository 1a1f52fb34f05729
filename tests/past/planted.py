"""A simulated cluster with a planted truth: which pods are idle, oversized or could share a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from podgpu.charge import UsageAccount
from podgpu.past.busy_steps import UNKNOWN, step_value, write_steps
from podgpu.past.savings.savings import FleetLoad, PodLoad

GIB = 1024**3
STEPS_PER_DAY = 288
MODEL = "NVIDIA H200"
PLAIN_MODEL = "NVIDIA L40S"  # has no MIG mode
Use = Callable[[int], float | None]
"""Busy GPUs in the step with this number. None: unknown."""


def make_steps(use: Use, steps: int) -> bytes:
    values = []
    for step in range(steps):
        busy = use(step)
        values.append(UNKNOWN if busy is None else step_value(busy, is_idle=busy == 0))
    return write_steps(values)


def make_pod(name: str, use: Use | float, days: float = 7, **fields: Any) -> PodLoad:
    """Makes a pod with one GPU of 80 GiB and a memory peak of 20 GiB, if `fields` say no other."""
    busy = use if callable(use) else lambda step: float(use)
    account = fields.pop("account", None) or UsageAccount("team", name)
    steps = make_steps(busy, round(days * STEPS_PER_DAY))
    values: dict[str, Any] = {
        "node": "node-1",
        "model": PLAIN_MODEL,
        "gpu_bytes": 80.0 * GIB,
        "peak_bytes": 20.0 * GIB,
        "price": 2.0,
        "cost": 2.0 * 24 * days,
    }
    return PodLoad(account, steps, **(values | fields))


def make_fleet(*pods: PodLoad, days: float = 7) -> FleetLoad:
    return FleetLoad(start=0.0, end=days * 86_400, pods=list(pods))


class Truth(NamedTuple):
    fleet: FleetLoad
    kinds: dict[str, str]  # pod -> stop, shrink, share or keep


def make_cluster(gpus: int, seed: int = 44, days: int = 7, most_pods: int | None = None) -> Truth:
    """Makes pods of all kinds, and doubtful ones, until they hold so many GPUs."""
    chance = random.Random(seed)
    fleet = make_fleet(days=days)
    kinds: dict[str, str] = {}
    held = 0
    while held < gpus and len(kinds) != most_pods:
        kind, use, fields = _draw(chance)
        devices = fields.get("devices", 1)
        if not isinstance(devices, int) or held + devices > gpus:
            continue
        name = f"pod-{len(kinds)}"
        kinds[name] = kind
        price = 2.0 * devices
        fleet.pods.append(make_pod(name, use, days, price=price, gpus=float(devices), **fields))
        held += devices
    return Truth(fleet, kinds)


def _draw(chance: random.Random) -> tuple[str, Use, dict[str, Any]]:
    """Returns the true kind of a pod, its use, and its other fields."""
    name = chance.choices(
        ["idle", "burst", "wide", "wide full", "low", "day", "hot", "heavy", "training", "gap"],
        [8, 6, 6, 4, 16, 10, 26, 6, 6, 6],
    )[0]
    level = chance.uniform(0.04, 0.11)
    phase = chance.uniform(0, 1)
    noise = random.Random(chance.random())
    if name == "idle":
        return "stop", lambda step: 0.0, {"peak_bytes": chance.choice([1, 40]) * GIB}
    if name == "burst":
        # Idle for most of the week, but it worked within the last day.
        last = chance.randrange(5, 250)
        return "keep", lambda step: float(2016 - step in (last, 1500)), {"peak_bytes": 60.0 * GIB}
    if name == "wide":
        peak = chance.uniform(0.8, 1.6)
        fields: dict[str, Any] = {"devices": 4, "peak_bytes": 90.0 * GIB}
        return "shrink", lambda step: peak * noise.uniform(0.3, 1.0), fields
    if name == "wide full":
        # Each GPU is used half of the time, but together they are used fully for 2 % of it.
        fields = {"devices": 2, "peak_bytes": 70.0 * GIB}
        return "keep", lambda step: 2.0 if noise.random() < 0.02 else 0.4, fields
    if name == "low":
        memory = chance.uniform(4, 14) * GIB
        return "share", lambda step: level * noise.uniform(0.7, 1.3), {"peak_bytes": memory}
    if name == "day":
        memory = chance.uniform(4, 14) * GIB
        return (
            "share",
            lambda step: _at_day(step, phase) * noise.uniform(0.3, 0.6),
            {"peak_bytes": memory},
        )
    if name == "hot":
        return "keep", lambda step: noise.uniform(0.6, 1.0), {"peak_bytes": 30.0 * GIB}
    if name == "heavy":
        # Its memory fits beside no other pod.
        return "keep", lambda step: level, {"peak_bytes": 76.0 * GIB}
    if name == "training":
        account = UsageAccount("research", f"train-{chance.random()}", owner_kind="Job")
        fields = {"account": account, "devices": 8, "job_gpus": 16.0, "peak_bytes": 80.0 * GIB}
        return "keep", lambda step: 1.0, fields
    hidden = chance.uniform(0.06, 0.5)
    return "keep", lambda step: None if noise.random() < hidden else 0.0, {}


def _at_day(step: int, phase: float) -> float:
    """Returns 1 for eight hours of a day, else 0."""
    return float(math.fmod(step / STEPS_PER_DAY + phase, 1.0) < 1 / 3)
