"""No login of a URL is printed, however the URL is written, nor is any file read where the loop would wait for it."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.prom.client import PrometheusClient
from podgpu.cluster.scraping.backend import FixedTargets
from podgpu.errors import SourceError, UsageError
from podgpu.fetch.access import Access, Credentials, without_secrets
from podgpu.fetch.endpoint import Answer, Endpoint
from podgpu.fetch.exposition import FileExposition, exposition_at
from podgpu.http.exchange import open_session
from podgpu.top.api import ClusterSource
from podgpu.top.exporter import ExporterSource
from tests.cli.test_option_table import execute
from tests.fetch.test_endpoint import echo, site

SECRET = "S3CR3T"
SCHEMES = [
    "",
    "http://",
    "https://",
    "HTTP://",
    "//",
    "http:",
    "http:/",
    "http:///",
    "https//",
    "ftp://",
    "u://",
    "http://a@",
]
ODD = st.text("ab1:/?#@%[]{}\\ .,;=&+\u00e9\uff20\t", max_size=6)
HOSTS = st.sampled_from(
    ["127.0.0.1:1", "host", "host:9400/metrics", "[::1]:1/x?y=z", "h:99999", "", "h/a?b#c", "é.test"]
)
AT = st.sampled_from(["@", "@", "\uff20", "@@"])
PLACES = st.builds(
    lambda scheme, user, before, after, at, host: f"{scheme}{user}:{before}{SECRET}{after}{at}{host}",
    st.sampled_from(SCHEMES),
    st.sampled_from(["u", "", "a.b", "u%20v", "é"]),
    ODD,
    ODD,
    AT,
    HOSTS,
)


def said_of(place: str) -> str:
    """Everything that anything which takes a place says of it."""
    said = [without_secrets(place)]
    for take in (
        exposition_at,
        Endpoint,
        PrometheusClient,
        ExporterSource,
        ClusterSource,
        lambda url: FixedTargets([url]),
    ):
        try:
            made = take(place)
        except UsageError as error:
            said.append(str(error))
            continue
        said += [str(getattr(made, name, "")) for name in ("shown", "name")]
        if isinstance(made, Endpoint):
            said.append(str(made.refused(Answer(302, b"", "", "", place))))
            said += [str(made.refused(Answer(status, b"", ""))) for status in (401, 404, 500, 503)]
    return "\n".join(said)


@given(PLACES)
def test_no_login_is_shown(place: str) -> None:
    assert SECRET not in said_of(place)


@given(PLACES)
def test_no_login_is_shown_of_what_cannot_be_reached(place: str) -> None:
    """Loopback, where nothing listens; other hosts are not asked."""
    try:
        source = exposition_at(place)
    except UsageError:
        return
    assert not isinstance(source, FileExposition)
    if "127.0.0.1:1" not in source.shown:
        return
    with pytest.raises(SourceError) as caught:
        source.fetch()
    assert SECRET not in str(caught.value)


@pytest.mark.fault(
    "A URL with a password in it is mistyped (no scheme, a wrong option, a character that had to be escaped)",
    "The command ends with exit code 2 and says what to write; the password is in no message",
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["enrich", "--once", "--out", "x.prom", "--in", f"u:{SECRET}@host"],
        ["enrich", "--once", "--out", "x.prom", "--in", f"//u:{SECRET}@host/metrics"],
        ["enrich", "--once", "--out", "x.prom", "--in", f"ftp://u:{SECRET}@host/metrics"],
        ["enrich", "--once", "--out", "x.prom", "--in", f"http://u:12/{SECRET}@host"],
        ["enrich", f"http://u:{SECRET}@host"],
        ["exporter", "--once", "--telemetry", f"http://u:{SECRET}@host"],
        ["exporter", "--once", "--telemetry", f"exporter:u:{SECRET}@host"],
        ["exporter", "--once", "--telemetry", f"nvml:http://u:{SECRET}@host"],
        ["exporter", "--once", "-c", f"http://u:{SECRET}@host"],
        ["cluster", "--scrape", f"u:{SECRET}@host"],
        ["cluster", "--prometheus", f"u:{SECRET}@host"],
        ["top", "--url", f"u:{SECRET}@host"],
        ["top", "--cluster", f"u:{SECRET}@host"],
        ["doctor", "--telemetry", f"exporter:u:{SECRET}@host"],
    ],
    ids=lambda arguments: " ".join(arguments[::2])[:40],
)
def test_a_mistyped_url_on_the_command_line(arguments: list[str]) -> None:
    ran = execute(arguments)
    assert ran.code == 2
    assert SECRET not in ran.out + ran.err


def test_a_path_with_such_characters_is_still_a_path(tmp_path: Path) -> None:
    file = tmp_path / "a:b@c.prom"
    file.write_text("a 1\n")
    source = exposition_at(str(file))
    assert isinstance(source, FileExposition)
    assert source.fetch() == b"a 1\n"
    assert isinstance(exposition_at("./a:b@c.prom"), FileExposition)
    assert isinstance(exposition_at("gpu@2.prom"), FileExposition)


def test_an_escaped_at_is_one_where_the_url_is_none() -> None:
    assert SECRET not in said_of(f"http://u:{SECRET}%40host")
    assert SECRET not in said_of(f"u:{SECRET}%40host")


def test_a_url_without_secrets_is_shown_as_it_is() -> None:
    assert Endpoint("http://h:9400/metrics?a=b").shown == "http://h:9400/metrics?…"
    assert without_secrets("ftp://h/x") == "'ftp://h/x'"


# The loop waits for nobody's disk


@pytest.mark.parametrize("kind", ["token", "password", "ca"])
def test_secrets_and_certificates_are_not_read_in_the_loop(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("x\n")
    readers = watch_openings(file)
    access = {
        "token": Access(token_file=str(file)),
        "password": Access(username="u", password_file=str(file)),
        "ca": Access(ca_file=str(file)),
    }[kind]

    async def go() -> int:
        async with site(echo) as url, open_session() as session:
            asked = url.replace("http:", "https:") if kind == "ca" else url
            with suppress(SourceError):  # no certificates in it
                await Endpoint(asked, access).ask(session)
            return threading.get_ident()

    loop = asyncio.run(go())
    assert readers
    assert loop not in readers


def watch_openings(file: Path) -> list[int]:
    """Which threads open the file from now on."""
    threads: list[int] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and arguments[0] == str(file):
            threads.append(threading.get_ident())

    sys.addaudithook(note)
    return threads


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b" \n", b"no certificate\n"])
def test_a_file_without_authorities_trusts_nobody(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(content)
    with pytest.raises(SourceError, match="has no certificates in it") as caught:
        Credentials(Access(ca_file=str(file))).tls()
    assert caught.value.reason == "tls"
