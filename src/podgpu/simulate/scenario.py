"""This module knows what happens in `podgpu demo`, over and over: a job ends, GPUs break, a node dies; and all of it
comes back.

Acts are plain functions at moments of a cycle; `Play` carries out those whose time has come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from podgpu.simulate.stage import StageNode

CYCLE_SECONDS = 150.0
XID = 48
"""A double-bit memory error: the GPU has to be reset."""
_JOB = ("research", "llm-train-2")
_JOB_NODE, _LOST_NODE, _LOST_GPU = 2, 1, 3


@dataclass(frozen=True, slots=True)
class Act:
    at: float
    """Seconds after the beginning of a cycle."""
    says: str
    do: Callable[[], None]


def acts(nodes: Sequence[StageNode]) -> list[Act]:
    """Of the demo's three nodes. Nobody has to wait for longer than a minute to see all of it at once."""
    first, lost, last = nodes[0], nodes[_LOST_NODE], nodes[_JOB_NODE]
    ill, job = min(6, first.gpus - 1), _Job(last)
    return [
        Act(10.0, f"{last.name}: a training job ends", job.end),
        Act(15.0, f"{first.name}: GPU {ill} has XID {XID}", lambda: first.raise_xid(ill, XID)),
        Act(20.0, f"{lost.name}: GPU {_LOST_GPU} falls off the bus", lambda: lost.lose(_LOST_GPU)),
        Act(30.0, f"{last.name}: its exporter dies", lambda: _answer(last, False)),
        Act(90.0, f"{last.name}: its exporter is back", lambda: _answer(last, True)),
        Act(95.0, f"{last.name}: the next training job begins", job.begin),
        Act(105.0, f"{lost.name}: GPU {_LOST_GPU} is back", lambda: lost.find_again(_LOST_GPU)),
        Act(115.0, f"{first.name}: GPU {ill} was reset", lambda: first.reset(ill)),
    ]


class _Job:
    """A training that ends, and another that takes its GPUs."""

    def __init__(self, node: StageNode) -> None:
        self._node = node
        self._name = _JOB
        self._left = [tenant for tenant in node.tenants if (tenant.namespace, tenant.pod) == _JOB]
        self._numbers = itertools.count(int(_JOB[1].rpartition("-")[2]) + 1)

    def end(self) -> None:
        self._node.move_out(*self._name)

    def begin(self) -> None:
        namespace, before = self._name
        self._name = namespace, f"{before.rpartition('-')[0]}-{next(self._numbers)}"
        self._node.move_in(*(replace(tenant, pod=self._name[1]) for tenant in self._left))


def _answer(node: StageNode, whether: bool) -> None:
    node.answers = whether


class Play:
    """Goes on from where it was; time is given to it."""

    def __init__(self, script: Sequence[Act], cycle: float = CYCLE_SECONDS) -> None:
        self._due = self._moments(sorted(script, key=lambda act: act.at), cycle)
        self._next = next(self._due, None)

    @staticmethod
    def _moments(script: Sequence[Act], cycle: float) -> Iterator[tuple[float, Act]]:
        for number in itertools.count() if script else ():
            for act in script:
                yield number * cycle + act.at, act

    @property
    def next_at(self) -> float:
        """Seconds after the beginning of the play; infinite when nothing ever happens."""
        return math.inf if self._next is None else self._next[0]

    def go_on(self, now: float) -> list[Act]:
        """Carries out all that is due, in its order; `now`: seconds after the beginning."""
        done = []
        while self._next is not None and self._next[0] <= now:
            act = self._next[1]
            act.do()
            done.append(act)
            self._next = next(self._due, None)
        return done
