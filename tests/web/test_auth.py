"""Rate limit, headers and basic auth over real HTTP, and what the comparing of passwords costs and remembers."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from podgpu.web.auth import (
    MOST_REMEMBERED,
    MOST_WAITING_FROM_ONE,
    Passwords,
    TokenBucket,
    guard,
    parse_basic,
)
from podgpu.web.exporter_app import application, gpu_manager_application
from podgpu.web.protection import Protection, protect
from podgpu.web.web_config import RateLimit, WebConfig, parse_web_config
from tests.nodes.clock import wait_until
from tests.nodes.node import Node
from tests.web.server import LOOPBACK, RELEASE, Client, running


def hash_of(password: str, cost: int = 4) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()


ALICE = hash_of("wonderland")


def basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(**sections: Any) -> Path:
        path = tmp_path / "web.yml"
        path.write_text(yaml.safe_dump(sections))
        return path

    return write


@contextmanager
def guarded(node: Node, path: Path, app: Any = application, clock: Any = time.monotonic) -> Iterator[Client]:
    node.take_turns()
    protection = protect(str(path), clock)
    try:
        with running(node.agent, LOOPBACK, partial(app, protection=protection)) as client:
            yield client
    finally:
        protection.close()


# --- over HTTP


def test_who_may_and_who_may_not(node: Node, write: Callable[..., Path]) -> None:
    with guarded(node, write(basic_auth_users={"alice": ALICE})) as client:
        assert client.ask("/metrics", Authorization=basic("alice", "wonderland")).status == 200
        for header in (
            basic("alice", "looking-glass"),
            basic("bob", "wonderland"),
            basic("alice", ""),
            basic("", ""),
            basic("alice", "x" * 100),
            basic("al\0ice", "wonder\0land"),
            "Basic !!!",
            "Bearer token",
            "Basic",
        ):
            answer = client.ask("/metrics", Authorization=header)
            assert (answer.status, answer.text) == (401, "Unauthorized\n")
            assert answer.headers["WWW-Authenticate"] == "Basic"
            assert answer.headers["Content-Type"].startswith("text/plain")
        assert client.ask("/metrics").status == 401


@pytest.mark.parametrize("path", ["/", "/health", "/livez", "/ready", "/nothing"])
def test_no_path_is_left_open(node: Node, write: Callable[..., Path], path: str) -> None:
    with guarded(node, write(basic_auth_users={"alice": ALICE})) as client:
        assert client.ask(path).status == 401


def test_release_is_behind_auth_too(node: Node, write: Callable[..., Path]) -> None:
    with guarded(node, write(basic_auth_users={"alice": ALICE})) as client:
        assert client.ask("/-/release", "POST").status == 401
        assert node.driver.calls["nvmlShutdown"] == 0
        assert client.ask("/-/release", "POST", Authorization=basic("alice", "wonderland"), **RELEASE).status == 200


def test_gpu_managers_address_is_protected_too(node: Node, write: Callable[..., Path]) -> None:
    with guarded(node, write(basic_auth_users={"alice": ALICE}), gpu_manager_application) as client:
        assert client.ask("/metric").status == 401
        assert client.ask("/metric", Authorization=basic("alice", "wonderland")).status == 200


def test_users_and_headers_change_without_a_restart(node: Node, write: Callable[..., Path]) -> None:
    with guarded(node, write(basic_auth_users={"alice": ALICE})) as client:
        alice, bob = basic("alice", "wonderland"), basic("bob", "builder")
        assert client.ask("/livez", Authorization=alice).status == 200
        assert client.ask("/livez", Authorization=bob).status == 401
        write(basic_auth_users={"bob": hash_of("builder"), "alice": hash_of("changed")})
        assert client.ask("/livez", Authorization=bob).status == 200
        assert client.ask("/livez", Authorization=alice).status == 401
        write(http_server_config={"headers": {"X-Frame-Options": "deny"}})
        answer = client.ask("/livez")
        assert (answer.status, answer.headers["X-Frame-Options"]) == (200, "deny")


def test_headers_are_on_every_answer_and_a_expositions_own_stand(node: Node, write: Callable[..., Path]) -> None:
    headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'self'"}
    users = {"alice": ALICE}
    with guarded(node, write(http_server_config={"headers": headers}, basic_auth_users=users)) as client:
        login = basic("alice", "wonderland")
        for path, method, status in (("/metrics", "GET", 200), ("/nothing", "GET", 404), ("/metrics", "POST", 405)):
            answer = client.ask(path, method, Authorization=login)
            assert (answer.status, answer.headers["X-Content-Type-Options"]) == (status, "nosniff")
            assert answer.headers["Content-Security-Policy"] == "default-src 'self'"
        assert client.ask("/metrics").headers["X-Content-Type-Options"] == "nosniff"
        own = client.ask("/", Authorization=login).headers["Content-Security-Policy"]
        assert own.startswith("default-src 'none'; script-src 'self'")


def test_a_file_gone_bad_shuts_everybody_out_until_it_is_mended(
    node: Node, write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(basic_auth_users={"alice": ALICE})
    login = basic("alice", "wonderland")
    with guarded(node, path) as client:
        path.write_text("basic_auth_users: {alice: hunter2}\n")
        assert [client.ask("/livez", Authorization=login).status for _ in range(3)] == [500] * 3
        path.unlink()
        assert client.ask("/livez", Authorization=login).status == 500
        write(basic_auth_users={"alice": ALICE})
        assert client.ask("/livez", Authorization=login).status == 200
    assert [record.levelno for record in caplog.records if record.levelno >= logging.ERROR] == [logging.ERROR] * 2
    assert "hunter2" not in caplog.text
    assert "wonderland" not in caplog.text


def test_the_rate_limit_comes_before_auth(node: Node, write: Callable[..., Path]) -> None:
    now = [0.0]
    path = write(rate_limit={"interval": "1s", "burst": 2}, basic_auth_users={"alice": ALICE})
    with guarded(node, path, clock=lambda: now[0]) as client:
        login = basic("alice", "wonderland")
        assert [client.ask("/livez").status for _ in range(2)] == [401, 401]
        answer = client.ask("/livez", Authorization=login)
        assert (answer.status, answer.text) == (429, "Too Many Requests\n")
        now[0] = 1.0
        assert [client.ask("/livez", Authorization=login).status for _ in range(2)] == [200, 429]
        write()
        assert client.ask("/livez").status == 429, "the limit holds as it was at start"


def test_a_plain_server_with_users_is_warned_about(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    protect(str(write(basic_auth_users={"alice": ALICE}, tls_server_config={"min_version": "TLS13"}))).close()
    assert "plain HTTP" in caplog.text
    assert "passwords cross the network readable" in caplog.text


# --- the bucket


def test_an_empty_bucket_gives_nothing() -> None:
    now = [0.0]
    bucket = TokenBucket(RateLimit(1.0, 0), lambda: now[0])
    assert not bucket.take()
    now[0] = 1000.0
    assert not bucket.take()


@given(st.integers(1, 20), st.lists(st.floats(0, 10), max_size=60))
def test_a_bucket_gives_no_more_than_burst_and_time_allow(burst: int, waits: list[float]) -> None:
    now = [0.0]
    bucket = TokenBucket(RateLimit(2.0, burst), lambda: now[0])
    given_out = 0
    for wait in waits:
        now[0] += wait
        given_out += bucket.take()
        assert given_out <= burst + now[0] / 2.0 + 1e-6
    now[0] += 2.0 * burst + 0.001
    assert all(bucket.take() for _ in range(burst))
    assert not bucket.take()


# --- passwords


class Counting:
    """Stands for bcrypt: says what was compared, and whether two were at it at once."""

    def __init__(self, right: bytes = b"", delay: float = 0.0) -> None:
        self.calls: list[tuple[bytes, bytes]] = []
        self.threads: set[str] = set()
        self.overlapped = False
        self._busy = threading.Lock()
        self._right, self._delay = right, delay

    def __call__(self, password: bytes, hashed: bytes) -> bool:
        self.overlapped |= not self._busy.acquire(blocking=False)
        try:
            time.sleep(self._delay)
            self.calls.append((password, hashed))
            self.threads.add(threading.current_thread().name)
            return password == self._right
        finally:
            self._busy.release()


@pytest.fixture
def passwords() -> Iterator[Callable[[Counting], Passwords]]:
    made: list[Passwords] = []

    def make(compare: Counting) -> Passwords:
        made.append(Passwords(compare))
        return made[-1]

    yield make
    for one in made:
        one.close()


USERS = {"alice": hash_of("a", 5), "bob": ALICE}


def test_an_unknown_user_costs_a_comparison_too_and_never_gets_in(passwords: Callable[[Counting], Passwords]) -> None:
    compare = Counting(right=b"guess")
    asked = passwords(compare)
    assert not asyncio.run(asked.are_right(USERS, b"mallory", b"guess"))
    ((_, against),) = compare.calls
    assert against.startswith(b"$2b$05$"), "the highest cost of anybody's"
    assert not bcrypt.checkpw(b"guess", against), "a hash bcrypt can work on"
    assert not asyncio.run(asked.are_right(USERS, b"mallory", b"guess"))
    assert len(compare.calls) == 1


def test_verdicts_are_remembered_and_a_new_hash_is_a_new_question(passwords: Callable[[Counting], Passwords]) -> None:
    compare = Counting(right=b"right")
    asked = passwords(compare)
    for _ in range(3):
        assert asyncio.run(asked.are_right(USERS, b"alice", b"right"))
        assert not asyncio.run(asked.are_right(USERS, b"alice", b"wrong"))
    assert len(compare.calls) == 2
    asyncio.run(asked.are_right(USERS | {"alice": ALICE}, b"alice", b"right"))
    assert len(compare.calls) == 3
    assert asked.remembered == 3


def test_memory_is_bounded(passwords: Callable[[Counting], Passwords]) -> None:
    asked = passwords(Counting())

    async def guess() -> None:
        for number in range(3 * MOST_REMEMBERED):
            await asked.are_right(USERS, b"alice", b"%d" % number)
            assert asked.remembered <= MOST_REMEMBERED

    asyncio.run(guess())
    assert asked.remembered == MOST_REMEMBERED


def test_one_comparison_at_a_time_and_not_in_the_event_loop(passwords: Callable[[Counting], Passwords]) -> None:
    compare = Counting(delay=0.01)
    asked = passwords(compare)

    async def guess() -> None:
        guesses = [b"%d" % (number % 3) for number in range(12)]
        await asyncio.gather(*(asked.are_right(USERS, b"alice", one) for one in guesses))

    asyncio.run(guess())
    assert len(compare.calls) == 3
    assert not compare.overlapped
    assert threading.current_thread().name not in compare.threads


def test_a_slow_comparison_holds_up_nobody_who_is_known(node: Node, write: Callable[..., Path]) -> None:
    path = write(basic_auth_users={"alice": ALICE, "slow": hash_of("x", 4).replace("$04$", "$10$")})
    with guarded(node, path) as client, ThreadPoolExecutor(1) as elsewhere:
        login = basic("alice", "wonderland")
        assert client.ask("/livez", Authorization=login).status == 200
        guess = elsewhere.submit(client.ask, "/livez", Authorization=basic("slow", "x"))
        answered = 0
        while not guess.done():
            assert client.ask("/livez", Authorization=login).status == 200
            answered += 1
        assert answered > 1
        assert guess.result().status == 401


class Gated(Counting):
    """Compares nothing until it is let."""

    def __init__(self, right: bytes) -> None:
        super().__init__(right)
        self.let = threading.Event()

    def __call__(self, password: bytes, hashed: bytes) -> bool:
        assert self.let.wait(30)
        return super().__call__(password, hashed)


@pytest.mark.fault(
    "300 wrong passwords at once, from the scraper's own address",
    "the scraper's login stays known and waits for none of them; what is past the queue gets 429 at once",
)
def test_strangers_cost_a_known_login_nothing(
    node: Node, write: Callable[..., Path], passwords: Callable[[Counting], Passwords]
) -> None:
    """bcrypt stands still throughout: whoever is answered did not wait for it."""
    compare = Gated(right=b"wonderland")
    compare.let.set()
    node.take_turns()
    config = parse_web_config(write(basic_auth_users={"alice": ALICE}).read_bytes(), "web.yml")
    middleware = guard(lambda: _answer(config), None, passwords(compare))
    protection = Protection(None, middleware, lambda: None)
    login = basic("alice", "wonderland")
    with running(node.agent, app=partial(application, protection=protection)) as client:
        assert client.ask("/metrics", Authorization=login).status == 200
        compare.let.clear()
        with ThreadPoolExecutor(100) as strangers:
            guesses = [
                strangers.submit(client.ask, "/metrics", Authorization=basic("alice", f"guess {number}"))
                for number in range(300)
            ]
            wait_until(lambda: any(guess.done() for guess in guesses), "one is past the queue")
            statuses = [client.ask("/metrics", Authorization=login).status for _ in range(50)]
            compare.let.set()
            refused = Counter(guess.result().status for guess in guesses)
        assert statuses == [200] * 50
        assert set(refused) == {401, 429}
        assert client.ask("/metrics", Authorization=login).status == 200
    assert sum(password == b"wonderland" for password, _ in compare.calls) == 1, "never asked for again"


async def _answer(config: WebConfig) -> WebConfig:
    return config


def test_the_queue_is_bounded_for_each_address(passwords: Callable[[Counting], Passwords]) -> None:
    compare = Gated(right=b"right")
    asked = passwords(compare)

    async def from_two_addresses() -> tuple[Counter[str], bool]:
        def guess(asker: str, password: bytes) -> asyncio.Task[bool]:
            return asyncio.create_task(asked.are_right(USERS, b"alice", password, asker))

        strangers = [guess(f"2001:db8::{number:x}", b"%d" % number) for number in range(20)]
        await asyncio.sleep(0)
        alice = guess("10.0.0.7", b"right")
        await asyncio.sleep(0)
        compare.let.set()
        outcomes = await asyncio.gather(*strangers, return_exceptions=True)
        return Counter(type(one).__name__ for one in outcomes), await alice

    refused, let_in = asyncio.run(from_two_addresses())
    assert refused == {"bool": MOST_WAITING_FROM_ONE, "TooManyGuesses": 20 - MOST_WAITING_FROM_ONE}
    assert let_in


def test_guesses_do_not_displace_a_good_verdict(passwords: Callable[[Counting], Passwords]) -> None:
    compare = Counting(right=b"right")
    asked = passwords(compare)

    async def ask() -> None:
        assert await asked.are_right(USERS, b"alice", b"right")
        for number in range(3 * MOST_REMEMBERED):
            assert not await asked.are_right(USERS, b"alice", b"%d" % number)
        assert await asked.are_right(USERS, b"alice", b"right")

    asyncio.run(ask())
    assert sum(password == b"right" for password, _ in compare.calls) == 1


def test_bcrypts_own_limits() -> None:
    real = Passwords()
    try:
        users = {"long": hash_of("x" * 72)}
        assert asyncio.run(real.are_right(users, b"long", b"x" * 100)), "as in Go, what is past 72 bytes does not count"
        assert not asyncio.run(real.are_right(users, b"\xff\xfe", b"\xff"))
    finally:
        real.close()


# --- the header


@given(st.text(), st.text())
def test_credentials_round_trip(user: str, password: str) -> None:
    user = user.replace(":", "")
    sent = base64.b64encode(f"{user}:{password}".encode("utf-8", "replace")).decode()
    assert parse_basic(f"bAsIc {sent}") == (user.encode("utf-8", "replace"), password.encode("utf-8", "replace"))


@given(st.text())
def test_any_header_is_refused_or_understood(header: str) -> None:
    for one in (header, f"Basic {header}"):
        assert parse_basic(one) is None or len(parse_basic(one) or ()) == 2
