"""The rooms of docs/architecture.md as a test: imports point downwards, the middle touches nothing outside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "podgpu"

ROWS = [
    {"__main__"},
    {"cli"},
    {"serve"},
    {"doctor", "top"},
    {"agent", "cluster", "hook"},
    {"enrich"},
    {"telemetry", "allocation", "accounting", "configuration"},
    {"fetch"},
    {"kube", "figures"},
    {"http"},
    {"files", "atomic_file", "clock"},
    {"join", "exposition", "device_ids", "device_selection", "snapshot_json", "strict_yaml"},
    {"catalog"},
    {"model", "errors", "__init__"},
]
"""Top row first. Rooms on one row do not import each other, except through a lower row."""

SIMULATE_MAY_USE = {"telemetry", "allocation", "model", "errors", "catalog", "simulate"}
PURE = {
    "figures",
    "join",
    "exposition",
    "device_ids",
    "device_selection",
    "snapshot_json",
    "strict_yaml",
    "catalog",
    "model",
    "errors",
}
WORLD = {"os", "socket", "time", "ctypes", "grpc", "aiohttp", "asyncio", "threading", "subprocess", "pynvml", "pathlib"}


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "podgpu")
    return found


def rooms_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imports_of(path))
    return {parts[1] for parts in names if parts[0] == "podgpu" and len(parts) > 1 and parts[1] != "__version__"}


FILES = sorted(SOURCE.rglob("*.py"))
ROW_OF = {room: number for number, row in enumerate(ROWS) for room in row}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    room = room_of(path)
    if room == "simulate":
        assert rooms_imported(path) <= SIMULATE_MAY_USE
        return
    for other in rooms_imported(path) - {room}:
        if other == "simulate":
            assert room == "cli", f"{room} imports simulate, which is for cli and tests only"
        else:
            assert ROW_OF[room] < ROW_OF[other], f"{path}: {room} must not import {other}"


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) in PURE], ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_middle_touches_nothing_outside(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports_of(path)} & WORLD


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_one_room(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400 or path.name.endswith("_pb2.py")
    assert ast.get_docstring(ast.parse(path.read_text())) or path.name.endswith("_pb2.py")


def test_only_the_edge_catches_everything() -> None:
    threads_begin = (
        "agent/isolate.py",
        "agent/loop.py",
        "cluster/loop.py",
        "cluster/scraping/backend.py",
        "kube/follow.py",
        "hook/session.py",
        "hook/keeper.py",
        "hook/loop.py",
    )
    edges = {SOURCE / name for name in threads_begin}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and path not in edges:
                caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"everything"}
                assert not caught & {"Exception", "BaseException", "everything"}, f"{path}:{node.lineno}"
