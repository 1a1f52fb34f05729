"""Turns the cluster's state into records for the history."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from podgpu.charge import UNALLOCATED, Amounts, Charge, Figures, HeldTime, charge, charge_rest
from podgpu.errors import Note
from podgpu.fleet.choose import describe_condition
from podgpu.fleet.hold import describe_idle, estimate_idle, is_used_unheld, wasteful_since
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import (
    HeldPart,
    device_memory,
    device_price,
    device_utilization,
    divide_gpu,
    key_of,
)
from podgpu.fleet.round import Cluster
from podgpu.fleet.spent import MAX_WATTS
from podgpu.fleet.state import ClusterState
from podgpu.known import divide_known
from podgpu.metrics.conditions import NODE_GONE
from podgpu.model import DeviceState, MigInstance
from podgpu.past.accounts import account_of
from podgpu.past.books.gpu_sample import ConditionRecord, GpuSample
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.spans import IDLE

_log = logging.getLogger(__name__)
# Minimum difference from the GPU's utilisation for storing a sole holder's own values.
_OWN_DIFFERENCE = 0.05
MAX_GPUS = 8000  # limit of the SQLite history; measured with 1,000 nodes of 8 GPUs


def make_gpu_samples(state: ClusterState) -> list[GpuSample]:
    """Returns the state of each GPU and MIG instance, with the charges since the last round.

    Skips GPUs without a UUID, because the UUID is the key in the history.
    """
    records: list[GpuSample] = []
    for node in state.nodes:
        held = {} if node.gone else node.held_by_device()
        for gpu in node.gpus:
            if gpu.uuid:
                records += _record_gpu(gpu, node, held, state)
    return records


def _record_gpu(
    gpu: DeviceState, node: NodeEntry, held: Mapping[str, list[HeldPart]], state: ClusterState
) -> Iterator[GpuSample]:
    # Of processes of users. They have no series, so their energy is a part of the unattributed one.
    users_joules = 0.0
    for instance, size in divide_gpu(gpu):
        key = key_of(gpu, instance)
        # Without reservations for unknown pods.
        parts = [part for part in held.get(key, ()) if part.holder.key]
        charges = list(_charge_holders(parts, node, state))
        for part, charged in zip(parts, charges, strict=True):
            if not part.holder.has_labels:
                users_joules += charged.amounts.energy_joules

        # A device that the last round did not have has no time to charge yet. If the node is
        # silent, the holders are unknown.
        if key in node.unattributed_joules and not node.silent:
            price = device_price(node.prices, gpu, instance, size)
            held_seconds = sum(charged.amounts.allocated_seconds for charged in charges)
            is_used = is_used_unheld(gpu, held)
            rest = charge_rest(node.charged_seconds, size, held_seconds, price, is_used)
            joules = _find_rest_joules(gpu, node.unattributed_joules[key], rest)
            rest = rest._replace(energy_joules=max(0.0, joules - users_joules))
            if any(rest):
                currency = "" if price is None else state.prices.currency
                charges.append(Charge(UNALLOCATED, amounts=rest, currency=currency))

        yield GpuSample(
            uuid=gpu.uuid,
            instance="" if instance is None else str(instance.id),
            node=node.name,
            gpu_index=gpu.index,
            figures=None if node.stale else _figures(gpu, instance),
            charges=charges,
            conditions=list(_record_conditions(gpu, parts, node, state)),
            holders_known=node.silent is None,
            taken_from=node.taken.get(gpu.uuid, ""),
        )


def _record_conditions(
    gpu: DeviceState, parts: Sequence[HeldPart], node: NodeEntry, state: ClusterState
) -> Iterator[ConditionRecord]:
    for condition in gpu.conditions:
        text, _ = describe_condition(condition)
        since = condition.since
        # Begins with this round, with which the spans of its holders end (see `_find_runs`).
        if condition.name == NODE_GONE:
            since = None
        yield ConditionRecord(condition.name, text, since)

    at = node.reading.read_at + state.clock_offset
    for part in parts:
        if wasteful_since(part, at, state.settings.idle_after):
            account = account_of(part, node.state.pod_labels)
            yield ConditionRecord(IDLE, describe_idle(part.holder), account=account)


def _charge_holders(
    parts: Sequence[HeldPart], node: NodeEntry, state: ClusterState
) -> Iterator[Charge]:
    # The values of a sole holder are usually those of the GPU, which are stored anyway.
    are_different = len(parts) > 1 or any(map(_differs, parts))
    has_own_figures = are_different and not node.stale
    for part in parts:
        usage = part.holder.usage
        figures = None
        if has_own_figures and usage:
            figures = Figures(usage.utilization_ratio, usage.memory_used_bytes)

        amounts = Amounts()
        if part.spent is not None:
            at = node.reading.read_at + state.clock_offset
            time = _complete(part.spent, part, at)
            amounts = charge(time, part.device_size, part.price)

        yield Charge(
            account_of(part, node.state.pod_labels),
            part.holder.container,
            amounts,
            figures,
            currency="" if part.price is None else state.prices.currency,
        )


def _complete(spent: HeldTime, part: HeldPart, at: float) -> HeldTime:
    """Estimates what the exporter does not count. `at`: Unix time of the reading."""
    busy = spent.busy
    if part.holder.known_usage.busy_ns is None:
        ratio = _utilization(part)
        busy = None if ratio is None else min(1.0, ratio) * spent.held

    idle = spent.idle
    if idle is None:
        idle = estimate_idle(part, spent.held, at)

    joules = spent.joules
    # Without `usage`, the exporter counts no energy of holders at all.
    if joules is None and part.gpu.usage is None:
        joules = _watts(part.gpu) * part.gpu_fraction * spent.held

    return spent._replace(busy=busy, idle=idle, joules=joules)


def _find_rest_joules(gpu: DeviceState, unattributed: float | None, rest: Amounts) -> float:
    """Returns the energy of what no holder had. Without `usage`, it is estimated, as of holders."""
    if gpu.usage is None:
        return _watts(gpu) * rest.allocated_seconds
    return unattributed or 0.0


def _watts(gpu: DeviceState) -> float:
    """Returns the power for estimates of energy. An exporter may report any number."""
    return min(MAX_WATTS, (gpu.power_mw or 0) / 1000)


def _utilization(part: HeldPart) -> float | None:
    """Returns the holder's utilisation, or the device's if no other holder shares it.

    None for a client of MPS.
    """
    if part.is_mps_client:
        return None
    own = part.holder.known_usage.utilization_ratio
    if own is None and part.share == 1:
        return device_utilization(part.device)
    return own


def _figures(gpu: DeviceState, instance: MigInstance | None) -> Figures | None:
    device = instance or gpu
    figures = Figures(device_utilization(device), device_memory(device))
    if instance is None:
        power = divide_known(gpu.power_mw, 1000)
        figures = figures._replace(power_watts=power, temperature_celsius=gpu.temperature_celsius)
    if figures == Figures():
        return None

    return figures


def _differs(part: HeldPart) -> bool:
    """Returns whether a holder's own use differs from that of its device."""
    own = part.holder.known_usage.utilization_ratio
    if own is None:
        return False
    of_device = device_utilization(part.device)
    return of_device is None or abs(of_device - own) > _OWN_DIFFERENCE


def _describe_limit(state: ClusterState) -> Iterator[Note]:
    gpus = sum(len(node.state.devices) for node in state.nodes)
    if gpus > MAX_GPUS:
        text = (
            f"history, waste and cost of {gpus:,} GPUs are stored in SQLite, which supports"
            f" {MAX_GPUS:,}: for larger clusters, use a Prometheus server (--prometheus)"
        )
        yield Note("history limit", text)


def cluster_recorder(cluster: Cluster, directory: str = "") -> HistoryRecorder:
    """Creates a recorder that gets every round of the cluster view."""
    recorder = HistoryRecorder(clock=cluster.clock, directory=directory)

    def add(state: ClusterState) -> None:
        if not state.nodes:
            return
        try:
            recorder.add(make_gpu_samples(state))
        except Exception:  # noqa: BLE001 - the cluster view goes on without history
            _log.exception("unexpected error while recording a round; please report it")

    def warnings() -> list[Note]:
        return [*recorder.warnings(), *_describe_limit(cluster.published.state)]

    cluster.read_time = recorder.read_time
    cluster.recorded_nodes = recorder.list_nodes()
    cluster.readers.append(add)
    cluster.warnings.append(warnings)
    return recorder
