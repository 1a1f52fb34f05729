"""What an exporter tells of its GPUs' health over real HTTP, read from all places that tell it."""

from __future__ import annotations

import json
from typing import Any

from podgpu.metrics.conditions import conditions
from tests.agent.gpu_bench import GpuBench

FORGET = {"X_Podgpu_Request": "forget"}


def view(bench: GpuBench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench.client.ask("/api/v1/view").body)
    return found


def gpu(bench: GpuBench, number: int) -> dict[str, Any]:
    (found,) = (g for g in view(bench)["nodes"][0]["gpus"] if g["uuid"] == bench.uuid(number))
    return dict(found)


def broken(bench: GpuBench, number: int) -> list[str]:
    """By the JSON; the metric and /health must say the same."""
    of = gpu(bench, number)
    found = [c["condition"] for c in of.get("conditions", ())]
    for name in conditions():
        value = bench.value("podgpu_device_health", number, f'condition="{name}"')
        assert (value == 1) == (name in found), f"{name}: the metric says {value}, the JSON {found}"
    health = bench.client.ask("/health").text.splitlines()
    told = [a["text"] for a in view(bench)["alerts"] if a.get("uuid") == bench.uuid(number)]
    assert [text for text in told if text not in health] == []
    assert (health == ["OK"]) == (not view(bench)["alerts"])
    return found


def known(bench: GpuBench, number: int, condition: str) -> bool:
    return bench.value("podgpu_device_health", number, f'condition="{condition}"') is not None
