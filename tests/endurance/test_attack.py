"""`make attack`, shortened; that nothing is wrong when nobody attacks; and that each attack and each check is one."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from endurance.attack.__main__ import FAMILIES, attack
from endurance.attack.attackers import Aim, Attacker
from endurance.attack.checks import ClusterCheck, ExporterCheck
from endurance.attack.exporter_process import NO_ENERGY, WELL, driver
from endurance.attack.hostile import PAGES
from endurance.attack.victims import LOGIN, NODE, memory_limit
from podgpu.exposition.parse import BadExposition, parse_text

PATIENT_MS = 3000.0
"""The machine that runs the tests may be busy: how long a scrape waits, `make attack` judges."""
UUIDS = [gpu.uuid for gpu in driver().machine.gpus]


@pytest.mark.fault(
    "strangers attack the ports in every way at once, exporters serve hostile pages, GPUs hang, the kubelet is slow",
    "the well GPUs and the honest nodes are on every page with their pods, memory and log stay small, nothing ends",
)
def test_all_attacks_at_once() -> None:
    figures, wrong = attack(10.0, PATIENT_MS)
    assert wrong == []
    assert [figure.name for figure in figures if figure.missed] == []


def test_nothing_is_wrong_when_nobody_attacks() -> None:
    figures, wrong = attack(5.0, PATIENT_MS, only=["nothing"], well=True)
    assert wrong == []
    assert [figure.name for figure in figures if figure.missed] == []
    assert len(figures) == 4 * 5 + 2 * 3 + 1


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


@pytest.fixture(scope="module")
def deaf() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Deaf) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_every_attack_is_made_and_ends_in_time(deaf: int) -> None:
    aim = Aim(deaf, time.monotonic() + 3.0, LOGIN.header)
    attackers = [Attacker(name, family, aim) for name, (family, _) in FAMILIES.items()]
    for one in attackers:
        one.start()
    for one in attackers:
        one.stop()
    assert {one.name for one in attackers if not one.made} == set()
    assert time.monotonic() < aim.until + 30.0


@pytest.mark.parametrize("name", PAGES)
def test_hostile_pages_are_pages(name: str) -> None:
    """A page that is refused at its first line would attack nothing. Some have what the format forbids on purpose."""
    page = PAGES[name](1)
    assert len(page) < 16 * 1024 * 1024
    try:
        found = parse_text(page)
    except BadExposition:
        assert name == "indented_comment"
    else:
        assert found


# The checks


def good_page() -> str:
    lines = [f'DCGM_FI_DEV_GPU_UTIL{{UUID="{UUIDS[n]}",pod="on-{n}"}} {percent}\n' for n, percent in WELL.items()]
    energy = [f'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{UUID="{UUIDS[n]}"}} 77\n' for n in WELL if n != NO_ENERGY]
    return "".join(lines + energy)


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("", "", []),
        (f'"{UUIDS[0]}",pod', '"GPU-x",pod', ["a well GPU is not on the page"]),
        ("} 90", "} 89", ["a well GPU's figure is not right"]),
        ('pod="on-1"', 'pod="on-2"', ["a well GPU's pod is not on the page"]),
        ("} 77\n", "} 76\n", ["a counter falls"] * 3),
    ],
)
def test_what_the_exporter_must_show(old: str, new: str, wrong: list[str]) -> None:
    check = ExporterCheck()
    assert check(good_page(), 30.0) == []
    assert check(good_page().replace(old, new) if old else good_page(), 31.0) == wrong


def test_a_figure_where_the_driver_gave_none_is_wrong() -> None:
    page = f'{good_page()}DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{UUID="{UUIDS[NO_ENERGY]}"}} 0\n'
    assert ExporterCheck()(page, 30.0) == ["what is no number is on the page"]
    assert ExporterCheck(well=True)(page, 30.0) == []


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        (f'podgpu_node_gpus{{node="{NODE}",model="H100"}} 4\npodgpu_cluster_node_up{{node="{NODE}"}} 1\n', []),
        (
            f'podgpu_node_gpus{{node="{NODE}",model="H100"}} 4\npodgpu_cluster_node_up{{node="{NODE}"}} 0\n',
            ["the honest node is said to be down"],
        ),
        (f'podgpu_node_gpus{{node="{NODE}",model="FAKE"}} 1\n', ["the honest node is not shown as it is"]),
        ('podgpu_node_gpus{node="x",model="H100"} 1\n', ["the honest node is not on the page"]),
    ],
)
def test_what_the_cluster_view_must_show(page: str, wrong: list[str]) -> None:
    assert ClusterCheck()(page, 30.0) == wrong


def test_limits_are_the_charts() -> None:
    assert memory_limit("exporter") > 100
    assert memory_limit("cluster") > 2 * memory_limit("exporter")
