"""The picture of the rooms in docs/architecture.md, drawn from what the files of src/podgpu really import.

A room is a folder or a file right under src/podgpu. tests/test_architecture.py judges the same imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import podgpu

SOURCE = Path(podgpu.__file__).parent
WORLD = {"os", "socket", "time", "ctypes", "grpc", "aiohttp", "asyncio", "threading", "subprocess", "pynvml", "pathlib"}
"""What touches something outside. A room that imports none of it, nor a room that does, is pure."""
WAY: Mapping[tuple[str, str], str] = {
    ("telemetry", "catalog"): "1 a value",
    ("agent", "telemetry"): "2 readings",
    ("agent", "join"): "4 families",
    ("agent", "exposition"): "5 text",
    ("serve", "agent"): "7 bytes",
}
"""(who asks, who answers) -> what is handed back there, by the number of its hop in the table of the same page."""
INSIDE: Mapping[str, tuple[str, ...]] = {"agent": ("3 one snapshot", "6 published")}
"""The hops that leave no room."""


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of its tree."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules by their whole names."""
    found: set[str] = set()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "podgpu")
    return frozenset(found)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those within it, at whatever depth, and what holds some: not the expressions, which are nine of ten nodes."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        inside = getattr(node, name, ())
        for statement in inside if isinstance(inside, list) else ():  # a lambda's body is an expression
            yield statement
            yield from statements(statement)


def rooms_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imports_of(path))
    return {parts[1] for parts in names if parts[0] == "podgpu" and len(parts) > 1 and parts[1] != "__version__"}


def room_imports(source: Path = SOURCE) -> dict[str, set[str]]:
    """Room -> the other rooms it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(source.rglob("*.py")):
        room = room_of(path)
        if not room.startswith("__"):
            graph.setdefault(room, set()).update(rooms_imported(path) - {room})
    return graph


def ground(graph: Mapping[str, set[str]]) -> tuple[str, ...]:
    """The rooms of a single file. Any room may stand on them: an arrow to each would hide all the others."""
    return tuple(sorted(room for room in graph if (SOURCE / f"{room}.py").exists()))


def picture() -> Iterator[str]:
    """Mermaid. An arrow that follows from two others is left out; the way of a sample is drawn thick, always."""
    graph = room_imports()
    missing = sorted(f"{asker} -> {asked}" for asker, asked in WAY if asked not in graph.get(asker, ()))
    if missing:
        raise SystemExit(f"docs/rooms.py: the way of a sample goes where nothing is imported: {', '.join(missing)}")
    files = ground(graph)
    yield "```mermaid"
    yield "flowchart TD"
    for room in sorted(graph.keys() - set(files)):
        yield f"    {_drawn(room, '/', graph)}"
    for room in sorted(graph.keys() - set(files)):
        for other in sorted(graph[room].difference(files)):
            if (room, other) in WAY:
                yield f'    {room} == "{WAY[room, other]}" ==> {other}'
            elif not any(other in _below(between, graph) for between in graph[room]):
                yield f"    {room} --> {other}"
    yield '    subgraph ground["single files, on which any room may stand"]'
    for room in files:
        yield f"    {_drawn(room, '.py', graph)}"
    yield "    end"
    yield f"    catalog ~~~ {files[len(files) // 2]}"
    yield f"    class {','.join(sorted({room for step in WAY for room in step}))} way"
    yield "    classDef way stroke-width:3px"
    yield "```"


def _drawn(room: str, ending: str, graph: Mapping[str, set[str]]) -> str:
    is_pure = not any(_touches_world(part) for part in {room, *_below(room, graph)})
    words = "<br/>".join((f"{room}{ending}", *INSIDE.get(room, ())))
    return f'{room}(["{words}"])' if is_pure else f'{room}["{words}"]'


@cache
def _touches_world(room: str) -> bool:
    """Whether one of its own files does. `clock.py` has time to hand out, and whoever is handed it may be pure."""
    files = (SOURCE / f"{room}.py", *(SOURCE / room).rglob("*.py"))
    modules = (module for path in files if path.exists() for module in imports_of(path))
    return room != "clock" and any(module.split(".")[0] in WORLD for module in modules)


def _below(room: str, graph: Mapping[str, set[str]]) -> set[str]:
    """All that a room imports, itself or through others."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found
