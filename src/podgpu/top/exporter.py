"""Reads an exporter's exposition for `top`: one server's GPUs, by its URL."""

from __future__ import annotations

from podgpu.catalog.cluster_families import BUILD_INFO as CLUSTER_BUILD_INFO
from podgpu.errors import SourceError, UsageError
from podgpu.exposition.parse import BadExposition, parse_text
from podgpu.fetch.access import Access
from podgpu.fetch.page import LARGEST_PAGE, UrlPage
from podgpu.figures.device import View
from podgpu.figures.from_exposition import view_of_page

DEADLINE = 5.0
"""Seconds for one page."""


class ExporterSource:
    has_rates = True
    deadline = DEADLINE + 0.5
    """For whoever waits: a little more than the page's own, whose message says more."""

    def __init__(self, url: str, largest: int = LARGEST_PAGE, deadline: float = DEADLINE) -> None:
        """Raises UsageError for what is no URL of a page. A URL without a path means /metrics."""
        try:
            self._page = UrlPage(url, Access(prefix=""), deadline, largest)
        except UsageError as error:
            raise UsageError(f"--url {error}") from error
        self.name = self._page.shown

    def read(self) -> View:
        """Raises SourceError."""
        try:
            families = parse_text(self._page.fetch().decode())
        except UnicodeDecodeError as error:
            raise SourceError(
                "malformed", f"{self.name} is no page of metrics: byte {error.start} is no UTF-8"
            ) from error
        except BadExposition as error:
            raise SourceError(error.reason, f"{self.name} is no page of metrics: {error}") from error
        view = view_of_page(families)
        if not view.devices:
            is_cluster = any(family.name == CLUSTER_BUILD_INFO.name for family in families)
            asked_wrongly = "it is podgpu cluster: use --cluster" if is_cluster else "is it a GPU exporter?"
            why = "; ".join(view.notes) or asked_wrongly
            raise SourceError("no_gpu", f"{self.name} has no GPU on its page: {why}")
        return view

    def close(self) -> None:
        """Nothing stays open between readings."""
