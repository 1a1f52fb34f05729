"""Publisher makes the view of each round's reading, and the bytes that answer requests until the next round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from podgpu.cluster.labels import LabelMemory
from podgpu.cluster.metrics import cluster_families, node_families, self_families
from podgpu.cluster.pictures import picture_of
from podgpu.cluster.reading import ClusterReading
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble, assemble_use
from podgpu.figures.as_json import PageState
from podgpu.figures.prices import ReadPrices, no_prices
from podgpu.figures.waste import WasteStatement
from podgpu.metrics.encode import NO_METRICS, Exposition, encode

if TYPE_CHECKING:  # only for those who keep it on disk
    from podgpu.history.waste_file import EarlierWaste


class PublishedView:
    """All a request handler needs. Replaced as a whole; only the page's figures wait until somebody looks."""

    def __init__(
        self, view: ClusterView, metrics: Exposition, nodes: Exposition, stale: Exposition, read_at: float
    ) -> None:
        self.view = view
        self.metrics = metrics
        self.nodes = nodes
        """`/metrics/nodes`."""
        self.stale = stale
        """The cluster on itself only: what is served once the loop stands still."""
        self.read_at = read_at
        self._page: PageState | None = None
        self._making = threading.Lock()

    @property
    def page_is_ready(self) -> bool:
        return self._page is not None

    def page(self) -> PageState:
        """Made once: whoever asks meanwhile waits for it."""
        with self._making:
            if self._page is None:
                self._page = PageState.of(picture_of(self.view))
            return self._page


class Publisher:
    def __init__(
        self,
        settings: ViewSettings,
        prices: ReadPrices = no_prices,
        on_round: Callable[[ClusterView], None] | None = None,
    ) -> None:
        """`on_round`: is given the view at the end of every round, in place of anything being rendered of it."""
        self.settings = settings
        self._prices = prices
        self._on_round = on_round
        self.notes_beside: Callable[[], Sequence[str]] = tuple
        """What is not as it should be with what runs beside the rounds."""
        self._memory = Memory()
        self._labels = LabelMemory()
        self._earlier: SimpleQueue[EarlierWaste] = SimpleQueue()
        self._waste_is_whole = True

    def nothing_yet(self, wall: float) -> PublishedView:
        """Before the first round."""
        return self._render(ClusterView(self.settings, wall), float("-inf"))

    def forget(self, uuid: str) -> None:
        """A GPU that is away; from any thread."""
        self._memory.forgotten.add(uuid)

    def restore_waste(self, earlier: EarlierWaste) -> None:
        """Taken with the next publishing; from any thread."""
        self._earlier.put(earlier)
        self._waste_is_whole = False

    def waste(self) -> WasteStatement | None:
        """What was counted until the last round; None: without what was restored. For the thread that restores it."""
        return self._memory.wasted if self._waste_is_whole else None

    def publish(self, reading: ClusterReading, now: float, wall: float, whole_round: bool) -> PublishedView:
        """`whole_round`: a round has ended, and counts as one where rounds are counted."""
        if self._on_round is not None:
            view = assemble_use(reading, self._memory, self.settings, now, wall, self.notes_beside())
            if whole_round:
                self._on_round(view)
            return PublishedView(view, NO_METRICS, NO_METRICS, NO_METRICS, now)
        prices, notes = self._prices()
        notes = (*notes, *self.notes_beside())
        if not self._earlier.empty():
            self._memory.restore(self._earlier.get(), now, wall)
        view = assemble(
            reading, self._memory, self.settings, now, wall, prices=prices, notes=notes, whole_round=whole_round
        )
        if whole_round and self._earlier.empty():
            self._waste_is_whole = True
        return self._render(view, now)

    def _render(self, view: ClusterView, now: float) -> PublishedView:
        metrics = Exposition.of(encode(cluster_families(view, self._labels)))
        nodes = Exposition.of(encode(node_families(view, self._labels)))
        stale = Exposition.of(encode(self_families(view, self._labels)))
        self._labels.next_rendering()
        return PublishedView(view, metrics, nodes, stale, now)
