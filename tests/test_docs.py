"""The documentation against the code: tables, links, names, queries and command lines."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from docs.fault_table import fault_table, faults
from podgpu.cli.cluster import CLUSTER_OPTIONS
from podgpu.cli.exporter_options import EXPORTER_OPTIONS
from podgpu.cli.main import COMMANDS, cli
from podgpu.cli.options import normalize_arguments
from podgpu.cluster.collect import Collector
from podgpu.gpu.source import ReadsOthers, Telemetry
from podgpu.holders import AllocationSource
from podgpu.metrics.families import AUTOSCALE_FAMILIES, CLUSTER_FAMILIES, HOOK_FAMILIES, OWN_FAMILIES
from podgpu.metrics.fields import field_named, fields

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
README = PAGES[0].read_text(encoding="utf-8")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NAME = re.compile(r"\b(?:podgpu_[a-z0-9_]+|DCGM_(?:FI|EXP)_[A-Z0-9_]+)(\*?)")

DOUBTS = {"SwitchLogError", "_WindowError"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in _FENCE.findall(text) if language in languages]


def test_generated_blocks_are_fresh() -> None:
    check = [sys.executable, "-m", "docs.generate", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stale_block_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "README.md", ROOT / "docs" / "metrics.md", *(ROOT / "docs").glob("*.py")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    page = tmp_path / "docs" / "metrics.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("| `podgpu_device_count` |", "| `podgpu_gpu_count` |"), encoding="utf-8")
    check = [sys.executable, "-m", "docs.generate", "--check"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("\n") == 1
    assert "podgpu_gpu_count" in done.stdout
    assert "podgpu_device_count" in done.stdout


def test_a_marked_fault_is_a_row_under_its_area(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "serve"
    folder.mkdir(parents=True)
    (folder / "test_slow.py").write_text(
        '@pytest.mark.fault("a client | reads"\n  " slowly", "it waits alone")\ndef test_one() -> None: ...\n'
        'many = pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.fault("x", "y"))])\n'
        '@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.fault("p", "q"))])\n'
        "def test_two(x: int) -> None: ...\n",
        encoding="utf-8",
    )
    lines = list(fault_table(tmp_path / "tests"))
    assert "### Scrapers, browsers and strangers" in lines
    assert "| A client \\| reads slowly | It waits alone | [serve/test_slow.py](../tests/web/test_slow.py) |" in lines
    assert "| P | Q | [serve/test_slow.py](../tests/web/test_slow.py) |" in lines


@pytest.mark.parametrize("mark", ["fault(WHAT, 'y')", "fault('x')", "fault('x', f'{y}')", "fault('x', outcome='y')"])
def test_a_mark_that_is_no_literal_text_is_refused_by_name(tmp_path: Path, mark: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(f"\n@pytest.mark.{mark}\ndef test_x(): ...\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"tests/test_x\.py:2: fault\(\) takes two literal texts"):
        list(fault_table(tmp_path / "tests"))


def test_every_fault_of_the_tests_is_on_the_reliability_page() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    marked = list(faults(ROOT / "tests"))
    assert marked
    rows = [line for line in page.splitlines() if line.startswith("| ") and "(../tests/" in line]
    assert len(rows) == len(marked)
    assert {row.rsplit("(../", 1)[1].removesuffix(") |") for row in rows} == {fault.path for fault in marked}


@pytest.mark.parametrize(
    ("page", "block"), [("README.md", "sample"), ("docs/metrics.md", "metrics"), ("docs/counters.md", "counters")]
)
def test_the_page_has_the_block(page: str, block: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8").count(f"<!-- generated:{block} -->") == 1


# --- links


def prose_of_pages() -> Iterator[tuple[Path, str]]:
    """Each page without its fenced blocks."""
    return ((page, _FENCE.sub("", page.read_text(encoding="utf-8"))) for page in PAGES)


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
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


# --- names


def test_every_metric_named_exists() -> None:
    own = {family.name for family in (*OWN_FAMILIES, *CLUSTER_FAMILIES, *HOOK_FAMILIES, *AUTOSCALE_FAMILIES)}
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
    known = {name for command in commands if command for option in command.params for name in option.opts}
    return known | {f"--{option.flag}" for option in CLUSTER_OPTIONS}


def test_every_option_named_exists() -> None:
    for page, text in prose_of_pages():
        named = {m[0] for m in re.finditer(r"(?<=`)--[a-z][a-z-]+", text)}
        assert named <= known_options() | {"--check"}, page.name


def test_every_chart_value_named_exists() -> None:
    """`exporter.kubernetes.dra`, `gpus.access=cdi`, `exporter.monitor.*`: what begins as a chart's value is one."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "helm" / "podgpu" / "values.yaml").read_text("utf-8"))
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


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "podgpu"
    packages = {f"`{path.parent.name}/`" for path in source.glob("*/__init__.py")}
    modules = {f"`{path.name}`" for path in source.glob("*.py") if not path.name.startswith("__")}
    assert {room for room in packages | modules if room not in text} == set()


def test_every_file_and_function_on_the_map_exists() -> None:
    """`agent/parts.py`: `NodeParts.snapshot` must be there under these names."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:[a-z]+/)+[a-z_]+\.(?:py|csv))`", text):
        assert (ROOT / path).exists() or (ROOT / "src" / "podgpu" / path).exists(), path
    for path, name in re.findall(r"`((?:[a-z]+/)+[a-z_]+\.py)`: `([\w.]+)", text):
        body = (ROOT / "src" / "podgpu" / path).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"(?:def|class) {part}\b", body), f"{path}: {name}"


@pytest.mark.parametrize("protocol", [Telemetry, ReadsOthers, AllocationSource, Collector], ids=lambda p: p.__name__)
def test_every_method_of_a_source_is_on_the_map(protocol: type) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    members = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
    assert {name for name in members if not re.search(rf"`{name}\b", text)} == set()


# --- what is shown to be typed


def command_lines() -> Iterator[list[str]]:
    """The arguments of every `podgpu ...` in the README's shell blocks."""
    for block in blocks(README, "console", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            for number, word in enumerate(words):
                if "helm" not in words[:number] and Path(word).name == "podgpu" and words[number + 1 :]:
                    following = words[number + 1 :]
                    ends = [i for i, w in enumerate(following) if w in ("&&", "|", ";", "&", ">")]
                    yield following[: ends[0]] if ends else following


def parse(arguments: list[str]) -> None:
    """Up to the point where the command would run. Raises click's error when an option is not there."""
    name = arguments[0]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, f"there is no command {name!r}"
    command.make_context(name, normalize_arguments(arguments, EXPORTER_OPTIONS)[1:])


@pytest.mark.parametrize("arguments", list(command_lines()), ids=" ".join)
def test_command_lines_parse(arguments: list[str]) -> None:
    parse(arguments)


def test_there_are_command_lines_and_wrong_ones_are_seen() -> None:
    assert len(list(command_lines())) >= 3
    with pytest.raises(click.UsageError):
        parse(["exporter", "--no-such-option"])


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|\$ )make ([a-z]+)", page.read_text(encoding="utf-8")))
        assert named <= targets, page.name


# --- Prometheus' own opinion


@needs_promtool
def test_the_scrape_configuration_is_accepted(tmp_path: Path) -> None:
    scraping = (ROOT / "docs" / "scraping.md").read_text(encoding="utf-8")
    (block,) = [b for b in blocks(scraping, "yaml") if b.startswith("scrape_configs:")]
    configuration = tmp_path / "prometheus.yml"
    # Debian builds Prometheus without service discovery from Kubernetes.
    block = block.replace("kubernetes_sd_configs: [{role: pod}]", "static_configs: [{targets: [localhost]}]")
    configuration.write_text(block, encoding="utf-8")
    done = subprocess.run(["promtool", "check", "config", configuration], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def queries_of(page: Path) -> list[str]:
    return blocks(page.read_text(encoding="utf-8"), "promql")


@needs_promtool
@pytest.mark.parametrize("page", list(filter(queries_of, PAGES)), ids=lambda page: page.name)
def test_queries_parse(page: Path, tmp_path: Path) -> None:
    queries = queries_of(page)
    rules = [{"alert": f"query{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "docs", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Who ran on a shared GPU


def test_every_doubt_about_context_switches_is_explained() -> None:
    """Each reason word that the code can count stands in docs/usage.md, and no other."""
    found = set()
    for path in (ROOT / "src/podgpu/gpu/nvml").glob("switch_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DOUBTS:
                assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}: a word a person can look up"
                found.add(node.args[0].value)
    page = (ROOT / "docs/usage.md").read_text(encoding="utf-8")
    rows = page.split('{source="switches"}` counts by reason:')[1].split("\n\n")[1].splitlines()[2:]
    told = [word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(set(told)) == len(told)
    assert set(told) == found - {"closed"}, "one that was closed is asked nothing any more"


def test_the_figures_of_usage_from_stand_in_one_place() -> None:
    """docs/usage.md shows some of those of docs/benchmarks.md."""
    head = "| truth | `samples` | `switches` | `exact` |"
    shown, measured = (
        (ROOT / "docs" / name).read_text(encoding="utf-8").split(head)[1].split("\n\n")[0].splitlines()[2:]
        for name in ("usage.md", "benchmarks.md")
    )
    assert len(shown) >= 2
    assert set(shown) < set(measured)
