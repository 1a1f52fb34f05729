"""Another exporter's page as the options describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podgpu.telemetry.page_source import DEADLINE, MAX_AGE, Access, PageSource, open_page_source


def open_page(place: str, options: Mapping[str, Any], deadline: float | None = None) -> PageSource:
    """Raises UsageError. Options that are not there count as not given."""
    access = Access(
        ca_file=options.get("exporter_ca_file", ""),
        insecure=options.get("exporter_insecure_skip_verify", False),
        username=options.get("exporter_username", ""),
        password_file=options.get("exporter_password_file", ""),
        token_file=options.get("exporter_token_file", ""),
    )
    max_age = options.get("exporter_max_age", MAX_AGE)
    return open_page_source(place, access, deadline=deadline or _deadline(options), max_age=max_age)


def _deadline(options: Mapping[str, Any]) -> float:
    """A little before the turn's own: the page's message says more."""
    return min(DEADLINE, 0.8 * max(1.0, float(options.get("collect_interval", DEADLINE))))
