"""An instant of the rolling average both ways: as a server works it out, and from the samples it has of that time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from podgpu.cluster.prom.client import PrometheusClient
from podgpu.cluster.prom.instant import figures_at
from podgpu.cluster.prom.queries import Queries
from podgpu.cluster.prom.rolling import RollingQueries, figures_by_scope
from podgpu.cluster.prom.spellings import SpellingMemory
from podgpu.cluster.prom.targets import targets_of
from podgpu.cluster.reading import Scope
from podgpu.cluster.settings import ViewSettings
from podgpu.figures.from_exposition import NODE_LABELS
from podgpu.metrics.names import meaning

Figures = dict[Scope, float]


def both_ways(url: str, at: float, *used: ViewSettings) -> list[tuple[Figures, Figures]]:
    """For each meaning of "used". All are of the same field, whose samples are asked for once."""
    return asyncio.run(_both_ways(PrometheusClient(url), at, used))


async def _both_ways(
    client: PrometheusClient, at: float, used: Sequence[ViewSettings]
) -> list[tuple[Figures, Figures]]:
    (name,) = {settings.used_field for settings in used}
    known = meaning(name)
    assert known is not None
    queries = Queries((), NODE_LABELS, known.field)
    found = []
    try:
        targets = targets_of((await client.ask(queries.targets(), at)).samples, NODE_LABELS)
        texts = [queries.samples(part, targets.copy_labels) for part in queries.parts()]
        samples = [sample for text in texts for sample in (await client.ask(text, at)).samples]
        for settings in used:
            spelt = SpellingMemory(NODE_LABELS, settings.window).take(samples, known.field.id, at)
            rolling = RollingQueries((), (), NODE_LABELS, known.field, settings, spelt)
            asked = {kind: (await client.ask(text, at)).samples for kind, text in rolling.all().items()}
            found.append((figures_at(samples, targets, rolling), figures_by_scope(asked, NODE_LABELS)))
    finally:
        await client.close()
    return found
