"""Builds the node's document from the latest readings, renders it on request, and logs changes."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from podgpu import __version__
from podgpu.clock import FaultLog
from podgpu.errors import few_of
from podgpu.metrics.conditions import UNALLOCATED
from podgpu.metrics.dcgm import render_dcgm
from podgpu.metrics.encode import NO_LABELS, Body, Family, Sample, encode, families_in
from podgpu.metrics.fields import THROTTLE_REASONS, by_name, fields
from podgpu.metrics.labels import Policy
from podgpu.metrics.render import render_gpu_manager, render_own, render_self
from podgpu.metrics.values import device_figures, gpu_figures, in_legacy_units
from podgpu.model import (
    RESERVATION,
    Allocation,
    Condition,
    Device,
    DeviceState,
    Holder,
    MigInstance,
    NodeState,
    PodLabels,
    RunningProcess,
    SourceStatus,
    Unmapped,
    Value,
    encode_node,
    group_by_key,
    split_key,
)
from podgpu.node.agent.gpus import TelemetryResult
from podgpu.node.agent.usage_collector import UsageResult
from podgpu.node.holders.annotations import find_reserved
from podgpu.node.holders.reader import describe, explain
from podgpu.node.usage.ledger import DeviceUse

_log = logging.getLogger("podgpu")
RenderedText = Literal["fresh", "stale", "gpu_manager", "fresh_json", "stale_json"]
"""Metrics text or JSON. The stale variants omit all values. They are served if the values are too
old.
"""
COUNTERS = "counters"  # name of the source that reads the counter file
_STARTED_AT = time.time()
_IDENTITY = ("uuid", "index", "model", "pci_bus_id", "minor", "maker", "mig_enabled")
_NO_FIGURES = (*_IDENTITY, "hidden", "conditions", "last_holders")
_POWER_LIMIT = 164  # DCGM_FI_DEV_ENFORCED_POWER_LIMIT
_FAULT_SECONDS = 60.0  # minimum time between two log lines about the same fault
_SAME_FAULT = {"hung": "deadline"}  # a call that hangs is first reported as `deadline`


# The document


def build_node_state(
    telemetry: TelemetryResult,
    allocation: Allocation,
    usage: UsageResult,
    health: Mapping[str, dict[str, Any]],
    unsupported: Iterable[tuple[str, str]] = (),
    pod_labels: PodLabels | None = None,
    **members: Any,
) -> NodeState:
    """Builds the document from the latest readings.

    `health`: result of `HealthWatch.report`. `unsupported`: result of `list_unsupported`.
    `members`: other fields of `NodeState`.
    """
    names = fields()
    return NodeState(
        producer="podgpu",
        version=__version__,
        taken_at=telemetry.at,
        holders_at=allocation.at,
        usage_at=usage.at,
        simulated=any(source.name == "simulated" for source in telemetry.sources),
        gpus_expected=telemetry.gpus_expected,
        gpus_visible=telemetry.gpus_visible,
        gpus_lost=telemetry.gpus_lost,
        devices=tuple(
            _build_gpus(telemetry, _join_holders(allocation, usage), usage, health, unsupported)
        ),
        namespaces=usage.namespaces,
        entities=tuple(
            entity for reading in telemetry.readings.values() for entity in reading.entities
        ),
        vcuda=tuple(map(allocation.with_api_uid, allocation.vcuda)),
        pod_labels={"/".join(pod): dict(labels) for pod, labels in (pod_labels or {}).items()},
        dropped={names[i].name: count for i, count in telemetry.dropped.items()},
        **members,
    )


def _join_holders(allocation: Allocation, usage: UsageResult) -> dict[str, list[Holder]]:
    """Returns the holders of each device, by device key. Those with an allocation come first."""
    holders = defaultdict[str, list[Holder]](list)
    users_of = {key: dict(use.holders) for key, use in usage.devices.items()}
    for assignment in allocation.assignments:
        holder = assignment.holder
        users = users_of.get(assignment.device, {})
        user = users.pop(holder.key, Holder(user=holder.user))
        members = structs.asdict(holder) | {"user": user.user, "usage": user.usage}
        holders[assignment.device].append(
            Holder(
                **members,
                source=assignment.source,
                share_ratio=assignment.share,
                replica=assignment.replica,
                labels=dict(assignment.attributes),
            )
        )
    for key, users in users_of.items():
        for user in users.values():
            holders[key].append(user)

    for key, own in holders.items():
        processes = usage.devices.get(key, DeviceUse()).processes
        running = [_add_running(holder, processes) for holder in own]
        holders[key] = [allocation.with_api_uid(holder) for holder in running]
    for key in find_reserved(allocation):
        holders[key].append(Holder(source=RESERVATION))
    return holders


def _add_running(holder: Holder, processes: Iterable[RunningProcess]) -> Holder:
    """Adds the holder's own processes. On a node with Kubernetes, documents list no processes."""
    if not holder.user:
        return holder
    running = []
    for process in processes:
        if process.owner is not None and process.owner.key == holder.key:
            running.append(structs.replace(process, owner=None))
    return structs.replace(holder, running=tuple(running))


def _build_gpus(
    telemetry: TelemetryResult,
    holders: Mapping[str, Sequence[Holder]],
    usage: UsageResult,
    health: Mapping[str, dict[str, Any]],
    unsupported: Iterable[tuple[str, str]],
) -> Iterator[DeviceState]:
    values_of = telemetry.values
    figures_of = {key: _read_figures(values) for key, values in values_of.items()}
    shown = {device.key for device in telemetry.selected}
    names = fields()
    unsupported_by = group_by_key((key, name) for name, key in unsupported)

    def build_device(key: str) -> dict[str, Any]:
        values, used = values_of.get(key), usage.devices.get(key, DeviceUse()).totals
        figures = device_figures(figures_of.get(key, {}))
        if figures["memory_used_bytes"] is None and used is not None:
            figures["memory_used_bytes"] = used.memory_used_bytes
        return {
            "hidden": key not in shown,
            **figures,
            "usage": used,
            "holders": tuple(holders.get(key, ())),
            "fields": None if values is None else by_name(values),
            "unsupported": tuple(unsupported_by.get(key, ())),
            **health.get(key, {}),
        }

    instances: defaultdict[str, list[MigInstance]] = defaultdict(list)
    known = {device.uuid for device in telemetry.devices}  # omits GPUs that `podgpu forget` removed
    devices = _find_devices(
        telemetry,
        (*holders, *(k for k, own in health.items() if "xids" in own and split_key(k)[0] in known)),
    )
    for key, device in devices.items():
        if device.gi_id is not None:
            instances[device.uuid].append(
                MigInstance(
                    id=device.gi_id,
                    profile=device.profile,
                    uuids=device.mig_uuids,
                    **build_device(key),
                )
            )
    for uuid, device in devices.items():
        if device.gi_id is not None:
            continue
        values, members, reading = (
            values_of.get(uuid, {}),
            build_device(uuid),
            telemetry.readings.get(uuid),
        )
        details = reading.details if reading is not None and uuid in values_of else ()
        throttled = {reason: values.get(number) for number, reason in THROTTLE_REASONS.items()}
        limit = reading.slow_values.get(_POWER_LIMIT) if reading is not None else None
        users = (
            *members["holders"],
            *(holder for instance in instances[uuid] for holder in instance.holders),
        )
        yield DeviceState(
            **{member: getattr(device, member) for member in _IDENTITY},
            throttled_ns={reason: ns for reason, ns in throttled.items() if isinstance(ns, int)},
            power_limit_mw=round(limit * 1000) if isinstance(limit, float) else None,
            instances=tuple(instances[uuid]),
            details=tuple((names[number].name, labels, value) for number, labels, value in details),
            **gpu_figures(figures_of.get(uuid, {})),  # type: ignore[arg-type]
            **members
            | {"conditions": (*members.get("conditions", ()), *_find_unallocated_use(users))},
        )


def list_unsupported(
    telemetry: TelemetryResult, configured: Collection[int]
) -> list[tuple[str, str]]:
    """Returns the name and device key of each configured field that a selected device does not
    support.
    """
    shown, names = {device.key for device in telemetry.selected}, fields()
    entries = (entry for reading in telemetry.readings.values() for entry in reading.unsupported)
    return [
        (names[number].name, key)
        for key, number in entries
        if number in configured and key in shown
    ]


def _find_devices(telemetry: TelemetryResult, used: Iterable[str]) -> dict[str, Device]:
    """Returns the devices of the document, by key. `used`: keys of devices to include even if they
    are not selected.
    """
    known = {device.key: device for device in telemetry.devices}
    devices: dict[str, Device] = {}
    for key in (*(device.key for device in telemetry.selected), *used):
        uuid, gi_id = split_key(key)
        gpu = devices.setdefault(uuid, known.get(uuid) or Device(None, uuid, "", ""))
        if gi_id is not None:
            devices[key] = known.get(key) or replace(gpu, gi_id=gi_id)
    return devices


def _find_unallocated_use(holders: Iterable[Holder]) -> Iterator[Condition]:
    users = [h for h in holders if h.usage is not None and h.usage.unallocated_since is not None]
    if users:
        since = min(user.usage.unallocated_since or 0.0 for user in users if user.usage is not None)
        yield Condition(UNALLOCATED, since, few_of((user.text for user in users), 2)[:256])


def _read_figures(values: Mapping[int, Value]) -> dict[str, float]:
    numbers = {i: value for i, value in values.items() if not isinstance(value, str)}
    return {fields()[i].name: value for i, value in in_legacy_units(numbers).items()}


def add_memory(
    devices: Iterable[Device], values: Mapping[str, Mapping[int, Value]]
) -> tuple[Device, ...]:
    """Sets the total memory of each device. Allocation sources need it to compute shares."""
    totals = {
        key: device_figures(_read_figures(own))["memory_total_bytes"] for key, own in values.items()
    }
    return tuple(replace(device, memory_bytes=totals.get(device.key)) for device in devices)


def remove_figures(state: NodeState) -> NodeState:
    """Removes all values from the document. Keeps identities, conditions and sources."""
    devices = []
    for gpu in state.devices:
        own = [
            MigInstance(id=i.id, profile=i.profile, uuids=i.uuids, hidden=i.hidden)
            for i in gpu.instances
        ]
        devices.append(
            DeviceState(
                instances=tuple(own), **{member: getattr(gpu, member) for member in _NO_FIGURES}
            )
        )
    return structs.replace(state, stale=True, devices=tuple(devices), namespaces=(), entities=())


# Published data


@dataclass(eq=False)
class Published:
    """The document after one reading, its JSON and its metrics text.

    They are built on the first request and then cached. Building never waits for a driver.
    """

    _build: Callable[[], NodeState]
    _policy: Policy
    read_at: float  # monotonic time of the last telemetry reading
    rendered: dict[RenderedText, Body] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def state(self) -> NodeState:
        return self._build()

    @property
    def fresh(self) -> Body:
        return self.render("fresh")

    def render(self, text: RenderedText) -> Body:
        with self._lock:
            if text not in self.rendered:
                self.rendered[text] = Body(self._encode(text))
            return self.rendered[text]

    def _encode(self, text: RenderedText) -> bytes:
        state, policy = self.state, self._policy
        process = process_families() if policy.process_metrics else ()
        match text:
            case "fresh":
                gpu_manager = render_gpu_manager(state, policy) if policy.gpu_manager else ()
                return encode(
                    (
                        *render_dcgm(state, policy),
                        *render_own(state, policy),
                        *process,
                        *gpu_manager,
                    )
                )
            case "stale":
                return encode((*render_self(state), *process))
            case "gpu_manager":
                return encode(render_gpu_manager(state, policy))
            case "fresh_json":
                return encode_node(state)
            case "stale_json":
                return encode_node(remove_figures(state))


def process_families() -> tuple[Family, ...]:
    """Returns the metrics of the exporter's own process, with the names of Prometheus' client
    libraries.
    """
    size, resident = (
        int(pages) for pages in Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    )
    most_files, most_memory = (
        resource.getrlimit(of)[0] for of in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
    )
    values = {
        "process_cpu_seconds_total": time.process_time(),
        "process_max_fds": most_files,
        "process_open_fds": len(os.listdir("/proc/self/fd"))
        - 1,  # minus the descriptor that lists the directory
        "process_resident_memory_bytes": resident * resource.getpagesize(),
        "process_start_time_seconds": _STARTED_AT,
        "process_virtual_memory_bytes": size * resource.getpagesize(),
        "process_virtual_memory_max_bytes": 2**64 - 1
        if most_memory == resource.RLIM_INFINITY
        else most_memory,
    }
    return tuple(
        spec.of([Sample(NO_LABELS, values[name])]) for name, spec in families_in("process").items()
    )


# Log


class ChangeLog:
    """Logs changes of sources, unsupported fields and unmapped assignments. Logs each change
    once.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._faults: FaultLog[tuple[str, str]] = FaultLog(
            clock, _FAULT_SECONDS
        )  # by source and GPU UUID
        self._unsupported: set[tuple[str, str]] = set()  # field and device key
        self._unmapped: frozenset[Unmapped] = frozenset()

    def report(
        self,
        sources: Iterable[SourceStatus],
        unsupported: Iterable[tuple[str, str]],
        unmapped: Iterable[Unmapped],
    ) -> None:
        """`unsupported`: result of `list_unsupported`."""
        self._report_sources(sources)
        self._report_unsupported(set(unsupported))
        self._report_unmapped(frozenset(unmapped))

    def _report_sources(self, sources: Iterable[SourceStatus]) -> None:
        for source in sources:
            key = source.name, source.device
            name = f"{source.name} ({source.device})" if source.device else source.name
            if source.up and self._faults.recover(key):
                _log.info("%s: answers again", name)
            # Compares mistakes in the counter file by message, so that a different mistake is
            # logged, too.
            is_mistake = source.name == COUNTERS and source.error == "malformed"
            fault = source.message if is_mistake else _SAME_FAULT.get(source.error, source.error)
            if not source.up and self._faults.fail(key, fault):
                message = source.message.removeprefix(f"{source.name}: ")
                _log.warning("%s: %s; podgpu continues and retries", name, message)

    def _report_unsupported(self, unsupported: set[tuple[str, str]]) -> None:
        new, self._unsupported = unsupported - self._unsupported, self._unsupported | unsupported
        for name, entries in groupby(sorted(new), itemgetter(0)):
            keys = few_of(key for _, key in entries)
            _log.warning("%s is not supported by %s and has no series there", name, keys)

    def _report_unmapped(self, unmapped: frozenset[Unmapped]) -> None:
        new, self._unmapped = unmapped - self._unmapped, unmapped
        by_reason = attrgetter("source", "reason")
        for (source, reason), entries in groupby(
            sorted(new, key=lambda u: (*by_reason(u), describe(u))), by_reason
        ):
            first, *others = entries
            explanation, what = explain(first), few_of(map(describe, (first, *others)))
            level = logging.INFO if explanation.harmless else logging.WARNING
            _log.log(
                level,
                "%s: %s: %s (%s); %s",
                source,
                what,
                explanation.reason,
                reason,
                explanation.advice,
            )
