"""The rooms of docs/architecture.md as a test: imports point downwards, the middle touches nothing outside."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs.rooms import SOURCE, WORLD, imports_of, nodes_of, picture, room_imports, room_of, rooms_imported, tree_of

ROWS = [
    {"__main__"},
    {"cli"},
    {"compose"},
    {"serve"},
    {"doctor", "top"},
    {"autoscale"},
    {"agent", "cluster", "hook"},
    {"enrich", "migrate"},
    {"telemetry", "allocation", "configuration"},
    {"accounting"},
    {"fetch", "history"},
    {"kube", "figures"},
    {"http"},
    {"files", "atomic_file", "clock", "isolate"},
    {"join", "exposition", "device_selection", "json_shape", "snapshot_json", "strict_yaml"},
    {"catalog"},
    {"model", "series", "errors", "__init__"},
]
"""Top row first. Rooms on one row do not import each other, except through a lower row."""

SIMULATE_MAY_USE = {"telemetry", "allocation", "model", "series", "errors", "catalog", "simulate"}
PURE = {
    "figures",
    "migrate",
    "join",
    "exposition",
    "device_selection",
    "json_shape",
    "snapshot_json",
    "strict_yaml",
    "catalog",
    "model",
    "series",
    "errors",
}
PURE_FILES = {
    "accounting/accounts.py",
    "accounting/charges.py",
    "accounting/ledger.py",
    "accounting/presence.py",
    "accounting/stretch.py",
    "allocation/vcuda.py",
    "telemetry/nvml/switches/attribution.py",
    "telemetry/nvml/switches/records.py",
    "allocation/device_ids.py",
    "allocation/holdings.py",
    "allocation/merge.py",
    "history/asking.py",
    "history/columns.py",
    "history/frames.py",
    "history/rows.py",
    "history/spans.py",
    "history/telling.py",
    "serve/front_proxy.py",
}
"""Of rooms that touch the world elsewhere."""


FILES = sorted(SOURCE.rglob("*.py"))
ROW_OF = {room: number for number, row in enumerate(ROWS) for room in row}


@pytest.mark.parametrize("room", sorted({room_of(path) for path in FILES}))
def test_imports_point_downwards(room: str) -> None:
    for path in FILES:
        for other in rooms_imported(path) - {room} if room_of(path) == room else ():
            if room == "simulate":
                assert other in SIMULATE_MAY_USE, f"{path}: simulate must not import {other}"
            elif other == "simulate":
                assert room in {"cli", "compose"}, f"{path} imports simulate, which is for the demo and tests only"
            else:
                assert ROW_OF[room] < ROW_OF[other], f"{path}: {room} must not import {other}"


def is_pure(path: Path) -> bool:
    return room_of(path) in PURE or path.relative_to(SOURCE).as_posix() in PURE_FILES


def test_the_middle_touches_nothing_outside() -> None:
    for path in filter(is_pure, FILES):
        assert not {name.split(".")[0] for name in imports_of(path)} & WORLD, path


def test_a_file_is_one_room() -> None:
    ours = {path: path.read_text() for path in FILES if not path.name.endswith("_pb2.py")}
    assert [str(path) for path, text in ours.items() if len(text.splitlines()) > 400] == []
    assert [str(path) for path in ours if not ast.get_docstring(tree_of(path))] == []


def test_pure_files_are_there() -> None:
    assert {name for name in PURE_FILES if not (SOURCE / name).exists()} == set()


SMALL_ROOMS = {
    "accounting/stretch.py": "energy told once for several turns: what the ledger and the charges each need not know",
    "allocation/source.py": "the protocol of every allocation source",
    "allocation/vcuda.py": "gpu-manager's requests, which name no device",
    "catalog/autoscale_families.py": "declarations, which only `podgpu autoscale` loads",
    "catalog/mig.py": "the one place for a MIG instance's name and size",
    "compose/hook.py": "the hook's two ways to run; without a port it loads no web server",
    "compose/top.py": "what `podgpu top` shows; it must not load what assembles an agent where another's is looked at",
    "configuration/pod_labels.py": "which labels of a pod go on series; the pattern engine is a room of its own",
    "exposition/body.py": "what is handed out, in both encodings, whoever serves it",
    "join/policy.py": "what the user chose; everything in the room stands on it",
    "kube/access.py": "where an API server is; everything in the room stands on it",
    "serve/hook_app.py": "the hook's server, which nobody else loads",
    "series.py": "what is printed; everybody stands on it",
    "telemetry/nvml/gpm.py": "a pair of samples, for the plan and for busy time",
    "telemetry/pci.py": "the PCI bus, for both libraries and the doctor",
}
"""Files of less than 60 lines that are no part of a neighbour, and what each owns."""


def test_a_small_file_owns_something() -> None:
    ours = (path for path in FILES if not path.name.startswith("__") and not path.name.endswith("_pb2.py"))
    small = {p.relative_to(SOURCE).as_posix() for p in ours if len(p.read_text().splitlines()) < 60}
    assert small - SMALL_ROOMS.keys() == set(), "part of a neighbour, or worth a line above"
    assert {name for name in SMALL_ROOMS if not (SOURCE / name).exists()} == set()


def test_a_docstring_has_a_subject() -> None:
    """This module, this room, the command it is, or the class it has: not `Owns what ...`, of which one asks who."""
    for path in FILES:
        tree = tree_of(path)
        first, *_ = (ast.get_docstring(tree) or " ").split(" ", 1)
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        if not path.name.endswith("_pb2.py") and path != SOURCE / "__init__.py":
            assert first.startswith("`") or first in {"This", "The", "A"} | classes, path


LOOP_WORDS = {"one", "told", "said"}


def test_loop_variables_say_what_they_hold() -> None:
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                names = {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
                assert not names & LOOP_WORDS, f"{path}:{node.target.lineno}"


def test_makers_do_not_know_each_other() -> None:
    """Another maker's library is a folder of telemetry/: `source.py` does not know who is there, nor do they."""
    for path in sorted((SOURCE / "telemetry").rglob("*.py")):
        own = path.relative_to(SOURCE / "telemetry").parts[0]
        for maker in {"nvml", "dcgm"} - {own}:
            begins = f"podgpu.telemetry.{maker}"
            assert not [name for name in imports_of(path) if f"{name}.".startswith(f"{begins}.")], f"{path}: {maker}"


@pytest.mark.parametrize("folder", ["agent", "telemetry/source.py"])
def test_one_makers_words_stay_in_its_folder(folder: str) -> None:
    """Docstrings may explain by example; names and strings that the code goes by may not."""
    at = SOURCE / folder
    for path in sorted(at.rglob("*.py")) if at.is_dir() else [at]:
        said = {node.value for node in nodes_of(path) if isinstance(node, ast.Expr)}
        for node in nodes_of(path):
            word = node.value if isinstance(node, ast.Constant) and node not in said else getattr(node, "name", "")
            assert not str(word).lower().startswith(("nvml", "nvidia", "xid_event")), f"{path}: {word}"


def test_the_picture_has_every_room_and_the_way_of_a_sample() -> None:
    drawn = "\n".join(picture())
    for room in room_imports():
        assert re.search(rf"^    {room}\W", drawn, re.MULTILINE), room
    assert len(re.findall(r"==>", drawn)) == 5
    assert "telemetry --> join" not in drawn


def test_only_one_place_assembles_an_agent() -> None:
    makers = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Agent"
    }
    assert makers == {"compose/agent.py"}


ENGINES = {"aiohttp", "asyncio", "concurrent", "multiprocessing", "signal", "socket", "subprocess", "threading"}


def test_the_command_line_is_options_and_words() -> None:
    """It turns options into settings, prints, and chooses the exit code. What runs is put together in compose/: nothing
    that a loop, a thread or a signal is made of is imported here, and nothing made that is started."""
    running = {
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and any(getattr(member, "name", "") == "start" for member in node.body)
    }
    assert {"Agent", "Cluster", "Hook", "Keeper", "WasteWatch"} <= running
    for path in (path for path in FILES if room_of(path) == "cli"):
        assert not {name.split(".")[0] for name in imports_of(path)} & ENGINES, path
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                assert called not in running, f"{path}:{node.lineno} makes a {called}"


def test_only_the_edge_catches_everything() -> None:
    threads_begin = (
        "isolate.py",
        "agent/loop.py",
        "agent/waste_watch.py",
        "cluster/loop.py",
        "cluster/scraping/backend.py",
        "kube/follow.py",
        "hook/session.py",
        "hook/keeper.py",
        "hook/loop.py",
        "history/keeper.py",
        "telemetry/nvml/switches/listener.py",
    )
    edges = {SOURCE / name for name in threads_begin}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler) and path not in edges:
                caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"everything"}
                assert not caught & {"Exception", "BaseException", "everything"}, f"{path}:{node.lineno}"
