"""A server that answers as podgpu's own do, by path, and keeps what it was asked."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.top.test_exporter import RawServer, answer, serving

JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nConnection: close\r\n"
API = "podgpu/v1"
LOST = {
    "condition": "lost",
    "since": 1_799_999_900.0,
    "says": "GPU 1 has fallen off the bus",
    "do": "Drain the node and reset the GPU.",
}


def gpu(index: int, pod: str = "", **more: Any) -> dict[str, Any]:
    held = {"namespace": "research", "pod": pod, "container": "main", "share_ratio": 1.0, "utilization_ratio": 0.5}
    return {
        "uuid": f"GPU-{index}",
        "index": index,
        "model": "NVIDIA H100 80GB HBM3",
        "utilization_ratio": 0.5,
        "power_watts": 300.0,
        **({"holders": [held]} if pod else {}),
        **more,
    }


def view(*gpus: dict[str, Any], **more: Any) -> dict[str, Any]:
    nodes = [{"name": "gpu-node-1", "gpus": list(gpus)}]
    numbers = ("gpus", "allocated", "used", "idle", "unknown", "free", "broken")
    members = {"interval_seconds": 15.0, "alerts": [], "namespaces": [], "totals": dict.fromkeys(numbers, 0)}
    return {"api": API, "scope": "node", "taken_at": 1_800_000_000.0, "notes": [], "nodes": nodes, **members, **more}


def history(**points: list[int]) -> dict[str, Any]:
    devices = {name.replace("_", "-"): b64encode(bytes(values)).decode() for name, values in points.items()}
    return {"api": API, "from": 1_799_999_000.0, "step_seconds": 15, "points": 60, "devices": devices}


@contextmanager
def podgpu_server(answers: Mapping[str, Any]) -> Iterator[RawServer]:
    """`answers`: by the path's beginning; text and bytes as they are, everything else as JSON."""

    def reply(request: bytes) -> bytes:
        path = request.split(b" ", 2)[1].decode()
        for begins, content in answers.items():
            if path.startswith(begins):
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                return answer(body) if isinstance(content, bytes) else answer(body, JSON_HEAD)
        return answer(b'{"error":"no such path"}', NOT_FOUND)

    with serving(reply) as server:
        yield server
