"""This module assembles an enricher as the options say: who reads the exposition, who tells the holders, and the file
between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from podgpu.agent.allocation_turn import AllocationTurn
from podgpu.atomic_file import AtomicFile
from podgpu.compose.agent import Naming
from podgpu.compose.allocations import Surroundings, make_holders
from podgpu.compose.servers import ApiAccess
from podgpu.compose.telemetries import open_telemetry
from podgpu.enrich.turn import Enricher, Held, Settings
from podgpu.errors import SourceError
from podgpu.fetch.exposition import ExpositionSource
from podgpu.isolate import Isolation
from podgpu.model import Device
from podgpu.telemetry.beside import DriverBeside
from podgpu.telemetry.exposition import ParsedExposition, parse_exposition

_DEADLINE = 5.0


def assemble_enricher(
    source: ExpositionSource,
    textfile: AtomicFile,
    settings: Settings,
    options: Mapping[str, Any],
    naming: Naming,
    at_the_end: ExitStack,
) -> Enricher:
    """Raises UsageError. What was opened is closed `at_the_end`."""
    api = ApiAccess(options["kubeconfig"])
    at_the_end.callback(api.close)
    driver = open_telemetry("nvml", options)
    with naming("allocation"):
        holders = make_holders(Surroundings(options, api, driver))
    isolation = Isolation()
    at_the_end.callback(isolation.close)
    turn = AllocationTurn(holders.sources, holders.identities, isolation, _DEADLINE, time.monotonic, holders.signs)
    at_the_end.callback(turn.close)
    return Enricher(_fetch(source, isolation), _holders(turn), textfile, settings, DriverBeside(driver))


def _fetch(source: ExpositionSource, isolation: Isolation) -> Callable[[], ParsedExposition]:
    """In a worker of its own: whatever hangs, a turn ends."""

    def fetch() -> ParsedExposition:
        result = isolation.run({"exporter": lambda: parse_exposition(source.fetch(), source.shown)}, _DEADLINE)[
            "exporter"
        ]
        if result.value is None:
            raise result.error or SourceError("bug", "no metrics and no reason")
        return result.value

    return fetch


def _holders(turn: AllocationTurn) -> Callable[[Sequence[Device]], Held]:
    def holders(devices: Sequence[Device]) -> Held:
        part = turn.collect(devices)
        shown = replace(part.allocation, assignments=turn.show(part.allocation.assignments))
        return Held(shown, part.outcomes, turn.errors)

    return holders
