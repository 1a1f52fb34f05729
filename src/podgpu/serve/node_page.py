"""The picture of the exporter's own node, made when somebody looks, once for each snapshot. No scrape waits for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from podgpu import __version__
from podgpu.agent import health
from podgpu.agent.loop import Agent
from podgpu.agent.publish import Published

if TYPE_CHECKING:  # an exporter that nobody looks at does not load it
    from podgpu.figures.page_state import PageState

_UNNAMED = "this node"
_TOO_OLD = "the figures are too old to be shown: the driver has not been read in time"
_NONE_YET = "there are no figures yet: the driver has never been read"


class NodePage:
    """Made in the threads of those who look, one at a time: whoever comes second finds it made."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._making = threading.Lock()
        self._made: tuple[Published, bool, PageState] | None = None

    def latest(self) -> PageState:
        with self._making:
            published = self._agent.published
            fresh = self._agent.is_fresh(published)
            if self._made is None or self._made[0] is not published or self._made[1] is not fresh:
                self._made = published, fresh, self._make(published, fresh)
            return self._made[2]

    def _make(self, published: Published, fresh: bool) -> PageState:
        from podgpu.figures.of_node import node_picture
        from podgpu.figures.page_state import PageState

        settings, notes = self._agent.settings, health.degraded(self._agent)
        snapshot = published.snapshot
        if not fresh:
            notes = [_TOO_OLD if snapshot.taken_at else _NONE_YET, *notes]
        name = settings.policy.hostname or _UNNAMED
        picture = node_picture(snapshot, name, settings.interval, notes, fresh=fresh, version=__version__)
        return PageState.of(picture)
