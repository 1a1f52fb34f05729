"""XID texts: one for every number in use, none for the others."""

from __future__ import annotations

import csv
from importlib.resources import files

import pytest

from podgpu.metrics.fields import UNKNOWN_XID, HealthCode, health_code, xid_text

WITHOUT_MEANING = {5, 10, 14, 15, 17, 23, 39, 40, 41, 49, 50, 51, 52, 53, 55, 87, 90, 91, 108}


@pytest.mark.parametrize(
    ("xid", "text"),
    [
        (0, "no error"),
        (13, "graphics engine exception"),
        (31, "GPU page fault"),
        (48, "double-bit ECC error"),
        (68, "NVDEC0 error"),
        (98, "NVDEC7 error"),
        (70, "copy engine 3 error"),
        (85, "copy engine 9 error"),
        (126, "copy engine 10 error"),
        (135, "copy engine 19 error"),
        (105, "NVJPG7 error"),
        (79, "GPU has fallen off the bus"),
        (119, "GSP RPC timeout"),
        (172, "uncorrectable SRAM error"),
    ],
)
def test_text_of(xid: int, text: str) -> None:
    assert xid_text(xid) == text


def test_every_number_in_use_has_a_text() -> None:
    assert {xid for xid in range(173) if xid_text(xid) == UNKNOWN_XID} == WITHOUT_MEANING


@pytest.mark.parametrize("xid", [-1, 173, 999, 2**63 - 1])
def test_numbers_outside_the_table_are_unknown(xid: int) -> None:
    assert xid_text(xid) == "unknown error"


def test_table_is_in_order_and_its_texts_can_stand_in_a_label() -> None:
    table = files("podgpu.metrics").joinpath("xids.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines()))
    numbers = [int(row["number"]) for row in rows]
    assert numbers == sorted(set(numbers))
    assert all(row["text"] == row["text"].strip() and row["text"].isascii() for row in rows)
    assert not any(set(row["text"]) & set('"\\\n') for row in rows)


def test_health_codes_say_how_bad_and_of_what_kind() -> None:
    assert health_code(0) == HealthCode("DCGM_FR_OK", "NONE", "NONE")
    assert health_code(4) == HealthCode("DCGM_FR_VOLATILE_DBE_DETECTED", "ISOLATE", "HARDWARE_MEMORY")
    codes = [health_code(number) for number in range(133)]
    assert {c.severity for c in codes} == {"NONE", "MONITOR", "ISOLATE", "UNKNOWN", "TRIAGE", "CONFIG", "RESET"}
    assert {c.category.partition("_")[0] for c in codes} == {"NONE", "PERF", "SOFTWARE", "HARDWARE", "INTERNAL"}
