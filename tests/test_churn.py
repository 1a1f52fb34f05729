"""Pods come and go at random while the kubelet is well or ill: an exposition never names who did not hold the device.

Real gRPC, the exporter's own agent, injected time. A reading is due every allocation interval, as the agent's loop
takes it; expositions are looked at after every step.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podgpu.agent.loop import Settings
from podgpu.holders.cache import GRACE_SECONDS
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.counters import parse_counters
from podgpu.metrics.render import Policy
from podgpu.simulate.kubelet import SimulatedPod
from tests.agent.simulated_node import SimulatedNode
from tests.simulated_kubelet import RATE_LIMITED, FaultyKubelet

GPUS, PODS = 3, 4
INTERVAL = 5.0
GRACE = 1.0
COUNTERS = parse_counters("DCGM_FI_DEV_GPU_UTIL,gauge,u\n", "test")

Holding = tuple[int, str]
"""Number of the GPU, name of the pod."""

_LABELS = re.compile(r'gpu="(\d+)".*?pod="([^"]*)"')


@dataclass
class Truth:
    """What really happened, by the clock."""

    held: set[Holding] = field(default_factory=set)
    released_at: dict[Holding, float] = field(default_factory=dict)
    at_last_reading: frozenset[Holding] = frozenset()
    """What was held when the kubelet last answered."""
    last_answer: float = float("-inf")
    answers: bool = True
    broke: bool = False
    """The connection broke, or the kubelet was started anew, since it last answered."""
    lingering: dict[Holding, float] = field(default_factory=dict)
    """Released while that was so, and when last named: a new kubelet may just not have heard of them."""


class Churn(SimulatedNode):
    """One node, its pods, and the readings that fall due while time passes."""

    def __init__(self, kubelet: FaultyKubelet) -> None:
        source = KubeletAllocation(kubelet.socket, clock=self.monotonic)
        settings = Settings(allocation_interval=INTERVAL, policy=Policy(counters=COUNTERS))
        super().__init__(f"{GPUS}xT4", settings, sources=[source])
        self.kubelet = kubelet
        self.truth = Truth()
        self.uuids = [self.uuid(number) for number in range(GPUS)]
        self.well()
        self._list_pods()
        self.agent.read_telemetry()
        self.read()

    # Steps

    def assign(self, holding: Holding) -> None:
        self.truth.held.add(holding)
        self.truth.released_at.pop(holding, None)
        self._list_pods()

    def release(self, holding: Holding) -> None:
        if holding in self.truth.held:
            self.truth.held.remove(holding)
            self.truth.released_at[holding] = self.time
            self._list_pods()

    def wait(self, seconds: float) -> None:
        """Time passes; readings are taken when they fall due."""
        until = self.time + seconds
        while (due := self.last_reading + INTERVAL) <= until:
            self.time = due
            self.read()
            self.check()
        self.time = until

    def tick(self) -> None:
        """A telemetry turn renders anew what is known of holders, and reads none."""
        self.agent.read_telemetry()

    def ill(self, how: str) -> None:
        self.well()
        self.truth.answers = False
        if how == "garbage":
            self.kubelet.raw_answer = b"\xff" * 20
        elif how == "rate limit":
            self.kubelet.refusal = RATE_LIMITED
        else:
            self.kubelet.refusal = ("UNAVAILABLE", "restarting")

    def restart(self) -> None:
        self.kubelet.restart()
        self.truth.broke = True

    def forget(self) -> None:
        """Started anew: the next reading meets a kubelet that has not heard of its pods yet."""
        self.restart()
        self.kubelet.pods = ()

    def well(self) -> None:
        self.truth.answers = True
        self.kubelet.refusal = self.kubelet.raw_answer = None

    def _list_pods(self) -> None:
        held = sorted(self.truth.held)
        self.kubelet.pods = tuple(
            SimulatedPod("ns", pod, {"main": {"nvidia.com/gpu": [self.uuids[g] for g, p in held if p == pod]}})
            for pod in sorted({pod for _, pod in held})
        )

    # What must hold

    def read(self) -> None:
        self.agent.read_allocation()
        self.last_reading = self.time
        self.truth.broke |= self.kubelet.refusal is not None and self.kubelet.refusal[0] == "UNAVAILABLE"
        if self.truth.answers:
            self._note_answer()

    def _note_answer(self) -> None:
        truth, uuids = self.truth, {uuid: number for number, uuid in enumerate(self.uuids)}
        named = {
            (uuids[one], pod.name) for pod in self.kubelet.pods for one in pod.containers["main"]["nvidia.com/gpu"]
        }
        if truth.broke:
            truth.lingering |= dict.fromkeys(truth.at_last_reading - named, truth.last_answer)
        truth.lingering = {one: at for one, at in truth.lingering.items() if one not in named and self._lingers(at)}
        truth.at_last_reading, truth.last_answer, truth.broke = frozenset(named), self.last_reading, False
        self._list_pods()  # by the next reading it has heard of all of them

    def _lingers(self, named_at: float) -> bool:
        return self.last_reading - named_at <= GRACE_SECONDS

    def check(self) -> None:
        exposition = self.agent.published.fresh.plain
        now, truth = self.time, self.truth
        info, labelled = _named(exposition, "podgpu_allocation_info"), _named(exposition, "DCGM_FI_DEV_GPU_UTIL")
        lingering = {one for one, at in truth.lingering.items() if self._lingers(at)}
        assert info <= truth.at_last_reading | lingering, "named, but not held when the kubelet last answered"
        assert labelled <= info
        if truth.last_answer == self.last_reading:
            for holding in info - truth.held - lingering:
                assert now - truth.released_at[holding] <= INTERVAL + GRACE, "named long after it was released"
            assert info >= truth.at_last_reading, "held when the kubelet last answered, but not named"
        elif self.last_reading - truth.last_answer > GRACE_SECONDS:
            assert not info, "the kubelet is away for so long that nobody knows"
        else:
            assert info >= truth.at_last_reading, "a kubelet that is away for a moment ends no pods"
        alone = {g for g, _ in info if sum(g == other for other, _ in info) == 1}
        assert {g for g, _ in labelled} == alone, "a device's figures are its sole holder's"


@lru_cache(maxsize=4)  # two steps of three leave the exposition as it is
def _named(exposition: bytes, family: str) -> frozenset[Holding]:
    lines = (line for line in exposition.decode().splitlines() if line.startswith(family + "{"))
    return frozenset((int(found[1]), found[2]) for line in lines if (found := _LABELS.search(line)))


@pytest.fixture(scope="module")
def kubelet() -> Iterator[FaultyKubelet]:
    logging.disable(logging.WARNING)
    with (
        tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder,  # a short path, for a socket
        FaultyKubelet(str(Path(folder) / "kubelet.sock")) as running,
    ):
        yield running
    logging.disable(logging.NOTSET)


HOLDINGS = st.tuples(st.integers(0, GPUS - 1), st.sampled_from([f"pod-{n}" for n in range(PODS)]))
STEPS = st.one_of(
    st.tuples(st.just("assign"), HOLDINGS),
    st.tuples(st.just("release"), HOLDINGS),
    st.tuples(st.just("assign"), HOLDINGS),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 1.0, 4.9, 5.0, 7.5, 70.0])),
    st.tuples(st.just("wait"), st.floats(0.01, 12.0)),
    st.just(("tick",)),
    st.just(("restart",)),
    st.just(("forget",)),
    st.tuples(st.just("ill"), st.sampled_from(["garbage", "rate limit", "restarting"])),
    st.just(("well",)),
    st.just(("well",)),
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, min_size=40, max_size=100))
def test_no_exposition_names_who_does_not_hold_the_device(
    kubelet: FaultyKubelet, steps: list[tuple[str, object]]
) -> None:
    churn = Churn(kubelet)
    try:
        for name, *arguments in steps:
            getattr(churn, name)(*arguments)
            churn.check()
    finally:
        churn.stop()
