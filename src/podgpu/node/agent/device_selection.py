"""Parses dcgm-exporter's options that select devices.

`-d` selects GPUs and MIG instances, `-s` selects switches, and `-p` selects CPUs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from podgpu.errors import UsageError, few_of
from podgpu.model import Device

_log = logging.getLogger("podgpu")
_IDS = r"[0-9]{1,5}(?:-[0-9]{1,5})?"
_PART = re.compile(rf"([gi])(?::({_IDS}(?:,{_IDS})*))?")
Ids = tuple[int, ...] | None  # an empty tuple selects all devices; None selects none


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected devices. A selected MIG instance also selects its GPU.

    Instances are numbered per node, from 0.
    """

    gpus: Ids = ()
    instances: Ids = ()

    def shows_gpu(self, number: int | None) -> bool:
        return self.gpus is not None and (not self.gpus or number in self.gpus)

    def shows_instance(self, number: int) -> bool:
        return self.instances is not None and (not self.instances or number in self.instances)

    def includes_parts_of(self, number: int) -> bool:
        """Returns whether links of this switch, or cores of this CPU, may be selected.

        `g:0+i` selects only links of switch 0. `i` selects links of all switches.
        """
        return self.gpus is None or self.shows_gpu(number)

    @property
    def needs_all_gpus(self) -> bool:
        """True if instances are selected, because these are known only after a reading."""
        return self.instances is not None

    def select(self, devices: Sequence[Device]) -> set[str]:
        """Returns the keys of the selected devices. Ignores ids of devices that do not exist."""
        gpus, instances = _split(devices)
        selected = {gpu.key for gpu in gpus if self.shows_gpu(gpu.index)}

        for number, instance in enumerate(instances):
            if self.shows_instance(number):
                selected.update((instance.key, instance.uuid))
        return selected

    def without_numbered_instances(self) -> Selection:
        """Returns the selection without instance numbers, which may change when GPUs disappear."""
        if self.instances:
            return replace(self, instances=None)
        return self

    def check(self, devices: Sequence[Device]) -> None:
        """Raises UsageError if a selected device does not exist.

        Logs a warning for `-d i` on a node without MIG, because instances may be created later.
        """
        gpus, instances = _split(devices)
        numbers = [gpu.index for gpu in gpus if gpu.index is not None]
        self._require("GPU", self.gpus, numbers)
        self._require("MIG instance", self.instances, range(len(instances)))

        if gpus and not self.select(devices):
            _log.warning("-d %s selects nothing: no GPU of this node has MIG instances", self)

    def _require(self, what: str, wanted: Ids, existing: Sequence[int]) -> None:
        missing = [number for number in wanted or () if number not in existing]
        if missing:
            problem = f"this node has no {what} {few_of(missing)}"
            raise UsageError(f"-d {self}: {problem}; it has {few_of(existing)}")

    def __str__(self) -> str:
        if self == Selection():
            return "f"

        parts = []
        for letter, ids in (("g", self.gpus), ("i", self.instances)):
            if ids:
                parts.append(f"{letter}:{','.join(map(str, ids))}")
            elif ids is not None:
                parts.append(letter)
        return "+".join(parts)


def parse_selection(text: str, option: str = "-d") -> Selection:
    """Parses the value of `-d`, `-s` or `-p`. Raises UsageError if the value is invalid."""
    if text == "f":
        return Selection()

    ids: dict[str, Ids] = {}
    for part in text.split("+"):
        match = _PART.fullmatch(part)
        if match is None:
            raise _invalid(text, option)

        letter, id_text = match.groups()
        if letter in ids:
            raise _invalid(text, option)
        ids[letter] = _parse_ids(id_text) if id_text else ()
        if id_text and not ids[letter]:
            raise _invalid(text, option)

    return Selection(ids.get("g"), ids.get("i"))


def _invalid(text: str, option: str) -> UsageError:
    return UsageError(
        f"{option} {text!r}: write f (everything), g (GPUs, NVSwitches or CPUs), "
        "i (MIG instances, links or cores) or g+i; "
        "g and i may have ids and ascending ranges without spaces, such as g:0,2-4+i:1"
    )


def _parse_ids(text: str) -> tuple[int, ...]:
    """Parses ids and ranges. Empty if a range is descending."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        ids = range(int(first), int(last or first) + 1)
        if not ids:
            return ()
        numbers.update(ids)
    return tuple(sorted(numbers))


def _split(devices: Sequence[Device]) -> tuple[list[Device], list[Device]]:
    gpus = [device for device in devices if not device.is_instance]
    instances = [device for device in devices if device.is_instance]
    return gpus, instances
