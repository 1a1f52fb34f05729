"""Golden scenarios: one folder each, scraped through a real server and compared byte by byte.

`pytest tests/nodes --rewrite-golden` rewrites the expected texts. Read the diff before you commit
it.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from podgpu.metrics.encode import CONTENT_TYPE, families_in
from tests.nodes.node import node_of, read_description
from tests.web.server import running

HERE = Path(__file__).parent
SCENARIOS = sorted(path.parent.name for path in HERE.glob("*/node.json"))
DECLARED = families_in("exporter")

# Only these labels differ between machines. Durations do not, because the clock is fake.
VARYING = re.compile(r'(?<=podgpu_exporter_build_info\{)version="[^"]*",python_version="[^"]*"')
MASKED = 'version="0.0.0",python_version="3.0.0"'


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, folder: Path, request: pytest.FixtureRequest) -> None:
    text = exposition_of(HERE / name, folder)
    golden = HERE / name / "expected.prom"
    if request.config.getoption("--rewrite-golden"):
        golden.write_bytes(text.encode())
    expected = golden.read_bytes().decode()
    if text != expected:
        pytest.fail(
            "".join(difflib.unified_diff(_lines(expected), _lines(text), "expected", "got", n=0)),
            pytrace=False,
        )


@pytest.mark.parametrize("name", SCENARIOS)
def test_expected_text_is_sound(name: str) -> None:
    """Parses the golden text with the official parser."""
    text = (HERE / name / "expected.prom").read_bytes().decode()
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    series = Counter((sample.name, *sorted(sample.labels.items())) for sample in samples)
    assert [one for one, times in series.items() if times > 1] == []
    assert len(samples) == sum(not line.startswith("#") for line in text.splitlines())
    for sample in samples:
        assert all(re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label) for label in sample.labels), (
            sample
        )
    for family in families:
        if family.name.startswith("podgpu_"):
            _assert_declared(family)


def _assert_declared(family: Metric) -> None:
    # The parser returns "unknown" for untyped metrics, and counter names without _total.
    kind = {"unknown": "untyped"}.get(family.type, family.type)
    name = f"{family.name}_total" if kind == "counter" else family.name
    assert name in DECLARED
    declared = DECLARED[name]
    assert (kind, family.documentation) == (declared.type, declared.help)
    for sample in family.samples:
        assert sample.name == name
        assert {"Hostname" if label == "hostname" else label for label in sample.labels} <= set(
            declared.labels
        )


def exposition_of(scenario: Path, folder: Path) -> str:
    with node_of(read_description(scenario), folder) as node:
        node.take_turns()
        with running(node.agent) as client:
            answer = client.ask("/metrics")
    assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE)
    return VARYING.sub(MASKED, answer.text)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
