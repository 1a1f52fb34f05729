"""Tests the parser of counter files, the shipped files, and `--dcgm-names`.

The shipped files are compared with dcgm-exporter's.
"""

from __future__ import annotations

import csv
import re
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.metrics.counters import SHIPPED, CounterSpec, parse_counters, shipped_counters
from podgpu.metrics.fields import NameSet, names_of, rename_of, renames

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "fixtures" / "h200"
TEMP = "DCGM_FI_DEV_GPU_TEMP"
CLOCK = "DCGM_FI_DEV_SM_CLOCK"
VERSION = "DCGM_FI_DRIVER_VERSION"
XIDS = "DCGM_EXP_XID_ERRORS_COUNT"


def rows(text: str) -> list[tuple[str, str, str]]:
    return [(c.name, c.type, c.help) for c in parse_counters(text, "my.csv")]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (f"{TEMP},gauge,Heat.", (TEMP, "gauge", "Heat.")),
        (f"# a, b\n\n\n{TEMP},gauge,Heat # in C\n#", (TEMP, "gauge", "Heat # in C")),
        (f'"{TEMP}","gauge","The ""heat"", in C"\n', (TEMP, "gauge", 'The "heat", in C')),
        (f"\ufeff# x\n{TEMP},gauge,Heat.", (TEMP, "gauge", "Heat.")),
        ("dcgm_gpu_temp,gauge,x", ("dcgm_gpu_temp", "gauge", "x")),
        (f"{TEMP}_CELSIUS,gauge,x", (f"{TEMP}_CELSIUS", "gauge", "x")),
        (f"{TEMP},histogram,x", (TEMP, "gauge", "x")),
        (f"{VERSION},label,x", (VERSION, "label", "x")),
        (f"{XIDS},counter,x", (XIDS, "counter", "x")),
        (
            f"{TEMP},gauge,one\n{TEMP},counter,two\ndcgm_gpu_temp,label,three",
            (TEMP, "gauge", "one"),
        ),
    ],
)
def test_valid_files(text: str, row: tuple[str, str, str]) -> None:
    assert rows(text) == [row]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("DCGM_FI_DEV_GPU_TMP,gauge,x", 1, f"did you mean {TEMP}?"),
        ("####\n\nqwerty,gauge,x", 3, "unknown field 'qwerty': use a DCGM_FI_"),
        (",gauge,x", 1, "unknown field ''"),
        (f"{TEMP},gague,x", 1, "unknown type 'gague': use gauge, counter"),
        (f"{CLOCK},gauge,x\n{TEMP}", 2, "found 1 cell(s): "),
        (f"{TEMP},gauge,x,y", 1, "found 4 cell(s): "),
        (f"{CLOCK},gauge,x\n   \n", 2, "found 1 cell(s)"),
        (f"{CLOCK},gauge,x\n # no\n", 2, "start comments in the first column"),
        (f'{TEMP}, gauge, "a, b"', 1, "double quote directly after the comma"),
        (f"{VERSION},counter,x", 1, "cannot be of type counter: use label as its type"),
        ("\ufeff\r\n# nothing\r\n\r", 1, "use -f none"),
    ],
)
def test_invalid_files_are_refused_with_line_and_advice(text: str, line: int, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_counters(text, "my.csv")
    message = str(caught.value)
    assert message.startswith(f"my.csv:{line}: ")
    assert why in message
    assert "\n" not in message
    assert len(message) < 300


PIECES = [TEMP, CLOCK, VERSION, "DCGM_EXP_P2P_STATUS", "gauge", "label", "heat"]
PIECES += [",", ",", '"', '""', "#", "\n", "\r\n", "\r", " ", "\t", "\ufeff", "\x00"]


@given(
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
    | st.text(st.characters(), max_size=200)
)
@example("\ud800,gauge,x")
def test_any_text_gives_counters_or_a_usage_error(text: str) -> None:
    try:
        counters = parse_counters(text, "my.csv")
    except UsageError as error:
        assert re.fullmatch(r"my\.csv:\d+: \S.*", str(error))  # noqa: PT017
        return
    assert counters
    assert len({c.field.id for c in counters}) == len(counters)


ROW_OFF = re.compile(r"^# (?=(?:DCGM|dcgm)_\w+ *,)", re.MULTILINE)


def shipped(short: str, names: NameSet = "4.8") -> tuple[CounterSpec, ...]:
    found = shipped_counters(short, names)
    assert found is not None
    return found


def rows_of_dcgm_exporter(file_name: str, state: str) -> list[tuple[str, str]]:
    """Returns the enabled or the commented rows of a dcgm-exporter file, from exporter_rows.csv.

    One row differs from dcgm-exporter: dcgm_low_util_violation is enabled, as in
    pod-devices-exporter.
    """
    with (HERE / "exporter_rows.csv").open(encoding="utf-8", newline="") as table:
        found = [r for r in csv.DictReader(table) if (r["file"], r["state"]) == (file_name, state)]
    return sorted((r["name"], r["type"]) for r in found)


@pytest.mark.parametrize(("short", "file_name"), SHIPPED.items())
def test_shipped_rows_are_dcgm_exporters(short: str, file_name: str) -> None:
    assert sorted((c.name, c.type) for c in shipped(short)) == rows_of_dcgm_exporter(
        file_name, "on"
    )
    assert shipped_counters(file_name) == shipped_counters(short)
    text = files("podgpu.metrics").joinpath("counters", file_name).read_text(encoding="utf-8")
    off = [line[2:] for line in text.splitlines() if ROW_OFF.match(line)]
    parsed = [(c.name, c.type) for row in off for c in parse_counters(row, file_name)]
    assert sorted(parsed) == rows_of_dcgm_exporter(file_name, "off")


XID_HELP = "gauge", "Value of the last XID error encountered."
NVLINK_HELP = "Total number of NVLink bandwidth counters for all lanes"


@pytest.mark.parametrize(
    ("short", "fixture", "not_printed"),
    [
        # The H200 of the recording had no value for these metrics.
        (
            "default",
            "default.prom",
            {
                "DCGM_FI_DEV_XID_ERRORS": XID_HELP,
                "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": ("counter", f"{NVLINK_HELP}."),
            },
        ),
        (
            "dcp",
            "dcp_pod.prom",
            {
                "DCGM_FI_DEV_XID_ERRORS": XID_HELP,
                "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": ("counter", f"{NVLINK_HELP}."),
            },
        ),
        (
            "1.x",
            "old.prom",
            {"dcgm_xid_errors": XID_HELP, "dcgm_nvlink_bandwidth_total": ("counter", NVLINK_HELP)},
        ),
    ],
)
def test_help_and_type_are_those_of_dcgm_exporter(
    short: str, fixture: str, not_printed: dict[str, tuple[str, str]]
) -> None:
    ours = {c.name: (c.type, c.help) for c in shipped(short) if not c.is_label}
    # dcgm-exporter does not have this row.
    ours.pop("dcgm_low_util_violation", None)
    text = (FIXTURES / fixture).read_text(encoding="utf-8")
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    helps = re.findall(r"^# HELP (\w+) (.*)$", text, re.MULTILINE)
    assert ours == not_printed | {name: (types[name], words) for name, words in helps}


def test_every_name_has_one_meaning() -> None:
    new = [r.new_name for r in renames()]
    old = [name for r in renames() for name in r.old_names]
    assert len({*new, *old}) == len(new) + len(old)
    for rename in renames():
        assert rename_of(rename.old.name) is rename_of(rename.new_name) is rename
        assert {rename.old.name, rename.new_name} <= set(names_of(rename.old.name)), rename


SETS: tuple[NameSet, ...] = ("4.8", "4.9", "both")


def named_rows(text: str, names: NameSet) -> list[tuple[str, int, str, str]]:
    return [(c.name, c.field.id, c.type, c.help) for c in parse_counters(text, "my.csv", names)]


@pytest.mark.parametrize("short", ["default", "dcp"])
def test_shipped_files_follow(short: str) -> None:
    old, new, both = ({c.name for c in shipped(short, names)} for names in SETS)
    assert old == {c.name for c in shipped_counters(short) or ()}
    assert new - old == {r.new_name for r in renames() if r.old.name in old} | {
        "DCGM_FI_DEV_FB_CAPACITY_BYTES"
    }
    assert new & old == {
        "DCGM_FI_DEV_VGPU_LICENSE_STATUS",
        "DCGM_FI_PROF_PCIE_TX_BYTES",
        "DCGM_FI_PROF_PCIE_RX_BYTES",
    }
    assert both == old | new


@pytest.mark.parametrize(
    ("row", "other"),
    [
        ("FB_USED,gauge,Used (in MiB).", ("FB_USED_BYTES", 1627, "gauge", "Used.")),
        ("FB_USED_BYTES,gauge,Memory used", ("FB_USED", 252, "gauge", "Memory used")),
        ("GPU_UTIL_RATIO,gauge,Busy (0 to 1)", ("GPU_UTIL", 203, "gauge", "Busy")),
        ("GPU_UTIL,gauge,", ("GPU_UTIL_RATIO", 1613, "gauge", "")),
        ("GPU_TEMP,gauge,Heat", ("GPU_TEMP_CELSIUS", 150, "gauge", "Heat")),
        (
            "NVLINK_THROUGHPUT_TOTAL,counter,x",
            ("NVLINK_THROUGHPUT_BYTES_PER_SECOND", 1648, "gauge", "x"),
        ),
        ("SERIAL,label,x", ("BOARD_SERIAL", 53, "label", "x")),
    ],
)
def test_both_adds_the_other_name(row: str, other: tuple[str, int, str, str]) -> None:
    found = named_rows(f"DCGM_FI_DEV_{row}", "both")
    assert [found[0][0], *found[1:]] == [
        f"DCGM_FI_DEV_{row.partition(',')[0]}",
        (f"DCGM_FI_DEV_{other[0]}", *other[1:]),
    ]


def test_all_metrics_of_dcgm_exporter_1_4() -> None:
    """dcgm-exporter 1.4.6, which pod-devices-exporter used, has 34 metrics."""
    names = {counter.name for counter in shipped("1.x-all")}
    assert len(names) == 40
    assert {counter.name for counter in shipped("1.x")} < names
    clocks = next(c for c in shipped("1.x-all") if c.name == "dcgm_app_clock_violation")
    assert (clocks.field.id, clocks.type) == (246, "counter")
