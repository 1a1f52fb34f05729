"""Expositions from a real HTTP server that answers what it is told to, and what becomes of bad ones."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from podgpu.cli.main import run
from podgpu.errors import SourceError, UsageError
from podgpu.top.exporter import ExporterSource
from podgpu.top.feed import Feed
from tests.top.scene import HEADER

EXPOSITION = (Path(__file__).parents[1] / "nodes" / "shared" / "expected.prom").read_bytes()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n"
HTML = b"<!doctype html><html><body>Hello</body></html>"


def answer(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


class RawServer:
    """Answers every request with the bytes it was given; keeps what it was asked."""

    def __init__(self, reply: bytes | Callable[[bytes], bytes]) -> None:
        self.reply = reply
        self.requests: list[bytes] = []
        self.silent = False
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/metrics"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536)
                if not request:
                    return
                self.requests.append(request)
                if self.silent:
                    self._closing.wait()
                    continue
                connection.sendall(self.reply(request) if callable(self.reply) else self.reply)

    def close(self) -> None:
        self._closing.set()
        socket.create_connection(self._listener.getsockname()).close()  # an empty request ends it
        self._thread.join()
        self._listener.close()


@contextmanager
def serving(reply: bytes | Callable[[bytes], bytes]) -> Iterator[RawServer]:
    server = RawServer(reply)
    try:
        yield server
    finally:
        server.close()


def test_host_and_port_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answer(EXPOSITION)) as server:
        place = server.url.removeprefix("http://").removesuffix("/metrics")
        assert run(["top", "--once", "--interval", "100ms", "--url", place]) == 0
    assert capsys.readouterr().out.split()[: len(HEADER)] == HEADER
    assert server.requests[0].startswith(b"GET /metrics ")


def refused(reply: bytes) -> SourceError:
    with serving(reply) as server, pytest.raises(SourceError) as caught:
        ExporterSource(server.url).read()
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_exposition() -> None:
    with serving(answer(EXPOSITION)) as server:
        assert len(ExporterSource(server.url).read().devices) == 2


def test_chunked() -> None:
    chunks = b"%x\r\n" % len(EXPOSITION) + EXPOSITION + b"\r\n0\r\n\r\n"
    with serving(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) as server:
        assert len(ExporterSource(server.url).read().devices) == 2


def test_without_a_path_it_is_metrics() -> None:
    with serving(answer(EXPOSITION)) as server:
        ExporterSource(server.url.removesuffix("/metrics")).read()
    assert server.requests[0].startswith(b"GET /metrics HTTP/1.1\r\n")


def test_a_login_is_sent_and_not_shown() -> None:
    with serving(answer(EXPOSITION)) as server:
        source = ExporterSource(server.url.replace("//", "//me:s%40cret@"))
        source.read()
    assert b"Authorization: Basic " + base64.b64encode(b"me:s@cret") in server.requests[0]
    assert source.name == server.url


def test_nothing_is_sent_on_to_another_host() -> None:
    with serving(answer(EXPOSITION)) as other:
        moved = b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % other.url.encode()
        with serving(moved) as server, pytest.raises(SourceError, match="name that URL") as caught:
            ExporterSource(server.url.replace("//", "//me:secret@")).read()
    assert other.url in str(caught.value)
    assert other.requests == []


@pytest.mark.parametrize(
    ("reply", "reason", "said"),
    [
        (answer(HTML), "not_prometheus", "is a web page, not metrics: name the path of the metrics"),
        (answer(b"", b"HTTP/1.1 401 Unauthorized\r\n"), "unauthorized", "write the login into the URL"),
        (answer(b"", b"HTTP/1.1 404 Not Found\r\n"), "http_404", "answers 404 Not Found: is the path right?"),
        (answer(b"", b"HTTP/1.1 500 Oops\r\n"), "http_500", "answers 500 Oops"),
        (answer(b"", b"HTTP/1.1 503 Oops\r\n"), "http_503", "it is not ready, or its figures are too old"),
        (answer(EXPOSITION[:-5]), "malformed", "the text ends in the middle of this line"),
        (HEAD + b"Content-Length: 99999\r\n\r\n" + EXPOSITION, "truncated", "the response ended too early"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n" + EXPOSITION[:99], "truncated", "ended too early"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "unreachable", "its response is not HTTP"),
        (answer(b"\xff\xfe\n"), "malformed", "byte 0 is not UTF-8"),
        (answer(b"what is this\n"), "malformed", "cannot be read: line 1: the value is not a number: 'is'"),
        (answer(b"up 1\n"), "no_gpu", "has no GPU in its metrics: is it a GPU exporter?"),
        (answer(b'podgpu_exporter_source_up{source="nvml"} 0\n'), "no_gpu", "the exporter cannot read: nvml"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "unreachable", "its response is not HTTP: is the port right?"),
        (b"", "unreachable", "it closed the connection without a response"),
    ],
)
def test_bad_answers(reply: bytes, reason: str, said: str) -> None:
    error = refused(reply)
    assert error.reason == reason
    assert said in str(error)


def test_too_large() -> None:
    with serving(answer(EXPOSITION)) as server, pytest.raises(SourceError, match="more than 1000 bytes"):
        ExporterSource(server.url, largest=1000).read()


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"


def test_nobody_listens() -> None:
    with pytest.raises(SourceError, match="nothing listens there"):
        ExporterSource(nobody()).read()


def test_a_silent_server_is_left_behind_at_the_deadline() -> None:
    with serving(b"") as server:
        server.silent = True
        source = ExporterSource(server.url)
        source.deadline = 0.05
        feed = Feed(source, 1.0)
        first, second = feed.read(), feed.read()
        assert first.error is not None
        assert "no answer within" in str(first.error)
        assert second.error is not None
        assert "has not returned" in str(second.error)
        feed.close()


@pytest.mark.parametrize(
    "url",
    ["node", "ftp://node/x", "file:///etc/passwd", "http://", "http://n:99999", "http://n/a b", "http://[::"],
)
def test_no_url(url: str) -> None:
    with pytest.raises(UsageError, match="write HOST:PORT, http://HOST:PORT"):
        ExporterSource(url)


# While it is looked at


def test_the_last_table_outlives_its_source() -> None:
    with serving(answer(EXPOSITION)) as server:
        feed = Feed(ExporterSource(server.url), 1.0, clock=lambda: 7.0)
        good = feed.read()
        server.reply = answer(HTML)
        bad = feed.read()
        assert (bad.lines, bad.read_at) == (good.lines, 7.0)
        assert bad.error is not None
        server.reply = answer(EXPOSITION)
        assert feed.read().error is None
        feed.close()


# The command


def test_an_exposition_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answer(EXPOSITION)) as server:
        assert run(["top", "--url", server.url, "--once", "--interval", "100ms"]) == 0
        assert sum(request.startswith(b"GET /metrics ") for request in server.requests) == 2
    output = capsys.readouterr()
    assert output.err == ""
    assert "\x1b" not in output.out
    assert output.out.splitlines()[0].split() == HEADER
    assert "batch/two-slices/worker" in output.out


@pytest.mark.parametrize(
    "reply", [answer(HTML), answer(EXPOSITION[:-5]), answer(b"", b"HTTP/1.1 401 Unauthorized\r\n")]
)
def test_a_bad_exposition_is_one_line_and_exit_code_1(reply: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(reply) as server:
        assert run(["top", "--url", server.url]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("podgpu: ")
    assert server.url in output.err
    assert output.err.count("\n") == 1


def test_nobody_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    url = nobody()
    assert run(["top", "--once", "--url", url]) == 1
    said = f"podgpu: {url} cannot be reached (nothing listens there): check that the exporter runs there\n"
    assert capsys.readouterr().err == said
