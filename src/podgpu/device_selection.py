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
Ids = tuple[int, ...] | None  # an empty tuple selects all; None selects none


@dataclass(frozen=True, slots=True)
class Selection:
    """The devices of `-d`. A selected instance includes its GPU. Instances are numbered from 0 across all GPUs."""

    gpus: Ids = ()
    instances: Ids = ()

    def shows_gpu(self, number: int) -> bool:
        return self.gpus is not None and (not self.gpus or number in self.gpus)

    def shows_instance(self, number: int) -> bool:
        return self.instances is not None and (not self.instances or number in self.instances)

    def select(self, devices: Sequence[Device]) -> frozenset[str]:
        """Returns the keys of the devices to show. Ids of missing devices are ignored."""
        gpus, instances = _split(devices)
        shown = [d for number, d in enumerate(instances) if self.shows_instance(number)]
        whole = [g for g in gpus if self.gpus == () or (g.index is not None and self.shows_gpu(g.index))]
        return frozenset(d.key for d in (*whole, *shown)) | frozenset(d.uuid for d in shown)

    def without_numbered_instances(self) -> Selection:
        """Returns the selection to use for missing devices. Instances are numbered only while they are present."""
        return replace(self, instances=None) if self.instances else self

    def check(self, devices: Sequence[Device]) -> None:
        """Raises UsageError for selections that dcgm-exporter warns about, with advice."""
        gpus, instances = _split(devices)
        mig = [g.index or 0 for g in gpus if g.mig_enabled and g.key in self.select(devices)]
        if self.instances is None and mig:
            raise UsageError(
                f"-d {self}: GPU {few_of(mig)} is in MIG mode, in which pods use instances instead of GPUs; "
                "use -d f (everything) or -d i (instances)"
            )
        if self != Selection() and self.instances is not None and not any(g.mig_enabled for g in gpus):
            raise UsageError(
                f"-d {self}: no GPU of this node is in MIG mode, so there are no instances; use -d f or -d g"
            )
        for what, wanted, existing in (
            ("GPU", self.gpus, [g.index for g in gpus if g.index is not None]),
            ("MIG instance", self.instances, list(range(len(instances)))),
        ):
            if missing := [number for number in wanted or () if number not in existing]:
                raise UsageError(f"-d {self}: this node has no {what} {few_of(missing)}; it has {few_of(existing)}")

    def __str__(self) -> str:
        if self == Selection():
            return "f"
        chosen = ((letter, ids) for letter, ids in (("g", self.gpus), ("i", self.instances)) if ids is not None)
        return "+".join(f"{letter}:{','.join(map(str, ids))}" if ids else letter for letter, ids in chosen)


def parse_selection(text: str, option: str = "-d") -> Selection:
    """Parses the value of `-d`, or of `-s` and `-p`, which have the same syntax. Raises UsageError if it is invalid."""
    quoted = f"{option} {text!r}"
    parts = [_parse_part(part, option, quoted) for part in text.split("+")]
    kinds = [kind for kind, _ in parts]
    if len(parts) > 1 and sorted(kinds) != ["g", "i"]:
        raise UsageError(f"{quoted}: + can only join one g and one i, such as g:0+i:1 or g+i")
    if kinds == ["f"]:
        return Selection()
    ids: dict[str, Ids] = dict(parts)
    return Selection(ids.get("g"), ids.get("i"))


def _parse_part(text: str, option: str, quoted: str) -> tuple[str, tuple[int, ...]]:
    letters = _LETTERS[option]
    kind, colon, ids = text.partition(":")
    if kind not in letters:
        choices = ", ".join(f"{letter} ({what})" for letter, what in letters.items())
        both = "; g:0+i:1 selects GPUs and instances" if option == "-d" else ""
        raise UsageError(f"{quoted}: must start with one of {choices}, optionally followed by ids (g:0,2-4){both}")
    if not colon:
        return kind, ()
    if kind == "f":
        raise UsageError(f"{quoted}: f takes no ids; use {'g:' + ids!r} or {'i:' + ids!r}")
    return kind, tuple(sorted(set(_parse_ids(quoted, ids))))


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
