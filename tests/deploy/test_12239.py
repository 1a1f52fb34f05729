"""NVIDIA's dashboard 12239 as it is on 4.8's names, and as `podgpu migrate` rewrites it on 4.9's: the same numbers."""

from __future__ import annotations

import json
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.migrate.rewrite import Direction, rewrite_expression
from tests.cluster.real_servers import PATIENCE, expositions_at, needs, prometheus, wait_for
from tests.deploy.grafana import as_sent, several
from tests.deploy.test_dashboards import NVIDIA_12239
from tests.nodes.node import FIXTURES
from tests.two_names import renamed

NODES = FIXTURES.parent / "nodes"
H200 = (FIXTURES / "h200" / "default.prom").read_text(encoding="utf-8")
EXPOSITIONS = {
    **{
        f"podgpu-{names}": (NODES / f"dcgm-names-{names}" / "expected.prom").read_text()
        for names in ("4.8", "4.9", "both")
    },
    "dcgm-exporter-4.8": H200,
    "dcgm-exporter-4.9": renamed(H200, "4.9"),
}
"""One simulated GPU under three sets of names; and a real H200's exposition, and what it would be in 4.9."""
Answer = dict[str, float]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pg") as folder, expositions_at(EXPOSITIONS.__getitem__) as address:
        jobs = [
            {
                "job_name": name,
                "metrics_path": f"/{name}",
                "static_configs": [{"targets": [address], "labels": {"instance": name}}],
            }
            for name in EXPOSITIONS
        ]
        told = json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs})
        with prometheus(Path(folder), configuration=told) as server:
            wait_for(lambda: _ask(server, "sum(up)") == {"": len(EXPOSITIONS)}, "every exposition is scraped")
            yield server


def _ask(server: str, query: str) -> Answer:
    """GPU -> value; of one without labels: "" -> value."""
    with urllib.request.urlopen(
        f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=PATIENCE
    ) as answer:
        found = json.load(answer)["data"]["result"]
    return {one["metric"].get("gpu", ""): float(one["value"][1]) for one in found}


def _asked_of(expression: str, exposition: str) -> str:
    return as_sent(expression, {"instance": several([exposition]), "gpu": several(["0", "1"])})


def _figures(server: str, query: str, exposition: str) -> Answer:
    """Of an exposition that could not be scraped in time just now there are none until it is scraped again."""
    found: Answer = {}
    wait_for(lambda: found.update(_ask(server, _asked_of(query, exposition))) or found, f"{exposition}: {query}")
    return found


@needs("prometheus")
@pytest.mark.parametrize("title", NVIDIA_12239)
@pytest.mark.parametrize(
    ("old_exposition", "new_exposition"),
    [
        ("podgpu-4.8", "podgpu-4.9"),
        ("podgpu-4.8", "podgpu-both"),
        ("dcgm-exporter-4.8", "dcgm-exporter-4.9"),
    ],
)
def test_rewritten_it_tells_the_same(url: str, title: str, old_exposition: str, new_exposition: str) -> None:
    old = NVIDIA_12239[title]
    new = rewrite_expression(old, Direction("4.9")).text
    assert new != old
    before, after = _figures(url, old, old_exposition), _figures(url, new, new_exposition)
    assert after == pytest.approx(before, rel=1e-6)
