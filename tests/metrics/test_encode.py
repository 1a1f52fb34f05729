"""The encoder against prometheus_client, and against a real Prometheus."""

from __future__ import annotations

import string
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from podgpu.metrics.encode import Family, Labels, Sample, encode
from podgpu.metrics.parse import parse_text
from tests.cluster.real_servers import needs
from tests.metrics.test_opencost import ask, scraped
from tests.nodes.clock import wait_until
from tests.nodes.node import Node
from tests.web.conftest import client, node  # noqa: F401 - fixtures
from tests.web.server import Client

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"))
LETTERS = string.ascii_letters + "_"
NAMES = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + string.digits, max_size=20)).filter(
    lambda name: not name.endswith(("_total", "_created"))
)


@given(
    st.dictionaries(NAMES.filter(lambda n: not n.startswith("__")), TEXT, max_size=5),
    st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False)),
    NAMES,
    TEXT,
)
def test_the_oracle_reads_labels_and_values(labels: dict[str, str], value: float, name: str, help_text: str) -> None:
    text = encode([Family(name, "gauge", help_text, (Sample(Labels(labels.items()), value),))]).decode()
    assert text.split("\n")[1] == f"# TYPE {name} gauge"
    (family,) = text_string_to_metric_families(text)
    (sample,) = family.samples
    assert (sample.name, sample.labels, sample.value) == (name, labels, value)


@needs("prometheus")
def test_a_real_prometheus_stores_all_series(
    node: Node,  # noqa: F811
    client: Client,  # noqa: F811
    folder: Path,
) -> None:
    node.take_turns()
    with scraped(folder, client) as server:
        wait_until(lambda: bool(ask(server, "podgpu_allocation_info")), "Prometheus has scraped the exporter")
        answer = ask(server, '{job="podgpu"}')
    stored = {
        frozenset((name, text) for name, text in labels.items() if name not in ("job", "instance"))
        for labels, _ in answer
        if labels["__name__"] != "up" and not labels["__name__"].startswith("scrape_")
    }
    assert stored == {
        frozenset((k, v) for k, v in {**sample.labels, "__name__": sample.name}.items() if v)
        for family in parse_text(client.ask("/metrics").text)
        for sample in family.samples
    }
