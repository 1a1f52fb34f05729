"""Adds a neighbour on the GPU of a running job, and prints what the detector of slow GPUs says. Takes
less than 240 seconds:

    python tests/device/slow_sibling.py [OUTPUT_DIRECTORY]

A job works alone for 150 s. Then another pod uses the same GPU for 45 s, and leaves. The detector
averages over 4 s instead of a minute, so that the job has a past after 150 s. Clocks and power
limits stay as they are. With one GPU, a job has no siblings: two pods on it share its clock and
power. So this shows only the comparison of a GPU with its own past, and only on this load.

Needs root, one NVIDIA GPU, cgroup v2 and PyTorch. Exits 1 if the detector does not name the waiting
within 60 s, or names anything before the neighbour comes.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from shared_gpu import PORTS, SharedGpu

from podgpu.fleet.jobs import JobKey
from podgpu.fleet.read.scrape import ScrapeCollector
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.model import PodName, WorkloadOwner

METHOD = "exact"
ALONE, TOGETHER, AFTER = 150.0, 45.0, 30.0
MINUTE = 4.0
JOB_BURST, NEIGHBOUR_BURST = (36, 40), (20, 40)
JOB = JobKey("", "shared", "Job", "train")
SETTINGS = ViewSettings(
    interval=1.0, stale_after=5.0, drop_after=60.0, window=10.0, compared_seconds=MINUTE
)


def read_row(cluster: Cluster) -> dict[str, Any]:
    """Returns the values of the job's GPU, and what the detector says."""
    state = cluster.published.state
    row: dict[str, Any] = {}
    for gpu in state.jobs.get(JOB, {}).values():
        row |= gpu.sample._asdict()
    slow = state.slow.get(JOB)
    if slow is not None:
        row["slow"] = f"{slow.reason} {slow.difference:.3f} against {slow.against}"
    return row


def watch(cluster: Cluster, seconds: float, phase: str, rows: list[dict[str, Any]]) -> None:
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        time.sleep(1.0)
        elapsed = time.monotonic() - began
        rows.append({"phase": phase, "at": round(elapsed, 1)} | read_row(cluster))
        if len(rows) % 5 == 1 or rows[-1].get("slow") != rows[-2].get("slow"):
            print(json.dumps(rows[-1]), flush=True)


def find_reports(rows: list[dict[str, Any]], phase: str) -> dict[str, float]:
    """Returns the reasons of a phase, with the time of the first report."""
    reports: dict[str, float] = {}
    for row in rows:
        if row["phase"] == phase and "slow" in row:
            reports.setdefault(row["slow"].split()[0], row["at"])
    return reports


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    bench = SharedGpu(folder)
    rows: list[dict[str, Any]] = []
    options = ("-c", "1000", "-f", "dcp")
    # Both calibrate alone, before one of them is stopped.
    with bench.loads([JOB_BURST]) as [train], bench.loads([NEIGHBOUR_BURST]) as [neighbour]:
        assert neighbour.process is not None
        pause = partial(neighbour.process.send_signal, signal.SIGSTOP)
        go_on = partial(neighbour.process.send_signal, signal.SIGCONT)
        pause()
        owners: dict[PodName, WorkloadOwner] = {
            ("shared", train.pod): WorkloadOwner(JOB.kind, JOB.name)
        }
        url = f"http://127.0.0.1:{PORTS[METHOD]}/metrics"
        collector = partial(ScrapeCollector, lambda: [url], SETTINGS, read_owners=lambda: owners)
        cluster = Cluster(collector, SETTINGS)
        with bench.exporters([train, neighbour], [METHOD], *options):
            cluster.start(lambda: None)
            watch(cluster, ALONE, "alone", rows)
            go_on()
            watch(cluster, TOGETHER, "together", rows)
            pause()
            watch(cluster, AFTER, "after", rows)
            cluster.stop()
        go_on()

    (folder / "slow_sibling.json").write_text(json.dumps(rows))
    alone, together, after = (find_reports(rows, phase) for phase in ("alone", "together", "after"))
    print(f"reports: alone {alone}, together {together}, after {after}")
    bench.check("nothing is slow before the neighbour comes", not alone)
    bench.check("the waiting is named", "waiting" in together)
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
