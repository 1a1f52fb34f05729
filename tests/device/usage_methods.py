"""Compares the three methods of --usage-from with the busy time that the loads recorded. Takes
about ten minutes:

    python tests/device/usage_methods.py [OUTPUT_DIRECTORY [WORD…]]

With WORDs such as `saturate`, `random` or `mps`, runs only scenarios and checks whose names contain
one of them.

Needs root, one Hopper GPU, cgroup v2, PyTorch and nvidia-cuda-mps-control. Exits 1 if a check
fails. The error of `exact` may be 2 points, and the error of energy 1 % of the device's counter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pynvml
from shared_gpu import (
    BUSY,
    METHODS,
    PORTS,
    Burst,
    SharedGpu,
    Tenant,
    exposition,
    method_of,
    series,
    value,
    wait_for,
)

SECONDS = 30.0
POINTS = 2.0
MEMORY = "podgpu_container_gpu_memory_used_bytes"
MAXIMUM = "podgpu_container_gpu_busy_seconds_max_total"
ENERGY = "podgpu_container_gpu_energy_joules_total"
ENGINE, TENSOR = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
THREE: list[Burst] = [(40, 100), (10, 100), (10, 100)]
SCENARIOS: dict[str, list[Burst]] = {
    "40/10/10 ms of 100": THREE,
    "five of 5/100": [(5, 100)] * 5,
    "40/10/10 of 100, random pauses": THREE,
    "0.5/5, 1/20, 20/100": [(0.5, 5), (1, 20), (20, 100)],
    "500/1000, 250/1100, 100/1300, cool": [(500, 1000), (250, 1100), (100, 1300)],
    "two that saturate it": [(1000, 1000)] * 2,
    "two that saturate it, fp32": [(1000, 1000)] * 2,
    "two that saturate it, cool": [(1000, 1000)] * 2,
    "one that saturates it, 8/100 and 1/10, cool": [(1000, 1000), (8, 100), (1, 10)],
}


def errors_of(text: str) -> dict[str, float]:
    """Returns the errors of context-switch logs by reason."""
    found = series(text, "podgpu_exporter_source_errors_total")
    return {labels["reason"]: number for labels, number in found if labels["source"] == "switches"}


def joules(text: str) -> float:
    return value(text, ENERGY) + value(text, "podgpu_device_unattributed_energy_joules_total")


def energy_now(bench: SharedGpu) -> tuple[float, float]:
    """Waits for podgpu's next energy reading. Returns its sum and the driver's counter in
    joules.
    """
    before = joules(exposition("exact"))
    wait_for(lambda: joules(exposition("exact")) != before, 10, "a reading of energy")
    return joules(exposition("exact")), float(
        pynvml.nvmlDeviceGetTotalEnergyConsumption(bench.gpu)
    ) / 1000


def busy_percent(
    tenants: Sequence[Tenant], seconds: float, methods: Sequence[str] = ("exact",)
) -> tuple[dict[str, list[float]], list[float]]:
    """Returns the busy time of each tenant in %: by each method, and as recorded by the loads."""
    before, began = {method: exposition(method) for method in methods}, time.monotonic()
    time.sleep(seconds)
    after, ended = {method: exposition(method) for method in methods}, time.monotonic()
    time.sleep(1.2)  # the loads write twice a second
    scale = 100 / (ended - began)
    measured = {
        method: [
            scale * (value(after[method], BUSY, one.pod) - value(before[method], BUSY, one.pod))
            for one in tenants
        ]
        for method in methods
    }
    return measured, [scale * one.worked(began, ended) for one in tenants]


def compare(bench: SharedGpu, name: str, bursts: Sequence[Burst]) -> dict[str, object]:
    options = [word for word in ("random", "fp32", "cool") if word in name]
    with bench.loads(bursts, *options) as tenants, bench.exporters(tenants, METHODS):
        time.sleep(6)
        split, counter = energy_now(bench)
        measured, truth = busy_percent(tenants, SECONDS, METHODS)
        texts = {method: exposition(method) for method in METHODS}
        split_after, counter_after = energy_now(bench)
        split, counter = split_after - split, counter_after - counter
        used = {
            p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(bench.gpu)
        }
        memory = [used[one.process.pid] for one in tenants if one.process]
    worst = max(abs(a - b) for a, b in zip(measured["exact"], truth, strict=True))
    bench.check(f"{name}: exact within {POINTS} points (worst {worst:.2f})", worst <= POINTS)
    off = 100 * (split - counter) / counter
    bench.check(f"{name}: joules within 1 % ({off:+.2f} %)", abs(off) < 1)
    bench.check(
        f"{name}: memory is NVML's",
        [value(texts["exact"], MEMORY, one.pod) for one in tenants] == memory,
    )
    methods = {method: method_of(text) for method, text in texts.items()}
    bench.check(
        f"{name}: methods are those of the options",
        methods == {method: method for method in METHODS},
    )
    return {
        "scenario": name,
        "truth": truth,
        **measured,
        "joules": split,
        "counter_joules": counter,
    }


def check_kill(bench: SharedGpu) -> None:
    with (
        bench.loads([(40, 100), (10, 100), (30, 100)], "cool") as tenants,
        bench.exporters(tenants, ["exact"]),
    ):
        time.sleep(6)
        start = value(exposition("exact"), BUSY)
        wait_for(lambda: value(exposition("exact"), BUSY) != start, 10, "a reading of busy time")
        before, began = exposition("exact"), time.monotonic()
        time.sleep(8)
        tenants[2].kill()
        killed_at = time.monotonic()
        time.sleep(7)  # busy time is published every 5 s
        after, ended = exposition("exact"), time.monotonic()
        time.sleep(1.2)
        for one, until in zip(tenants, (ended, ended, killed_at), strict=True):
            measured, truth = (
                value(after, BUSY, one.pod) - value(before, BUSY, one.pod),
                one.worked(began, until),
            )
            off = 100 * abs(measured - truth) / (ended - began)
            bench.check(
                f"kill -9: {one.pod[-1]} has {measured:.2f} of {truth:.2f} s", off <= POINTS
            )
        bench.check(f"kill -9: still exact, errors {errors_of(after)}", method_of(after) == "exact")


def check_restart(bench: SharedGpu) -> None:
    with bench.loads(THREE) as tenants:
        with bench.exporters(tenants, ["exact"]):
            time.sleep(4)
        with bench.exporters(tenants, ["exact"]):
            wait_for(lambda: method_of(exposition("exact")) == "exact", 15, "exact after a restart")
            measured, truth = busy_percent(tenants, 15)
            for busy, worked in zip(measured["exact"], truth, strict=True):
                bench.check(
                    f"restart: {busy:.1f} of {worked:.1f} %", abs(busy - worked) <= 1.5 * POINTS
                )


def check_unprivileged(bench: SharedGpu) -> None:
    drop = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    with bench.loads(THREE[:2]) as tenants, bench.exporters(tenants, ["exact"], wrapper=drop):
        wait_for(
            lambda: method_of(exposition("exact")) not in ("", "samples"),
            20,
            "another method than samples",
        )
        method = method_of(exposition("exact"))
        bench.check(f"without CAP_SYS_ADMIN: {method}", method == "switches")
    with (
        bench.loads(THREE[:2], user=65534) as tenants,
        bench.exporters(tenants, ["switches"], wrapper=drop),
    ):
        time.sleep(6)
        measured, truth = busy_percent(tenants, SECONDS, ["switches"])
        off = max(abs(a - b) for a, b in zip(measured["switches"], truth, strict=True))
        method = method_of(exposition("switches"))
        bench.check(
            f"with a process of another user: {method}, {off:.1f} points off",
            method == "switches" and off <= 5,
        )


def check_fast_switches(bench: SharedGpu) -> None:
    with bench.loads([(0.05, 0.05)] * 6) as tenants, bench.exporters(tenants, METHODS):
        time.sleep(6)
        rate = bench.record_switches(60)[1] / 2  # a switch has two records: save and switch-in
        lost = {method: errors_of(exposition(method)) for method in METHODS}
    bench.check(f"{rate:.0f} switches per second (at least 5,000)", rate >= 5000)
    bench.check(f"… none lost, {lost}", not any(lost.values()))


@contextmanager
def mps_daemon() -> Iterator[None]:
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(
            ["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=60
        )


def pods_with(text: str, family: str, tenants: Sequence[Tenant]) -> int:
    names = {tenant.pod for tenant in tenants}
    return len({labels["pod"] for labels, _ in series(text, family) if labels.get("pod") in names})


def check_mps(bench: SharedGpu) -> None:
    with (
        mps_daemon(),
        bench.loads(THREE) as tenants,
        bench.exporters(tenants, ["exact"], "-c", "1000"),
    ):
        time.sleep(20)
        text = exposition("exact")
        bench.check(f"MPS: method {method_of(text)}", method_of(text) == "mps")
        counts = [pods_with(text, family, tenants) for family in (BUSY, ENERGY, MAXIMUM, MEMORY)]
        bench.check(
            f"MPS: pods with busy time, energy, upper bound and memory {counts}",
            counts == [0, 0, 3, 3],
        )
    with (
        mps_daemon(),
        bench.loads(THREE[:1]) as tenants,
        bench.exporters(tenants, ["exact"], "-c", "1000"),
    ):
        time.sleep(8)
        measured, (truth,) = busy_percent(tenants, 20)
        (busy,) = measured["exact"]
        bench.check(f"MPS with one container: {busy:.1f} of {truth:.1f} %", abs(busy - truth) <= 5)


def check_profiling(bench: SharedGpu) -> None:
    options = ["-c", "1000", "--kubernetes-virtual-gpus", "-f", "dcp"]
    with (
        bench.loads([*THREE[:2], (0.0, 100.0)]) as tenants,
        bench.exporters(tenants, ["exact"], *options),
    ):
        time.sleep(15)
        began, means = time.monotonic(), [0.0] * len(tenants)
        for _ in range(20):
            text = exposition("exact")
            means = [
                mean + value(text, ENGINE, one.pod) / 20
                for mean, one in zip(means, tenants, strict=True)
            ]
            time.sleep(1)
        ended = time.monotonic()
        time.sleep(1.2)
        truth = [one.worked(began, ended) / (ended - began) for one in tenants]
    close = all(abs(a - b) < 0.05 for a, b in zip(means, truth, strict=True))
    bench.check(
        f"{ENGINE} per pod: {[round(m, 3) for m in means]} of {[round(t, 3) for t in truth]}", close
    )
    bench.check(
        f"{TENSOR}: only for the device", not pods_with(text, TENSOR, tenants) and TENSOR in text
    )


def check_view(bench: SharedGpu) -> None:
    """Compares the figures that the page shows together: the holders' and their GPU's."""
    loads: list[Burst] = [(45, 110), (20, 90), (3, 40)]
    views, over = 0, dict.fromkeys(("utilization_ratio", "memory_used_bytes", "power_watts"), 0)
    with (
        bench.loads(loads, "random", "cool") as tenants,
        bench.exporters(tenants, METHODS, "-c", "1000"),
    ):
        time.sleep(8)
        for _ in range(25):
            time.sleep(0.9)
            for method in METHODS:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{PORTS[method]}/api/v1/view", timeout=5
                ) as answer:
                    (gpu,) = json.load(answer)["nodes"][0]["gpus"]
                views += 1
                for key in over:
                    over[key] += (
                        sum(holder.get(key, 0.0) for holder in gpu["holders"]) > gpu[key] * 1.0001
                    )
    bench.check(f"view: holders exceed their GPU {over} in {views} views", not any(over.values()))


def kernel_lines() -> list[str]:
    return subprocess.run(
        ["dmesg"], capture_output=True, text=True, check=False
    ).stdout.splitlines()


CHECKS = (
    check_kill,
    check_restart,
    check_unprivileged,
    check_fast_switches,
    check_mps,
    check_profiling,
    check_view,
)


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "bench-out")
    out.mkdir(parents=True, exist_ok=True)
    words = sys.argv[2:] or [""]
    lines, rows = kernel_lines(), []
    with tempfile.TemporaryDirectory() as folder:
        bench = SharedGpu(Path(folder))
        for name, bursts in SCENARIOS.items():
            if any(word in name for word in words):
                rows.append(compare(bench, name, bursts))
                print(json.dumps(rows[-1]), flush=True)
        for check in CHECKS:
            if any(word in check.__name__ for word in words):
                check(bench)
        new_lines = kernel_lines()[len(lines) :]
        bench.check(f"no new lines in the kernel's log {new_lines[-3:]}", not new_lines)
    (out / "usage_methods.json").write_text(json.dumps(rows, indent=1))
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
