"""A well-behaved Prometheus: one kept connection to each victim, one scrape a second, and what it waited for each."""

from __future__ import annotations

import base64
import http.client
import itertools
import os
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

_TIMEOUT = 10.0
_FIRST_PORT, _PORTS_GIVEN = 20_000, 12_000
_PORTS = itertools.count(os.getpid() * 64)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


Check = Callable[[str], list[str]]
"""Is given an exposition; returns what is wrong with it."""


class Login(NamedTuple):
    user: str
    password: str

    @property
    def header(self) -> str:
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


def free_port() -> int:
    """For a process that is yet to bind it. Not one of those that the kernel gives to whoever connects or listens: it
    would be somebody else's by then. Nor one that another process asks for here."""
    while True:
        port = _FIRST_PORT + next(_PORTS) % _PORTS_GIVEN
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def connection_to(port: int, authority: str = "") -> http.client.HTTPConnection:
    """`authority`: the file with whom its certificate is of, where it speaks TLS."""
    if not authority:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    context = ssl.create_default_context(cafile=authority)
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT, context=context)


def exposition_of(port: int, login: Login, authority: str = "") -> str:
    """Of somebody who may not be up yet: empty."""
    connection = connection_to(port, authority)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": login.header})
        response = connection.getresponse()
        return response.read().decode() if response.status == 200 else ""
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


def labels_of(line: str) -> dict[str, str]:
    return dict(_LABEL.findall(line))


def lines_of(exposition: str, family: str) -> list[tuple[dict[str, str], float]]:
    found = (line for line in exposition.splitlines() if line.startswith((family + "{", family + " ")))
    return [(labels_of(line), float(line.rpartition(" ")[2])) for line in found]


@dataclass
class Scraper(threading.Thread):
    name_of: str
    port: int
    path: str
    login: Login | None
    check: Check
    authority: str = ""
    every: float = 1.0
    waited: list[float] = field(default_factory=list)
    """Seconds, of each scrape that was answered."""
    wrong: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(name=f"scrape-{self.name_of}", daemon=True)
        self._connection: http.client.HTTPConnection | None = None
        self.scrapes = 0

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        began = time.monotonic()
        while not self.ended.wait(max(0.0, began + self.scrapes * self.every - time.monotonic())):
            self.scrapes += 1
            self._scrape(time.monotonic() - began)

    def _scrape(self, at: float) -> None:
        before = time.perf_counter()
        try:
            status, exposition = self._get()
        except (OSError, http.client.HTTPException) as error:
            self._note("no answer", at, type(error).__name__)
            self._drop()
            return
        self.waited.append(time.perf_counter() - before)
        if status != 200:
            self._note(f"status {status}", at, exposition[:80])
            return
        for what in self.check(exposition):
            self._note(what, at)

    def _get(self) -> tuple[int, str]:
        """On the kept connection; a server may close one that was not used, so there is a second try on a new one."""
        for last in (False, True):
            if self._connection is None:
                self._connection = connection_to(self.port, self.authority)
            try:
                self._connection.request("GET", self.path, headers=self._headers())
                response = self._connection.getresponse()
                return response.status, response.read().decode()
            except (ConnectionError, http.client.RemoteDisconnected):
                self._drop()
                if last:
                    raise
        raise AssertionError("not reached")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self.login.header} if self.login else {}

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _note(self, what: str, at: float, detail: str = "") -> None:
        self.wrong[what] += 1
        self.examples.setdefault(what, f"{at:.0f} s {detail}".strip())

    def stop(self) -> None:
        self.ended.set()
        self.join(2 * _TIMEOUT)
        self._drop()

    def percentile(self, part: float) -> float:
        """Milliseconds; of no answer at all, endless."""
        if not self.waited:
            return float("inf")
        ordered = sorted(self.waited)
        return 1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]
