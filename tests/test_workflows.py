"""Checks of the workflows that GitHub runs: when, with which Python, pinned actions, and no more
permissions than needed.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from release.rootfs import PYTHONS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.y*ml"))
MAY_WRITE = {
    ("release", "registry"): {"packages", "id-token"},
    ("release", "github"): {"contents", "id-token"},
    ("release", "pypi"): {"id-token"},
}
"""What the jobs of the workflows may write. All others only read."""


def read_workflow(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_each_job_has_its_own_permissions(path: Path) -> None:
    workflow = read_workflow(path)
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        rights = job["permissions"]
        may_write = MAY_WRITE.get((path.stem, name), set())
        assert {right for right, level in rights.items() if level != "read"} == may_write
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])


def test_ci_runs_on_pushes_and_pull_requests() -> None:
    # YAML reads the key `on` as true.
    events = read_workflow(ROOT / ".github/workflows/ci.yaml")[True]
    assert events == {"push": {"branches": ["main"]}, "pull_request": None}


def test_dependencies_are_updated_every_week() -> None:
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text(encoding="utf-8"))
    intervals = {
        (update["package-ecosystem"], update["directory"]): update["schedule"]["interval"]
        for update in updates["updates"]
    }
    assert intervals == dict.fromkeys(
        [("github-actions", "/"), ("pip", "/"), ("docker", "/")], "weekly"
    )


def test_ci_runs_every_version_of_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [line.split(" :: ")[-1] for line in project["classifiers"] if "Python :: 3." in line]
    job = read_workflow(ROOT / ".github/workflows/ci.yaml")["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == named
    assert named == list(PYTHONS), "the Debian package has modules for these versions"
    assert any(".ci/run" in step.get("run", "") for step in job["steps"])
