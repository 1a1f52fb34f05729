"""The webhook over real HTTP: what it reports, restarts, failures and secrets."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import podgpu as podgpu_package
from podgpu.cli.main import run
from podgpu.clock import Clock
from podgpu.errors import UsageError
from podgpu.fleet.budgets import BudgetUse
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.state import ClusterState
from podgpu.model import Condition, DeviceState, Holder, HolderUsage, WorkloadOwner
from podgpu.past.books.history_file import HistoryError
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.writers.webhook import MemoryStore, NoticeStore, Webhook, WebhookSettings, parse_events
from podgpu.writers.webhook_notices import NoticeEvent
from tests.fleet.states import WALL, World, gpu, holder, mig, node
from tests.nodes.clock import wait_until
from tests.process import CLUSTER, EXPORTER, has_values, podgpu
from tests.writers.webhook_receiver import SECRET, Receiver, Reply

XID = Condition("xid", WALL + 60, "79")
HOUR = 3600.0


class Scene:
    """A cluster view and its webhook. Time passes only when a test advances it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.at = 100.0
        self.world = World()
        self.state = ClusterState(self.world.settings, None)
        self.clock = Clock(lambda: self.at, lambda: WALL + self.at)
        self.url_file = folder / "url"
        self.url_file.write_text(f"{url}\n")
        self.recorder: HistoryRecorder | None = None
        self.webhook: Webhook

    def start(self, store: NoticeStore | None = None, **settings: Any) -> Webhook:
        """Starts podgpu, or starts it again."""
        if self.recorder is not None:
            self.recorder.stop()
            self.recorder = None
        if store is None:
            self.recorder = HistoryRecorder(clock=self.clock, directory=str(self.folder / "past"))
            store = self.recorder
        made = WebhookSettings(str(self.url_file), **settings)
        self.webhook = Webhook(made, lambda: self.state, store, self.clock, lambda limit: limit)
        self.world = World()
        self.state = ClusterState(self.world.settings, None)
        return self.webhook

    def round(self, *gpus: DeviceState, seconds: float = 15.0, **more: Any) -> None:
        self.at += seconds
        self.state = self.world.round(node("n1", *gpus, read_at=self.at), at=self.at, **more)
        self.webhook.update()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().served() as made:
        yield made


@pytest.fixture
def scene(tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture) -> Iterator[Scene]:
    caplog.set_level(logging.DEBUG)
    made = Scene(tmp_path, receiver.url)
    made.start()
    yield made
    if made.recorder is not None:
        made.recorder.stop()
    assert "SECRET" not in caplog.text


def broken(number: int = 3) -> DeviceState:
    return gpu(number, holder("train", "ml"), conditions=(XID,))


def test_a_broken_gpu_is_reported_once_and_once_when_it_works_again(
    scene: Scene, receiver: Receiver
) -> None:
    scene.round(gpu(3), gpu(4))
    assert receiver.bodies == []
    for _ in range(4):
        scene.round(broken(), gpu(4))
    [message] = receiver.bodies
    assert (message["api"], message["event"]) == ("podgpu/v1", "broken")
    first, line = message["text"].splitlines()
    assert first == "podgpu: 1 GPU is broken"
    assert line.startswith("• GPU 3 of n1 (GPU-3): it reported XID 79 (GPU has fallen off the bus)")
    assert line.endswith("Pods: ml/train")
    [item] = message["items"]
    assert (item["node"], item["uuid"], item["index"]) == ("n1", "GPU-3", 3)
    assert (item["condition"], item["detail"], item["since"]) == ("xid", "79", WALL + 60)
    assert item["pods"] == ["ml/train"]
    assert "do" in item

    for _ in range(19):
        scene.round(gpu(3), gpu(4))
    assert len(receiver.bodies) == 1, "it has not worked for five minutes yet"
    for _ in range(4):
        scene.round(gpu(3), gpu(4))
    assert [event for event, _ in receiver.events] == ["broken", "recovered"]
    assert "GPU 3 of n1 (GPU-3) works again: it had reported an XID" in receiver.bodies[1]["text"]
    scene.round(broken(), gpu(4))
    assert [event for event, _ in receiver.events] == ["broken", "recovered", "broken"]


def test_a_gpu_that_fails_every_few_minutes_is_reported_once(
    scene: Scene, receiver: Receiver
) -> None:
    for number in range(100):
        scene.round(broken() if number % 10 == 0 else gpu(3))
    assert [event for event, _ in receiver.events] == ["broken"]


@pytest.mark.parametrize(("listed", "events"), [(True, ["broken"]), (False, [])])
def test_a_node_that_is_gone_is_reported_unless_it_was_removed(
    scene: Scene, receiver: Receiver, listed: bool, events: list[str]
) -> None:
    """An autoscaler removes nodes together with the endpoints of their exporters."""
    scene.round(gpu(0), gpu(1))
    read_at = scene.at
    for _ in range(10):
        scene.at += 15.0
        late = node("n1", gpu(0), gpu(1), read_at=read_at, listed=listed)
        scene.state = scene.world.round(late, at=scene.at)
        scene.webhook.update()
    assert [event for event, _ in receiver.events] == events
    if events:
        assert receiver.bodies[0]["text"].startswith("podgpu: 2 GPUs are broken\n")


def test_a_gpu_of_a_node_that_is_not_read_has_not_recovered(
    scene: Scene, receiver: Receiver
) -> None:
    scene.round(broken())
    scene.round(gpu(3))
    read_at = scene.at
    for _ in range(30):
        scene.at += 15.0
        late = node("n1", gpu(3), read_at=read_at, listed=False)
        scene.state = scene.world.round(late, at=scene.at)
        scene.webhook.update()
    assert [event for event, _ in receiver.events] == ["broken"]


def test_a_gpu_that_is_never_seen_again_is_forgotten_after_30_days(
    scene: Scene, receiver: Receiver
) -> None:
    """A GPU with the same UUID that breaks later is another problem."""
    day = 86_400.0
    scene.round(broken())
    for days in (1, 28):
        scene.at += days * day
        scene.world = World()
        scene.round(gpu(4))
        scene.round(broken(), gpu(4))
        assert [event for event, _ in receiver.events] == ["broken"], "it may be the same problem"

    scene.at += 2 * day
    scene.world = World()
    scene.round(gpu(4))
    scene.round(broken(), gpu(4))
    assert [event for event, _ in receiver.events] == ["broken", "broken"]


def test_the_worst_problem_is_described_also_on_a_removed_node(
    scene: Scene, receiver: Receiver
) -> None:
    several = tuple(Condition(name, WALL) for name in ("recurring", "ecc", "lost"))
    late = node("n1", gpu(0, conditions=several), read_at=scene.at, listed=False)
    scene.state = scene.world.round(late, at=scene.at)
    scene.webhook.update()
    unknown = gpu(1, conditions=(Condition("fault_of_a_newer_version", WALL),))
    scene.round(gpu(0, conditions=several), unknown)
    items = [message["items"][0] for message in receiver.accepted]
    assert [item["condition"] for item in items] == ["lost", "fault_of_a_newer_version"]
    assert items[1]["says"] == "fault_of_a_newer_version"


def test_the_text_names_pods_on_mig_instances_and_what_to_do(
    scene: Scene, receiver: Receiver
) -> None:
    parts = (mig(1, holder("a", "ml")), mig(2, holder("b", "ml")))
    scene.round(gpu(0, conditions=(XID,), instances=parts))
    [message] = receiver.accepted
    assert message["items"][0]["pods"] == ["ml/a", "ml/b"]
    assert f": {message['items'][0]['do']}. Pods: ml/a, ml/b" in message["text"]

    unknown = Condition("fault_of_a_newer_version", WALL)
    scene.round(gpu(1, conditions=(unknown,)), gpu(0, conditions=(XID,), instances=parts))
    text = receiver.accepted[1]["text"]
    assert text.endswith("GPU 1 of n1 (GPU-1): fault_of_a_newer_version"), "no pods, no advice"


def test_a_pod_that_uses_one_of_its_gpus_is_not_idle(scene: Scene, receiver: Receiver) -> None:
    def own(**usage: Any) -> Holder:
        return holder("nb-0", "research", **usage)

    idle = gpu(0, own(utilization_ratio=0.0, idle_since=WALL), busy=0.0)
    used = gpu(1, own(utilization_ratio=0.5), busy=0.5)
    scene.round(idle, used, seconds=5 * HOUR)
    scene.round(idle, used)
    assert receiver.bodies == []


def test_the_text_of_an_idle_pod_names_its_owner_and_its_part_of_a_gpu(
    scene: Scene, receiver: Receiver
) -> None:
    own = holder("nb-0", "research", share=0.5, utilization_ratio=0.0, idle_since=WALL)
    owners = {("research", "nb-0"): WorkloadOwner("StatefulSet", "nb")}
    scene.round(gpu(0, own, busy=0.0), seconds=5 * HOUR, owners=owners)
    [message] = receiver.accepted
    line = message["text"].splitlines()[1]
    assert line.startswith("• research/nb-0 (StatefulSet/nb) has not used 0.5 GPUs on n1 since")
    assert line.endswith("Z"), "no price is known"


def test_without_a_history_file_a_problem_without_a_time_counts_from_its_first_round(
    scene: Scene, receiver: Receiver
) -> None:
    timeless = gpu(3, conditions=(Condition("xid", None, "79"),))
    scene.start(MemoryStore())
    scene.round(timeless)
    assert receiver.bodies == [], "it may have been reported before the start"
    scene.round(gpu(4, conditions=(Condition("xid", None, "48"),)), timeless)
    assert [keys for _, keys in receiver.events] == [["gpu  GPU-4"]]


def test_a_warning_and_a_problem_of_a_workload_are_not_reported(
    scene: Scene, receiver: Receiver
) -> None:
    names = ("thermal", "application_xid", "kubernetes_healthy", "orphaned_memory")
    scene.round(gpu(0, conditions=tuple(Condition(name, WALL) for name in names)))
    assert receiver.bodies == []


def test_names_cannot_become_markup_of_slack(scene: Scene, receiver: Receiver) -> None:
    scene.round(gpu(0, holder("<!channel>", "a&b"), conditions=(XID,)))
    assert "Pods: a&amp;b/&lt;!channel&gt;" in receiver.bodies[0]["text"]
    assert receiver.bodies[0]["items"][0]["pods"] == ["a&b/<!channel>"]


@pytest.mark.fault(
    "`podgpu cluster` restarts while GPUs are broken",
    "The webhook is not called again: what it reported is in the history file",
)
def test_a_restart_repeats_nothing_and_forgets_nothing(scene: Scene, receiver: Receiver) -> None:
    scene.round(broken(3), broken(4))
    assert receiver.events == [("broken", ["gpu  GPU-3", "gpu  GPU-4"])]
    scene.start()
    scene.round()  # the first round finds no node
    for _ in range(3):
        scene.round(broken(3), gpu(4))
    assert len(receiver.bodies) == 1
    scene.start()
    for _ in range(25):
        scene.round(broken(3), gpu(4))
    assert receiver.events[1:] == [("recovered", ["gpu  GPU-4"])]


def test_what_broke_while_podgpu_was_away_is_reported(scene: Scene, receiver: Receiver) -> None:
    scene.round(gpu(3))
    scene.start()
    scene.round(broken())
    assert [event for event, _ in receiver.events] == ["broken"]


def test_without_a_history_file_only_what_began_later_is_reported(
    scene: Scene, receiver: Receiver
) -> None:
    scene.start(MemoryStore())
    old = gpu(1, conditions=(Condition("ecc"),))  # dcgm-exporter does not say since when
    scene.round(broken(3), old)
    scene.round(broken(3), old)
    assert receiver.bodies == []
    later = Condition("lost", WALL + scene.at)
    undated = gpu(5, conditions=(Condition("ecc"),))
    for _ in range(2):
        scene.round(broken(3), old, gpu(4, conditions=(later,)), undated)
    assert receiver.events == [("broken", ["gpu  GPU-4", "gpu  GPU-5"])]
    scene.round(broken(3), old)
    scene.round(broken(3), old)
    assert len(receiver.bodies) == 1


@pytest.mark.fault(
    "The receiver of the webhook fails (429, 500), is away, or answers too late",
    "podgpu tries again with growing delays and logs it once; rounds and scrapes go on",
)
def test_failures_are_retried_with_growing_delays(
    scene: Scene, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.replies.extend(
        [Reply(500), Reply(503), Reply(429, {"Retry-After": "600"}), Reply(500)]
    )
    attempts = []
    began = scene.at
    while not receiver.accepted:
        before = len(receiver.bodies)
        scene.round(broken(), seconds=1.0)
        if len(receiver.bodies) > before:
            attempts.append(scene.at - began)
        assert scene.at < 3000
    waits = [later - earlier for earlier, later in pairwise(attempts)]
    assert waits == [2.0, 4.0, 600.0, 16.0]
    assert len({body["id"] for body in receiver.bodies}) == 1, "the same notice has the same id"
    assert caplog.text.count("podgpu retries") == 3, "once for each reason"
    assert "works again" in caplog.text
    scene.round(broken())
    assert len(receiver.accepted) == 1
    assert scene.webhook.warnings() == []


@pytest.mark.parametrize(
    ("wait", "delay"),
    [("600", 600.0), ("date", 900.0), ("99999999", 3600.0), ("soon", 2.0), ("-5", 2.0)],
)
def test_a_receiver_says_when_it_wants_the_next_request(
    scene: Scene, receiver: Receiver, wait: str, delay: float
) -> None:
    """A receiver may write a number of seconds or a date, as HTTP allows."""
    scene.round(seconds=0.0)
    if wait == "date":
        wait = formatdate(WALL + scene.at + 1.0 + delay, usegmt=True)
    receiver.replies.append(Reply(429, {"Retry-After": wait}))
    scene.round(broken(), seconds=1.0)
    assert len(receiver.bodies) == 1
    scene.round(broken(), seconds=delay - 1.0)
    assert len(receiver.bodies) == 1, "not yet"
    scene.round(broken(), seconds=1.0)
    assert len(receiver.accepted) == 1


class BrokenStore(MemoryStore):
    """A history file on a full disk."""

    is_in_memory = False
    is_broken = True

    def read_notices(self) -> dict[str, bytes]:
        self._check()
        return super().read_notices()

    def write_notices(self, changes: Mapping[str, bytes | None]) -> None:
        self._check()
        super().write_notices(changes)

    def _check(self) -> None:
        if self.is_broken:
            raise HistoryError("the disk is full")


@pytest.mark.fault(
    "The history file cannot be read or written while the webhook reports",
    "Nothing is sent twice while podgpu runs; the page shows the problem",
)
def test_a_history_that_fails_repeats_nothing_before_a_restart(
    scene: Scene, receiver: Receiver
) -> None:
    store = BrokenStore()
    scene.start(store)
    for _ in range(3):
        scene.round(broken())
    assert len(receiver.bodies) == 1
    [warning] = scene.webhook.warnings()
    assert "the disk is full" in warning.text
    store.is_broken = False
    scene.round(broken())
    assert scene.webhook.warnings() == []
    store.is_broken = True
    scene.round(broken())
    assert "cannot be read" in scene.webhook.warnings()[0].text
    store.is_broken = False
    scene.round(broken())
    assert scene.webhook.warnings() == []
    scene.start(store)
    scene.round(broken())
    assert len(receiver.bodies) == 1, "it is stored later"
    for _ in range(25):
        scene.round(gpu(3))
    assert len(receiver.bodies) == 2
    assert store.read_notices() == {}


class ReadOnlyStore(MemoryStore):
    is_in_memory = False

    def write_notices(self, changes: Mapping[str, bytes | None]) -> None:
        raise HistoryError("the disk is full")


def test_a_history_that_cannot_be_written_is_a_warning(scene: Scene, receiver: Receiver) -> None:
    scene.start(ReadOnlyStore())
    scene.round(gpu(3))
    assert scene.webhook.warnings() == []
    scene.round(broken())
    assert len(receiver.bodies) == 1
    [warning] = scene.webhook.warnings()
    assert warning.text.startswith(
        "webhook: what was reported cannot be stored, so a restart repeats it: the disk is full"
    )


def test_what_is_over_before_the_receiver_answers_is_not_sent(
    scene: Scene, receiver: Receiver
) -> None:
    receiver.replies.append(Reply(500))
    scene.round(broken())
    for _ in range(30):
        scene.round(gpu(3))
    assert receiver.accepted == []


@pytest.mark.parametrize("kind", ["not found", "forbidden", "nothing listens", "too slow"])
def test_a_receiver_that_cannot_be_used_is_named_without_its_path(
    kind: str, scene: Scene, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    if kind in ("not found", "forbidden"):
        receiver.replies.append(Reply(404 if kind == "not found" else 403))
    elif kind == "nothing listens":
        scene.url_file.write_text(f"http://127.0.0.1:9/services/{SECRET}?key={SECRET}")
    else:
        receiver.is_hanging.set()
        scene.start(timeout=0.2)
    scene.round(broken())
    [note] = scene.webhook.warnings()
    warning = note.text
    expected = {
        "not found": "answers 404: check the URL in the file",
        "forbidden": "answers 403: it rejects the URL or the token",
        "nothing listens": "nothing listens there",
        "too slow": "no complete response in time, within 0.2 s",
    }
    assert expected[kind] in warning
    assert "webhook: the webhook at 127.0.0.1:" in warning
    assert "SECRET" not in warning
    assert warning in caplog.text
    scene.url_file.write_text(receiver.url)
    receiver.replies.clear()
    receiver.is_hanging.clear()
    scene.round(broken())
    assert len(receiver.accepted) >= 1, "the file is read for each request"


def test_a_slow_receiver_never_delays_a_round(scene: Scene, receiver: Receiver) -> None:
    receiver.is_hanging.set()
    scene.round()
    scene.state = scene.world.round(node("n1", broken()), at=scene.at)
    scene.webhook.start(lambda: None)
    wait_until(lambda: receiver.bodies, "the request is there")
    for _ in range(1000):
        scene.webhook.reload()  # what a round does
    assert scene.webhook.warnings() == [], "the request did not time out meanwhile"
    receiver.is_hanging.clear()
    wait_until(lambda: receiver.accepted, "it is accepted")
    scene.webhook.stop()
    assert len(receiver.bodies) == 1


def test_many_gpus_are_reported_in_few_requests(scene: Scene, receiver: Receiver) -> None:
    scene.round(*map(broken, range(120)))
    assert [len(keys) for _, keys in receiver.events] == [50, 50, 20]
    assert receiver.accepted[0]["text"].startswith("podgpu: 50 GPUs are broken\n")


def test_an_idle_pod_is_reported_once_also_after_a_restart(
    scene: Scene, receiver: Receiver
) -> None:
    def idle(since: float) -> DeviceState:
        own = holder("nb-0", "research", utilization_ratio=0.0, idle_since=WALL + since)
        return gpu(0, own, busy=0.0)

    price = Prices("EUR", {"*": Price(gpu_hour=2.5)})
    scene.round(idle(50.0), seconds=3 * HOUR)
    assert receiver.bodies == []
    job = Holder(job="4711", usage=HolderUsage(utilization_ratio=0.0, idle_since=WALL))
    scene.round(idle(50.0), gpu(1, job, busy=0.0), seconds=HOUR + 60, prices=price)
    [message] = receiver.accepted
    assert message["event"] == "idle"
    assert "research/nb-0 has not used 1 GPU on n1 since" in message["text"]
    assert message["text"].endswith(", which cost 2.50 EUR per hour")
    [item] = message["items"]
    assert (item["gpus"], item["cost_per_hour"], item["currency"]) == (1.0, 2.5, "EUR")
    scene.start()
    scene.round(idle(50.0))
    scene.round(idle(50.0), seconds=HOUR)
    assert len(receiver.bodies) == 1

    scene.round(gpu(0, holder("nb-0", "research", utilization_ratio=0.5), busy=0.5))
    rested = scene.at
    scene.round(idle(rested), seconds=5 * HOUR)
    assert [event for event, _ in receiver.events] == ["idle", "idle"]


def test_a_budget_is_reported_once_a_month(scene: Scene, receiver: Receiver) -> None:
    use = BudgetUse(namespace="research", currency="EUR", per_month=100.0, cost=120.0, ratio=1.2)
    within = BudgetUse(namespace="web", currency="EUR", per_month=100.0, cost=100.0, ratio=1.0)
    for _ in range(3):
        scene.round(gpu(0), budgets=(use, within))
    scene.start()
    scene.round(gpu(0), budgets=(use, within))
    [message] = receiver.accepted
    assert message["event"] == "over_budget"
    assert "research: 120.00 EUR exceed the budget of 100.00 EUR" in message["text"]
    [item] = message["items"]
    assert item["month"] == "2023-11"
    scene.round(gpu(0), seconds=31 * 86_400, budgets=(use, within))
    assert len(receiver.accepted) == 2


def test_only_chosen_events_are_sent(scene: Scene, receiver: Receiver) -> None:
    scene.start(events=frozenset({NoticeEvent.RECOVERED}))
    scene.round(broken())
    for _ in range(25):
        scene.round(gpu(3))
    assert [event for event, _ in receiver.events] == ["recovered"]


def test_the_token_comes_from_a_file(scene: Scene, receiver: Receiver, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("abcSECRET\n")
    scene.start(token_file=str(token))
    scene.round(broken())
    assert receiver.headers[0]["Authorization"] == "Bearer abcSECRET"
    assert receiver.headers[0]["Content-Type"] == "application/json"


def test_the_options_are_checked(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    for text in ("", "hooks.slack.com/services/SECRET", "https//SECRET", "ftp://h/SECRET"):
        bad.write_text(text)
        with pytest.raises(UsageError, match="does not contain the URL") as caught:
            Webhook(WebhookSettings(str(bad)), ClusterState, MemoryStore())  # type: ignore[arg-type]
        assert "SECRET" not in str(caught.value)
    missing = WebhookSettings(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="--webhook-url-file"):
        Webhook(missing, ClusterState, MemoryStore())  # type: ignore[arg-type]
    assert parse_events("idle, broken") == {NoticeEvent.IDLE, NoticeEvent.BROKEN}
    for text in ("", "idle,exploded"):
        with pytest.raises(UsageError, match="broken, recovered, idle, over_budget"):
            parse_events(text)


def has_notices(folder: Path) -> bool:
    """Returns whether the history of another process has stored what it sent."""
    [file] = folder.glob("*.db")
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as db:
        return bool(db.execute("SELECT count(*) FROM notice").fetchone()[0])


def test_a_killed_cluster_view_repeats_nothing(receiver: Receiver, tmp_path: Path) -> None:
    """A node is gone, because its exporter was stopped."""
    url = tmp_path / "url"
    url.write_text(receiver.url)
    folders = [tmp_path / name for name in ("exporter", "first", "second")]
    for folder in folders:
        folder.mkdir()
    # A worktree that is not installed runs its own code.
    paths = os.environ.get("PYTHONPATH", ""), str(Path(podgpu_package.__file__).parents[1])
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    options = ["--history-dir", str(tmp_path / "past"), "--webhook-url-file", str(url)]
    with podgpu(EXPORTER, folders[0], variables=variables) as exporter:
        wait_until(lambda: has_values(exporter), "the exporter has values")
        scrape = ["--scrape", f"127.0.0.1:{exporter.port}", "--stale-after", "2s"]
        command = [*CLUSTER, *scrape, *options]
        with podgpu(command, folders[1], variables=variables) as first:
            wait_until(lambda: b"GPU-" in first.client.ask("/api/v1/view").body, "GPUs are shown")
            exporter.stop()
            wait_until(lambda: receiver.accepted, "the node is gone")
            wait_until(lambda: has_notices(tmp_path / "past"), "the message is stored")
            first.popen.kill()
            first.popen.wait()
            assert "SECRET" not in first.log
    [(event, keys)] = receiver.events
    assert (event, len(keys)) == ("broken", 2)
    with podgpu(command, folders[2], variables=variables) as second:
        time.sleep(3.0)
        with podgpu(EXPORTER, folders[0], variables=variables, port=exporter.port):
            wait_until(lambda: b"GPU-" in second.client.ask("/api/v1/view").body, "they are back")
            time.sleep(3.0)
        wait_until(lambda: b"node_gone" in second.client.ask("/api/v1/view").body, "gone again")
        time.sleep(3.0)
        assert "SECRET" not in second.log
    assert len(receiver.bodies) == 1


@pytest.mark.parametrize("option", ["--webhook-token-file", "--webhook-events"])
def test_options_of_the_webhook_need_its_url(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """Otherwise, a forgotten URL would be noticed only when a message is missing."""
    assert run(["cluster", "--scrape", "http://gpu-1", option, "idle"]) == 2
    assert "--webhook-events need --webhook-url-file" in capsys.readouterr().err
