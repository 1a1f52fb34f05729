"""Tests the reflector with a server that closes connections, rejects requests, hangs or sends
malformed data.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podgpu.kube.config import ApiConfig, ExecPlugin
from podgpu.kube.reflector import Informer, ReflectorSettings
from tests.kube.api_server import Request, SimulatedApiServer

from .conftest import HURRY, PODS, eventually, name_of, pod

MakeWatcher = Callable[..., Informer[Any]]


def watches(server: SimulatedApiServer) -> list[Request]:
    return [request for request in server.requests if request.watches]


def lists(server: SimulatedApiServer) -> list[Request]:
    return [request for request in server.requests if not request.watches]


def wait_watching(server: SimulatedApiServer, watcher: Informer[Any], times: int = 1) -> None:
    eventually(
        lambda: len(watches(server)) >= times and server.open_watches and watcher.error is None
    )


def reason(watcher: Informer[Any]) -> str:
    error = watcher.error
    return error.reason if error is not None else ""


def test_it_follows_the_collection(server: SimulatedApiServer, watch: MakeWatcher) -> None:
    server.put("pods", pod("a"), pod("b"))
    watcher = watch()
    assert watcher.wait_synced(30)
    assert watcher.synced
    assert watcher.items() == ("a", "b")
    wait_watching(server, watcher)
    server.put("pods", pod("c"))
    eventually(lambda: watcher.items() == ("a", "b", "c"))
    server.remove("pods", "a", "team")
    eventually(lambda: watcher.items() == ("b", "c"))


def test_objects_of_two_namespaces_can_have_the_same_name(
    server: SimulatedApiServer, watch: MakeWatcher
) -> None:
    def place(body: dict[str, Any]) -> str:
        return f"{body['metadata']['namespace']}/{body['metadata']['name']}"

    server.put("pods", pod("a"), pod("a", namespace="other"))
    watcher = watch(place)
    eventually(lambda: set(watcher.items()) == {"team/a", "other/a"})
    wait_watching(server, watcher)
    server.remove("pods", "a", "team")
    eventually(lambda: watcher.items() == ("other/a",))


def test_waiting_ends_at_its_timeout(server: SimulatedApiServer, watch: MakeWatcher) -> None:
    server.hang()
    watcher = watch(settings=replace(HURRY, request_seconds=3600.0))
    assert not watcher.wait_synced(0.01)
    assert not watcher.synced
    server.resume()
    assert watcher.wait_synced(3600)


def test_an_error_event_is_logged_as_the_server_words_it(
    server: SimulatedApiServer, watch: MakeWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = watch()
    wait_watching(server, watcher)
    server.send(b'{"type": "ERROR", "object": {"message": "etcd is ill"}}\n')
    wait_watching(server, watcher, 2)
    (message,) = (text for text in caplog.messages if "etcd is ill" in text)
    assert message == (
        "watch of /api/v1/pods: the API server answered /api/v1/pods with status 0 (etcd is ill); "
        "the credentials are from the test"
    )


def test_the_queries_of_list_and_watch(server: SimulatedApiServer, watch: MakeWatcher) -> None:
    server.put("pods", pod("a"))
    selector = {"fieldSelector": "spec.nodeName=node-a"}
    watcher = watch(params=selector)
    wait_watching(server, watcher)
    first, second = server.requests
    assert first.query == selector | {
        "resourceVersion": "0",
        "resourceVersionMatch": "NotOlderThan",
    }
    seconds = int(second.query["timeoutSeconds"])
    assert 300 <= seconds <= 600
    assert second.query == selector | {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(seconds),
        "resourceVersion": str(server.version),
    }
    assert first.port == second.port


def test_only_converted_objects_are_stored(server: SimulatedApiServer, watch: MakeWatcher) -> None:
    def keep(body: dict[str, Any]) -> str | None:
        return body["metadata"]["labels"].get("app")

    server.put("pods", pod("a", app="train"), pod("b"))
    watcher = watch(keep)
    wait_watching(server, watcher)
    assert watcher.items() == ("train",)
    server.put(
        "pods", pod("a", app="train", heartbeat="1")
    )  # changes only a field that the store does not keep
    server.put("pods", pod("b", app="serve"))
    eventually(lambda: watcher.items() == ("train", "serve"))
    server.put("pods", pod("a"))
    eventually(lambda: watcher.items() == ("serve",))


def test_a_watch_that_ends_goes_on_where_it_was(
    server: SimulatedApiServer, watch: MakeWatcher
) -> None:
    watcher = watch()
    wait_watching(server, watcher)
    server.put("pods", pod("a"))
    eventually(lambda: watcher.items() == ("a",))
    reached = str(server.version)
    server.end_watches()
    wait_watching(server, watcher, 2)
    assert watches(server)[1].query["resourceVersion"] == reached
    assert len(lists(server)) == 1


def test_a_watch_resumes_after_the_last_bookmark(
    server: SimulatedApiServer, watch: MakeWatcher
) -> None:
    server.put("pods", pod("a"))
    watcher = watch()
    wait_watching(server, watcher)
    server.send(b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "500"}}}\n')
    server.end_watches()
    wait_watching(server, watcher, 2)
    assert watches(server)[1].query["resourceVersion"] == "500"
    assert watcher.items() == ("a",)
    assert len(lists(server)) == 1


def test_a_cut_connection_misses_nothing(server: SimulatedApiServer, watch: MakeWatcher) -> None:
    server.put("pods", pod("a"))
    watcher = watch()
    wait_watching(server, watcher)
    server.cut_watches()
    server.put("pods", pod("b"))
    server.remove("pods", "a", "team")
    eventually(lambda: watcher.items() == ("b",))
    assert len(lists(server)) == 1


@pytest.mark.fault(
    "the API server restarts, and no longer has the versions that were watched from",
    "the last objects stay while it is away; once it is back the collection is listed at once, "
    "not after another"
    " back-off",
)
@pytest.mark.parametrize("as_event", [False, True])
def test_a_version_too_old_is_listed_again(
    server: SimulatedApiServer,
    watch: MakeWatcher,
    as_event: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.gone_as_event = as_event
    server.put("pods", pod("a"))
    watcher = watch()
    wait_watching(server, watcher)
    server.stop()
    eventually(lambda: reason(watcher) == "unreachable")
    assert watcher.items() == ("a",)
    assert count_records(caplog, logging.WARNING) == 1
    server.put("pods", pod("b"))
    server.remove("pods", "a", "team")
    server.compact()
    server.start()
    eventually(lambda: watcher.items() == ("b",))
    eventually(lambda: watcher.error is None)
    assert len(lists(server)) == 2
    assert lists(server)[1].query == {}, "the cache of a restarted server may be older"
    assert count_records(caplog, logging.WARNING) == 1, "an old version is no reason to warn"


@pytest.mark.parametrize(
    "garbage",
    [
        b"nonsense\n",
        b'{"type": "ADDED", "object": {}}\n',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is ill"}}\n',
        b'{"type": "PAINTED", "object": {"metadata": {"resourceVersion": "7"}}}\n',
        b"[" * 100_000 + b"\n",
        b"x" * 5_000_000,
    ],
    ids=range(6),
)
def test_after_garbage_the_collection_is_listed_again(
    server: SimulatedApiServer, watch: MakeWatcher, garbage: bytes
) -> None:
    server.put("pods", pod("a"))
    watcher = watch()
    wait_watching(server, watcher)
    server.send(garbage)
    wait_watching(server, watcher, 2)
    server.put("pods", pod("b"))
    eventually(lambda: watcher.items() == ("a", "b"))
    assert len(lists(server)) == 2
    assert lists(server)[1].query["resourceVersion"] == "0"


def test_a_collection_that_disappears_is_listed_again(
    server: SimulatedApiServer, watch: MakeWatcher
) -> None:
    """An upgrade of the server can remove an API version, so the path must be found again."""
    server.refusal = (404, "the server could not find the requested resource")
    server.refuse_watches_only = True
    watcher = watch()
    eventually(lambda: len(lists(server)) > 1)
    assert reason(watcher) == "not_found"


@pytest.mark.parametrize("forgotten", [0, 1, 3])
def test_a_long_list_comes_in_pages(
    server: SimulatedApiServer, watch: MakeWatcher, forgotten: int
) -> None:
    server.put("pods", *(pod(f"p{number}") for number in range(7)))
    server.forget_pages = forgotten
    watcher = watch(page_size=3)
    wait_watching(server, watcher)
    assert watcher.items() == tuple(f"p{number}" for number in range(7))
    last = [request.query for request in lists(server)][-3:]
    assert [query["limit"] for query in last] == ["3", "3", "3"]
    assert ["continue" in query for query in last] == [False, True, True]
    assert not any("resourceVersion" in query for query in last)


@pytest.mark.fault(
    "a proxy between podgpu and the API server holds the events of a watch back",
    "after 150 s without an event or a bookmark the collection is listed again",
)
def test_a_silent_watch_is_listed_again(server: SimulatedApiServer, watch: MakeWatcher) -> None:
    server.put("pods", pod("a"))
    watcher = watch(settings=replace(HURRY, silence_seconds=0.2))
    wait_watching(server, watcher)
    server.holds_back = True
    server.put("pods", pod("b"))
    eventually(lambda: watcher.items() == ("a", "b"))
    assert watcher.error is None
    assert len(lists(server)) > 1


def test_a_watch_that_the_server_does_not_end_is_listed_again(
    server: SimulatedApiServer, watch: MakeWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    server.ignores_timeout = True
    watcher = watch(settings=replace(HURRY, watch_seconds=(0, 0), request_seconds=0.5))
    eventually(lambda: len(lists(server)) > 1)
    assert watcher.synced
    assert count_records(caplog, logging.WARNING) == 0


def test_a_watch_that_ends_at_once_is_not_renewed_at_once(
    server: SimulatedApiServer, watch: MakeWatcher
) -> None:
    watch(settings=replace(HURRY, watch_seconds=(0, 0), first_delay=3600.0))
    eventually(lambda: watches(server))
    time.sleep(0.2)
    assert len(watches(server)) == 1


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The longest delay before each retry. The retry itself comes at once."""
    longest: list[float] = []

    def choose_shortest(low: float, high: float) -> float:
        longest.append(high)
        return low

    monkeypatch.setattr(random, "uniform", choose_shortest)
    return longest


SLOW = ReflectorSettings(first_delay=1.0, max_delay=4.0, max_refused_delay=9.0)


@pytest.mark.parametrize(
    ("status", "expected"), [(503, [1, 2, 4, 4]), (403, [1, 2, 4, 8, 9, 9])], ids=["down", "denied"]
)
def test_retries_become_rarer(
    server: SimulatedApiServer,
    watch: MakeWatcher,
    delays: list[float],
    status: int,
    expected: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.refusal = (status, "no")
    watcher = watch(settings=SLOW)
    eventually(lambda: len(delays) >= len(expected))
    watcher.close()
    assert delays[: len(expected)] == expected
    assert count_records(caplog, logging.WARNING) == 1, "the same error is logged once"


def test_another_kind_of_failure_is_retried_soon(
    server: SimulatedApiServer,
    watch: MakeWatcher,
    delays: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.refusal = (403, "no")
    watcher = watch(settings=SLOW)
    eventually(lambda: len(delays) >= 3)
    server.refusal = (503, "no")
    eventually(lambda: reason(watcher) == "server_error")
    watcher.close()
    assert delays.count(1) == 2
    assert count_records(caplog, logging.WARNING) == 2, "the other error is logged, too"


def test_a_watch_that_breaks_at_once_does_not_make_retries_more_frequent(
    server: SimulatedApiServer, watch: MakeWatcher, delays: list[float]
) -> None:
    server.refusal = (403, "no")
    watcher = watch(settings=replace(SLOW, max_delay=3600.0))
    eventually(lambda: len(delays) >= 3)
    server.refusal = None
    wait_watching(server, watcher)
    server.refusal = (403, "no")
    before = len(delays)
    server.cut_watches()
    eventually(lambda: reason(watcher) == "forbidden")
    watcher.close()
    next_delays = delays[before : before + 2]
    assert next_delays[0] == 1, "of the other kind of failure"
    assert next_delays[1] == min(9, 2 ** (before))


def test_an_open_watch_does_not_keep_the_process_running(
    server: SimulatedApiServer, watch: MakeWatcher
) -> None:
    watcher = watch()
    wait_watching(server, watcher)
    threads = [each for each in threading.enumerate() if each.name == "watch-pods"]
    assert threads
    assert all(thread.daemon for thread in threads)


@pytest.mark.parametrize("works_by", ["event", "duration"])
def test_after_a_working_watch_a_failure_is_retried_soon(
    server: SimulatedApiServer,
    watch: MakeWatcher,
    delays: list[float],
    works_by: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A watch works if it delivers an event, or lasts longer than `max_delay`."""
    caplog.set_level(logging.INFO)
    server.refusal = (403, "no")
    watcher = watch(settings=replace(SLOW, max_delay=3600.0 if works_by == "event" else 0.0))
    eventually(lambda: len(delays) >= 3)
    server.refusal = None
    wait_watching(server, watcher)
    assert count_records(caplog, logging.INFO) == 1, "a watch that works again is logged"
    if works_by == "event":
        server.put("pods", pod("a"))
        eventually(lambda: watcher.items() == ("a",))
    server.refusal = (403, "no")
    delays.clear()
    server.cut_watches()
    eventually(lambda: reason(watcher) == "forbidden")
    watcher.close()
    assert delays[:2] == ([1, 1] if works_by == "event" else [0, 1])


def count_records(caplog: pytest.LogCaptureFixture, level: int) -> int:
    return sum(record.levelno == level for record in caplog.records)


def test_a_server_that_hangs_is_retried(server: SimulatedApiServer, watch: MakeWatcher) -> None:
    server.put("pods", pod("a"))
    server.hang()
    watcher = watch(settings=replace(HURRY, request_seconds=0.1))
    eventually(lambda: reason(watcher) == "timeout")
    server.resume()
    eventually(lambda: watcher.items() == ("a",))


def test_waiting_ends_when_access_is_rejected(
    server: SimulatedApiServer, watch: MakeWatcher
) -> None:
    """The timeout is an hour, so a wait that does not end early fails the test."""
    server.put("pods", pod("a"))
    server.refusal = (403, "pods is forbidden")
    watcher = watch()
    assert not watcher.wait_synced(3600)
    assert reason(watcher) == "forbidden"
    server.refusal = None
    eventually(lambda: watcher.items() == ("a",))
    assert watcher.wait_synced(0)


def test_an_object_that_cannot_be_converted_is_skipped(
    server: SimulatedApiServer, watch: MakeWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    def keep(body: dict[str, Any]) -> str:
        return str(body["metadata"]["labels"]["app"])

    server.put("pods", pod("a", app="x"), pod("b"))
    watcher = watch(keep)
    wait_watching(server, watcher)
    server.put("pods", pod("c"), pod("d", app="y"))
    eventually(lambda: watcher.items() == ("x", "y"))
    assert [
        record.exc_info for record in caplog.records if "cannot be converted" in record.message
    ] == [None, None]


def _close_in_time(watcher: Informer[Any]) -> None:
    watcher.close()
    assert not any(thread.name == "watch-pods" for thread in threading.enumerate())
    watcher.close()


def test_closing_is_prompt(server: SimulatedApiServer, config: ApiConfig) -> None:
    _close_in_time(Informer(config, PODS, {}, name_of))
    server.put("pods", pod("a"))
    watching = Informer(config, PODS, {}, name_of)
    wait_watching(server, watching)
    _close_in_time(watching)
    assert watching.items() == ("a",)
    eventually(lambda: server.open_watches == 0)
    server.hang()
    asked = len(server.requests)
    hanging = Informer(config, PODS, {}, name_of)
    eventually(lambda: len(server.requests) > asked)
    _close_in_time(hanging)
    server.resume()


def test_closing_is_prompt_while_a_plugin_runs(config: ApiConfig, tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"open({str(started)!r}, 'w').close(); import time; time.sleep(600)"
    plugin = ExecPlugin(sys.executable, "client.authentication.k8s.io/v1", ("-S", "-c", code))
    watcher = Informer(replace(config, plugin=plugin), PODS, {}, name_of)
    eventually(started.exists)
    _close_in_time(watcher)
