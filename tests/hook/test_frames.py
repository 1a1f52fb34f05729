"""Frames put together from any pieces, and refused before they are kept."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.hook.frames import MOST_MESSAGE, PLUGIN_SERVICE, RUNTIME_SERVICE, BadFrame, Message, Trunk, encode

MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from([PLUGIN_SERVICE, RUNTIME_SERVICE]),
        st.integers(0, 2**32 - 1),
        st.sampled_from([1, 2, 3]),
        st.binary(max_size=200) | st.just(b"x" * 10_000),
    ),
    max_size=5,
)


@given(MESSAGES, st.integers(1, 5000))
def test_round_trip_in_any_pieces(messages: list[Message], size: int) -> None:
    sent = b"".join(map(encode, messages))
    trunk = Trunk()
    taken = [message for at in range(0, len(sent), size) for message in trunk.feed(sent[at : at + size])]
    assert taken == messages
    assert trunk.is_between_messages


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_waited_for(garbage: bytes) -> None:
    with suppress(BadFrame):
        list(Trunk().feed(garbage))


def test_the_largest_message_is_taken_and_one_byte_more_is_not() -> None:
    largest = Message(PLUGIN_SERVICE, 1, 1, b"x" * MOST_MESSAGE)
    assert list(Trunk().feed(encode(largest))) == [largest]
    with pytest.raises(BadFrame, match=r"4,194,305 bytes, where 4,194,304 is the most"):
        list(Trunk().feed(struct.pack(">IIIIBB", PLUGIN_SERVICE, 10, MOST_MESSAGE + 1, 1, 1, 0)))


def test_no_piece_is_larger_than_gos_reader() -> None:
    sent = encode(Message(PLUGIN_SERVICE, 1, 2, b"x" * 20_000))
    sizes = []
    while sent:
        _, length = struct.unpack_from(">II", sent)
        sizes.append(length)
        sent = sent[8 + length :]
    assert max(sizes) == 4096
    assert sum(sizes) == 20_010
