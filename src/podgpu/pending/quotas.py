"""Quotas that hold pods back: of Kueue, of KAI Scheduler, and ResourceQuotas.

Pods that a quota holds back often do not exist yet. Then their Kueue Workload, Job, ReplicaSet or
StatefulSet stands for them in the queue (`HeldWorkload`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from podgpu.kube.objects import KubeObject, is_gpu_resource, read_list, read_map
from podgpu.model import PodName
from podgpu.pending.cluster_objects import (
    MILLI,
    PendingPod,
    PodNeeds,
    ResourceAmounts,
    make_pod,
    parse_milli,
    parse_needs,
)

KUEUE_KIND = "Workload"
_REQUEST_PREFIX = "requests."
_UNLIMITED = -1


class QuotaRecord(NamedTuple):
    """What one resource of a quota allows. Amounts are in thousandths."""

    resource: str
    limit: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True, slots=True)
class QuotaHolder:
    """A ClusterQueue of Kueue, a Queue of KAI, or a ResourceQuota."""

    kind: str
    name: str
    namespace: str = ""  # only of a ResourceQuota
    quotas: tuple[QuotaRecord, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.kind} {self.name}"


class LocalQueue(NamedTuple):
    """A queue of Kueue in a namespace: it belongs to a ClusterQueue."""

    namespace: str
    name: str
    cluster_queue: str


@dataclass(frozen=True, slots=True)
class HeldWorkload:
    """An object that stands for pods that may not exist yet."""

    pod: PendingPod  # with the needs of the first kind of its pods that requests GPUs
    total: ResourceAmounts  # of all its pods
    owner_uids: tuple[str, ...] = ()
    queue: str = ""  # a LocalQueue of Kueue


# Kueue


def parse_kueue_workload(body: KubeObject) -> HeldWorkload | None:
    """Returns None if it has its quota, has ended, or is not active."""
    metadata = body["metadata"]
    spec = read_map(body, "spec")
    status = read_map(body, "status")
    conditions = {each["type"]: each for each in read_list(status, "conditions")}
    for ended in ("QuotaReserved", "Finished"):
        if read_map(conditions, ended).get("status") == "True":
            return None

    if spec.get("active") is False:
        return None

    message = read_map(conditions, "QuotaReserved").get("message") or ""
    pod_sets = []
    for each in read_list(spec, "podSets"):
        count = each.get("count", 1)
        # Some jobs have no pods of a kind, such as a group of workers that is scaled to 0.
        if count:
            pod_sets.append((count, read_map(each, "template")))

    return _make_workload(
        KUEUE_KIND,
        metadata,
        pod_sets,
        queue=spec.get("queueName") or "",
        message=message,
    )


def _make_workload(
    kind: str,
    metadata: KubeObject,
    pod_sets: Iterable[tuple[int, KubeObject]],
    queue: str = "",
    message: str = "",
) -> HeldWorkload | None:
    """Returns None if no pod requests a GPU."""
    total: dict[str, int] = {}
    pods = 0
    first: PodNeeds | None = None
    for count, template in pod_sets:
        needs = parse_needs(read_map(template, "metadata"), read_map(template, "spec"))
        pods += count
        if first is None and (needs.gpu_amounts or needs.share):
            first = needs
        for name, milli in needs.amounts:
            total[name] = total.get(name, 0) + count * milli

    if first is None:
        return None

    owner_uids = [each["uid"] for each in read_list(metadata, "ownerReferences")]
    pod = replace(make_pod(metadata, first, message), kind=kind, count=pods)
    return HeldWorkload(pod, tuple(sorted(total.items())), tuple(owner_uids), queue)


def parse_cluster_queue(body: KubeObject) -> QuotaHolder:
    spec = read_map(body, "spec")
    status = read_map(body, "status")
    limits: dict[str, int] = {}
    for group in read_list(spec, "resourceGroups"):
        _add_amounts(limits, read_list(group, "flavors"), "nominalQuota")

    used: dict[str, int] = {}
    _add_amounts(used, read_list(status, "flavorsReservation"), "total")
    quotas = []
    for name, limit in limits.items():
        quotas.append(QuotaRecord(name, limit, used.get(name, 0)))

    name = body["metadata"]["name"]
    return QuotaHolder("ClusterQueue", name, quotas=tuple(quotas))


def _add_amounts(sums: dict[str, int], flavors: Iterable[KubeObject], field: str) -> None:
    for flavor in flavors:
        for each in read_list(flavor, "resources"):
            name = each["name"]
            text = each.get(field) or "0"
            sums[name] = sums.get(name, 0) + parse_milli(str(text))


def parse_local_queue(body: KubeObject) -> LocalQueue:
    metadata = body["metadata"]
    cluster_queue = read_map(body, "spec").get("clusterQueue") or ""
    return LocalQueue(metadata["namespace"], metadata["name"], cluster_queue)


# KAI Scheduler


def parse_kai_queue(body: KubeObject) -> QuotaHolder:
    """Only the hard limit counts: above its quota, a queue may use GPUs that others leave."""
    resources = read_map(read_map(body, "spec"), "resources")
    limit = read_map(resources, "gpu").get("limit", _UNLIMITED)
    used = 0
    for name, text in read_map(read_map(body, "status"), "allocated").items():
        if is_gpu_resource(name):
            used += parse_milli(str(text))

    quotas: tuple[QuotaRecord, ...] = ()
    if limit >= 0:
        quotas = (QuotaRecord("nvidia.com/gpu", round(limit * MILLI), used),)

    return QuotaHolder("Queue", body["metadata"]["name"], quotas=quotas)


# ResourceQuotas


def parse_resource_quota(body: KubeObject) -> QuotaHolder | None:
    """Returns None for quotas of some pods only, such as those of a priority."""
    metadata = body["metadata"]
    spec = read_map(body, "spec")
    status = read_map(body, "status")
    if spec.get("scopes") or spec.get("scopeSelector"):
        return None

    used = read_map(status, "used")
    quotas = []
    for name, text in read_map(status, "hard").items():
        if name.startswith(_REQUEST_PREFIX):
            resource = name.removeprefix(_REQUEST_PREFIX)
            limit = parse_milli(str(text))
            taken = parse_milli(str(used.get(name) or "0"))
            quotas.append(QuotaRecord(resource, limit, taken))

    return QuotaHolder("ResourceQuota", metadata["name"], metadata["namespace"], tuple(quotas))


def parse_replicas(kind: str, body: KubeObject) -> HeldWorkload | None:
    """Parses a ReplicaSet or StatefulSet that has fewer pods than it should."""
    spec = read_map(body, "spec")
    status = read_map(body, "status")
    wanted = spec.get("replicas")
    if wanted is None:
        wanted = 1
    missing = wanted - (status.get("replicas") or 0)
    if missing <= 0:
        return None
    return _make_workload(kind, body["metadata"], [(missing, read_map(spec, "template"))])


def parse_job(body: KubeObject) -> HeldWorkload | None:
    """Parses a Job that has fewer pods than it should. A suspended Job has no pods on purpose."""
    spec = read_map(body, "spec")
    status = read_map(body, "status")
    if spec.get("suspend") or status.get("completionTime"):
        return None

    parallel = spec.get("parallelism")
    wanted = 1 if parallel is None else parallel
    completions = spec.get("completions")
    if completions is not None:
        wanted = min(wanted, completions - (status.get("succeeded") or 0))

    active = status.get("active") or 0
    terminating = status.get("terminating") or 0
    missing = wanted - active - terminating
    if missing <= 0 or _has_ended(status):
        return None

    return _make_workload("Job", body["metadata"], [(missing, read_map(spec, "template"))])


def _has_ended(job_status: KubeObject) -> bool:
    for condition in read_list(job_status, "conditions"):
        is_end = condition.get("type") in ("Failed", "Complete", "FailureTarget")
        if is_end and condition.get("status") == "True":
            return True
    return False


# Which quota lacks what


class Shortage(NamedTuple):
    quota: str
    record: QuotaRecord
    needed: int


def find_shortage(holders: Iterable[QuotaHolder], amounts: ResourceAmounts) -> Shortage | None:
    """Returns the first quota that is too small for the amounts."""
    for holder in holders:
        for record in holder.quotas:
            needed = dict(amounts).get(record.resource, 0)
            if needed > record.free:
                return Shortage(holder.text, record, needed)
    return None


class Quotas:
    """All quotas, with indexes."""

    def __init__(
        self,
        holders: Iterable[QuotaHolder],
        local_queues: Iterable[LocalQueue],
        workloads: Iterable[HeldWorkload],
    ) -> None:
        self._holders = list(holders)
        self._cluster_queue_of: dict[PodName, str] = {}
        for queue in local_queues:
            self._cluster_queue_of[queue.namespace, queue.name] = queue.cluster_queue

        self.workloads = list(workloads)
        self._by_owner: dict[str, HeldWorkload] = {}
        self._by_name: dict[PodName, HeldWorkload] = {}
        for workload in self.workloads:
            if workload.pod.kind != KUEUE_KIND:
                continue
            self._by_name[workload.pod.key] = workload
            for owner_uid in workload.owner_uids:
                self._by_owner[owner_uid] = workload

    def find_workload(self, namespace: str, name: str, uids: Iterable[str]) -> HeldWorkload | None:
        """Returns the Kueue Workload of a pod: by its name, or by the pod or its owner."""
        workload = self._by_name.get((namespace, name))
        for uid in uids:
            workload = workload or self._by_owner.get(uid)
        return workload

    def find_cluster_queue(self, workload: HeldWorkload) -> QuotaHolder | None:
        name = self._cluster_queue_of.get((workload.pod.namespace, workload.queue), "")
        return self._find("ClusterQueue", name)

    def find_kai_queue(self, name: str) -> QuotaHolder | None:
        return self._find("Queue", name)

    def list_of_namespace(self, namespace: str) -> Iterator[QuotaHolder]:
        for holder in self._holders:
            if holder.kind == "ResourceQuota" and holder.namespace == namespace:
                yield holder

    def _find(self, kind: str, name: str) -> QuotaHolder | None:
        for holder in self._holders:
            if (holder.kind, holder.name) == (kind, name):
                return holder
        return None
