"""`make attack`, shortened; that nothing is wrong when nobody attacks; and that each attack and each check is one."""

from __future__ import annotations

import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from secrets import randbelow
from typing import Any

import pytest

from bench.figures import Figure
from endurance.attack.__main__ import FAMILIES, OVER_TLS, attack
from endurance.attack.attackers import Aim, Attacker
from endurance.attack.checks import ClusterCheck, ExporterCheck
from endurance.attack.exporter_process import NO_ENERGY, WELL, driver
from endurance.attack.hostile import EXPOSITIONS
from endurance.attack.hostile_api import ACTS, Mischief, slice_of
from endurance.attack.victims import LOGIN, NODE, memory_limit
from podgpu.autoscale.x509 import issue
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import endpoint_slices_path, metrics_urls, parse_endpoint_slice
from podgpu.kube.reflector import Informer
from podgpu.metrics.parse import BadExposition, parse_text
from tests.kube.api_server import SimulatedApiServer
from tests.kube.conftest import HURRY, eventually
from tests.nodes.clock import again_if_held_up

PATIENT_MS = 8000.0
"""The machine that runs the tests may be busy: how long a scrape waits, `make attack` judges."""
NICE = 5
"""Those who give way to everybody would, beside other tests, not come to attack at all."""
UUIDS = [gpu.uuid for gpu in driver().machine.gpus]


@pytest.mark.fault(
    "strangers attack the ports in every way at once, exporters serve hostile metrics, GPUs hang, the kubelet is slow",
    "the well GPUs and the honest nodes are always there with their pods, memory and log stay small, nothing ends",
)
def test_all_attacks_at_once() -> None:
    again_if_held_up(lambda: all_right(*attack(6.0, PATIENT_MS, nice=NICE, scrape_seconds=10.0)))


def test_nothing_is_wrong_when_nobody_attacks() -> None:
    figures, _ = again_if_held_up(
        lambda: all_right(*attack(3.0, PATIENT_MS, only=["nothing"], well=True, scrape_seconds=10.0))
    )
    assert len(figures) == 8 * 5 + 4 * 3 + 1


def all_right(figures: list[Figure], wrong: list[str]) -> tuple[list[Figure], list[str]]:
    assert wrong == []
    assert [figure.name for figure in figures if figure.missed] == []
    return figures, wrong


# The attackers


class _Deaf(socketserver.BaseRequestHandler):
    """Reads what comes, and answers the first line of nothing good."""

    def handle(self) -> None:
        self.request.settimeout(0.2)
        try:
            while self.request.recv(1 << 16):
                self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        except OSError:
            pass


class _Handshaking(socketserver.ThreadingTCPServer):
    """Each hand is shaken in its connection's own thread."""

    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(2.0)
        with (
            suppress(OSError),
            self.tls.wrap_socket(request, server_side=True) if self.tls else nullcontext(request) as line,
        ):
            super().finish_request(line, client_address)


@contextmanager
def _serving(tls: ssl.SSLContext | None) -> Iterator[int]:
    with _Handshaking(("127.0.0.1", 0), _Deaf) as server:
        server.tls = tls
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def deaf() -> Iterator[int]:
    with _serving(None) as port:
        yield port


@pytest.fixture(scope="module")
def deaf_over_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """And the file with its authority."""
    folder = tmp_path_factory.mktemp("tls")
    issued = issue(["127.0.0.1"], time.time() - 60, time.time() + 3600, randbelow)
    for name, text in (("ca", issued.authority), ("crt", issued.certificate), ("key", issued.key)):
        (folder / name).write_text(text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    with _serving(context) as port:
        yield port, str(folder / "ca")


def test_every_attack_is_made_and_ends_in_time(deaf: int, deaf_over_tls: tuple[int, str]) -> None:
    aim = Aim(deaf, LOGIN.header)
    attackers = [Attacker(name, family, aim, 3.0, NICE) for name, (family, _) in FAMILIES.items()]
    port, authority = deaf_over_tls
    aim = Aim(port, LOGIN.header, authority)
    attackers += [Attacker(name, family, aim, 3.0, NICE) for name, family in OVER_TLS.items()]
    for one in attackers:
        one.prepare()
    for one in attackers:
        one.start()
    began = time.monotonic()
    for one in attackers:
        one.stop()
    assert {one.name for one in attackers if not one.made} == set()
    assert time.monotonic() < began + 3.0 + 30.0


def test_the_honest_exporter_is_known_whatever_the_api_server_does() -> None:
    with SimulatedApiServer() as server:
        server.put("endpointslices", slice_of("honest", 9400, "https-metrics"))
        mischief = Mischief(server, [1, 2, 3], pause=lambda _seconds: None)
        config = ApiConfig(server=server.url, origin="the test")
        with Informer(config, endpoint_slices_path("monitoring"), {}, parse_endpoint_slice, settings=HURRY) as watcher:
            assert watcher.wait_synced(30.0)
            for _ in range(ACTS):
                mischief.next()
                assert "https://127.0.0.1:9400/metrics" in metrics_urls(watcher.items()).urls
            eventually(lambda: len(metrics_urls(watcher.items()).urls) > 100)  # those at which nobody listens


@pytest.mark.parametrize("name", EXPOSITIONS)
def test_hostile_expositions_are_expositions(name: str) -> None:
    """A text that is refused at its first line would attack nothing. Some have what the format forbids on purpose."""
    exposition = EXPOSITIONS[name](1)
    assert len(exposition) < 16 * 1024 * 1024
    try:
        found = parse_text(exposition)
    except BadExposition:
        assert name == "indented_comment"
    else:
        assert found


# The checks


def good_exposition() -> str:
    lines = [f'DCGM_FI_DEV_GPU_UTIL{{UUID="{UUIDS[n]}",pod="on-{n}"}} {percent}\n' for n, percent in WELL.items()]
    energy = [f'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{UUID="{UUIDS[n]}"}} 77\n' for n in WELL if n != NO_ENERGY]
    return "".join(lines + energy)


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("", "", []),
        (f'"{UUIDS[0]}",pod', '"GPU-x",pod', ["a well GPU is not in the metrics"]),
        ("} 90", "} 89", ["a well GPU's figure is not right"]),
        ('pod="on-1"', 'pod="on-2"', ["a well GPU's pod is not in the metrics"]),
        ("} 77\n", "} 76\n", ["a counter falls"] * 3),
    ],
)
def test_what_the_exporter_must_show(old: str, new: str, wrong: list[str]) -> None:
    check = ExporterCheck()
    assert check(good_exposition()) == []
    assert check(good_exposition().replace(old, new) if old else good_exposition()) == wrong


def test_a_figure_where_the_driver_gave_none_is_wrong() -> None:
    exposition = f'{good_exposition()}DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{UUID="{UUIDS[NO_ENERGY]}"}} 0\n'
    assert ExporterCheck()(exposition) == ["what is no number is in the metrics"]
    assert ExporterCheck(well=True)(exposition) == []


@pytest.mark.parametrize(
    ("exposition", "wrong"),
    [
        (f'podgpu_node_gpus{{node="{NODE}",model="H100"}} 4\npodgpu_cluster_node_up{{node="{NODE}"}} 1\n', []),
        (
            f'podgpu_node_gpus{{node="{NODE}",model="H100"}} 4\npodgpu_cluster_node_up{{node="{NODE}"}} 0\n',
            ["the honest node is said to be down"],
        ),
        (f'podgpu_node_gpus{{node="{NODE}",model="FAKE"}} 1\n', ["the honest node is not shown as it is"]),
        ('podgpu_node_gpus{node="x",model="H100"} 1\n', ["the honest node is not in the metrics"]),
    ],
)
def test_what_the_cluster_view_must_show(exposition: str, wrong: list[str]) -> None:
    assert ClusterCheck()(exposition) == wrong


def test_limits_are_the_charts() -> None:
    assert memory_limit("exporter") > 100
    assert memory_limit("cluster") > 2 * memory_limit("exporter")
