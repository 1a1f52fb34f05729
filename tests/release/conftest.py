"""Builds a release of the last commit once. Only `make check-release` runs these tests, because
they need downloads.

`DIST=dist make check-release` tests an existing release.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# These tests must find only what they install. pip would take the package of this tree for it.
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _paths if Path(path) != ROOT / "src")


def build_release(folder: Path, python: Path = Path(sys.executable)) -> Path:
    helm = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{python.parent}:{helm}:{os.environ['PATH']}"}
    command = [str(python), "-m", "release", "--arch", "amd64", "--dist", str(folder)]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if "no longer available" in result.stderr or "URLError" in result.stderr:
        pytest.skip(
            f"the Debian mirror does not have the locked packages: {result.stderr.splitlines()[-1]}"
        )
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "DIST" in os.environ:
        return Path(os.environ["DIST"]).absolute()
    return build_release(tmp_path_factory.mktemp("release") / "dist")
