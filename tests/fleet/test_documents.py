"""The metrics text and the document of a node contain equal values for the cluster view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from podgpu.fleet.read.scrape import reduce_state
from podgpu.metrics.adapter import node_from_samples, samples_in
from podgpu.model import decode_node
from tests.nodes.node import node_of, read_description

NODES = Path(__file__).parents[1] / "nodes"
FIELDS = frozenset({"DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"})
SCENARIOS = [
    "dcgm-names-4.9",
    "dra",
    "faulty",
    "hpc",
    "mig",
    "shared",
    "usage-mig",
    "usage-time-sliced",
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_text_and_document_agree(name: str, tmp_path: Path) -> None:
    with node_of(read_description(NODES / name), tmp_path) as node:
        node.take_turns()
        published = node.agent.published
        document = reduce_state(decode_node(published.render("fresh_json").plain), FIELDS)
        (text,) = node_from_samples(samples_in(published.fresh.plain.decode()), keep_fields=FIELDS)
    assert list(find_differences(to_builtins(text), to_builtins(document))) == []


def find_differences(text: Any, document: Any, path: str = "") -> Any:
    """The document may have more fields. Ratios are rounded in the text."""
    if isinstance(text, dict) and isinstance(document, dict):
        for name, value in text.items():
            yield from find_differences(
                value, document.get(name, "nvidia" if name == "maker" else None), f"{path}.{name}"
            )
    elif (
        isinstance(text, list | tuple)
        and isinstance(document, list | tuple)
        and len(text) == len(document)
    ):
        for number, value in enumerate(text):
            yield from find_differences(value, document[number], f"{path}[{number}]")
    elif isinstance(text, float) and isinstance(document, float):
        if text != pytest.approx(document, rel=1e-4):
            yield path, text, document
    elif text != document:
        yield path, text, document
