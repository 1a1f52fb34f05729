"""Who really used a shared GPU: the three methods of --usage-from beside what the loads say of themselves.

    python tests/device/usage_methods.py [OUTPUT_DIRECTORY [WORD…]]

With WORDs only what has one of them in its name: `saturate`, `random`, `killed`, `fast` …

By hand, as root, on a machine with one Hopper GPU, cgroup v2 and PyTorch. For every scenario three exporters run at
once, one a method, over the same loads for 30 s. Then: a load is killed in the middle, the exporter is restarted, it
runs without CAP_SYS_ADMIN beside a process of another user, and 5,000 switches a second. Exits 1 when `exact` is more
than 2 points off anywhere, joules are more than 1 % off the device's counter, a fallback is not said, or the kernel's
log grew.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pynvml
from prometheus_expositions import series  # beside this file
from tenants import Tenant, cpu_seconds, resident_mib  # beside this file

from podgpu.gpu.nvml.switch_attribution import RecordDecoder, SwitchLogError
from podgpu.gpu.nvml.switch_log import ContextSwitchLog, check_driver
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

METHODS = ("samples", "switches", "exact")
PORTS = {method: 9480 + number for number, method in enumerate(METHODS)}
SECONDS = 30.0
POINTS = 2.0
POWER_CAP = pynvml.nvmlClocksEventReasonSwPowerCap
BUSY = "podgpu_container_gpu_busy_seconds_total"
Burst = tuple[float, float]
SCENARIOS: dict[str, tuple[list[Burst], bool]] = {
    "40/10/10 ms of 100": ([(40, 100), (10, 100), (10, 100)], False),
    "five of 5/100": ([(5, 100)] * 5, False),
    "40/10/10 of 100, random pauses": ([(40, 100), (10, 100), (10, 100)], True),
    "0.5/5, 1/20, 20/100": ([(0.5, 5), (1, 20), (20, 100)], False),
    "500/1000, 250/1100, 100/1300, cool": ([(500, 1000), (250, 1100), (100, 1300)], False),
    "two that saturate it": ([(1000, 1000), (1000, 1000)], False),
    "two that saturate it, fp32": ([(1000, 1000), (1000, 1000)], False),
    "two that saturate it, cool": ([(1000, 1000), (1000, 1000)], False),
    "one that saturates it, 8/100 and 1/10, cool": ([(1000, 1000), (8, 100), (1, 10)], False),
}


@dataclass
class Bench:
    folder: Path
    gpu: object
    wrong: list[str] = field(default_factory=list)
    rows: list[dict[str, object]] = field(default_factory=list)

    def check(self, what: str, holds: bool) -> None:
        print(f"{'ok   ' if holds else 'WRONG'} {what}", flush=True)
        if not holds:
            self.wrong.append(what)

    @contextmanager
    def loads(self, bursts: Sequence[Burst], *more: str, user: int | None = None) -> Iterator[list[Tenant]]:
        """At work when the block begins; `user` is the last one's."""
        go = self.folder / f"go-{time.monotonic_ns()}"
        tenants = []
        for number, (busy, period) in enumerate(bursts):
            log = self.folder / f"{go.name}-{number}.log"
            log.touch()
            log.chmod(0o666)
            command = [sys.executable, str(Path(__file__).with_name("honest_load.py"))]
            command += [str(busy), str(period), str(log), str(go), *more]
            last = number == len(bursts) - 1
            tenants.append(Tenant("shared", f"load-{go.name}-{number}", command, user if last else None))
        try:
            for tenant in tenants:
                tenant.start()
            wait_for(lambda: all(Path(t.command[4]).stat().st_size for t in tenants), 90, "the loads to calibrate")
            go.touch()
            time.sleep(1.0)
            yield tenants
        finally:
            for tenant in tenants:
                tenant.kill()

    @contextmanager
    def exporters(self, tenants: Sequence[Tenant], methods: Sequence[str], *wrapper: str) -> Iterator[dict[str, int]]:
        """Their pids by method."""
        uuid = pynvml.nvmlDeviceGetUUID(self.gpu)
        ids = {t.pod: f"{uuid}::{n}" for n, t in enumerate(tenants)}
        pods = [SimulatedPod(t.namespace, t.pod, {"main": {"nvidia.com/gpu.shared": [ids[t.pod]]}}) for t in tenants]
        with SimulatedKubelet(f"{self.folder}/{time.monotonic_ns()}.sock", pods) as kubelet:
            running = {}
            for method in methods:
                options = ["-k", "-a", f"127.0.0.1:{PORTS[method]}", "--usage-from", method]
                options += ["--pod-resources-kubelet-socket", kubelet.socket]
                command = [*wrapper, sys.executable, "-m", "podgpu", "exporter", *options]
                running[method] = subprocess.Popen(command)
            try:
                for method in methods:
                    wait_for(lambda m=method: BUSY in exposition(m), 30, f"the exporter ({method})")
                yield {method: process.pid for method, process in running.items()}
            finally:
                for process in running.values():
                    process.send_signal(signal.SIGTERM)
                for process in running.values():
                    process.wait(20)


def wait_for(there: Callable[[], object], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            if there():
                return
        except OSError:
            pass
        if time.monotonic() > until:
            sys.exit(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


def exposition(method: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[method]}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def value(text: str, name: str, pod: str = "") -> float:
    return sum(v for labels, v in series(text, name) if not pod or labels.get("pod") == pod)


def method_of(text: str) -> str:
    return ",".join(labels["method"] for labels, _ in series(text, "podgpu_device_usage_method"))


def doubts(text: str) -> dict[str, float]:
    found = series(text, "podgpu_exporter_source_errors_total")
    return {labels["reason"]: v for labels, v in found if labels["source"] == "switches"}


def worked(tenant: Tenant, since: float, until: float) -> float:
    """Seconds, by its own account, between two moments."""
    lines = [line.split() for line in Path(tenant.command[4]).read_text().splitlines() if not line.startswith("#")]
    told = [(float(at), float(work)) for at, work in (line for line in lines if len(line) == 2)]

    def at(moment: float) -> float:
        before = max((point for point in told if point[0] <= moment), default=(moment, 0.0))
        after = min((point for point in told if point[0] > moment), default=before)
        part = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return before[1] + part * (after[1] - before[1])

    return at(until) - at(since)


def kernel_lines() -> list[str]:
    return subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout.splitlines()


def joules(text: str) -> float:
    families = ("podgpu_container_gpu_energy_joules_total", "podgpu_device_unattributed_energy_joules_total")
    return sum(value(text, family) for family in families)


def compare(bench: Bench, name: str, bursts: Sequence[Burst], *more: str) -> None:
    with bench.loads(bursts, *more) as tenants, bench.exporters(tenants, METHODS) as pids:
        time.sleep(6)  # they listen, and the second reading is there
        cpu = {method: cpu_seconds(pid) for method, pid in pids.items()}
        told, energy = told_energy(bench)
        expositions = {method: exposition(method) for method in METHODS}
        moments = {method: time.monotonic() for method in METHODS}
        time.sleep(SECONDS)
        after = {method: exposition(method) for method in METHODS}
        ended = time.monotonic()
        found = {
            m: [100 * (value(after[m], BUSY, t.pod) - value(expositions[m], BUSY, t.pod)) / SECONDS for t in tenants]
            for m in METHODS
        }
        reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(bench.gpu)
        time.sleep(1.2)  # the loads write their accounts twice a second
        truth = [100 * worked(t, moments["exact"], ended) / (ended - moments["exact"]) for t in tenants]
        used = {m: 100 * (cpu_seconds(pid) - cpu[m]) / SECONDS for m, pid in pids.items()}
        memory = {m: resident_mib(pid) for m, pid in pids.items()}
        row = {"scenario": name, "truth": truth, **found, "cpu_percent": used, "resident_mib": memory}
        row |= {"methods": {m: method_of(after[m]) for m in METHODS}, "doubts": {m: doubts(after[m]) for m in METHODS}}
        told_again, energy_again = told_energy(bench)
        split, energy = joules(told_again) - joules(told), energy_again - energy
        row |= {"joules": split, "counter_joules": energy, "power_capped": bool(reasons & POWER_CAP)}
    bench.rows.append(row)
    print(json.dumps(row, default=lambda x: round(x, 2)), flush=True)
    worst = max(abs(a - b) for a, b in zip(found["exact"], truth, strict=True))
    bench.check(f"{name}: exact within {POINTS} points (worst {worst:.2f})", worst <= POINTS)
    bench.check(
        f"{name}: joules within 1 % ({100 * (split - energy) / energy:+.2f} %)", abs(split - energy) < energy / 100
    )
    bench.check(f"{name}: methods are what was asked for", row["methods"] == {m: m for m in METHODS})


def alone(bench: Bench) -> None:
    """What the yardstick says of a load that surely had the whole GPU: how much of its own account is missing."""
    with bench.loads([(1000, 1000)]) as (tenant,):
        began = time.monotonic()
        time.sleep(10)
        ended = time.monotonic()
        time.sleep(1.2)
        account = 100 * worked(tenant, began, ended) / (ended - began)
    bench.rows.append({"scenario": "one that saturates it, alone", "truth": [account]})
    print(
        f"      a load that has the GPU to itself and never rests accounts for {account:.1f} % of the time", flush=True
    )


def just_told() -> str:
    """A text whose busy time goes up to this moment: it is told every five seconds while nobody comes or goes."""
    before = value(exposition("exact"), BUSY)
    wait_for(lambda: value(exposition("exact"), BUSY) != before, 10, "busy time to be told")
    return exposition("exact")


def told_energy(bench: Bench) -> tuple[str, float]:
    """A text that has just told of energy, and the device's counter at that moment: it is told every five seconds."""
    before = joules(exposition("exact"))
    wait_for(lambda: joules(exposition("exact")) != before, 10, "energy to be told")
    return exposition("exact"), bench_energy(bench)


def bench_energy(bench: Bench) -> float:
    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(bench.gpu)) / 1000


def killed(bench: Bench, *more: str) -> None:
    with bench.loads([(40, 100), (10, 100), (30, 100)], *more) as tenants, bench.exporters(tenants, ["exact"]):
        time.sleep(6)
        before, began = just_told(), time.monotonic()
        time.sleep(8)
        tenants[2].kill()
        at_kill = time.monotonic()
        time.sleep(7)  # 15 in all: use is told every 5 s
        after, ended = exposition("exact"), time.monotonic()
        time.sleep(1.2)
        for tenant, until in zip(tenants, (ended, ended, at_kill), strict=True):
            told = value(after, BUSY, tenant.pod) - value(before, BUSY, tenant.pod)
            truth = worked(tenant, began, until)
            off = 100 * abs(told - truth) / (ended - began)
            name = " ".join([tenant.pod[-1], *more])
            bench.check(f"kill -9 in the middle: {name} told {told:.2f} s of {truth:.2f} s", off <= POINTS)
        bench.check(f"kill -9: still exact, doubts {doubts(after)}", method_of(after) == "exact")


def killed_cool(bench: Bench) -> None:
    """The same below the power limit, where the loads' accounts are right."""
    killed(bench, "cool")


def restarted(bench: Bench) -> None:
    with bench.loads([(40, 100), (10, 100), (10, 100)]) as tenants:
        with bench.exporters(tenants, ["exact"]):
            time.sleep(4)
        with bench.exporters(tenants, ["exact"]):
            wait_for(lambda: method_of(exposition("exact")) == "exact", 15, "exact after a restart")
            before, began = exposition("exact"), time.monotonic()
            time.sleep(15)
            after, ended = exposition("exact"), time.monotonic()
            time.sleep(1.2)
        for tenant in tenants:
            told = 100 * (value(after, BUSY, tenant.pod) - value(before, BUSY, tenant.pod)) / (ended - began)
            truth = 100 * worked(tenant, began, ended) / (ended - began)
            bench.check(f"restarted: {told:.1f} of {truth:.1f} %", abs(told - truth) <= 1.5 * POINTS)


def unprivileged(bench: Bench) -> None:
    drop = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    with bench.loads([(40, 100), (10, 100)]) as tenants, bench.exporters(tenants, ["exact"], *drop):
        wait_for(lambda: method_of(exposition("exact")) not in ("", "samples"), 20, "another method than samples")
        bench.check(
            f"without CAP_SYS_ADMIN: {method_of(exposition('exact'))}", method_of(exposition("exact")) == "switches"
        )
    with bench.loads([(40, 100), (10, 100)], user=65534) as tenants, bench.exporters(tenants, ["switches"], *drop):
        wait_for(lambda: "hidden_process" in doubts(exposition("switches")), 20, "a doubt")
        text = exposition("switches")
        bench.check(f"beside another user: {method_of(text)}, {doubts(text)}", method_of(text) == "samples")


def fast(bench: Bench) -> None:
    with bench.loads([(0.05, 0.05)] * 6) as tenants, bench.exporters(tenants, METHODS) as pids:
        time.sleep(6)
        cpu = {m: cpu_seconds(pid) for m, pid in pids.items()}
        before, began = exposition("exact"), time.monotonic()
        switches = count_switches(bench, 60)
        after, seconds = exposition("exact"), time.monotonic() - began
        lost = {m: doubts(exposition(m)) for m in METHODS}
        used = {m: 100 * (cpu_seconds(pid) - cpu[m]) / seconds for m, pid in pids.items()}
        time.sleep(1.2)
        told = [100 * (value(after, BUSY, t.pod) - value(before, BUSY, t.pod)) / seconds for t in tenants]
        truth = [100 * worked(t, began, began + seconds) / seconds for t in tenants]
        memory = {m: resident_mib(pid) for m, pid in pids.items()}
    row = {"scenario": "thousands a second", "truth": truth, "exact": told, "cpu_percent": used}
    bench.rows.append(row | {"switches_per_second": switches / seconds})
    print(json.dumps(bench.rows[-1]), memory, flush=True)
    bench.check(f"{switches / seconds:.0f} switches a second (5,000 are wanted)", switches >= 5000 * seconds)
    bench.check(f"… none lost, {lost}, method {method_of(after)}", not any(lost.values()))
    bench.check(f"at most 5 % of a core ({used['exact']:.1f} and {used['switches']:.1f} %)", max(used.values()) <= 5)


def count_switches(bench: Bench, seconds: float) -> int:
    """By a listener of its own, from now on. Says where records are missing."""
    place, version = pynvml.nvmlDeviceGetPciInfo(bench.gpu).busId, pynvml.nvmlSystemGetDriverVersion()
    check_driver(version)
    log, records, count = ContextSwitchLog(place, 0), RecordDecoder(), 0
    until = time.monotonic() + seconds
    with closing(log):
        while time.monotonic() < until:
            time.sleep(0.5)
            try:
                count += sum(resident for resident, *_ in records.decode(log.drain()))
            except SwitchLogError as e:
                print(f"      the script's own listener, after {count} switches: {e}", flush=True)
                records = RecordDecoder()
    return count


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "bench-out")
    out.mkdir(parents=True, exist_ok=True)
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    lines = kernel_lines()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        bench = Bench(Path(folder), gpu)
        words = sys.argv[2:] or [""]
        for name, (bursts, pauses) in SCENARIOS.items():
            if any(word in name for word in words):
                kinds = [kind for kind in ("fp32", "cool") if kind in name]
                compare(bench, name, bursts, *(["random"] if pauses else []), *kinds)
        for probe in (alone, killed, killed_cool, restarted, unprivileged, fast):
            if any(word in probe.__name__ for word in words):
                probe(bench)
        mps = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(gpu)
        bench.check(f"no process is taken for a client of MPS ({len(mps)})", not mps)
        grown = kernel_lines()[len(lines) :]
        bench.check(f"nothing new in the kernel's log {grown[-3:]}", not grown)
    (out / "usage_methods.json").write_text(json.dumps(bench.rows, indent=1))
    print("WRONG: " + "; ".join(bench.wrong) if bench.wrong else "all within limits")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
