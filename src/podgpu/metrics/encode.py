"""Reads the definitions of podgpu's metric families, and encodes families in text format 0.0.4.

The definitions are in families.csv. The metrics reference in docs is generated from it.
"""

from __future__ import annotations

import math
import platform
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from typing import NamedTuple

from podgpu import __version__
from podgpu.metrics.fields import table_rows
from podgpu.model import Pairs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# the fastest level, because the first scrape waits; metrics text shrinks 20:1 even so
_GZIP_LEVEL = 1
_GZIP_FORMAT = 16 + zlib.MAX_WBITS


WASTE_KINDS = ("idle", "underused")


class Labels:
    """Ordered label pairs with their escaped text. Samples with equal labels share an object."""

    __slots__ = ("pairs", "text")

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.pairs: Pairs = tuple(pairs)
        self.text = ""
        if self.pairs:
            texts = [f'{name}="{_escape_label(value)}"' for name, value in self.pairs]
            self.text = "{" + ",".join(texts) + "}"


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


NO_LABELS = Labels(())
# for *_build_info
VERSIONS = Labels((("version", __version__), ("python_version", platform.python_version())))


class Sample(NamedTuple):  # a tuple is three times as fast to create as a frozen dataclass
    labels: Labels
    value: int | float
    counted_since: float | None = None  # of a counter: Unix time at which it was 0, if known


class Family(NamedTuple):
    name: str
    type: str
    help: str
    samples: tuple[Sample, ...]
    dcgm_numbers: bool = False  # print floats with six decimals, as dcgm-exporter does


# Definitions


@dataclass(frozen=True, slots=True)
class FamilySpec:
    name: str
    type: str
    help: str
    labels: tuple[str, ...]
    # the struct in `NodeState` with the values, such as `node` or `holder_usage`; empty if none
    part: str = ""
    # name of the struct's field; `{label}` in the name is replaced by the value of that label
    member: str = ""
    # multiplier that converts the sample's value to the field's integer value; 1 for counts and
    # bytes; 0 if the field is a float
    factor: int = 0
    # True if the field is a text; texts are exported as a label with the field's name
    is_text: bool = False

    def of(self, samples: Iterable[Sample]) -> Family:
        return Family(self.name, self.type, self.help, tuple(samples))

    def list_members(self) -> list[tuple[str, Pairs]]:
        """Returns the fields of the struct, and the label that tells them apart."""
        if "{kind}" not in self.member:
            return [(self.member, ())]
        return [(self.member.format(kind=kind), (("kind", kind),)) for kind in WASTE_KINDS]


@cache
def families_in(group: str) -> Mapping[str, FamilySpec]:
    """Returns the families of one group in families.csv by name, in file order."""
    families = {}
    for row in table_rows("families.csv"):
        if row["group"] != group:
            continue
        name = row["name"]
        factor = row["factor"]
        families[name] = FamilySpec(
            name,
            row["type"],
            row["help"],
            tuple(row["labels"].split()),
            row["part"],
            row["member"],
            factor=int(factor) if factor.isdecimal() else 0,
            is_text=factor == "label",
        )

    return families


def make_families(group: str, samples: Mapping[str, Iterable[Sample]]) -> list[Family]:
    """Creates one family per key of `samples`: the name of a family in this group."""
    specs = families_in(group)
    return [specs[name].of(own_samples) for name, own_samples in samples.items()]


# Text


def encode(families: Iterable[Family]) -> bytes:
    """Encodes the families in format 0.0.4. Families without samples are omitted."""
    lines = []
    for family in families:
        if family.samples:
            lines.append(_head(family.name, family.type, family.help))
            lines += _dcgm_lines(family) if family.dcgm_numbers else _plain_lines(family)
    return "".join(lines).encode()


@lru_cache(maxsize=2048)
def _head(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {escape_help(help_text)}\n# TYPE {name} {kind}\n"


def escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _dcgm_lines(family: Family) -> list[str]:
    name = family.name
    return [
        f"{name}{labels.text} {value:.6f}\n"
        if value.__class__ is float
        else f"{name}{labels.text} {value}\n"
        for labels, value, _ in family.samples
    ]


def _plain_lines(family: Family) -> list[str]:
    name = family.name
    return [
        f"{name}{labels.text} {format_float(value) if value.__class__ is float else value}\n"
        for labels, value, _ in family.samples
    ]


def format_float(value: float) -> str:
    """Returns the shortest text that parses to the same number."""
    if math.isfinite(value):
        return repr(value)
    if math.isnan(value):
        return "NaN"
    if value > 0:
        return "+Inf"
    return "-Inf"


# Response bodies


class Body:
    def __init__(self, plain: bytes) -> None:
        self.plain = plain
        self.zipped = zlib.compress(plain, _GZIP_LEVEL, wbits=_GZIP_FORMAT)


NO_METRICS = Body(b"")


def etag_of(plain: bytes) -> str:
    """Returns a weak ETag, which is the same for the plain and the compressed body."""
    return f'W/"{blake2b(plain, digest_size=12).hexdigest()}"'
