"""Other servers as the options describe them: an exporter's page, and how to be let in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podgpu.fetch.access import Access
from podgpu.fetch.endpoint import DEADLINE
from podgpu.fetch.page import MAX_AGE, PageSource, open_page_source


def open_page(place: str, options: Mapping[str, Any], deadline: float | None = None) -> PageSource:
    """Raises UsageError. Options that are not there count as not given."""
    access = access_by(options, "exporter", "the exporter")
    max_age = options.get("exporter_max_age", MAX_AGE)
    return open_page_source(place, access, deadline=deadline or _deadline(options), max_age=max_age)


def access_by(options: Mapping[str, Any], prefix: str, server: str, headers: Mapping[str, str] | None = None) -> Access:
    """What the options --PREFIX-… say of the server. Raises UsageError."""
    access = Access(
        ca_file=options.get(f"{prefix}_ca_file", ""),
        insecure=options.get(f"{prefix}_insecure_skip_verify", False),
        username=options.get(f"{prefix}_username", ""),
        password_file=options.get(f"{prefix}_password_file", ""),
        token_file=options.get(f"{prefix}_token_file", ""),
        headers=tuple((headers or {}).items()),
        prefix=prefix,
        server=server,
    )
    access.check()
    return access


def _deadline(options: Mapping[str, Any]) -> float:
    """A little before the turn's own: the page's message says more."""
    return min(DEADLINE, 0.8 * max(1.0, float(options.get("collect_interval", DEADLINE))))
