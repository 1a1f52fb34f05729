"""Every query of the shipped dashboards, and of NVIDIA's dashboard 12239, returns data from a real
Prometheus.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from podgpu.past.savings_watch import SavingsWatch
from podgpu.past.sqlite.sqlite_past import SqlitePast
from tests.deploy.fleet import ROOT, Fleet, fleet_in, needs_servers
from tests.deploy.grafana import (
    DASHBOARDS,
    Asked,
    as_sent,
    everything_chosen,
    label_values,
    panels,
    queries,
    several,
    variables,
)
from tests.fleet.real_servers import expositions_at
from tests.net import free_port
from tests.nodes.clock import wait_until
from tests.past.savings_world import record_with
from tests.process import podgpu

each_dashboard = pytest.mark.parametrize("name", DASHBOARDS)

NVIDIA_12239 = (
    'DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"}',
    'avg(DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"})',
    'DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"}',
    'sum(DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"})',
    'DCGM_FI_DEV_SM_CLOCK{instance=~"$instance", gpu=~"$gpu"} * 1000000',
    'DCGM_FI_DEV_GPU_UTIL{instance=~"$instance", gpu=~"$gpu"}',
    'DCGM_FI_DEV_FB_USED{instance=~"$instance", gpu=~"$gpu"}',
    'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~"$instance", gpu=~"$gpu"}',
)
"""Queries of dashboard 12239. Both variables are label_values(DCGM_FI_DEV_GPU_TEMP, …)."""


@contextmanager
def serving_savings() -> Iterator[str]:
    """Yields HOST:PORT of the metrics of savings. They need a day of history."""
    cluster, recorder, run_round = record_with(26)
    watch = SavingsWatch(SqlitePast(recorder, lambda: cluster.published.state))
    watch.update()
    cluster.read_savings = watch.read
    run_round()
    recorder.stop()
    lines = cluster.published.metrics.plain.decode().splitlines(keepends=True)
    text = "".join(line for line in lines if "podgpu_savings_" in line)
    with expositions_at(lambda name: text) as address:
        yield address


@contextmanager
def serving_engine() -> Iterator[str]:
    """Yields HOST:PORT of the metrics of an LLM engine."""

    def write(name: str) -> str:
        tokens = round(1000 * time.time())
        return f'vllm:generation_tokens_total{{model_name="llama"}} {tokens}\n'

    with expositions_at(write) as address:
        yield address


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A fleet with data for every panel: an error, a lasting alert, a failed source, an idle
    holder.

    The first node has the names of dcgm-exporter 4.8, the second those of 4.9.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pg", dir="/tmp")))
        port = free_port()  # chosen first, because Prometheus needs it at its start
        job: dict[str, Any] = {"job_name": "podgpu-cluster", "honor_labels": True}
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        savings: dict[str, Any] = {"job_name": "savings", "honor_labels": True}
        savings["static_configs"] = [{"targets": [stack.enter_context(serving_savings())]}]
        engine: dict[str, Any] = {"job_name": "engine"}
        labels = {"namespace": "serving", "pod": "chat-0"}
        target = {"targets": [stack.enter_context(serving_engine())], "labels": labels}
        engine["static_configs"] = [target]
        running = stack.enter_context(fleet_in(folder, [job, savings, engine], ("4.8", "4.9")))
        (folder / "prices.yaml").write_text("currency: EUR\nmodels: {'*': {gpu_hour: 2.5}}\n")
        targets = ",".join(f"http://{node.instance}/metrics" for node in running.nodes)
        options = (
            "--scrape",
            targets,
            "--interval",
            "500ms",
            "--window",
            "5s",
            "--idle-after",
            "1s",
        )
        prices = ("--prices", str(folder / "prices.yaml"))
        stack.enter_context(podgpu(("cluster", *options, *prices), folder, port=port))
        first = running.nodes[0]
        first.driver.faults.raise_xid(0, 31)
        first.driver.faults.answer("nvmlDeviceGetRemappedRows", (0, 1, 0, 1), 3)
        first.driver.remove(4003)  # the process of batch/ocr-0, which keeps its share
        first.kubelet.stop()
        wait_until(
            lambda: running.prometheus.ask("podgpu_exporter_source_errors_total"),
            "the kubelet is missed",
        )
        first.kubelet.start()
        yield running


def sent(asked: Asked) -> list[str]:
    """Returns the queries with "All" selected. A query with a node variable is returned for both
    nodes.
    """
    dashboard = DASHBOARDS[asked.dashboard]
    one_of = {
        as_sent(asked.expr, everything_chosen(dashboard, {"node": name}))
        for name in ("node-1", "node-2")
    }
    return sorted(one_of)


@needs_servers
@each_dashboard
def test_every_query_returns_data(fleet: Fleet, name: str) -> None:
    asked = [one for one in queries() if one.dashboard == name]
    assert asked
    for one in asked:
        each = sent(one)
        wait_until(partial(any_answers, fleet, each), f"{one}: {each}")


@needs_servers
def test_nvidias_dashboard_returns_data(fleet: Fleet) -> None:
    picked = {
        "instance": several([node.instance for node in fleet.nodes]),
        "gpu": several(["0", "1"]),
    }
    for query in (as_sent(query, picked) for query in NVIDIA_12239):
        wait_until(partial(fleet.prometheus.ask, query), query)
        if not query.startswith(("avg", "sum")):
            assert all(
                {"instance", "gpu"} <= one.labels.keys() for one in fleet.prometheus.ask(query)
            )


@needs_servers
@each_dashboard
def test_every_variable_has_values(fleet: Fleet, name: str) -> None:
    single = {"node": "node-1"}
    for variable in variables(DASHBOARDS[name]).values():
        if variable["type"] == "query":
            query, label = label_values(variable)
            asked = as_sent(query, everything_chosen(DASHBOARDS[name], single))
            wait_until(partial(_values, fleet, asked, label), variable["definition"])


def any_answers(fleet: Fleet, queries: Sequence[str]) -> bool:
    return any(fleet.prometheus.ask(query) for query in queries)


def _values(fleet: Fleet, query: str, label: str) -> set[str]:
    return {one.labels[label] for one in fleet.prometheus.ask(query) if one.labels.get(label)}


@needs_servers
def test_the_states_of_gpus_add_up(fleet: Fleet) -> None:
    """Checks the stacked panel of the cluster dashboard."""
    (panel,) = [p for _, p in panels(DASHBOARDS["podgpu-cluster"]) if p["title"] == "GPUs by state"]
    picked = everything_chosen(DASHBOARDS["podgpu-cluster"], {})

    def counts() -> list[float]:
        return [
            one.value
            for target in panel["targets"]
            for one in fleet.prometheus.ask(as_sent(target["expr"], picked))
        ]

    # Node 1: two GPUs have one pod, one is shared, one is free. Node 2: one is held, one has a held
    # MIG instance.
    wait_until(lambda: counts() == [5, 0, 0, 1], "5 GPUs used, none idle, none not known, 1 free")


def test_the_files_are_what_the_code_makes() -> None:
    check = [sys.executable, "-m", "deploy.dashboards", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
