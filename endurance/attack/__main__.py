"""`python -m endurance.attack [--minutes 30]`: everything at once; a table; exit code 1 when a claim does not hold."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.figures import Figure, any_missed, heading, row
from endurance.attack import crude, hostile, secure, slow, strangers
from endurance.attack.attackers import NICE, Aim, Attack, Attacker
from endurance.attack.checks import ClusterCheck, ExporterCheck, check_nothing
from endurance.attack.scraper import Check, Scraper
from endurance.attack.victims import LOGIN, SCRAPE_SECONDS, Victim, Victims, beside, victims, wait_until_well

MOST_MS = 50.0
MOST_LOG = 1_000_000
_LOOK_EVERY = 2.0
FAMILIES: dict[str, tuple[Attack, bool]] = {
    "silent connections": (slow.silent, True),
    "one byte a second": (slow.one_byte_a_second, True),
    "answers nobody reads": (slow.nobody_reads, True),
    "bodies that never end": (slow.no_body, False),
    "headers of a megabyte": (crude.huge_headers, True),
    "connections beyond the descriptors": (crude.every_descriptor, True),
    "garbage": (crude.garbage, True),
    "wrong logins": (strangers.wrong_logins, True),
    "cross-site releases": (strangers.cross_site, False),
}
"""What is done to the exporter; True: to the cluster view as well."""
OVER_TLS: dict[str, Attack] = {"handshakes that do not end": secure.handshakes, "attacks inside TLS": secure.inside}
"""What is done to the exporter and the cluster view that speak TLS."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m endurance.attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--most-ms", type=float, default=MOST_MS, help="of waiting for a scrape")
    parser.add_argument("--logs", type=Path, help="keep all logs in this folder")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="only this attack, or hostile exposition; repeatable"
    )
    parser.add_argument("--well", action="store_true", help="GPUs and kubelet have no faults")
    options = parser.parse_args(arguments)
    known = (*FAMILIES, *OVER_TLS, *hostile.PATHS, "nothing")
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    figures, wrong = attack(options.minutes * 60.0, options.most_ms, options.only, options.well, options.logs)
    print(heading())
    for figure in figures:
        print(row(figure))
    for line in wrong:
        print(line)
    return 1 if any_missed(figures) else 0


def attack(
    seconds: float,
    most_ms: float = MOST_MS,
    only: Sequence[str] | None = None,
    well: bool = False,
    logs: Path | None = None,
    nice: int = NICE,
    scrape_seconds: float = SCRAPE_SECONDS,
) -> tuple[list[Figure], list[str]]:
    """The table, and what was wrong with scrapes. `only`: names of attacks; None: all of them. `nice`: how far the
    attackers give way to their victims. `scrape_seconds`: how long the cluster views wait for an exposition."""
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder, ExitStack() as stack:
        port, *ports = stack.enter_context(beside("endurance.attack.hostile"))
        (bystander,) = stack.enter_context(beside("endurance.attack.bystander"))
        chosen = [f"http://127.0.0.1:{port}/{path}" for path in hostile.PATHS if only is None or path in only]
        named = zip(hostile.DISCOVERED, ports, strict=True)
        discovered = [port for path, port in named if only is None or path in only]
        attacked = stack.enter_context(victims(Path(folder), chosen, discovered, well, scrape_seconds))
        scrapers = list(_scrapers(attacked, well))
        control = Scraper("a bystander", bystander, "/", None, check_nothing)
        attackers = list(_attackers(attacked, seconds, only, nice))
        for attacker in attackers:
            attacker.prepare()
        for victim, scraper in zip(attacked, scrapers, strict=False):  # behind these come those of the probes
            wait_until_well(victim, scraper.check)
        taking_part: list[Scraper | Attacker] = [*attackers, control, *scrapers]
        for worker in taking_part:
            worker.start()
        peaks = _watch(attacked, seconds)
        for worker in taking_part:
            worker.stop()
        figures = [
            *_figures(scrapers, attackers, attacked, peaks, most_ms),
            Figure("a bystander, whom nobody attacks: waited, the longest", control.percentile(1.0), "ms"),
        ]
        _keep_logs(attacked, logs)
    wrong = [
        f"{s.name_of}: {what}, {n} times, first at {s.examples[what]}" for s in scrapers for what, n in s.wrong.items()
    ]
    return figures, wrong


def _scrapers(attacked: Victims, well: bool) -> Iterator[Scraper]:
    checks: tuple[Check, ...] = (ExporterCheck(well), ClusterCheck(), ExporterCheck(well), ClusterCheck())
    for victim, check in zip(attacked, checks, strict=True):
        yield Scraper(f"the {victim.name}", victim.port, "/metrics", LOGIN, check, victim.authority)
    for victim in attacked:
        yield Scraper(f"the {victim.name}'s probe", victim.probe_port, "/livez", None, check_nothing)


def _attackers(attacked: Victims, seconds: float, only: Sequence[str] | None, nice: int) -> Iterator[Attacker]:
    for name, (family, both) in FAMILIES.items():
        if only is None or name in only:
            for victim in (attacked.exporter, attacked.cluster)[: 2 if both else 1]:
                yield Attacker(f"{name}, {victim.name}", family, Aim(victim.port, LOGIN.header), seconds, nice)
    for name, family in OVER_TLS.items():
        if only is None or name in only:
            for victim in (attacked.secure_exporter, attacked.secure_cluster):
                aim = Aim(victim.port, LOGIN.header, victim.authority)
                yield Attacker(f"{name}, {victim.name}", family, aim, seconds, nice)


def _watch(attacked: Sequence[Victim], seconds: float) -> dict[str, float]:
    """The most memory each was seen to have; one that ended has endlessly much."""
    peaks = {victim.name: 0.0 for victim in attacked}
    pause, until = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < until:
        pause.wait(min(_LOOK_EVERY, max(0.0, until - time.monotonic())))
        for victim in attacked:
            try:
                peaks[victim.name] = max(peaks[victim.name], victim.vitals(0.0).peak)
            except (OSError, KeyError):  # it has ended: no status, or none of a process that lives
                peaks[victim.name] = float("inf")
    return peaks


def _figures(
    scrapers: Sequence[Scraper],
    attackers: Sequence[Attacker],
    attacked: Sequence[Victim],
    peaks: dict[str, float],
    most_ms: float,
) -> list[Figure]:
    found = [Figure(attacker.name, attacker.made, "", at_least=1) for attacker in attackers]
    for scraper in scrapers:
        found += [
            Figure(f"{scraper.name_of}: scrapes", scraper.scrapes, "", at_least=1),
            Figure(f"{scraper.name_of}: wrong or unanswered", scraper.wrong.total(), "times", at_most=0),
            Figure(f"{scraper.name_of}: waited, half of them", scraper.percentile(0.5), "ms"),
            Figure(f"{scraper.name_of}: waited, 99 of 100", scraper.percentile(0.99), "ms"),
            Figure(f"{scraper.name_of}: waited, the longest", scraper.percentile(1.0), "ms", at_most=most_ms),
        ]
    for victim in attacked:
        found += [
            Figure(f"{victim.name}: memory at its most", peaks[victim.name], "MiB", at_most=victim.limit),
            Figure(f"{victim.name}: log", victim.log_bytes, "bytes", at_most=MOST_LOG),
            Figure(f"{victim.name}: ended", float(not victim.is_alive), "times", at_most=0),
        ]
    return found


def _keep_logs(attacked: Sequence[Victim], folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for victim in attacked:
            (folder / victim.log.name).write_bytes(victim.log.read_bytes()[: 4 * MOST_LOG])


if __name__ == "__main__":
    sys.exit(main())
