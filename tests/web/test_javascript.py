"""Checks the page's JavaScript with the TypeScript compiler, which `make lint-js` installs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = Path("src/podgpu/web/page")
COMPILER = ROOT / ".venv/javascript/node_modules/.bin/tsc"

pytestmark = pytest.mark.skipif(
    not COMPILER.exists() or shutil.which("node") is None,
    reason="the TypeScript compiler is not installed: run `make lint-js`, which needs node and npm",
)


def _check(root: Path) -> str:
    """Returns the errors that the compiler finds in the page below `root`."""
    command = [str(COMPILER), "-p", "jsconfig.json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_javascript_has_no_errors() -> None:
    assert _check(ROOT) == ""


def test_mistakes_are_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "jsconfig.json", tmp_path)
    shutil.copytree(ROOT / PAGE, tmp_path / PAGE)
    mistakes = (
        'import { plain, setTextt } from "./dom.js";',
        'import { readHash } from "./criteria.js";',
        'setTextt(readHash("").nods);',
    )
    (tmp_path / PAGE / "mistakes.js").write_text("\n".join(mistakes))

    errors = _check(tmp_path).splitlines()
    assert [error.partition(":")[0] for error in errors] == [
        f"{PAGE}/mistakes.js(1,10)",
        f"{PAGE}/mistakes.js(1,17)",
        f"{PAGE}/mistakes.js(3,23)",
    ]
