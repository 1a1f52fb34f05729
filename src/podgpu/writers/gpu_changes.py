"""Finds what changed for the GPUs of a node between two of its documents.

A problem that cannot be checked, such as an XID of a GPU that does not answer, lasts until it was
checked and is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from podgpu.errors import few_of, utc_text
from podgpu.fleet.choose import describe_condition
from podgpu.metrics.conditions import (
    LOST,
    ORPHANED,
    RECURRING,
    XID,
    conditions,
    is_grave,
    rank_condition,
    xid_spec,
)
from podgpu.model import (
    Condition,
    DeviceState,
    GpuOrInstance,
    Holder,
    NodeState,
    Workload,
    WorkloadKey,
    XidCount,
    XidCulprit,
    device_key,
)

_VERDICT_SECONDS = 10.0
"""How long a change waits for the cause of an XID. The exporter decides within 5 s of a reading."""


class ChangeReason(StrEnum):
    """Why an Event is written. `GpuUnhealthy` stands for all problems without an own reason."""

    XID = "GpuXid"
    LOST = "GpuLost"
    UNHEALTHY = "GpuUnhealthy"
    RECOVERED = "GpuRecovered"
    IDLE = "GpuIdle"
    ORPHANED = "GpuOrphanedMemory"


class GpuChange(NamedTuple):
    """A change of one GPU, and the pods and the node that it concerns."""

    reason: ChangeReason
    gpu: str  # UUID
    message: str
    pods: tuple[Workload, ...] = ()
    concerns_node: bool = True
    is_warning: bool = True
    is_new: bool = True  # False if it had happened before the writer started
    times: int = 1  # how often it happened since the last document


class _PendingXid(NamedTuple):
    """XIDs of an application whose cause is not decided yet."""

    since: float
    times: int
    blamed: Mapping[WorkloadKey, int]  # total of each culprit before these XIDs


@dataclass(frozen=True)
class GpuRecord:
    """What was known of a GPU in the last document."""

    name: str
    problems: Mapping[str, str] = field(default_factory=dict)
    """Conditions that break the GPU, worst first -> what happened, and what to do."""
    details: Mapping[str, str] = field(default_factory=dict)  # condition -> its detail
    xids: Mapping[tuple[str, int], XidCount] = field(default_factory=dict)  # by device key and XID
    pending: Mapping[tuple[str, int], _PendingXid] = field(default_factory=dict)
    idle: frozenset[tuple[str, WorkloadKey]] = frozenset()  # device keys and holders
    orphans: frozenset[int] = frozenset()  # pids

    @property
    def acute(self) -> list[str]:
        """The problems that the GPU has now. A GPU that keeps failing may work in between."""
        return [name for name in self.problems if name != RECURRING]


Records = Mapping[str, GpuRecord]
"""The last record of each GPU, by UUID."""


def find_changes(
    before: Records, state: NodeState, now: float, idle_after: float, is_first: bool = False
) -> tuple[Records, list[GpuChange]]:
    """Returns the records of this document, and the changes since `before`.

    `now`: Unix time. `idle_after`: seconds. With `is_first`, the writer has just started, or takes
    over from another exporter. Problems that are present are then changes that are not new.
    """
    records: dict[str, GpuRecord] = {}
    changes: list[GpuChange] = []
    for gpu in state.devices:
        name = name_gpu(gpu)
        earlier = before.get(gpu.uuid) or GpuRecord(name)
        record = _track_problems(earlier, gpu)
        record, xid_changes = _track_xids(record, gpu, now)
        idle = dict(_find_idle(earlier, gpu, now - idle_after))
        orphans = _find_orphans(gpu)
        record = replace(record, name=name, idle=frozenset(idle), orphans=orphans)
        records[gpu.uuid] = record

        changes += xid_changes
        begun = list(_find_begun(earlier, record, gpu, idle))
        if is_first:
            # Without a record of the GPU, all its problems may be older than this writer.
            new = begun if gpu.uuid in before else []
            present = _find_begun(GpuRecord(name), record, gpu, idle)
            older = [change._replace(is_new=False) for change in present if change not in new]
            begun = older + new
        changes += begun
        changes += _find_recovered(earlier, record, gpu)

    return records, [_add_name(change, records[change.gpu].name) for change in changes]


def _find_begun(
    earlier: GpuRecord,
    record: GpuRecord,
    gpu: DeviceState,
    idle: Mapping[tuple[str, WorkloadKey], Holder],
) -> Iterator[GpuChange]:
    yield from _find_problems(earlier, record, gpu)
    for key, holder in idle.items():
        if key not in earlier.idle:
            yield _make_idle(gpu, holder)
    if record.orphans - earlier.orphans:
        yield from _make_orphaned(gpu)


def name_gpu(gpu: DeviceState) -> str:
    return "a GPU" if gpu.index is None else f"GPU {gpu.index}"


def identify_gpu(name: str, uuid: str) -> str:
    return f"{name} ({uuid or 'no UUID'})"


def _add_name(change: GpuChange, name: str) -> GpuChange:
    return change._replace(message=f"{identify_gpu(name, change.gpu)}: {change.message}")


# Problems


def _track_problems(earlier: GpuRecord, gpu: DeviceState) -> GpuRecord:
    problems = {}
    details = {}
    for condition in gpu.conditions:
        if is_grave(condition.name):
            problems[condition.name] = _describe(condition, gpu)
            details[condition.name] = condition.detail

    # What cannot be checked now is still a problem.
    for name, text in earlier.problems.items():
        if name not in problems and name not in gpu.healthy:
            problems[name] = text
            details[name] = earlier.details.get(name, "")

    ranked = {name: problems[name] for name in sorted(problems, key=rank_condition)}
    return replace(earlier, problems=ranked, details=details)


def _describe(condition: Condition, gpu: DeviceState) -> str:
    says, do = describe_condition(condition, gpu)
    return f"{says}: {do}" if do else says


def _find_problems(earlier: GpuRecord, record: GpuRecord, gpu: DeviceState) -> Iterator[GpuChange]:
    pods = _list_users(gpu, all_devices_of(gpu))
    for name, text in record.problems.items():
        # Each XID is a change of its own.
        if name in earlier.problems or name == XID:
            continue
        reason = ChangeReason.LOST if name == LOST else ChangeReason.UNHEALTHY
        yield GpuChange(reason, gpu.uuid, text, pods)


def _find_recovered(earlier: GpuRecord, record: GpuRecord, gpu: DeviceState) -> Iterator[GpuChange]:
    if not earlier.acute or record.acute:
        return

    text = "it works again"
    if RECURRING in record.problems:
        text += f", but {record.problems[RECURRING]}"
    else:
        specs = conditions()
        # This version has no words for a condition of a newer exporter.
        was = [specs[name].was for name in earlier.acute if name in specs]
        text += f"; before, {few_of(was, 3)}"

    pods = _list_users(gpu, all_devices_of(gpu))
    yield GpuChange(ChangeReason.RECOVERED, gpu.uuid, text, pods, is_warning=False)


def all_devices_of(gpu: DeviceState) -> tuple[GpuOrInstance, ...]:
    return gpu, *gpu.instances


def _list_affected(gpu: DeviceState, device: GpuOrInstance) -> tuple[GpuOrInstance, ...]:
    """Returns the devices that an error of this device affects."""
    if device is gpu:
        return all_devices_of(gpu)
    return (device,)


def _list_users(gpu: DeviceState, devices: Iterable[GpuOrInstance]) -> tuple[Workload, ...]:
    """Returns the containers of pods that hold the devices, or held them when the GPU was lost."""
    users: dict[WorkloadKey, Workload] = {}
    for device in devices:
        for holder in device.holders:
            users.setdefault(holder.key, holder)
    for workload in gpu.last_holders:
        users.setdefault(workload.key, workload)
    return tuple(user for user in users.values() if user.pod)


# XIDs


def _track_xids(
    record: GpuRecord, gpu: DeviceState, now: float
) -> tuple[GpuRecord, list[GpuChange]]:
    """Reports XIDs at once, except those of applications, which wait until a pod is blamed."""
    changes: list[GpuChange] = []
    pending_xids = dict(record.pending)
    xids = {}
    for device_name, device in _list_devices(gpu):
        for count in device.xids:
            key = device_name, count.xid
            xids[key] = count
            earlier = record.xids.get(key)
            times = count.total
            if earlier:
                times -= earlier.total

            is_of_application = xid_spec(count.xid).cause == "application"
            if times > 0 and is_of_application:
                pending_xids[key] = _add_pending(pending_xids.get(key), earlier, times, now)
            elif times > 0:
                changes.append(_make_xid(gpu, device, count.xid, times))

            pending = pending_xids.get(key)
            if pending is None:
                continue

            blamed = _count_blamed(count.culprits, pending)
            are_all_blamed = sum(blamed.values()) >= pending.times
            if are_all_blamed or now - pending.since > _VERDICT_SECONDS:
                del pending_xids[key]
                changes += _make_caused(gpu, device, count, pending, blamed)

    return replace(record, xids=xids, pending=pending_xids), changes


def _list_devices(gpu: DeviceState) -> Iterator[tuple[str, GpuOrInstance]]:
    yield gpu.uuid, gpu
    for instance in gpu.instances:
        yield device_key(gpu.uuid, instance.id), instance


def _add_pending(
    pending: _PendingXid | None, earlier: XidCount | None, times: int, now: float
) -> _PendingXid:
    if pending is not None:
        return pending._replace(times=pending.times + times)
    culprits = earlier.culprits if earlier else ()
    return _PendingXid(now, times, {culprit.key: culprit.total for culprit in culprits})


def _count_blamed(culprits: Iterable[XidCulprit], pending: _PendingXid) -> dict[WorkloadKey, int]:
    """Returns how many of the XIDs each workload caused."""
    blamed = {}
    for culprit in culprits:
        times = culprit.total - pending.blamed.get(culprit.key, 0)
        if times > 0:
            blamed[culprit.key] = times
    return blamed


def _make_xid(gpu: DeviceState, device: GpuOrInstance, xid: int, count: int) -> GpuChange:
    needs_action = xid_spec(xid).needs_action
    text = _describe_xid(xid)
    if needs_action:
        text = _describe(Condition(XID, detail=str(xid)), gpu)
    users = _list_users(gpu, _list_affected(gpu, device))
    return GpuChange(ChangeReason.XID, gpu.uuid, text, users, is_warning=needs_action, times=count)


def _describe_xid(xid: int) -> str:
    return f"it reported XID {xid} ({xid_spec(xid).text})"


def _make_caused(
    gpu: DeviceState,
    device: GpuOrInstance,
    count: XidCount,
    pending: _PendingXid,
    blamed: Mapping[WorkloadKey, int],
) -> Iterator[GpuChange]:
    """Yields the changes of XIDs that applications caused. They concern no healthy pod."""
    says = _describe_xid(count.xid)
    for culprit in count.culprits:
        times = blamed.get(culprit.key)
        if times is not None:
            yield _make_blamed(gpu, says, culprit, times)

    unknown = pending.times - sum(blamed.values())
    if unknown > 0:
        users = _list_users(gpu, _list_affected(gpu, device))
        text = f"{says}; the GPU is healthy, and an application caused it"
        if len(users) > 1:
            text += f": one of {few_of(user.text for user in users)}"

        # Without a pod, an Event of the node says it.
        concerns_node = not users
        yield GpuChange(ChangeReason.XID, gpu.uuid, text, users, concerns_node, times=unknown)


def _make_blamed(gpu: DeviceState, says: str, culprit: XidCulprit, times: int) -> GpuChange:
    process = "a process"
    if culprit.pid:
        process = f"pid {culprit.pid}"
    if culprit.program:
        process = f"{culprit.program} ({process})"

    owner = culprit.text or "a process outside pods"
    text = f"{says}, caused by {process} of {owner}: check this program"
    pods = (culprit,) if culprit.pod else ()
    return GpuChange(ChangeReason.XID, gpu.uuid, text, pods, concerns_node=not pods, times=times)


# Idle pods and orphaned memory


def _find_idle(
    earlier: GpuRecord, gpu: DeviceState, idle_before: float
) -> Iterator[tuple[tuple[str, WorkloadKey], Holder]]:
    """Yields the holders that are idle since `idle_before`, by device key and holder.

    A holder whose use cannot be measured stays idle.
    """
    for device_name, device in _list_devices(gpu):
        for holder in device.holders:
            # Without a source, it only uses the device, so it cannot be idle.
            if not holder.pod or not holder.source:
                continue

            key = device_name, holder.key
            if holder.usage is None:
                is_idle = key in earlier.idle
            else:
                since = holder.usage.idle_since
                is_idle = since is not None and since <= idle_before
            if is_idle:
                yield key, holder


def _make_idle(gpu: DeviceState, holder: Holder) -> GpuChange:
    # If its use cannot be measured any more, the time is not known either.
    since = holder.known_usage.idle_since
    when = f" since {utc_text(since)}" if since else ""
    text = (
        f"the container {holder.container or 'of this pod'} has not used it{when}: "
        "delete or scale down the workload if it does not need the GPU"
    )
    return GpuChange(
        ChangeReason.IDLE, gpu.uuid, text, (holder,), concerns_node=False, is_warning=False
    )


def _find_orphans(gpu: DeviceState) -> frozenset[int]:
    pids: set[int] = set()
    for device in all_devices_of(gpu):
        pids.update(orphan.pid for orphan in device.orphans)
    return frozenset(pids)


def _make_orphaned(gpu: DeviceState) -> Iterator[GpuChange]:
    users = _list_users(gpu, all_devices_of(gpu))
    for condition in gpu.conditions:
        if condition.name == ORPHANED:
            yield GpuChange(ChangeReason.ORPHANED, gpu.uuid, _describe(condition, gpu), users)
