"""A server that is away, slow, wrong or half-hearted: what is known stays and grows old, and it is said clearly."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from podgpu.cluster.prom.backend import PrometheusBackend, PrometheusPlace
from podgpu.cluster.reading import ClusterReading, Scope
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import Memory, assemble
from podgpu.errors import UsageError
from podgpu.figures.device import Owner
from podgpu.http_client import Access
from tests.cluster.prometheus_double import Asked, PrometheusDouble, Reply, error, running_double, some_gpus, vector
from tests.nodes.clock import FakeClock, wait_until


@cache
def series_of_nobody() -> bytes:
    one = b'{"metric":{},"value":[1,"1"]}'
    return b'{"status":"success","data":{"resultType":"vector","result":[' + (one + b",") * 400_000 + one + b"]}}"


@cache
def bomb() -> bytes:
    return gzip.compress(bytes(40 * 1024 * 1024), 1)


SHORT = ViewSettings(window=45.0)
"""Three instants of the rolling average are in it, and the usual window has twenty: each is asked for four times."""


@pytest.fixture
def double() -> Iterator[PrometheusDouble]:
    with running_double() as found:
        some_gpus(found)
        yield found


class Backend:
    """A backend with a clock that moves by hand, and one loop for all its rounds."""

    def __init__(self, url: str, settings: ViewSettings | None = None, **place: object) -> None:
        self.clock = FakeClock()
        self.backend = PrometheusBackend(
            PrometheusPlace(url, **place),  # type: ignore[arg-type]
            settings or SHORT,
            clock=self.clock.monotonic,
        )
        self._runner = asyncio.Runner()

    def turn(self) -> ClusterReading:
        self._runner.run(self.backend.turn())
        return self.backend.reading()

    def close(self) -> None:
        self._runner.run(self.backend.close())
        self._runner.close()


@pytest.fixture
def backend_of() -> Iterator[Callable[..., Backend]]:
    made: list[Backend] = []

    def make(url: str, settings: ViewSettings | None = None, **place: object) -> Backend:
        made.append(Backend(url, settings, **place))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


MakeBackend = Callable[..., Backend]


def test_a_round_on_a_server_that_behaves(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    reading = backend_of(double.url + "/prometheus/").turn()
    assert [(node.node, len(node.devices)) for node in reading.nodes] == [("node-0", 2), ("node-1", 2)]
    assert (reading.outcomes[0].error, reading.notes, reading.errors) == ("", (), {})
    assert {asked.path for asked in double.asked} == {"/prometheus/api/v1/query"}
    assert {asked.method for asked in double.asked} == {"POST"}
    assert all(asked.form["timeout"] == "10000ms" for asked in double.asked)


def test_its_clock_rules(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    """Decades apart from ours: only differences of its own times count."""
    backend = backend_of(double.url, ViewSettings())
    reading = backend.turn()
    assert [node.read_at for node in reading.nodes] == [pytest.approx(backend.clock.monotonic() - 3)] * 2
    first, *others = double.asked
    assert (first.query, "time" in first.form) == ("time()", False)
    rolling = {asked.form["time"] for asked in others if is_rolling(asked)}
    assert rolling == {f"{1_800_000_000 - 15 * n}.000" for n in range(20)}
    idle = {asked.form["time"] for asked in others if "max_over_time" in asked.query}
    assert {asked.form["time"] for asked in others} - rolling - idle == {"1800000007.000"}


def test_match_is_in_every_selector_but_names_nothing(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    backend_of(double.url, match='cluster = "a",').turn()
    for asked in double.asked[1:]:
        braces = asked.query.count("{")
        assert braces
        assert asked.query.count('cluster="a"}') == braces, asked.query


REPLIES: dict[str, tuple[Callable[[Asked], Reply], str, str]] = {
    "422": (lambda asked: error(422, 'bad "match"\x1b[2J ' + "x" * 5000), "http_422", 'bad "match" [2J xxx'),
    "503": (lambda asked: Reply(b"not ready", 503, "text/plain"), "http_503", "503"),
    "503 with a reason": (lambda asked: error(503, "query timed out", "timeout"), "http_503", "query timed out"),
    "401": (lambda asked: Reply(b"", 401), "unauthorized", "--prometheus-token-file"),
    "403": (lambda asked: error(403, "no"), "unauthorized", "--prometheus-username"),
    "404": (lambda asked: Reply(b"404 page not found", 404, "text/plain"), "http_404", "is the path right?"),
    "a redirect": (lambda asked: Reply(b"", 302, headers={"Location": "/graph"}), "http_302", "does not follow"),
    "a web page": (lambda asked: Reply(b"<!DOCTYPE html>", 200, "text/html"), "not_prometheus", "a web page"),
    "half an answer": (lambda asked: Reply(b'{"status":"succ', claimed_length=900), "truncated", "too early"),
    "half JSON": (lambda asked: Reply(b'{"status":"success","data":{"resul'), "malformed", "no whole JSON"),
    "other JSON": (lambda asked: Reply(b'["success"]'), "not_prometheus", "does not answer as Prometheus does"),
    "an error with 200": (
        lambda asked: Reply(b'{"status":"error","error":"no luck"}'),
        *("query_failed", "no luck"),
    ),
    "a matrix": (
        lambda asked: Reply(b'{"status":"success","data":{"resultType":"matrix","result":[]}}'),
        *("malformed", "a matrix where a vector was asked for"),
    ),
    "a sample of another shape": (
        lambda asked: Reply(b'{"status":"success","data":{"resultType":"vector","result":[{"value":[1]}]}}'),
        *("malformed", "an unknown shape"),
    ),
    "more series than anybody has": (lambda asked: Reply(series_of_nobody()), "too_much", "--match"),
    "brackets without end": (lambda asked: Reply(b'{"status":"success","data":' + b"[]," * 2_000_000), "too_much", ""),
    "a body without end": (lambda asked: Reply(b"{", claimed_length=1 << 40), "too_large", "bytes"),
    "a small body of a large one": (
        lambda asked: Reply(bomb(), headers={"Content-Encoding": "gzip"}),
        *("too_large", "bytes"),
    ),
    "a refusal without end": (
        lambda asked: error(500, "\x1b[2J" * 200_000),
        *("http_500", "answers 500"),
    ),
    "no time": (lambda asked: vector([], 1.0), "malformed", "time()"),
    "no such time": (lambda asked: vector([({}, "1e308")], 1.0), "malformed", "time()"),
}


@pytest.mark.parametrize(
    ("name", "when"),
    [
        (name, when)
        for name in REPLIES
        for when in ("from the start", "in the middle")
        if not name.endswith(" time") or when == "from the start"  # the time is asked for first
    ],
)
def test_what_fails_is_said_and_all_stays_as_it_was(
    name: str, when: str, double: PrometheusDouble, backend_of: MakeBackend
) -> None:
    reply, reason, text = REPLIES[name]
    backend = backend_of(double.url)
    before = backend.turn()
    double.misbehave = lambda asked: None if when == "in the middle" and asked.query == "time()" else reply(asked)
    backend.clock.advance(15)
    double.now += 15
    after = backend.turn()
    (outcome,) = after.outcomes
    assert outcome.error == reason
    assert text in outcome.message
    assert outcome.message.isprintable()
    assert len(outcome.message) < 500
    assert after.nodes == before.nodes, "and their read_at"
    assert after.errors == {(double.url, reason): 1}
    double.misbehave = lambda asked: None
    again = backend.turn()
    assert (again.outcomes[0].error, again.errors) == ("", {(double.url, reason): 1})
    assert all(new.read_at > old.read_at for new, old in zip(again.nodes, before.nodes, strict=True))


@pytest.mark.fault(
    "one of Prometheus' targets makes up more GPUs, or longer names, than a node has",
    "what it tells is ignored, with a note that names it; the other nodes are as they are",
)
@pytest.mark.parametrize(("many", "name"), [(1025, "n"), (1, "n" * 257)])
def test_a_target_that_makes_figures_up(
    many: int, name: str, double: PrometheusDouble, backend_of: MakeBackend
) -> None:
    before = {node.node for node in backend_of(double.url).turn().nodes}
    for n in range(many):
        labels = {"instance": "evil:9400", "job": "gpu", "Hostname": name, "gpu": str(n), "UUID": f"GPU-evil-{n}"}
        double.put("DCGM_FI_DEV_GPU_UTIL", "5", **labels)
    after = backend_of(double.url).turn()
    assert {node.node for node in after.nodes} == before
    assert [note for note in after.notes if "evil:9400" in note and "ignored" in note and len(note) < 1000]


def test_a_slow_server_costs_its_deadline(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    double.misbehave = double.hang
    reading = backend_of(double.url, timeout=0.2).turn()
    assert (reading.outcomes[0].error, reading.nodes) == ("timeout", ())
    assert len(double.asked) <= 1, "nothing more is asked of it"


def test_a_server_that_is_away(backend_of: MakeBackend) -> None:
    with running_double() as gone:
        url = gone.url
    reading = backend_of(url).turn()
    assert reading.outcomes[0].error == "unreachable"
    assert "Prometheus runs there" in reading.outcomes[0].message


@pytest.mark.fault(
    "Prometheus answers a question with the figures of another, or with one that cannot be",
    "what is no ratio is no average; the view goes on",
)
@pytest.mark.parametrize("number", ["1e308", "-1e308", "500"])
def test_an_average_that_cannot_be_is_none(number: str, double: PrometheusDouble, backend_of: MakeBackend) -> None:
    double.misbehave = lambda asked: vector([({}, number)], double.now) if is_rolling(asked) else None
    reading = backend_of(double.url).turn()
    assert reading.nodes
    assert reading.outcomes[0].error == ""
    assert all(0 <= value <= 1 for value in (reading.rolling or {}).values())


def test_averages_of_a_server_that_stays_away_end(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    backend = backend_of(double.url)
    double.misbehave = lambda asked: vector([({}, "0.5")], 1.0) if is_rolling(asked) else None
    assert backend.turn().rolling
    double.misbehave = lambda asked: error(503, "starting")
    backend.clock.advance(40)
    assert backend.turn().rolling
    backend.clock.advance(10)
    assert backend.turn().rolling == {}


def test_one_failed_query_does_not_spoil_the_others(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    double.misbehave = lambda asked: error(422, "too many samples") if "FB_USED" in asked.query else None
    reading = backend_of(double.url).turn()
    device = reading.nodes[0].devices[0]
    assert (device.utilization, device.memory_used) == (0.40, None)
    assert reading.outcomes[0].error == "http_422"
    assert reading.outcomes[0].message.endswith("(asked for: memory)")
    assert any("memory" in note for note in reading.notes)


def test_averages_that_fail_stay_and_are_then_left_to_the_view(
    double: PrometheusDouble, backend_of: MakeBackend
) -> None:
    backend = backend_of(double.url)
    assert backend.turn().rolling == {}
    double.misbehave = lambda asked: error(422, "no") if 'podgpu_namespace"' in asked.query else None
    double.now += 40
    backend.clock.advance(40)
    assert backend.turn().rolling == {}
    double.now += 10
    backend.clock.advance(10)
    reading = backend.turn()
    assert (len(reading.nodes), reading.rolling) == (2, None)
    assert reading.outcomes[0].message.endswith("(asked for: rolling average by namespace)")


def test_nodes_do_not_wait_for_averages(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    backend = backend_of(double.url)
    seen: list[int] = []

    def look(asked: Asked) -> None:
        if is_rolling(asked) and not seen:
            wait_until(lambda: backend.backend.reading().nodes, "nodes are there")
            seen.append(len(backend.backend.reading().nodes))

    double.misbehave = look
    backend.turn()
    assert seen == [2]


def test_only_instants_that_are_new_are_asked_for(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    backend = backend_of(double.url, ViewSettings())
    double.misbehave = lambda asked: vector([({}, "0.5")], 1.0) if is_rolling(asked) else None

    def asked_for() -> list[str]:
        double.asked.clear()
        assert backend.turn().rolling == {Scope("cluster"): 0.5, Scope("node"): 0.5, Scope("model"): 0.5}
        return [asked.form["time"] for asked in double.asked if is_rolling(asked)]

    assert len(asked_for()) == 20 * 4, "the whole window, once"
    assert asked_for() == [], "nothing is new in the same interval"
    double.now += 15
    assert asked_for() == ["1800000015.000"] * 4
    double.now += 45
    assert sorted(set(asked_for())) == [f"{1_800_000_030 + 15 * n}.000" for n in range(3)]


def test_an_instant_that_failed_is_asked_for_again(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    backend = backend_of(double.url)
    backend.turn()
    double.now += 15
    double.misbehave = lambda asked: error(503, "busy") if is_rolling(asked) else None
    backend.turn()
    double.misbehave = lambda asked: None
    double.now += 15
    double.asked.clear()
    backend.turn()
    times = {asked.form["time"] for asked in double.asked if is_rolling(asked)}
    assert times == {"1800000015.000", "1800000030.000"}


def is_rolling(asked: Asked) -> bool:
    return asked.query.startswith("((") and "max_over_time" not in asked.query


def test_without_holders_the_round_has_failed(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    """A held GPU would look free."""
    double.misbehave = lambda asked: (
        error(422, "no") if asked.query.startswith("max") and "allocation_info" in asked.query else None
    )
    reading = backend_of(double.url).turn()
    assert (reading.nodes, reading.outcomes[0].error) == ((), "http_422")


def test_warnings_and_partial_answers_are_notes(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    double.extra = {
        "warnings": ["store a is away\n\x1b[31m"],
        "infos": ["metric might not be a counter"],
        "isPartial": True,
    }
    reading = backend_of(double.url).turn()
    assert len(reading.nodes) == 2
    assert reading.notes == (
        "the answer is not whole: a part of the storage did not answer",
        "store a is away [31m",
        "metric might not be a counter",
    )


def test_no_number_is_no_figure(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    double.series.clear()
    for gpu, value in enumerate(["NaN", "+Inf", "-Inf", "12"]):
        place = {"job": "j", "instance": "i", "gpu": str(gpu), "UUID": f"GPU-{gpu}", "Hostname": "n"}
        double.put("DCGM_FI_DEV_GPU_UTIL", value, **place)
        double.put("DCGM_FI_DEV_FB_USED", 1, **place)
    (node,) = backend_of(double.url).turn().nodes
    assert [device.utilization for device in node.devices if device.utilization is not None] == [0.12]


def test_hostile_labels_are_only_text(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    hostile = 'a"} or vector(1) #\n<script>alert(1)</script>\\'
    place = {"job": hostile, "instance": hostile, "UUID": hostile, "gpu": "9" * 50, "Hostname": hostile}
    double.put("DCGM_FI_DEV_GPU_UTIL", 1, **place, namespace=hostile, pod=hostile, modelName=hostile)
    reading = backend_of(double.url).turn()
    node = next(node for node in reading.nodes if node.node == hostile)
    (device,) = node.devices
    assert (device.uuid, device.index, device.holders[0].holder.pod) == (hostile, -1, hostile)
    owners = next(asked.query for asked in double.asked if "kube_pod_owner" in asked.query)
    assert "\n" not in owners


def test_a_gpu_without_a_uuid_is_there_by_its_number(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    double.put("DCGM_FI_DEV_GPU_UTIL", 1, job="j", instance="i", gpu="5", Hostname="bare")
    reading = backend_of(double.url).turn()
    node = next(node for node in reading.nodes if node.node == "bare")
    assert [device.uuid for device in node.devices] == ["gpu 5"]
    assert any("UUID" in note for note in reading.notes)


def test_a_node_that_is_gone_grows_old_and_is_dropped(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    backend = backend_of(double.url)
    before = {node.node: node for node in backend.turn().nodes}
    everything = list(double.series)
    double.series = [s for s in everything if s[0].get("instance") != "10.0.0.1:9400"]
    backend.clock.advance(15)
    after = {node.node: node for node in backend.turn().nodes}
    assert after["node-1"].read_at == before["node-1"].read_at
    assert after["node-1"].devices == before["node-1"].devices
    assert "scraped" in after["node-1"].notes[0]
    backend.clock.advance(300)
    assert [node.node for node in backend.turn().nodes] == ["node-0"]


def test_a_node_that_is_gone_stays_while_the_server_scrapes_it(
    double: PrometheusDouble, backend_of: MakeBackend
) -> None:
    backend = backend_of(double.url)
    before = {node.node: node for node in backend.turn().nodes}
    target = before["node-1"].target
    double.series = [s for s in double.series if s[0].get("instance") != target]
    double.put("up", 0, job="podgpu", instance=target)
    backend.clock.advance(3600)
    after = {node.node: node for node in backend.turn().nodes}
    assert after["node-1"].devices == before["node-1"].devices
    assert after["node-1"].listed
    view = assemble(backend.turn(), Memory(), ViewSettings(), backend.clock.monotonic(), 1e9)
    assert {node.name: node.gone for node in view.nodes} == {"node-0": False, "node-1": True}


def test_a_node_under_a_new_address_is_not_there_twice(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    backend = backend_of(double.url)
    backend.turn()
    double.series = [
        (dict(labels) | {"instance": labels["instance"].replace("10.0.0.1:", "10.9.9.9:")}, value)
        for labels, value in double.series
    ]
    assert sorted(node.target for node in backend.turn().nodes) == ["10.0.0.0:9400", "10.9.9.9:9400"]


def test_get_where_post_is_not_allowed(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    double.misbehave = lambda asked: Reply(b"", 405) if asked.method == "POST" else None
    backend = backend_of(double.url)
    assert len(backend.turn().nodes) == 2
    posted = sum(asked.method == "POST" for asked in double.asked)
    assert posted == 1
    backend.turn()
    assert sum(asked.method == "POST" for asked in double.asked) == posted


def test_credentials_and_tenant_go_along(double: PrometheusDouble, backend_of: MakeBackend, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    access = Access(
        token_file=str(tmp_path / "token"),
        headers=(("X-Scope-OrgID", "team-a"),),
        prefix="prometheus",
        server="Prometheus",
    )
    backend_of(double.url, access=access).turn()
    assert all(asked.headers["Authorization"] == "Bearer s3cret" for asked in double.asked)
    assert all(asked.headers["X-Scope-OrgID"] == "team-a" for asked in double.asked)


def test_no_secret_of_the_url_is_in_what_is_said(double: PrometheusDouble, backend_of: MakeBackend) -> None:
    backend = backend_of(double.url.replace("http://", "http://user:s3cret@"))
    double.misbehave = lambda asked: error(503, "starting")
    reading = backend.turn()
    (outcome,) = reading.outcomes
    assert outcome.said == f"{double.url} answers 503: starting"
    assert "s3cret" not in repr(reading)


def test_owners_from_elsewhere_where_kube_state_metrics_is_missing(double: PrometheusDouble) -> None:
    owner = Owner("Job", "train")
    backend = PrometheusBackend(
        PrometheusPlace(double.url), ViewSettings(), lambda pods: {pod: owner for pod in pods if pod[1] == "train-0"}
    )

    async def turn() -> None:
        await backend.turn()
        await backend.close()

    asyncio.run(turn())
    assert backend.reading().owners == {("research", "train-0"): owner}


@pytest.mark.parametrize(
    ("place", "settings", "text"),
    [
        ({"match": "cluster"}, {}, "--match: at character 8"),
        ({"node_labels": ("a-b",)}, {}, "--node-label"),
        ({"node_labels": ()}, {}, "--node-label"),
        ({"url": "nowhere"}, {}, "HOST:PORT"),
        ({}, {"used_field": "DCGM_FI_DEV_GPU_TEMP"}, "not a utilisation"),
        ({}, {"used_field": "DCGM_FI_DEV_MEM_COPY_UTI"}, "DCGM_FI_DEV_MEM_COPY_UTIL"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_start(
    place: dict[str, object], settings: dict[str, object], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        PrometheusBackend(PrometheusPlace(**{"url": "http://h:9090"} | place), ViewSettings(**settings))  # type: ignore[arg-type]
