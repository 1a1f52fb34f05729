"""Counter files: the format, the shipped files against dcgm-exporter, and `--dcgm-names`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.metrics.counters import MOST_BYTES, MOST_ROWS, SHIPPED, Counter, Naming, parse_counters, shipped_counters
from podgpu.metrics.fields import field_named, fields
from podgpu.metrics.names import NameSet, renames

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "fixtures" / "h200"
TEMP = "DCGM_FI_DEV_GPU_TEMP"
CLOCK = "DCGM_FI_DEV_SM_CLOCK"


def rows(text: str) -> list[tuple[str, str, str]]:
    return [(c.name, c.type, c.help) for c in parse_counters(text, "my.csv")]


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_counters(text, "my.csv")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(f"{TEMP},gauge,Heat.", [(TEMP, "gauge", "Heat.")], id="no newline at the end"),
        pytest.param(f"  {TEMP} ,  gauge ,\t Heat. \n", [(TEMP, "gauge", "Heat.")], id="spaces around cells"),
        pytest.param(f"# a, b\n\n\n{TEMP},gauge,Heat.\n#", [(TEMP, "gauge", "Heat.")], id="comments and blanks"),
        pytest.param(f"{TEMP},gauge,Heat # in C", [(TEMP, "gauge", "Heat # in C")], id="# later in a line"),
        pytest.param(f"{TEMP},gauge,", [(TEMP, "gauge", "")], id="empty help"),
        pytest.param(f'{TEMP},gauge,"Heat, in C"', [(TEMP, "gauge", "Heat, in C")], id="quoted comma"),
        pytest.param(f'{TEMP},gauge,"The ""heat"""', [(TEMP, "gauge", 'The "heat"')], id="quoted quotes"),
        pytest.param(f'"{TEMP}","gauge","Heat"\n', [(TEMP, "gauge", "Heat")], id="every cell quoted"),
        pytest.param(f'{TEMP},gauge,"Heat\n# in C"', [(TEMP, "gauge", "Heat\n# in C")], id="quoted newline"),
        pytest.param(f'{TEMP},gauge,"a\r\nb"\r\n', [(TEMP, "gauge", "a\nb")], id="quoted CRLF"),
        pytest.param(f"#x\r\n\r\n{TEMP},gauge,Heat.\r\n", [(TEMP, "gauge", "Heat.")], id="CRLF"),
        pytest.param(f"{TEMP},gauge,Heat.\r", [(TEMP, "gauge", "Heat.")], id="CR at the very end"),
        pytest.param(f"\ufeff{TEMP},gauge,Heat.", [(TEMP, "gauge", "Heat.")], id="byte order mark"),
        pytest.param(f"\ufeff# x\n{TEMP},gauge,Heat.", [(TEMP, "gauge", "Heat.")], id="mark before a comment"),
        pytest.param("dcgm_gpu_temp,gauge,x", [("dcgm_gpu_temp", "gauge", "x")], id="1.x name"),
        pytest.param(f"{TEMP}_CELSIUS,gauge,x", [(f"{TEMP}_CELSIUS", "gauge", "x")], id="name since 4.6"),
        pytest.param(f"{TEMP},histogram,x", [(TEMP, "gauge", "x")], id="histogram becomes gauge"),
        pytest.param(f"{TEMP},summary,x", [(TEMP, "gauge", "x")], id="summary becomes gauge"),
        pytest.param(f"{TEMP},untyped,x", [(TEMP, "untyped", "x")], id="untyped stays so"),
        pytest.param(f"{TEMP},label,x", [(TEMP, "label", "x")], id="number as label"),
        pytest.param("DCGM_FI_DRIVER_VERSION,label,x", [("DCGM_FI_DRIVER_VERSION", "label", "x")], id="text"),
        pytest.param(
            f"{TEMP},gauge,one\n{CLOCK},gauge,x\n{TEMP},counter,two",
            [(TEMP, "gauge", "one"), (CLOCK, "gauge", "x")],
            id="first of two rows wins",
        ),
        pytest.param(
            f"dcgm_gpu_temp,gauge,one\n{TEMP},gauge,two\n{TEMP}_CELSIUS,label,three",
            [("dcgm_gpu_temp", "gauge", "one")],
            id="first of two names wins",
        ),
    ],
)
def test_accepts(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert rows(text) == expected


@pytest.mark.parametrize(
    ("asked", "given_type"),
    [
        ("gauge", "gauge"),
        ("counter", "counter"),
        ("label", "label"),
        ("untyped", "untyped"),
        ("histogram", "gauge"),
        ("apple", "gauge"),
    ],
)
def test_own_collectors_rows_take_any_type(asked: str, given_type: str) -> None:
    assert rows(f"DCGM_EXP_XID_ERRORS_COUNT,{asked},x") == [("DCGM_EXP_XID_ERRORS_COUNT", given_type, "x")]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        pytest.param("DCGM_FI_DEV_GPU_TMP,gauge,x", 1, f"did you mean {TEMP}?", id="misspelt"),
        pytest.param("dcgm_fi_dev_gpu_temp,gauge,x", 1, f"did you mean {TEMP}?", id="wrong case"),
        pytest.param("####\n\nqwerty,gauge,x", 3, "unknown field 'qwerty': use a DCGM_FI_", id="nothing near"),
        pytest.param('"a\nb",gauge,x', 1, r"unknown field 'a\nb'", id="newline in a name"),
        pytest.param(",gauge,x", 1, "first cell is empty", id="no name"),
        pytest.param(f"{TEMP},gague,x", 1, "unknown type 'gague': use gauge, counter", id="wrong type"),
        pytest.param(f"{TEMP},Gauge,x", 1, "unknown type 'Gauge'", id="type in capitals"),
        pytest.param(f"{TEMP},,x", 1, "unknown type ''", id="no type"),
        pytest.param(f"{TEMP},gauge", 1, "found 2 cell(s): add", id="two cells"),
        pytest.param(f"{CLOCK},gauge,x\n{TEMP}", 2, "found 1 cell(s): add", id="one cell"),
        pytest.param(f"{TEMP},gauge,x,y", 1, "found 4 cells: put a help text that has commas", id="four cells"),
        pytest.param(f"{TEMP},gauge,x,", 1, "found 4 cells", id="comma at the end"),
        pytest.param(f"{CLOCK},gauge,x\n   \n", 2, "blank cell(s): leave the line empty", id="spaces only"),
        pytest.param(f"{CLOCK},gauge,x\n # no\n", 2, "a comment needs its # in the first column", id="late #"),
        pytest.param(f'{TEMP}, gauge, "a, b"', 1, "directly after the comma", id="space before a quote"),
        pytest.param(f'#\n{TEMP},gauge,"a\nb" c', 2, "directly after the comma", id="text after a quote"),
        pytest.param(f'{TEMP},gauge,"a" ', 1, "directly after the comma", id="space after a quote"),
        pytest.param(f'#\n{TEMP},gauge,"a\n{CLOCK},gauge,b\n', 2, "directly after the comma", id="open quote"),
        pytest.param(f'{TEMP},gauge,"a""', 1, "directly after the comma", id="open quote after an escaped one"),
        pytest.param("DCGM_FI_DRIVER_VERSION,gauge,x", 1, "use label as its type", id="text as gauge"),
        pytest.param("DCGM_FI_DRIVER_VERSION,counter,x", 1, "cannot be of type counter", id="text as counter"),
        pytest.param("DCGM_FI_DRIVER_VERSION,untyped,x", 1, "cannot be of type untyped", id="text, untyped"),
        pytest.param("DCGM_FI_DRIVER_VERSION,summary,x", 1, "use label as its type", id="text as summary"),
        pytest.param("DCGM_FI_GPU_TOPOLOGY_PCI,gauge,x", 1, "cannot be exported", id="blob"),
        pytest.param("DCGM_FI_GPU_TOPOLOGY_PCI,label,x", 1, "cannot be exported", id="blob as label"),
        pytest.param(f"{TEMP},gauge,x\n{TEMP},apple,x", 2, "unknown type", id="a row that loses is checked too"),
        pytest.param("", 1, "use -f none", id="empty"),
        pytest.param("\ufeff\r\n# nothing\r\n\r", 1, "use -f none", id="comments only"),
        pytest.param("é" * (MOST_BYTES // 2) + "x", 1, "more than 1 MiB", id="too long, in bytes"),
        pytest.param(f"{TEMP},gauge,x\n" * (MOST_ROWS + 1), MOST_ROWS + 1, "more than 5000 rows", id="too many"),
    ],
)
def test_refuses_and_says_where_and_what_to_do(text: str, line: int, says: str) -> None:
    message = refusal(text)
    assert message.startswith(f"my.csv:{line}: ")
    assert says in message


def test_takes_what_just_fits() -> None:
    row = f"{TEMP},gauge,x\n"
    assert len(rows(row * MOST_ROWS)) == 1
    assert len(rows(row + "#" * (MOST_BYTES - len(row)))) == 1


def test_a_huge_name_is_cut_in_the_message() -> None:
    assert len(refusal("D" * 500_000 + ",gauge,x")) < 300


# --- the shipped files

ROW_OFF = re.compile(r"^# (?=(?:DCGM|dcgm)_\w+ *,)", re.MULTILINE)


def shipped_text(file_name: str) -> str:
    return files("podgpu.metrics").joinpath("counters", file_name).read_text(encoding="utf-8")


def rows_of_dcgm_exporter(file_name: str, state: str) -> list[tuple[str, str]]:
    """exporter_rows.csv: which rows dcgm-exporter's own three files have, and whether they are on."""
    with (HERE / "exporter_rows.csv").open(encoding="utf-8", newline="") as table:
        found = [r for r in csv.DictReader(table) if (r["file"], r["state"]) == (file_name, state)]
    return sorted((r["name"], r["type"]) for r in found)


def shipped(short: str) -> tuple[Counter, ...]:
    found = shipped_counters(short)
    assert found is not None
    return found


@pytest.mark.parametrize(("short", "file_name"), SHIPPED.items())
def test_shipped_rows_are_dcgm_exporters(short: str, file_name: str) -> None:
    assert sorted((c.name, c.type) for c in shipped(short)) == rows_of_dcgm_exporter(file_name, "on")
    assert shipped_counters(file_name) == shipped(short)


@pytest.mark.parametrize("file_name", SHIPPED.values())
def test_rows_that_are_off_can_be_switched_on(file_name: str) -> None:
    text = shipped_text(file_name)
    off = [line[2:] for line in text.splitlines() if ROW_OFF.match(line)]
    parsed = [(c.name, c.type) for row in off for c in parse_counters(row, file_name)]
    assert sorted(parsed) == rows_of_dcgm_exporter(file_name, "off")
    switched_on = {(c.name, c.type) for c in parse_counters(ROW_OFF.sub("", text), file_name)}
    assert set(parsed) <= switched_on


@pytest.mark.parametrize("file_name", SHIPPED.values())
def test_shipped_files_hold_no_row_twice(file_name: str) -> None:
    names = re.findall(r"^\w+(?= *,)", shipped_text(file_name), re.MULTILINE)
    assert len(names) == len(set(names)) == len(shipped(file_name))


@pytest.mark.parametrize("name", ["none", "", "default.csv", "/etc/dcgm-exporter/default-counters.csv"])
def test_other_names_are_not_shipped(name: str) -> None:
    assert shipped_counters(name) is None


@pytest.mark.parametrize(
    ("short", "fixture", "not_printed"),
    [
        # That H200 had no value for these two; label rows are no families.
        ("default", "default.prom", {"DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"}),
        ("dcp", "dcp_pod.prom", {"DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"}),
        ("1.x", "old.prom", {"dcgm_xid_errors", "dcgm_nvlink_bandwidth_total"}),
    ],
)
def test_help_and_type_are_those_dcgm_exporter_prints(short: str, fixture: str, not_printed: set[str]) -> None:
    ours = {c.name: (c.type, c.help) for c in shipped(short) if not c.is_label and c.name not in not_printed}
    assert ours == dict(printed_families((FIXTURES / fixture).read_text(encoding="utf-8")))


def printed_families(text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    for name, help_text in re.findall(r"^# HELP (\w+) (.*)$", text, re.MULTILINE):
        yield name, (types[name], help_text)


# --- properties

NUMBERS = sorted(f.name for f in fields().values() if f.type in ("int", "float"))
PIECES = [TEMP, CLOCK, "DCGM_FI_DRIVER_VERSION", "DCGM_EXP_P2P_STATUS", "gauge", "label", "heat"]
PIECES += [",", ",", '"', '""', "#", "\n", "\r\n", "\r", " ", "\t", "\ufeff", "\x00"]
ALMOST_ROWS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@given(st.one_of(ALMOST_ROWS, st.text(st.characters(), max_size=200)))
@example("\ud800,gauge,x")
@example('"')
@example("\x00")
def test_any_text_gives_counters_or_a_usage_error(text: str) -> None:
    refused = ""
    counters: tuple[Counter, ...] = ()
    try:
        counters = parse_counters(text, "my.csv")
    except UsageError as error:
        refused = str(error)
    assert re.fullmatch(r"my\.csv:\d+: \S.*", refused) if refused else counters
    ids = [c.field.id for c in counters]
    assert len(set(ids)) == len(ids)
    assert {c.type for c in counters} <= {"gauge", "counter", "untyped", "label"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NUMBERS),
            st.sampled_from(["gauge", "counter", "untyped", "label"]),
            st.text(st.characters(exclude_characters="\r", codec="utf-8"), max_size=30).map(lambda s: s.strip(" \t")),
        ),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[0],
    ),
    st.sampled_from(["\n", "\r\n", "\n\n# between\n"]),
)
def test_written_rows_come_back(written: list[tuple[str, str, str]], line_end: str) -> None:
    def quoted(cell: str) -> str:
        return '"' + cell.replace('"', '""') + '"'

    text = line_end.join(",".join([name, kind, quoted(help_text)]) for name, kind, help_text in written)
    assert rows(text) == written
    assert [c.field for c in parse_counters(text, "my.csv")] == [field_named(name) for name, _, _ in written]


# --- `--dcgm-names`

OLD, NEW, BOTH = Naming("4.8"), Naming("4.9"), Naming("both")
SETS: tuple[NameSet, ...] = ("4.8", "4.9", "both")


def shipped_with(naming: Naming, short: str = "default") -> tuple[Counter, ...]:
    found = naming.shipped(short)
    assert found is not None
    return found


def named_rows(text: str, naming: Naming) -> list[tuple[str, int, str, str]]:
    return [(c.name, c.field.id, c.type, c.help) for c in naming.parse(text, "my.csv")]


@pytest.mark.parametrize("short", ["default", "dcp"])
def test_shipped_files_follow(short: str) -> None:
    old, new, both = ({c.name for c in shipped_with(naming, short)} for naming in (OLD, NEW, BOTH))
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
    counters = shipped_with(naming)
    assert len({c.name for c in counters}) == len(counters)
    for counter in counters:
        assert counter.name in counter.field.names
        told = re.search(r"\(in ([^)]*)\)", counter.help)
        unit = {"B/s": "bytes per second", "% (0-100)": "%"}.get(counter.field.unit, counter.field.unit)
        assert told is None or told[1] == unit, counter


def test_types_follow() -> None:
    types = {c.name: c.type for c in shipped_with(BOTH)}
    assert types["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"] == "counter"
    assert types["DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND"] == "gauge"
    assert types["DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL"] == types["DCGM_FI_DEV_PCIE_REPLAY_TOTAL"] == "counter"
    assert types["DCGM_FI_SYSTEM_DRIVER_VERSION"] == types["DCGM_FI_DRIVER_VERSION"] == "label"


@pytest.mark.parametrize("naming", [Naming(), NEW])
def test_a_users_row_is_honoured_in_either_mode(naming: Naming) -> None:
    text = "DCGM_FI_DEV_GPU_UTIL_RATIO,gauge,a\nDCGM_FI_DEV_FB_USED,gauge,b\nDCGM_FI_DEV_FB_USED_BYTES,gauge,c\n"
    assert named_rows(text, naming) == [
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", 1613, "gauge", "a"),
        ("DCGM_FI_DEV_FB_USED", 252, "gauge", "b"),
        ("DCGM_FI_DEV_FB_USED_BYTES", 1627, "gauge", "c"),
    ]


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
    found = named_rows(row, BOTH)
    assert [found[0][0], *found[1:]] == [name, (f"DCGM_FI_DEV_{other[0]}", *other[1:])]


def test_both_keeps_what_a_file_says_of_each_name() -> None:
    text = "DCGM_FI_DEV_FB_USED,gauge,mine\nDCGM_FI_DEV_FB_USED_BYTES,counter,mine too\ndcgm_fb_free,gauge,x\n"
    assert named_rows(text, BOTH) == [
        ("DCGM_FI_DEV_FB_USED", 252, "gauge", "mine"),
        ("DCGM_FI_DEV_FB_USED_BYTES", 1627, "counter", "mine too"),
        ("dcgm_fb_free", 251, "gauge", "x"),
    ]


@pytest.mark.parametrize("naming", [OLD, NEW, BOTH])
def test_a_bad_file_is_refused_in_every_mode(naming: Naming) -> None:
    with pytest.raises(UsageError, match=r"my\.csv:1: unknown field 'DCGM_FI_DEV_FB_USED_BITES'"):
        naming.parse("DCGM_FI_DEV_FB_USED_BITES,gauge,x", "my.csv")


ALL_NAMES = sorted(name for field in fields().values() if field.type in ("int", "float") for name in field.names)


@given(st.lists(st.sampled_from(ALL_NAMES), min_size=1, max_size=20), st.sampled_from(SETS))
def test_no_name_comes_twice_and_none_is_lost(names: list[str], chosen: NameSet) -> None:
    text = "".join(f"{name},gauge,x\n" for name in names)
    found = Naming(chosen).parse(text, "my.csv")
    assert len({c.name for c in found}) == len(found)
    written = {c.name for c in parse_counters(text, "my.csv")}
    assert written <= {c.name for c in found}
    assert chosen == "both" or written == {c.name for c in found}
