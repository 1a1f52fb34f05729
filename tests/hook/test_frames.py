"""Decoding of NRI's frames."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from podgpu.hook.nri import PLUGIN_SERVICE, RUNTIME_SERVICE, BadFrame, Demuxer, Message, encode

MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from([PLUGIN_SERVICE, RUNTIME_SERVICE]),
        st.integers(0, 2**32 - 1),
        st.sampled_from([1, 2]),
        st.binary(max_size=200) | st.just(b"x" * 10_000),
    ),
    max_size=5,
)


@given(MESSAGES, st.integers(1, 5000))
def test_round_trip_in_any_pieces(messages: list[Message], size: int) -> None:
    sent = b"".join(map(encode, messages))
    demuxer = Demuxer()
    taken = [message for at in range(0, len(sent), size) for message in demuxer.feed(sent[at : at + size])]
    assert taken == messages


@given(st.binary(max_size=300))
def test_garbage_is_rejected_or_incomplete(garbage: bytes) -> None:
    with suppress(BadFrame):
        list(Demuxer().feed(garbage))
