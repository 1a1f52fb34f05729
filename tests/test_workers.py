"""Workers: bugs in a source."""

from __future__ import annotations

import pytest

from podgpu.workers import Workers


def test_a_bug_in_one_source_is_contained(caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> None:
        raise ZeroDivisionError("oops")

    result = Workers().run({"buggy": bug}, 5.0)["buggy"]
    assert getattr(result.error, "reason", "") == "bug"
    assert "please report" in caplog.text
