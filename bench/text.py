"""Text: podgpu's encoder and parser compared with prometheus_client, with the metrics of a node of
8 GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bench.figures import Figure, cpu_seconds_of_each
from bench.node import simulated_node
from podgpu.metrics.dcgm import render_dcgm
from podgpu.metrics.encode import Family, encode
from podgpu.metrics.parse import parse_text
from podgpu.metrics.render import render_own

MIN_ENCODER_RATIO = 10
MIN_PARSER_RATIO = 10


class FixedCollector:
    """Passes converted families to prometheus_client."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._metrics = [_convert(family) for family in families if family.samples]

    def collect(self) -> list[Metric]:
        return self._metrics


def _convert(family: Family) -> Metric:
    metric = Metric(family.name, family.help, family.type)
    for sample in family.samples:
        metric.add_sample(family.name, dict(sample.labels.pairs), sample.value)
    return metric


def measure(turns: int = 50) -> list[Figure]:
    with simulated_node() as node:
        state, policy = node.agent.published.state, node.agent.settings.policy
    families = [*render_dcgm(state, policy), *render_own(state, policy)]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FixedCollector(families))
    encoded = encode(families)
    if _samples(encoded) != _samples(generate_latest(registry)):
        raise RuntimeError("prometheus_client printed other samples")
    text = encoded.decode()
    encoding, rendering, theirs, parsing, their_parsing = cpu_seconds_of_each(
        turns,
        lambda: encode(families),
        lambda: encode((*render_dcgm(state, policy), *render_own(state, policy))),
        lambda: generate_latest(registry),
        lambda: parse_text(text),
        lambda: list(text_string_to_metric_families(text)),
    )
    return [
        Figure(
            "encode: prometheus_client over podgpu",
            theirs / encoding,
            "x",
            at_least=MIN_ENCODER_RATIO,
        ),
        Figure("  encode", encoding * 1e6, "us"),
        Figure("  render and encode", rendering * 1e6, "us"),
        Figure(
            "parse: prometheus_client over podgpu",
            their_parsing / parsing,
            "x",
            at_least=MIN_PARSER_RATIO,
        ),
        Figure("  parse", parsing * 1e6, "us"),
        Figure("  samples", sum(len(family.samples) for family in families)),
    ]


def _samples(text: bytes) -> list[tuple[str, list[tuple[str, str]], float]]:
    # Removes TYPE lines, which make the parser rename counters. dcgm-exporter's floats have six
    # decimals.
    lines = "".join(
        line for line in text.decode().splitlines(keepends=True) if not line.startswith("#")
    )
    parsed = (
        sample for family in text_string_to_metric_families(lines) for sample in family.samples
    )
    return sorted((s.name, sorted(s.labels.items()), round(s.value, 6)) for s in parsed)
