"""Bad input of the usage source affects only the values that depend on it, and is counted and
explained.

Each test compares two nodes with the same GPUs, pods and history. One of them gets bad input.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.labs.simulate.gpu import SimulatedLoad
from tests.agent.documents import errors_of
from tests.agent.test_usage import GIB, IDS, UIDS, Node
from tests.privilege import without_privilege
from tests.simulated import cgroup_text, container_cgroup

NO_VALUE = 4294967295
GAUGES = frozenset({"utilization_ratio", "memory_used_bytes", "processes"})
BY_USE = frozenset(
    {
        "utilization_ratio",
        "busy_seconds_total",
        "idle_seconds_total",
        "wasted_seconds_total",
        "energy_joules_total",
    }
)
NAMESPACE = frozenset(
    {
        "namespace busy_seconds_total",
        "namespace energy_joules_total",
        "namespace wasted_seconds_total",
    }
)
UNATTRIBUTED = frozenset({"unattributed_busy_seconds_total", "unattributed_energy_joules_total"})


class Pair:
    """Two nodes. `train` (pid 41) and `idle` share GPU 0. `serve` (pid 42) and a host process (99)
    use GPU 1.
    """

    def __init__(self, root: Path) -> None:
        self.sound, self.spoilt = (_node(root / name) for name in ("sound", "spoilt"))

    def turn(self, times: int = 1, seconds: float = 1.0) -> None:
        for _ in range(times):
            self.sound.turn(seconds)
            self.spoilt.turn(seconds)

    def differences(self) -> dict[str, set[str]]:
        """Returns the metrics that differ or exist on one node only, by pod, `gpu0`, `gpu1` or
        namespace.
        """
        sound, spoilt = _series(self.sound.exposition), _series(self.spoilt.exposition)
        found: dict[str, set[str]] = {}
        for who, figure in {
            key for key in sound.keys() | spoilt.keys() if sound.get(key) != spoilt.get(key)
        }:
            found.setdefault(who, set()).add(figure)
        return found

    def errors(self) -> dict[str, int]:
        """Returns the usage errors of the spoilt node. Checks that the other node has none."""
        counted = errors_of(self.spoilt.agent.published.state)
        assert errors_of(self.sound.agent.published.state) == {}
        return {reason: count for (source, reason), count in counted.items() if source == "usage"}


def _node(root: Path) -> Node:
    root.mkdir()
    root.chmod(0o755)
    node = Node(root, "2xH100")
    node.give("train", "idle", "serve")
    first, second = (gpu.uuid for gpu in node.driver.gpus)
    for number, (uuid, share) in enumerate([(first, 0.5), (first, 0.5), (second, 1.0)]):
        was = node.holders.now[number]
        node.holders.now[number] = type(was)(uuid, was.holder, was.source, was.replica, share)
    node.work("train", 41, 0.5, 10 * GIB)
    node.proc.add(42, container_cgroup(UIDS["serve"], IDS["serve"]))
    node.proc.add(99, cgroup_text("/system.slice/gpu-burn.service"))
    node.driver.place(SimulatedLoad(1, 42, duty=0.2, memory=2 * GIB))
    node.driver.place(SimulatedLoad(1, 99, duty=0.1, memory=GIB))
    return node


_LINE = re.compile(r"podgpu_(container_gpu|device|namespace_gpu)_(\w+)\{(.*)\} (\S+)")


def _series(exposition: str) -> dict[tuple[str, str], str]:
    """Returns the value of each usage series by (owner, metric). Other lines have their name and
    labels as owner.
    """
    found: dict[tuple[str, str], str] = {}
    for line in exposition.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            if not line.startswith(
                ("#", "podgpu_exporter_source_errors_total", "podgpu_exporter_source_up")
            ):
                found[line.rsplit(" ", 1)[0], "other"] = line
            continue
        kind, figure, labels, value = match.groups()
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        who = pairs.get("pod") or (
            pairs["namespace"] if kind == "namespace_gpu" else f"gpu{pairs.get('gpu')}"
        )
        found[who, f"namespace {figure}" if kind == "namespace_gpu" else figure] = value
    return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Does not use tmp_path, because some tests read as another user, which has no access to it."""
    root = Path(tempfile.mkdtemp(prefix="podgpu-usage-"))
    root.chmod(0o755)
    pair = Pair(root)
    pair.turn(5)
    assert pair.differences() == {}
    yield pair
    shutil.rmtree(root)


def up(node: Node) -> bool:
    return 'podgpu_exporter_source_up{source="usage"} 1' in node.exposition


def test_no_permission_for_a_containers_proc(pair: Pair) -> None:
    pair.spoilt.proc.forbid(42)
    with without_privilege():
        pair.turn(40)  # data about a process is cached for half a minute
    assert pair.spoilt.value("podgpu_container_gpu_utilization_ratio", "serve") is None, (
        "utilisation is unknown, not 0"
    )
    assert pair.differences() == {
        "serve": GAUGES | BY_USE - {"idle_seconds_total"},
        "gpu1": UNATTRIBUTED | {"unattributed_memory_bytes"},
        "ns": NAMESPACE,
    }
    assert pair.errors().keys() == {"not_permitted"}
    assert up(pair.spoilt), "the source is up while other processes are readable"


def test_no_permission_for_any_is_said_by_the_source(pair: Pair) -> None:
    for pid in (41, 42, 99):
        pair.spoilt.proc.forbid(pid)
    with without_privilege():
        pair.turn(40)
    assert not up(pair.spoilt)
    (source,) = [s for s in pair.spoilt.agent.published.state.sources if s.name == "usage"]
    assert (source.error, "runAsUser: 0" in source.message) == ("not_permitted", True)
    assert pair.differences().keys() == {"train", "idle", "serve", "gpu0", "gpu1", "ns"}
    assert "allocated_seconds_total" not in set().union(*pair.differences().values())


def test_a_utilisation_that_is_no_value(pair: Pair) -> None:
    """A bad value of a process or device removes only the values of that process or device."""
    ((pid, _, _),) = pair.spoilt.driver.gpus[0].process_means(0)
    nonsense = type("Entry", (), {"pid": pid, "timeStamp": 1 << 62, "smUtil": NO_VALUE})
    pair.spoilt.driver.faults.answer("nvmlDeviceGetProcessUtilization", [nonsense()], 0)
    pair.turn(2)
    assert pair.errors() == {"bad_value": 2}
    assert pair.differences().keys() <= {"train", "idle", "gpu0", "ns"}
    assert pair.spoilt.value("podgpu_container_gpu_utilization_ratio", "train") is None, (
        "utilisation is unknown, not 0"
    )
    assert pair.differences()["train"] == BY_USE
    assert pair.differences()["gpu0"] == UNATTRIBUTED
