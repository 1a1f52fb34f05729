"""This module writes a picture as the JSON of `/api/v1/view` (docs/api.md), ready to be handed out. What is not known
is left out, never null. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from podgpu.figures.device import Alert, Condition, DeviceFigures, HolderFigures, Owner
from podgpu.figures.parts import physical_gpus
from podgpu.figures.picture import NamespacePicture, NodePicture, Picture
from podgpu.figures.totals import Totals, pod_totals, totals_of
from podgpu.metrics.encode import Body, etag_of
from podgpu.metrics.mig import slices_of_gpu, slices_of_profile
from podgpu.model import WORKLOAD_PARTS, Workload

JSON = dict[str, Any]
_OF_A_POD = ("allocated", "used", "idle", "unknown", "cost_per_hour", "wasted_per_hour")


def encode_picture(picture: Picture) -> bytes:
    return json.dumps(picture_json(picture), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def picture_json(picture: Picture) -> JSON:
    return _known(
        api="podgpu/v1",
        version=picture.version,
        scope=picture.scope,
        taken_at=picture.taken_at,
        interval_seconds=picture.interval_seconds,
        simulated=picture.simulated or None,
        notes=list(picture.notes),
        alerts=[alert_json(alert) for alert in picture.alerts],
        used_utilization_ratio=picture.used_utilization,
        used_field=picture.used_field or None,
        idle_after_seconds=picture.idle_after_seconds,
        counting_since=picture.counting_since,
        currency=picture.currency or None,
        prices=picture.prices or None,
        totals=totals_json(totals_of(picture)),
        namespaces=[namespace_json(n) for n in picture.namespaces],
        nodes=[node_json(n) for n in picture.nodes],
    )


def totals_json(of: Totals) -> JSON:
    return _known(
        gpus=of.gpus,
        allocated=of.allocated,
        used=of.used,
        idle=of.idle,
        unknown=of.unknown,
        free=of.free,
        broken=of.broken,
        power_watts=_rounded(of.power_watts, 1),
        cost_per_hour=_rounded(of.cost_per_hour),
        wasted_per_hour=_rounded(of.wasted_per_hour),
    )


def pod_json(picture: Picture, namespace: str, pod: str) -> JSON | None:
    """`/api/v1/pods/NAMESPACE/POD`: the devices it holds, with everybody who holds them. None: it holds none."""
    found = [(node, [d for d in node.devices if _holds(d, namespace, pod)]) for node in picture.nodes]
    nodes = [node_json(replace(node, devices=tuple(devices)), whole=False) for node, devices in found if devices]
    if not nodes:
        return None
    there = replace(picture, nodes=tuple(node for node, devices in found if devices))
    held = totals_json(pod_totals(there, namespace, pod))
    return _known(
        api="podgpu/v1",
        taken_at=picture.taken_at,
        simulated=picture.simulated or None,
        namespace=namespace,
        pod=pod,
        owner=_pods_owner(there, namespace, pod),
        currency=picture.currency or None,
        prices=picture.prices or None,
        totals={name: held[name] for name in _OF_A_POD if name in held},
        nodes=nodes,
    )


def _pods_owner(picture: Picture, namespace: str, pod: str) -> JSON | None:
    holders = (of for node in picture.nodes for device in node.devices for of in device.holders)
    owners = (of.owner for of in holders if (of.holder.namespace, of.holder.pod) == (namespace, pod))
    return next((owner_json(owner) for owner in owners if owner is not None), None)


def owner_json(of: Owner) -> JSON:
    return {"kind": of.kind, "name": of.name}


def _holds(device: DeviceFigures, namespace: str, pod: str) -> bool:
    return any(h.holder.pod == pod and h.holder.namespace == namespace for h in device.holders)


def namespace_json(of: NamespacePicture) -> JSON:
    return _known(
        namespace=of.namespace,
        allocated_gpus=_rounded(of.allocated_gpus),
        used_gpus=_rounded(of.used_gpus),
        idle_gpus=_rounded(of.idle_gpus),
        unknown_gpus=_rounded(of.unknown_gpus),
        cost_per_hour=_rounded(of.cost_per_hour),
        wasted_per_hour=_rounded(of.wasted_per_hour),
        allocated_gpu_hours=_rounded(of.allocated_hours),
        busy_gpu_hours=_rounded(of.busy_hours),
        energy_kwh=_rounded(of.energy_kwh),
        cost={kind: _rounded(amount) for kind, amount in of.cost} or None,
    )


def node_json(node: NodePicture, whole: bool = True) -> JSON:
    """`whole`: False where not all of its devices are here: then nothing can be said of a GPU by its instances."""
    return _known(
        name=node.name,
        old=node.old or None,
        gone=node.gone or None,
        age_seconds=_rounded(node.age_seconds, 1),
        notes=list(node.notes) or None,
        simulated=node.simulated or None,
        gpus=list(_gpus(node.devices, whole)),
    )


def _gpus(devices: Iterable[DeviceFigures], whole: bool) -> Iterable[JSON]:
    """Instances inside their GPU, whether or not the GPU itself has figures."""
    for gpu in physical_gpus(sorted(devices, key=lambda d: d.place)):
        first = gpu.devices[0]
        own = gpu.own or DeviceFigures(first.uuid, first.index, first.model)
        if not gpu.instances:
            yield device_json(own)
        else:
            own = replace(own, utilization=gpu.utilization) if whole else own
            yield device_json(own) | {"instances": [_instance(instance) for instance in gpu.instances]}


def device_json(device: DeviceFigures) -> JSON:
    return _known(uuid=device.uuid, index=_index(device), model=device.model, **_figures(device))


def _instance(device: DeviceFigures) -> JSON:
    return _known(
        id=device.instance,
        profile=device.profile,
        slices=slices_of_profile(device.profile),
        gpu_slices=slices_of_gpu(device.model),
        **_figures(device),
    )


def _figures(device: DeviceFigures) -> JSON:
    return {
        "utilization_ratio": _rounded(device.utilization),
        "memory_used_bytes": device.memory_used,
        "memory_total_bytes": device.memory_total,
        "power_watts": _rounded(device.power_watts, 1),
        "temperature_celsius": device.temperature,
        "energy_joules": _rounded(device.energy_joules, 1),
        "holders": [holder_json(h) for h in device.holders] or None,
        "conditions": [condition_json(c) for c in device.conditions] or None,
        "absent": None if device.present else True,
        "last_holders": [workload_json(w) for w in device.last_holders] or None,
        "price_per_hour": _rounded(device.price_per_hour),
    }


def holder_json(of: HolderFigures) -> JSON:
    return _known(
        **workload_json(of.holder),
        share_ratio=_rounded(of.share),
        utilization_ratio=_rounded(of.utilization),
        memory_used_bytes=of.memory,
        processes=of.processes,
        busy_seconds=_rounded(of.busy_seconds, 1),
        idle_seconds=_rounded(of.idle_seconds, 1),
        energy_joules=_rounded(of.energy_joules, 1),
        idle_since=_rounded(of.idle_since, 0),
        owner=None if of.owner is None else owner_json(of.owner),
        cost_per_hour=_rounded(of.cost_per_hour),
    )


def alert_json(of: Alert) -> JSON:
    return _known(severity=of.severity, text=of.text, node=of.node or None, uuid=of.uuid or None)


def condition_json(of: Condition) -> JSON:
    return _known(condition=of.name, since=_rounded(of.since, 0), says=of.says, do=of.do)


def workload_json(of: Workload) -> JSON:
    named = {name: getattr(of, name) for name in WORKLOAD_PARTS}
    return {name: value for name, value in named.items() if value}


def _index(device: DeviceFigures) -> int | None:
    return device.index if device.index >= 0 else None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _known(**members: Any) -> JSON:
    return {name: value for name, value in members.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PageState:
    """All a request for the page's figures needs. Immutable; replaced as a whole."""

    picture: Picture
    view: Body
    """`/api/v1/view`."""
    etag: str
    """Weak, because it stands for both encodings."""

    @classmethod
    def of(cls, picture: Picture) -> PageState:
        plain = encode_picture(picture)
        return cls(picture, Body.of(plain), etag_of(plain))
