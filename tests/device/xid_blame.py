"""Causes XIDs 13, 31 and 43 in three containers on one GPU, and checks whom podgpu names:

    python tests/device/xid_blame.py [FAULTS]

Two exporters watch the GPU at the same time: one reads the kernel log, the other only has the log
of context switches. Prints for each the number of faults that are named right, wrong and unknown.
100 faults take about four minutes. All faults are bugs of the program `faults.cu` and harmless.

Needs root, one Hopper GPU, cgroup v2, /dev/kmsg, and nvcc or `device-scratch/faults`, which
`python tests/device/xid_blame.py build` compiles. Exits 1 if a name is wrong, or if fewer than 99 %
are right.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_name("faults.cu")
PROGRAM = SOURCE.parents[2] / "device-scratch" / "faults"
KINDS = (13, 31, 43)
PODS = ("red", "green", "blue")
EXPORTERS = {
    "with the kernel log": (9490, ("--path-kmsg", "/dev/kmsg")),
    "with context switches only": (9491, ("--path-kmsg", "none")),
}
WORK_SECONDS = 1.6  # between two faults; a new process needs 0.5 s to start
LATEST = 4.0  # an XID is reported at most this long after its launch
WARM_UP_SECONDS = 3.0


def build() -> None:
    PROGRAM.parent.mkdir(exist_ok=True)
    target = ("-gencode", "arch=compute_90,code=sm_90")
    command = ["nvcc", "-O2", "-cudart", "static", *target, "-o", str(PROGRAM), str(SOURCE)]
    subprocess.run(command, check=True)


def can_run() -> bool:
    try:
        return subprocess.run([PROGRAM], check=False).returncode == 2  # it has no arguments
    except OSError:
        return False


class Fault(NamedTuple):
    at: float
    pod: str
    kind: int
    pid: int


class Named(NamedTuple):
    """What an exporter reported: an XID and its culprit."""

    at: float
    xid: int
    pod: str
    pid: int
    new: int  # number of XIDs of this pod since the last reading


@dataclass
class Watch:
    """Collects the culprits and XIDs that one exporter reports."""

    port: int
    named: set[Named] = field(default_factory=set)
    totals: Counter[int] = field(default_factory=Counter)
    of_pods: dict[tuple[str, int], int] = field(default_factory=dict)  # by pod and XID

    def read(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/api/v1/node"
        with urllib.request.urlopen(url, timeout=5) as answer:
            document: dict[str, Any] = json.load(answer)
        gpu = document["devices"][0]
        for xid in gpu.get("xids", ()):
            self.totals[xid["xid"]] = xid["total"]
            for culprit in xid.get("culprits", ()):
                pod = culprit.get("pod", "")
                pid = culprit.get("pid", 0)
                new = culprit["total"] - self.of_pods.get((pod, xid["xid"]), 0)
                self.of_pods[pod, xid["xid"]] = culprit["total"]
                if new:
                    self.named.add(Named(culprit["last_seen"], xid["xid"], pod, pid, new))
        return gpu


def kernel_lines() -> list[str]:
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
    return [line for line in log.stdout.splitlines() if "NVRM: Xid" in line]


def judge(faults: Sequence[Fault], watch: Watch) -> Counter[str]:
    """Compares the culprits with the truth. A fault is wrong if anybody else is named for it."""
    verdicts: Counter[str] = Counter()
    for number, fault in enumerate(faults):
        until = fault.at + LATEST
        if number + 1 < len(faults):
            until = min(until, faults[number + 1].at)
        pods = {one.pod for one in watch.named if fault.at <= one.at < until}
        verdict = "unknown"
        if pods == {fault.pod} or (not pods and is_named_with_next(fault, until, watch)):
            verdict = "right"
        elif pods:
            verdict = "wrong"
            print(f"  wrong: XID {fault.kind} of {fault.pod} (pid {fault.pid}): {sorted(pods)}")
        if verdict == "unknown":
            lines = [line for line in kernel_lines() if f"pid={fault.pid}," in line]
            print(f"  unknown: XID {fault.kind} of {fault.pod}; {len(lines)} kernel lines: {lines}")
        verdicts[verdict] += 1
        verdicts[f"{fault.kind} {verdict}"] += 1
    return verdicts


def is_named_with_next(fault: Fault, until: float, watch: Watch) -> bool:
    """Returns True if the cause of two faults of a pod was reported at once. Only the time of the
    last one is in the JSON.
    """
    later = [one for one in watch.named if one.pod == fault.pod and one.at >= until]
    return bool(later) and min(later).new >= 2


@contextmanager
def running_exporters(socket: str) -> Iterator[dict[str, Watch]]:
    from shared_gpu import wait_for

    processes = []
    watches = {}
    for name, (port, options) in EXPORTERS.items():
        given = ["-k", "-a", f"127.0.0.1:{port}", "--usage-from", "exact", "-c", "1000", *options]
        given += ["--pod-resources-kubelet-socket", socket]
        processes.append(subprocess.Popen([sys.executable, "-m", "podgpu", "exporter", *given]))
        watches[name] = Watch(port)
    try:
        for name, watch in watches.items():
            wait_for(lambda one=watch: one.read().get("holders"), 40, f"the exporter {name}")
        yield watches
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


def check_syslog() -> None:
    """Prints whether the log can be read without /dev/kmsg, as a container with CAP_SYSLOG does."""
    from podgpu.node.gpu.nvml import kernel_log

    log = kernel_log.KernelLog(kernel_log.DEFAULT_PATH, time.time)
    log.close()
    log._last_stamp = 0.0
    lines = log.poll()
    print(f"system call syslog: {len(lines)} XID lines with a process in the last 64 KiB")


def main() -> int:
    from shared_gpu import SharedGpu, Tenant

    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    if not can_run():
        build()
    chance = random.Random(46)
    plan = [(PODS[n % 3], KINDS[n // 3 % 3]) for n in range(wanted)]
    chance.shuffle(plan)
    print("driver:", Path("/proc/driver/nvidia/version").read_text().splitlines()[0])
    restrict = Path("/proc/sys/kernel/dmesg_restrict").read_text().strip()
    print(f"kernel.dmesg_restrict: {restrict}")

    with tempfile.TemporaryDirectory() as folder:
        bench = SharedGpu(Path(folder))
        kinds_of = {pod: [kind for name, kind in plan if name == pod] for pod in PODS}
        counts: Counter[str] = Counter()

        def start(pod: str) -> tuple[Tenant, Path]:
            number = counts[pod]
            counts[pod] += 1
            kinds = kinds_of[pod]
            kind = kinds[number] if number < len(kinds) else 43
            go = Path(folder, f"go-{pod}-{number}")
            tenant = Tenant(pod, Path(folder, "log"), [str(PROGRAM), str(kind), str(go)])
            tenant.start()
            return tenant, go

        running = {pod: start(pod) for pod in PODS}
        tenants = [tenant for tenant, _ in running.values()]
        faults = []
        with bench.kubelet(tenants) as socket, running_exporters(socket) as watches:
            time.sleep(WARM_UP_SECONDS)
            for pod, kind in plan:
                tenant, go = running[pod]
                process = tenant.process
                assert process is not None
                fault = Fault(time.time(), pod, kind, process.pid)
                go.touch()
                if process.wait(20) != 0:
                    print(f"{pod}: pid {process.pid} ended without a fault")
                else:
                    faults.append(fault)
                running[pod] = start(pod)
                until = time.monotonic() + WORK_SECONDS * chance.uniform(0.8, 1.3)
                while time.monotonic() < until:
                    for watch in watches.values():
                        watch.read()
                    time.sleep(0.25)
            for _ in range(12):
                time.sleep(0.5)
                gpus = [watch.read() for watch in watches.values()]
            conditions = [condition["name"] for condition in gpus[0].get("conditions", ())]
            healthy = gpus[0].get("healthy", [])
            print(f"conditions: {conditions}; absent: {healthy}")
            fabric = {name: value for name, value in gpus[0]["fields"].items() if "FABRIC" in name}
            print(f"fabric: {fabric}")
        for tenant, _ in running.values():
            tenant.kill()
        check_syslog()

    failed = False
    for name, watch in watches.items():
        print(f"\n{name}: {len(faults)} faults, XIDs by NVML: {dict(watch.totals)}")
        verdicts = judge(faults, watch)
        for kind in KINDS:
            row = [
                f"{verdict} {verdicts[f'{kind} {verdict}']}"
                for verdict in ("right", "wrong", "unknown")
            ]
            print(f"  kind {kind}: {', '.join(row)}")
        print(
            f"  all: right {verdicts['right']}, wrong {verdicts['wrong']}, "
            f"unknown {verdicts['unknown']}"
        )
        failed |= verdicts["wrong"] > 0
        failed |= verdicts["right"] < 0.99 * len(faults)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        build()
    else:
        sys.exit(main())
