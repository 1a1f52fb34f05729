"""Simulated responses of `/api/v1/history`, `/range`, `/events`, `/summary` and `/gpus` for a
view.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from podgpu.errors import utc_text
from podgpu.fleet.repair import make_repair
from podgpu.fleet.view import (
    ConditionView,
    DeviceView,
    GpuView,
    HolderView,
    InstanceView,
    NodeView,
    View,
)
from podgpu.metrics.conditions import find_checks
from podgpu.model import Workload, WorkloadOwner
from tests.browser.pictures import GIB, Records, Showing, gpu, held, node, page_of, three_nodes

STEPS = {"1h": 15, "6h": 60, "24h": 300}
SECONDS = {"1h": 3600, "6h": 21600, "24h": 86400}
PRICE = 2.5
NONE = 255


class Device(NamedTuple):
    """A GPU or one of its MIG instances."""

    node: str
    gpu: GpuView
    slot: DeviceView

    @property
    def instance(self) -> str:
        return self.slot.id if isinstance(self.slot, InstanceView) else ""


def devices_of(picture: View) -> Iterator[Device]:
    for one in picture.nodes:
        for whole in one.gpus:
            yield from (Device(one.name, whole, slot) for slot in (whole, *whole.instances))


def records_of(picture: View) -> Records:
    """Returns a function that answers every request of the page except that for the view."""

    def answer(path: str, query: Mapping[str, str]) -> Mapping[str, Any] | None:
        kind, *names = path.split("/")
        if kind == "events":
            return events(query)
        if kind == "summary":
            return summary(*names)
        if kind == "range":
            return cost(query)
        if kind == "costs":
            return costs(query)
        if kind == "gpus":
            return known(picture, names[0])
        if not names:
            return all_lines(picture, int(query.get("points", "60")))
        if query.get("range") not in SECONDS:
            return None
        return (
            gpu_past(picture, names[1], query)
            if names[0] == "gpus"
            else pod_past(picture, names[1:], query)
        )

    return answer


def all_lines(picture: View, points: int) -> dict[str, Any]:
    step = 3600 / points
    begin = (time.time() // step - points + 1) * step
    devices = {
        d.gpu.uuid + (f"/{d.instance}" if d.instance else ""): base64.b64encode(
            _bytes(d, points)
        ).decode()
        for d in devices_of(picture)
        if d.slot.utilization_ratio is not None
    }
    return {"from": begin, "step_seconds": step, "points": points, "devices": devices}


def _bytes(device: Device, points: int) -> bytes:
    return bytes(NONE if value is None else round(value * 200) for value in _values(device, points))


def _values(device: Device, points: int) -> list[float | None]:
    """Returns a wave around the current value, with a gap."""
    base, seed = device.slot.utilization_ratio or 0.0, device.gpu.index or 0
    swing = 0.25 if base else 0.0
    waves = (base + swing * math.sin(i / 7 + seed) - swing / 2 for i in range(points))
    hole = range(points // 3, points // 3 + points // 20)
    return [None if i in hole else round(min(1, max(0, value)), 4) for i, value in enumerate(waves)]


def _series(device: Device, points: int) -> dict[str, list[float | None]]:
    load = _values(device, points)

    def of(make: Callable[[float], float]) -> list[float | None]:
        return [None if value is None else make(value) for value in load]

    return {
        "utilization_ratio": load,
        "memory_used_bytes": of(lambda v: int(GIB * (20 + 40 * v))),
        "power_watts": of(lambda v: round(90 + 560 * v, 1)),
        "temperature_celsius": of(lambda v: round(35 + 40 * v)),
    }


def _find(picture: View, uuid: str, instance: str = "") -> Device | None:
    return next(
        (d for d in devices_of(picture) if (d.gpu.uuid, d.instance) == (uuid, instance)), None
    )


def gpu_past(picture: View, uuid: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    device = _find(picture, uuid, query.get("instance", ""))
    if device is None:
        return None
    end, seconds, step = time.time(), SECONDS[query["range"]], STEPS[query["range"]]
    points = seconds // step
    begin = end - seconds
    nightly = {"namespace": "batch", "pod": "nightly-0", "container": "main"}
    first = {"from": begin - 500, "to": begin + seconds * 0.42, **nightly}
    holders = [
        {
            "from": begin + seconds * 0.45,
            "namespace": h.namespace,
            "pod": h.pod,
            "container": h.container,
        }
        for h in device.slot.holders
    ]
    hot = {"condition": "thermal", "says": "slowed down by heat"}
    marks = [
        {"at": begin + seconds * 0.2, "until": begin + seconds * 0.28, **hot},
        *(
            {"at": c.since or end - 600, "condition": c.condition, "says": c.says}
            for c in device.slot.conditions
        ),
    ]
    past = {"from": begin, "to": end, "step_seconds": step, "series": _series(device, points)}
    return {"uuid": uuid, **past, "holders": [first, *holders], "marks": marks}


def pod_past(
    picture: View, names: Iterable[str], query: Mapping[str, str]
) -> dict[str, Any] | None:
    namespace, pod = names
    devices = [
        d
        for d in devices_of(picture)
        if any((h.namespace, h.pod) == (namespace, pod) for h in d.slot.holders)
    ]
    if not devices:
        return None
    end, seconds, step = time.time(), SECONDS[query["range"]], STEPS[query["range"]]
    told = [
        {
            "node": d.node,
            "uuid": d.gpu.uuid,
            "index": d.gpu.index,
            "series": _series(d, seconds // step),
        }
        | ({"instance": d.instance} if d.instance else {})
        for d in devices
    ]
    past = {"from": end - seconds, "to": end, "step_seconds": step, "devices": told, "marks": []}
    return {"namespace": namespace, "pod": pod, **past}


def cost(query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the cost of two teams and of unallocated GPUs. A day costs 24 times as much as an
    hour.
    """
    by, end = query["by"], float(query.get("to", time.time()))
    hours = {"1h": 1.0, "24h": 24.0, "7d": 168.0, "30d": 720.0}.get(query.get("range", ""), 0.0)
    hours = hours or (end - float(query["from"])) / 3600

    def figures(gpus: float, idle: float, underused: float = 0.0) -> dict[str, Any]:
        held = gpus * hours
        parts = {"idle": idle * hours, "underused": underused * hours}
        return {
            "gpu_hours": held,
            "used_hours": held / 4,
            "idle_hours": idle * hours,
            "mean_use": 0.25,
        } | {
            "allocated_hours": held,
            "energy_kwh": held * 0.4,
            "cost": held * PRICE,
            "wasted": idle * hours * PRICE,
            "waste": {
                "hours": parts,
                "cost": {name: part * PRICE for name, part in parts.items()},
            },
        }

    name = "label" if by.startswith("label:") else by
    rows: list[dict[str, Any]] = [
        {name: "nlp"} | figures(6, 2, 1),
        {name: "vision"} | figures(2, 0, 1.92),
        {"unallocated": True} | figures(4, 0),
    ]
    rows[1] |= {"mean_use": 0.04, "used_hours": 0.08 * hours}
    free = {"unallocated": 4 * hours}
    free_cost = {"unallocated": 4 * hours * PRICE}
    rows[2] |= {"waste": {"hours": free, "cost": free_cost}}
    totals = figures(12, 2, 2.92)
    waste = totals["waste"]
    totals["waste"] = {"hours": waste["hours"] | free, "cost": waste["cost"] | free_cost}
    totals |= {"allocated_hours": 8 * hours, "unallocated_cost": 4 * hours * PRICE}
    told = {
        "from": end - 3600 * hours,
        "to": end,
        "by": by,
        "currency": "USD",
        "labels": ["app", "team"],
    }
    since = end - 3600 * min(hours, 48)
    notes = [f"no record before {utc_text(since)}"]
    return told | {"recorded_from": since, "notes": notes, "totals": totals, "rows": rows}


def costs(query: Mapping[str, str]) -> dict[str, Any]:
    """Returns 17 days of two teams and of unallocated GPUs. The fourth day has no record."""
    name = "label" if query["by"].startswith("label:") else query["by"]
    days = 17
    start = time.time() // 86_400 * 86_400 - (days - 1) * 86_400

    def steps(gpus: float, known: int = days) -> dict[str, Any]:
        hours = [gpus * 24 * (0.6 + 0.4 * math.sin(day) ** 2) for day in range(known)]
        hours[-1] /= 3
        values: list[float | None] = [None if day == 3 else hour for day, hour in enumerate(hours)]
        values += [None] * (days - known)
        cost = [None if value is None else value * PRICE for value in values]
        sums = {"gpu_hours": sum(filter(None, values)), "cost": sum(filter(None, cost))}
        return sums | {"steps": {"cost": cost, "gpu_hours": values, "mean_use": [0.5] * days}}

    rows = [
        {name: "nlp", "forecast": 7000.0, "next_month": 7750.0} | steps(6),
        {name: "vision"} | steps(2),
        {"unallocated": True} | steps(4),
    ]
    compared = {"steps": 12, "cost": 7000.0, "previous_cost": 6250.0}
    mine: dict[str, Any] = {"currency": "USD", "per_month": 4000.0, "cost": 4400.0, "ratio": 1.1}
    other = {"currency": "USD", "per_month": 3000.0, "cost": 1500.0, "ratio": 0.5}
    team = {"label": "team"} if name == "label" else {}
    key = "value" if name == "label" else "namespace"
    budgets = [
        mine | team | {key: "nlp", "forecast": 7000.0},
        other | team | {key: "vision", "forecast": 2500.0},
    ]
    previous = {"from": start - days * 86_400, "to": start, "totals": steps(10, 14)}
    month = {"from": start, "to": start + 30 * 86_400}
    so_far = {"cost": 21_000.0, "cost_so_far": 11_000.0, "cost_per_day": 500.0, "days": 7}
    so_far["next_month"] = 15_500.0
    return {
        "from": start,
        "to": time.time(),
        "step_seconds": 86_400,
        "by": query["by"],
        "currency": "USD",
        "complete": [day not in (3, days - 1) for day in range(days)],
        "totals": steps(12),
        "rows": rows,
        "budgets": budgets,
        "previous": previous | {"compared": compared},
        "forecast": month | so_far,
    }


def events(query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the events of a lost GPU, a recovered GPU, and a job that started and ended."""
    now = time.time()
    lost = {"node": "gpu-a-01", "uuid": "GPU-gpu-a-01-0003-4c5e-9d3f-000000000000"}
    job = {"node": "gpu-a-02", "namespace": "research", "pod": "diffusion-sweep-6"}
    idle = {"node": "gpu-a-02", "uuid": "GPU-gpu-a-02-0002-4c5e-9d3f-000000000000"}
    told: list[dict[str, Any]] = [
        {
            "at": now - 200,
            "kind": "node_gone",
            "text": "gpu-b-02, 4 GPUs: no answer",
            "node": "gpu-b-02",
        },
        {
            "at": now - 900,
            "kind": "ended",
            "text": "research/diffusion-sweep-6 ended on GPU 0, 1 of gpu-a-02",
        }
        | {"seconds": 7200.0}
        | job,
        {
            "at": now - 1800,
            "kind": "idle",
            "text": "GPU 2 of gpu-a-02: notebooks/jupyter-ada holds it",
        }
        | idle,
        {
            "at": now - 3000,
            "kind": "recovered",
            "text": "GPU 6 of gpu-a-01: slowed down",
            "seconds": 90.0,
        }
        | lost,
        {"at": now - 4000, "kind": "lost", "text": "GPU 3 of gpu-a-01: it fell off the bus"} | lost,
        {
            "at": now - 8100,
            "kind": "started",
            "text": "research/diffusion-sweep-6 started on GPU 0, 1 of gpu-a-02",
        }
        | job,
    ]
    if "gpu" in query:
        told = [event for event in told if event.get("uuid") == query["gpu"]]
    return {"from": now - 86400, "to": now, "events": told}


def summary(namespace: str, pod: str) -> dict[str, Any]:
    now = time.time()
    return {
        **{
            "namespace": namespace,
            "pod": pod,
            "from": now - 7200,
            "duration_seconds": 7200,
            "gpus": 1,
        },
        **({"to": now - 3600} if "nightly" in pod else {}),
        **{
            "gpu_hours": 2.0,
            "mean_use": 0.07,
            "mean_device_use": 0.07,
            "peak_use": 0.31,
            "peak_memory_bytes": 5 * GIB,
            "idle_hours": 1.5,
            "verdict": "hardly_used",
        },
        **{
            "energy_kwh": 0.4,
            "cost": 5.0,
            "wasted": 3.75,
            "currency": "USD",
            "wait_seconds": 90,
            "errors": 1,
        },
        "hint": "A MIG instance 1g (10 GiB) or 10 % of a GPU would be enough, if its use stays as "
        "before: below 9 % for"
        " 95 % of the time, at most 5.0 GiB of memory.",
    }


FIELDS = [
    ("DCGM_FI_DEV_SM_CLOCK", "Clock of the streaming multiprocessors", "MHz", 1980),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "Why clocks are held down", "", "software power cap"),
    (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Energy since the driver was loaded",
        "mJ",
        918273645546,
    ),
    ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "NVLink traffic", "MiB/s", 180433.5),
    ("DCGM_FI_DRIVER_VERSION", "Driver", "", "575.57.08"),
]


def known(picture: View, uuid: str) -> dict[str, Any] | None:
    device = _find(picture, uuid)
    if device is None:
        return None
    nodes = json.loads(page_of(picture).view_json[0].plain)["nodes"]
    told = next(of for node in nodes for of in node["gpus"] if of["uuid"] == uuid)
    xids = [
        {
            "xid": 79,
            "says": "GPU has fallen off the bus",
            "class": "hardware",
            "at": time.time() - 4000,
        }
    ]
    broken = any(c.condition in ("xid", "lost") for c in device.slot.conditions)
    return {
        **{
            "taken_at": picture.taken_at,
            "node": device.node,
            "gpu": told,
            "xids": xids if broken else [],
        },
        "fields": [
            {"name": n, "help": h, "unit": u, "value": v, "source": "nvml"} for n, h, u, v in FIELDS
        ],
        "method": "process samples of the driver",
        "sources": [
            {"source": "nvml", "ok": True},
            {
                "source": "kubelet",
                "ok": False,
                "error": "timeout",
                "message": "no answer within 5 s",
            },
        ],
    }


def priced(picture: View, currency: str = "USD") -> View:
    def price(slot: DeviceView) -> DeviceView:
        part = (slot.slices or 0) / 7 if isinstance(slot, InstanceView) else 1.0
        count = max(1, len(slot.holders))
        holders = [
            replace(
                h,
                cost_per_hour=PRICE
                * part
                * (1 / count if h.share_ratio is None else h.share_ratio),
            )
            for h in slot.holders
        ]
        return replace(slot, holders=holders, price_per_hour=PRICE * part)

    return replace(_changed(picture, price), currency=currency)


def owned(picture: View) -> View:
    """Gives pods of `research` a Job as owner and pods of `serving` a Deployment."""
    kinds = {"research": "Job", "serving": "Deployment", "notebooks": "Notebook"}

    def own(holder: HolderView) -> HolderView:
        kind = kinds.get(holder.namespace)
        name = holder.pod.rpartition("-")[0] or holder.pod
        return replace(holder, owner=WorkloadOwner(kind, name)) if kind else holder

    return _changed(picture, lambda slot: replace(slot, holders=list(map(own, slot.holders))))


def _changed(picture: View, change: Callable[[DeviceView], Any]) -> View:
    nodes = [
        replace(
            one,
            gpus=[
                replace(change(whole), instances=list(map(change, whole.instances)))
                for whole in one.gpus
            ],
        )
        for one in picture.nodes
    ]
    return replace(picture, nodes=nodes)


def _condition(name: str, since: float, says: str, do: str, detail: str = "") -> ConditionView:
    checks = find_checks(name, detail)
    return ConditionView(condition=name, since=since, says=says, do=do, checks=checks)


LOST_DO = (
    "check dmesg on the node; reset the GPU or reboot the node; if it was removed, run `podgpu "
    "forget`"
)


def troubled(turn: int = 0) -> View:
    """Three nodes and a gone one. Two GPUs are lost (one held). Others have an XID, heat and a
    pending remap.
    """
    now = time.time()
    calm = owned(priced(three_nodes(turn)))
    first, second, third = calm.nodes
    lost = _condition(
        "lost", now - 4000, "GPU 3 has fallen off the bus", "Drain the node and power-cycle it."
    )
    xid = _condition(
        "xid", now - 900, "XID 48: double-bit ECC error", "Drain the node and reset the GPU.", "48"
    )
    hot = _condition(
        "thermal", now - 1500, "slowed down by heat for 25 min", "Look after the fans and the air."
    )
    remap = _condition(
        "row_remap_pending",
        now - 86400,
        "a row remap waits for a reset",
        "Reset it when it is free.",
    )
    gone = _condition(
        "node_gone",
        now - 200,
        "the node's exporter has not answered for 3 min",
        "See whether the node runs.",
    )
    ill = {5: [xid], 6: [hot]}
    gpus = [replace(one, conditions=ill.get(one.index or 0, [])) for one in first.gpus]
    gpus[5].repair = make_repair(
        "reset", first.name, "5", has_pods=True, pods=[("research", "llm"), ("serving", "asr")]
    )
    gpus[5].kubernetes_health = "Healthy"
    absent: dict[str, Any] = {"memory": None, "total": None, "absent": True}
    gpus[3] = gpu(3, first.name, holders=gpus[3].holders, conditions=[lost], **absent)
    others = [
        replace(one, conditions=[remap]) if one.index == 6 else one for one in second.gpus[:7]
    ]
    last = Workload("notebooks", "jupyter-linus", "notebook")
    loose = gpu(
        7,
        second.name,
        last_holders=(last,),
        conditions=[replace(lost, says="GPU 7 is lost", do=LOST_DO)],
        repair=make_repair("reboot", second.name, "7", has_pods=True),
        **absent,
    )
    fourth = [
        gpu(i, "gpu-b-02", "NVIDIA L40S", conditions=[gone], holders=[held("serving", "asr-0")][i:])
        for i in range(4)
    ]
    nodes: list[NodeView] = [
        replace(first, gpus=gpus),
        replace(second, gpus=[*others, loose]),
        third,
        node("gpu-b-02", fourth, old=True, age_seconds=200.0),
    ]
    return replace(calm, nodes=nodes)


ALERTS = [
    {
        "severity": "broken",
        "node": "gpu-b-02",
        "text": "gpu-b-02 is gone, last seen 3 min ago: 4 GPUs went with it",
    },
    {
        "severity": "broken",
        "uuid": "GPU-gpu-a-01-0003-4c5e-9d3f-000000000000",
        "text": "gpu-a-01: GPU 3 is lost",
    },
    {
        "severity": "broken",
        "uuid": "GPU-gpu-a-01-0005-4c5e-9d3f-000000000000",
        "text": "gpu-a-01: GPU 5: XID 48",
    },
    {
        "severity": "warning",
        "uuid": "GPU-gpu-a-01-0006-4c5e-9d3f-000000000000",
        "text": "gpu-a-01: GPU 6 is throttled",
    },
    {
        "severity": "broken",
        "uuid": "GPU-gpu-a-02-0007-4c5e-9d3f-000000000000",
        "text": "gpu-a-02: GPU 7 is lost",
    },
]


def with_alerts(view: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON of `troubled` with alerts. Its last node is gone."""
    nodes = [
        {**node, "gone": True} if node["name"] == "gpu-b-02" else node for node in view["nodes"]
    ]
    return {
        **view,
        "nodes": nodes,
        "alerts": ALERTS,
        "prices": "example",
        "notes": [*view["notes"], *TEXTS],
    }


TEXTS = [alert["text"] for alert in ALERTS]


def troubled_showing() -> Showing:
    picture = troubled()
    return Showing(picture, records_of(picture), with_alerts)
