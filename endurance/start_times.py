"""Bills a hundred jobs of 20 s with a real Prometheus, with and without start times of counters.

    python -m endurance.start_times --prometheus PATH --every 5

Needs Prometheus 3.12 (`use-start-timestamps`) and takes three minutes. Jobs run in real time on a
simulated node, and an exporter serves their metrics.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.fleet.real_servers import prometheus
from tests.metrics.test_opencost import ask
from tests.test_billing import Job, Node, schedule
from tests.web.server import running

JOBS = 100
SECONDS = 20.0
ZERO = "created-timestamp-zero-ingestion"
VARIANTS = {
    "no start times": ("", ""),
    "zero ingestion": (ZERO, ""),
    "zero ingestion, anchored": (f"{ZERO},promql-extended-range-selectors", " anchored"),
    "stored start times": ("st-storage,xor2-encoding,use-start-timestamps", ""),
}
"""Name -> features of Prometheus, and the modifier of the range."""
LEVELS = ("container", "namespace")
FIGURES = ("allocated_seconds", "busy_seconds", "energy_joules")


class RealTimeNode(Node):
    """Its wall clock is that of this machine, because Prometheus rejects other times."""

    _unix_at_zero = time.time() - 1000.0  # the simulated time starts at 1000

    def wall(self) -> float:
        return self._unix_at_zero + self.time


def make_jobs() -> list[Job]:
    """Returns jobs that start at random times within 80 s, each on a slot of its own."""
    random = Random(47)
    jobs = []
    free: dict[tuple[int, int], float] = {}
    for job in schedule(random)[:JOBS]:
        begins = free.get((job.gpu, job.slot), random.uniform(0, 15))
        free[job.gpu, job.slot] = begins + SECONDS + random.uniform(1, 5)
        ends = begins + SECONDS
        working = replace(job, begins=begins, ends=ends, duty=max(job.duty, 0.15))
        jobs.append(replace(working, process_begins=begins + 0.5, process_ends=ends - 0.5))
    return jobs


def run_in_real_time(node: Node, jobs: list[Job], until: float) -> None:
    events = [event for job in jobs for event in node.job_events(job)]
    events += node.turn_events(until)
    start = node.time
    began = time.monotonic()
    for at, run in sorted(events, key=lambda event: event[0]):
        time.sleep(max(0.0, began + at - time.monotonic()))
        node.truth.advance(start + at)
        node.time = start + at
        run()


def add_up(server: str, span: str, level: str) -> dict[str, float]:
    sums = {}
    for figure in FIGURES:
        metric = f"podgpu_{level}_gpu_{figure}_total"
        answers = ask(server, f"sum(increase({metric}{span}))")
        sums[figure] = sum(value for _, value in answers)  # no answer: no series had two samples
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", type=Path, required=True, help="binary of Prometheus 3")
    parser.add_argument("--every", type=int, default=5, help="seconds between scrapes")
    options = parser.parse_args()
    os.environ["PATH"] = f"{options.prometheus.resolve().parent}:{os.environ['PATH']}"

    jobs = make_jobs()
    until = max(job.ends for job in jobs) + 3 * options.every
    folder = Path(tempfile.mkdtemp(prefix="podgpu-start-"))
    node = RealTimeNode(folder)
    with node.kubelet, running(node.agent) as client:
        target = f"{client.address.host}:{client.address.port}"
        job = (
            f"{{job_name: podgpu, honor_labels: true, static_configs: [{{targets: ['{target}']}}]}}"
        )
        text = f"{{global: {{scrape_interval: {options.every}s}}, scrape_configs: [{job}]}}"
        with ExitStack() as stack:
            servers = {}
            for name, (features, _) in VARIANTS.items():
                own = folder / name
                own.mkdir()
                flags = [f"--enable-feature={features}"] if features else []
                server = prometheus(own, configuration=text, options=flags)
                servers[name] = stack.enter_context(server)
            # Prometheus needs a scrape before the first job starts.
            node.agent.read_telemetry()
            worker = threading.Thread(target=run_in_real_time, args=(node, jobs, until))
            worker.start()
            worker.join()
            answers = {}
            for name, (_, modifier) in VARIANTS.items():
                span = f"[{until + 60:.0f}s]{modifier}"
                for level in LEVELS:
                    sums = add_up(servers[name], span, level)
                    answers[f"increase() by {level}, {name}"] = sums

    truth = dict.fromkeys(FIGURES, 0.0)
    for (figure, _), amount in node.truth.bill.items():
        truth[figure] += amount
    counted = dict.fromkeys(FIGURES, 0.0)
    for usage in node.agent.published.state.namespaces:
        counted["allocated_seconds"] += (usage.allocated_ns or 0) / 1e9
        counted["busy_seconds"] += (usage.busy_ns or 0) / 1e9
        counted["energy_joules"] += (usage.energy_mj or 0) / 1e3
    for name, sums in {"exporter's namespace counters": counted, **answers}.items():
        parts = [f"{figure} {100 * sums[figure] / truth[figure]:.1f} %" for figure in FIGURES]
        print(f"{name}: {', '.join(parts)} of the truth")


if __name__ == "__main__":
    main()
