"""Three loads of known duty in three containers of one shared GPU, and a fourth holder that does nothing: what podgpu
says of each, beside what the driver's own tools say. Run by hand as root on a GPU machine with cgroup v2 and PyTorch:

    python tests/device/container_usage.py [SECONDS] [OUTPUT_DIRECTORY]

The cgroups and log directories are named as the kubelet and containerd name them, the kubelet is a real gRPC server,
the exporter a real process. Compared: busy share with `nvidia-smi pmon`'s mean per pid (5 points), memory with NVML's
(equal), energy with an NVML reading taken around the run (2 %). Exits 1 when one of them does not hold.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pynvml
from prometheus_expositions import series  # beside this file
from tenants import Tenant, cpu_seconds, resident_mib  # beside this file

from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

LOAD = """
import sys, time, torch
duty, period, size, gib = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
hold = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda")
a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
while True:
    began = time.monotonic()
    while time.monotonic() - began < duty * period:
        a @ a
        torch.cuda.synchronize()
    time.sleep(max(0.0, period - (time.monotonic() - began)))
"""
PORT = 9471


def tenant(namespace: str, pod: str, duty: float, period: float, gib: float) -> Tenant:
    arguments = [str(duty), str(period), "4096", str(gib)]
    return Tenant(namespace, pod, [sys.executable, "-c", LOAD, *arguments] if duty else [])


TENANTS = [
    tenant("research", "train-a", 0.5, 0.97, 10),
    tenant("serving", "serve-b", 0.25, 1.13, 4),
    tenant("serving", "serve-c", 0.1, 1.31, 2),
    tenant("notebooks", "idle-d", 0.0, 1.0, 0),
]


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    out = Path(sys.argv[2] if len(sys.argv) > 2 else "bench-out")
    out.mkdir(parents=True, exist_ok=True)
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    gpu_uuid = pynvml.nvmlDeviceGetUUID(gpu)
    for tenant in TENANTS:
        tenant.start()
    ids = {t.pod: f"{gpu_uuid}::{n}" for n, t in enumerate(TENANTS)}
    pods = [SimulatedPod(t.namespace, t.pod, {"main": {"nvidia.com/gpu.shared": [ids[t.pod]]}}) for t in TENANTS]
    with tempfile.TemporaryDirectory() as folder, SimulatedKubelet(f"{folder}/k.sock", pods) as kubelet:
        options = ["-k", "-c", "1000", "-a", f"127.0.0.1:{PORT}", "--pod-resources-kubelet-socket", kubelet.socket]
        exporter = subprocess.Popen([sys.executable, "-m", "podgpu", "exporter", *options])
        try:
            time.sleep(20)  # loads compile and warm up
            return measure(gpu, exporter.pid, seconds, out)
        finally:
            exporter.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                print("exporter ended with", exporter.wait(20))
            for tenant in TENANTS:
                tenant.kill()


def measure(gpu: object, exporter_pid: int, seconds: float, out: Path) -> int:
    pmon = subprocess.Popen(
        ["nvidia-smi", "pmon", "-c", str(int(seconds)), "-d", "1"], stdout=subprocess.PIPE, text=True
    )
    began, before, energy_before, cpu_before = time.monotonic(), exposition(), energy(gpu), cpu_seconds(exporter_pid)
    text = pmon.communicate()[0]
    elapsed, after, energy_after = time.monotonic() - began, exposition(), energy(gpu)
    (out / "usage.prom").write_text(after)
    memory = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    wrong, rows = [], []
    for tenant in TENANTS:
        pid = tenant.pid
        busy = 100 * delta(before, after, "podgpu_container_gpu_busy_seconds_total", tenant.pod) / elapsed
        theirs = pmon_mean(text, pid)
        ours = value(after, "podgpu_container_gpu_memory_used_bytes", tenant.pod)
        joules = delta(before, after, "podgpu_container_gpu_energy_joules_total", tenant.pod)
        row = {"pod": tenant.pod, "busy_percent": busy, "pmon_percent": theirs, "joules": joules}
        row |= {"memory": ours, "memory_nvml": memory.get(pid, 0)}
        row["idle_seconds"] = delta(before, after, "podgpu_container_gpu_idle_seconds_total", tenant.pod)
        row["allocated_seconds"] = delta(before, after, "podgpu_container_gpu_allocated_seconds_total", tenant.pod)
        rows.append(row)
        print(json.dumps(row))
        if abs(busy - theirs) > 5 or ours != memory.get(pid, 0) or (not tenant.command and busy):
            wrong.append(tenant.pod)
    containers = sum(float(row["joules"]) for row in rows)
    rest = delta(before, after, "podgpu_device_unattributed_energy_joules_total", "")
    independent = (energy_after - energy_before) / 1000
    total = delta(before, after, "podgpu_device_energy_joules_total", "")
    summary = {
        "seconds": elapsed,
        "containers_joules": containers,
        "unattributed_joules": rest,
        "device_joules": total,
        "independent_joules": independent,
        "off_percent": 100 * (containers + rest - independent) / independent,
        "device_busy_percent": 100 * delta(before, after, "podgpu_device_busy_seconds_total", "") / elapsed,
        "unattributed_busy_percent": 100
        * delta(before, after, "podgpu_device_unattributed_busy_seconds_total", "")
        / elapsed,
        "exporter_cpu_percent": 100 * (cpu_seconds(exporter_pid) - cpu_before) / elapsed,
        "exporter_resident_mib": resident_mib(exporter_pid),
    }
    print(json.dumps(summary, indent=1))
    (out / "usage.json").write_text(json.dumps({"containers": rows, "summary": summary}, indent=1))
    if abs(float(summary["off_percent"])) > 2:
        wrong.append("energy")
    print("WRONG: " + ", ".join(wrong) if wrong else "all within limits")
    return 1 if wrong else 0


def exposition() -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def value(text: str, name: str, pod: str) -> float:
    return sum(v for labels, v in series(text, name) if not pod or labels.get("pod") == pod)


def delta(before: str, after: str, name: str, pod: str) -> float:
    return value(after, name, pod) - value(before, name, pod)


def energy(gpu: object) -> int:
    return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu))


def pmon_mean(text: str, pid: int) -> float:
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    seen = [row[3] for row in rows if len(row) > 3 and row[1] == str(pid)]
    return sum(float(sm) for sm in seen if sm != "-") / max(1, len(seen))


if __name__ == "__main__":
    sys.exit(main())
