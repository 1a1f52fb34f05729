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


@dataclass(frozen=True, slots=True)
class Selection:
    kind: str = "f"  # f: GPUs and instances; g: whole GPUs; i: instances, with the GPU-level series of their GPUs
    ids: tuple[int, ...] = ()  # all if empty. Instances are numbered from 0 across all GPUs of the node
    also: Selection | None = None  # instances in addition to GPUs, as in g:0+i:1

    @property
    def parts(self) -> tuple[Selection, ...]:
        return (self,) if self.also is None else (replace(self, also=None), self.also)

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """Indices of the selected GPUs. Empty if all GPUs or any MIG instances are selected."""
        return self.ids if self.kind == "g" and self.also is None else ()

    @property
    def names_instances(self) -> bool:
        return any(part.kind == "i" for part in self.parts)

    def shows(self, kind: str, number: int) -> bool:
        """Returns True if the entity of this kind (g or i) and number is selected."""
        return any(
            part.kind == "f" or (part.kind == kind and (not part.ids or number in part.ids)) for part in self.parts
        )

    def check(self, devices: Sequence[Device]) -> None:
        """Raises UsageError for selections that dcgm-exporter warns about, with advice."""
        for part in self.parts:
            part._check_ids(devices)
        mig = [d.index or 0 for d in devices if not d.is_instance and d.mig_enabled and d.key in self.select(devices)]
        if self.kind == "g" and self.also is None and mig:
            raise UsageError(
                f"-d {self}: GPU {few_of(mig)} is in MIG mode, in which pods use instances instead of GPUs; "
                "use -d f (everything) or -d i (instances)"
            )

    def _check_ids(self, devices: Sequence[Device]) -> None:
        gpus, instances = _split(devices)
        if self.kind == "i" and not any(g.mig_enabled for g in gpus):
            raise UsageError(
                f"-d {self}: no GPU of this node is in MIG mode, so there are no instances; use -d f or -d g"
            )
        existing = [g.index for g in gpus if g.index is not None] if self.kind == "g" else list(range(len(instances)))
        missing = [i for i in self.ids if i not in existing]
        if missing:
            what = "GPU" if self.kind == "g" else "MIG instance"
            raise UsageError(f"-d {self}: this node has no {what} {few_of(missing)}; it has {few_of(existing)}")

    def select(self, devices: Sequence[Device]) -> frozenset[str]:
        """Returns the keys of the devices to show. Ids of missing devices are ignored."""
        gpus, instances = _split(devices)
        if self.also is not None:
            return frozenset().union(*(part.select(devices) for part in self.parts))
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
    quoted = f"{option} {text!r}"
    parts = [_parse_part(part, option, quoted) for part in text.split("+")]
    if len(parts) == 1:
        return parts[0]
    by_kind = {part.kind: part for part in parts}
    if by_kind.keys() != {"g", "i"} or len(parts) != 2:
        raise UsageError(f"{quoted}: + can only join one g and one i, such as g:0+i:1 or g+i")
    return replace(by_kind["g"], also=by_kind["i"])


def _parse_part(text: str, option: str, quoted: str) -> Selection:
    letters = _LETTERS[option]
    kind, colon, ids = text.partition(":")
    if kind not in letters:
        choices = ", ".join(f"{letter} ({what})" for letter, what in letters.items())
        both = "; g:0+i:1 selects GPUs and instances" if option == "-d" else ""
        raise UsageError(f"{quoted}: must start with one of {choices}, optionally followed by ids (g:0,2-4){both}")
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
                "after a single letter (g or i)"
            )
        first, last = int(m[1]), int(m[2] or m[1])
        if last < first:
            raise UsageError(f"{quoted}: the range {part} is reversed; write {last}-{first}")
        numbers.extend(range(first, last + 1))
    return numbers


def _split(devices: Sequence[Device]) -> tuple[list[Device], list[Device]]:
    return [d for d in devices if not d.is_instance], [d for d in devices if d.is_instance]
