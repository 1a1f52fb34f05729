"""Mutation testing with mutmut: `make mutants MUTATE=src/podgpu/charge.py TESTS=tests/test_charge.py`.

Changes the code in a copy of the working tree, one place at a time, and runs the tests. Prints how
many changes the tests noticed, and a diff of each change that they did not notice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
[tool.mutmut]
source_paths = ["src/podgpu"]
only_mutate = {mutate}
pytest_add_cli_args_test_selection = {tests}
also_copy = ["bench", "deploy", "docs", "endurance", "release", "src", "tests"]
"""
MUTMUT = [sys.executable, "-W", "ignore", "-m", "mutmut"]


def copy_tree(target: Path) -> None:
    """Copies the files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def write_config(tree: Path, mutate: list[str], tests: list[str]) -> None:
    patterns = [f"{path.rstrip('/')}/*" if (ROOT / path).is_dir() else path for path in mutate]
    with (tree / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(CONFIG.format(mutate=json.dumps(patterns), tests=json.dumps(tests)))


def run_mutants(tree: Path, minutes: float) -> None:
    """Runs mutmut for at most this time. It saves each result, so an ended run has results too."""
    log = tree / "mutmut.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*MUTMUT, "run"], cwd=tree, stdout=output, stderr=output)
        try:
            process.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            print(
                f"stopped after {minutes:g} minutes: the figures are of the mutants tested so far"
            )
    if not list(tree.glob("mutants/**/*.meta")):
        sys.exit(f"mutmut failed:\n{log.read_text(errors='replace')[-3000:]}")


def ask(tree: Path, *words: str) -> str:
    done = subprocess.run([*MUTMUT, *words], cwd=tree, check=True, capture_output=True, text=True)
    return done.stdout


def report(tree: Path) -> None:
    results = [line.split(": ") for line in ask(tree, "results", "--all", "true").splitlines()]
    tested = [(name.strip(), result) for name, result in results if result != "not checked"]
    unnoticed = [name for name, result in tested if result == "survived"]
    untested = [name for name, result in tested if result == "no tests"]
    for name in unnoticed:
        print(ask(tree, "show", name))
    for name in untested:
        print(f"no test runs this code: {name}")
    noticed = len(tested) - len(unnoticed) - len(untested)
    print(f"{noticed} of {len(tested)} mutants noticed", end="")
    print(f", {len(unnoticed)} not noticed, {len(untested)} in code that no test runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutate", nargs="+", required=True, help="files or folders below src")
    parser.add_argument("--tests", nargs="+", required=True, help="files or folders below tests")
    parser.add_argument("--minutes", type=float, default=10.0, help="end after this time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="podgpu-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        write_config(tree, options.mutate, options.tests)
        run_mutants(tree, options.minutes)
        report(tree)


if __name__ == "__main__":
    main()
