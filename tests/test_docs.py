"""Documentation: generated tables, links, names, queries and command lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from podgpu.cli.main import COMMANDS, cli
from podgpu.metrics.encode import families_in
from podgpu.metrics.fields import field_named, fields
from tests.test_promtool import needs_promtool, promtool

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NAME = re.compile(r"\b(?:podgpu_[a-z0-9_]+|DCGM_(?:FI|EXP)_[A-Z0-9_]+)(\*?)")


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in _FENCE.findall(text) if language in languages]


def test_generated_blocks_are_fresh() -> None:
    check = [sys.executable, "-m", "docs.generate", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def prose_of_pages() -> Iterator[tuple[Path, str]]:
    """Yields each page without its fenced blocks."""
    return ((page, _FENCE.sub("", page.read_text(encoding="utf-8"))) for page in PAGES)


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub generates for the headings."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_relative_links_resolve() -> None:
    for page, text in prose_of_pages():
        for target in _LINK.findall(text):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), (page.name, target)
            if anchor:
                assert anchor in anchors(there), (page.name, target)


def test_every_metric_named_exists() -> None:
    own = {
        name
        for group in ("exporter", "cluster", "hook", "autoscale")
        for name in families_in(group)
    }
    known = own | {name for field in fields().values() for name in field.names}
    for page in PAGES:
        for match in _NAME.finditer(page.read_text(encoding="utf-8")):
            name = match[0].removesuffix("*")
            if match[1]:
                assert any(one.startswith(name) for one in known), (page.name, match[0])
            else:
                assert name in own or field_named(name), (page.name, match[0])


@cache
def known_options() -> set[str]:
    commands = [cli.get_command(click.Context(cli), name) for name in COMMANDS]
    return {
        name for command in commands if command for option in command.params for name in option.opts
    }


def test_every_option_named_exists() -> None:
    for page, text in prose_of_pages():
        named = {m[0] for m in re.finditer(r"(?<=`)--[a-z][a-z-]+", text)}
        assert named <= known_options() | {"--help", "--reset-then-reuse-values"}, page.name


def test_every_chart_value_named_exists() -> None:
    """Checks words such as `exporter.kubernetes.dra`, `gpus.access=cdi` and
    `exporter.monitor.*`.
    """
    values: dict[str, Any] = yaml.safe_load(
        (ROOT / "deploy" / "helm" / "podgpu" / "values.yaml").read_text("utf-8")
    )
    for page, text in prose_of_pages():
        for span in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z*]+)+)(?:[=:][^`]*)?`", text):
            here = values
            for part in span.removesuffix(".*").split(".") if span.split(".")[0] in values else ():
                assert part in here, (page.name, span)
                here = here[part]


def test_every_path_named_exists() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"(?<![\w/.-])((?:deploy|tests|bench|docs)/[\w./-]+)", text):
            assert (ROOT / path.rstrip(".")).exists(), (page.name, path)
        for path in re.findall(r"`((?:[a-z]+/)+[a-z_]+\.(?:py|csv))`", text):
            assert (ROOT / path).exists() or (ROOT / "src" / "podgpu" / path).exists(), (
                page.name,
                path,
            )


@needs_promtool
def test_the_scrape_configuration_is_accepted(tmp_path: Path) -> None:
    scraping = (ROOT / "docs" / "scraping.md").read_text(encoding="utf-8")
    (block,) = [b for b in blocks(scraping, "yaml") if b.startswith("scrape_configs:")]
    configuration = tmp_path / "prometheus.yml"
    # Debian builds Prometheus without service discovery from Kubernetes.
    block = block.replace(
        "kubernetes_sd_configs: [{role: pod}]", "static_configs: [{targets: [localhost]}]"
    )
    configuration.write_text(block, encoding="utf-8")
    promtool("check", "config", configuration)


def queries_of(page: Path) -> list[str]:
    return blocks(page.read_text(encoding="utf-8"), "promql")


@needs_promtool
@pytest.mark.parametrize(
    "page", [page for page in PAGES if queries_of(page)], ids=lambda page: page.name
)
def test_queries_parse(page: Path, tmp_path: Path) -> None:
    queries = queries_of(page)
    rules = [{"alert": f"query{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"  # JSON is valid YAML
    file.write_text(json.dumps({"groups": [{"name": "docs", "rules": rules}]}), encoding="utf-8")
    promtool("check", "rules", file)
