"""A node without Kubernetes: users and Slurm jobs, from the simulated driver and /proc to view, top
and metrics.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podgpu.fleet.view import View, make_view
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.metrics.labels import Policy
from podgpu.model import Assignment, Workload
from podgpu.node.agent.agent import Settings
from podgpu.node.usage.containers import ContainerFinder
from podgpu.past.books.record import make_gpu_samples
from podgpu.top.lines import flatten, make_lines
from podgpu.web.exporter_app import build_state
from tests.agent.simulated_node import SimulatedNode
from tests.simulated import FaultyProc, cgroup_text

GIB = 1024**3
NOBODY, NAMELESS = (
    65534,
    4_000_000_000,
)  # a user that every Linux system has, and one without a name
SLURM = "SLURM_JOB_ID=4711\0SLURM_JOB_USER=alice\0TOKEN=secret\0"


class PlainNode(SimulatedNode):
    def __init__(self, root: Path, spec: str = "1xH100") -> None:
        self.proc = FaultyProc(root / "proc")
        super().__init__(
            spec,
            Settings(interval=1.0, policy=Policy(hostname="h")),
            containers=ContainerFinder(str(self.proc.root), self.monotonic, finds_users=True),
            telemetry={"sees_processes": True},
        )

    def work(
        self, pid: int, uid: int, *arguments: str, gpu: int = 0, duty: float = 0.3, **process: Any
    ) -> None:
        self.proc.run(
            pid,
            uid,
            *(arguments or ("/opt/conda/bin/python3", "train.py", "--token=secret")),
            **process,
        )
        self.driver.place(SimulatedLoad(gpu, pid, duty=duty, memory=GIB))

    def value(self, name: str) -> float:
        (line,) = (line for line in self.exposition.splitlines() if line.startswith(f"{name}{{"))
        return float(line.rpartition(" ")[2])

    @property
    def view(self) -> View:
        return make_view(build_state(self.agent))

    @property
    def table(self) -> list[str]:
        """Returns the holder column of `podgpu top`."""
        return [
            f"{'  ' * depth}{line.label}"
            for depth, line in flatten(make_lines(self.view, self.wall()))
        ]


@pytest.fixture
def node(tmp_path: Path) -> PlainNode:
    return PlainNode(tmp_path)


def test_processes_are_grouped_by_user(node: PlainNode) -> None:
    node.work(41, 0)
    node.work(42, NOBODY, "/usr/bin/nbody")
    node.work(43, 0, "nvcc")
    node.turn()
    metrics = node.turn()
    assert node.table == [
        "2 holders",
        "  user nobody",
        "    pid 42 nbody",
        "  user root",
        "    pid 41 python3",
        "    pid 43 nvcc",
    ]
    view = node.view
    assert (view.totals.allocated, view.totals.used, view.totals.free) == (1, 1, 0)
    root = next(holder for holder in view.nodes[0].gpus[0].holders if holder.user == "root")
    assert (root.processes, root.memory_used_bytes) == (2, 2 * GIB)
    assert [(one.pid, one.command, one.memory_used_bytes) for one in root.running] == [
        (41, "python3", GIB),
        (43, "nvcc", GIB),
    ]
    assert "podgpu_container_" not in metrics, "users have no container series"
    for what in ("busy_seconds_total", "energy_joules_total", "memory_used_bytes"):
        whole = node.value(f"podgpu_device_{what}")
        assert whole > 0
        assert (
            node.value("podgpu_device_unattributed_" + what.replace("memory_used", "memory"))
            == whole
        )
    assert b"secret" not in msgspec.json.encode(view), "arguments and variables are not exported"


@pytest.mark.parametrize(
    ("cgroup", "environment", "name"),
    [
        (
            "/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0",
            None,
            f"job 4711 ({NAMELESS})",
        ),
        ("/slurm/uid_1000/job_4711/step_batch", None, f"job 4711 ({NAMELESS})"),
        ("/user.slice", SLURM, "job 4711 (alice)"),
        ("/system.slice/slurmstepd.scope/job_12/step_0", SLURM, "job 12 (alice)"),
        ("/user.slice", "SLURM_JOB_ID=evil\0", f"user {NAMELESS}"),
        (f"/system.slice/docker-{'ab' * 32}.scope", "", "container abababababab"),
    ],
)
def test_slurm_jobs_need_no_configuration(
    node: PlainNode, cgroup: str, environment: str | None, name: str
) -> None:
    node.work(41, NAMELESS, cgroup=cgroup, environment=environment)
    node.turn()
    metrics = node.turn()
    assert node.table == [name, "  pid 41 python3"]
    if name.startswith("job"):
        assert f'podgpu_container_gpu_processes{{gpu="0",UUID="{node.uuid(0)}"' in metrics
        assert f'hpc_job="{name.split()[1]}"' in metrics
    else:
        assert "podgpu_container_" not in metrics


def test_a_job_of_the_scheduler_files_has_the_figures_of_its_processes(node: PlainNode) -> None:
    node.holders.now = [Assignment(node.uuid(0), Workload(job="4711"), "hpc")]
    node.work(41, NAMELESS, environment=SLURM)
    node.work(42, 0)
    node.turn()
    node.turn()
    assert node.table == ["job 4711 (alice)", "  pid 41 python3"], "only the job is shown as holder"
    (holder,) = node.view.nodes[0].gpus[0].holders
    assert (holder.processes, holder.part) == (1, 1)


@pytest.mark.fault(
    "/proc hides the processes of other users (hidepid)",
    "a GPU that they use is held by an unknown user and is not free",
)
@pytest.mark.parametrize("is_hidden", [True, False], ids=["invisible", "forbidden"])
def test_processes_that_cannot_be_read_are_of_an_unknown_user(
    node: PlainNode, is_hidden: bool
) -> None:
    if not is_hidden and os.geteuid() == 0:
        node.proc.add(41, cgroup_text("/user.slice"))
        (node.proc.root / "41" / "stat").write_text("garbage")
    elif not is_hidden:
        node.proc.add(41, cgroup_text("/user.slice"))
        node.proc.forbid(41)
    node.driver.place(SimulatedLoad(0, 41, duty=0.5, memory=GIB))
    node.turn()
    node.turn()
    assert node.table == ["user unknown", "  pid 41"]
    assert node.view.totals.free == 0


def test_a_pid_that_another_user_gets_and_an_idle_process(node: PlainNode) -> None:
    node.work(41, 0)
    node.turn()
    node.turn()
    node.proc.remove(41)
    node.proc.run(41, NOBODY, "")
    node.turn()
    assert node.table == ["user nobody", "  pid 41 python3"], (
        "without arguments, the name comes from /proc/41/stat"
    )
    node.driver.remove(41)
    node.turn()
    node.turn()
    assert node.table == ["-"]
    assert node.view.totals.free == 1


def test_history_charges_each_joule_once(node: PlainNode) -> None:
    node.work(41, 0)
    node.work(42, NAMELESS, environment=SLURM)
    node.turn()
    node.turn()
    state = build_state(node.agent)
    before = node.value("podgpu_device_energy_joules_total")
    joules = {"rest": 0.0}
    for _ in range(15):
        node.turn()
        state = build_state(node.agent, previous=state)
        (gpu,) = make_gpu_samples(state)
        for charge in gpu.charges:
            name = charge.account.job or "rest"
            joules[name] = joules.get(name, 0.0) + charge.amounts.energy_joules
    assert joules.keys() == {"user root", "4711", "rest"}
    assert joules["user root"] > 0
    assert sum(joules.values()) == pytest.approx(
        node.value("podgpu_device_energy_joules_total") - before
    )
