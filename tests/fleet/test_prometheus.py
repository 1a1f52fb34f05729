"""The Prometheus collector with a simulated server that injects faults. Real servers test the
PromQL.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.clock import Clock
from podgpu.errors import SourceError, UsageError, texts_of
from podgpu.fleet.read.prometheus import PrometheusCollector, PrometheusServer
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.series import cluster_families
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import build_cluster_state
from podgpu.fleet.view import make_pod, make_view
from podgpu.http_client import Access
from podgpu.metrics.promql import quote
from podgpu.model import WorkloadOwner
from podgpu.past.bills.bill import RangeQuery
from tests.fleet.prometheus_double import (
    Asked,
    PrometheusDouble,
    Reply,
    error,
    running_double,
    some_gpus,
    vector,
)
from tests.fleet.states import prometheus_past, state_of
from tests.nodes.clock import FakeClock

SETTINGS = ViewSettings(window=45.0)  # three samples
TIME = "vector(time())"


class Rounds:
    """A collector with a simulated clock."""

    def __init__(
        self, double: PrometheusDouble, settings: ViewSettings = SETTINGS, **options: object
    ) -> None:
        self.double = double
        self.clock = FakeClock()
        server = PrometheusServer(**{"url": double.url, **options})  # type: ignore[arg-type]
        self._runner = asyncio.Runner()
        self.owners: dict[tuple[str, str], WorkloadOwner] = {}
        self.label_names: list[str] = []
        self.collector = PrometheusCollector(
            server,
            settings,
            clock=Clock(self.clock.monotonic),
            owners=lambda: self.owners,
            label_names=lambda: self.label_names,
        )

    def run(self, after: float = 0.0) -> ClusterReading:
        self.clock.advance(after)
        self.double.now += after
        return self._runner.run(self.collector.run_round())

    def close(self) -> None:
        self._runner.run(self.collector.close())
        self._runner.close()


@pytest.fixture
def double() -> Iterator[PrometheusDouble]:
    with running_double() as running:
        some_gpus(running)
        yield running


@pytest.fixture
def rounds(double: PrometheusDouble) -> Iterator[Rounds]:
    made = Rounds(double)
    yield made
    made.close()


def test_nodes_of_the_same_name_in_two_clusters_stay_two_nodes(
    double: PrometheusDouble, rounds: Rounds
) -> None:
    for cluster in ("east", "west"):
        labels = {
            "cluster": cluster,
            "job": "dcgm",
            "instance": "10.0.0.9:9400",
            "Hostname": "node-9",
            "gpu": "0",
        }
        double.put("DCGM_FI_DEV_GPU_UTIL", 40, UUID=f"GPU-{cluster}", **labels)
    reading = rounds.run()
    assert {node.state.node for node in reading.nodes} == {
        "node-0",
        "node-1",
        "east/node-9",
        "west/node-9",
    }
    assert [node.named for node in reading.nodes] == [True] * 4
    autoscale = Rounds(double, ViewSettings(one_cluster=True))
    assert autoscale.run().outcomes[0].error == "several_clusters", (
        "an HPA cannot select the cluster of a pod"
    )
    autoscale.close()
    double.put("kube_node_labels", 1, node="node-0", label_eks_amazonaws_com_capacity_type="SPOT")
    double.put("kube_node_labels", 1, node="node-9", cluster="east", exported_node="node-9")
    assert {node.labels for node in rounds.run(15).nodes} == {None}, (
        "only read if a price depends on them"
    )
    rounds.label_names = ["eks.amazonaws.com/capacityType", "zone"]
    reading = rounds.run(15)
    assert {node.state.node: node.labels for node in reading.nodes} == {
        "node-0": {"eks.amazonaws.com/capacityType": "SPOT"},
        "node-1": None,
        "east/node-9": {},
        "west/node-9": None,
    }


def test_a_round(double: PrometheusDouble, rounds: Rounds) -> None:
    """The server's clock differs from ours by decades. Only differences between the server's
    timestamps count.
    """
    reading = rounds.run()
    assert [node.state.node for node in reading.nodes] == ["node-0", "node-1"]
    assert [len(node.state.devices) for node in reading.nodes] == [2, 2]
    assert [(node.target, node.read_at, node.listed) for node in reading.nodes] == [
        (f"10.0.0.{n}:9400", rounds.clock.monotonic() - 3, None) for n in range(2)
    ]
    assert [outcome.error for outcome in reading.outcomes] == [""]
    assert (reading.errors, reading.notes) == ({}, ())
    assert {float(asked.form["time"]) for asked in double.asked if "DCGM" in asked.query} == {
        double.now
    }
    with pytest.raises(SourceError):
        asyncio.run(rounds.collector.fetch("10.0.0.0:9400", "api/v1/gpus/x"))


def test_more_gpus_than_the_page_shows(double: PrometheusDouble) -> None:
    made = Rounds(double, ViewSettings(max_gpus=3))
    kinds = {
        "ml": {"gpu_seconds": 4, "allocated": 2, "idle": 0.5, "energy": 700},
        "x": {"allocated": 1, "idle": 1.2},
    }
    for name, kind, value in (
        (name, *pair) for name, values in kinds.items() for pair in values.items()
    ):
        double.put("podgpu:usage:increase5m", value, kind=kind, namespace=name, modelName="H200")
    reading = made.run(15)
    made.close()
    view = make_view(
        build_cluster_state(reading, None, SETTINGS, made.clock.monotonic(), double.now)
    )
    totals, [namespace, unshared] = view.totals, view.namespaces
    assert (unshared.used_gpus, unshared.idle_gpus) == (0, 1), (
        "idle time is at most the allocated time"
    )
    assert (namespace.namespace, namespace.allocated_gpus, namespace.idle_gpus) == ("ml", 2, 0.5)
    assert (totals.gpus, totals.allocated, totals.used, totals.idle, totals.power_watts) == (
        4,
        3,
        1.5,
        1.5,
        700,
    )
    assert (reading.nodes, reading.outcomes[0].error) == ((), "")
    assert len(reading.notes) == 1


def test_match_is_in_every_selector(double: PrometheusDouble) -> None:
    made = Rounds(double, match='cluster="a"')
    made.run()
    made.close()
    asyncio.run(prometheus_past(PrometheusServer(double.url)).pod("ml", "train", 3600, cluster="a"))
    assert len(double.asked) > 10
    for query in (asked.query for asked in double.asked):
        selectors = re.findall(r"\{[^}]*\}", query)
        assert all('cluster="a"' in selector for selector in selectors), query
        assert selectors or query == TIME


@pytest.mark.parametrize("seconds", [0.0, 3.0, 15.0])
def test_a_short_range_is_that_of_a_sample(double: PrometheusDouble, seconds: float) -> None:
    """Prometheus refuses queries over 0 s."""
    start = double.now // 60 * 60 - 590.0
    past = prometheus_past(PrometheusServer(double.url), state_of())
    answer = asyncio.run(past.range(RangeQuery("pod", start=start, end=start + seconds)))
    assert answer.to - answer.from_ == 15.0
    assert answer.from_ % 15 == 0
    windows = set(re.findall(r"\[(\d+)s\]", " ".join(asked.query for asked in double.asked)))
    assert windows == {"15"}


BOMB = gzip.compress(bytes(40 * 1024 * 1024), 1)
REPLIES: dict[str, tuple[Reply, str, str]] = {
    "422": (error(422, 'bad "match"\x1b[2J ' + "x" * 5000), "http_422", r'bad "match"\x1b[2J xxx'),
    "503": (Reply(b"not ready", 503, "text/plain"), "http_503", "503"),
    "401": (Reply(b"", 401), "unauthorized", "rejected the credentials"),
    "404": (Reply(b"404 page not found", 404, "text/plain"), "http_404", "is the path right?"),
    "redirect": (Reply(b"", 302, headers={"Location": "/graph"}), "http_302", "not followed"),
    "truncated": (Reply(b'{"status":"succ', claimed_length=900), "truncated", "incomplete"),
    "other JSON": (Reply(b'["success"]'), "malformed", "Expected `object`"),
    "endless": (Reply(b"{", claimed_length=1 << 40), "too_large", "bytes"),
    "zip bomb": (Reply(BOMB, headers={"Content-Encoding": "gzip"}), "too_large", "bytes"),
    "invalid value": (vector([({}, "much")], 1.0), "malformed", "to float: 'much'"),
    "impossible time": (vector([({}, "1e308")], 1.0), "malformed", "time()"),
}


@pytest.mark.fault(
    "Prometheus is away, refuses queries or answers with nonsense",
    (
        "All nodes stay as they were last known and become stale after --stale-after; the reason "
        "is "
        "shown and counted"
    ),
)
@pytest.mark.parametrize("in_the_middle", [False, True])
@pytest.mark.parametrize("name", REPLIES)
def test_failed_rounds(
    name: str, in_the_middle: bool, double: PrometheusDouble, rounds: Rounds
) -> None:
    if in_the_middle and name.endswith(" time"):
        return
    reply, reason, text = REPLIES[name]
    before = rounds.run()
    double.misbehave = lambda asked: None if in_the_middle and asked.query == TIME else reply
    after = rounds.run(15)
    (outcome,) = after.outcomes
    assert (outcome.error, after.nodes) == (reason, before.nodes)
    assert text in outcome.message
    assert outcome.message.isprintable()
    assert len(outcome.message) < 600
    assert after.errors[double.url, reason] >= 1
    double.misbehave = lambda asked: None
    again = rounds.run()
    assert again.outcomes[0].error == ""
    assert all(
        new.read_at > old.read_at for new, old in zip(again.nodes, before.nodes, strict=True)
    )


def test_a_server_that_hangs_or_is_away(double: PrometheusDouble) -> None:
    double.misbehave = double.hang
    made = Rounds(double, timeout=0.2)
    assert made.run().outcomes[0].error == "timeout"
    made.close()
    made = Rounds(double, url="http://127.0.0.1:9")
    reading = made.run()
    assert reading.outcomes[0].error == "unreachable"
    assert "check that the server runs there" in reading.outcomes[0].message
    made.close()


@pytest.mark.fault(
    "One of Prometheus' targets reports more GPUs, or longer names, than a node can have",
    "Its series are ignored, with a note that names it; other nodes are not affected",
)
@pytest.mark.parametrize(("count", "name"), [(1025, "n"), (1, "n" * 257)])
def test_a_target_beyond_the_limits(
    count: int, name: str, double: PrometheusDouble, rounds: Rounds
) -> None:
    for n in range(count):
        labels = {
            "instance": "evil:9400",
            "job": "gpu",
            "Hostname": name,
            "gpu": str(n),
            "UUID": f"GPU-evil-{n}",
        }
        double.put("DCGM_FI_DEV_GPU_UTIL", "5", **labels)
    reading = rounds.run()
    assert {node.state.node for node in reading.nodes} == {"node-0", "node-1"}
    texts = texts_of(reading.notes)
    assert [text for text in texts if text.startswith("evil:9400: ") and len(text) < 500]


def test_an_optional_query_that_fails(double: PrometheusDouble, rounds: Rounds) -> None:
    double.misbehave = lambda asked: error(503, "busy") if "POWER" in asked.query else None
    reading = rounds.run()
    assert len(reading.nodes) == 2
    assert reading.outcomes[0].error == "http_503"
    assert texts_of(reading.notes) == ["these Prometheus queries failed: power"]


def test_without_holders_the_round_fails(double: PrometheusDouble, rounds: Rounds) -> None:
    """Otherwise held GPUs would look free."""
    double.misbehave = lambda asked: (
        error(503, "busy") if "allocation_share" in asked.query else None
    )
    assert rounds.run().nodes == ()


# Nodes, owners, notes


def test_owners(double: PrometheusDouble, rounds: Rounds) -> None:
    """Owners come from kube-state-metrics, and otherwise from the API server."""
    controller = {"namespace": "research", "owner_is_controller": "true"}
    double.put(
        "kube_pod_owner",
        1,
        pod="train-0",
        owner_kind="ReplicaSet",
        owner_name="train-7d9c",
        **controller,
    )
    double.put("kube_replicaset_owner", 1, replicaset="train-7d9c", owner_kind="Deployment", owner_name="train",
               **controller)  # fmt: skip
    double.put(
        "kube_pod_owner", 1, pod="train-1", owner_kind="<none>", owner_name="<none>", **controller
    )
    rounds.owners = {("research", f"train-{n}"): WorkloadOwner("Job", "api") for n in range(2)}
    expected = {
        ("research", "train-0"): WorkloadOwner("Deployment", "train"),
        ("research", "train-1"): WorkloadOwner("Job", "api"),
    }
    assert [node.owners for node in rounds.run().nodes] == [expected] * 2

    def queries() -> int:
        return sum("kube_pod_owner" in asked.query for asked in double.asked)

    before = queries()
    assert [node.owners for node in rounds.run(15).nodes] == [expected] * 2
    assert queries() == before, "a pod without an owner is not queried in every round"
    rounds.run(61)
    assert queries() == before + 1


def test_pods_of_the_same_name_have_the_owners_of_their_clusters(
    double: PrometheusDouble, rounds: Rounds
) -> None:
    double.series.clear()
    for cluster in "ab":
        target = {"cluster": cluster, "job": "dcgm", "instance": f"{cluster}:9400"}
        pod = {"namespace": "ml", "pod": "web-0", "container": "main"}
        double.put(
            "DCGM_FI_DEV_GPU_UTIL",
            40,
            gpu="0",
            UUID=f"GPU-{cluster}",
            Hostname="node",
            **target,
            **pod,
        )
        double.put("up", 1, **target)

    def answer_owners(asked: Asked) -> Reply | None:
        if "kube_pod_owner" not in asked.query:
            return None
        pod = {"namespace": "ml", "pod": "web-0", "owner_kind": "StatefulSet"}
        clusters = re.findall('cluster="(.)"', asked.query) or "ab"
        return vector(
            [({**pod, "owner_name": f"web-of-{cluster}"}, "1") for cluster in clusters], double.now
        )

    double.misbehave = answer_owners
    state = build_cluster_state(rounds.run(), None, SETTINGS, rounds.clock.monotonic(), double.now)
    owners = {node.name: [part.owner for part in node.held] for node in state.nodes}
    assert owners == {f"{c}/node": [WorkloadOwner("StatefulSet", f"web-of-{c}")] for c in "ab"}
    view = make_view(state)
    assert [(one.cluster, one.namespace, one.allocated_gpus) for one in view.namespaces] == [
        ("a", "ml", 1),
        ("b", "ml", 1),
    ]
    assert [node.cluster for node in view.nodes] == ["a", "b"]
    for name, gpus in (("a", 1), ("b", 1), (None, 2)):
        shown = make_pod(state, view, "ml", "web-0", name)
        assert shown is not None
        assert (shown.totals.allocated, len(shown.nodes), shown.owner is None) == (
            gpus,
            gpus,
            name is None,
        )
    assert make_pod(state, view, "ml", "web-0", "c") is None
    labels: dict[str, list[str]] = {}
    for family in cluster_families(state, {scope: mean.mean for scope, mean in state.used.items()}):
        labels[family.name] = [sample.labels.text for sample in family.samples]
        assert len(set(labels[family.name])) == len(labels[family.name])
    assert labels["podgpu_namespace_allocated_gpus"] == [
        f'{{namespace="ml",model="",cluster="{cluster}"}}' for cluster in "ab"
    ]


def test_warnings_and_missing_gpus_are_notes(double: PrometheusDouble, rounds: Rounds) -> None:
    double.extra = {"warnings": ["store a is away\n\x1b[31m"], "isPartial": True}
    assert texts_of(rounds.run().notes) == [
        r"store a is away \x1b[31m",
        "the response is incomplete: some of the storage nodes did not respond",
    ]
    double.extra, double.series = {}, []
    (note,) = rounds.run(1000).notes
    assert "Prometheus has no GPU metrics" in note.text


def test_secrets(double: PrometheusDouble, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    access = Access(token_file=str(tmp_path / "token"), headers=(("X-Scope-OrgID", "team-a"),))
    made = Rounds(double, access=access)
    made.run()
    made.close()
    assert all(asked.headers["Authorization"] == "Bearer s3cret" for asked in double.asked)
    assert all(asked.headers["X-Scope-OrgID"] == "team-a" for asked in double.asked)
    double.misbehave = lambda asked: error(503, "starting")
    made = Rounds(double, url=double.url.replace("http://", "http://user:s3cret@"))
    reading = made.run()
    made.close()
    assert reading.outcomes[0].text == f"{double.url} returned an error: starting"
    assert "s3cret" not in repr(reading)


# Options and PromQL


@pytest.mark.parametrize(
    ("server", "text"),
    [
        ({"node_labels": ("a-b",)}, "--node-label"),
        ({"node_labels": ()}, "--node-label"),
        ({"url": "nowhere"}, "HOST:PORT"),
    ],
)
def test_options_that_are_refused(server: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        PrometheusCollector(PrometheusServer(**{"url": "http://h:9090", **server}), ViewSettings())  # type: ignore[arg-type]


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_a_quoted_value_ends_where_it_ends(value: str) -> None:
    assert re.fullmatch(r'"(?:[^"\\\n]|\\.)*"', quote(value))
