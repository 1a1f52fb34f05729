"""podgpu against nvidia-smi on a real GPU, at the same time, under a known load. Run by hand on a GPU machine:

    python tests/device/compare_nvidia_smi.py [OUTPUT_DIRECTORY]

Prints one row per figure (podgpu, nvidia-smi before and after, verdict) and what a tick costs beside the bare NVML
calls it needs. Exits 1 when a figure lies outside what nvidia-smi said around it. Needs PyTorch for the load.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pynvml

from podgpu.agent.loop import Agent, Settings
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.families import THROTTLE_REASONS
from podgpu.metrics.fields import Field, FieldValue, Gpm, NvmlCall, fields
from podgpu.metrics.render import Policy

LOAD = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    began = time.monotonic()
    while time.monotonic() - began < 0.05:
        a @ a
        torch.cuda.synchronize()
    time.sleep(0.05)
"""
# metric -> (nvidia-smi's column, slack in its unit for what moves between two looks)
FIGURES = {
    "DCGM_FI_DEV_SM_CLOCK": ("clocks.sm", 200),
    "DCGM_FI_DEV_MEM_CLOCK": ("clocks.mem", 1),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature.gpu", 2),
    "DCGM_FI_DEV_MEMORY_TEMP": ("temperature.memory", 2),
    "DCGM_FI_DEV_POWER_USAGE": ("power.draw", 60),
    "DCGM_FI_DEV_GPU_UTIL": ("utilization.gpu", 20),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("utilization.memory", 10),
    "DCGM_FI_DEV_FB_USED": ("memory.used", 2),
    "DCGM_FI_DEV_FB_FREE": ("memory.free", 2),
    "DCGM_FI_DEV_FB_RESERVED": ("memory.reserved", 2),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": (None, 0),
}
ROUNDS = 8
TICKS = 150


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "bench-out")
    out.mkdir(parents=True, exist_ok=True)
    load = subprocess.Popen([sys.executable, "-c", LOAD])
    exporter = subprocess.Popen(
        [sys.executable, "-m", "podgpu", "exporter", "-f", "dcp", "-c", "1000", "-a", "127.0.0.1:9400"]
    )
    try:
        time.sleep(15)  # the load compiles and warms up
        wrong = compare()
        (out / "exposition.prom").write_bytes(scrape())
        figures = running_costs(exporter.pid)
    finally:
        exporter.send_signal(signal.SIGTERM)
        print("exporter ended with", exporter.wait(20))
    try:
        figures |= tick_cost()  # with nobody else in the driver: two processes that read wait for each other
    finally:
        load.kill()
    (out / "figures.json").write_text(json.dumps(figures, indent=1))
    for name, value in figures.items():
        print(f"{name:<28} {value:.3f}")
    return 1 if wrong else 0


def scrape() -> bytes:
    with urllib.request.urlopen("http://127.0.0.1:9400/metrics", timeout=5) as answer:
        return bytes(answer.read())


def exposition_values() -> dict[str, float]:
    lines = (line for line in scrape().decode().splitlines() if not line.startswith("#"))
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("DCGM_")}


def smi() -> dict[str, float]:
    columns = sorted({column for column, _ in FIGURES.values() if column})
    text = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    return dict(zip(columns, map(float, text.split(",")), strict=True))


def compare() -> list[str]:
    """Each figure must lie between nvidia-smi's word before and after it, give or take what moves in a tick."""
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FIGURES}
    for _ in range(ROUNDS):
        before = smi()
        time.sleep(1.1)  # one whole tick between the two looks
        ours = exposition_values()
        after = smi()
        for name, (column, _slack) in FIGURES.items():
            if column and name in ours:
                rows[name].append((ours[name], before[column], after[column]))
    wrong = []
    for name, seen in rows.items():
        if not seen:
            continue
        slack = FIGURES[name][1]
        inside = sum(min(b, a) - slack <= ours <= max(b, a) + slack for ours, b, a in seen)
        means = [statistics.fmean(column) for column in zip(*seen, strict=True)]
        verdict = "ok" if inside >= len(seen) - 1 else "OUTSIDE"
        wrong += [name] if verdict != "ok" else []
        figures = f"podgpu {means[0]:>10.1f}   smi {means[1]:>10.1f} {means[2]:>10.1f}"
        print(f"{name:<34} {figures}   {inside}/{len(seen)} {verdict}")
    return wrong


def tick_cost() -> dict[str, float]:
    """CPU of a whole tick (read, join, encode, gzip) beside that of the bare NVML calls it makes."""
    counters = shipped_counters("dcp") or ()
    agent = Agent(NvmlTelemetry(), settings=Settings(interval=1.0, policy=Policy(counters, "h")))
    agent.read_telemetry()
    wanted = {counter.field.id: counter.field for counter in counters}
    bare = bare_calls(tuple((wanted | {number: fields()[number] for number in THROTTLE_REASONS}).values()))
    bare()
    ours, theirs = [], []
    for _ in range(TICKS):
        time.sleep(0.15)
        theirs.append(cpu(bare))
        time.sleep(0.15)
        ours.append(cpu(agent.read_telemetry))
    agent.stop()
    return {
        "tick_cpu_ms_median": 1000 * statistics.median(ours),
        "bare_calls_cpu_ms_median": 1000 * statistics.median(theirs),
        "median_difference_ms": 1000 * (statistics.median(ours) - statistics.median(theirs)),
        "least_difference_ms": 1000 * (min(ours) - min(theirs)),
        "mean_difference_ms": 1000 * (statistics.fmean(ours) - statistics.fmean(theirs)),
    }


def running_costs(exporter_pid: int) -> dict[str, float]:
    status = Path(f"/proc/{exporter_pid}/status").read_text()
    resident = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    latencies = []
    for _ in range(200):
        began = time.perf_counter()
        scrape()
        latencies.append(time.perf_counter() - began)
    return {
        "exporter_resident_mib": int(resident) / 1024,
        "scrape_ms_median": 1000 * statistics.median(latencies),
        "scrape_ms_worst": 1000 * max(latencies),
        "lines": scrape().decode().count("\n"),
    }


def cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def bare_calls(fields: tuple[Field, ...]) -> Callable[[], None]:
    """The NVML calls a tick needs, straight from pynvml with nothing around them."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    calls: list[tuple[str, list[object]]] = [("nvmlDeviceGetUUID", [handle]), ("nvmlDeviceGetMigMode", [handle])]
    known = set()
    batch: set[tuple[int, int]] = set()
    metrics = []
    for field in fields:
        recipe = field.recipe
        if isinstance(recipe, NvmlCall) and not field.once:
            arguments = [getattr(pynvml, a) if isinstance(a, str) else a for a in recipe.arguments]
            given = [handle, *arguments] if recipe.takes_device else arguments
            try:
                getattr(pynvml, recipe.function)(*given)
            except pynvml.NVMLError:
                continue
            if (recipe.function, recipe.arguments) not in known:
                known.add((recipe.function, recipe.arguments))
                calls.append((recipe.function, given))
        elif isinstance(recipe, FieldValue):
            batch.update((i, recipe.scope) for i in recipe.ids)
        elif isinstance(recipe, Gpm):
            metrics.append(recipe.metric)
    answers = pynvml.nvmlDeviceGetFieldValues(handle, sorted(batch))
    supported = [key for key, answer in zip(sorted(batch), answers, strict=True) if answer.nvmlReturn == 0]
    samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
    pynvml.nvmlGpmSampleGet(handle, samples[0])

    def run() -> None:
        for function, arguments in calls:
            getattr(pynvml, function)(*arguments)
        pynvml.nvmlDeviceGetFieldValues(handle, supported)
        pynvml.nvmlGpmSampleGet(handle, samples[1])
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(metrics)
        request.sample1, request.sample2 = samples
        for i, metric in enumerate(metrics):
            request.metrics[i].metricId = metric
        pynvml.nvmlGpmMetricsGet(request)
        samples.reverse()

    return run


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
