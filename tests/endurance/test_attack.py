"""Runs a short version of `make attack`."""

from __future__ import annotations

import pytest

from endurance.attack import run


@pytest.mark.fault(
    "clients on the network open connections and send half requests, huge headers and garbage",
    "scrapes are answered, memory and log stay small, no process ends",
)
def test_scrapes_are_answered_during_an_attack() -> None:
    assert [claim for claim in run(6.0) if not claim.holds] == []
