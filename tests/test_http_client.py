"""The HTTP client and the sources of metrics text, against a real HTTP server that misbehaves."""

from __future__ import annotations

import gzip
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from podgpu import __version__
from podgpu.errors import SourceError, UsageError
from podgpu.fleet.read.prometheus import PrometheusClient, PrometheusServer
from podgpu.fleet.read.scrape import unique_targets
from podgpu.http_client import (
    Access,
    HttpClient,
    HttpResponse,
    open_session,
    redact_url,
)
from podgpu.node.gpu.remote_exporter import (
    ExpositionSource,
    FileExposition,
    UrlExposition,
    open_exposition_source,
    parse_exposition,
)
from podgpu.top.feed import ClusterSource, ExporterSource
from podgpu.view_address import UrlAddress
from tests import net
from tests.certificates import Certificates
from tests.cli.test_option_table import execute
from tests.net import QuietHandler
from tests.nodes.clock import PATIENCE

EXPOSITION = b'# TYPE DCGM_FI_DEV_GPU_TEMP gauge\nDCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} 33\n'
Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(body: bytes = EXPOSITION, status: int = 200, **headers: str) -> Answer:
    def send(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in (
            {"Content_Type": "text/plain", "Content_Length": str(len(body))} | headers
        ).items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return send


@contextmanager
def serving(send: Answer, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            send(self)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    with net.serving(server) as port:
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}/metrics"


@asynccontextmanager
async def site(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def error_of(source: ExpositionSource) -> SourceError:
    with pytest.raises(SourceError) as caught:
        parse_exposition(source.fetch(), source.shown)
    return caught.value


# Responses


@pytest.mark.parametrize(
    ("send", "reason"),
    [
        (answer(b"<html><body>Sign in</body></html>", Content_Type="text/html"), "not_prometheus"),
        (answer(b"", 401), "unauthorized"),
        (answer(b"", 503), "http_503"),
        (
            answer(b"", 302, Location="http://user:secret@elsewhere.test/login?token=secret"),
            "http_302",
        ),
        (answer(EXPOSITION, Content_Length="1000"), "truncated"),
        (answer(b"a 1\nb \xff\n"), "malformed"),
        (answer(EXPOSITION, Content_Encoding="gzip"), "truncated"),
    ],
)
def test_refused_responses(send: Answer, reason: str) -> None:
    with serving(send) as url:
        error = error_of(UrlExposition(url))
    assert error.reason == reason
    assert "secret" not in str(error)


def test_dead_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    error = error_of(UrlExposition(f"http://127.0.0.1:{port}/metrics"))
    assert error.reason == "unreachable"
    assert f"127.0.0.1:{port}" in str(error)


@pytest.mark.fault(
    "An exporter's response is a gzip bomb, or does not end",
    "It is refused as too_large as soon as it exceeds its limit",
)
@pytest.mark.parametrize("is_compressed", [True, False])
def test_response_size_is_limited(is_compressed: bool) -> None:
    sent = 0

    def endless(request: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        request.send_response(200)
        if is_compressed:
            request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        piece = b"# nothing\n" * 100_000
        piece = gzip.compress(piece) if is_compressed else piece
        while sent < 200 * 2**20:
            request.wfile.write(piece)
            sent += len(piece)

    with serving(endless) as url:
        assert error_of(UrlExposition(url, timeout=30.0)).reason == "too_large"
    assert sent < 100 * 2**20


def test_deadline_covers_the_whole_response() -> None:
    refused = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        until = time.monotonic() + PATIENCE
        while not refused.wait(0.05) and time.monotonic() < until:
            request.wfile.write(b"#\n")

    with serving(drip) as url:
        error = error_of(UrlExposition(url, timeout=0.3))
        refused.set()
    assert error.reason == "timeout"
    assert "within 0.3 s" in str(error)


# Requests


async def test_the_query_of_a_get_and_the_form_of_a_post() -> None:
    async def echo(request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        return web.json_response(
            {"path": request.path_qs, "form": dict(await request.post()), "headers": headers}
        )

    async with site(echo) as url, open_session() as session:
        client = HttpClient(f"{url}/prefix?key=secret", Access(headers=(("X-Scope-OrgID", "a"),)))
        assert "secret" not in client.shown
        form, accept = {"query": 'up{a="b c"}'}, "application/json"
        path = "/api/v1/query"
        responses = [
            await client.send(session, "GET", path, query=form, accept=accept),
            await client.send(session, "POST", path, form=form, accept=accept),
        ]
    got, posted = [json.loads(response.body) for response in responses]
    assert responses[0].content_type == "application/json"
    assert got["path"] == "/prefix/api/v1/query?key=secret&query=up%7Ba%3D%22b+c%22%7D"
    assert posted["path"] == "/prefix/api/v1/query?key=secret"
    assert posted["form"] == {"query": 'up{a="b c"}'}
    expected = {"x-scope-orgid": "a", "accept": "application/json", "accept-encoding": "gzip"}
    assert expected.items() <= got["headers"].items()
    assert got["headers"]["user-agent"].startswith("podgpu/")


# Credentials and TLS


def test_credentials_are_sent_and_read_again(tmp_path: Path) -> None:
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
    assert seen == [
        "Bearer first",
        "Bearer second",
        "Basic b3BzOnNlY29uZA==",
        "Basic bWU6cEBzcw==",
        None,
    ]
    assert "ss@" not in in_url.shown
    assert "p%40ss" not in in_url.shown


@pytest.mark.parametrize("content", ["", "two\nlines"])
def test_secret_that_cannot_be_sent(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content)
    error = error_of(
        UrlExposition("http://127.0.0.1:1", Access(token_file=str(tmp_path / "token")))
    )
    assert error.reason == "unauthorized"
    assert not content or content not in str(error)


def test_tls(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    ca_file = certificates.path("ca.crt")
    with serving(answer(), certificates.server_context()) as url:
        assert error_of(UrlExposition(url)).reason == "tls"
        assert (
            error_of(UrlExposition(url, Access(ca_file=certificates.path("stranger.crt")))).reason
            == "tls"
        )
        assert (
            error_of(UrlExposition(url, Access(ca_file=certificates.path("ca.key")))).reason
            == "tls"
        )
        assert "contains no certificates" in str(
            error_of(UrlExposition(url, Access(ca_file=str(tmp_path / "empty"))))
        )
        assert error_of(UrlExposition(url, Access(ca_file="/nowhere"))).reason == "file_missing"
        assert UrlExposition(url, Access(ca_file=ca_file)).fetch() == EXPOSITION
        assert UrlExposition(url, Access(insecure=True)).fetch() == EXPOSITION
        assert (
            UrlExposition(url.removeprefix("https://"), Access(ca_file=ca_file)).fetch()
            == EXPOSITION
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"username": "a"}, "--my-username and --my-password-file must be set together"),
        ({"password_file": "a"}, "--my-username and --my-password-file must be set together"),
        (
            {"username": "a", "password_file": "b", "token_file": "c"},
            "--my-token-file and --my-username: only one of them can be set",
        ),
        (
            {"ca_file": "a", "insecure_skip_verify": True},
            "--my-ca-file: has no effect with --my-insecure-skip-verify: remove one",
        ),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    named = {f"my_{name}": value for name, value in options.items()}
    with pytest.raises(UsageError) as raised:
        Access.from_options(named, "my")
    assert str(raised.value) == message


def test_access_of_options() -> None:
    advice = "see --my-username, --my-password-file, --my-token-file, --my-ca-file"
    assert Access.from_options({}, "my") == Access(advice=advice)
    options = {"my_ca_file": "a", "my_token_file": "b", "other_username": "c"}
    expected = Access(ca_file="a", token_file="b", headers=(("X-Id", "d"),), advice=advice)
    assert Access.from_options(options, "my", **{"X-Id": "d"}) == expected
    more: dict[str, Any] = {
        "my_username": "a",
        "my_password_file": "b",
        "my_insecure_skip_verify": True,
    }
    expected = Access(insecure=True, username="a", password_file="b", advice=advice)
    assert Access.from_options(more, "my") == expected

    with pytest.raises(UsageError) as raised:
        Access.from_options({}, "my", **{"X-Id": "a\r\nHost: b", "X-Good": "good"})
    assert str(raised.value).startswith("the headers {'X-Id': 'a\\r\\nHost: b'")
    assert str(raised.value).endswith("must not contain line breaks")


def test_https_address_of_a_server_without_tls() -> None:
    with serving(answer()) as url:
        error = error_of(UrlExposition(url.replace("http://", "https://")))
    assert error.reason == "tls"
    assert str(error).endswith("is not TLS: if the server has no certificate, write http://")


def test_renewed_authorities(certificates: Certificates, tmp_path: Path) -> None:
    authorities = tmp_path / "ca.crt"
    authorities.write_bytes(Path(certificates.path("stranger.crt")).read_bytes())
    access = Access(ca_file=str(authorities))
    with serving(answer(), certificates.server_context()) as url:
        assert error_of(UrlExposition(url, access)).reason == "tls"
        authorities.write_bytes(Path(certificates.path("ca.crt")).read_bytes())
        assert UrlExposition(url, access).fetch() == EXPOSITION


def test_a_secret_that_is_no_text(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"\xffx")
    headers = Access(token_file=str(secret), headers=(("X-Id", "d"),)).make_headers()
    assert headers == {"X-Id": "d", "Authorization": "Bearer \ufffdx"}
    secret.write_bytes(b" \n")
    with pytest.raises(SourceError) as raised:
        Access(username="a", password_file=str(secret)).make_headers()
    text = "has no usable secret: write one line of text into it"
    assert (raised.value.reason, str(raised.value)) == ("unauthorized", f"{secret} {text}")
    secret.write_bytes(b"x" * 64 * 1024)
    assert len(Access(token_file=str(secret)).make_headers()["Authorization"]) == 64 * 1024 + 7


# Messages


async def fail(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> tuple[str, str]:
    """Returns the reason and the message of a request, without the URL."""
    async with site(handle) as url, open_session() as session:
        client = HttpClient(f"{url}/metrics?key=secret", max_bytes=100)
        with pytest.raises(SourceError) as raised:
            await client.get(session)
    return raised.value.reason, str(raised.value).replace(f"{url}/metrics?…", "URL")


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (301, "http_301", "answers 301: is the path right? Redirects are not followed"),
        (404, "http_404", "answers 404: is the path right? Redirects are not followed"),
        (429, "http_429", "answers 429: too many requests"),
        (499, "http_499", "answers 499: is the path right? Redirects are not followed"),
        (500, "http_500", "answers 500"),
        (
            401,
            "unauthorized",
            f"rejected the credentials (401): {Access().advice}",
        ),
        (403, "unauthorized", f"rejected the credentials (403): {Access().advice}"),
    ],
)
async def test_messages_about_a_status(status: int, reason: str, message: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status)

    assert await fail(refuse) == (reason, f"URL {message}")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": "no path\\n/x"}', "answers 404: no path\\n/x"),
        (b'{"error": 1}', "answers 404: is the path right? Redirects are not followed"),
        (b"\xff", "answers 404: is the path right? Redirects are not followed"),
    ],
)
async def test_the_message_of_podgpus_api_is_quoted(body: bytes, message: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=404, body=body)

    assert await fail(refuse) == ("http_404", f"URL {message}")


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_the_message_about_a_large_response(is_chunked: bool) -> None:
    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if is_chunked:
            response.enable_chunked_encoding()
        else:
            response.content_length = 101
        await response.prepare(request)
        await response.write(b"x" * 101)
        return response

    text = "URL answers with more than 100 bytes: is it the right URL?"
    assert await fail(send) == ("too_large", text)


async def test_a_response_of_the_largest_size_has_its_type() -> None:
    async def send(request: web.Request) -> web.Response:
        assert request.headers["Accept"] == "text/x"
        assert request.headers["User-Agent"] == f"podgpu/{__version__}"
        assert request.headers["Accept-Encoding"] == "gzip"
        return web.Response(body=b"x" * 100, headers={"Content-Type": "Text/HTML; charset=x"})

    async with site(send) as url, open_session() as session:
        client = HttpClient(url, max_bytes=100)
        response = await client.send(session, accept="text/x")
        assert response == HttpResponse(200, b"x" * 100, "text/html")


async def test_a_closed_connection_is_tried_again_once() -> None:
    asked = 0
    closes = 1

    async def close(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        assert request.transport is not None
        if asked <= closes:
            request.transport.abort()
        return web.Response(body=b"good")

    async with site(close) as url, open_session() as session:
        client = HttpClient(url)
        assert (await client.send(session, "POST", form={"a": "b"})).body == b"good"
        assert asked == 2
        closes = 100
        with pytest.raises(SourceError) as raised:
            await client.send(session, "POST")
        assert raised.value.reason == "unreachable"
        assert asked == 4


def test_messages_about_a_server_that_does_not_answer() -> None:
    def explain(client: HttpClient) -> tuple[str, str]:
        with pytest.raises(SourceError) as raised:
            client.get_blocking()
        return raised.value.reason, str(raised.value).removeprefix(client.shown)

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    text = ": nothing listens there: check that the server runs there"
    assert explain(HttpClient(f"127.0.0.1:{port}")) == ("unreachable", text)

    with serving(answer(EXPOSITION, Content_Length="1000")) as url:
        text = ": the response is incomplete or damaged"
        assert explain(HttpClient(url)) == ("truncated", text)

    def no_http(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"SSH-2.0 secret\r\n\r\n")

    with serving(no_http) as url:
        text = ": its response is not HTTP: is the port right?"
        assert explain(HttpClient(url)) == ("not_http", text)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("gpu-1:9400", "'gpu-1:9400'"),
        ("https://me:secret@gpu-1/metrics?key=secret#x", "'https://gpu-1/metrics'"),
        ("me:secret%40gpu-1", "'gpu-1'"),
        ("a@b://c", "'c'"),
        ("http://" + "a" * 300, "'http://" + "a" * 192),
    ],
)
def test_urls_in_messages(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_both_logins() -> None:
    with pytest.raises(UsageError) as raised:
        HttpClient("http://me:secret@gpu-1:9400/", Access(token_file="x"))
    text = "both the URL and the options have a login: remove it from the URL"
    assert str(raised.value) == f"http://gpu-1:9400: {text}"
    assert HttpClient("gpu-1:9400", default_path="/metrics").shown == "http://gpu-1:9400/metrics"
    assert HttpClient("gpu-1:9400/x", default_path="/metrics").shown == "http://gpu-1:9400/x"
    with_query = HttpClient("gpu-1:9400/?a=secret", default_path="/metrics")
    assert (with_query.shown, with_query.host) == ("http://gpu-1:9400/metrics?…", "gpu-1:9400")
    assert HttpClient("gpu-1:9400", Access(insecure=True)).shown == "https://gpu-1:9400"
    with pytest.raises(UsageError) as raised:
        HttpClient("http://gpu-1:9400/a b")
    assert str(raised.value) == (
        "'http://gpu-1:9400/a b': not the URL of an HTTP server; "
        "write HOST:PORT or http(s)://HOST:PORT, "
        "and escape @, /, ? and # in a password (@ is %40)"
    )


# URLs and paths


def test_host_and_port_are_a_url() -> None:
    with serving(answer()) as url:
        place = url.removeprefix("http://").removesuffix("/metrics")
        port = place.partition(":")[2]
        for written in (place, f"{place}/metrics", f":{port}", f"LOCALHOST:{port}"):
            source = open_exposition_source(written)
            assert source.fetch() == EXPOSITION
            assert source.shown.startswith("http://")
            assert source.shown.endswith("/metrics")


@pytest.mark.parametrize("place", ["gpu.prom", "./gpu-1:9400", "./a:b@c.prom"])
def test_anything_else_is_a_file(place: str) -> None:
    assert isinstance(open_exposition_source(place), FileExposition)


@pytest.mark.parametrize(
    "place", ["", "ftp://host/x", "http://", "host:0", "http://[::1", "http://user:[]@"]
)
def test_neither_url_nor_file(place: str) -> None:
    with pytest.raises(UsageError):
        open_exposition_source(place)


SECRET = "S3CR3T"
ODD = st.text("ab1:/?#@%[]{}\\ .,;=&+\u00e9\t", max_size=6)
PLACES = st.builds(
    lambda scheme, user, before, after, host: f"{scheme}{user}:{before}{SECRET}{after}@{host}",
    st.sampled_from(
        [
            "",
            "http://",
            "HTTP://",
            "//",
            "http:",
            "http:///",
            "https//",
            "ftp://",
            "u://",
            "http://a@",
        ]
    ),
    st.sampled_from(["u", "", "a.b", "u%20v", "é"]),
    ODD,
    ODD,
    st.sampled_from(
        [
            "127.0.0.1:1",
            "host",
            "host:9400/metrics",
            "[::1]:1/x?y=z",
            "h:99999",
            "",
            "h/a?b#c",
            "é.test",
        ]
    ),
)
MAKERS = (
    open_exposition_source,
    HttpClient,
    lambda url: PrometheusClient(PrometheusServer(url)),
    ExporterSource,
    lambda url: ClusterSource(UrlAddress(url)),
    lambda url: len(unique_targets([url])),
)


@given(PLACES)
def test_login_of_a_url_is_never_shown(place: str) -> None:
    assert SECRET not in redact_url(place)
    for make in MAKERS:
        made: object
        try:
            made = make(place)
        except UsageError as error:
            made = error
        assert SECRET not in str(getattr(made, "shown", "")) + str(getattr(made, "name", "")) + str(
            made
        )
        if isinstance(made, HttpClient):
            assert SECRET not in str(made.status_error(HttpResponse(302, b"", "")))
            if "127.0.0.1:1/" in made.shown + "/":  # nothing listens there
                with pytest.raises(SourceError) as caught:
                    made.get_blocking()
                assert SECRET not in str(caught.value)


@pytest.mark.fault(
    (
        "A URL with a password in it is mistyped (no scheme, a wrong option, a character that had "
        "to "
        "be escaped)"
    ),
    (
        "The command ends with exit code 2 and a message that says what to write; no message "
        "contains "
        "the password"
    ),
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["enrich", "--once", "--out", "x.prom", "--in", f"u:{SECRET}@host"],
        ["exporter", "--once", "--telemetry", f"exporter:u:{SECRET}@host"],
        ["cluster", "--scrape", f"u:{SECRET}@host"],
        ["cluster", "--prometheus", f"u:{SECRET}@host"],
        ["top", "--url", f"u:{SECRET}@host"],
    ],
    ids=lambda arguments: " ".join(arguments[::2])[:40],
)
def test_mistyped_url_on_the_command_line(arguments: list[str]) -> None:
    result = execute(arguments)
    assert result.code == 2
    assert SECRET not in result.out + result.err


# Files


@pytest.mark.parametrize("content", [b"", EXPOSITION[:-1]])
def test_incomplete_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "dcgm.prom"
    path.write_bytes(content)
    assert error_of(FileExposition(str(path))).reason == "being_written"


def test_file_that_is_no_longer_written(tmp_path: Path) -> None:
    path = tmp_path / "dcgm.prom"
    path.write_bytes(EXPOSITION)
    os.utime(path, (0, time.time() - 400))
    assert error_of(FileExposition(str(path))).reason == "stale"
    os.utime(path, (0, time.time() - 200))
    assert FileExposition(str(path)).fetch() == EXPOSITION
