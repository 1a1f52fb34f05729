"""The `helm` and `kubectl` commands of README, docs and the chart's README fit together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.render import CHART, NAMESPACE, ROOT, run_helm
from podgpu import REGISTRY
from tests.deploy.chart import notes

PAGES = [ROOT / "README.md", CHART / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_OTHERS = {"keda"}
"""Namespaces of programs other than podgpu."""


def list_commands(page: Path) -> Iterator[str]:
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.S | re.M):
        yield from re.findall(r"^\$ (.+)$", block.replace("\\\n", " "), re.M)


def list_installs() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for command in list_commands(page):
            if command.startswith("helm upgrade --install podgpu ") and "--values" not in command:
                found.append((str(page.relative_to(ROOT)), command))
    return found


@pytest.mark.parametrize(("page", "command"), list_installs())
def test_helm_renders_every_documented_install(page: str, command: str) -> None:
    words = shlex.split(command, comments=True)[4:]
    kept = ["--namespace", words[words.index("--namespace") + 1]]
    for flag, value in pairwise(words):
        if flag in ("--set", "--set-file"):
            kept += [flag, value]
    # A command that keeps the values of an earlier install may need them.
    if "--reset-then-reuse-values" in words:
        kept += ["--set", f"image.repository=registry.example.com/podgpu,{_FULL}"]
    done = run_helm("template", "podgpu", str(CHART), *kept)
    assert done.returncode == 0, (page, done.stderr)
    objects: list[dict[str, Any]] = [one for one in yaml.safe_load_all(done.stdout) if one]
    namespaces = {one["metadata"].get("namespace", NAMESPACE) for one in objects}
    assert namespaces - {"kube-system"} == {NAMESPACE}
    if "demo.enabled" not in command:  # kind has loaded its image
        assert f"{REGISTRY}/podgpu" not in done.stdout, "no image is published there"


_FULL = "cluster.profile=full"


def test_there_are_such_commands() -> None:
    pages = [page for page, _ in list_installs()]
    assert pages.count("README.md") == 1
    assert pages.count("deploy/helm/podgpu/README.md") == 3
    assert "docs/autoscaling.md" in pages


def test_all_commands_use_one_namespace() -> None:
    found = set()
    for page in PAGES:
        for command in list_commands(page):
            if "podgpu" in command:
                found.update(re.findall(r"(?:--namespace|kubectl -n)[ =]([a-z-]+)", command))
    assert found - _OTHERS == {NAMESPACE}


def test_the_notes_say_that_no_image_is_published() -> None:
    assert "Build the images (`make release`), push them to your registry" in notes({})
    own = notes({"image": {"repository": "registry.example.com/podgpu"}})
    assert "make release" not in own


def test_the_notes_lead_to_the_page_of_all_nodes() -> None:
    hint = "--set cluster.profile=full"
    assert hint in notes({}), "who installs without values learns how to get the page"
    assert hint in notes({"cluster": {"enabled": True}})
    for values in ({"cluster": {"profile": "full"}}, {"exporter": {"enabled": False}}):
        assert hint not in notes(values)
    assert "To open the page of all nodes" in notes({"cluster": {"profile": "full"}})
