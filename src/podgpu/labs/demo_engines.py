"""The LLM engines of `podgpu demo`: one alone on a GPU, and two that share a GPU.

They serve vLLM's metrics, whose counters follow the simulated load of their container.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aiohttp import web

from podgpu.charge import Tokens
from podgpu.kube.objects import PodEndpoint
from podgpu.labs.simulate.simulated_node import DemoNode, Tenant
from podgpu.model import PodName

_PROMPT_PART = 0.4  # of the busy time, on average; the rest generates tokens
_SWING = 0.2
_SWING_SECONDS = 47 * 60.0
# Seconds, as in vLLM.
_BOUNDS = (0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, float("inf"))


class _Model(NamedTuple):
    """What an engine serves. Tokens are those of a second of GPU use."""

    name: str
    prompt: float
    generated: float
    first_token: float  # seconds, on an idle GPU
    prompt_size: float = 800.0  # tokens of a request


_MODELS = {
    ("chat", "engine"): _Model("Llama-3.1-8B-Instruct", 6400.0, 1900.0, 0.05),
    ("embed", "worker"): _Model("Qwen3-0.6B", 30_000.0, 2500.0, 0.02),
    ("ocr", "worker"): _Model("Qwen3-VL-4B-Instruct", 9000.0, 700.0, 0.09),
}
"""Prefix of the pod's name and container -> model."""


def find_model(tenant: Tenant) -> str:
    """Returns the name of the model that the container serves. Empty if it is no engine."""
    model = _MODELS.get(_key_of(tenant))
    return "" if model is None else model.name


def count_tokens(tenant: Tenant, busy_seconds: float, at: float) -> Tokens | None:
    """Returns the tokens of this busy time. `at`: Unix time.

    Prompts are long at some times and answers at others, so each kind has a cost of its own.
    """
    model = _MODELS.get(_key_of(tenant))
    if model is None:
        return None

    swing = math.sin(math.tau * at / _SWING_SECONDS)
    part = _PROMPT_PART + _SWING * swing
    prompt_seconds = busy_seconds * part / _PROMPT_PART
    other_seconds = busy_seconds * (1 - part) / (1 - _PROMPT_PART)

    prompt = model.prompt * prompt_seconds
    generated = model.generated * other_seconds
    return Tokens(prompt, generated)


def _key_of(tenant: Tenant) -> tuple[str, str]:
    prefix, _, _ = tenant.pod.rpartition("-")
    return prefix, tenant.container


@dataclass
class _Engine:
    model: _Model
    read_at: float
    tokens: Tokens = field(default_factory=Tokens)
    # Upper bound -> requests.
    buckets: dict[float, float] = field(default_factory=lambda: dict.fromkeys(_BOUNDS, 0.0))

    def work(self, tenant: Tenant, load: float, now: float) -> None:
        """Counts what the engine did since the last reading."""
        busy = load * (now - self.read_at)
        self.read_at = now
        more = count_tokens(tenant, busy, time.time()) or Tokens()
        self.tokens = self.tokens.plus(more)

        model = self.model
        # As in any queue, requests wait longer the closer the engine is to its limit.
        first_token = model.first_token / max(0.1, 1.0 - load)
        requests = model.prompt * busy / model.prompt_size
        # Each bucket of a Prometheus histogram contains those below it.
        for bound in _BOUNDS:
            if first_token <= bound:
                self.buckets[bound] += requests


class DemoEngines:
    """Serves the metrics of all engines at paths of one port."""

    def __init__(self, nodes: Sequence[DemoNode]) -> None:
        self.port = 0  # set when the port is known
        self.application = web.Application()
        self.application.router.add_get("/{namespace}/{pod}", self._answer)
        self._nodes = nodes
        self._engines: dict[Tenant, _Engine] = {}

    def endpoints(self) -> dict[PodName, PodEndpoint]:
        """Returns what the API server would say about the pods."""
        endpoints = {}
        for _, tenant in self._list_tenants():
            path = f"/{tenant.namespace}/{tenant.pod}"
            endpoints[tenant.pod_name] = PodEndpoint("127.0.0.1", (), self.port, path)
        return endpoints

    def _list_tenants(self) -> Iterator[tuple[DemoNode, Tenant]]:
        """Yields the containers that are engines, with their nodes."""
        for node in self._nodes:
            for tenant in node.tenants:
                if find_model(tenant):
                    yield node, tenant

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.match_info["namespace"], request.match_info["pod"]
        for node, tenant in self._list_tenants():
            if tenant.pod_name == name:
                return web.Response(text=self._write(node, tenant))
        return web.Response(status=404)

    def _write(self, node: DemoNode, tenant: Tenant) -> str:
        now = time.monotonic()
        if tenant not in self._engines:
            self._engines[tenant] = _Engine(_MODELS[_key_of(tenant)], now)
        engine = self._engines[tenant]

        epoch = node.driver.gpus[tenant.gpu].epoch
        load = node.load_of(tenant).demand(node.clock.monotonic() - epoch)
        engine.work(tenant, load, now)
        return _write_metrics(engine, load)


def _write_metrics(engine: _Engine, load: float) -> str:
    labels = f'engine="0",model_name="{engine.model.name}"'
    # Requests begin to wait when the engine is half busy.
    waiting = max(0, round(30 * (load - 0.5)))
    cache = min(1.0, 0.1 + 0.8 * load)
    values = {
        "prompt_tokens_total": f"{round(engine.tokens.prompt)}",
        "generation_tokens_total": f"{round(engine.tokens.generated)}",
        "num_requests_running": f"{round(24 * load)}",
        "num_requests_waiting": f"{waiting}",
        "kv_cache_usage_perc": f"{cache:.4f}",
    }

    lines = [f"vllm:{name}{{{labels}}} {value}" for name, value in values.items()]

    for bound in _BOUNDS:
        le = "+Inf" if bound == float("inf") else f"{bound}"
        count = round(engine.buckets[bound], 3)
        name = "vllm:time_to_first_token_seconds_bucket"
        lines.append(f'{name}{{{labels},le="{le}"}} {count}')
    return "\n".join(lines) + "\n"
