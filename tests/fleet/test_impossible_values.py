"""An exporter that sends impossible or repeated values harms only its own node."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from podgpu.fleet.read.prometheus import PrometheusCollector, PrometheusServer
from podgpu.fleet.read.scrape import ScrapeCollector
from podgpu.fleet.readings import Collector
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.view import View
from podgpu.model import decode_node
from tests.fleet.exporters import Exporter, node_document, running_exporters
from tests.fleet.prometheus_double import running_double

HUGE = 2**62


def document_of(*devices: dict[str, Any], **members: Any) -> bytes:
    node = {"producer": "podgpu", "node": "bad", "devices": devices, **members}
    return json.dumps(node).encode()


def run_round(collector: Collector, settings: ViewSettings | None = None) -> Cluster:
    async def run() -> Cluster:
        cluster = Cluster(lambda: collector, settings or ViewSettings())
        await cluster.round(collector)
        await collector.close()
        return cluster

    return asyncio.run(run())


def scrape(*exporters: Exporter, used_field: str = "DCGM_FI_DEV_GPU_UTIL") -> Cluster:
    settings = ViewSettings(used_field=used_field)

    async def run() -> Cluster:
        async with running_exporters(*exporters) as urls:
            collector = ScrapeCollector(lambda: urls, settings)
            cluster = Cluster(lambda: collector, settings)
            await cluster.round(collector)
            await collector.close()
            return cluster

    return asyncio.run(run())


def view_of(cluster: Cluster) -> View:
    """Returns the view. Also renders everything else, which must not fail."""
    for body in (cluster.published.metrics, cluster.published.nodes):
        assert b"e+30" not in body.plain
    view = cluster.published.view
    assert b"e+30" not in msgspec.json.encode(view)
    return view


@pytest.mark.fault(
    "An exporter lists one GPU, MIG instance or holder many times",
    "Its document is refused, with the reason; other nodes are not affected",
)
@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([{"uuid": "GPU-1", "holders": [{"pod": "a"}]}] * 1024, "GPU 'GPU-1' is listed 1024 times"),
        ([{"index": 3}, {"index": 3}], "GPU 3 is listed 2 times"),
        ([{}, {}], "GPU None is listed 2 times"),
        ([{"instances": [{"id": 1}, {"id": 2}, {"id": 2}]}], "MIG instance 2 is listed 2 times"),
        ([{"holders": [{"pod": "a"}] * 257}], "is listed 257 times"),
        ([{"instances": [{"id": 1, "holders": [{}] * 257}]}], "is listed 257 times"),
    ],
)
def test_a_document_that_lists_something_twice_is_refused(
    devices: list[dict[str, Any]], words: str
) -> None:
    bad = Exporter(document=document_of(*devices))
    cluster = scrape(bad, Exporter(document=node_document(0)))
    view = view_of(cluster)
    assert [node.name for node in view.nodes] == ["node-0"]
    (note,) = view.notes
    assert bad.url.removesuffix("/metrics") in note
    assert words in note
    assert cluster.published.state.errors == {(bad.url, "malformed"): 1}


def test_a_pod_may_hold_many_slices_of_a_gpu() -> None:
    slices = [{"pod": "a", "replica": str(number)} for number in range(256)]
    others = [{"pod": f"p{number}"} for number in range(1000)]
    (gpu,) = decode_node(document_of({"holders": slices + others})).devices
    assert len(gpu.holders) == 1256


def test_metrics_of_one_gpu_with_two_identities_are_refused() -> None:
    lines = [f'DCGM_FI_DEV_GPU_UTIL{{UUID="{n}",gpu_uuid="same",gpu="0"}} 1\n' for n in "ab"]
    (note,) = view_of(scrape(Exporter("".join(lines).encode()))).notes
    assert "GPU 'same' is listed 2 times" in note


GPU_VALUES: dict[str, list[Any]] = {
    "utilization_ratio": [1e308, -0.1, 2.1],
    "memory_used_bytes": [HUGE, -1],
    "memory_total_bytes": [2**46 + 1],
    "power_mw": [9e18, 10_000_001],
    "power_limit_mw": [9e18],
    "temperature_celsius": [1e308, 201, -101.0, 10**30],
    "index": [2**40],
    "last_xid": [-1],
}
USAGE_VALUES: dict[str, list[Any]] = {
    "utilization_ratio": [1e308],
    "memory_used_bytes": [HUGE],
    "wait_ratio": [5.0],
    "power_ratio": [1e300],
    "energy_mj": [9 * 10**18],
    "busy_ns": [2**63, -1],
    "idle_since": [1e308, 4_102_444_801, -1],
    "unallocated_since": [1e308],
    "processes": [HUGE],
}


@pytest.mark.fault(
    "An exporter sends an impossible number, such as 1e308 or 9,000,000,000 kW",
    "Only this number is ignored, with a note on the node",
)
@pytest.mark.parametrize(
    ("member", "number", "is_usage"),
    [(name, n, False) for name, numbers in GPU_VALUES.items() for n in numbers]
    + [(name, n, True) for name, numbers in USAGE_VALUES.items() for n in numbers],
)
def test_an_impossible_number_loses_only_itself(member: str, number: Any, is_usage: bool) -> None:
    known = {"utilization_ratio": 0.5, "memory_used_bytes": 2**30, "power_mw": 400_000}
    usage = {"utilization_ratio": 0.25, "busy_ns": 5}
    gpu = known | ({} if is_usage else {member: number})
    own = usage | ({member: number} if is_usage else {})
    bad = Exporter(
        document=document_of(
            {"uuid": "GPU-1", "holders": [{"pod": "a", "usage": own}], **gpu},
            {"uuid": "GPU-2", "power_mw": 10_000_000},
        )
    )
    cluster = scrape(bad, Exporter(document=node_document(0)))
    view = view_of(cluster)
    assert [node.name for node in view.nodes] == ["bad", "node-0"]
    assert view.nodes[0].notes == [f"impossible values are ignored: {member}"]
    assert view.nodes[1].notes == []
    assert cluster.published.state.errors == {(bad.url, "bad_value"): 1}
    state = cluster.published.state.nodes[0].state.devices[0]
    held = state.holders[0].usage
    assert held is not None
    for name, value in known.items():
        lost = name == member and not is_usage
        assert getattr(state, name) == (None if lost else value)
    for name, value in usage.items():
        assert getattr(held, name) == (None if name == member and is_usage else value)
    assert view.totals.power_watts == (10_000.0 if member == "power_mw" else 10_400.0)


@pytest.mark.parametrize(
    ("members", "gpu"),
    [
        ({"schema": 2**40}, {}),
        ({"dropped": {str(n): 1 for n in range(1025)}}, {}),
        ({"pod_labels": {str(n): {} for n in range(8193)}}, {}),
        ({"pod_labels": {"a" * 1025: {}}}, {}),
        ({"sources": [{"name": "x", "errors": {str(n): 1 for n in range(257)}}]}, {}),
        ({"sources": [{"name": "x", "unmapped": {str(n): 1 for n in range(257)}}]}, {}),
        ({"sources": [{"name": "x" * 257}]}, {}),
        ({}, {"unsupported": ["x"] * 1025}),
        ({}, {"healthy": ["x"] * 257}),
        ({}, {"throttled_ns": {str(n): 1 for n in range(65)}}),
        ({}, {"clock_events": {str(n): [1, 1] for n in range(257)}}),
        ({}, {"instances": [{"id": 1, "uuids": ["x"] * 65}]}),
        ({}, {"instances": [{"id": 2**40}]}),
        ({}, {"xids": [{"xid": 1, "total": 1, "last_seen": 1e308}]}),
        ({}, {"holders": [{"pod": "a", "usage": {"waits_for": [{}] * 4097}}]}),
    ],
)
def test_a_document_that_is_too_large_is_refused(
    members: dict[str, Any], gpu: dict[str, Any]
) -> None:
    decode_node(document_of({"uuid": "GPU-1"}))
    with pytest.raises(msgspec.ValidationError):
        decode_node(document_of({"uuid": "GPU-1", **gpu}, **members))


def test_impossible_fields_of_a_document_are_dropped() -> None:
    field = "DCGM_FI_DEV_GPU_UTIL"
    gpus = [
        {"uuid": f"GPU-{n}", "fields": {field: value}}
        for n, value in enumerate((50, 1e308, -1, 10**400, 102))
    ]
    cluster = scrape(Exporter(document=document_of(*gpus)))
    view_of(cluster)
    (node,) = cluster.published.state.nodes
    assert [gpu.fields for gpu in node.state.devices] == [{field: 50}, {}, {}, {}, {}]


def test_one_exporter_cannot_displace_the_alerts_of_others() -> None:
    broken = {"conditions": [{"name": "ecc"}] * 64}
    bad = document_of(*({"uuid": f"GPU-{n}", **broken} for n in range(10, 1000)))
    honest = document_of({"uuid": "GPU-0", **broken}, node="later")
    honest = honest.replace(b'{"name": "ecc"}, ' * 63, b"")
    view = view_of(scrape(Exporter(document=bad), Exporter(document=honest)))
    assert [alert.node for alert in view.alerts] == ["bad"] * 40 + ["later", ""]
    assert view.alerts[-1].text == f"and {990 * 64 - 40} more"


TEXT = {
    "DCGM_FI_DEV_GPU_UTIL": ("nan", "1e308", "-1", "102"),
    "DCGM_FI_DEV_POWER_USAGE": ("9e15", "inf", "2e9", "10001"),
    "DCGM_FI_DEV_GPU_TEMP": ("1e308", "2e9", "201"),
    "DCGM_FI_DEV_FB_USED": ("1e300", "2e9", "nan"),
    "podgpu_container_gpu_utilization_ratio": ("1e308", "nan", "3"),
    "podgpu_container_gpu_memory_used_bytes": ("9e18", "1e308"),
    "podgpu_device_condition_since_timestamp_seconds": ("1e308", "inf", "nan"),
}


@pytest.mark.parametrize(("name", "text"), [(n, text) for n in TEXT for text in TEXT[n]])
@pytest.mark.parametrize("through", ["metrics", "prometheus"])
def test_impossible_numbers_in_metrics_are_ignored(name: str, text: str, through: str) -> None:
    gpu = {"gpu": "0", "UUID": "GPU-1", "modelName": "H100", "Hostname": "bad"}
    holder = {"namespace": "ml", "pod": "a", "container": "main"}
    more = holder if "container" in name else {}
    more |= {"condition": "xid", "detail": "79"} if "condition" in name else {}
    samples = [
        ("DCGM_FI_DEV_MEM_COPY_UTIL", "30", gpu),
        ("podgpu_exporter_build_info", "1", {"version": "1", "Hostname": "bad"}),
        (name, text, gpu | more),
    ]
    if through == "metrics":
        lines = []
        for metric, value, labels in samples:
            pairs = ",".join(f'{key}="{label}"' for key, label in labels.items())
            lines.append(f"{metric}{{{pairs}}} {value}\n")
        cluster = scrape(Exporter("".join(lines).encode()), used_field="DCGM_FI_DEV_MEM_COPY_UTIL")
    else:
        with running_double() as double:
            for metric, value, labels in samples:
                double.put(metric, float(value), **labels, job="j", instance="bad:9400")
            cluster = run_round(PrometheusCollector(PrometheusServer(double.url), ViewSettings()))
    view = view_of(cluster)
    (device,) = view.nodes[0].gpus
    assert view.used_utilization_ratio == 0.3
    assert view.totals.power_watts is None
    assert (device.utilization_ratio, device.memory_used_bytes, device.temperature_celsius) == (
        None,
        None,
        None,
    )
    assert [condition.since for condition in device.conditions] in ([], [None])
    for held in device.holders:
        assert (held.utilization_ratio, held.memory_used_bytes) == (None, None)
