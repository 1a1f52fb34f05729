"""WasteWatch looks every few seconds at what an agent published, and counts what is held and idle on this node."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from podgpu.agent.loop import Agent
from podgpu.clock import Faults
from podgpu.errors import StartError

if TYPE_CHECKING:  # loaded when it is first looked, so that an exporter comes up soon
    from podgpu.figures.prices import ReadPrices
    from podgpu.figures.waste import WasteLedger, WasteStatement
    from podgpu.figures.waste_rows import Source
    from podgpu.history.waste_file import EarlierWaste

LOOK_SECONDS = 5.0
LOOKS_MISSED = 3
"""After so many, nobody knows what was between: a machine that slept was not idle."""
_STOP_SECONDS = 2.0
_SAY_SECONDS = 3600.0
_log = logging.getLogger(__name__)


class WasteWatch:
    """Runs beside the agent; a part of what is served."""

    def __init__(self, agent: Agent, prices: ReadPrices | None = None) -> None:
        self.fatal: StartError | None = None
        self._agent = agent
        self._prices = prices
        self._ledger: WasteLedger | None = None
        self._since: float | None = None
        """Monotonic time of the first look, or what stands for it of an earlier podgpu."""
        self._told: tuple[WasteStatement, Source] | None = None
        self._looking = threading.Lock()
        self._faults: Faults[str] = Faults(agent.clock.monotonic, _SAY_SECONDS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> tuple[WasteStatement, Source]:
        """Counts from the last look to this one. What is too old to be shown is too old to be counted."""
        from podgpu.figures.from_state import view_of_state
        from podgpu.figures.prices import PriceTags, no_prices
        from podgpu.figures.waste import WasteLedger, holdings
        from podgpu.figures.waste_rows import Source

        with self._looking:
            agent, published = self._agent, self._agent.published
            ledger = self._ledger = self._ledger or WasteLedger()
            now, wall = agent.clock.monotonic(), agent.clock.wall()
            self._since = now if self._since is None else self._since
            prices, _ = (self._prices or no_prices)()
            view = view_of_state(published.state, "")
            if agent.is_fresh(published):
                tags = PriceTags(prices) if prices.currency else None
                found = holdings("", view.devices, set(), now, tags=tags)
                longest = max(agent.settings.stale_after, LOOKS_MISSED * LOOK_SECONDS)
                ledger.turn(found, now, longest, prices=prices)
            statement = ledger.statement(now, wall, self._since + wall - now)
            self._told = statement, Source(prices.source if prices.currency else "", view.simulated)
            return self._told

    def restore(self, earlier: EarlierWaste) -> None:
        """Goes on from what was counted before podgpu was started anew; from any thread."""
        from podgpu.figures.waste import WasteLedger

        with self._looking:
            now, wall = self._agent.clock.monotonic(), self._agent.clock.wall()
            ledger = self._ledger = self._ledger or WasteLedger()
            ledger.restore(earlier.statement, earlier.written_at, now, wall)
            self._told = None
            since = earlier.statement.counting_since
            if since is not None:
                self._since = min(since - wall + now, now if self._since is None else self._since)

    def wasted(self) -> tuple[WasteStatement, Source]:
        """What was counted until now."""
        return self._told or self.look()

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, on_fatal: Callable[[], object]) -> None:
        del on_fatal  # whatever goes wrong here is no reason to end
        self._thread = threading.Thread(target=self._turns, name="waste", daemon=True)
        self._thread.start()

    def _turns(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - the edge: figures are served without this too
                if self._faults.fails("bug", "bug"):
                    _log.exception("unexpected error while counting waste, please report it; podgpu goes on")

    def reload(self) -> None:
        """Prices are read again with every look."""

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
