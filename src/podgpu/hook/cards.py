"""This module says how this node numbers its GPUs, as the kernel driver tells it: by minor (/dev/nvidiaN), index (PCI
order) and UUID.

koordinator writes minors where the container toolkit reads indices. This needs no driver library, and no GPU in the
container: /proc/driver/nvidia is the same in every one. A driver that hangs hangs the thread here, and nobody else.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from podgpu.errors import SourceError, few_of
from podgpu.files import read_bounded

_log = logging.getLogger("podgpu")
_MOST_BYTES = 64 * 1024
_PCI_NAME = re.compile(r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
# Of a GPU that nobody opened yet the driver writes question marks.
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$", re.MULTILINE | re.IGNORECASE)
_MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,6})\s*$", re.MULTILINE)
_EXCLUDED = re.compile(r"^GPU Excluded:\s*Yes\s*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    uuid: str
    """Empty: not told yet."""
    minor: int | None


@dataclass(frozen=True)
class Cards:
    """In order of their indices. None at all: this node's driver tells nothing."""

    cards: tuple[Card, ...] = ()

    @cached_property
    def _by_minor(self) -> dict[int, str]:
        return {card.minor: card.uuid for card in self.cards if card.minor is not None and card.uuid}

    def of_minor(self, minor: int) -> str:
        """Its UUID; where that is not known the number, which readers of podlist.json take for a minor."""
        return self._by_minor.get(minor, str(minor))

    def of_index(self, index: int) -> str:
        """Its UUID; the number where that is not known: on most nodes minors and indices are the same."""
        known = self.cards[index].uuid if index < len(self.cards) else ""
        return known or str(index)

    @property
    def uuids(self) -> tuple[str, ...]:
        """Of all; empty when one of them is not known."""
        uuids = tuple(card.uuid for card in self.cards)
        return uuids if all(uuids) else ()

    @property
    def numbers_differ(self) -> bool:
        return any(card.minor not in (None, index) for index, card in enumerate(self.cards))

    @property
    def said(self) -> str:
        return few_of(f"minor {card.minor} is index {index}" for index, card in enumerate(self.cards))


def read_cards(proc: str) -> Cards:
    """From /proc/driver/nvidia/gpus: a directory for each GPU, named by its place on the PCI bus."""
    root = os.path.join(proc, "driver", "nvidia", "gpus")
    try:
        places = sorted((name for name in os.listdir(root) if _PCI_NAME.fullmatch(name)), key=_bus_order)
    except OSError:
        return Cards()
    texts = (_information(os.path.join(root, place, "information")) for place in places)
    return Cards(tuple(parse_card(text) for text in texts if not _EXCLUDED.search(text)))


def _bus_order(place: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split(r"[:.]", place))


def _information(path: str) -> str:
    try:
        return read_bounded(path, _MOST_BYTES).decode(errors="replace")
    except SourceError:
        return ""


def parse_card(text: str) -> Card:
    uuid, minor = _UUID.search(text), _MINOR.search(text)
    return Card(uuid[1] if uuid else "", int(minor[1]) if minor else None)


class CardsWatch:
    """Reads the cards again and again in a thread of its own; `cards` is what it read last."""

    def __init__(self, read: Callable[[], Cards], changed: Callable[[], object], every: float = 10.0) -> None:
        self.cards = Cards()
        self._read = read
        self._changed = changed
        self._every = every
        self._was_read = threading.Event()
        self._ending = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="hook-cards", daemon=True).start()

    def wait_read(self, seconds: float) -> None:
        """Until they were read once, but no longer than that."""
        self._was_read.wait(seconds)

    def stop(self) -> None:
        self._ending.set()

    def _watch(self) -> None:
        while not self._ending.is_set():
            cards = self._read()
            if cards != self.cards:
                self.cards = cards
                if cards.numbers_differ:
                    _log.warning("on this node minors and indices of GPUs differ (%s)", cards.said)
                self._changed()
            self._was_read.set()
            self._ending.wait(self._every)
