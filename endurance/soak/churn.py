"""What happens when: a troubled time and a calm one in turn, and the agent's own turns in between."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from endurance.soak.judge import INTERVAL, Judge
from endurance.soak.world import World
from podgpu.agent.loop import Agent

CYCLE = 600.0
"""Simulated seconds: the first half with faults, the second without new ones."""
_LOOK_EVERY = 10.0
_RECOVERY_SECONDS = 120


class Churn:
    def __init__(self, world: World, agent: Agent, judge: Judge, random: Random) -> None:
        self._world = world
        self._agent = agent
        self._judge = judge
        self._random = random
        self._began = world.clock.monotonic()
        self._heals: list[tuple[float, Callable[[], None]]] = []

    @property
    def simulated(self) -> float:
        return self._world.clock.monotonic() - self._began

    def second(self) -> None:
        """One simulated second."""
        self._world.clock.advance(1.0)
        now = self.simulated
        self._heal(now)
        self._live()
        if now % CYCLE < CYCLE / 2:
            self._trouble(now)
        self._take_turns(now)
        if now % _LOOK_EVERY == 0:
            self._look()

    def recover(self) -> None:
        """All faults end, and nothing else happens: after a while everything is in the metrics again, by itself."""
        for _, heal in self._heals:
            heal()
        self._heals.clear()
        for _ in range(_RECOVERY_SECONDS):
            self._world.clock.advance(1.0)
            self._take_turns(self.simulated)
        self._look()

    def _take_turns(self, now: float) -> None:
        if now % INTERVAL == 0:
            self._agent.read_telemetry()
            self._agent.read_allocation()
        self._agent.read_usage()

    def _look(self) -> None:
        self._judge.look(self._agent.published.fresh.plain.decode())

    def _live(self) -> None:
        """Ordinary life: a few changes in ten seconds."""
        world = self._world
        acts = (world.start_pod, world.start_pod, world.end_pod, world.start_process, world.start_process)
        if self._random.random() < 0.4:
            self._random.choice((*acts, world.end_process))()
        if self._random.random() < 0.004:
            world.relayout()

    def _trouble(self, now: float) -> None:
        world, random = self._world, self._random
        if random.random() < 0.02 and not world.kubelet_is_ill:
            world.ill_kubelet()
            self._heals.append((now + random.choice((2.0, 20.0, 90.0)), world.well_kubelet))
        if random.random() < 0.008:
            world.ill_gpu()
            self._heals.append((now + random.choice((5.0, 40.0, 120.0)), world.well_gpus))
        for chance, act in ((0.002, world.reset_gpu), (0.002, world.reload_driver), (0.004, world.xid_storm)):
            if random.random() < chance:
                act()

    def _heal(self, now: float) -> None:
        for due, heal in [planned for planned in self._heals if planned[0] <= now]:
            heal()
            self._heals.remove((due, heal))
