"""Parses dcgm-exporter's options that select GPUs and MIG instances (`-d`), switches (`-s`) and
CPUs (`-p`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from podgpu.errors import UsageError, few_of
from podgpu.model import Device

_IDS = r"[0-9]{1,5}(?:-[0-9]{1,5})?"
_PART = re.compile(rf"([fgi])(?::({_IDS}(?:,{_IDS})*))?")
Ids = tuple[int, ...] | None  # an empty tuple selects all devices; None selects none


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected devices. A selected MIG instance also selects its GPU. Instances are numbered
    per node, from 0.
    """

    gpus: Ids = ()
    instances: Ids = ()

    def shows_gpu(self, number: int) -> bool:
        return self.gpus is not None and (not self.gpus or number in self.gpus)

    def shows_instance(self, number: int) -> bool:
        return self.instances is not None and (not self.instances or number in self.instances)

    def select(self, devices: Sequence[Device]) -> frozenset[str]:
        """Returns the keys of the selected devices. Ignores ids of devices that do not exist."""
        gpus, instances = _split(devices)
        shown = [d for number, d in enumerate(instances) if self.shows_instance(number)]
        whole = [
            g for g in gpus if self.gpus == () or (g.index is not None and self.shows_gpu(g.index))
        ]
        return frozenset(d.key for d in (*whole, *shown)) | frozenset(d.uuid for d in shown)

    def without_numbered_instances(self) -> Selection:
        """Returns the selection without instance numbers, which may change when GPUs disappear."""
        return replace(self, instances=None) if self.instances else self

    def check(self, devices: Sequence[Device]) -> None:
        """Raises UsageError if a selected device does not exist."""
        gpus, instances = _split(devices)
        for what, wanted, existing in (
            ("GPU", self.gpus, [g.index for g in gpus if g.index is not None]),
            ("MIG instance", self.instances, list(range(len(instances)))),
        ):
            if missing := [number for number in wanted or () if number not in existing]:
                raise UsageError(
                    f"-d {self}: this node has no {what} {few_of(missing)}; it has "
                    f"{few_of(existing)}"
                )

    def __str__(self) -> str:
        if self == Selection():
            return "f"
        chosen = (
            (letter, ids)
            for letter, ids in (("g", self.gpus), ("i", self.instances))
            if ids is not None
        )
        return "+".join(
            f"{letter}:{','.join(map(str, ids))}" if ids else letter for letter, ids in chosen
        )


def parse_selection(text: str, option: str = "-d") -> Selection:
    """Parses the value of `-d`, `-s` or `-p`. Raises UsageError if the value is invalid."""
    parts = [_PART.fullmatch(part) for part in text.split("+")]
    ids: dict[str, Ids] = {part[1]: _parse_ids(part[2] or "") for part in parts if part is not None}
    if text == "f":
        return Selection()
    if (
        len(ids) < len(parts)
        or "f" in ids
        or any(part is not None and part[2] and not ids[part[1]] for part in parts)
    ):
        raise UsageError(
            f"{option} {text!r}: write f (everything), g (GPUs, NVSwitches or CPUs), i (MIG "
            "instances, links or cores)"
            " or g+i; g and i may have ids and ascending ranges without spaces, such as g:0,2-4+i:1"
        )
    return Selection(ids.get("g"), ids.get("i"))


def _parse_ids(text: str) -> tuple[int, ...]:
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def _split(devices: Sequence[Device]) -> tuple[list[Device], list[Device]]:
    return [d for d in devices if not d.is_instance], [d for d in devices if d.is_instance]
