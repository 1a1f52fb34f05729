"""Adding an allocation source is its file, one line of the table and a node to show it on: done here with a toy.

The toy's file says `GPU-… namespace/pod/container` a line. Nothing of podgpu is changed but the table it is given.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from podgpu.allocation.device_ids import parse_device_id
from podgpu.allocation.holdings import HeldId, map_held
from podgpu.compose.allocations import SOURCES, Source, Sources, Surroundings, spellings
from podgpu.errors import SourceError, UsageError
from podgpu.model import Allocation, Device, Workload
from tests.nodes.node import Description, Node, node_of
from tests.serve.server import running

UUID = "GPU-00000000-1111-2222-3333-444444444444"
KUBELETS = {"namespace": "batch", "name": "other", "containers": {"main": {"nvidia.com/gpu": [UUID]}}}


# Its file


class ToyAllocation:
    name = "toy"

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        try:
            lines = self._path.read_text().splitlines()
        except OSError as error:
            raise SourceError("file_missing", f"{self._path} is not there: write it") from error
        return map_held(self.name, [self._held(*line.split()) for line in lines], devices)

    def _held(self, text: str, names: str) -> HeldId:
        return HeldId(Workload(*names.split("/")), "toy", text, parse_device_id(text))

    def close(self) -> None:
        """Nothing is open."""


def _make(argument: str, _around: Surroundings) -> ToyAllocation:
    if not argument:
        raise UsageError("--allocation toy: name its file, as in toy:/run/toy")
    return ToyAllocation(argument)


# Its line


WITH_TOY: Sources = {"toy": Source(_make, lambda _around: False, ":PATH"), **SOURCES}


# Its node


def described(*allocation: str, said: str = f"{UUID} research/train/main\nGPU-no research/lost/main\n") -> Description:
    return Description(
        about="a source that podgpu does not come with",
        gpus="2xH100",
        uuids=[UUID],
        pods=[KUBELETS],
        arguments=["-k", "--allocation", *allocation],
        files={"toy": said},
    )


def exposition_of(node: Node) -> str:
    node.take_turns()
    with running(node.agent) as client:
        return client.ask("/metrics").text


def test_its_labels_are_on_the_exposition(folder: Path) -> None:
    with node_of(described("toy:{folder}/toy"), folder, WITH_TOY) as node:
        lines = exposition_of(node).splitlines()
    temperature = [line for line in lines if line.startswith("DCGM_FI_DEV_GPU_TEMP{")]
    assert ['container="main",namespace="research",pod="train"' in line for line in temperature] == [True, False]
    assert [line for line in lines if line.startswith("podgpu_allocation_info{") and 'source="toy"' in line]
    assert 'podgpu_exporter_unmapped_assignments{source="toy",reason="unrecognised_id"} 1' in lines
    assert 'podgpu_exporter_source_up{source="toy"} 1' in lines


def test_it_takes_its_place_among_the_others(folder: Path) -> None:
    """The first that names a workload says what it holds; the others' workloads stand beside it."""
    with node_of(described("toy:{folder}/toy,kubelet"), folder, WITH_TOY) as node:
        lines = [line for line in exposition_of(node).splitlines() if line.startswith("podgpu_allocation_info{")]
    assert [('pod="train"' in line, 'source="toy"' in line) for line in sorted(lines)] == [(False, False), (True, True)]


def test_its_failure_is_its_own(folder: Path) -> None:
    with node_of(described("toy:{folder}/not-there,kubelet"), folder, WITH_TOY) as node:
        text = exposition_of(node)
    assert 'podgpu_exporter_source_up{source="toy"} 0' in text
    assert 'podgpu_exporter_source_errors_total{source="toy",reason="file_missing"} 1' in text
    assert 'pod="other"' in text


def test_the_command_line_knows_it_by_its_line(folder: Path) -> None:
    assert spellings(WITH_TOY).startswith("toy:PATH, annotations, ")
    with pytest.raises(UsageError, match="name its file"), node_of(described("toy"), folder, WITH_TOY):
        pass


def test_a_source_it_does_not_come_with_is_refused_with_those_there_are(folder: Path) -> None:
    with pytest.raises(UsageError, match="there are auto, annotations, podlist,"), node_of(described("toy"), folder):
        pass


def test_nothing_else_names_the_sources() -> None:
    """But for those that are special: `merge` knows who lags and who only looks; doctor asks the kubelet more."""
    source = Path(__file__).parents[2] / "src" / "podgpu"
    words = ("podlist", "checkpoint")
    named = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if any(word in path.read_text() for word in words)  # else it need not be taken apart
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in words
    }
    own = {f"allocation/{name}.py" for name in ("podlist", "checkpoint", "source")}
    options = {"cli/hook.py", "cli/help.py", "cli/params.py"}  # of the hook
    assert named - own == {"compose/allocations.py"} | options  # the table
