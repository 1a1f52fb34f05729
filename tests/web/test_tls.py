"""Tests TLS of the web config with real certificates."""

from __future__ import annotations

import logging
import re
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from podgpu.errors import UsageError
from podgpu.web.app import Address
from podgpu.web.connections import ConnectionLimits
from podgpu.web.exporter_app import application
from podgpu.web.protection import Protection, subject_names
from tests.certificates import Certificates
from tests.nodes.clock import PATIENCE, wait_until
from tests.nodes.node import Node
from tests.process import EXPORTER, is_listening, podgpu
from tests.web.server import LOOPBACK, Client, running

REFUSED = (ssl.SSLError, ConnectionError)
PAIR = {"cert_file": "tls.crt", "key_file": "tls.key"}
MUTUAL = PAIR | {"client_ca_file": "ca.crt", "client_auth_type": "RequireAndVerifyClientCert"}


@pytest.fixture
def write(tmp_path: Path, certificates: Certificates) -> Callable[..., Path]:
    """Returns a function that writes a web config. Its certificate files are in the same folder."""
    certificates.put("server", tmp_path)
    (tmp_path / "ca.crt").write_text(certificates.text("ca.crt"))

    def write(tls: dict[str, Any] | None = None, **sections: Any) -> Path:
        path = tmp_path / "web.yml"
        path.write_text(yaml.safe_dump(({"tls_server_config": tls} if tls else {}) | sections))
        return path

    return write


@contextmanager
def secured(
    node: Node, path: Path, limits: ConnectionLimits | None = None
) -> Iterator[Callable[[ssl.SSLContext], Client]]:
    """Runs a server with a web config. Yields a function that creates clients."""
    node.take_turns()
    protection = Protection(str(path))
    app = partial(application, protection=protection)
    with running(node.agent, LOOPBACK, app, protection.make_tls, limits) as plain:
        yield lambda context: Client(plain.address, context)


def is_allowed(client: Client) -> bool:
    try:
        return client.ask("/livez").status == 200
    except REFUSED:
        return False


@contextmanager
def connected(client: Client) -> Iterator[ssl.SSLSocket]:
    with closing(client.connect()) as connection:
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        yield connection.sock


def shown_names(client: Client) -> set[str]:
    """Returns the names in the server's certificate."""
    with connected(client) as sock:
        return subject_names(sock.getpeercert() or {})


@pytest.mark.fault(
    "Clients connect to the TLS port and never finish the handshake",
    "Each is closed after 10 s, and the oldest as soon as all places are taken; scrapes go on",
)
@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01"], ids=["silent", "half a hello"])
def test_unfinished_handshakes(
    node: Node, write: Callable[..., Path], certificates: Certificates, first: bytes
) -> None:
    soon = ConnectionLimits(max_connections=20, header_seconds=0.5)
    with secured(node, write(PAIR), soon) as client, ExitStack() as held:
        scraper = client(certificates.client())
        address = (scraper.address.host, scraper.address.port)
        visitors = [
            held.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(100)
        ]
        for visitor in visitors:
            with suppress(OSError):
                visitor.sendall(first)
        # Some handshakes of the scraper may exceed the limit of 0.5 s on a slow machine.
        assert sum(is_allowed(scraper) for _ in range(6)) >= 3
        for visitor in visitors:
            with suppress(ConnectionResetError):
                assert visitor.recv(1) == b""


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "OPTIONS"])
def test_plain_http_is_answered_as_by_go(
    node: Node, write: Callable[..., Path], certificates: Certificates, method: str
) -> None:
    with secured(node, write(PAIR)) as client_with:
        plain = replace(client_with(certificates.client()), tls=None)
        answer = plain.ask("/metrics", method, X_Long="x" * 8000)
        assert answer.status == 400
        expected = "Client sent an HTTP request to an HTTPS server.\n"
        assert answer.text == ("" if method == "HEAD" else expected)


def test_bytes_that_are_neither_http_nor_tls(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    with secured(node, write(PAIR)) as client_with:
        client = client_with(certificates.client())
        address = (client.address.host, client.address.port)
        with socket.create_connection(address, PATIENCE) as opened, suppress(ConnectionError):
            opened.sendall(b"QUIT\r\n")
            assert b"HTTP request" not in opened.recv(65536)
        assert is_allowed(client)


def test_a_server_stops_while_a_client_is_silent(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    with ExitStack() as stack:
        with secured(node, write(PAIR)) as client_with:
            client = client_with(certificates.client())
            address = (client.address.host, client.address.port)
            silent = stack.enter_context(socket.create_connection(address, PATIENCE))
            assert is_allowed(client)
        assert silent.recv(1) == b""


def test_handshake(node: Node, write: Callable[..., Path], certificates: Certificates) -> None:
    with secured(node, write(PAIR)) as client:
        assert client(certificates.client()).address.scheme == "https"
        assert client(certificates.client()).ask("/metrics").status == 200
        assert not is_allowed(client(ssl.create_default_context())), (
            "this client does not trust the authority"
        )


def test_a_client_that_prefers_http_2_gets_http_1_1(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    with secured(node, write(PAIR)) as client:
        context = certificates.client()
        context.set_alpn_protocols(["h2", "http/1.1"])
        with connected(client(context)) as connection:
            assert connection.selected_alpn_protocol() == "http/1.1"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("NoClientCert", [True, True, True]),
        ("VerifyClientCertIfGiven", [True, True, False]),
        ("RequireAndVerifyClientCert", [False, True, False]),
    ],
)
def test_client_policies(
    node: Node,
    write: Callable[..., Path],
    certificates: Certificates,
    policy: str,
    expected: list[bool],
) -> None:
    authority = {} if policy == "NoClientCert" else {"client_ca_file": "ca.crt"}
    with secured(node, write(PAIR | authority | {"client_auth_type": policy})) as client:
        allowed = [
            is_allowed(client(certificates.client(shows))) for shows in ("", "scraper", "outsider")
        ]
    assert allowed == expected


def test_allowed_names(node: Node, write: Callable[..., Path], certificates: Certificates) -> None:
    """An allowed name must equal one of the certificate's SANs. The common name (`scraper`) does
    not count.
    """
    context, names = certificates.client("scraper"), ("prometheus.test", "::1", "*.test", "scraper")
    with secured(node, write(MUTUAL | {"client_allowed_sans": ["other.test"]})) as client:
        allowed = []
        for name in names:
            write(MUTUAL | {"client_allowed_sans": ["other.test", name]})
            allowed.append(is_allowed(client(context)))
    assert allowed == [True, True, False, False]


def test_a_client_without_a_certificate_has_no_allowed_name(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    names = {"client_allowed_sans": ["prometheus.test"], "client_ca_file": "ca.crt"}
    optional = {"client_auth_type": "VerifyClientCertIfGiven"}
    with secured(node, write(PAIR | names | optional)) as client:
        asked = [client(certificates.client(shows)).ask("/livez") for shows in ("", "scraper")]
    assert [answer.status for answer in asked] == [403, 200]


def test_an_intermediate_authority_is_sufficient(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    authority = {"client_ca_file": certificates.path("intermediate.crt")}
    with secured(node, write(MUTUAL | authority)) as client:
        allowed = [
            is_allowed(client(certificates.client(shows))) for shows in ("department", "scraper")
        ]
    assert allowed == [True, False]


def test_certificate_and_key_in_the_file(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    pair = {"cert": certificates.text("server.crt"), "key": certificates.text("server.key")}
    with secured(node, write(pair)) as client:
        assert is_allowed(client(certificates.client()))


def negotiated(client: Client) -> tuple[str, str]:
    with connected(client) as sock:
        return str(sock.version()), str((sock.cipher() or ("",))[0])


def test_versions_and_ciphers(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    only = {"cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"], "max_version": "TLS12"}
    with secured(node, write(PAIR | only)) as client:
        assert negotiated(client(certificates.client())) == (
            "TLSv1.2",
            "ECDHE-ECDSA-AES256-GCM-SHA384",
        )
    with secured(node, write(PAIR | {"min_version": "TLS13"})) as client:
        assert negotiated(client(certificates.client()))[0] == "TLSv1.3"
        older = certificates.client()
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        assert not is_allowed(client(older))


def test_renewed_certificate(
    node: Node, write: Callable[..., Path], certificates: Certificates, tmp_path: Path
) -> None:
    with secured(node, write(PAIR)) as client:
        open_one = client(certificates.client()).connect()
        open_one.request("GET", "/livez")
        open_one.getresponse().read()
        assert shown_names(client(certificates.client())) == {"127.0.0.1", "api.test"}
        certificates.put("renewed", tmp_path)
        assert shown_names(client(certificates.client())) == {"127.0.0.1", "renewed.test"}
        open_one.request("GET", "/livez")
        assert open_one.getresponse().status == 200
        open_one.close()


@pytest.mark.parametrize("trouble", ["config", "no TLS", "another key"])
def test_the_previous_certificate_stays_until_a_problem_is_fixed(
    node: Node,
    write: Callable[..., Path],
    certificates: Certificates,
    tmp_path: Path,
    trouble: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with secured(node, write(PAIR)) as client:
        assert is_allowed(client(certificates.client()))
        make_trouble(trouble, write, certificates, tmp_path)
        assert "api.test" in shown_names(client(certificates.client()))
        certificates.put("renewed", tmp_path)
        write(PAIR)
        assert "renewed.test" in shown_names(client(certificates.client()))
        assert is_allowed(client(certificates.client()))
    levels = [record.levelname for record in caplog.records if record.name == "podgpu.tls"]
    assert levels == ["ERROR"]


def make_trouble(
    what: str, write: Callable[..., Path], certificates: Certificates, folder: Path
) -> None:
    if what == "config":
        write(PAIR | {"cert_flie": "x"})
    elif what == "no TLS":
        write()
    else:
        (folder / "tls.key").write_text(certificates.text("renewed.key"))


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        (PAIR | {"cert_file": "nowhere.crt"}, "nowhere.crt does not exist"),
        (PAIR | {"key_file": "other.key"}, "do not match"),
        (PAIR | {"cert_file": "tls.key"}, "must be a certificate and a key in PEM"),
        (PAIR | {"key_file": "locked.key"}, "without a password"),
        (MUTUAL | {"client_ca_file": "tls.key"}, "no valid PEM certificate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_at_the_start(
    write: Callable[..., Path],
    certificates: Certificates,
    tmp_path: Path,
    tls: dict[str, Any],
    words: str,
) -> None:
    (tmp_path / "other.key").write_text(certificates.text("renewed.key"))
    lock = [
        "openssl",
        "ec",
        "-aes256",
        "-passout",
        "pass:hunter2",
        "-in",
        "tls.key",
        "-out",
        "locked.key",
    ]
    subprocess.run(lock, cwd=tmp_path, capture_output=True, check=True)
    with pytest.raises(UsageError) as caught:
        Protection(str(write(tls)))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_probe_address_needs_no_certificate(
    write: Callable[..., Path], certificates: Certificates, folder: Path
) -> None:
    anywhere = "127.0.0.1:0"
    others = (
        "--probe-address",
        anywhere,
        "--gpu-manager-metrics",
        "--gpu-manager-address",
        anywhere,
    )
    with podgpu(
        (*EXPORTER, *others, "--web-config-file", str(write(MUTUAL))), folder, is_listening
    ) as process:
        pattern = re.compile(r" on (https?)://([\d.]+):(\d+)(/\w+)$", re.MULTILINE)
        wait_until(lambda: len(pattern.findall(process.log)) == 3, "it listens on three addresses")
        addresses = {
            path: Address(host, int(port), kind)
            for kind, host, port, path in pattern.findall(process.log)
        }
        assert {path: address.scheme for path, address in addresses.items()} == {
            "/metrics": "https",
            "/metric": "https",
            "/livez": "http",
        }
        probes = Client(addresses["/livez"])
        assert [probes.ask(path).status for path in ("/livez", "/health")] == [200, 200]
        assert [probes.ask(path).status for path in ("/metrics", "/", "/metric")] == [404] * 3
        assert probes.ask("/-/release", "POST").status == 404
        for path in ("/metrics", "/metric"):
            assert Client(addresses[path], certificates.client("scraper")).ask(path).status == 200
            assert not is_allowed(Client(addresses[path], certificates.client()))
