"""The gRPC client of the kubelet's socket: against real servers, ill ones byte by byte, and RFC 7541's examples."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.holders.hpack import BadHeaders, HeaderDecoder, decode_huffman, encode_headers
from podgpu.holders.unary import CallFailed, UnixChannel
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod
from tests.nodes.clock import PATIENCE

LIST = "/v1.PodResourcesLister/List"
MOST = 1 << 20
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
GOOD = (b"\x88", encode_headers([("grpc-status", "0")]))


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


def message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def answer(stream: int, content: bytes = b"hello") -> bytes:
    return (
        frame(HEADERS, 4, stream, GOOD[0])
        + frame(DATA, 0, stream, message(content))
        + frame(HEADERS, 5, stream, GOOD[1])
    )


@contextmanager
def server(folder: Path, *connections: Callable[[socket.socket], None]) -> Iterator[UnixChannel]:
    """Says what each is told to, connection after connection, once it has heard something."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):  # the test is over
                for speak in connections:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        speak(connection)

        speaker = threading.Thread(target=serve)
        speaker.start()
        channel = UnixChannel(str(folder / "s"), MOST)
        try:
            yield channel
        finally:
            channel.close()
            listener.shutdown(socket.SHUT_RDWR)
            speaker.join(PATIENCE)


def say(*parts: bytes) -> Callable[[socket.socket], None]:
    def speak(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)
        connection.settimeout(PATIENCE)
        with suppress(ConnectionError):
            while connection.recv(65536):
                pass  # until the other side ends it

    return speak


def failure(channel: UnixChannel) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        channel.call(LIST, 5.0)
    return caught.value


# What servers say


@pytest.mark.parametrize(
    "said",
    [
        (frame(SETTINGS, 0, 0), answer(1)),
        (frame(SETTINGS, 0, 0), frame(PING, 0, 0, b"12345678"), answer(1)),
        tuple(bytes([byte]) for byte in frame(SETTINGS, 0, 0) + answer(1)),
        (
            frame(HEADERS, 0, 1, b""),
            frame(CONTINUATION, 4, 1, GOOD[0]),
            frame(DATA, 8, 1, b"\x02" + message(b"hello") + b"\0\0"),
            frame(HEADERS, 5, 1, GOOD[1]),
        ),
        (
            frame(HEADERS, 4 | 0x20, 1, bytes(5) + GOOD[0]),
            *(frame(DATA, 0, 1, bytes([byte])) for byte in message(b"hello")),
            frame(77, 0, 0, b"of an extension"),
            frame(HEADERS, 5, 1, GOOD[1]),
        ),
        (frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0)), answer(1)),
    ],
    ids=["plain", "a ping between", "byte by byte", "padded and continued", "in pieces", "the last call"],
)
def test_every_form_of_an_answer(folder: Path, said: tuple[bytes, ...]) -> None:
    with server(folder, say(*said)) as channel:
        assert channel.call(LIST, 5.0) == b"hello"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE"),
        (frame(HEADERS, 5, 1, encode_headers([(":status", "404")])), "UNAVAILABLE"),
        (frame(HEADERS, 5, 1, b"\x88" + encode_headers([("grpc-status", "12")])), "UNIMPLEMENTED"),
        (frame(HEADERS, 5, 1, b"\x88" + encode_headers([("grpc-status", "99")])), "UNKNOWN"),
        (frame(HEADERS, 5, 1, b"\x88" + encode_headers([("grpc-status", "1" * 5000)])), "UNKNOWN"),
        (frame(HEADERS, 5, 1, b"\x88"), "UNKNOWN"),
        (frame(HEADERS, 4, 1, b"\x88") + frame(DATA, 1, 1, message(b"x")), "UNKNOWN"),
        (frame(RST_STREAM, 0, 1, struct.pack(">I", 7)), "UNAVAILABLE"),
        (frame(RST_STREAM, 0, 1, struct.pack(">I", 2)), "INTERNAL"),
        (frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"), "UNAVAILABLE"),
        (
            frame(HEADERS, 4, 1, GOOD[0]) + frame(DATA, 0, 1, b"\0" + (MOST + 1).to_bytes(4, "big")),
            "RESOURCE_EXHAUSTED",
        ),
        (
            frame(HEADERS, 4, 1, b"\x88") + frame(DATA, 0, 1, b"\x01\0\0\0\x01x") + frame(HEADERS, 5, 1, GOOD[1]),
            "INTERNAL",
        ),
        (frame(HEADERS, 4, 1, b"\x88") + frame(HEADERS, 5, 1, GOOD[1]), "INTERNAL"),
        (frame(DATA, 8, 1, b"\x09"), "UNAVAILABLE"),
        (frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, bytes(16384)) * 5, "UNAVAILABLE"),
        (frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0)), "UNAVAILABLE"),
    ],
)
@pytest.mark.fault(
    "What answers on the kubelet's socket speaks broken HTTP/2, or something else",
    "that reading fails with the reason, the last holders stand, and the next reading makes a new connection",
)
def test_an_ill_server(folder: Path, said: bytes, code: str) -> None:
    with server(folder, say(said), say(answer(1))) as channel:
        assert failure(channel).code == code


def test_data_without_end_is_not_kept(folder: Path) -> None:
    """A byte was announced; the server goes on for as long as somebody takes what it sends."""
    taken = 0

    def speak(connection: socket.socket) -> None:
        nonlocal taken
        connection.sendall(frame(HEADERS, 4, 1, GOOD[0]) + frame(DATA, 0, 1, message(b"x")))
        with suppress(OSError):
            while taken < 64 * MOST:
                taken += connection.send(frame(DATA, 0, 1, bytes(16384)))

    with server(folder, speak) as channel:
        assert failure(channel).code == "INTERNAL"
    assert taken < 8 * MOST


def test_a_connection_that_ended_between_two_calls_is_made_anew(folder: Path) -> None:
    with server(folder, lambda c: c.sendall(answer(1)), say(answer(1))) as channel:
        assert channel.call(LIST, 5.0) == b"hello"
        assert channel.call(LIST, 5.0) == b"hello"


def test_who_is_sent_away_after_an_answer_connects_anew(folder: Path) -> None:
    goodbye = frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0))
    with server(folder, say(goodbye + answer(1)), say(answer(1, b"new"))) as channel:
        assert [channel.call(LIST, 5.0), channel.call(LIST, 5.0)] == [b"hello", b"new"]


def test_a_late_answer_is_not_taken_for_the_next_ones(folder: Path) -> None:
    with server(folder, say(frame(SETTINGS, 0, 0)), say(answer(1, b"new"))) as channel:
        with pytest.raises(CallFailed, match="DEADLINE_EXCEEDED"):
            channel.call(LIST, 0.1)
        assert channel.call(LIST, 5.0) == b"new"


def test_headers_of_one_call_are_known_in_the_next(folder: Path) -> None:
    """A server may put them into the connection's table and from then on send their number."""
    remembered = b"\x40" + encode_headers([("grpc-status", "0")])[1:]
    first = frame(HEADERS, 4, 1, GOOD[0]) + frame(DATA, 0, 1, message(b"a")) + frame(HEADERS, 5, 1, remembered)
    second = frame(HEADERS, 4, 3, GOOD[0]) + frame(DATA, 0, 3, message(b"b")) + frame(HEADERS, 5, 3, b"\xbe")

    def speak(connection: socket.socket) -> None:
        connection.sendall(first)
        connection.recv(65536)
        say(second)(connection)

    with server(folder, speak) as channel:
        assert [channel.call(LIST, 5.0), channel.call(LIST, 5.0)] == [b"a", b"b"]


def test_a_thousand_calls_and_much_data_on_one_connection(folder: Path) -> None:
    with SimulatedKubelet(str(folder / "k"), [SimulatedPod("ns", "x" * 300_000, {"main": {}})]) as kubelet:
        channel = UnixChannel(kubelet.socket, MOST)
        sizes = {len(channel.call(LIST, PATIENCE)) for _ in range(1000)}
        channel.close()
    assert len(sizes) == 1
    assert sizes.pop() > 300_000


# Weight


def test_it_brings_no_thread_and_no_grpc(folder: Path) -> None:
    program = """
import os, sys
from podgpu.holders.kubelet import KubeletAllocation
source = KubeletAllocation(sys.argv[1])
source.assignments(())
print(len(os.listdir("/proc/self/task")), "grpc" in sys.modules)
source.close()
"""
    with SimulatedKubelet(str(folder / "k")) as kubelet:
        done = subprocess.run(
            [sys.executable, "-c", program, kubelet.socket], capture_output=True, text=True, timeout=60
        )
    assert (done.stdout, done.stderr) == ("1 False\n", "")


# Header blocks


@pytest.mark.parametrize(
    ("coded", "text"),
    [
        ("f1e3c2e5f23a6ba0ab90f4ff", b"www.example.com"),
        ("a8eb10649cbf", b"no-cache"),
        ("25a849e95ba97d7f", b"custom-key"),
        ("d07abe941054d444a8200595040b8166e082a62d1bff", b"Mon, 21 Oct 2013 20:13:21 GMT"),
        ("9d29ad171863c78f0b97c8e9ae82ae43d3", b"https://www.example.com"),
    ],
)
def test_huffmans_code_as_the_rfc_has_it(coded: str, text: bytes) -> None:
    assert decode_huffman(bytes.fromhex(coded)) == text


def test_the_rfcs_responses() -> None:
    """RFC 7541 C.6: three blocks on one connection, coded, with a table that is evicted from (there of 256 bytes)."""
    decoder = HeaderDecoder()
    decoder.decode(b"\x3f\xe1\x01")
    first = (
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3"
    )
    assert decoder.decode(bytes.fromhex(first)) == [
        (":status", "302"),
        ("cache-control", "private"),
        ("date", "Mon, 21 Oct 2013 20:13:21 GMT"),
        ("location", "https://www.example.com"),
    ]
    assert decoder.decode(bytes.fromhex("4883640effc1c0bf"))[0] == (":status", "307")


@pytest.mark.parametrize("block", [b"\x80", b"\xff\x80\x80\x80\x80\x80\x01", b"\x3f\xe2\x1f", b"\x00\x05ab", b"\xbe"])
def test_blocks_that_no_encoder_writes(block: bytes) -> None:
    with pytest.raises(BadHeaders):
        HeaderDecoder().decode(block)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(block: bytes) -> None:
    with suppress(BadHeaders):
        HeaderDecoder().decode(block)


@given(st.lists(st.tuples(st.text("abc-:", max_size=200), st.text("xyz 09", max_size=300)), max_size=5))
def test_what_is_encoded_decodes(headers: list[tuple[str, str]]) -> None:
    assert HeaderDecoder().decode(encode_headers(headers)) == headers
