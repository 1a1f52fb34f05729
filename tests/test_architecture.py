"""Import directions between packages, import cycles between modules, and patches in tests.

Tests must not patch our own modules.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import podgpu

SOURCE = Path(podgpu.__file__).parent
TREE = SOURCE.parent.parent
LAYERS = [
    {"__main__"},
    {"cli"},
    {"labs", "tools", "top"},
    {"scale"},
    {"web"},
    {"past", "pending", "writers"},
    {"fleet", "node"},
    {"kube"},
    {"metrics"},
]
"""Top layer first. A package imports only packages of lower layers; every package may import root
modules.
"""
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}
ROOT_MODULES = {path.stem for path in SOURCE.glob("*.py")} - {"__main__"}
FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            if node.module.startswith("podgpu"):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def packages_imported(path: Path) -> set[str]:
    parts = (name.split(".") for name in imports_of(path))
    imported = {part[1] for part in parts if part[0] == "podgpu" and len(part) > 1}
    return imported - {"__version__", "INSTALL_EXTRA"}


@pytest.mark.parametrize("package", sorted({package_of(path) for path in FILES}))
def test_imports_point_downwards(package: str) -> None:
    for path in (path for path in FILES if package_of(path) == package):
        for imported in packages_imported(path) - ROOT_MODULES - {package}:
            assert package not in ROOT_MODULES, f"{path} imports {imported}"
            assert LAYER_OF[package] < LAYER_OF[imported], f"{path} imports {imported}"


MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def modules_imported(path: Path) -> set[str]:
    """Returns our modules that a module imports: at its top, for types only, and in functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                names.add(member if member in MODULES else node.module)
    return names & MODULES.keys()


def test_imports_between_modules_have_no_cycles() -> None:
    imports = {name: modules_imported(path) for name, path in MODULES.items()}
    # Raises CycleError, which names the modules of a cycle.
    TopologicalSorter(imports).prepare()


PAST_ARROWS = {
    "sqlite": {"books", "interface", "answers", "savings", "bills", "basics"},
    "prometheus": {"interface", "answers", "savings", "bills", "basics"},
    "watches": {"interface", "savings", "bills"},
    "interface": {"answers", "savings", "bills"},
    "answers": {"savings", "bills", "basics"},
    "savings": {"bills", "basics"},
    "bills": {"basics"},
    "books": {"basics"},
    "basics": set(),
}
"""Parts of `past`, and the parts that each may import. A part is a package or one of these."""
PAST_MODULES = {
    "watches": {"budget_watch", "savings_watch"},
    "interface": {"interface"},
    "answers": {
        "events",
        "gpu_history",
        "job",
        "moment",
        "slow_checks",
        "verdict",
        "waste_advice",
    },
    "basics": {"accounts", "busy_steps", "queries", "spans", "time_steps"},
}
PART_OF = {module: part for part, modules in PAST_MODULES.items() for module in modules}


def part_of_past(module: str) -> str:
    """Returns an empty text for modules of other packages."""
    if not module.startswith("podgpu.past."):
        return ""
    name = module.split(".")[2]
    return PART_OF.get(name, name)


@pytest.mark.parametrize("part", PAST_ARROWS)
def test_parts_of_the_past_import_only_their_sources(part: str) -> None:
    for module in (module for module in MODULES if part_of_past(module) == part):
        imported = {part_of_past(name) for name in modules_imported(MODULES[module])}
        unexpected = imported - PAST_ARROWS[part] - {part, ""}
        assert not unexpected, f"{module} imports {unexpected}"


def test_every_module_of_the_past_has_a_part() -> None:
    assert {part_of_past(module) for module in MODULES} - {""} == set(PAST_ARROWS)


def test_only_the_books_and_their_readers_use_sqlite() -> None:
    for module, path in MODULES.items():
        if "sqlite3" in imports_of(path):
            assert part_of_past(module) in {"books", "sqlite"}, module


def test_one_part_of_the_past_uses_the_client_of_prometheus() -> None:
    for module, path in MODULES.items():
        if "podgpu.fleet.read.prometheus" in modules_imported(path):
            assert part_of_past(module) in {"prometheus", ""}, module


def test_surfaces_know_only_the_interface_of_a_past() -> None:
    """The command that starts podgpu chooses the past; the page and the API do not know which."""
    for module, path in MODULES.items():
        parts = {part_of_past(name) for name in modules_imported(path)}
        if part_of_past(module) == "" and parts & {"sqlite", "prometheus"}:
            assert package_of(path) in {"cli", "labs"}, module


def test_no_two_modules_have_the_same_name() -> None:
    """The modules of `cli` are named after their commands, so they may repeat a name."""
    modules = [
        path.stem for path in FILES if path.name != "__init__.py" and package_of(path) != "cli"
    ]
    assert sorted(modules) == sorted(set(modules))


def test_a_class_name_is_used_once() -> None:
    """Two classes of one name are two concepts that a reader and a search take for one."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for path in FILES if not path.stem.endswith("_pb2")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


PRICE = re.compile(r"price|gpu_hour|hourly")
PRICED_IN = {"charge.py", "fleet/prices.py"}  # the formula of the bill, and the price file


def multiplications_by_a_price(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        if PRICE.search(ast.unparse(node)):
            found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_only_charge_multiplies_by_a_price() -> None:
    found = []
    for path in FILES:
        if str(path.relative_to(SOURCE)) not in PRICED_IN:
            found += multiplications_by_a_price(path)
    assert found == []


OURS = ("podgpu", "bench", "endurance", "deploy", "docs")


def own_modules_patched(script: str) -> list[str]:
    """Returns names of our packages that `monkeypatch.setattr`, `delattr` or `setitem` changes."""
    nodes = list(ast.walk(ast.parse(script)))
    imported: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
            )
            if any(module.split(".")[0] in OURS for module in modules):
                imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
    ]
    patches = [
        ast.unparse(call.args[0])
        for call in calls
        if re.search(r"patch\.\w+$", ast.unparse(call.func))
    ]
    return [target for target in patches if target.strip("'").split(".")[0] in {*OURS, *imported}]


def test_tests_do_not_patch_our_modules() -> None:
    scripts = {
        path: path.read_text(encoding="utf-8") for path in sorted((TREE / "tests").rglob("*.py"))
    }
    patched = {
        str(path): own_modules_patched(text) for path, text in scripts.items() if "patch." in text
    }
    assert {path: targets for path, targets in patched.items() if targets} == {}


def find_classes_with_locks(path: Path) -> list[str]:
    classes = []
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if re.search(r"threading\.R?Lock\b", ast.unparse(statement)):
            classes.append(statement.name if isinstance(statement, ast.ClassDef) else "")
    return classes


def test_threads_and_locks_are_in_the_tables() -> None:
    text = (TREE / "docs" / "architecture.md").read_text(encoding="utf-8")
    tables = text.partition("## Threads and locks")[2].partition("\n## ")[0]
    missing = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        if "import threading" not in source or package_of(path) == "labs":
            continue
        for name in re.findall(r"Thread\([^#]*?\bname=f?\"([a-z-]+)", source):
            if f"`{name}" not in tables:
                missing.append(f"the thread {name} of {path}")
        for owner in find_classes_with_locks(path):
            if f"`{owner}." not in tables and path.name not in tables:
                missing.append(f"the lock of {owner} in {path}")
    assert not missing, "\n".join(missing)
