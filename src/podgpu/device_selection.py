"""Parses dcgm-exporter's device strings: the GPUs and MIG instances (`-d`), switches (`-s`) and CPUs (`-p`) to show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from podgpu.errors import UsageError, few_of
from podgpu.model import Device

_LETTERS = {
    "-d": {"f": "all GPUs, and their MIG instances", "g": "GPUs", "i": "MIG instances"},
    "-s": {"f": "all NVSwitches, and their links", "g": "NVSwitches", "i": "links"},
    "-p": {"f": "all CPUs, and their cores", "g": "CPUs", "i": "cores"},
}
_MAX_IDS = 4096
_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Selection:
    kind: str = "f"  # f: GPUs and instances; g: whole GPUs; i: instances, with the GPU-level series of their GPUs
    ids: tuple[int, ...] = ()  # empty: all. Instances are numbered from 0 over the node, GPU by GPU
    also: Selection | None = None  # instances in addition to GPUs, as in g:0+i:1

    @property
    def parts(self) -> tuple[Selection, ...]:
        return (self,) if self.also is None else (replace(self, also=None), self.also)

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """Numbers of the selected GPUs; empty if others may be selected, too."""
        return self.ids if self.kind == "g" and self.also is None else ()

    @property
    def names_instances(self) -> bool:
        return any(part.kind == "i" for part in self.parts)

    def shows(self, kind: str, number: int) -> bool:
        """Returns True if the entity of this kind (g or i) and number is selected."""
        return any(
            part.kind == "f" or (part.kind == kind and (not part.ids or number in part.ids)) for part in self.parts
        )

    @property
    def shown(self) -> str:
        """For messages."""
        return _cut(str(self))

    def check(self, devices: Sequence[Device]) -> None:
        """Raises UsageError for selections that dcgm-exporter warns about, with advice."""
        for part in self.parts:
            part._check_ids(devices)
        mig = [d.index or 0 for d in devices if not d.is_instance and d.mig_enabled and d.key in self.of(devices)]
        if self.kind == "g" and self.also is None and mig:
            raise UsageError(
                f"-d {self.shown}: GPU {few_of(mig)} is in MIG mode, where pods use instances instead of GPUs; "
                "use -d f (everything) or -d i (instances)"
            )

    def _check_ids(self, devices: Sequence[Device]) -> None:
        gpus, instances = _split(devices)
        if self.kind == "i" and not any(g.mig_enabled for g in gpus):
            raise UsageError(f"-d {self.shown}: no GPU here is in MIG mode, so it has no instances; use -d f or -d g")
        known = [g.index for g in gpus if g.index is not None] if self.kind == "g" else list(range(len(instances)))
        missing = [i for i in self.ids if i not in known]
        if missing:
            what = "GPU" if self.kind == "g" else "MIG instance"
            raise UsageError(f"-d {self.shown}: no such {what} here: {few_of(missing)}; there are {few_of(known)}")

    def of(self, devices: Sequence[Device]) -> frozenset[str]:
        """Returns the keys of the devices to show. Missing GPUs are ignored at run time."""
        gpus, instances = _split(devices)
        if self.also is not None:
            return frozenset().union(*(part.of(devices) for part in self.parts))
        if self.kind == "f":
            return frozenset(d.key for d in devices)
        if self.kind == "g":
            return frozenset(g.key for g in gpus if not self.ids or g.index in self.ids)
        shown = [d for n, d in enumerate(instances) if not self.ids or n in self.ids]
        return frozenset(d.key for d in shown) | frozenset(d.uuid for d in shown)

    def __str__(self) -> str:
        first = f"{self.kind}:{','.join(map(str, self.ids))}" if self.ids else self.kind
        return first if self.also is None else f"{first}+{self.also}"


def parse_selection(text: str, option: str = "-d") -> Selection:
    """Parses the value of `-d`, or of `-s` and `-p`, which have the same syntax. Raises UsageError."""
    quoted = f"{option} {_cut(text)!r}"
    parts = [_parse_part(part, option, quoted) for part in text.split("+")]
    if len(parts) == 1:
        return parts[0]
    by_kind = {part.kind: part for part in parts}
    if by_kind.keys() != {"g", "i"} or len(parts) != 2:
        raise UsageError(f"{quoted}: + stands between one g and one i, each with or without ids, such as g:0+i:1")
    return replace(by_kind["g"], also=by_kind["i"])


def _parse_part(text: str, option: str, quoted: str) -> Selection:
    letters = _LETTERS[option]
    kind, colon, ids = text.partition(":")
    if kind not in letters:
        known = ", ".join(f"{letter} ({what})" for letter, what in letters.items())
        raise UsageError(f"{quoted}: starts with one of {known}, then optionally :ids such as g:0,2-4; g:0+i:1 is both")
    if not colon:
        return Selection(kind)
    if kind == "f":
        raise UsageError(f"{quoted}: f takes no ids; use {'g:' + ids!r} or {'i:' + ids!r}")
    return Selection(kind, tuple(sorted(set(_parse_ids(quoted, ids)))))


def _parse_ids(quoted: str, ids: str) -> list[int]:
    numbers: list[int] = []
    for part in ids.split(","):
        m = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if m is None:
            raise UsageError(
                f"{quoted}: {part!r} is not an id; ids are numbers and ranges without spaces, such as 0,2-4, "
                "and one letter (g or i) stands in front of all of them"
            )
        first, last = int(m[1]), int(m[2] or m[1])
        if last < first:
            raise UsageError(f"{quoted}: the range {part} runs backwards; write {last}-{first}")
        numbers.extend(range(first, last + 1))
        if len(numbers) > _MAX_IDS:
            raise UsageError(f"{quoted}: more than {_MAX_IDS} ids")
    return numbers


def _split(devices: Sequence[Device]) -> tuple[list[Device], list[Device]]:
    return [d for d in devices if not d.is_instance], [d for d in devices if d.is_instance]


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
