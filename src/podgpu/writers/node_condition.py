"""Writes the Node condition `GpuUnhealthy`, as node-problem-detector writes its conditions.

`True` means that a GPU of the node is broken. The condition is written when it changes, and every
five minutes as a heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from podgpu.clock import Clock
from podgpu.errors import SourceError, plural, utc_text
from podgpu.kube.client import ApiClient
from podgpu.kube.objects import KubeObject, read_list, read_map
from podgpu.metrics.conditions import LOST, UNREADABLE, rank_condition
from podgpu.writers.gpu_changes import Records, identify_gpu
from podgpu.writers.health_writer import NodeUpdate
from podgpu.writers.write_option import NODE_CONDITION
from podgpu.writers.write_queue import Write

TYPE = "GpuUnhealthy"
STRATEGIC = "application/strategic-merge-patch+json"
HEALTHY = "NoGpuProblem"
UNKNOWN = "GpuStateUnknown"
HEARTBEAT_SECONDS = 300.0
_MAX_NAMED = 3
_MAX_MESSAGE = 1024


class GpuVerdict(NamedTuple):
    """What the condition says."""

    status: str
    reason: str
    message: str


def reason_for(condition: str) -> str:
    """Returns `GpuRowRemapFailure` for `row_remap_failure`."""
    return "Gpu" + "".join(word.capitalize() for word in condition.split("_"))


def judge(update: NodeUpdate) -> GpuVerdict:
    """Returns what the condition says about the GPUs of a node."""
    if update.is_stale:
        text = "podgpu has no current readings of the GPUs: see the log of its exporter"
        return GpuVerdict("Unknown", UNKNOWN, text)

    state = update.state
    ranked = _rank_problems(update.records)
    problems = [condition for condition, _ in ranked]
    texts = [text for _, text in ranked]
    unidentified = _count_unidentified(state.gpus_lost or 0, update.records)
    if unidentified:
        problems.insert(0, LOST)
        gpus = plural(unidentified, "GPU")
        texts.insert(0, f"{gpus} on the PCI bus cannot be identified: see dmesg on the node")

    if problems:
        message = "; ".join(texts[:_MAX_NAMED])[:_MAX_MESSAGE]
        if len(texts) > _MAX_NAMED:
            message += f"; and {len(texts) - _MAX_NAMED} more"
        return GpuVerdict("True", reason_for(problems[0]), message)

    if not update.records and state.gpus_expected:
        text = f"the node has {plural(state.gpus_expected, 'GPU')}, but podgpu cannot read any"
        return GpuVerdict("Unknown", UNKNOWN, text)

    gpus = _name_gpus(update.records)
    return GpuVerdict("False", HEALTHY, f"podgpu knows no problem of {gpus}")


def _name_gpus(records: Records) -> str:
    return "the node's GPU" if len(records) == 1 else f"the node's {plural(len(records), 'GPU')}"


def _rank_problems(records: Records) -> list[tuple[str, str]]:
    """Returns the problems of all GPUs with their texts, worst first."""
    problems = []
    for uuid, record in records.items():
        for condition, text in record.problems.items():
            problems.append((condition, f"{identify_gpu(record.name, uuid)}: {text}"))
    return sorted(problems, key=lambda problem: rank_condition(problem[0]))


def _count_unidentified(lost: int, records: Records) -> int:
    """Returns how many of the lost GPUs are not among the records."""
    for record in records.values():
        if not record.problems.keys().isdisjoint((LOST, UNREADABLE)):
            lost -= 1
    return max(0, lost)


class NodeConditionWriter:
    def __init__(self, client: ApiClient, node: str, clock: Clock) -> None:
        self._client = client
        self._path = f"/api/v1/nodes/{node}"
        self._clock = clock
        self._sent: GpuVerdict | None = None  # None before the Node was read
        self._sent_at = 0.0  # monotonic
        self._changed_at = ""  # when the status changed

    def update(self, update: NodeUpdate) -> list[Write]:
        verdict = judge(update)
        is_due = self._clock.monotonic() - self._sent_at >= HEARTBEAT_SECONDS
        if verdict == self._sent and not is_due:
            return []

        async def send() -> None:
            await self._send(verdict)

        return [Write(NODE_CONDITION, self._path, send)]

    async def _send(self, verdict: GpuVerdict) -> None:
        now = utc_text(self._clock.wall())
        if self._sent is None:
            # A restart does not change the time of the last transition.
            before = find_condition(await self._client.get(self._path))
            status = before.get("status")
            self._changed_at = before.get("lastTransitionTime") or now
        else:
            status = self._sent.status

        if status != verdict.status:
            self._changed_at = now

        condition = {
            "type": TYPE,
            "status": verdict.status,
            "reason": verdict.reason,
            "message": verdict.message,
            "lastHeartbeatTime": now,
            "lastTransitionTime": self._changed_at,
        }
        try:
            await patch_condition(self._client, self._path, condition)
        except SourceError as error:
            if error.reason == "not_found":
                # The Node may be created again, without the condition.
                self._sent = None
            raise

        self._sent = verdict
        self._sent_at = self._clock.monotonic()


def find_condition(node: KubeObject) -> Mapping[str, str]:
    """Returns podgpu's condition of a Node. Empty if it has none."""
    for condition in read_list(read_map(node, "status"), "conditions"):
        if condition.get("type") == TYPE:
            own: Mapping[str, str] = condition
            return own
    return {}


async def patch_condition(client: ApiClient, path: str, condition: Mapping[str, str]) -> None:
    """Adds, replaces or deletes one condition of the Node. The others are not touched."""
    await client.patch(f"{path}/status", {"status": {"conditions": [condition]}}, STRATEGIC)
