"""An exposition by URL and by file: a real HTTP server that misbehaves in every way named in issue 5."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest

from podgpu.errors import SourceError, UsageError
from podgpu.fetch.access import Access
from podgpu.fetch.exposition import FileExposition, UrlExposition, exposition_at
from podgpu.gpu.exposition import parse_exposition
from podgpu.http.exchange import open_session
from tests.kube.conftest import Certificates, certificates
from tests.nodes.clock import PATIENCE

__all__ = ["certificates"]
EXPOSITION = b'# TYPE DCGM_FI_DEV_GPU_TEMP gauge\nDCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} 33\n'
Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(body: bytes = EXPOSITION, status: int = 200, **headers: str) -> Answer:
    def send(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in ({"Content_Type": "text/plain", "Content_Length": str(len(body))} | headers).items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return send


@contextmanager
def serving(send: Answer, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the client had enough
                send(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


def refusal(source: UrlExposition | FileExposition) -> SourceError:
    with pytest.raises(SourceError) as caught:
        parse_exposition(source.fetch(), source.shown)
    return caught.value


# By URL


def test_an_exposition() -> None:
    with serving(answer()) as url:
        assert UrlExposition(url).fetch() == EXPOSITION
        assert UrlExposition(url.removesuffix("/metrics")).fetch() == EXPOSITION


def test_a_dead_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    error = refusal(UrlExposition(f"http://127.0.0.1:{port}/metrics"))
    assert error.reason == "unreachable"
    assert f"127.0.0.1:{port}" in str(error)


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (answer(b"<html><body>Sign in</body></html>", Content_Type="text/html"), "not_prometheus"),
        (answer(b"  <!doctype html>\n<p>Sign in\n"), "not_prometheus"),
        (answer(b"", 401), "unauthorized"),
        (answer(b"", 403), "unauthorized"),
        (answer(b"", 404), "http_404"),
        (answer(b"", 503), "http_503"),
        (answer(b"", 302, Location="http://user:secret@elsewhere.test/login?token=secret"), "http_302"),
        (answer(EXPOSITION[:-5]), "malformed"),
        (answer(EXPOSITION, Content_Length="1000"), "truncated"),
        (answer(EXPOSITION + EXPOSITION.splitlines(keepends=True)[1].replace(b"33", b"34")), "duplicate_series"),
        (answer(b"# TYPE a rubbish\na 1\n"), "malformed"),
        (answer(b"a 1\nb \xff\n"), "malformed"),
        (answer(gzip.compress(EXPOSITION)[:-9], Content_Encoding="gzip"), "malformed"),
        (answer(EXPOSITION, Content_Encoding="gzip"), "malformed"),
        (answer(EXPOSITION, Content_Encoding="br"), "not_prometheus"),
    ],
)
def test_what_is_refused(send: Answer, reason: str) -> None:
    with serving(send) as url:
        error = refusal(UrlExposition(url))
    assert error.reason == reason
    assert "secret" not in str(error)


def test_a_refusal_names_line_and_reason() -> None:
    with serving(answer(b"a 1\nb one\n")) as url:
        assert "line 2: the value is not a number" in str(refusal(UrlExposition(url)))


def test_a_compressed_answer() -> None:
    with serving(answer(gzip.compress(EXPOSITION), Content_Encoding="gzip")) as url:
        assert UrlExposition(url).fetch() == EXPOSITION


def test_a_compressed_answer_in_several_pieces_is_read_whole() -> None:
    half = EXPOSITION.index(b"\n") + 1
    packed = gzip.compress(EXPOSITION[:half]) + gzip.compress(EXPOSITION[half:])
    with serving(answer(packed, Content_Encoding="gzip")) as url:
        assert UrlExposition(url).fetch() == EXPOSITION


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (gzip.compress(EXPOSITION) + b"more", "malformed"),
        (gzip.compress(b"") * 10_000, "malformed"),
        (gzip.compress(b"#" * 600_000) * 2, "too_large"),
    ],
    ids=["more behind it", "ten thousand empty ones", "two large ones"],
)
def test_pieces_that_are_no_whole_answer(packed: bytes, reason: str) -> None:
    with serving(answer(packed, Content_Encoding="gzip")) as url:
        assert refusal(UrlExposition(url, largest=1_000_000)).reason == reason


@pytest.mark.parametrize("said", ["\xff\xfe", "\x1b[2J", "x" * 5000])
def test_what_a_server_writes_behind_its_status_is_one_short_line(said: str) -> None:
    def send(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 500 Oh " + said.encode("latin-1") + b"\r\nContent-Length: 0\r\n\r\n")

    with serving(send) as url:
        error = refusal(UrlExposition(url))
    assert error.reason == "http_500"
    assert str(error).isprintable()
    assert len(str(error)) < 250


def test_a_small_answer_that_unpacks_to_a_large_one() -> None:
    with serving(answer(gzip.compress(b"#" * 5_000_000), Content_Encoding="gzip")) as url:
        assert refusal(UrlExposition(url, largest=1_000_000)).reason == "too_large"


@pytest.mark.parametrize("says_so", [True, False])
def test_200_megabytes_are_not_read(says_so: bool) -> None:
    sent = 0

    def endless(request: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        request.send_response(200)
        if says_so:
            request.send_header("Content-Length", str(200 * 2**20))
        request.end_headers()
        piece = b"# nothing\n" * 100_000
        while sent < 200 * 2**20:
            request.wfile.write(piece)
            sent += len(piece)

    with serving(endless) as url:
        assert refusal(UrlExposition(url, deadline=30.0)).reason == "too_large"
    assert sent < (16 if says_so else 100) * 2**20


def test_a_server_that_drips() -> None:
    refused, ended = threading.Event(), threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        until = time.monotonic() + PATIENCE
        while not refused.wait(0.05) and time.monotonic() < until:
            request.wfile.write(b"#\n")
        ended.set()

    with serving(drip) as url:
        assert refusal(UrlExposition(url, deadline=0.3)).reason == "timeout"
        assert not ended.is_set(), "it did not wait until nothing came any more"
        refused.set()


# Being let in


def test_credentials_are_sent_and_read_anew(tmp_path: Path) -> None:
    seen: list[str | None] = []

    def note(request: BaseHTTPRequestHandler) -> None:
        seen.append(request.headers["Authorization"])
        answer()(request)

    secret = tmp_path / "secret"
    secret.write_text("first\n")
    with serving(note) as url:
        token = UrlExposition(url, Access(token_file=str(secret)))
        token.fetch()
        secret.write_text("second")
        token.fetch()
        UrlExposition(url, Access(username="ops", password_file=str(secret))).fetch()
        in_url = UrlExposition(url.replace("://", "://me:p%40ss@"))
        in_url.fetch()
        UrlExposition(url).fetch()
    assert seen == ["Bearer first", "Bearer second", "Basic b3BzOnNlY29uZA==", "Basic bWU6cEBzcw==", None]
    assert "p@ss" not in in_url.shown
    assert "p%40ss" not in in_url.shown


@pytest.mark.parametrize("content", ["", "two\nlines", "nul\x00"])
def test_a_secret_that_cannot_be_sent(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content)
    error = refusal(UrlExposition("http://127.0.0.1:1", Access(token_file=str(tmp_path / "token"))))
    assert error.reason == "unauthorized"
    assert not content or content not in str(error)


def test_host_and_port_are_enough() -> None:
    with serving(answer()) as url:
        place = url.removeprefix("http://").removesuffix("/metrics")
        for written in (
            place,
            f"{place}/metrics",
            f":{place.partition(':')[2]}",
            place.replace("127.0.0.1", "LOCALHOST"),
        ):
            source = exposition_at(written)
            assert source.fetch() == EXPOSITION
            assert source.shown.startswith("http://")
            assert source.shown.endswith("/metrics")


@pytest.mark.parametrize("place", ["gpu.prom", "/run/gpu.prom", "./gpu-1:9400", "dir/gpu-1:9400", "a:1:9400", "gpu-1"])
def test_what_is_no_host_and_port_is_a_file(place: str) -> None:
    assert isinstance(exposition_at(place), FileExposition)


def test_host_and_port_with_an_authority_means_https(certificates: Certificates) -> None:
    with serving(answer(), certificates.server_context()) as url:
        place = url.removeprefix("https://")
        assert UrlExposition(place, Access(ca_file=certificates.path("ca.crt"))).fetch() == EXPOSITION
        assert UrlExposition(place, Access(insecure=True)).shown == url


def test_tls(certificates: Certificates) -> None:
    with serving(answer(), certificates.server_context()) as url:
        assert refusal(UrlExposition(url)).reason == "tls"
        assert refusal(UrlExposition(url, Access(ca_file=certificates.path("stranger.crt")))).reason == "tls"
        assert UrlExposition(url, Access(ca_file=certificates.path("ca.crt"))).fetch() == EXPOSITION
        assert UrlExposition(url, Access(insecure=True)).fetch() == EXPOSITION
        assert refusal(UrlExposition(url, Access(ca_file=certificates.path("ca.key")))).reason == "tls"
        assert refusal(UrlExposition(url, Access(ca_file="/nowhere"))).reason == "file_missing"


@pytest.mark.parametrize("place", ["", "ftp://host/x", "http://", "http://host:99999/", "http://:9400/", "host:0"])
def test_no_exposition(place: str) -> None:
    with pytest.raises(UsageError):
        exposition_at(place)


@pytest.mark.parametrize(
    "access",
    [
        Access(username="a"),
        Access(password_file="a"),
        Access(username="a", password_file="b", token_file="c"),
        Access(ca_file="a", insecure=True),
    ],
)
def test_options_that_do_not_go_together(access: Access) -> None:
    with pytest.raises(UsageError):
        UrlExposition("http://localhost", access)


def test_a_query_is_not_shown() -> None:
    assert UrlExposition("http://h/metrics?key=secret#x").shown == "http://h/metrics?…"


# By file


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "dcgm.prom"
    path.write_bytes(EXPOSITION)
    assert exposition_at(str(path)).fetch() == EXPOSITION
    path.write_bytes(EXPOSITION + b"\n")
    assert exposition_at(str(path)).fetch() == EXPOSITION + b"\n"


@pytest.mark.parametrize("content", [b"", EXPOSITION[:-1], EXPOSITION[:-20]])
def test_a_file_being_written(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "dcgm.prom"
    path.write_bytes(content)
    assert refusal(FileExposition(str(path))).reason == "being_written"


def test_a_file_nobody_writes_any_more(tmp_path: Path) -> None:
    path = tmp_path / "dcgm.prom"
    path.write_bytes(EXPOSITION)
    os.utime(path, (0, time.time() - 400))
    error = refusal(FileExposition(str(path)))
    assert error.reason == "stale"
    assert FileExposition(str(path), max_age=500).fetch() == EXPOSITION


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert refusal(FileExposition(str(tmp_path / "nothing"))).reason == "file_missing"
    assert refusal(FileExposition(str(tmp_path))).reason == "not_a_file"
    (tmp_path / "large").write_bytes(EXPOSITION)
    assert refusal(FileExposition(str(tmp_path / "large"), largest=10)).reason == "too_large"


# --- what is left behind


@pytest.mark.fault(
    "hundreds of exporters are away",
    "what failed leaves nothing that only a search for garbage finds, in which nothing else would run",
)
def test_connections_that_fail_leave_no_garbage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    expositions = [UrlExposition(url) for _ in range(50)]

    async def ask_all() -> int:
        async with open_session() as session:
            await asyncio.gather(*(refused(exposition, session) for exposition in expositions))
            gc.collect()
            gc.disable()
            try:
                await asyncio.gather(*(refused(exposition, session) for exposition in expositions))
                return gc.collect()
            finally:
                gc.enable()

    async def refused(exposition: UrlExposition, session: aiohttp.ClientSession) -> None:
        with pytest.raises(SourceError, match="cannot be reached"):
            await exposition.fetch_with(session)

    assert asyncio.run(ask_all()) < 10 * len(expositions)
