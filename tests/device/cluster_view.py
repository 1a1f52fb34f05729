"""The cluster view over a real exporter on a real GPU that four pods share. Run by hand as root on a GPU machine:

    python tests/device/cluster_view.py [SECONDS]

Cgroups and kubelet are those of container_usage.py; exporter and cluster are real processes. Compared:
the text's figures and `avg_GPU_utilization` with nvidia-smi before and after, the map with who holds, the idle list
with who does nothing, the cost with shares, seconds and prices. Exits 1 when one of them does not hold.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import pynvml
from container_usage import PORT  # beside this file
from container_usage import tenant as make
from prometheus_expositions import series

from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

CLUSTER = 9472
TENANTS = [
    make("research", "train-a", 0.4, 0.1, 10),
    make("serving", "serve-b", 0.1, 0.1, 4),
    make("serving", "serve-c", 0.1, 0.1, 2),
    make("notebooks", "idle-d", 0.0, 1.0, 0),
]
"""Of periods so short that every look sees the same: those of container_usage.py move by tens of points a second."""
COLUMNS = ("utilization.gpu", "utilization.memory", "memory.used", "power.draw", "temperature.gpu")
SLACK = (25, 10, 2, 80, 2)
GPU_HOUR = 3600.0
"""A price at which a second costs one."""


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 40.0
    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    for tenant in TENANTS:
        tenant.start()
    pods = [
        SimulatedPod(t.namespace, t.pod, {"main": {"nvidia.com/gpu.shared": [f"{uuid}::{n}"]}})
        for n, t in enumerate(TENANTS)
    ]
    with ExitStack() as at_the_end:
        for tenant in TENANTS:
            if tenant.process is not None:
                at_the_end.callback(tenant.process.kill)
        folder = at_the_end.enter_context(tempfile.TemporaryDirectory())
        kubelet = at_the_end.enter_context(SimulatedKubelet(f"{folder}/k.sock", pods))
        kubelet.allocatable = {"nvidia.com/gpu.shared": [f"{uuid}::{n}" for n in range(len(TENANTS))]}
        prices = Path(folder) / "prices.yaml"
        prices.write_text(f"currency: EUR\nmodels: {{'*': {{gpu_hour: {GPU_HOUR}, kwh: 0.3}}}}\n", encoding="utf-8")
        socket = ("--pod-resources-kubelet-socket", kubelet.socket)
        _start(at_the_end, "exporter", "-k", "-c", "1000", "-a", f"127.0.0.1:{PORT}", *socket)
        scrape = ("--scrape", f"http://127.0.0.1:{PORT}", "--interval", "1s", "--idle-after", "5s")
        _start(at_the_end, "cluster", "-a", f"127.0.0.1:{CLUSTER}", *scrape, "--prices", str(prices))
        time.sleep(25)  # loads compile and warm up
        return judge(uuid, seconds)


def _start(at_the_end: ExitStack, *arguments: str) -> None:
    process = subprocess.Popen([sys.executable, "-m", "podgpu", *arguments])

    def end() -> None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            print(arguments[0], "ended with", process.wait(20))

    at_the_end.callback(end)


def judge(uuid: str, seconds: float) -> int:
    wrong = 0
    first, began = _metrics(), time.monotonic()
    rows = {(s["pod_name"], s["gpu_id"]) for s, _ in series(first, "pod_and_gpu_map_info")}
    wrong += _verdict("the map", rows == {(t.pod, uuid) for t in TENANTS}, f"{len(rows)} rows")
    wrong += _figures()
    time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    last = _metrics()
    rounds = "podgpu_cluster_round_timestamp_seconds"
    held = _value(last, rounds) - _value(first, rounds)
    idle = {s["pod"] for s, _ in series(last, "podgpu_idle_allocated_gpu_since_timestamp_seconds")}
    wrong += _verdict("idle holders", idle == {"idle-d"}, str(idle))
    for namespace, tenants in (("research", 1), ("serving", 2), ("notebooks", 1)):
        cost = _cost(last, namespace) - _cost(first, namespace)
        due = tenants / len(TENANTS) * held
        wrong += _verdict(f"cost of {namespace}", abs(cost - due) <= 0.03 * due + 0.5, f"{cost:.2f}, due {due:.2f}")
    top = subprocess.run(
        [sys.executable, "-m", "podgpu", "top", "--cluster", f"http://127.0.0.1:{CLUSTER}", "--once"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(top.stdout)
    return 1 if wrong + top.returncode else 0


def _figures(rounds: int = 8) -> int:
    """Each figure of the exposition must lie between nvidia-smi's word before and after it."""
    inside = dict.fromkeys(("utilization.gpu", "avg_GPU_utilization", *COLUMNS[2:]), 0)
    seen: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        before = _smi()
        time.sleep(2.2)  # a tick of the exporter and a round of the cluster
        (gpu,) = json.loads(_get("/api/v1/view"))["nodes"][0]["gpus"]
        average = _value(_metrics(), "avg_GPU_utilization")
        after = _smi()
        ours = (
            gpu["utilization_ratio"] * 100,
            average,
            gpu["memory_used_bytes"] / 2**20,
            gpu["power_watts"],
            gpu["temperature_celsius"],
        )
        for name, value, low, high, slack in zip(inside, ours, before, after, SLACK, strict=True):
            seen.setdefault(name, []).append((value, low, high))
            inside[name] += min(low, high) - slack <= value <= max(low, high) + slack
    for name, values in seen.items():
        means = [sum(column) / len(column) for column in zip(*values, strict=True)]
        print(f"{name:<24} cluster {means[0]:.1f}; nvidia-smi before {means[1]:.1f}, after {means[2]:.1f}")
    return sum(
        _verdict(name, count >= rounds - 1, f"{count} of {rounds} rounds inside") for name, count in inside.items()
    )


def _smi() -> tuple[float, ...]:
    command = ["nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return tuple(map(float, text.split(",")))


def _cost(exposition: str, namespace: str) -> float:
    rows = series(exposition, "podgpu_namespace_cost_total")
    return sum(value for s, value in rows if (s["namespace"], s["kind"]) == (namespace, "allocated"))


def _value(exposition: str, name: str) -> float:
    (only,) = series(exposition, name)
    return only[1]


def _metrics() -> str:
    return _get("/metrics").decode()


def _get(path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{CLUSTER}{path}", timeout=5) as answer:
        return bytes(answer.read())


def _verdict(what: str, holds: bool, figures: str) -> int:
    print(f"{'ok   ' if holds else 'WRONG'} {what:<24} {figures}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
