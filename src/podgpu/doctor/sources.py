"""This module reads each source of holders beside the kubelet once, under a deadline, and judges answer or silence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from podgpu.doctor.findings import REPORT, Finding, ok, plural, wrong
from podgpu.errors import SourceError
from podgpu.holders.source import AllocationSource
from podgpu.isolate import Isolation
from podgpu.kube.objects import PodRecord
from podgpu.model import Allocation, Device

_API = "API server"
_PAUSE_S = 0.02
_WATCH_REFUSED_S = 0.5
"""More than a way to the API server and back; nothing says that a watch was accepted."""


class Feed(Protocol):
    """Something of the API server that is watched."""

    @property
    def synced(self) -> bool: ...

    @property
    def error(self) -> SourceError | None: ...


class Pods(Feed, Protocol):
    """Of one node."""

    def items(self) -> tuple[PodRecord, ...]: ...


def judge_feeds(feeds: Sequence[Feed], patience: float, pause: Callable[[float], object] = time.sleep) -> list[Finding]:
    """What the API server has to tell comes a moment after it was asked; that it may be listed and not watched, a
    moment after that."""
    for _ in range(int(patience / _PAUSE_S)):
        if all(feed.synced or feed.error is not None for feed in feeds):
            break
        pause(_PAUSE_S)
    for _ in range(int(_WATCH_REFUSED_S / _PAUSE_S) if feeds else 0):
        if any(feed.error is not None for feed in feeds):
            break
        pause(_PAUSE_S)
    failed = dict.fromkeys(str(feed.error) for feed in feeds if feed.error is not None)
    if failed:
        return [wrong(_API, text) for text in failed]
    if not all(feed.synced for feed in feeds):
        return [wrong(_API, "no answer in time", "see that it can be reached from here, past any network policy")]
    return [ok(_API, f"answers, {_watches(len(feeds))}")] if feeds else []


def judge_node(node: str, of_kubelet: frozenset[tuple[str, str]], of_api: frozenset[tuple[str, str]]) -> list[Finding]:
    """The API server is asked for the pods of NODE_NAME: are they the pods of this node's kubelet?

    A few may differ, being made or ended at this moment. None in common is another node, or none.
    """
    if not of_kubelet or of_kubelet & of_api:
        return []
    has = f"this node's kubelet has {plural(len(of_kubelet), 'pod')}"
    if not of_api:
        what = f"the API server knows no pod on a node {node!r}, though {has}"
    else:
        what = f"the API server has {plural(len(of_api), 'pod')} on the node {node!r}, and {has}, none of them the same"
    return [
        wrong(
            "node name",
            f"NODE_NAME is not this node: {what}, so nothing the API server says can be used here",
            "set it from spec.nodeName by the downward API; outside a pod to the name in `kubectl get nodes`",
        )
    ]


def _watches(number: int) -> str:
    return "1 watch" if number == 1 else f"{number} watches"


def read_sources(
    sources: Sequence[AllocationSource], devices: tuple[Device, ...], isolation: Isolation, deadline: float
) -> tuple[dict[str, Allocation], list[Finding]]:
    """What each says of holders, by name, and a finding for each."""
    results = isolation.run({source.name: partial(source.assignments, devices) for source in sources}, deadline)
    readings = {name: result.value for name, result in results.items() if result.value is not None}
    findings = [
        ok(name, _describe(result.value)) if result.value is not None else _failed(name, result.error)
        for name, result in results.items()
    ]
    return readings, findings


def _describe(allocation: Allocation) -> str:
    return plural(len(allocation.assignments) + len(allocation.unmapped), "assignment")


def _failed(name: str, error: Exception | None) -> Finding:
    is_bug = getattr(error, "reason", "") == "bug"
    return wrong(name, str(error).removeprefix(f"{name}: "), REPORT if is_bug else "")
