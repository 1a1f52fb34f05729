"""This module has the shape of what is printed: families of samples, each with its labels. It imports nothing of podgpu
nor of the world.

The join makes them, the encoder writes them as text, and any other way out reads them too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Labels:
    """An ordered set of label pairs with its escaped text, computed once and shared by every sample that carries it."""

    __slots__ = ("pairs", "text")

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.pairs: tuple[tuple[str, str], ...] = tuple(pairs)
        inner = ",".join(f'{name}="{escape_label(value)}"' for name, value in self.pairs)
        self.text = "{" + inner + "}" if inner else ""

    def __repr__(self) -> str:
        return f"Labels{self.text}"

    def plus(self, *more: tuple[str, str]) -> Labels:
        return Labels((*self.pairs, *more))


def escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


NO_LABELS = Labels(())


class Sample(NamedTuple):  # made by the thousand in every rendering: a tuple costs a third of a frozen dataclass
    labels: Labels
    value: int | float


class Family(NamedTuple):
    """One metric family as it will be printed. `dcgm_numbers`: floats with six decimals, as dcgm-exporter does."""

    name: str
    type: str
    help: str
    samples: tuple[Sample, ...]
    dcgm_numbers: bool = False
