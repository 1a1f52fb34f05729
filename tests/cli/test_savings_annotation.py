"""Pods with the annotation podgpu.io/savings reach the state from which savings are computed."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from podgpu.cli.cluster import choose_collector, command
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.settings import ViewSettings
from tests.fleet.prometheus_double import running_double, some_gpus
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.node import kubeconfig


@pytest.mark.parametrize("source", ["--scrape", "--prometheus"])
def test_pods_that_savings_leave_out(tmp_path: Path, source: str) -> None:
    async def read(stack: ExitStack) -> ClusterReading:
        context = command.make_context("cluster", arguments)
        collector = choose_collector(context.params, ViewSettings(), stack)()
        try:
            return await collector.run_round()
        finally:
            await collector.close()

    with SimulatedApiServer() as api_server, running_double() as double, ExitStack() as stack:
        some_gpus(double)
        annotations = {"podgpu.io/savings": "false"}
        pod = {"name": "kept", "namespace": "ml", "annotations": annotations}
        api_server.put("pods", {"metadata": pod})
        config = tmp_path / "kubeconfig"
        config.write_text(kubeconfig(api_server.url), encoding="utf-8")
        arguments = [source, double.url, "--owners", "api", "--kubeconfig", str(config)]
        reading = asyncio.run(read(stack))
    assert reading.kept_pods == {("ml", "kept")}
