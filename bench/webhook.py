"""Calls of a webhook while one GPU of each of 100 nodes flaps for 24 simulated hours.

The faults are those of `bench/writers.py`. The receiver answers over HTTP on this machine.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

from bench.figures import Figure
from bench.writers import START, list_faults, make_state
from podgpu.clock import Clock
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.readings import NodeReading
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.writers.webhook import Webhook, WebhookSettings
from tests.writers.webhook_receiver import Receiver

_SEED = 46
_ROUND = 15.0


class _Fleet:
    """All nodes, as the cluster view shows them."""

    def __init__(self, nodes: int, seconds: float) -> None:
        self.at = 0.0
        self.happened: Counter[str] = Counter()
        self._lost = [False] * nodes
        self._losses = [0] * nodes
        self._entries = [self._make_entry(number) for number in range(nodes)]
        faults = []
        for number in range(nodes):
            for at, what in list_faults(random.Random(_SEED + number), seconds):
                faults.append((at, number, what))
        self._faults = sorted(faults, reverse=True)  # the next one is the last

    def _make_entry(self, number: int) -> NodeEntry:
        state = make_state(f"node-{number}", self._lost[number], self._losses[number], 0)
        return NodeEntry(NodeReading(target=state.node, state=state, read_at=self.at), state)

    def read(self) -> ClusterState:
        while self._faults and self._faults[-1][0] <= self.at:
            _, number, what = self._faults.pop()
            self.happened[what] += 1
            if what == "xid":
                continue
            self._lost[number] = what == "lost"
            self._losses[number] += what == "lost"
            self._entries[number] = self._make_entry(number)
        return ClusterState(ViewSettings(), START + self.at, nodes=tuple(self._entries))


def measure(nodes: int = 100, hours: float = 24.0) -> list[Figure]:
    fleet = _Fleet(nodes, hours * 3600.0)
    clock = Clock(lambda: fleet.at, lambda: START + fleet.at)
    with Receiver().served() as receiver, tempfile.TemporaryDirectory() as folder:
        url = Path(folder) / "url"
        url.write_text(receiver.url)
        for restart in range(2):
            # podgpu restarts after half of the time.
            recorder = HistoryRecorder(clock=clock, directory=folder)
            webhook = Webhook(WebhookSettings(str(url)), fleet.read, recorder, clock)
            while fleet.at < hours * 1800.0 * (restart + 1):
                fleet.at += _ROUND
                webhook.update()
            recorder.stop()
    messages = [message["event"] for message in receiver.bodies]
    reported = Counter[str]()
    for message in receiver.accepted:
        reported[message["event"]] += len(message["items"])
    changes = fleet.happened["lost"] + fleet.happened["recovered"]
    return [
        Figure("state changes (lost, recovered)", changes),
        Figure("XIDs of an application, which are not reported", fleet.happened["xid"]),
        Figure("GPUs reported as broken", reported["broken"]),
        Figure("GPUs reported as recovered", reported["recovered"]),
        Figure("calls of the webhook", len(messages)),
        Figure("calls per state change", len(messages) / changes, at_most=0.05),
    ]
