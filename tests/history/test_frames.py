"""Whose the places of the columns in a file are, as names come between them."""

from __future__ import annotations

from podgpu.history.columns import Sample, pack
from podgpu.history.frames import Name, column_frame, head, load_segment, names_frame
from podgpu.history.rows import Key


def named(*uuids: tuple[int, str]) -> bytes:
    return names_frame([Name(place, Key(uuid)) for place, uuid in uuids])


def column(at: float, places: int) -> bytes:
    return column_frame("fine", at, pack([(place, Sample(0.5)) for place in range(places)], places))


def owners(*frames: bytes) -> list[list[str]]:
    """Of each place of each column; empty: nobody's."""
    segment = load_segment(b"".join((head(), *frames)))
    return [
        [found.names[place].key.uuid if place in found.names else "" for place in range(len(found.samples) // 8)]
        for found in segment.columns
    ]


def test_a_fleet_that_grows_has_one_set_of_names() -> None:
    """A copy for each column would be hundreds of MiB for thousands of GPUs."""
    frames = [part for n in range(50) for part in (named((n, f"GPU-{n}")), column(15.0 * n, n + 1))]
    segment = load_segment(head() + b"".join(frames))
    assert len({id(found.names) for found in segment.columns}) == 1
    assert owners(*frames) == [[f"GPU-{n}" for n in range(number + 1)] for number in range(50)]


def test_a_place_that_goes_to_another_stays_whose_it_was_before() -> None:
    assert owners(
        named((0, "GPU-a"), (1, "GPU-b")),
        column(0.0, 2),
        named((0, "GPU-c")),
        named((0, "GPU-d"), (2, "GPU-e")),
        column(15.0, 3),
        named((0, "GPU-a")),
        column(30.0, 3),
    ) == [["GPU-a", "GPU-b"], ["GPU-d", "GPU-b", "GPU-e"], ["GPU-a", "GPU-b", "GPU-e"]]


def test_a_place_that_was_nobodys_is_nobodys_before_it_is_named() -> None:
    """The frame that told whose it was is damaged; who comes there later has not that past."""
    lost = bytearray(named((1, "GPU-lost")))
    lost[-1] ^= 1
    assert owners(
        named((0, "GPU-a")), bytes(lost), column(0.0, 2), column(15.0, 1), named((1, "GPU-b")), column(30.0, 2)
    ) == [["GPU-a", ""], ["GPU-a"], ["GPU-a", "GPU-b"]]


def test_the_same_name_again_is_no_other() -> None:
    frames = [named((0, "GPU-a")), column(0.0, 1), named((0, "GPU-a")), column(15.0, 1)]
    segment = load_segment(head() + b"".join(frames))
    assert segment.columns[0].names is segment.columns[1].names
    assert owners(*frames) == [["GPU-a"], ["GPU-a"]]
