"""A simulated server with the part of Prometheus' HTTP API that podgpu uses. Tests can inject
faults.

A query returns every stored series whose name occurs in it. The rest of the query is ignored. Tests
with real servers check the PromQL.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.net import QuietHandler, serving


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: str
    form: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    claimed_length: int | None = None
    """If larger than the body, the connection ends before the response is complete."""


Misbehaviour = Callable[[Asked], Reply | None]
"""Returns a faulty response, or None for a correct one."""


class PrometheusDouble:
    def __init__(self) -> None:
        self.now = 1_800_000_007.0
        """The server's clock, which is far from the local one."""
        self.series: list[tuple[Mapping[str, str], str]] = []
        """Labels with __name__, and the value as text."""
        self.extra: dict[str, Any] = {}
        """Additional fields of every response."""
        self.misbehave: Misbehaviour = lambda asked: None
        self.asked: list[Asked] = []
        self.released = threading.Event()
        """Set at the end, so that hanging requests end."""
        self.url = ""

    def put(self, name: str, value: float | str, **labels: str) -> None:
        self.series.append(({"__name__": name, **labels}, str(value)))

    def hang(self, asked: Asked) -> Reply | None:
        self.released.wait(60)
        return None

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        reply = self.misbehave(asked)
        if reply is not None:
            return reply
        if asked.query == "vector(time())":
            return vector([({}, f"{self.now:.3f}")], self.now, **self.extra)
        at = float(asked.form.get("time", self.now))
        words = (
            {"up"}
            if asked.query.startswith("up")
            else set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", asked.query))
        )
        found = [(labels, value) for labels, value in self.series if labels["__name__"] in words]
        if "timestamp(" in asked.query:
            found = [
                (
                    {name: value for name, value in labels.items() if name in ("job", "instance")},
                    f"{at - 3:.3f}",
                )
                for labels, _ in found
            ]
        return vector(found, at, **self.extra)


def vector(samples: list[tuple[Mapping[str, str], str]], at: float, **extra: Any) -> Reply:
    result = [{"metric": dict(labels), "value": [at, value]} for labels, value in samples]
    data = {"resultType": "vector", "result": result}
    return Reply(json.dumps({"status": "success", "data": data, **extra}).encode())


def error(status: int, text: str, kind: str = "execution") -> Reply:
    return Reply(json.dumps({"status": "error", "errorType": kind, "error": text}).encode(), status)


@contextmanager
def running_double() -> Iterator[PrometheusDouble]:
    double = PrometheusDouble()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = (
            True  # otherwise the body waits 40 ms for the TCP acknowledgement of the header
        )

        def do_GET(self) -> None:
            self._answer(urlsplit(self.path).query)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            self._answer(self.rfile.read(length).decode())

        def _answer(self, form_text: str) -> None:
            form = {
                name: values[0]
                for name, values in parse_qs(form_text, keep_blank_values=True).items()
            }
            path = urlsplit(self.path).path
            asked = Asked(
                self.command, path, form.get("query", ""), form, dict(self.headers.items())
            )
            reply = double.answer(asked)
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            claimed = len(reply.body) if reply.claimed_length is None else reply.claimed_length
            self.send_header("Content-Length", str(claimed))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)
            if reply.claimed_length is not None:
                self.close_connection = True

    with serving(Handler) as port:
        double.url = f"http://127.0.0.1:{port}"
        try:
            yield double
        finally:
            double.released.set()


def some_gpus(double: PrometheusDouble, nodes: int = 2) -> None:
    """Stores plain dcgm-exporter data: two GPUs on each node, of which the first is held."""
    for number in range(nodes):
        target = {"job": "dcgm", "instance": f"10.0.0.{number}:9400"}
        for gpu in range(2):
            labels = target | {
                "gpu": str(gpu),
                "UUID": f"GPU-{number}{gpu}",
                "modelName": "H200",
                "Hostname": f"node-{number}",
            }
            if gpu == 0:
                labels |= {"namespace": "research", "pod": f"train-{number}", "container": "main"}
            double.put("DCGM_FI_DEV_GPU_UTIL", 40 + gpu, **labels)
            double.put("DCGM_FI_DEV_MEM_COPY_UTIL", 7 * gpu, **labels)
            double.put("DCGM_FI_DEV_FB_USED", 1024, **labels)
        double.put("up", 1, **target)
