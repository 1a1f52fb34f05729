"""The schedule: periods with faults and calm periods alternate, with the agent's turns in
between.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from endurance.soak.judge import INTERVAL, Judge
from endurance.soak.world import World
from podgpu.node.agent.agent import Agent

CYCLE = 600.0
"""Simulated seconds: the first half with new faults, the second half without."""
_LOOK_EVERY = 10.0
_RECOVERY_SECONDS = 120


class Churn:
    def __init__(self, world: World, agent: Agent, judge: Judge, random: Random) -> None:
        self._world = world
        self._agent = agent
        self._judge = judge
        self._random = random
        self._began = world.clock.monotonic()
        self._repairs: list[tuple[float, Callable[[], None]]] = []

    @property
    def simulated(self) -> float:
        return self._world.clock.monotonic() - self._began

    def second(self) -> None:
        """Runs one simulated second."""
        self._world.clock.advance(1.0)
        now = self.simulated
        self._run_repairs(now)
        self._live()
        if now % CYCLE < CYCLE / 2:
            self._cause_faults(now)
        self._take_turns(now)
        if now % _LOOK_EVERY == 0:
            self._look()

    def recover(self) -> None:
        """Ends all faults. The metrics must be complete again after a while."""
        for _, repair in self._repairs:
            repair()
        self._repairs.clear()
        for _ in range(_RECOVERY_SECONDS):
            self._world.clock.advance(1.0)
            self._take_turns(self.simulated)
        self._look()

    def _take_turns(self, now: float) -> None:
        """Repeats turns in which a call was late because the machine is busy. The simulated clock
        does not advance.
        """
        self._world.calls.finish()  # calls that hung until a repair
        self._take_turn(now)
        while self._world.calls.finish():
            self._take_turn(now)

    def _take_turn(self, now: float) -> None:
        if now % INTERVAL == 0:
            self._agent.read_telemetry()
            self._agent.read_allocation()
        self._agent.read_usage()

    def _look(self) -> None:
        self._judge.look(self._agent.published.fresh.plain.decode())

    def _live(self) -> None:
        """Simulates normal operation: a few changes in ten seconds."""
        world = self._world
        acts = (
            world.start_pod,
            world.start_pod,
            world.end_pod,
            world.start_process,
            world.start_process,
        )
        if self._random.random() < 0.4:
            self._random.choice((*acts, world.end_process))()
        if self._random.random() < 0.004:
            world.relayout()

    def _cause_faults(self, now: float) -> None:
        world, random = self._world, self._random
        if random.random() < 0.02 and not world.is_kubelet_broken:
            world.break_kubelet()
            self._repairs.append((now + random.choice((2.0, 20.0, 90.0)), world.repair_kubelet))
        if random.random() < 0.008:
            world.break_gpu()
            self._repairs.append((now + random.choice((5.0, 40.0, 120.0)), world.repair_gpus))
        for chance, act in (
            (0.002, world.reset_gpu),
            (0.002, world.reload_driver),
            (0.004, world.xid_storm),
        ):
            if random.random() < chance:
                act()

    def _run_repairs(self, now: float) -> None:
        for due, repair in [planned for planned in self._repairs if planned[0] <= now]:
            repair()
            self._repairs.remove((due, repair))
