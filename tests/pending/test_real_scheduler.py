"""Our explanations beside those of a real kube-scheduler, on nodes that are made by hand.

Needs PODGPU_KUBE_BIN, see tests/kube/real_api_server.py. With -s, prints how many of twenty planted
causes were explained right.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest

from podgpu.clock import Clock
from podgpu.fleet.readings import ViewSettings
from podgpu.fleet.state import ClusterState
from podgpu.kube.config import load_config
from podgpu.pending.queue import QueueAnswer, QueueQuery, make_queue
from podgpu.pending.queue_watch import QueueWatch
from tests.certificates import Certificates
from tests.kube.real_cluster import RealCluster, run_cluster
from tests.nodes.clock import wait_until
from tests.pending.situations import (
    GPU,
    NOT_GPUS,
    TWENTY,
    WAITING,
    Object,
    Situation,
    node,
    pod,
)

SECONDS = 25.0
_NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml"}}


# Without a kept answer, and a minute ahead, so that a scheduler had time to look at each pod.
_CLOCK = Clock(monotonic=partial(next, itertools.count(0.0, 60.0)), wall=lambda: time.time() + 60.0)


class Lab(NamedTuple):
    cluster: RealCluster
    queue: QueueWatch

    def ask(self) -> QueueAnswer:
        return make_queue(self.queue.read(), QueueQuery("ml", WAITING))

    def explain(self) -> list[str]:
        answer = self.ask()
        return [reason.key for group in answer.groups for reason in group.reasons]

    def play(self, situation: Situation) -> Outcome:
        for body in situation.objects:
            self.cluster.create(body)
        waiting = situation.objects[-1]
        message = self._wait_for_message(waiting, situation.scheduler)
        # The scheduler may have looked at the pod before it knew all objects.
        deadline = time.monotonic() + SECONDS
        while self.explain()[:1] != [situation.key] and time.monotonic() < deadline:
            time.sleep(0.2)
        answer = self.ask()
        self.cluster.clear()
        self._wait_until_clear()
        return Outcome(situation, answer, message)

    def _wait_for_message(self, waiting: Object, part: str) -> str:
        deadline = time.monotonic() + SECONDS
        message = ""
        while time.monotonic() < deadline:
            status = self.cluster.read(waiting)["status"]
            for condition in status.get("conditions") or ():
                if condition["type"] == "PodScheduled":
                    message = condition.get("message", "")
            if part in message and (message or not part):
                return message
            if not part:
                time.sleep(3.0)
                return message
            time.sleep(0.2)
        return message

    def _wait_until_clear(self) -> None:
        def is_clear() -> bool:
            state = self.queue.read().queue
            return not state.waiting and not state.others and not state.free

        wait_until(is_clear)


class Outcome(NamedTuple):
    situation: Situation
    answer: QueueAnswer
    message: str

    @property
    def mistakes(self) -> list[str]:
        situation = self.situation
        if not self.answer.groups:
            return ["the pod is not listed"]
        (group,) = self.answer.groups
        keys = [reason.key for reason in group.reasons]
        mistakes = []
        if keys[0] != situation.key:
            mistakes.append(f"{keys} instead of {situation.key}")
        if situation.resource and group.reasons[0].resource != situation.resource:
            mistakes.append(f"{group.reasons[0].resource} instead of {situation.resource}")
        if situation.scheduler not in self.message:
            mistakes.append(f"the scheduler does not say {situation.scheduler!r}")
        mistakes += [f"without {key}" for key in situation.also if key not in keys]
        mistakes += [f"blames {key}" for key in situation.unlisted if key in keys]
        return mistakes

    def describe(self) -> str:
        says = " ".join(reason.says for group in self.answer.groups for reason in group.reasons)
        sign = "WRONG" if self.mistakes else "right"
        return (
            f"{sign}  {self.situation.name}\n       podgpu:    {says}\n"
            f"       scheduler: {self.message or '-'} {'; '.join(self.mistakes)}"
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Lab]:
    with run_cluster(tmp_path_factory.mktemp("kubernetes"), certificates) as cluster:
        cluster.request("POST", "/api/v1/namespaces", _NAMESPACE)
        state = ClusterState(ViewSettings(), None)
        config = load_config(cluster.kubeconfig)
        queue = QueueWatch(config, lambda: state, clock=_CLOCK)
        yield Lab(cluster, queue)
        queue.close()


def test_twenty_planted_causes(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [lab.play(situation) for situation in TWENTY]
    right = [outcome for outcome in outcomes if not outcome.mistakes]
    with capsys.disabled():
        print()
        for outcome in outcomes:
            print(outcome.describe())
        print(f"{len(right)} of {len(outcomes)} explained right")
    assert len(outcomes) == 20
    assert [outcome.describe() for outcome in outcomes if outcome.mistakes] == []


@pytest.mark.parametrize("situation", NOT_GPUS, ids=lambda each: each.name)
def test_another_reason_is_not_blamed_on_gpus(
    lab: Lab, situation: Situation, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = lab.play(situation)
    with capsys.disabled():
        print(f"\n{outcome.describe()}")
    assert outcome.mistakes == []


def test_a_pod_that_fits_now_is_scheduled_next(lab: Lab) -> None:
    """The scheduler is paused while a GPU becomes free, so the pod is still pending."""
    holder = pod("old", on="a")
    objects = [node("a", gpus=1), holder, pod()]
    for body in objects:
        lab.cluster.create(body)
    wait_until(lambda: lab.explain() == ["in_use"])
    lab.cluster.pause_scheduler()
    lab.cluster.delete(lab.cluster.path(holder))
    wait_until(lambda: lab.explain() == ["fits"])
    reason = lab.ask().groups[0].reasons[0]
    assert (reason.resource, reason.free, reason.nodes) == (GPU, 1.0, 1)
    lab.cluster.resume_scheduler()
    waiting = objects[-1]
    wait_until(lambda: lab.cluster.read(waiting)["spec"].get("nodeName") == "a")
    wait_until(lambda: lab.explain() == ["starting"])
    lab.cluster.clear()
