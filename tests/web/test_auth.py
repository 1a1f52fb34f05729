"""Tests the rate limit, headers and basic auth of the web config over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml

from podgpu.web.exporter_app import application, gpu_manager_application
from podgpu.web.protection import LoginChecker, Protection
from tests.nodes.clock import PATIENCE
from tests.nodes.node import Node
from tests.web.server import LOOPBACK, RELEASE, Client, running


def hash_of(password: str, cost: int = 4) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()


ALICE = hash_of("wonderland")
USERS = {"alice": hash_of("a", 5), "bob": ALICE}


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
def guarded(
    node: Node, path: Path, app: Any = application, clock: Any = time.monotonic
) -> Iterator[Client]:
    node.take_turns()
    with running(
        node.agent, LOOPBACK, partial(app, protection=Protection(str(path), clock))
    ) as client:
        yield client


def test_logins(node: Node, write: Callable[..., Path]) -> None:
    path = write(basic_auth_users={"alice": ALICE})
    with guarded(node, path) as client:
        assert client.ask("/metrics", Authorization=basic("alice", "wonderland")).status == 200
        for header in (
            basic("alice", "looking-glass"),
            basic("bob", "wonderland"),
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
        for url in ("/metrics", "/", "/health", "/ready", "/nothing"):
            assert client.ask(url).status == 401
        assert client.ask("/-/release", "POST").status == 401
        assert node.driver.calls["nvmlShutdown"] == 0
        assert (
            client.ask(
                "/-/release", "POST", Authorization=basic("alice", "wonderland"), **RELEASE
            ).status
            == 200
        )
    with guarded(node, path, gpu_manager_application) as client:
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


def test_an_invalid_file_changes_nothing_until_it_is_fixed(
    node: Node, write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, login, guess = (
        write(basic_auth_users={"alice": ALICE}),
        basic("alice", "wonderland"),
        basic("alice", "x"),
    )
    with guarded(node, path) as client:
        path.write_text("basic_auth_users: {alice: hunter2}\n")
        assert [client.ask("/livez", Authorization=login).status for _ in range(3)] == [200] * 3
        assert client.ask("/livez", Authorization=guess).status == 401
        path.unlink()
        assert client.ask("/livez").status == 401
        write(basic_auth_users={"alice": hash_of("x")})
        assert client.ask("/livez", Authorization=guess).status == 200
    assert [record.levelno for record in caplog.records if record.levelno >= logging.ERROR] == [
        logging.ERROR
    ] * 2
    assert "hunter2" not in caplog.text


def test_rate_limit_is_checked_before_the_login(node: Node, write: Callable[..., Path]) -> None:
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
        assert client.ask("/livez").status == 429, "a changed file must not change the rate limit"


def test_rate_limit_saves_no_more_requests_than_the_burst(
    node: Node, write: Callable[..., Path]
) -> None:
    now = [0.0]
    path = write(rate_limit={"interval": "1s", "burst": 2})
    with guarded(node, path, clock=lambda: now[0]) as client:

        def ask(times: int) -> list[int]:
            return [client.ask("/livez").status for _ in range(times)]

        now[0] = 100.0
        assert ask(3) == [200, 200, 429]
        now[0] = 100.5
        assert ask(1) == [429]
        now[0] = 101.0
        assert ask(2) == [200, 429], "half a token from 100.5 s is kept"
        now[0] = 104.0
        assert ask(3) == [200, 200, 429]


def test_a_request_is_regained_in_each_interval(node: Node, write: Callable[..., Path]) -> None:
    now = [0.0]
    path = write(rate_limit={"interval": "4s", "burst": 1})
    with guarded(node, path, clock=lambda: now[0]) as client:
        statuses = []
        for now[0] in (0.0, 2.0, 4.0, 7.0, 8.0):
            statuses.append(client.ask("/livez").status)
    assert statuses == [200, 429, 200, 429, 200]


class FakeBcrypt:
    def __init__(self, right: bytes) -> None:
        self._right = right
        self.calls: list[tuple[bytes, bytes]] = []
        self.threads: set[int] = set()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, password: bytes, hashed: bytes) -> bool:
        assert self.go.wait(PATIENCE)
        self.calls.append((password, hashed))
        self.threads.add(threading.get_ident())
        return password == self._right


def test_unknown_user_takes_as_much_time_as_a_known_one() -> None:
    compare = FakeBcrypt(b"guess")
    assert not asyncio.run(LoginChecker(compare).is_valid(USERS, "mallory", b"guess"))
    ((_, against),) = compare.calls
    assert against.startswith(b"$2b$05$"), "must have the highest cost of all users"
    assert not bcrypt.checkpw(b"guess", against), "must be a valid hash that does not match"


@pytest.mark.fault(
    "300 wrong passwords at once",
    "The scraper's login stays cached and does not wait for their comparison",
)
async def test_wrong_logins_do_not_delay_a_known_one() -> None:
    compare = FakeBcrypt(b"right")
    logins = LoginChecker(compare)
    assert await logins.is_valid(USERS, "alice", b"right")
    compare.go.clear()
    guesses = [
        asyncio.create_task(logins.is_valid(USERS, "alice", b"%d" % number))
        for number in range(300)
    ]
    await asyncio.sleep(0)
    assert await logins.is_valid(USERS, "alice", b"right")
    assert not any(guess.done() for guess in guesses)
    compare.go.set()
    assert not any(await asyncio.gather(*guesses))
    assert await logins.is_valid(USERS, "alice", b"right")
    assert sum(password == b"right" for password, _ in compare.calls) == 1
    assert await logins.is_valid(USERS | {"alice": ALICE}, "alice", b"right")
    assert sum(password == b"right" for password, _ in compare.calls) == 2, (
        "a changed hash must be compared"
    )
    assert threading.get_ident() not in compare.threads
