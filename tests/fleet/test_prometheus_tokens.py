"""Cost per token from counters in a real Prometheus and VictoriaMetrics, compared with SQLite."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from podgpu.charge import Tokens
from podgpu.fleet.parts import EngineState
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.read.prometheus import PrometheusServer
from podgpu.model import DeviceTotals
from podgpu.past.bills.bill import RangeAnswer, RangeQuery, RangeRow
from tests.fleet.real_servers import Point
from tests.fleet.states import H100, gpu, holder, prometheus_past, state_of
from tests.fleet.test_prometheus_live import Serving
from tests.fleet.test_prometheus_ranges import both_servers, rows_of
from tests.fleet.test_ranges import Cluster

HOUR, STEP = 3600, 15
PRICES = Prices("EUR", {H100: Price(10.0)})
END = time.time() // STEP * STEP - 2 * STEP
START = END - HOUR
LONGER = HOUR  # the test may run long after END
# pod -> share, busy, waiting, prompt and generated tokens per second, and family and model
PODS: dict[str, tuple[float, float, float, float, float, str]] = {
    "chat": (0.5, 0.3, 0.1, 100.0, 50.0, "vllm"),
    "code": (0.5, 0.45, 0.0, 10.0, 90.0, "sglang"),
}


def points() -> Iterator[Point]:
    """A shared GPU with two engines. `chat` is scraped by two Prometheus servers and two monitors,
    restarts after half an hour, and has two ranks.
    """
    for number in range((HOUR + LONGER) // STEP + 1):
        seconds = number * STEP
        at = START + seconds
        exporter = {"job": "podgpu", "instance": "10.0.0.1:9400", "UUID": "GPU-0"}
        exporter["modelName"] = H100
        yield Point("DCGM_FI_DEV_GPU_TEMP", exporter, 40, at)
        yield Point("podgpu_device_usage_method", {**exporter, "method": "exact"}, 1, at)
        for pod, (share, busy, waited, prompt, generated, engine) in PODS.items():
            held = {**exporter, "namespace": "ml", "pod": pod, "container": "main"}
            for name, rate in (
                ("allocated_seconds", share),
                ("busy_seconds", busy),
                ("wait_seconds", waited),
                ("energy_joules", 400 * busy),
            ):
                yield Point(f"podgpu_container_gpu_{name}_total", held, rate * seconds, at)
            wasted = {**held, "kind": "idle"}
            yield Point("podgpu_container_gpu_wasted_seconds_total", wasted, 0.0, at)
            yield Point("podgpu_allocation_share_ratio", held, share, at)
            target = {"namespace": "ml", "pod": pod, "instance": f"{pod}:8000"}
            if engine == "vllm":
                yield from vllm(target, seconds, prompt, generated, at)
            else:
                labels = {**target, "model_name": "coder", "is_streaming": "true"}
                yield Point("sglang:prompt_tokens_total", labels, prompt * seconds, at)
                yield Point("sglang:generation_tokens_total", labels, generated * seconds, at)
        other = {"namespace": "ml", "pod": "elsewhere", "instance": "x:80"}
        yield Point("vllm:generation_tokens_total", other, 9.0 * seconds, at)


def vllm(
    target: dict[str, str], seconds: int, prompt: float, generated: float, at: float
) -> Iterator[Point]:
    since = seconds - HOUR // 2 if seconds >= HOUR // 2 else seconds
    for job in ("pods", "services"):
        for replica in ("a", "b"):
            for rank in ("0", "1"):
                more = {"job": job, "replica": replica, "engine": rank, "model_name": "llama"}
                labels = {**target, **more}
                # Each of the two ranks has half of the tokens; another pod computed a third more.
                yield Point("vllm:prompt_tokens_total", labels, prompt / 2 * 1.5 * since, at)
                moved = {**labels, "source": "external_kv_transfer"}
                name = "vllm:prompt_tokens_by_source_total"
                yield Point(name, moved, prompt / 2 * 0.5 * since, at)
                local = {**labels, "source": "local_compute"}
                yield Point(name, local, prompt / 2 * since, at)
                yield Point("vllm:generation_tokens_total", labels, generated / 2 * since, at)


def record(offset: int = 0) -> Cluster:
    """Returns the same hour, recorded in SQLite. `offset`: seconds after the other replica."""
    cluster = Cluster(prices=PRICES, at=float(offset))
    for number in range(HOUR // STEP + 1):
        seconds = offset + number * STEP
        holders = []
        engines = {}
        for pod, (share, busy, waited, prompt, generated, engine) in PODS.items():
            model = "llama" if engine == "vllm" else "coder"
            counted = Tokens(float(round(prompt * seconds)), float(round(generated * seconds)))
            engines["ml", pod, "main"] = EngineState(engine, (model,), counted)
            holders.append(counters_at(seconds, pod, share, busy, waited))
        shared = gpu(0, *holders, busy=0.75, usage=DeviceTotals(method="exact"))
        cluster.round(shared, engines=engines)
    return cluster


def counters_at(seconds: int, pod: str, share: float, busy: float, waited: float) -> Any:
    return holder(
        pod,
        share=share,
        utilization_ratio=busy,
        allocated_ns=round(share * seconds * 1e9),
        busy_ns=round(busy * seconds * 1e9),
        idle_ns=0,
        wait_ns=round(waited * seconds * 1e9),
        energy_mj=round(400_000 * busy * seconds),
    )


def ask(url: str, by: str = "pod", **more: Any) -> RangeAnswer:
    past = prometheus_past(PrometheusServer(url, **more), state_of(), PRICES)
    return asyncio.run(past.range(RangeQuery(by, start=START, end=END)))


def numbers_of(row: RangeRow) -> list[float | int | None]:
    tokens = row.tokens
    assert tokens is not None
    assert tokens.reason == ""
    assert tokens.cost is not None
    assert tokens.cost_per_million is not None
    return [
        row.cost,
        row.prompt_tokens,
        row.generated_tokens,
        tokens.per_second,
        tokens.per_used_gpu_second,
        tokens.joules_per_token,
        tokens.cost_per_million_at_use,
        *(getattr(tokens.cost, part) for part in tokens.cost.__struct_fields__),
        *(getattr(tokens.cost_per_million, part) for part in tokens.cost.__struct_fields__),
    ]


def check_same(
    some: dict[str, RangeRow], others: dict[str, RangeRow], names: Sequence[str]
) -> None:
    for name in names:
        assert numbers_of(some[name]) == pytest.approx(numbers_of(others[name]), rel=0.01, abs=1e-3)


@both_servers
def test_the_figures_are_those_of_sqlite(serving: Serving, tmp_path: Path) -> None:
    with serving(tmp_path, points()) as url:
        answer, again = ask(url), ask(url)
        by_model = rows_of(ask(url, "model"))
        without = rows_of(ask(url, reads_tokens=False))
    assert msgspec.json.encode(answer) == msgspec.json.encode(again), "two replicas agree"
    rows = rows_of(answer)
    assert rows["ml/chat"].prompt_tokens == pytest.approx(360_000, rel=0.01)
    assert rows["ml/chat"].model == "llama"
    assert "ml/elsewhere" not in rows, "a pod without a GPU has no bill"

    recorded = record()
    check_same(rows, recorded.rows(seconds=HOUR), ["ml/chat", "ml/code"])
    check_same(by_model, recorded.rows("model", seconds=HOUR), ["ml/llama", "ml/coder"])
    assert without["ml/chat"].tokens is None


def test_two_replicas_that_record_at_different_times_agree() -> None:
    one = record().rows(seconds=HOUR - 60)
    other = record(offset=7).rows(seconds=HOUR - 60)
    check_same(one, other, ["ml/chat", "ml/code"])


def changing_points() -> Iterator[Point]:
    """A pod of which a prompt token needs 1 ms of the GPU, and a generated one 4 ms."""
    random = Random(3)
    prompt = generated = 0.0
    for number in range((2 * HOUR + LONGER) // STEP + 1):
        at = END - 2 * HOUR + number * STEP
        if number % 20 == 0:
            parts = random.uniform(0.1, 0.4), random.uniform(0.1, 0.4)
        prompt += round(parts[0] * STEP * 1000)
        generated += round(parts[1] * STEP * 250)
        seconds = number * STEP
        gpu = {"job": "podgpu", "instance": "a", "UUID": "GPU-0", "modelName": H100}
        held = {**gpu, "namespace": "ml", "pod": "chat", "container": "main"}
        yield Point("DCGM_FI_DEV_GPU_TEMP", gpu, 40, at)
        yield Point("podgpu_device_usage_method", {**gpu, "method": "exact"}, 1, at)
        yield Point("podgpu_container_gpu_allocated_seconds_total", held, seconds, at)
        busy = prompt / 1000 + generated / 250
        yield Point("podgpu_container_gpu_busy_seconds_total", held, busy, at)
        target = {"namespace": "ml", "pod": "chat", "instance": "x", "model_name": "llama"}
        yield Point("vllm:prompt_tokens_total", target, prompt, at)
        yield Point("vllm:generation_tokens_total", target, generated, at)


@both_servers
def test_prompt_and_generated_tokens_have_a_cost_of_their_own(
    serving: Serving, tmp_path: Path
) -> None:
    with serving(tmp_path, changing_points()) as url:
        past = prometheus_past(PrometheusServer(url), state_of(), PRICES)
        for by in ("pod", "model", "owner"):
            query = RangeQuery(by, start=END - 2 * HOUR, end=END)
            [row] = [row for row in asyncio.run(past.range(query)).rows if row.tokens]
            assert row.tokens is not None
            split = row.tokens.per_million
            assert split is not None
            assert split.prompt_gpu_seconds == pytest.approx(1000, rel=0.01)
            assert split.generated_gpu_seconds == pytest.approx(4000, rel=0.01)
            assert split.prompt_cost == pytest.approx(1000 * 10 / 3600, rel=0.02)
            assert split.residual_ratio < 0.02
            assert split.steps >= 20
