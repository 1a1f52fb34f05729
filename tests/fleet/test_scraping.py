"""The collector that scrapes exporters, with real HTTP servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.clock import Clock
from podgpu.errors import Note, SourceError, UsageError
from podgpu.fleet.read.scrape import ScrapeCollector, unique_targets
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.settings import ViewSettings
from podgpu.http_client import Access
from podgpu.model import DeviceState, Fields, WorkloadOwner
from tests.fleet.exporters import Exporter, metrics_text, node_document, running_exporters
from tests.nodes.clock import PATIENCE

SETTINGS = ViewSettings(drop_after=60.0)


class FakeClock:
    now = 100.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.now + 1000.0)


def run_rounds(
    *exporters: Exporter,
    steps: Callable[[ScrapeCollector], Awaitable[ClusterReading]] | None = None,
    **options: object,
) -> ClusterReading:
    """Runs one round, or `steps`, and returns the reading."""

    async def run() -> ClusterReading:
        async with running_exporters(*exporters) as urls:
            collector = ScrapeCollector(lambda: urls, SETTINGS, **options)  # type: ignore[arg-type]
            reading = await (steps(collector) if steps else collector.run_round())
            await collector.close()
            return reading

    return asyncio.run(run())


def read_times(reading: ClusterReading) -> dict[str, float]:
    return {node.state.node: node.read_at for node in reading.nodes}


def test_documents_and_text_give_the_same_reading() -> None:
    podgpu, dcgm = Exporter(document=node_document(0, taken_at=1099.0)), Exporter(metrics_text(1))
    owners = {("team", "pod"): WorkloadOwner("Deployment", "chat")}
    kept = frozenset({("team", "kept")})
    reading = run_rounds(
        podgpu,
        dcgm,
        clock=FakeClock().clock(),
        read_owners=lambda: owners,
        read_kept_pods=lambda: kept,
    )
    assert read_times(reading) == {"node-0": 100.0, "node-1": 100.0}
    assert [n.state.producer for n in reading.nodes] == ["podgpu", "dcgm-exporter"]
    assert [d.utilization_ratio for n in reading.nodes for d in n.state.devices] == [0.5, 0.5]
    assert [(n.target, n.skew_seconds, n.listed, n.named) for n in reading.nodes] == [
        (podgpu.url, -1.0, True, True),
        (dcgm.url, 0.0, True, True),
    ]
    assert [o.error for o in reading.outcomes] == ["", ""]
    assert (reading.errors, reading.notes, reading.owners) == ({}, (), owners)
    assert reading.kept_pods == kept


def test_kept_fields_have_one_name_and_unit() -> None:
    """An exporter with `--dcgm-names 4.9` exports other names and units."""
    name = "DCGM_FI_DEV_MEM_COPY_UTIL"
    documents: tuple[Fields, ...] = ({name: 50}, {"DCGM_FI_DEV_MEMORY_UTIL_RATIO": 0.5})
    for fields in documents:
        document = node_document(0, devices=(DeviceState(uuid="G", fields=fields),))
        (node,) = run_rounds(Exporter(document=document)).nodes
        assert node.state.devices[0].fields == {name: 50}


def test_a_node_without_a_name_has_the_address() -> None:
    unnamed = metrics_text(0).replace(b',Hostname="node-0"', b"")
    reading = run_rounds(Exporter(unnamed), Exporter(document=node_document(1, node="")))
    assert [n.named for n in reading.nodes] == [False, False]
    assert [f"http://{n.state.node}/metrics" for n in reading.nodes] == [
        n.target for n in reading.nodes
    ]


def test_an_exporter_that_is_upgraded() -> None:
    exporter = Exporter(metrics_text(0))

    async def steps(collector: ScrapeCollector) -> ClusterReading:
        await collector.run_round()
        assert exporter.paths == ["/api/v1/node", "/metrics"]
        exporter.document = node_document(0)
        reading = await collector.run_round()
        assert exporter.paths[2:] == ["/api/v1/node"]
        assert len(exporter.peers) == 1  # the connection stays open
        return reading

    (node,) = run_rounds(exporter, steps=steps).nodes
    assert node.state.producer == "podgpu"


@pytest.mark.fault(
    "An exporter does not answer, or answers with an error",
    "Its node stays as it was last read, with the reason; other nodes are not affected, and it is "
    "read again when it is"
    " back",
)
def test_a_failing_exporter() -> None:
    good, bad, time = Exporter(metrics_text(0)), Exporter(metrics_text(1)), FakeClock()

    async def steps(collector: ScrapeCollector) -> ClusterReading:
        await collector.run_round()
        time.now, bad.status = 115.0, 503
        await collector.run_round()
        reading = await collector.run_round()
        assert read_times(reading) == {"node-0": 115.0, "node-1": 100.0}
        assert [o.error for o in reading.outcomes] == ["", "http_503"]
        assert reading.outcomes[1].text.startswith(bad.url)
        assert reading.errors == {(bad.url, "http_503"): 2}
        time.now, bad.status, bad.text = 130.0, 200, metrics_text(1, 7)
        return await collector.run_round()

    reading = run_rounds(good, bad, steps=steps, clock=time.clock())
    assert read_times(reading) == {"node-0": 130.0, "node-1": 130.0}
    assert reading.nodes[1].state.devices[0].utilization_ratio == 0.07
    assert [o.error for o in reading.outcomes] == ["", ""]


@pytest.mark.parametrize(
    ("exporter", "reason", "words"),
    [
        (Exporter(b"a b c\n"), "malformed", "line 1"),
        (Exporter(b"a \xff\n"), "malformed", "in position 2"),
        (Exporter(b"up 1\n"), "no_gpu", "check that it is a GPU exporter"),
        (Exporter(b"a" * 20_000_000), "too_large", "bytes"),
        (
            Exporter(b"".join(b'DCGM_FI_DEV_GPU_UTIL{UUID="%d"} 1\n' % n for n in range(1025))),
            "malformed",
            "1024",
        ),
        (Exporter(document=b"[" * 100_000), "malformed", "cannot parse its /api/v1/node"),
        (Exporter(document=node_document(1, schema=2)), "malformed", "schema 2 is newer than 1"),
        (
            Exporter(document=b'{"schema":1,"node":"n"}'),
            "malformed",
            "missing required field `producer`",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unusable_answers_fail_one_node_only(exporter: Exporter, reason: str, words: str) -> None:
    reading = run_rounds(exporter, Exporter(metrics_text(0)))
    assert [o.error for o in reading.outcomes] == [reason, ""]
    assert words in reading.outcomes[0].message
    assert len(reading.outcomes[0].message) < 1000
    assert [n.state.node for n in reading.nodes] == ["node-0"]


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_document_is_read_or_refused(body: bytes) -> None:
    reading = run_rounds(Exporter(document=body))
    assert reading.outcomes[0].error in ("", "malformed")


def test_hanging_exporters_do_not_delay_others() -> None:
    """The others are read while 50 exporters hang: these end only afterwards."""
    exporters = [Exporter(metrics_text(n), hangs=n < 50) for n in range(60)]

    async def release_when_others_are_read(collector: ScrapeCollector) -> ClusterReading:
        round_of_all = asyncio.create_task(collector.run_round())
        while not all("/metrics" in exporter.paths for exporter in exporters[50:]):
            await asyncio.sleep(0.01)
        for exporter in exporters:
            exporter.release.set()
        return await round_of_all

    reading = run_rounds(*exporters, steps=release_when_others_are_read, timeout=PATIENCE)
    assert {n.state.node for n in reading.nodes} == {f"node-{n}" for n in range(60)}


def test_an_exporter_that_hangs_times_out() -> None:
    (outcome,) = run_rounds(Exporter(metrics_text(0), hangs=True), timeout=0.2).outcomes
    assert outcome.error == "timeout"


async def test_targets_come_and_go() -> None:
    first, second, time = Exporter(metrics_text(0)), Exporter(metrics_text(1)), FakeClock()
    async with running_exporters(first, second) as urls:
        current, problems = list(urls), [Note("a", "the API server cannot be reached")]
        collector = ScrapeCollector(
            lambda: current, SETTINGS, read_notes=lambda: problems, clock=time.clock()
        )
        second.status = 500
        await collector.run_round()
        second.status = 200
        await collector.run_round()
        current.remove(urls[1])
        reading = await collector.run_round()
        assert [(n.state.node, n.listed) for n in reading.nodes] == [("node-0", True)]
        assert [o.target for o in reading.outcomes] == urls[:1]
        assert reading.errors == {}
        assert reading.notes == tuple(problems)
        current.append(urls[1])
        reading = await collector.run_round()
        assert [(n.state.node, n.listed) for n in reading.nodes] == [
            ("node-0", True),
            ("node-1", True),
        ]
        await collector.close()


def test_other_paths_of_an_exporter() -> None:
    exporter = Exporter(document=node_document(0))

    async def steps(collector: ScrapeCollector) -> ClusterReading:
        reading = await collector.run_round()
        assert await collector.fetch(exporter.url, "api/v1/gpus/GPU-0") == b'{"uuid": "GPU-0"}'
        for target, path, reason in (
            (exporter.url, "api/v1/gpus/GPU-9", "http_404"),
            ("http://other:9400/metrics", "api/v1/gpus/GPU-0", "not_listed"),
        ):
            with pytest.raises(SourceError) as caught:
                await collector.fetch(target, path)
            assert caught.value.reason == reason
        return reading

    run_rounds(exporter, steps=steps)


def test_secrets_are_sent_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    exporter = Exporter(document=node_document(0), text=metrics_text(0), status=401)
    reading = run_rounds(exporter, access=Access(token_file=str(tmp_path / "token")))
    assert exporter.headers["Authorization"] == "Bearer s3cret"
    assert exporter.paths == ["/api/v1/node", "/metrics"]
    assert reading.outcomes[0].error == "unauthorized"
    assert "s3cret" not in str(reading)


def test_equal_urls_are_one_target() -> None:
    urls = ["http://a:9400", " http://A:9400/metrics", "", "b:9400", "http://a:9400/metrics?x=1"]
    assert unique_targets(urls) == ("http://a:9400", "b:9400", "http://a:9400/metrics?x=1")


@pytest.mark.parametrize("urls", [[], [""], ["ftp://a"], ["ftp://u:p@a"]])
def test_lists_that_are_refused(urls: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        unique_targets(urls)
    assert "u:p" not in str(caught.value)
