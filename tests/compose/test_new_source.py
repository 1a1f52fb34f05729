"""Adding an allocation source is three edits, as docs/architecture.md says: its file, its line in the table with what
makes it, a node to show it on. Here they are made, in a copy of the package, with the toy of `new_source/toy.py`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UUID = "GPU-00000000-1111-2222-3333-444444444444"
TABLE = "SOURCES: Mapping[str, Source] = {\n"
MAKE = """
def _toy(argument: str, around: Surroundings) -> AllocationSource:
    from podgpu.holders.toy import ToyAllocation

    if not argument:
        raise UsageError("--allocation toy: name its file, as in toy:/run/toy")
    return ToyAllocation(argument)


"""
LINE = '    "toy": Source(_toy, lambda _around: False, ":PATH"),\n'
NODE: Mapping[str, Any] = {
    "about": "a source that podgpu does not come with",
    "gpus": "2xH100",
    "uuids": [UUID],
    "pods": [{"namespace": "batch", "name": "other", "containers": {"main": {"nvidia.com/gpu": [UUID]}}}],
    "files": {"toy": f"{UUID} research/train/main\nGPU-no research/lost/main\n"},
}
ALLOCATIONS = {
    "alone": "toy:{folder}/toy",
    "among others": "toy:{folder}/toy,kubelet",
    "its file is gone": "toy:{folder}/not-there,kubelet",
    "without its file": "toy",
}


def add_toy(package: Path, nodes: Path) -> None:
    """The three edits; the node is one folder for each way of asking for it."""
    shutil.copy(Path(__file__).parent / "new_source" / "toy.py", package / "allocation" / "toy.py")
    table = package / "compose" / "allocations.py"
    before, after = table.read_text(encoding="utf-8").split(TABLE)
    table.write_text(f"{before}{MAKE.lstrip()}{TABLE}{LINE}{after}", encoding="utf-8")
    for name, allocation in ALLOCATIONS.items():
        (nodes / name).mkdir(parents=True)
        described = {**NODE, "arguments": ["-k", "--allocation", allocation]}
        (nodes / name / "node.json").write_text(json.dumps(described), encoding="utf-8")


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, str]]:
    """What the edited package makes of the nodes."""
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        package, nodes = Path(folder) / "podgpu", Path(folder) / "nodes"
        shutil.copytree(ROOT / "src" / "podgpu", package)  # as old as it is: what is compiled need not be again
        add_toy(package, nodes)
        path = os.pathsep.join((folder, os.environ["PYTHONPATH"], str(ROOT)))
        command = [sys.executable, "-m", "tests.compose.new_source.show", str(nodes), folder]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        told: dict[str, str] = json.loads(done.stdout)
        assert Path(told["package"]).parent == package
        yield told


def test_its_labels_are_on_the_exposition(shown: dict[str, str]) -> None:
    lines = shown["alone"].splitlines()
    temperature = [line for line in lines if line.startswith("DCGM_FI_DEV_GPU_TEMP{")]
    assert ['container="main",namespace="research",pod="train"' in line for line in temperature] == [True, False]
    assert [line for line in lines if line.startswith("podgpu_allocation_info{") and 'source="toy"' in line]
    assert 'podgpu_exporter_unmapped_assignments{source="toy",reason="unrecognised_id"} 1' in lines
    assert 'podgpu_exporter_source_up{source="toy"} 1' in lines


def test_it_takes_its_place_among_the_others(shown: dict[str, str]) -> None:
    """The first that names a workload says what it holds; the others' workloads stand beside it."""
    lines = [line for line in shown["among others"].splitlines() if line.startswith("podgpu_allocation_info{")]
    assert [('pod="train"' in line, 'source="toy"' in line) for line in sorted(lines)] == [(False, False), (True, True)]


def test_its_failure_is_its_own(shown: dict[str, str]) -> None:
    text = shown["its file is gone"]
    assert 'podgpu_exporter_source_up{source="toy"} 0' in text
    assert 'podgpu_exporter_source_errors_total{source="toy",reason="file_missing"} 1' in text
    assert 'pod="other"' in text


def test_help_messages_and_chart_know_it_by_its_line(shown: dict[str, str]) -> None:
    assert shown["help"].split(", ")[0] == "toy:PATH"
    assert "name its file" in shown["without its file"]
    assert re.search(shown["chart"], "kubelet,toy:/run/toy")


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
    own = {f"holders/{name}.py" for name in ("podlist", "checkpoint", "source")}
    options = {"cli/hook.py", "cli/help.py", "cli/params.py"}  # of the hook
    assert named - own == {"compose/allocations.py"} | options  # the table
