"""This module chooses what `podgpu top` shows, as the options say: an exporter, a cluster, or this node by an agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from podgpu.compose.servers import ApiAccess
from podgpu.top.feed import Feed, Source

if TYPE_CHECKING:
    from podgpu.compose.agent import Naming, Options


@contextmanager
def opened_feed(options: Options, naming: Naming) -> Iterator[Feed]:
    """Raises UsageError."""
    with ExitStack() as at_the_end:
        feed = Feed(_source(options, naming, at_the_end), options["interval"])
        at_the_end.callback(feed.close)
        yield feed


def _source(options: Options, naming: Naming, at_the_end: ExitStack) -> Source:
    """Each loads what it needs itself: whoever looks at another's figures has no agent."""
    if options["url"]:
        from podgpu.top.exporter import ExporterSource

        return ExporterSource(options["url"])
    if options["cluster"]:
        from podgpu.top.api import ClusterSource

        return ClusterSource(options["cluster"])
    from podgpu.compose.agent import top_source

    api = ApiAccess(options["kubeconfig"])
    at_the_end.callback(api.close)
    return top_source(options, api, naming)
