"""The gRPC client against real gRPC servers, and against servers that break the protocol."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from podgpu.holders.kubelet import GrpcError, UnixGrpcClient
from podgpu.simulate.kubelet import SimulatedPod
from tests.nodes.clock import PATIENCE, wait_until
from tests.simulated_kubelet import FaultyKubelet, list_answer

LIST = "/v1.PodResourcesLister/List"
PODS = [SimulatedPod("ml", f"train-{n}", {"main": {"nvidia.com/gpu": [f"GPU-{n:032x}"]}}) for n in range(250)]


@pytest.fixture
def client(folder: Path) -> Iterator[UnixGrpcClient]:
    opened = UnixGrpcClient(str(folder / "kubelet.sock"))
    yield opened
    opened.close()


def failure(client: UnixGrpcClient, timeout: float = PATIENCE) -> GrpcError:
    with pytest.raises(GrpcError) as caught:
        client.call(LIST, timeout)
    return caught.value


def test_many_calls(kubelet: FaultyKubelet, client: UnixGrpcClient) -> None:
    kubelet.pods = tuple(PODS)
    files = len(os.listdir("/proc/self/fd"))
    assert {client.call(LIST, PATIENCE) for _ in range(100)} == {list_answer(PODS)}
    assert len(os.listdir("/proc/self/fd")) <= files + 4


def test_restarts(kubelet: FaultyKubelet, client: UnixGrpcClient) -> None:
    for _ in range(3):
        client.call(LIST, PATIENCE)
        kubelet.restart()
    client.call(LIST, PATIENCE)
    kubelet.stop(leave_socket=True)
    assert failure(client).status == "UNAVAILABLE"
    assert failure(client).message == "Connection refused"
    kubelet.start()
    client.call(LIST, PATIENCE)


def test_close_from_another_thread_ends_a_call(kubelet: FaultyKubelet, client: UnixGrpcClient) -> None:
    kubelet.hang()
    statuses: list[str] = []
    calling = threading.Thread(target=lambda: statuses.append(failure(client).status))
    calling.start()
    wait_until(lambda: bool(kubelet.calls), "the call arrives")
    client.close()
    calling.join(PATIENCE)
    assert statuses == ["CANCELLED"]
    kubelet.resume()
    client.call(LIST, PATIENCE)
    client.close()
    client.close()


@pytest.mark.fault(
    "the server on the kubelet's socket speaks broken HTTP/2, or another protocol",
    "the reading fails, the last holders are kept, and the next reading opens a new connection",
)
def test_garbage(folder: Path, client: UnixGrpcClient) -> None:
    """Random bytes, and a valid answer with one byte changed or cut off anywhere."""
    chance = random.Random(7)
    valid = bytes.fromhex("00000004000000000000000101040000000188000006000000000001000000000178")
    answers = [chance.randbytes(chance.randint(0, 500)) for _ in range(100)] + [b"HTTP/1.1 400 Bad Request\r\n\r\n"]
    answers += [valid[:at] + bytes([chance.randrange(256)]) + valid[at + 1 :] for at in range(len(valid))]
    answers += [valid[:at] for at in range(len(valid))]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "kubelet.sock"))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):
                for answer in answers:
                    accepted, _ = listener.accept()
                    with accepted, suppress(ConnectionError):
                        accepted.recv(65536)
                        accepted.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        files = len(os.listdir("/proc/self/fd"))
        statuses = {failure(client).status for _ in answers}
        assert statuses <= {"UNAVAILABLE", "UNKNOWN", "INTERNAL"}
        assert len(os.listdir("/proc/self/fd")) <= files + 1
        server.join(PATIENCE)
