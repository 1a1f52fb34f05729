"""Tests XIDs, conditions and health codes."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.metrics.conditions import (
    HealthCode,
    conditions,
    health_code,
    words_for,
    xid_detail,
    xid_spec,
    xid_specs,
)
from podgpu.metrics.counters import parse_counters
from podgpu.metrics.dcgm import render_dcgm
from podgpu.metrics.labels import Policy
from podgpu.model import DeviceState, NodeState

DIGEST = "7b9898a83672bf1f024de251d16c57e8bbb829d1816cbe8e11e816eb91e53d37"


def test_errors_of_applications_do_not_break_a_gpu() -> None:
    assert [xid_spec(xid).needs_action for xid in (13, 31, 43, 45, 48, 79, 119)] == [False] * 4 + [
        True
    ] * 3
    assert all(spec.cause != "application" for spec in xid_specs().values() if spec.needs_action)


def test_the_most_drastic_action_of_several_xids_is_shown() -> None:
    says, do = words_for("xid", xid_detail([79, 48, 48]))
    assert "XID 48 (double-bit ECC error), XID 79 (GPU has fallen off the bus)" in says
    assert "reboot" in do
    says_again, do_again = words_for("xid", "48,79", ((48, 5),))
    assert "5 times" in says_again
    assert do_again == do, "only XID 48 came back"
    assert words_for("xid", "48", ((48, 5),))[1] != words_for("xid", "48")[1], "it came back"


@given(st.sampled_from(sorted(conditions())), st.text())
def test_any_detail_has_a_sentence(condition: str, detail: str) -> None:
    says, do = words_for(condition, detail)
    assert says
    assert do


def test_health_codes() -> None:
    assert health_code(4) == HealthCode(
        "DCGM_FR_VOLATILE_DBE_DETECTED", "ISOLATE", "HARDWARE_MEMORY"
    )
    assert health_code(9999) == HealthCode("DCGM_FR_UNKNOWN(9999)", "UNKNOWN", "UNKNOWN")


@pytest.mark.parametrize(
    ("xid", "text"),
    [
        (0, "No Error"),
        (13, "Graphics Engine Exception"),
        (31, "GPU memory page fault"),
        (
            45,
            "Preemptive cleanup, due to previous errors -- Most likely to see when running "
            "multiple cuda",
        ),
        (55, "Unused"),
        (79, "GPU has fallen off the bus"),
        (108, "Reserved"),
        (142, "Robust Channel NVENVC3 Error"),
        (172, "Uncorrectable SRAM Error"),
        (173, "Unknown Error"),
    ],
)
def test_err_msg_is_that_of_dcgm_exporter(xid: int, text: str) -> None:
    device = DeviceState(uuid="GPU-0", fields={}, last_xid=xid)
    policy = Policy(parse_counters("DCGM_FI_DEV_XID_ERRORS,gauge,x", "test"))
    [family] = render_dcgm(NodeState(producer="podgpu", devices=(device,)), policy)
    assert dict(family.samples[0].labels.pairs)["err_msg"] == text


def test_all_err_msgs_of_dcgm_exporter_are_there() -> None:
    """Compares a digest of the 173 texts of dcgm-exporter 4.5.3-4.8.2, in their order."""
    texts = "\n".join(xid_spec(xid).err_msg for xid in range(173))
    assert sha256(texts.encode()).hexdigest() == DIGEST
    assert len(xid_specs()) == 173
