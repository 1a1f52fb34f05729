"""Watches pods, nodes and claims of the API server, and explains the pending pods on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.fleet.state import ClusterState
from podgpu.kube.api_groups import DRA_GROUP, find_version
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import NODES_PATH, PODS_PATH, KubeObject
from podgpu.kube.reflector import Informer, ReflectorSettings
from podgpu.pending.cluster_objects import parse_node, parse_pod_state
from podgpu.pending.dra_objects import parse_claim, parse_device_class, parse_slice_record
from podgpu.pending.explain import explain_queue
from podgpu.pending.idle_pods import list_idle_pods
from podgpu.pending.pending_objects import ClusterObjects
from podgpu.pending.queue import QueueSnapshot
from podgpu.pending.quotas import (
    parse_cluster_queue,
    parse_job,
    parse_kai_queue,
    parse_kueue_workload,
    parse_local_queue,
    parse_replicas,
    parse_resource_quota,
)

_PAGE_SIZE = 500
_MIN_KEEP_SECONDS = 5.0
# An answer is also kept for this multiple of the time that it took. So at most a fifth of a core is
# used, however large the cluster is.
_KEEP_FACTOR = 4.0
_SYNC_SECONDS = 10.0  # the first question waits at most this long for each list
_UNFINISHED = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
_DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")
KUEUE_GROUP = "kueue.x-k8s.io"
_KUEUE_VERSIONS = ("v1beta2", "v1beta1")
_parse_replica_set = partial(parse_replicas, "ReplicaSet")
_parse_stateful_set = partial(parse_replicas, "StatefulSet")


class _Collection(NamedTuple):
    """Objects that are read if the API server has them, and if podgpu may."""

    name: str
    parse: Callable[[KubeObject], object]
    group: str = ""  # empty: the path is fixed
    versions: Sequence[str] = ()
    path: str = ""


_OPTIONAL = (
    _Collection("resourceclaims", parse_claim, DRA_GROUP, _DRA_VERSIONS),
    _Collection("deviceclasses", parse_device_class, DRA_GROUP, _DRA_VERSIONS),
    _Collection("resourceslices", parse_slice_record, DRA_GROUP, _DRA_VERSIONS),
    _Collection("workloads", parse_kueue_workload, KUEUE_GROUP, _KUEUE_VERSIONS),
    _Collection("clusterqueues", parse_cluster_queue, KUEUE_GROUP, _KUEUE_VERSIONS),
    _Collection("localqueues", parse_local_queue, KUEUE_GROUP, _KUEUE_VERSIONS),
    _Collection("queues", parse_kai_queue, "scheduling.run.ai", ("v2",)),
    _Collection("resourcequotas", parse_resource_quota, path="/api/v1/resourcequotas"),
    _Collection("replicasets", _parse_replica_set, path="/apis/apps/v1/replicasets"),
    _Collection("statefulsets", _parse_stateful_set, path="/apis/apps/v1/statefulsets"),
    _Collection("jobs", parse_job, path="/apis/batch/v1/jobs"),
)


class QueueWatch:
    """Any thread may call `read`. Only one thread computes at a time."""

    def __init__(
        self,
        config: ApiConfig,
        read_state: Callable[[], ClusterState],
        settings: ReflectorSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Starts the watches. `read_state`: the GPUs, for idle holders."""
        self._read_state = read_state
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._latest: QueueSnapshot | None = None
        self._keep_until = float("-inf")

        watch = partial(Informer, config, settings=settings, page_size=_PAGE_SIZE)
        self._required: Mapping[str, Informer[Any]] = {
            "pods": watch(PODS_PATH, _UNFINISHED, parse_pod_state),
            "nodes": watch(NODES_PATH, {}, parse_node),
        }
        self._optional: dict[str, Informer[Any]] = {}
        for each in _OPTIONAL:
            path = each.path
            find_path = None
            if each.group:
                # Until the server has said which versions it has.
                path = f"/apis/{each.group}/{each.versions[0]}/{each.name}"
                find_path = partial(_find_path, each)
            informer = watch(path, {}, each.parse, find_path=find_path, is_optional=True)
            self._optional[each.name] = informer

    def close(self) -> None:
        for informer in (*self._required.values(), *self._optional.values()):
            informer.close()

    def read(self) -> QueueSnapshot:
        """Raises SourceError if pods or nodes have not been read yet."""
        with self._lock:
            started = self._clock.monotonic()
            if self._latest is None or started >= self._keep_until:
                self._latest = self._compute()
                done = self._clock.monotonic()
                keep_seconds = max(_MIN_KEEP_SECONDS, _KEEP_FACTOR * (done - started))
                self._keep_until = done + keep_seconds
            return self._latest

    def _compute(self) -> QueueSnapshot:
        objects = self._read_objects()
        snapshot = make_snapshot(objects, self._read_state(), self._clock.wall())
        return snapshot._replace(notes=self._list_notes())

    def _read_objects(self) -> ClusterObjects:
        for name, informer in self._required.items():
            _wait_synced(informer)
            if not informer.synced:
                reason = informer.error or "the API server has not answered yet"
                raise SourceError("not_synced", f"the list of {name} is not known: {reason}")

        for informer in self._optional.values():
            _wait_synced(informer)

        return ClusterObjects(
            pods=self._required["pods"].items(),
            nodes=self._required["nodes"].items(),
            claims=self._list("resourceclaims"),
            classes=self._list("deviceclasses"),
            slices=self._list("resourceslices"),
            quotas=self._list("clusterqueues", "queues", "resourcequotas"),
            local_queues=self._list("localqueues"),
            workloads=self._list("workloads", "replicasets", "statefulsets", "jobs"),
        )

    def _list(self, *names: str) -> list[Any]:
        items: list[Any] = []
        for name in names:
            items += self._optional[name].items()
        return items

    def _list_notes(self) -> Sequence[str]:
        notes = []
        for name, informer in self._required.items():
            if informer.error is not None:
                notes.append(f"the list of {name} may be out of date: {informer.error}")

        for name, informer in self._optional.items():
            # A server without the API has no such objects.
            if informer.error is not None and informer.error.reason != "not_found":
                notes.append(f"the list of {name} may be incomplete: {informer.error}")

        return notes


def _wait_synced(informer: Informer[Any]) -> None:
    # An error means that waiting does not help.
    seconds = 0.0 if informer.error else _SYNC_SECONDS
    informer.wait_synced(seconds)


def make_snapshot(objects: ClusterObjects, state: ClusterState, now: float) -> QueueSnapshot:
    """`state`: the GPUs, for idle holders. `now`: Unix time."""
    return QueueSnapshot(
        taken_at=now,
        queue=explain_queue(objects, list_idle_pods(state), now),
        currency=state.prices.currency,
        simulated=state.simulated,
    )


async def _find_path(collection: _Collection, client: ApiClient) -> str:
    advice = f"without {collection.name}, these do not explain pending pods"
    version = await find_version(client, collection.group, collection.versions, advice)
    return f"/apis/{collection.group}/{version}/{collection.name}"
