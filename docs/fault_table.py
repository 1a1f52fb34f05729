"""The table of faults in docs/reliability.md, from the marks of the tests that show them.

A test that shows a whole fault is marked `@pytest.mark.fault("what breaks", "what podgpu does")`. The marks are read
from the source, not by running it: both sentences are literal text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.option_blocks import prose, table

ROOT = Path(__file__).resolve().parent.parent

AREAS = {
    "GPUs and their driver": ("telemetry", "agent", "simulate"),
    "Who holds what: kubelet, checkpoint, schedulers": ("allocation",),
    "Whose work it is": ("accounting",),
    "The Kubernetes API server": ("kube",),
    "Scrapers, browsers and strangers": ("serve",),
    "Many nodes: podgpu cluster": ("cluster",),
    "Exporters' metrics, files and feeds": ("fetch", "enrich", "configuration", "exposition", "figures"),
    "podgpu doctor and the command line": ("doctor", "cli", "top"),
    "The whole process and its machine": ("faults", "endurance", "nodes", "deploy"),
}
"""Heading -> folders of tests/. What lies in none of them comes last."""
_ELSEWHERE = "Everything together"


@dataclass(frozen=True, slots=True)
class Fault:
    path: str
    """Of the test, from the repository's root."""
    line: int
    test: str
    what: str
    outcome: str


def faults(tests: Path) -> Iterator[Fault]:
    """Every mark below `tests`, in the order of the files. Raises SystemExit for one that is not literal text."""
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.fault" in text:
            yield from _in_file(ast.parse(text), str(path.relative_to(tests.parent)))


def _in_file(tree: ast.Module, path: str) -> Iterator[Fault]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                yield from _in_decorator(decorator, path, node.name)


def _in_decorator(decorator: ast.expr, path: str, test: str) -> Iterator[Fault]:
    """The mark itself, or in the `marks=` of a parameter."""
    for node in ast.walk(decorator):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
            said = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if len(said) != 2 or node.keywords or len(node.args) != 2 or not all(s.strip() for s in said):
                raise SystemExit(
                    f"{path}:{node.lineno}: fault() takes two literal texts: what breaks, what podgpu does"
                )
            yield Fault(path, node.lineno, test, *said)


def fault_table(tests: Path = ROOT / "tests") -> Iterator[str]:
    """One table per area, each under its heading."""
    by_area: dict[str, list[Fault]] = {area: [] for area in (*AREAS, _ELSEWHERE)}
    for fault in faults(tests):
        by_area[_area(fault.path)].append(fault)
    for area, found in by_area.items():
        if found:
            yield from ("", f"### {area}", "")
            yield from table(("What breaks", "What podgpu does", "Shown by"), map(_row, found))
    yield ""


def _area(path: str) -> str:
    folder = path.split("/")[1]
    return next((area for area, folders in AREAS.items() if folder in folders), _ELSEWHERE)


def _row(fault: Fault) -> tuple[str, ...]:
    name = fault.path.removeprefix("tests/")
    return prose(_one_line(fault.what)), prose(_one_line(fault.outcome)), f"[{name}](../{fault.path})"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line[:1].upper() + line[1:]
