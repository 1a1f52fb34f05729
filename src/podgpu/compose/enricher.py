"""This module assembles an enricher as the options say: who reads the exposition, who tells the holders, and the file
between; and has it take its turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from podgpu.agent.allocation_turn import AllocationTurn, replace_uids
from podgpu.clock import Clock
from podgpu.compose.agent import Naming, Options
from podgpu.compose.allocations import make_holders
from podgpu.compose.process import stop_on_signal
from podgpu.compose.servers import ApiAccess
from podgpu.compose.telemetries import open_telemetry
from podgpu.enrich.enricher import Enricher, EnrichSettings, HolderResult
from podgpu.errors import SourceError
from podgpu.files import AtomicFile, OutputError
from podgpu.gpu.companion import CompanionDriver
from podgpu.gpu.exposition import ParsedExposition, parse_exposition
from podgpu.gpu.exposition_source import ExpositionSource
from podgpu.model import Device
from podgpu.workers import Workers

_DEADLINE = 5.0


@contextmanager
def opened_enricher(
    source: ExpositionSource, textfile: AtomicFile, settings: EnrichSettings, options: Options, naming: Naming
) -> Iterator[Enricher]:
    """Raises UsageError."""
    with ExitStack() as at_the_end:
        api = ApiAccess(options["kubeconfig"])
        at_the_end.callback(api.close)
        driver = open_telemetry("nvml", options)
        with naming("allocation"):
            holders = make_holders(options, api, driver)
        isolation = Workers()
        at_the_end.callback(isolation.close)
        turn = AllocationTurn(holders.sources, holders.identities, isolation, _DEADLINE, Clock(), holders.liveness)
        at_the_end.callback(turn.close)
        yield Enricher(_fetch(source, isolation), _holders(turn), textfile, settings, CompanionDriver(driver))


def run_enricher(enricher: Enricher, interval: float) -> None:
    """Until SIGTERM or SIGINT. The file stays: node_textfile_mtime_seconds tells its age."""
    stopping = stop_on_signal()
    due = time.monotonic()
    while not stopping.is_set():
        with suppress(SourceError, OutputError):  # noted where it happened; the next turn tries again
            enricher.turn()
        due = max(due + interval, time.monotonic())
        stopping.wait(due - time.monotonic())


def _fetch(source: ExpositionSource, isolation: Workers) -> Callable[[], ParsedExposition]:
    """In a worker of its own: whatever hangs, a turn ends."""

    def fetch() -> ParsedExposition:
        result = isolation.run({"exporter": lambda: parse_exposition(source.fetch(), source.shown)}, _DEADLINE)[
            "exporter"
        ]
        if result.value is None:
            raise result.error or SourceError("bug", "no metrics and no reason")
        return result.value

    return fetch


def _holders(turn: AllocationTurn) -> Callable[[Sequence[Device]], HolderResult]:
    def holders(devices: Sequence[Device]) -> HolderResult:
        part = turn.collect(devices)
        assignments = replace_uids(part.assignments, part.api_uids)
        return HolderResult(assignments, part.unmapped, part.sources, Counter(part.errors))

    return holders
