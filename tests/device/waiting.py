"""Compares podgpu's waiting times on a shared GPU with those that the loads recorded. Takes less
than 250 seconds:

    python tests/device/waiting.py [OUTPUT_DIRECTORY [WORD…]]

With WORDs such as `deep`, `never` or `short`, runs only scenarios whose names contain one of them.
Prints results after each scenario, and writes the context-switch log to OUTPUT_DIRECTORY, for unit
tests.

Needs root, one Hopper GPU, cgroup v2 and PyTorch. Exits 1 if a check fails. The mean error may be 3
points, the largest 6. In nine of ten rows the recorded time must be within the bounds. Waiting and
busy time may add up to 101 %.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from shared_gpu import BUSY, Burst, SharedGpu, cpu_seconds, exposition, method_of, value, wait_for

SECONDS = 20.0
METHODS = ("switches", "exact")
WAIT = "podgpu_container_gpu_wait_seconds_total"
LEAST, MOST = (
    "podgpu_container_gpu_wait_seconds_min_total",
    "podgpu_container_gpu_wait_seconds_max_total",
)
PRESSURE = "podgpu_device_gpu_pressure_ratio"
FAMILIES = (WAIT, LEAST, MOST, BUSY)
SCENARIOS: dict[str, list[Burst]] = {
    "25/70, 45/160, 9/45 ms, random, cool, deep": [(25, 70), (45, 160), (9, 45)],
    "never rests, 16/75, 35/260, random, cool": [(1000, 1000), (16, 75), (35, 260)],
    "22/50, 18/65, 40/400, random, cool": [(22, 50), (18, 65), (40, 400)],
    "1/8, 1.5/13, 0.5/6, random, cool, short": [(1, 8), (1.5, 13), (0.5, 6)],
    "0.3/4, 0.3/5, 2/40, random, cool, short": [(0.3, 4), (0.3, 5), (2, 40)],
}


def read_new(method: str) -> tuple[str, float]:
    """Waits until the exporter has updated its counters. Returns the metrics and the time."""
    before = value(exposition(method), WAIT)
    wait_for(lambda: value(exposition(method), WAIT) != before, 20, f"new waiting times ({method})")
    return exposition(method), time.monotonic()


def compare(bench: SharedGpu, name: str, bursts: list[Burst], record: Path) -> list[dict[str, Any]]:
    """Returns a row for each load and method, with times in % of the elapsed time."""
    options = [word for word in ("random", "cool", "deep") if word in name]
    with bench.loads(bursts, *options) as tenants, bench.exporters(tenants, METHODS) as pids:
        for method in METHODS:
            wait_for(lambda m=method: WAIT in exposition(m), 20, f"waiting times ({method})")
        before = {method: read_new(method) for method in METHODS}
        cpu = {method: cpu_seconds(pid) for method, pid in pids.items()}
        began = time.monotonic()
        switches, rate = bench.record_switches(SECONDS)
        ended = time.monotonic()
        cpu = {
            method: 100 * (cpu_seconds(pid) - cpu[method]) / (ended - began)
            for method, pid in pids.items()
        }
        after = {method: read_new(method) for method in METHODS}
        time.sleep(1.2)  # the loads write twice a second
    truth = [100 * one.waited(began, ended) / (ended - began) for one in tenants]
    processes = [one.process.pid for one in tenants if one.process]
    facts = {"scenario": name, "pids": processes, "waited_percent": truth}
    record.with_suffix(".json").write_text(json.dumps(facts))
    record.with_suffix(".bin.gz").write_bytes(gzip.compress(switches))
    print(f"\n{name}: {rate:.0f} records per second")
    rows = []
    for method in METHODS:
        (first, since), (last, until) = before[method], after[method]
        scale = 100 / (until - since)
        pressure = 100 * value(last, PRESSURE)
        print(
            f"  {method}: CPU {cpu[method]:.2f} %, method {method_of(last)}, last pressure "
            f"{pressure:.0f} %"
        )
        for one, burst in zip(tenants, bursts, strict=True):
            waited = scale * one.waited(since, until)
            estimate, least, most, busy = (
                scale * (value(last, family, one.pod) - value(first, family, one.pod))
                for family in FAMILIES
            )
            print(
                f"    {burst[0]:g}/{burst[1]:g} ms: waited {waited:5.1f} -> {estimate:5.1f} "
                f"({least:.1f}, {most:.1f}),"
                f" busy {busy:.1f}"
            )
            rows.append(
                {
                    **facts,
                    "method": method,
                    "cpu": cpu[method],
                    "load": burst,
                    "switches_per_second": rate,
                }
                | {
                    "truth": waited,
                    "estimate": estimate,
                    "least": least,
                    "most": most,
                    "busy": busy,
                }
            )
    return rows


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "bench-out")
    out.mkdir(parents=True, exist_ok=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    words = sys.argv[2:] or [""]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = SharedGpu(Path(folder))
        for number, (name, bursts) in enumerate(SCENARIOS.items(), 1):
            if any(word in name for word in words):
                rows += compare(bench, name, bursts, out / f"switches-{number}")
                (out / "waiting.json").write_text(json.dumps(rows, indent=1))
    errors = [abs(row["estimate"] - row["truth"]) for row in rows]
    bench.check(f"mean error {mean(errors):.2f} points (at most 3)", mean(errors) <= 3)
    bench.check(f"largest error {max(errors):.2f} points (at most 6)", max(errors) <= 6)
    inside = sum(row["least"] <= row["truth"] <= row["most"] for row in rows)
    bench.check(
        f"the bounds contain the truth in {inside} of {len(rows)} rows", inside >= 0.9 * len(rows)
    )
    largest = max(row["estimate"] + row["busy"] for row in rows)
    bench.check(
        f"waiting and busy time are at most {largest:.1f} %", largest <= 101
    )  # 1 % tolerance
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
