"""Scale: 100,000 GPUs (12,500 nodes of 8) as series in a real VictoriaMetrics, read by `podgpu
cluster --prometheus`.

Every GPU has a pod. The series of the last minutes and the recorded hours of 30 days are imported.
Only series for the totals and the Waste view are imported, so the server's figures exclude the
exporters' other series.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.figures import Figure

GPUS, GPUS_PER_NODE, OWNERS, NAMESPACES, DAYS = 100_000, 8, 2000, 100, 30
MAX_HEAD_SECONDS, MAX_WASTE_SECONDS, MAX_MIB = 2.0, 5.0, 200
MAX_SAVINGS_SECONDS = 10.0
HOUR, STEP = 3600, 300
_MODEL = "NVIDIA H100 80GB HBM3"
_KINDS = {"allocated": 1.0, "busy": 0.5, "idle": 0.25, "energy": 400.0}  # per GPU second
_PAGES = {  # what is shown -> parameters of /api/v1/view
    "without a filter": "page=1",
    "of a namespace": "ns=team-7",
    "of a pod": "ns=team-7&pod=job-7-3",
    "of a node": "node=node-77",
    "by a filter text": "q=job-7-",
    "most utilised": "sort=utilization",
    "most idle": "sort=idle&state=idle",
}
_PODS_PER_QUIET, _QUIET = 160, 0.1
_LINES_PER_IMPORT = 20_000
_PATIENCE = 120.0


def device_series(gpus: int, owners: int, now: int) -> Iterator[dict[str, Any]]:
    """Yields the series of each GPU."""
    times = _times_around(now)
    for number in range(gpus):
        place = {"job": "podgpu", "instance": f"10.{number // 8 // 250}.{number // 8 % 250}:9400"}
        gpu = {
            **place,
            "UUID": f"GPU-{number:08x}",
            "modelName": _MODEL,
            "Hostname": f"node-{number // GPUS_PER_NODE}",
        }
        owner = number % owners
        pod = {
            "namespace": f"team-{owner % NAMESPACES}",
            "pod": f"job-{owner}-{number // owners}",
            "container": "main",
        }
        for name, labels, values in (
            ("DCGM_FI_DEV_GPU_TEMP", gpu, [60] * len(times)),
            ("DCGM_FI_DEV_POWER_USAGE", gpu, [400] * len(times)),
            ("DCGM_FI_DEV_GPU_UTIL", gpu, [number % 101] * len(times)),
            ("podgpu_allocation_info", {**gpu, **pod}, [1] * len(times)),
            (
                "podgpu_container_gpu_allocated_seconds_total",
                {**gpu, **pod},
                [STEP * n for n in range(len(times))],
            ),
            (
                "podgpu_container_gpu_idle_seconds_total",
                {**gpu, **pod},
                [STEP / 4 * n for n in range(len(times))],
            ),
        ):
            yield {"metric": {"__name__": name, **labels}, "values": values, "timestamps": times}


def _times_around(now: int) -> list[int]:
    """Returns milliseconds from 10 minutes ago until 20 minutes from now, because the import takes
    minutes.
    """
    return [at * 1000 for at in range(now - 2 * STEP, now + 4 * STEP + 1, STEP)]


def recorded_series(gpus: int, owners: int, now: int) -> Iterator[dict[str, Any]]:
    """Yields the samples that the recording rules would have stored: hours of 30 days, and the last
    5 minutes.
    """
    hours = [at * 1000 for at in range(now // HOUR * HOUR - (DAYS * 24 - 1) * HOUR, now + 1, HOUR)]
    gpus_of_owner = gpus / owners
    rows = [({"kind": "gpu_seconds"}, float(gpus)), ({"kind": "broken_seconds"}, gpus / 1000)]
    for number in range(owners):
        owner = {
            "namespace": f"team-{number % NAMESPACES}",
            "owner_kind": "Job",
            "owner_name": f"job-{number}",
        }
        rows += [
            ({**owner, "kind": kind}, gpus_of_owner * amount) for kind, amount in _KINDS.items()
        ]
    for labels, per_second in rows:
        metric = {"modelName": _MODEL, **labels}
        values = [per_second * HOUR] * len(hours)
        yield {
            "metric": {"__name__": "podgpu:usage:sum1h", **metric},
            "values": values,
            "timestamps": hours,
        }
        name = "podgpu:usage:increase5m"
        times = _times_around(now)
        yield {
            "metric": {"__name__": name, **metric},
            "values": [per_second * STEP] * len(times),
            "timestamps": times,
        }


def savings_series(gpus: int, owners: int, now: int) -> Iterator[dict[str, Any]]:
    """Yields what the rules of savings would have stored in a week. One of 160 pods is quiet.

    The numbers of every 5 minutes are those of quiet pods only: podgpu reads no others.
    """
    hours = [at * 1000 for at in range(now // HOUR * HOUR - 7 * 24 * HOUR, now + 1, HOUR)]
    steps = [at * 1000 for at in range(now - 7 * 24 * HOUR, now + 1, STEP)]
    for number in range(gpus):
        owner = number % owners
        pod = {
            "namespace": f"team-{owner % NAMESPACES}",
            "pod": f"job-{owner}-{number // owners}",
            "container": "main",
        }
        uuid = {"UUID": f"GPU-{number:08x}"}
        is_quiet = number % _PODS_PER_QUIET == 0
        unused = 1 - _QUIET if is_quiet else 0.1
        yield _make_series("podgpu:savings:unused1h", pod | uuid, unused, hours)
        if not is_quiet:
            continue
        place = {"instance": f"10.{number // 8 // 250}.{number // 8 % 250}:9400"}
        gpu = {"job": "podgpu", **uuid, **place, "modelName": _MODEL}
        memory = 10 * 2**30
        yield _make_series("podgpu:savings:step5m", pod | uuid, _QUIET * STEP, steps)
        yield _make_series("podgpu:savings:memory1h", {"of": "device"} | uuid, memory, hours)
        yield _make_series(
            "podgpu:savings:memory1h", {"of": "container"} | pod | uuid, memory, hours
        )
        for name, mebibytes in (("DCGM_FI_DEV_FB_USED", 10_240), ("DCGM_FI_DEV_FB_FREE", 71_680)):
            yield _make_series(name, gpu, mebibytes, _times_around(now))


def _make_series(
    name: str, labels: dict[str, str], value: float, times: list[int]
) -> dict[str, Any]:
    values = [value] * len(times)
    return {"metric": {"__name__": name, **labels}, "values": values, "timestamps": times}


def import_series(url: str, series: Iterator[dict[str, Any]]) -> None:
    lines: list[str] = []
    for one in series:
        lines.append(json.dumps(one))
        if len(lines) == _LINES_PER_IMPORT:
            _request(f"{url}/api/v1/import", "\n".join(lines).encode())
            lines.clear()
    _request(f"{url}/api/v1/import", "\n".join(lines).encode())
    _request(f"{url}/internal/force_flush")


def _request(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(url, body, timeout=_PATIENCE) as answer:
        content: bytes = answer.read()
        return content


@contextmanager
def running(command: list[str], url: str, is_ready: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + _PATIENCE
            while True:
                try:
                    _request(url + is_ready)
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{command[0]} does not start") from None
                    time.sleep(0.2)
            yield process
        finally:
            process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _resident_mib(process: subprocess.Popen[bytes]) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Returns the CPU time of all threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_for_savings(cluster: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while b"podgpu_savings_gpus" not in _request(f"{cluster}/metrics"):
        if time.monotonic() > deadline:
            raise RuntimeError("no metrics of savings")
        time.sleep(1.0)


def measure(gpus: int = GPUS, owners: int = OWNERS) -> list[Figure]:
    if shutil.which("victoria-metrics") is None:
        raise RuntimeError("victoria-metrics is not installed")
    engine_port, port = _free_port(), _free_port()
    engine, cluster = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder:
        command = [
            "victoria-metrics",
            f"-storageDataPath={folder}",
            f"-httpListenAddr=127.0.0.1:{engine_port}",
        ]
        command += ["-retentionPeriod=1y", "-search.maxUniqueTimeseries=2000000"]
        with running(command, engine, "/health") as server:
            now = int(time.time()) // STEP * STEP
            started = time.monotonic()
            import_series(engine, recorded_series(gpus, owners, now))
            import_series(engine, device_series(gpus, owners, now))
            import_series(engine, savings_series(gpus, owners, now))
            imported = time.monotonic() - started
            command = [
                sys.executable,
                "-m",
                "podgpu",
                "cluster",
                "--prometheus",
                engine,
                "-a",
                f"127.0.0.1:{port}",
            ]
            with running(
                # The samples are 5 minutes apart.
                [*command, "--prices", "example", "--owners", "none", "--stale-after", "20m"],
                cluster,
                "/ready",
            ) as podgpu:
                view = json.loads(_request(f"{cluster}/api/v1/view"))
                head = _read_round_seconds(cluster)
                seconds, waste = _measure(f"{cluster}/api/v1/waste?range={DAYS}d&by=owner")
                pages = {
                    name: _measure(f"{cluster}/api/v1/view?{query}")
                    for name, query in _PAGES.items()
                }
                # For metrics, podgpu computes savings itself. Another limit is another question.
                _wait_for_savings(cluster)
                cpu = _cpu_seconds(podgpu) + _cpu_seconds(server)
                query = "range=7d&slowdown=1.2"
                savings_seconds, savings = _measure(f"{cluster}/api/v1/savings?{query}")
                cpu = _cpu_seconds(podgpu) + _cpu_seconds(server) - cpu
                memory = _resident_mib(podgpu)
            engine_memory = _resident_mib(server)
            disk = (
                sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
                / 2**20
            )
    _check(gpus, owners, view, waste)
    _check_savings(gpus, savings)
    wrong = {name: answer["notes"] for name, (_, answer) in pages.items() if not answer["nodes"]}
    if wrong or pages["of a pod"][1]["found"] != 1:
        raise RuntimeError(f"wrong pages: {wrong}")
    return [
        Figure(f"{gpus:,} GPUs: totals of the page", head, "s", at_most=MAX_HEAD_SECONDS),
        *(Figure(f"GPUs {name}", duration, "s") for name, (duration, _) in pages.items()),
        Figure(
            f"waste of {DAYS} days by owner ({owners:,} owners)",
            seconds,
            "s",
            at_most=MAX_WASTE_SECONDS,
        ),
        Figure("savings of 7 days", savings_seconds, "s", at_most=MAX_SAVINGS_SECONDS),
        Figure("  podgpu cluster and VictoriaMetrics: CPU", cpu, "s"),
        Figure("podgpu cluster: peak memory", memory, "MiB", at_most=MAX_MIB),
        Figure("  VictoriaMetrics: peak memory", engine_memory, "MiB"),
        Figure("  VictoriaMetrics: disk", disk, "MiB"),
        Figure("  import", imported, "s"),
    ]


def _read_round_seconds(cluster: str) -> float:
    """Returns the duration of the last round."""
    lines = _request(f"{cluster}/metrics").decode().splitlines()
    return max(
        float(line.split()[-1])
        for line in lines
        if line.startswith("podgpu_cluster_target_duration_seconds{")
    )


def _measure(url: str) -> tuple[float, dict[str, Any]]:
    started = time.monotonic()
    answer: dict[str, Any] = json.loads(_request(url))
    return time.monotonic() - started, answer


def _check(gpus: int, owners: int, view: dict[str, Any], waste: dict[str, Any]) -> None:
    totals = view["totals"]
    idle_hours = gpus * _KINDS["idle"] * DAYS * 24
    if (
        totals["gpus"] != gpus
        or abs(totals["idle"] - gpus / 4) > 1
        or waste["source"] != "podgpu:usage:sum1h"
    ):
        raise RuntimeError(
            f"wrong totals: {totals}, {view['notes']}, {waste['source']}, {waste['notes']}"
        )
    if len(waste["rows"]) != owners or abs(waste["totals"]["idle_hours"] / idle_hours - 1) > 0.005:
        raise RuntimeError(f"wrong waste: {waste['totals']}")


def _check_savings(gpus: int, answer: dict[str, Any]) -> None:
    """Quiet pods share GPUs, two by two."""
    totals = answer["totals"]
    quiet = min(600, -(-gpus // _PODS_PER_QUIET))
    if abs(totals["before"]["gpus"] - gpus) > 1 or totals["saved"]["gpus"] < quiet // 2:
        raise RuntimeError(f"wrong savings: {totals}, {answer['notes']}, {answer['left_out']}")
