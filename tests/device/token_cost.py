"""Compares the cost per token of two loads on a shared GPU with that of each load alone. Takes less
than four minutes:

    python tests/device/token_cost.py [OUTPUT_DIRECTORY]

The loads serve vLLM's metric names and log their own work. `podgpu cluster --token-metrics pods`
reads them, and an exporter reads the GPU. Needs root, one Hopper GPU, cgroup v2 and PyTorch. Exits 1
if a check fails: podgpu counts exactly the tokens that the loads served; the cost per token of the
time that a load used is within 3 % of that of the load alone; the parts of all pods and what nobody
held add up to the bill of the device.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared_gpu import PORTS, SharedGpu, Tenant, wait_for

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kube.api_server import SimulatedApiServer

SECONDS = 30.0
SETTLE_SECONDS = 4.0
STORE_SECONDS = 16.0  # podgpu stores the charges every 15 s
METHOD = "exact"
CLUSTER = "127.0.0.1:9499"
PRICE = 1000.0  # of an hour; a round number with many digits
LIMIT = 0.03
_LOAD = Path(__file__).with_name("token_load.py")


@dataclass(frozen=True)
class Load:
    """Prompt tokens, steps and batch of a request, and its period in milliseconds."""

    name: str
    prompt: int
    steps: int
    batch: int
    period: float

    @property
    def tokens(self) -> int:
        return self.prompt + self.steps * self.batch


# Nearly all work of the first one is decoding, and of the second one prefill.
CHAT = Load("chat", 512, 48, 32, 60.0)
SUMMARY = Load("summary", 8192, 4, 16, 60.0)
PHASES: list[tuple[str, list[Load]]] = [
    ("alone", [CHAT]),
    ("alone", [SUMMARY]),
    ("shared", [CHAT, SUMMARY]),
    ("full", [replace(CHAT, period=0.0), replace(SUMMARY, period=0.0)]),
]


class Bench:
    def __init__(self, folder: Path, api_server: SimulatedApiServer) -> None:
        self.gpu = SharedGpu(folder)
        self.folder = folder
        self.api_server = api_server
        self.served: dict[str, tuple[int, float]] = {}  # pod -> requests, seconds of one
        self.port = 9700

    def run(self, phase: str, loads: Sequence[Load]) -> None:
        """Runs the loads in pods of their own, named after the phase and the load."""
        go = self.folder / f"{self.port}.go"
        stop = self.folder / f"{self.port}.stop"
        tenants = []
        for load in loads:
            pod = f"{phase}-{load.name}"
            log = self.folder / f"{pod}.log"
            self.port += 1
            numbers = (load.prompt, load.steps, load.batch, load.period, self.port)
            words = [*map(str, numbers), str(log), str(go), str(stop)]
            tenants.append(Tenant(pod, log, [sys.executable, str(_LOAD), *words]))
            self.api_server.put("pods", make_pod(pod, self.port))
        with ExitStack() as stack:
            for tenant in tenants:
                tenant.start()
                stack.callback(tenant.kill)
            wait_for(lambda: all(map(is_measured, tenants)), 60, f"the loads of {phase}")
            stack.enter_context(self.gpu.exporters(tenants, [METHOD]))
            pods = [tenant.pod for tenant in tenants]
            wait_for(lambda: count_engines(pods) == len(pods), 30, f"the engines of {phase}")
            time.sleep(2.5)  # the first reading is the start of the count
            go.touch()
            time.sleep(SECONDS)
            stop.touch()
            wait_for(lambda: all(map(has_stopped, tenants)), 20, f"the end of {phase}")
            time.sleep(SETTLE_SECONDS)
            for tenant in tenants:
                requests, seconds = tenant.log.read_text().split()[:2]
                self.served[tenant.pod] = int(requests), float(seconds)


def make_kubeconfig(url: str) -> str:
    parts = {
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {}}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "test", **parts})


def make_pod(name: str, port: int) -> dict[str, Any]:
    container = {"name": "main", "ports": [{"containerPort": port, "name": "http"}]}
    return {
        "metadata": {"name": name, "namespace": "shared"},
        "spec": {"containers": [container]},
        "status": {"podIP": "127.0.0.1"},
    }


def is_measured(tenant: Tenant) -> bool:
    return tenant.log.exists() and bool(tenant.log.read_text())


def has_stopped(tenant: Tenant) -> bool:
    return "stopped" in tenant.log.read_text()


def ask(path: str) -> Any:
    with urllib.request.urlopen(f"http://{CLUSTER}/{path}", timeout=10) as answer:
        return json.loads(answer.read())


def count_engines(pods: Sequence[str]) -> int:
    found = set()
    for node in ask("api/v1/view")["nodes"]:
        for gpu in node["gpus"]:
            for holder in gpu.get("holders", []):
                if holder.get("engine", {}).get("engine"):
                    found.add(holder["pod"])
    return len(found & set(pods))


def check_tokens(bench: Bench, loads: dict[str, Load], rows: dict[str, Any]) -> None:
    for pod, load in loads.items():
        requests, seconds = bench.served[pod]
        row = rows[pod]
        tokens = row["prompt_tokens"] + row["generated_tokens"]
        figures = row["tokens"]
        own = PRICE / 3600 * seconds / load.tokens * 1e6
        print(
            f"{pod}: {tokens:,} tokens, {requests} requests of {seconds * 1e3:.2f} ms,"
            f" bill {figures['cost']}, per million {figures.get('cost_per_million')},"
            f" at use {figures.get('cost_per_million_at_use')} (by the load's own log {own:.4f}),"
            f" {figures.get('joules_per_token')} J per token, {figures.get('reason', '')}",
            flush=True,
        )
        wanted = requests * load.tokens
        bench.gpu.check(f"{pod}: {tokens:,} of {wanted:,} tokens", tokens == wanted)


def check_costs(bench: Bench, loads: dict[str, Load], rows: dict[str, Any]) -> None:
    for pod, load in loads.items():
        alone = rows[f"alone-{load.name}"]["tokens"].get("cost_per_million_at_use", math.nan)
        shared = rows[pod]["tokens"].get("cost_per_million_at_use", math.nan)
        error = shared / alone - 1
        text = f"{pod}: {shared:.4f} per million tokens, alone {alone:.4f}: {error:+.2%}"
        bench.gpu.check(text, abs(error) <= LIMIT)


def check_sums(bench: Bench, answer: dict[str, Any]) -> None:
    parts = []
    for row in answer["rows"]:
        if row.get("unallocated"):
            parts.append(row["cost"])
        else:
            cost = row["tokens"]["cost"]
            parts += [cost["used"], cost["waiting"], cost["idle"], cost["unknown"]]
    total = answer["totals"]["cost"]
    rounding = 0.00005 * (len(answer["rows"]) + 1)
    text = f"the parts add up to {math.fsum(parts):.4f}, the bill is {total:.4f}"
    bench.gpu.check(text, abs(math.fsum(parts) - total) <= rounding)
    hours = answer["totals"]["gpu_hours"]
    bill = f"{hours} GPU-hours at {PRICE:g} are {hours * PRICE:.4f}"
    bench.gpu.check(bill, abs(hours * PRICE - total) <= 0.00005 * PRICE + rounding)


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "bench-out")
    out.mkdir(parents=True, exist_ok=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as name, SimulatedApiServer() as api_server:
        folder = Path(name)
        bench = Bench(folder, api_server)
        (folder / "kubeconfig").write_text(make_kubeconfig(api_server.url))
        (folder / "prices.yaml").write_text(
            f"currency: EUR\nmodels: {{'*': {{gpu_hour: {PRICE}}}}}\n"
        )
        command = [sys.executable, "-m", "podgpu", "cluster", "-a", CLUSTER, "--interval", "1s"]
        command += ["--scrape", f"127.0.0.1:{PORTS[METHOD]}", "--token-metrics", "pods"]
        command += ["--kubeconfig", str(folder / "kubeconfig")]
        command += ["--prices", str(folder / "prices.yaml")]
        cluster = subprocess.Popen(command)
        try:
            for phase, loads in PHASES:
                bench.run(phase, loads)
                print(f"{phase} done", flush=True)
            time.sleep(STORE_SECONDS)
            answer = ask("api/v1/range?range=1h&by=pod")
        finally:
            cluster.terminate()
            cluster.wait(20)
    (out / "token_cost.json").write_text(json.dumps(answer, indent=1))
    rows = {row["pod"]: row for row in answer["rows"] if row.get("pod")}
    every = {}
    shared = {}
    for phase, loads in PHASES:
        for load in loads:
            every[f"{phase}-{load.name}"] = load
            if phase != "alone":
                shared[f"{phase}-{load.name}"] = load
    check_tokens(bench, every, rows)
    check_costs(bench, shared, rows)
    check_sums(bench, answer)
    return bench.gpu.report()


if __name__ == "__main__":
    sys.exit(main())
