"""Checks of the workflows that GitHub runs: pinned actions, and no more permissions than needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from release.rootfs import PYTHONS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def read_workflow(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_each_job_has_its_own_permissions(path: Path) -> None:
    workflow = read_workflow(path)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"]
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])


def test_ci_runs_every_version_of_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [line.split(" :: ")[-1] for line in project["classifiers"] if "Python :: 3." in line]
    job = read_workflow(ROOT / ".github/workflows/ci.yaml")["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == named
    assert named == list(PYTHONS), "the Debian package has modules for these versions"
    assert any(".ci/run" in step.get("run", "") for step in job["steps"])
