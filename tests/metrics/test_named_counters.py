"""`--dcgm-names`: what the shipped files and a user's file yield under each choice."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.metrics.counters import Counter, parse_counters, shipped_counters
from podgpu.metrics.fields import fields
from podgpu.metrics.named_counters import Naming
from podgpu.metrics.names import NameSet, renames

OLD, NEW, BOTH = Naming("4.8"), Naming("4.9"), Naming("both")
SETS: tuple[NameSet, ...] = ("4.8", "4.9", "both")


def shipped(naming: Naming, short: str = "default") -> tuple[Counter, ...]:
    found = naming.shipped(short)
    assert found is not None
    return found


def rows(text: str, naming: Naming) -> list[tuple[str, int, str, str]]:
    return [(c.name, c.field.id, c.type, c.help) for c in naming.parse(text, "my.csv")]


@pytest.mark.parametrize("short", ["default", "dcp"])
def test_shipped_files_follow(short: str) -> None:
    old, new, both = ({c.name for c in shipped(naming, short)} for naming in (OLD, NEW, BOTH))
    assert old == {c.name for c in shipped_counters(short) or ()}
    assert len(new) == 27
    assert new - old == {r.new_name for r in renames() if r.old_name in old} | {"DCGM_FI_DEV_FB_CAPACITY_BYTES"}
    assert new & old == {"DCGM_FI_DEV_VGPU_LICENSE_STATUS", "DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES"}
    assert both == old | new


@pytest.mark.parametrize("naming", [OLD, NEW, BOTH])
def test_1x_names_are_of_neither(naming: Naming) -> None:
    assert naming.shipped("1.x") == shipped_counters("1.x")
    assert naming.shipped("mine.csv") is None


@pytest.mark.parametrize("naming", [OLD, NEW, BOTH])
def test_no_name_comes_twice_and_each_unit_is_its_fields(naming: Naming) -> None:
    counters = shipped(naming)
    assert len({c.name for c in counters}) == len(counters)
    for counter in counters:
        assert counter.name in counter.field.names
        told = re.search(r"\(in ([^)]*)\)", counter.help)
        unit = {"B/s": "bytes per second", "% (0-100)": "%"}.get(counter.field.unit, counter.field.unit)
        assert told is None or told[1] == unit, counter


def test_types_follow() -> None:
    types = {c.name: c.type for c in shipped(BOTH)}
    assert types["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"] == "counter"
    assert types["DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND"] == "gauge"
    assert types["DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL"] == types["DCGM_FI_DEV_PCIE_REPLAY_TOTAL"] == "counter"
    assert types["DCGM_FI_SYSTEM_DRIVER_VERSION"] == types["DCGM_FI_DRIVER_VERSION"] == "label"


@pytest.mark.parametrize("naming", [Naming(), NEW])
def test_a_users_row_is_honoured_in_either_mode(naming: Naming) -> None:
    text = "DCGM_FI_DEV_GPU_UTIL_RATIO,gauge,a\nDCGM_FI_DEV_FB_USED,gauge,b\nDCGM_FI_DEV_FB_USED_BYTES,gauge,c\n"
    assert rows(text, naming) == [
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", 1613, "gauge", "a"),
        ("DCGM_FI_DEV_FB_USED", 252, "gauge", "b"),
        ("DCGM_FI_DEV_FB_USED_BYTES", 1627, "gauge", "c"),
    ]


def test_who_asks_for_4_8_by_name_has_its_meaning_of_the_one_name() -> None:
    said = Naming("4.8", as_in_4_6=True)
    assert rows("DCGM_FI_DEV_GPU_UTIL_RATIO,gauge,a\n", said) == [("DCGM_FI_DEV_GPU_UTIL_RATIO", 203, "gauge", "a")]
    assert rows("DCGM_FI_DEV_MEMORY_UTIL_RATIO,gauge,a\n", said)[0][1] == 1614


@pytest.mark.parametrize(
    ("row", "other"),
    [
        ("DCGM_FI_DEV_FB_USED,gauge,Used (in MiB).", ("FB_USED_BYTES", 1627, "gauge", "Used (in bytes).")),
        ("DCGM_FI_DEV_FB_USED_BYTES,gauge,Memory used", ("FB_USED", 252, "gauge", "Memory used (in MiB).")),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO,gauge,Busy (0 to 1)", ("GPU_UTIL", 203, "gauge", "Busy (in %).")),
        ("DCGM_FI_DEV_GPU_UTIL,gauge,", ("GPU_UTIL_RATIO", 1613, "gauge", "(0 to 1)")),
        ("DCGM_FI_DEV_GPU_TEMP,gauge,Heat", ("GPU_TEMP_CELSIUS", 150, "gauge", "Heat")),
        ("DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL,counter,x", ("NVLINK_THROUGHPUT_BYTES_PER_SECOND", 1648, "gauge",
         "x (in bytes per second).")),
        ("DCGM_FI_DEV_SERIAL,label,x", ("BOARD_SERIAL", 53, "label", "x")),
    ],
)  # fmt: skip
def test_both_gives_each_row_its_other_name(row: str, other: tuple[str, int, str, str]) -> None:
    name = row.partition(",")[0]
    found = rows(row, BOTH)
    assert [found[0][0], *found[1:]] == [name, (f"DCGM_FI_DEV_{other[0]}", *other[1:])]


def test_both_keeps_what_a_file_says_of_each_name() -> None:
    text = "DCGM_FI_DEV_FB_USED,gauge,mine\nDCGM_FI_DEV_FB_USED_BYTES,counter,mine too\ndcgm_fb_free,gauge,x\n"
    assert rows(text, BOTH) == [
        ("DCGM_FI_DEV_FB_USED", 252, "gauge", "mine"),
        ("DCGM_FI_DEV_FB_USED_BYTES", 1627, "counter", "mine too"),
        ("dcgm_fb_free", 251, "gauge", "x"),
    ]


@pytest.mark.parametrize("naming", [OLD, NEW, BOTH])
def test_a_bad_file_is_refused_in_every_mode(naming: Naming) -> None:
    with pytest.raises(UsageError, match=r"my\.csv:1: unknown field 'DCGM_FI_DEV_FB_USED_BITES'"):
        naming.parse("DCGM_FI_DEV_FB_USED_BITES,gauge,x", "my.csv")


NAMES = sorted(name for field in fields().values() if field.type in ("int", "float") for name in field.names)


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=20), st.sampled_from(SETS), st.booleans())
def test_whatever_is_asked_for_no_name_comes_twice_and_none_is_lost(
    names: list[str], chosen: NameSet, in_4_6: bool
) -> None:
    text = "".join(f"{name},gauge,x\n" for name in names)
    naming = Naming(chosen, as_in_4_6=in_4_6 and chosen == "4.8")
    found = naming.parse(text, "my.csv")
    assert len({c.name for c in found}) == len(found)
    written = {c.name for c in parse_counters(text, "my.csv", in_4_6=naming.as_in_4_6)}
    assert written <= {c.name for c in found}
    assert chosen == "both" or written == {c.name for c in found}
