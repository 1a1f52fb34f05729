"""Shared GPUs on a real GPU: clients of MPS, profiling ratios per pod, and sums on the page.

    python tests/device/right_figures.py [OUTPUT_DIRECTORY]

Run by hand as root on a machine with one GPU, cgroup v2, PyTorch and nvidia-cuda-mps-control. Exits 1 if a check fails.
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
from prometheus_expositions import series  # beside this file
from tenants import Tenant  # beside this file
from usage_methods import BUSY, PORTS, Bench, exposition, method_of, value, wait_for, worked  # beside this file

from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

BURSTS = [(40.0, 100.0), (10.0, 100.0), (28.0, 100.0)]
MEMORY = "podgpu_container_gpu_memory_used_bytes"
MAXIMUM = "podgpu_container_gpu_busy_seconds_max_total"
ENERGY = "podgpu_container_gpu_energy_joules_total"
ENGINE, TENSOR = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"


@contextmanager
def exporter(bench: Bench, tenants: Sequence[Tenant], method: str, *options: str) -> Iterator[None]:
    uuid = pynvml.nvmlDeviceGetUUID(bench.gpu)
    ids = {t.pod: f"{uuid}::{n}" for n, t in enumerate(tenants)}
    pods = [SimulatedPod(t.namespace, t.pod, {"main": {"nvidia.com/gpu.shared": [ids[t.pod]]}}) for t in tenants]
    with SimulatedKubelet(f"{bench.folder}/{time.monotonic_ns()}.sock", pods) as kubelet:
        command = [sys.executable, "-m", "podgpu", "exporter", "-k", "-c", "1000", "-a", f"127.0.0.1:{PORTS[method]}"]
        command += ["--usage-from", method, "--pod-resources-kubelet-socket", kubelet.socket, *options]
        with subprocess.Popen(command) as process:
            try:
                wait_for(lambda: MEMORY in exposition(method), 30, "the exporter")
                yield
            finally:
                process.terminate()


@contextmanager
def mps_daemon() -> Iterator[None]:
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=60)


def pods_with(text: str, family: str, tenants: Sequence[Tenant]) -> list[str]:
    names = {tenant.pod for tenant in tenants}
    return sorted({labels["pod"][-1] for labels, _ in series(text, family) if labels.get("pod") in names})


def check_mps(bench: Bench) -> None:
    with mps_daemon(), bench.loads(BURSTS) as tenants, exporter(bench, tenants, "exact"):
        time.sleep(20)
        text = exposition("exact")
        bench.check(f"MPS: method {method_of(text)}", method_of(text) == "mps")
        bench.check("MPS: no busy time of clients", not pods_with(text, BUSY, tenants))
        bench.check("MPS: no energy of clients", not pods_with(text, ENERGY, tenants))
        bench.check("MPS: upper bound of every client", pods_with(text, MAXIMUM, tenants) == ["0", "1", "2"])
        bench.check("MPS: memory of every client", pods_with(text, MEMORY, tenants) == ["0", "1", "2"])
        (bench.folder / "mps.prom").write_text(text)
    with mps_daemon(), bench.loads(BURSTS[:1]) as tenants, exporter(bench, tenants, "exact"):
        time.sleep(8)
        before, began = exposition("exact"), time.monotonic()
        time.sleep(20)
        after, ended = exposition("exact"), time.monotonic()
        time.sleep(1.2)
        busy = 100 * (value(after, BUSY, tenants[0].pod) - value(before, BUSY, tenants[0].pod)) / (ended - began)
        truth = 100 * worked(tenants[0], began, ended) / (ended - began)
        bench.check(f"MPS with one container: {busy:.1f} of {truth:.1f} %", abs(busy - truth) <= 5)


def read_view(method: str) -> dict[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[method]}/api/v1/view", timeout=5) as answer:
        return dict(json.load(answer))


def check_page(bench: Bench, method: str) -> None:
    with bench.loads(BURSTS) as tenants, exporter(bench, tenants, method):
        time.sleep(10)
        rows = []
        for _ in range(40):
            (gpu,) = read_view(method)["nodes"][0]["gpus"]  # type: ignore[index]
            parts = [holder.get("utilization_ratio") for holder in gpu["holders"]]
            rows.append((gpu.get("utilization_ratio"), [part for part in parts if part is not None]))
            time.sleep(0.5)
        above = [row for row in rows if row[0] is not None and sum(row[1]) > row[0] + 1e-6]
        known = sum(row[0] is not None and len(row[1]) == len(tenants) for row in rows)
        bench.check(f"page, {method}: holders above their GPU in {len(above)} of {known} views {above[:2]}", not above)
        bench.check(f"page, {method}: {known} of 40 views have every figure", known > 30)


def check_profiling(bench: Bench) -> None:
    options = ["--kubernetes-virtual-gpus", "-f", "dcp"]
    with bench.loads([*BURSTS[:2], (0.0, 100.0)]) as tenants, exporter(bench, tenants, "exact", *options):
        time.sleep(15)
        began, means = time.monotonic(), [0.0] * len(tenants)
        for _ in range(20):
            text = exposition("exact")
            means = [m + value(text, ENGINE, t.pod) / 20 for m, t in zip(means, tenants, strict=True)]
            time.sleep(1)
        ended = time.monotonic()
        time.sleep(1.2)
        truth = [worked(t, began, ended) / (ended - began) for t in tenants]
        close = all(abs(a - b) < 0.05 for a, b in zip(means, truth, strict=True))
        bench.check(f"{ENGINE} per pod: {[round(m, 3) for m in means]} of {[round(t, 3) for t in truth]}", close)
        bench.check(f"{TENSOR}: only for the device", not pods_with(text, TENSOR, tenants) and TENSOR in text)


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "bench-out")
    out.mkdir(parents=True, exist_ok=True)
    pynvml.nvmlInit()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        bench = Bench(Path(folder), pynvml.nvmlDeviceGetHandleByIndex(0))
        check_page(bench, "samples")
        check_page(bench, "exact")
        check_profiling(bench)
        check_mps(bench)
        for path in Path(folder).glob("*.prom"):
            (out / path.name).write_text(path.read_text())
    print("WRONG: " + "; ".join(bench.wrong) if bench.wrong else "all within limits")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
