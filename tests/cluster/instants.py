"""An instant of the rolling average both ways: as a server works it out, and from the samples it has of that time."""

from __future__ import annotations

import asyncio

from podgpu.catalog.names import meaning
from podgpu.cluster.prom.client import PrometheusClient
from podgpu.cluster.prom.instant import figures_at
from podgpu.cluster.prom.queries import Queries
from podgpu.cluster.prom.rolling import RollingQueries, figures_by_scope
from podgpu.cluster.prom.spellings import SpellingMemory
from podgpu.cluster.prom.targets import targets_of
from podgpu.cluster.reading import Scope
from podgpu.cluster.settings import ViewSettings
from podgpu.figures.from_exposition import NODE_LABELS

Figures = dict[Scope, float]


def both_ways(url: str, at: float, settings: ViewSettings) -> tuple[Figures, Figures]:
    return asyncio.run(_both_ways(PrometheusClient(url), at, settings))


async def _both_ways(client: PrometheusClient, at: float, settings: ViewSettings) -> tuple[Figures, Figures]:
    known = meaning(settings.used_field)
    assert known is not None
    queries = Queries((), NODE_LABELS, known.field)
    try:
        targets = targets_of((await client.ask(queries.targets(), at)).samples, NODE_LABELS)
        texts = [queries.samples(part, targets.copy_labels) for part in queries.parts()]
        samples = [sample for text in texts for sample in (await client.ask(text, at)).samples]
        spelt = SpellingMemory(NODE_LABELS, settings.window).take(samples, known.field.id, at)
        rolling = RollingQueries((), (), NODE_LABELS, known.field, settings, spelt)
        asked = {kind: (await client.ask(text, at)).samples for kind, text in rolling.all().items()}
        return figures_at(samples, targets, rolling), figures_by_scope(asked, NODE_LABELS)
    finally:
        await client.close()
