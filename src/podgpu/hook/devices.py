"""Finds the GPUs of a sandbox's containers, and how this node numbers its GPUs.

Sources, in order: koordinator's annotation, which applies to the whole pod; NVIDIA_VISIBLE_DEVICES; mounted device
files; device nodes. Users can set variables and mounts, so these are used only if they have the form of a GPU id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.errors import SourceError
from podgpu.files import read_bounded
from podgpu.holders.annotations import KOORDINATOR_DEVICES, read_grants
from podgpu.holders.device_ids import parse_id_or_minor
from podgpu.holders.node_files import PodlistEntry
from podgpu.kube.objects import PodRecord

MOUNTED_DEVICES = "/var/run/nvidia-container-devices"
"""Directory in which NVIDIA's device plugin mounts one file per GPU (volume-mounts strategy)."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)
_CDI_NAME = re.compile(r"[a-z0-9.-]+/[a-z0-9-]+=(.+)", re.IGNORECASE | re.ASCII)
_MANAGEMENT = "management.nvidia.com/"
"""CDI names of containers that manage GPUs. They can access all GPUs and hold none."""
_MAX_INFORMATION_BYTES = 64 * 1024
_PCI_NAME = re.compile(r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$", re.MULTILINE | re.IGNORECASE)
"""Does not match the question marks that the driver writes for a GPU that was never opened."""
_MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,6})\s*$", re.MULTILINE)
_EXCLUDED = re.compile(r"^GPU Excluded:\s*Yes\s*$", re.MULTILINE | re.IGNORECASE)


# How this node numbers its GPUs: by minor (/dev/nvidiaN), by index (PCI order) and by UUID


class Card(NamedTuple):
    uuid: str  # empty if unknown
    minor: int | None


@dataclass(frozen=True)
class Cards:
    """GPUs in the order of their indices; empty without a driver.

    koordinator writes minors, but the container toolkit reads indices."""

    cards: tuple[Card, ...] = ()

    def find_by_minor(self, minor: int) -> str:
        """Returns the UUID, or the minor if the UUID is unknown. In podlist.json, numbers are minors."""
        return next((card.uuid for card in self.cards if card.minor == minor and card.uuid), str(minor))

    def find_by_index(self, index: int) -> str:
        """Returns the UUID, or the index if the UUID is unknown. On most nodes it equals the minor."""
        uuid = self.cards[index].uuid if index < len(self.cards) else ""
        return uuid or str(index)

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of all GPUs. Empty if one of them is unknown."""
        uuids = tuple(card.uuid for card in self.cards)
        return uuids if all(uuids) else ()


def read_cards(proc: str) -> Cards:
    """Reads /proc/driver/nvidia/gpus, so that no driver library is needed. Blocks if the driver hangs."""
    root = os.path.join(proc, "driver", "nvidia", "gpus")
    try:
        places = sorted((name for name in os.listdir(root) if _PCI_NAME.fullmatch(name)), key=_bus_order)
    except OSError:
        return Cards()
    texts = (_read_information(os.path.join(root, place, "information")) for place in places)
    return Cards(tuple(_parse_card(text) for text in texts if not _EXCLUDED.search(text)))


def _bus_order(place: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split(r"[:.]", place))


def _read_information(path: str) -> str:
    try:
        return read_bounded(path, _MAX_INFORMATION_BYTES).decode(errors="replace")
    except SourceError:
        return ""


def _parse_card(text: str) -> Card:
    uuid, minor = _UUID.search(text), _MINOR.search(text)
    return Card(uuid[1] if uuid else "", int(minor[1]) if minor else None)


# The GPUs of a sandbox


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    id: str
    name: str
    visible: str = ""  # NVIDIA_VISIBLE_DEVICES
    is_monitor: bool = False  # its driver capabilities allow queries only
    mounted: tuple[str, ...] = ()  # names under MOUNTED_DEVICES
    minors: tuple[int, ...] = ()  # minors of its device nodes; empty if it is privileged, because it then has all nodes


@dataclass(frozen=True, slots=True)
class Sandbox:
    id: str
    namespace: str
    name: str
    uid: str = ""
    koordinator: str = ""  # koordinator's annotation
    containers: tuple[ContainerFacts, ...] = ()


def find_gpus(sandbox: Sandbox, cards: Cards) -> list[PodlistEntry]:
    """Returns the containers of the sandbox that have GPUs. Raises BadAnnotation."""
    if not sandbox.namespace or not sandbox.name:  # readers reject a file with such an entry
        return []
    assigned = find_assigned(sandbox, cards)
    held = ((container.name, assigned or _find_own(container, cards)) for container in sandbox.containers)
    return [PodlistEntry(sandbox.name, sandbox.namespace, name, list(gpus)) for name, gpus in held if gpus]


def find_assigned(sandbox: Sandbox, cards: Cards) -> tuple[str, ...]:
    """Returns the GPUs that koordinator assigned to the pod. Raises BadAnnotation."""
    annotations = ((KOORDINATOR_DEVICES, sandbox.koordinator),)
    held = read_grants(PodRecord(sandbox.namespace, sandbox.name, sandbox.uid, annotations=annotations))
    minors = ((entry.text, entry.device_id.minor if entry.device_id else None) for entry in held)
    return _unique(text if minor is None else cards.find_by_minor(minor) for text, minor in minors)


def _unique(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ids))


def _find_own(container: ContainerFacts, cards: Cards) -> tuple[str, ...]:
    visible = container.visible.strip()
    if visible == "none":
        return ()
    gpus = _resolve(visible.split(","), container, cards)
    if gpus is None:
        gpus = _resolve(map(_mounted_name, container.mounted), container, cards)
    return tuple(map(cards.find_by_minor, container.minors)) if gpus is None else gpus


def _mounted_name(name: str) -> str:
    """Converts the path of a mount, `<id>` or `cdi/<vendor>/<class>/<id>`, to an id or a CDI name."""
    parts = name.split("/", 3)
    return f"{parts[1]}/{parts[2]}={parts[3]}" if parts[0] == "cdi" and len(parts) == 4 else name


def _resolve(words: Iterable[str], container: ContainerFacts, cards: Cards) -> tuple[str, ...] | None:
    """Resolves ids as the container toolkit does. Returns None if no word is an id."""
    ids: list[str] = []
    is_known = False
    for word in map(str.strip, words):
        if word.startswith(_MANAGEMENT):
            is_known = True
            continue
        cdi = _CDI_NAME.fullmatch(word)
        name = cdi[1] if cdi else word
        if name == "all":
            ids += () if container.is_monitor else cards.uuids or (name,)
            is_known = True
        elif _NUMBER.fullmatch(name):
            ids.append(cards.find_by_index(int(name)))
        elif parse_id_or_minor(name) is not None:
            ids.append(name)
    return _unique(ids) if ids or is_known else None
