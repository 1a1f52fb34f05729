"""`podgpu report`: reads the API of a cluster and prints Markdown, HTML or CSV."""

from __future__ import annotations

import asyncio
import csv
import html
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from markdown_it import MarkdownIt

from podgpu.charge import Tokens
from podgpu.cli.main import run
from podgpu.fleet.parts import EngineState
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.model import Condition, WorkloadOwner
from podgpu.past.books.record import cluster_recorder
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.cluster_app import cluster_application
from tests.fleet.states import gpu, holder, lost, node
from tests.fleet.test_loop import Script, Time, tell
from tests.net import free_port
from tests.web.server import running

PRICES = Prices("EUR", {"*": Price(100.0)}, "example")
HOSTILE = "a|b\\<img src=x onerror=alert(1)>`c` *d* _e_ ~~f~~ &lt; www.evil m@evil"
LINK = "[click](http://evil)"
HOSTILE_MODEL = "llama|<b>"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serves a cluster with 24 minutes of history: a busy pod, an idle one, a free and a lost GPU.
    Yields the URL.
    """
    time = Time()
    cluster = Cluster(Script, ViewSettings(), lambda: (PRICES, ()), time.clock)
    recorder = cluster_recorder(cluster)
    owners = {("ml", "idle"): WorkloadOwner("Deployment", LINK)}
    labels = {"ml/busy": {"team": "nlp"}, "ml/idle": {"team": HOSTILE}}
    for number in range(97):
        engine = EngineState("vllm", (HOSTILE_MODEL,), Tokens(4e6 * number, 1e6 * number))
        busy = gpu(0, holder("busy", utilization_ratio=0.5), busy=0.5)
        idle = gpu(1, holder("idle", utilization_ratio=0.0), busy=0.0)
        refused = gpu(2, conditions=(Condition("kubernetes_unhealthy", 1.0),))
        reading = node("n-1", busy, idle, refused, lost(3), read_at=time.now, pod_labels=labels)
        asyncio.run(
            cluster.round(
                Script(
                    tell(
                        ClusterReading(
                            (reading,), owners=owners, engines={("ml", "busy", "main"): engine}
                        )
                    )
                )
            )
        )
        recorder.record()
        time.now += 15
    app: Any = partial(
        cluster_application, past=SqlitePast(recorder, lambda: cluster.published.state)
    )
    with running(cluster, app=app) as client:  # type: ignore[arg-type]
        yield f"http://127.0.0.1:{client.address.port}"
    recorder.stop()


def test_tokens_by_model(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--url", url, "--range", "24h"]) == 0
    table = capsys.readouterr().out.partition("## Tokens")[2].partition("##")[0]
    assert "| Model | Prompt tokens | Generated tokens | J per token |" in table
    assert "| Cost EUR, per million tokens | Cost EUR, used |" in table
    cells = "384,000,000 | 96,000,000 | – | 0.08 | 0.04 | 0.00 | 0.04 | 0.04 | – | – |"
    assert f"| ml/llama\\|\\<b\\> | {cells}" in table


def test_markdown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--url", url, "--range", "24h", "--by", "label:team"]) == 0
    out = capsys.readouterr().out
    assert "# GPU report, " in out
    assert (
        "| 1.60 | 0.80 | 0.20 | 0.40 | – | – | 25% | – | 160.00 | 120.00 | 40.00 | – | 80.00 |"
        in out
    ), "the total includes unallocated GPUs"
    assert (
        "| nlp | 0.40 | 0.40 | 0.20 | 0.00 | – | – | 50% | – | 40.00 | 0.00 | 0.00 | – | – |" in out
    )
    assert "| unallocated | 0.80 | 0.00 |" in out
    owners = out[out.index("## Most idle owners") :]
    assert (
        "| 0.40 | 0.40 | 0.00 | 0.40 | – | – | 0% | – | 40.00 | 40.00 | 40.00 | – | – |" in owners
    )
    assert "ml/busy" not in owners
    assert "- The report covers 28m instead of 1d: there are no older records" in out
    broken, _, refused = out[out.index("## Broken GPUs now") :].partition("## Only Kubernetes")
    assert "GPU-3" in broken
    assert "GPU-2" not in broken
    assert "GPU-2" in refused
    assert "Kubernetes calls it unhealthy" in refused
    assert "GPU-1" not in broken
    assert "- there is no record before" in out
    assert "- The prices are examples" in out
    assert "# GPU report, 1970-01-12T13:45:00Z to 1970-01-12T14:12:35Z" in out, (
        "the title has the time range"
    )


def test_names_are_text_in_markdown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tenants choose the names of pods, owners and labels, so names must not become markup."""
    assert run(["report", "--url", url, "--range", "24h", "--by", "label:team"]) == 0
    out = capsys.readouterr().out
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(out)
    cells = [html.unescape(cell) for cell in re.findall("<td>(.*)</td>", page)]
    assert HOSTILE in cells
    assert f"ml/Deployment/{LINK}" in cells
    tags = set(re.findall(r"<(\w+)", page))
    assert tags == {"h1", "h2", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"}
    assert not re.search(r"http://|www\.|m@", out), "GitHub makes bare addresses links"


def query_of(*arguments: str) -> dict[str, str]:
    """Returns the query that the command sends. It gets an empty answer."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> str:
            connection, _ = server.accept()
            with connection:
                request = connection.recv(65_536).decode()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return request

        request = pool.submit(answer)
        url = f"127.0.0.1:{server.getsockname()[1]}"
        assert run(["report", "--url", url, "--format", "csv", *arguments]) == 0
    target = request.result().split()[1]
    return dict(parse_qsl(urlsplit(target).query))


def test_this_month() -> None:
    """The month begins in UTC, as in budgets and on the page."""
    first = datetime.fromtimestamp(float(query_of("--range", "month")["from"]), UTC)
    now = datetime.now(UTC)
    assert first == datetime(now.year, now.month, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("at", "first"),
    [
        ("2025-10-31T12:00:00Z", "2025-10-01"),
        ("2025-11-19T12:00:00-05:00", "2025-11-01"),
        ("2025-10-31T23:30:00-04:00", "2025-11-01"),
        ("2024-02-29T23:59:59Z", "2024-02-01"),
        ("2025-01-01T00:00:01Z", "2025-01-01"),
        ("2025-01-01T00:00:00Z", "2024-12-01"),
    ],
)
@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin", "Asia/Tokyo"])
def test_a_month_does_not_depend_on_the_time_zone(
    zone: str, at: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when daylight saving time ends. The last instant of a month ends its period."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        query = query_of("--range", "month", "--at", at)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert float(query["from"]) == datetime.fromisoformat(f"{first}T00:00:00Z").timestamp()
    assert float(query["to"]) == datetime.fromisoformat(at).timestamp()


def test_html_and_csv(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--url", url, "--by", "label:team", "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert f"<td>{html.escape(HOSTILE)}</td>" in page
    assert page.count("<main>") == 1
    scrollable = re.findall('<div tabindex="0" role="region" aria-label="([^"]+)">', page)
    assert scrollable == re.findall("<h2>([^<]+)</h2><div", page), "the keyboard can scroll it"
    assert '<table class="prose">' in page, "sentences are wrapped"
    assert "<img" not in page
    assert '<meta name="viewport"' in page, "a phone must not shrink the page"
    assert "<h2>By team</h2>" in page
    assert "<tr><th>Team</th><th>GPU-hours</th>" in page
    assert "run <code>podgpu forget</code>" in page, "the advice for the lost GPU"
    assert run(["report", "--url", url, "--by", "namespace", "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row["x_Namespace"], row["BilledCost"]) for row in rows] == [
        ("ml", "80.0"),
        ("", "80.0"),
    ]


@pytest.mark.parametrize(
    "wrong", [["--by", "gpu"], ["--range", "1y"], ["--format", "pdf"], ["--url", "http:/x"]]
)
def test_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unreachable_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--url", f"127.0.0.1:{free_port()}"]) == 1
    error = capsys.readouterr().err
    assert (error.count("\n"), "nothing listens there" in error) == (1, True)
