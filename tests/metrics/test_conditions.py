"""Tests XIDs, conditions and health codes."""

from __future__ import annotations

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
