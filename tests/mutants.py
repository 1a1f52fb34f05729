"""Mutation testing: `make mutants MUTATE=src/podgpu/past TESTS="tests/past tests/test_billing.py"`.

Changes the code in one place at a time, and runs the tests that execute this place. Prints how many
changes the tests noticed, and each change that they did not notice.

A change drops a guard, a statement or the handler of an error, moves a limit, or exchanges an
operator. Texts, log messages and constants of modules stay as they are. Nothing is written to the
working tree: each change is made while a forked process imports the module. So a test in which only
a command that it starts executes the code does not count.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.machinery
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
# These modules are already imported when pytest starts in a forked process.
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]

LOGGERS = {"log", "_log", "logger", "_logger", "logging"}
# Starts threads, which do not survive a fork.
NOT_PRELOADED = ("grpc", "podgpu", "tests", "conftest", "__main__")
NEIGHBOURS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass
class Mutant:
    path: Path
    lines: range
    """The lines of the changed statement, without the statements in it."""
    before: ast.AST
    after: ast.AST
    tree: ast.Module

    def __str__(self) -> str:
        before, after = first_line(self.before), first_line(self.after)
        line = getattr(self.before, "lineno", self.lines.start)
        return f"{self.path.relative_to(ROOT)}:{line}: {before}  →  {after}"

    def compile(self) -> CodeType:
        changed = Replacement(self.before, self.after).visit(self.tree)
        return compile(ast.fix_missing_locations(changed), str(self.path), "exec")


class Replacement(ast.NodeTransformer):
    def __init__(self, before: ast.AST, after: ast.AST) -> None:
        self.before = before
        self.after = after

    def visit(self, node: ast.AST) -> Any:
        if node is self.before:
            return ast.copy_location(self.after, self.before)
        return self.generic_visit(node)


def first_line(node: ast.AST) -> str:
    if isinstance(node, ast.ExceptHandler):
        return f"except: {first_line(node.body[0])}"
    return ast.unparse(node).splitlines()[0]


class Mutations:
    """Finds the changes of one module."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.found: list[Mutant] = []
        for statement in self.tree.body:
            self.visit_statement(statement, in_function=False)

    def visit_statement(self, node: ast.stmt, in_function: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.visit_body(node.body, in_function=True)
        elif isinstance(node, ast.ClassDef):
            self.visit_body(node.body, in_function)
        elif in_function and not is_of_no_interest(node):
            lines = range(node.lineno, last_line_of_head(node) + 1)
            for after in changed_statements(node):
                self.add(lines, node, after)
            for expression in expressions_of(node):
                self.visit_expression(expression, lines, is_condition=is_test_of(expression, node))
            for body in bodies_of(node):
                self.visit_body(body, in_function)
            for handler in getattr(node, "handlers", []):
                self.visit_handler(handler)

    def visit_body(self, body: list[ast.stmt], in_function: bool) -> None:
        for statement in body:
            self.visit_statement(statement, in_function)

    def visit_handler(self, handler: ast.ExceptHandler) -> None:
        lines = range(handler.lineno, handler.body[0].lineno)
        if not isinstance(handler.body[0], ast.Raise):
            after = ast.ExceptHandler(handler.type, handler.name, [ast.Raise()])
            self.add(lines, handler, after)
        self.visit_body(handler.body, in_function=True)

    def visit_expression(self, node: ast.AST, lines: range, is_condition: bool = False) -> None:
        if isinstance(node, ast.JoinedStr | ast.Constant) and not is_number(node):
            return
        # zip(strict=True) is an assertion.
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        for after in changed_expressions(node, is_condition):
            self.add(lines, node, after)
        for child in ast.iter_child_nodes(node):
            self.visit_expression(child, lines, is_test_of(child, node))

    def add(self, lines: range, before: ast.AST, after: ast.AST) -> None:
        self.found.append(Mutant(self.path, lines, before, after, self.tree))


def is_of_no_interest(node: ast.stmt) -> bool:
    """Whether a statement only writes a message."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = node.value.func
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        return called.value.id in LOGGERS
    return False


def last_line_of_head(node: ast.stmt) -> int:
    bodies = bodies_of(node)
    if not bodies:
        return node.end_lineno or node.lineno
    return max(node.lineno, bodies[0][0].lineno - 1)


def bodies_of(node: ast.stmt) -> list[list[ast.stmt]]:
    bodies = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    if isinstance(node, ast.Match):
        bodies = [case.body for case in node.cases]
    return [body for body in bodies if body]


def expressions_of(node: ast.stmt) -> Iterator[ast.AST]:
    """Yields the parts of a statement that are no statements. A message of an error is left out."""
    if isinstance(node, ast.Raise | ast.Assert):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "body", "orelse", "finalbody", "handlers", "cases"):
            continue
        values = value if isinstance(value, list) else [value]
        yield from (part for part in values if isinstance(part, ast.AST))


def is_test_of(node: ast.AST, parent: ast.AST) -> bool:
    return node is getattr(parent, "test", None)


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def changed_statements(node: ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def changed_expressions(node: ast.AST, is_condition: bool) -> Iterator[ast.AST]:
    if is_condition:
        yield from (ast.Constant(value) for value in (True, False) if not is_number(node))
    match node:
        case ast.BoolOp(op, values):
            for left_out in values:
                kept = [value for value in values if value is not left_out]
                yield kept[0] if len(kept) == 1 else ast.BoolOp(op, kept)
        case ast.Compare(left, [operator], [right]):
            if type(operator) in NEIGHBOURS:
                yield ast.Compare(left, [NEIGHBOURS[type(operator)]()], [right])
            if not is_condition:
                yield ast.Compare(left, [OPPOSITES[type(operator)]()], [right])
        case ast.Compare(left, [first, second], [middle, right]):
            yield ast.Compare(left, [first], [middle])
            yield ast.Compare(middle, [second], [right])
        case ast.UnaryOp(ast.Not(), operand) if not is_condition:
            yield operand
        case ast.UnaryOp(ast.USub(), operand) if not is_number(operand):
            yield operand
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), arguments, keywords) if name in FUNCTIONS:
            yield ast.Call(ast.Name(FUNCTIONS[name]), arguments, keywords)
        case ast.comprehension(target, iterated, [_, *_], is_async):
            yield ast.comprehension(target, iterated, [], is_async)


@dataclass
class Recording:
    """The lines of the changed modules that each test executes, and how long the tests take."""

    lines: dict[str, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    modules: list[str] = field(default_factory=list)


class Recorder:
    """A plugin of pytest. Traces the threads of each test."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = {str(path) for path in paths}
        self.recording = Recording()
        self.current: set[tuple[str, int]] = set()

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self.paths:
            return None
        self.current.add((frame.f_code.co_filename, frame.f_lineno))
        return self.trace

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.current = self.recording.lines[nodeid]
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        seconds = self.recording.seconds
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.recording.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        self.recording.modules = list(sys.modules)


def run_pytest(arguments: list[str], plugins: list[Any]) -> int:
    import pytest

    return int(pytest.main([*PYTEST, *arguments], plugins=plugins))


def run_forked(work: Callable[[], int], log: Path, seconds: float) -> int | None:
    """Returns the exit status of the work in a process of its own, None if it takes longer."""
    process = os.fork()
    if process == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            os._exit(work())
        finally:
            os._exit(1)
    end = time.monotonic() + seconds
    status = None
    while status is None and time.monotonic() < end:
        finished, code = os.waitpid(process, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if finished else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    return status


def record(paths: list[Path], tests: list[str], folder: Path) -> Recording:
    result = folder / "recording"

    def work() -> int:
        recorder = Recorder(paths)
        run_pytest(["--maxfail=1000", *tests], [recorder])
        result.write_bytes(pickle.dumps(recorder.recording))
        return 0

    run_forked(work, folder / "log", 3600)
    if not result.exists():
        sys.exit(f"the tests cannot run:\n{(folder / 'log').read_text(errors='replace')[-3000:]}")
    recording: Recording = pickle.loads(result.read_bytes())
    return recording


def preload(modules: list[str]) -> None:
    """Imports what the tests import, except the changed package, once for all forked processes."""
    for name in modules:
        if name.split(".")[0] not in NOT_PRELOADED:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def find_tests(mutant: Mutant, recording: Recording) -> list[str]:
    """Returns the tests that execute the changed lines, the fastest first."""
    places = {(str(mutant.path), line) for line in mutant.lines}
    tests = {test for test, lines in recording.lines.items() if lines & places}
    return sorted(tests - recording.failed, key=recording.seconds.__getitem__)


def choose_tests(tests: list[str], recording: Recording, seconds: float) -> list[str]:
    """Returns the first tests that take this time together."""
    chosen: list[str] = []
    total = 0.0
    for test in tests:
        total += recording.seconds[test]
        if chosen and total > seconds:
            break
        chosen.append(test)
    return chosen


def load_changed(mutant: Mutant) -> None:
    """Makes the import of the module load the changed code."""
    original = importlib.machinery.SourceFileLoader.get_code
    code = mutant.compile()

    def get_code(loader: importlib.machinery.SourceFileLoader, fullname: str) -> CodeType | None:
        is_changed = loader.get_filename(fullname) == str(mutant.path)
        return code if is_changed else original(loader, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment]


def is_noticed(mutant: Mutant, tests: list[str], expected: float, log: Path) -> bool:
    def work() -> int:
        load_changed(mutant)
        return run_pytest(tests, [])

    return run_forked(work, log, 20 + 5 * expected) != 0


def find_mutants(names: list[str]) -> list[Mutant]:
    paths: list[Path] = []
    for name in names:
        path = (ROOT / name).resolve()
        paths += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    mutants: list[Mutant] = []
    for path in paths:
        if not path.name.endswith("_pb2.py"):
            mutants += Mutations(path).found
    return mutants


def choose_mutants(found: list[Mutant], sample: int, chance: random.Random) -> list[Mutant]:
    """Returns the mutants in a random order, so that an ended run has tested some of each module."""
    chance.shuffle(found)
    if not sample:
        return found
    chosen: dict[Path, list[Mutant]] = defaultdict(list)
    for mutant in found:
        if len(chosen[mutant.path]) < sample:
            chosen[mutant.path].append(mutant)
    return [mutant for mutants in chosen.values() for mutant in mutants]


def print_results(results: dict[Path, Counter[str]]) -> None:
    print(f"\n{'module':50} mutants noticed unnoticed unexecuted")
    total: Counter[str] = Counter()
    for path, counts in [*results.items(), (ROOT / "total", total)]:
        figures = [counts.total(), counts["noticed"], counts["not noticed"], counts["not executed"]]
        print(f"{path.relative_to(ROOT)!s:50} {'{:7} {:7} {:9} {:10}'.format(*figures)}")
        if counts is not total:
            total += counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutate", nargs="+", required=True, help="files or folders below src")
    parser.add_argument("--tests", nargs="+", required=True, help="files or folders below tests")
    parser.add_argument("--sample", type=int, default=0, help="at most this many of each module")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample and of the order")
    parser.add_argument("--minutes", type=float, default=10.0, help="after the recording")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests for each mutant")
    options = parser.parse_args()
    os.chdir(ROOT)

    found = find_mutants(options.mutate)
    mutants = choose_mutants(found, options.sample, random.Random(options.seed))
    results: dict[Path, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory(prefix="podgpu-mutants-") as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        log = Path(folder) / "log"
        paths = sorted({mutant.path for mutant in mutants})
        recording = record(paths, options.tests, Path(folder))
        for test in sorted(recording.failed):
            print(f"left out, because it fails without a change: {test}", flush=True)
        preload(recording.modules)
        end = time.monotonic() + options.minutes * 60
        tested = 0
        for mutant in mutants:
            if time.monotonic() > end:
                break
            tested += 1
            every = find_tests(mutant, recording)
            tests = choose_tests(every, recording, options.seconds)
            expected = sum(recording.seconds[test] for test in tests)
            if not tests:
                result = "not executed"
            else:
                noticed = is_noticed(mutant, tests, expected, log)
                result = "noticed" if noticed else "not noticed"
            results[mutant.path][result] += 1
            if result != "noticed":
                print(f"{result} ({len(tests)} of {len(every)} tests): {mutant}", flush=True)
    print_results(dict(sorted(results.items())))
    print(f"{tested} of {len(found)} mutants tested")


if __name__ == "__main__":
    main()
