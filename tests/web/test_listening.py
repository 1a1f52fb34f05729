"""Tests listen addresses and errors of listening."""

from __future__ import annotations

import re
import socket

import pytest

from podgpu.errors import StartError, UsageError
from podgpu.web.app import Address, Listener, parse_address, run
from podgpu.web.exporter_app import application
from tests.nodes.node import Node
from tests.web.server import RELEASE, running


def test_addresses() -> None:
    assert parse_address(":9400") == Address("", 9400)
    assert parse_address("127.0.0.1:9400") == Address("127.0.0.1", 9400)
    assert parse_address("[::1]:9400") == Address("::1", 9400)
    assert parse_address("gpu-node.example:80") == Address("gpu-node.example", 80)


@pytest.mark.parametrize(
    "text", ["", "9400", "localhost:", "::1:9400", "[::1]", "http://localhost:9400"]
)
def test_texts_that_are_not_addresses(text: str) -> None:
    with pytest.raises(UsageError, match="must be HOST:PORT, :PORT or"):
        parse_address(text)


def test_ports_that_do_not_exist() -> None:
    assert parse_address(":65535").port == 65535
    with pytest.raises(UsageError, match="':65536': the port must be a number from 0 to 65535"):
        parse_address(":65536")


def test_error_names_an_address_in_use(node: Node) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        problem = f"^cannot listen on 127.0.0.1:{port}: Address already in use; choose .* -a$"
        with pytest.raises(StartError, match=problem):
            run([node.agent], [Listener(application(node.agent), Address("127.0.0.1", port))])


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b", "2001:db8::1"])
def test_error_names_an_address_of_another_machine(node: Node, host: str) -> None:
    address = f"{host}:9400" if ":" not in host else f"[{host}]:9400"
    problem = rf"^cannot listen on {re.escape(address)}: (?!.*bind on).+; choose another address"
    with pytest.raises(StartError, match=problem):
        run([node.agent], [Listener(application(node.agent), Address(host, 9400))])


def test_ipv6(node: Node) -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback address to listen on")
    node.take_turns()
    with running(node.agent, parse_address("[::1]:0")) as client:
        assert client.address.port != 0
        assert client.ask("/metrics").status == 200
        assert client.ask("/-/release", "POST", **RELEASE).status == 200


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
