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
"""Files of less than 60 lines that are no part of a neighbour, and what each owns. An allocation source is a file,
however small."""


def test_a_small_file_owns_something() -> None:
    ours = (path for path in FILES if not path.name.startswith("__") and not path.name.endswith("_pb2.py"))
    small = {
        path.relative_to(SOURCE).as_posix()
        for path in ours
        if len(path.read_text().splitlines()) < 60 and not _is_allocation_source(path)
    }
    assert small - SMALL_ROOMS.keys() == set(), "part of a neighbour, or worth a line above"
    assert {name for name in SMALL_ROOMS if not (SOURCE / name).exists()} == set()


def _is_allocation_source(path: Path) -> bool:
    if room_of(path) != "allocation":
        return False
    classes = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    methods = {node.name for a_class in classes for node in a_class.body if isinstance(node, ast.FunctionDef)}
    return {"assignments", "close"} <= methods


SUBJECTS = r"This (module|room)|The \w+|An? \w+|`[^`]+`|[^.]+: this module"
"""`podgpu top`, say; or what it is about, and then who does it."""


def test_a_docstring_has_a_subject_and_a_verb() -> None:
    """This module, this room, the command it is, or the class it has; and what it does. Not `Owns what ...`, of which
    one asks who; not `podgpu top: GPUs in a terminal`, of which one asks what it does with them."""
    for path in FILES:
        tree = tree_of(path)
        subjects = "|".join([SUBJECTS, *(node.name for node in tree.body if isinstance(node, ast.ClassDef))])
        if not path.name.endswith("_pb2.py") and path != SOURCE / "__init__.py":
            assert re.match(rf"({subjects}) ([a-z]+s|are)\b", ast.get_docstring(tree) or ""), path


LOOP_WORDS = {"one", "told", "said"}
TREE = SOURCE.parent.parent
JS_LOOP = re.compile(r"for \(const ([^()]+?) of\b|\(([^()]*)\) =>|(\w+) =>")
"""What a loop of JavaScript runs over, and the parameters of an arrow function."""


@pytest.mark.parametrize("folder", ["src", "bench", "deploy", "endurance"])
def test_loop_variables_say_what_they_hold(folder: str) -> None:
    found = sorted((TREE / folder).rglob("*.py"))
    assert found, folder
    for path in found:
        for node in nodes_of(path):
            if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                names = {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
                assert not names & LOOP_WORDS, f"{path}:{node.target.lineno}"


def js_loop_words(script: str) -> set[str]:
    return {word for found in JS_LOOP.finditer(script) for word in re.findall(r"\w+", found[0])} & LOOP_WORDS


def test_loop_variables_of_the_page_say_what_they_hold() -> None:
    scripts = sorted((SOURCE / "serve/page").glob("*.js"))
    assert scripts
    assert {path.name: js_loop_words(path.read_text()) for path in scripts} == {path.name: set() for path in scripts}


@pytest.mark.parametrize(
    "script",
    [
        "for (const one of devices) {}",
        "for (const [name, told] of lines) {}",
        "devices.map((one) => one.key)",
        "devices.map(one => one.key)",
        "lines.filter(([, said], i) => i)",
        "rows.map(({ told = 3 }) => 1)",
    ],
)
def test_words_that_say_nothing_are_seen_in_javascript(script: str) -> None:
    assert js_loop_words(script)
    assert not js_loop_words(re.sub("one|told|said", "device", script))


OURS = ("podgpu", "bench", "endurance", "deploy", "docs")


def patched_of_ours(script: str) -> list[str]:
    """What `monkeypatch.setattr`, `delattr` or `setitem` is given first, where that is imported from us or names us."""
    nodes = list(ast.walk(ast.parse(script)))
    named: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            if any(module.split(".")[0] in OURS for module in modules):
                named |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    calls = [
        node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
    ]
    patches = [ast.unparse(call.args[0]) for call in calls if re.search(r"patch\.\w+$", ast.unparse(call.func))]
    return [what for what in patches if what.strip("'").split(".")[0] in {*OURS, *named}]


def test_tests_patch_nothing_of_ours() -> None:
    """CONTRIBUTING.md: fakes stand at the edge only."""
    scripts = {path: path.read_text(encoding="utf-8") for path in sorted((TREE / "tests").rglob("*.py"))}
    patching = {str(path): patched_of_ours(text) for path, text in scripts.items() if "patch." in text}
    assert patching
    assert {path: found for path, found in patching.items() if found} == {}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("from podgpu.cluster import bills\nmonkeypatch.setattr(bills, 'MOST', 5)", ["bills"]),
        ("from bench import __main__ as command\nmonkeypatch.setitem(command.ALL, 'x', 5)", ["command.ALL"]),
        ("monkeypatch.setattr('podgpu.files.read', None)", ["'podgpu.files.read'"]),
        ("from podgpu import files\nmonkeypatch.setattr(os, 'stat', files.read)", []),
        ("import podgpu.files\nmock.patch.object(podgpu.files, 'read')", ["podgpu.files"]),
    ],
)
def test_what_patches_ours_is_seen(script: str, found: list[str]) -> None:
    assert patched_of_ours(script) == found


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
