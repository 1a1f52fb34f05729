"""Exporters that failed: however many there are, one that is back is soon noticed."""

from __future__ import annotations

import asyncio

import pytest

from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend, ScrapeSettings
from podgpu.errors import UsageError
from tests.cluster.test_scrape import exporters, exposition_of


def test_one_of_many_that_is_back_is_noticed_within_a_few_turns() -> None:
    async def go() -> None:
        async with exporters(*(exposition_of(n) for n in range(24))) as fleet:
            fleet.hanging = set(range(24))
            backend = ScrapeBackend(FixedTargets(fleet.urls), settings=ScrapeSettings(deadline=0.3, concurrency=8))
            await backend.turn()
            fleet.hanging.remove(17)
            for _ in range(10):  # three and a few more: the machine may stand still in one
                if not backend.reading().nodes:
                    await backend.turn()
            assert [node.node for node in backend.reading().nodes] == ["node-17"]
            await backend.close()

    asyncio.run(go())


@pytest.mark.parametrize(("failed", "slots"), [(0, 8), (10, 8), (100, 25), (1000, 250), (5000, 256)])
def test_how_many_of_those_are_asked_at_a_time(failed: int, slots: int) -> None:
    assert ScrapeSettings(concurrency=64).slots_for_failed(failed) == slots


def test_one_url_with_a_query_is_not_named_twice() -> None:
    once = "http://a:9400/metrics?x=1"
    assert FixedTargets([once, once, "http://a:9400/metrics", "http://b:9400?x=1"]).urls() == (
        once,
        "http://a:9400/metrics",
        "http://b:9400?x=1",
    )


@pytest.mark.parametrize("other", ["http://a:9400/metrics?x=2", "http://u:p@a:9400/metrics?x=1"])
def test_one_exposition_with_two_queries_or_logins_is(other: str) -> None:
    with pytest.raises(UsageError, match="different logins or queries"):
        FixedTargets(["http://a:9400/metrics?x=1", other])
