"""Finds the pods that have been idle for longer than --idle-after."""

from __future__ import annotations

import msgspec

from podgpu.fleet.hold import wasteful_since
from podgpu.fleet.parts import HeldPart
from podgpu.fleet.state import ClusterState
from podgpu.known import add_known
from podgpu.model import PodName, WorkloadOwner


class IdlePod(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A pod that uses none of its GPUs. `hidden`: the user may not see which pod it is."""

    namespace: str = ""
    pod: str = ""
    owner: WorkloadOwner | None = None
    gpus: float = 0.0
    idle_since: float
    cost_per_hour: float | None = None
    hidden: bool = False


def list_idle_pods(state: ClusterState) -> dict[PodName, IdlePod]:
    """Returns the pods that use none of their GPUs. If one is unknown, the pod does not count."""
    parts: dict[PodName, list[HeldPart]] = {}
    for node in state.nodes:
        for part in node.held:
            # With several clusters, the API server of only one of them is known.
            if part.holder.pod and not part.cluster:
                parts.setdefault(part.holder.pod_name, []).append(part)

    idle = {}
    for key, own in parts.items():
        pod = _make_idle_pod(state, own)
        if pod is not None:
            idle[key] = pod

    return idle


def _make_idle_pod(state: ClusterState, parts: list[HeldPart]) -> IdlePod | None:
    starts = []
    gpus = 0.0
    cost: float | None = None
    for part in parts:
        since = wasteful_since(part, state.taken_at, state.settings.idle_after)
        if since is None:
            return None
        starts.append(since)
        gpus += part.gpu_fraction
        cost = add_known(cost, part.cost_per_hour)

    # All parts are of the same pod.
    first = parts[0]

    return IdlePod(
        namespace=first.holder.namespace,
        pod=first.holder.pod,
        owner=first.owner,
        gpus=gpus,
        # The pod is idle since the last of its GPUs became idle.
        idle_since=max(starts),
        cost_per_hour=cost,
    )
