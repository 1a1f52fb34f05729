"""TLS over loopback with real certificates: who is let in, and what changes without a restart."""

from __future__ import annotations

import http.client
import logging
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from podgpu.errors import UsageError
from podgpu.web.connections import ConnectionLimits
from podgpu.web.exporter_app import application
from podgpu.web.protection import Protection, subject_names
from podgpu.web.sockets import Address
from tests.nodes.clock import PATIENCE
from tests.nodes.node import Node
from tests.web.certificates import Certificates, make_certificates
from tests.web.process import EXPORTER
from tests.web.server import LOOPBACK, Client, running

REFUSED = (ssl.SSLError, ConnectionError)
PAIR = {"cert_file": "tls.crt", "key_file": "tls.key"}
MUTUAL = PAIR | {"client_ca_file": "ca.crt", "client_auth_type": "RequireAndVerifyClientCert"}


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def write(tmp_path: Path, certificates: Certificates) -> Callable[..., Path]:
    """A web config, and beside it the files it names."""
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
    """Makes clients of a running server."""
    node.take_turns()
    protection = Protection(str(path))
    app = partial(application, protection=protection)
    with running(node.agent, LOOPBACK, app, protection.make_tls, limits) as plain:
        yield lambda context: Client(plain.address, context)


def is_let_in(client: Client) -> bool:
    try:
        return client.ask("/livez").status == 200
    except REFUSED:
        return False


def shown_names(client: Client) -> frozenset[str]:
    """Of the certificate the server shows."""
    connection = client.connect()
    try:
        connection.connect()
        return subject_names(connection.sock.getpeercert())
    finally:
        connection.close()


# --- who does not finish


@pytest.mark.fault(
    "clients connect to the TLS port and never finish the handshake",
    "Each is closed after 10 s, and the oldest as soon as all places are taken; scrapes go on",
)
@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01"], ids=["silent", "half a hello"])
def test_handshakes_that_never_end(
    node: Node, write: Callable[..., Path], certificates: Certificates, first: bytes
) -> None:
    soon = ConnectionLimits(max_connections=20, header_seconds=0.5)
    with secured(node, write(PAIR), soon) as client, ExitStack() as held:
        scraper = client(certificates.client())
        address = (scraper.address.host, scraper.address.port)
        visitors = [held.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(100)]
        for visitor in visitors:
            with suppress(OSError):
                visitor.sendall(first)
        # In a handshake in which the machine stands still for half a second, it is let go as they are.
        assert sum(is_let_in(scraper) for _ in range(6)) >= 3
        for visitor in visitors:
            with suppress(ConnectionResetError):
                assert visitor.recv(1) == b""


# --- who is let in


def test_a_handshake(node: Node, write: Callable[..., Path], certificates: Certificates) -> None:
    with secured(node, write(PAIR)) as client:
        assert client(certificates.client()).address.scheme == "https"
        assert client(certificates.client()).ask("/metrics").status == 200
        assert not is_let_in(client(ssl.create_default_context())), "a client that does not know the authority"
        with pytest.raises((*REFUSED, http.client.HTTPException)):
            Client(client(certificates.client()).address).ask("/metrics")


def test_certificate_and_key_in_the_config_itself(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    texts = {"cert": certificates.text("server.crt"), "key": certificates.text("server.key")}
    authority = {"client_ca": certificates.text("ca.crt"), "client_auth_type": "RequireAndVerifyClientCert"}
    with secured(node, write(texts | authority)) as client:
        assert is_let_in(client(certificates.client("scraper")))
        assert not is_let_in(client(certificates.client()))


@pytest.mark.parametrize(
    ("policy", "nobody", "scraper", "outsider"),
    [
        ("NoClientCert", True, True, True),
        ("VerifyClientCertIfGiven", True, True, False),
        ("RequireAndVerifyClientCert", False, True, False),
    ],
)
def test_client_policies(
    node: Node,
    write: Callable[..., Path],
    certificates: Certificates,
    policy: str,
    nobody: bool,
    scraper: bool,
    outsider: bool,
) -> None:
    authority = {} if policy == "NoClientCert" else {"client_ca_file": "ca.crt"}
    with secured(node, write(PAIR | authority | {"client_auth_type": policy})) as client:
        let_in = [is_let_in(client(certificates.client(shows))) for shows in ("", "scraper", "outsider")]
    assert let_in == [nobody, scraper, outsider]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("name", "let_in"),
    [
        ("prometheus.test", True),
        ("ops@test", True),
        ("10.0.0.7", True),
        ("::1", True),
        ("spiffe://test/prometheus", True),
        ("*.test", False),
        ("PROMETHEUS.TEST", False),
        ("scraper", False),
    ],
)
def test_allowed_names(
    node: Node,
    write: Callable[..., Path],
    certificates: Certificates,
    name: str,
    let_in: bool,
    version: ssl.TLSVersion,
) -> None:
    """Exactly as written; the common name (`scraper`) is none of them."""
    context = certificates.client("scraper")
    context.maximum_version = version
    with secured(node, write(MUTUAL | {"client_allowed_sans": ["other.test", name]})) as client:
        assert is_let_in(client(context)) is let_in


def test_names_that_are_asked_for_have_to_be_shown(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    tls = MUTUAL | {"client_auth_type": "VerifyClientCertIfGiven", "client_allowed_sans": ["prometheus.test"]}
    with secured(node, write(tls)) as client:
        assert is_let_in(client(certificates.client("scraper")))
        assert not is_let_in(client(certificates.client()))


def test_without_an_authority_it_is_the_systems(
    node: Node, write: Callable[..., Path], certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with secured(node, write(PAIR | {"client_auth_type": "RequireAndVerifyClientCert"})) as client:
        assert not is_let_in(client(certificates.client("scraper")))
    assert "all CAs of this system" in caplog.text


def negotiated(client: Client) -> tuple[str, str]:
    connection = client.connect()
    try:
        connection.connect()
        return connection.sock.version(), connection.sock.cipher()[0]
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("tls", "version"),
    [({}, "TLSv1.3"), ({"max_version": "TLS12"}, "TLSv1.2"), ({"min_version": "TLS13"}, "TLSv1.3")],
    ids=str,
)
def test_versions(
    node: Node, write: Callable[..., Path], certificates: Certificates, tls: dict[str, Any], version: str
) -> None:
    older = certificates.client()
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with secured(node, write(PAIR | tls)) as client:
        assert negotiated(client(certificates.client()))[0] == version
        assert is_let_in(client(older)) is ("min_version" not in tls)


@pytest.mark.fault(
    "the web config names a policy that takes certificates nobody verified, or TLS 1.0 or 1.1",
    "podgpu ends at start with exit code 2, and one line names the file, the key, and what to write instead",
)
@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ({"client_auth_type": "RequestClientCert"}, "'RequestClientCert' is not supported; write NoClientCert, Verify"),
        ({"client_auth_type": "RequireClientCert"}, "RequireAndVerifyClientCert"),
        ({"min_version": "TLS10"}, "min_version: 'TLS10' is not supported; write TLS12, TLS13"),
    ],
    ids=str,
)
def test_what_is_not_safe_ends_the_start(write: Callable[..., Path], tls: dict[str, Any], says: str) -> None:
    file = write(PAIR | tls)
    command = [sys.executable, "-m", "podgpu", *EXPORTER, f"--web-config-file={file}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.strip().splitlines()[-1:]
    assert f"{file}: tls_server_config." in line
    assert says in line
    assert "Traceback" not in ended.stderr


def test_ciphers_and_one_curve(node: Node, write: Callable[..., Path], certificates: Certificates) -> None:
    only = {"cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"], "max_version": "TLS12"}
    with secured(node, write(PAIR | only | {"curve_preferences": ["CurveP384"]})) as client:
        assert negotiated(client(certificates.client())) == ("TLSv1.2", "ECDHE-ECDSA-AES256-GCM-SHA384")
        another = certificates.client()
        another.set_ecdh_curve("prime256v1")
        assert not is_let_in(client(another))


def test_of_several_curves_it_is_said_that_openssl_chooses(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    Protection(str(write(PAIR | {"curve_preferences": ["X25519", "CurveP256"]})))
    assert "Python can set one curve" in caplog.text


# --- what changes while it runs


def test_a_renewed_certificate_is_shown_to_the_next_connection(
    node: Node, write: Callable[..., Path], certificates: Certificates, tmp_path: Path
) -> None:
    with secured(node, write(PAIR)) as client:
        open_one = client(certificates.client()).connect()
        open_one.request("GET", "/livez")
        open_one.getresponse().read()
        assert shown_names(client(certificates.client())) == {"127.0.0.1"}
        certificates.put("renewed", tmp_path)
        assert shown_names(client(certificates.client())) == {"127.0.0.1", "renewed.test"}
        open_one.request("GET", "/livez")
        assert open_one.getresponse().status == 200
        open_one.close()


def test_client_policy_and_version_change_too(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    with secured(node, write(PAIR)) as client:
        assert is_let_in(client(certificates.client()))
        write(MUTUAL | {"max_version": "TLS12"})
        assert not is_let_in(client(certificates.client()))
        assert negotiated(client(certificates.client("scraper")))[0] == "TLSv1.2"
        write(PAIR)
        assert is_let_in(client(certificates.client()))


@pytest.mark.parametrize("trouble", ["config", "no TLS", "no key", "another key", "no PEM"])
def test_trouble_fails_handshakes_until_it_is_mended(
    node: Node,
    write: Callable[..., Path],
    certificates: Certificates,
    tmp_path: Path,
    trouble: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with secured(node, write(PAIR)) as client:
        assert is_let_in(client(certificates.client()))
        make_trouble(trouble, write, certificates, tmp_path)
        assert [is_let_in(client(certificates.client())) for _ in range(3)] == [False] * 3
        certificates.put("renewed", tmp_path)
        write(PAIR)
        assert "renewed.test" in shown_names(client(certificates.client()))
        assert is_let_in(client(certificates.client()))
    assert [r.levelname for r in caplog.records if r.name.startswith("podgpu.web")] == ["ERROR", "INFO"]


def make_trouble(what: str, write: Callable[..., Path], certificates: Certificates, folder: Path) -> None:
    if what == "config":
        write(PAIR | {"cert_flie": "x"})
    elif what == "no TLS":
        write()
    elif what == "no key":
        (folder / "tls.key").unlink()
    elif what == "another key":
        (folder / "tls.key").write_text(certificates.text("renewed.key"))
    else:
        (folder / "tls.crt").write_text("half a fi")


def test_an_open_connection_gets_500_while_the_file_is_bad(
    node: Node, write: Callable[..., Path], certificates: Certificates
) -> None:
    with secured(node, write(PAIR)) as client:
        connection = client(certificates.client()).connect()
        statuses = []
        for tls in (PAIR, {"nothing": 1}, PAIR):
            write(tls)
            connection.request("GET", "/livez")
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        connection.close()
        assert statuses == [200, 500, 200]


# --- what does not start


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        (PAIR | {"cert_file": "nowhere.crt"}, "nowhere.crt is not there"),
        (PAIR | {"key_file": "."}, "is a directory"),
        (PAIR | {"key_file": "other.key"}, "do not belong together"),
        (PAIR | {"cert_file": "tls.key"}, "not a certificate and key in PEM"),
        (PAIR | {"key_file": "locked.key"}, "without a password"),
        (MUTUAL | {"client_ca_file": "nowhere.crt"}, "nowhere.crt is not there"),
        (MUTUAL | {"client_ca_file": "tls.key"}, "no certificates in PEM"),
        (MUTUAL | {"client_ca_file": "web.yml"}, "no certificates in PEM"),
        ({"cert": "x", "key": "y"}, "tls_server_config.cert and "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_start(
    write: Callable[..., Path], certificates: Certificates, tmp_path: Path, tls: dict[str, Any], words: str
) -> None:
    (tmp_path / "other.key").write_text(certificates.text("renewed.key"))
    lock = ["openssl", "ec", "-aes256", "-passout", "pass:hunter2", "-in", "tls.key", "-out", "locked.key"]
    subprocess.run(lock, cwd=tmp_path, capture_output=True, check=True)
    with pytest.raises(UsageError) as caught:
        Protection(str(write(tls)))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# --- the whole command


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-m", "podgpu", "exporter", "--telemetry", "simulated:1xT4", "-c", "100"]
    process = subprocess.Popen([*program, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)


def told_addresses(process: subprocess.Popen[str], count: int) -> dict[str, Address]:
    """By the path it names."""
    assert process.stderr is not None
    found: dict[str, Address] = {}
    for line in process.stderr:
        if match := re.search(r" on (https?)://([\d.]+):(\d+)(/\w+)$", line.strip()):
            found[match[4]] = Address(match[2], int(match[3]), match[1])
        if len(found) == count:
            return found
    raise AssertionError(f"podgpu ended, having told {found}")


def test_probes_stay_plain_while_the_rest_wants_certificates(
    write: Callable[..., Path], certificates: Certificates
) -> None:
    anywhere = "127.0.0.1:0"
    theirs = ["--gpu-manager-metrics", "--gpu-manager-address", anywhere]
    with command("-a", anywhere, "--probe-address", anywhere, *theirs, "--web-config-file", str(write(MUTUAL))) as run:
        told = told_addresses(run, 3)
        assert {path: address.scheme for path, address in told.items()} == {
            "/metrics": "https",
            "/metric": "https",
            "/livez": "http",
        }
        probes = Client(told["/livez"])
        assert [probes.ask(path).status for path in ("/livez", "/health")] == [200, 200]
        assert probes.ask("/ready").status in (200, 503)
        assert [probes.ask(path).status for path in ("/metrics", "/", "/metric")] == [404] * 3
        assert probes.ask("/-/release", "POST").status == 404
        for path in ("/metrics", "/metric"):
            assert Client(told[path], certificates.client("scraper")).ask(path).status == 200
            assert not is_let_in(Client(told[path], certificates.client()))
