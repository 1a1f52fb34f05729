"""The page of an exporter on a node without Kubernetes, in a real browser."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.agent.test_users import NOBODY, SLURM, PlainNode
from tests.browser.chromium import Tab, visited
from tests.web.server import running


class CurrentNode(PlainNode):
    """The node's current time, because the page compares the age of values with the browser's
    clock.
    """

    def __init__(self, root: Path, spec: str) -> None:
        self.began = time.time() - 1000.0
        super().__init__(root, spec)

    def wall(self) -> float:
        return self.began + self.time


@pytest.fixture
def node(tmp_path: Path) -> PlainNode:
    node = CurrentNode(tmp_path, "4xH100")
    node.work(41, 0)
    node.work(42, NOBODY, "/usr/bin/nbody", gpu=1)
    node.work(43, 0, "nvcc", gpu=1, duty=0.1)
    node.work(
        44,
        NOBODY,
        gpu=2,
        cgroup="/system.slice/slurmstepd.scope/job_4711/step_0",
        environment=SLURM,
    )
    for _ in range(3):
        node.turn()
    return node


def test_users_jobs_and_programs_are_shown(tab: Tab, node: PlainNode) -> None:
    with running(node.agent) as client:
        visited(tab, client.address.url)
        tab.wait_for("document.querySelectorAll('.tile[data-key]').length === 4", "four tiles")
        assert [" ".join(name.split()) for name in tab.texts(".row-name")] == [
            "user root python3",
            "user nobody nbody",
            "user root nvcc",
            "job 4711 (nobody) python3",
            "Free",
        ]
        assert tab.texts(".total-value")[:2] == ["4", "3"], "all GPUs, and those in use"
        assert tab.texts("#tab-pods") == ["Users"]
        assert tab.count("select[name=ns]") == 0, "there is no namespace filter"
        visited(tab, client.address.url, "#view=pods")
        tab.wait_for(
            "document.querySelectorAll('.pods tbody tr').length === 3", "two users and a job"
        )
        assert tab.texts(".pods .tabs a") == ["Users and jobs"]
        assert tab.text(".pods .about").startswith("3 holders")
        assert "pod" not in tab.text("main").lower().split()
        visited(tab, f"{client.address.url}#gpu={node.uuid(1)}")
        tab.wait_for("document.querySelectorAll('.gpu .marks li').length >= 2", "its processes")
        processes = tab.texts(".gpu .marks li")
        assert processes[0].startswith("nbody (pid 42) · user nobody · 30")
        assert processes[1].startswith("nvcc (pid 43) · user root · 10")
