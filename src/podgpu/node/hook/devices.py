"""Finds the GPUs of a pod's containers, and reads how this node numbers its GPUs.

The first of these sources that names GPUs is used: koordinator's annotation (for the whole pod),
NVIDIA_VISIBLE_DEVICES, mounted device files, device nodes. Users can set variables and mounts to
any text, so texts that are not GPU ids are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from podgpu.errors import SourceError
from podgpu.files import read_bounded
from podgpu.kube.objects import PodRecord
from podgpu.node.holders.annotations import KOORDINATOR_DEVICES, read_grants
from podgpu.node.holders.device_ids import parse_device_id, parse_id_or_minor
from podgpu.node.holders.node_files import PodlistEntry

MOUNTED_DEVICES = "/var/run/nvidia-container-devices"
"""Directory in which NVIDIA's device plugin mounts one file per GPU (volume-mounts strategy)."""
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
_NVIDIA_MAJOR = 195
# Minors from 254 are not GPUs: 254 is nvidia-modeset, 255 is nvidiactl. Every GPU container has
# both.
_FIRST_CONTROL_MINOR = 254
# Major and minor of /dev/null, /dev/zero and /dev/random. Only privileged containers list these
# devices.
_DEFAULT_DEVICES = {(1, 3), (1, 5), (1, 8)}
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)
_CDI_NAME = re.compile(r"[a-z0-9.-]+/[a-z0-9-]+=(.+)", re.IGNORECASE | re.ASCII)
# Prefix of the CDI device names for containers that manage GPUs. Such containers access all GPUs
# but hold none.
_MANAGEMENT = "management.nvidia.com/"
_MAX_INFORMATION_BYTES = 64 * 1024
_PCI_NAME = re.compile(r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
# If the GPU was never opened, the driver writes question marks instead of a UUID.
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$", re.MULTILINE | re.IGNORECASE)
_MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,6})\s*$", re.MULTILINE)
_EXCLUDED = re.compile(r"^GPU Excluded:\s*Yes\s*$", re.MULTILINE | re.IGNORECASE)


# How this node numbers its GPUs: by minor (/dev/nvidiaN), by index (PCI order) and by UUID


class Card(NamedTuple):
    uuid: str  # empty if unknown
    minor: int | None


@dataclass(frozen=True)
class Cards:
    """The GPUs of this node in the order of their indices. Empty without a driver.

    Minors are also needed, because koordinator uses minors and the container toolkit uses indices.
    """

    cards: tuple[Card, ...] = ()

    def find_by_minor(self, minor: int) -> str:
        """Returns the UUID, or the minor if the UUID is unknown.

        The minor is also valid in podlist.json.
        """
        for card in self.cards:
            if card.minor == minor and card.uuid:
                return card.uuid
        return str(minor)

    def find_by_index(self, index: int) -> str:
        """Returns the UUID, or the index if the UUID is unknown.

        The index equals the minor on most nodes.
        """
        if index < len(self.cards) and self.cards[index].uuid:
            return self.cards[index].uuid
        return str(index)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of all GPUs. Empty if any UUID is unknown."""
        uuids = tuple(card.uuid for card in self.cards)
        if not all(uuids):
            return ()
        return uuids


def read_cards(proc: str) -> Cards:
    """Reads the GPUs from /proc, because the hook has no driver library.

    Blocks if the driver hangs.
    """
    root = os.path.join(proc, "driver", "nvidia", "gpus")
    try:
        places = [name for name in os.listdir(root) if _PCI_NAME.fullmatch(name)]
    except OSError:
        return Cards()

    cards = []
    for place in sorted(places, key=_parse_pci_name):
        text = ""
        with suppress(SourceError):
            content = read_bounded(os.path.join(root, place, "information"), _MAX_INFORMATION_BYTES)
            text = content.decode(errors="replace")

        if _EXCLUDED.search(text):
            continue
        uuid = _UUID.search(text)
        minor = _MINOR.search(text)
        card = Card(
            uuid=uuid[1] if uuid else "",
            minor=int(minor[1]) if minor else None,
        )
        cards.append(card)
    return Cards(tuple(cards))


def _parse_pci_name(name: str) -> list[int]:
    return [int(part, 16) for part in re.split(r"[:.]", name)]


class Sandbox(NamedTuple):
    """A pod (NRI's PodSandbox) and its containers. Immutable, so that other threads can read it."""

    pod: Any
    containers: tuple[Any, ...] = ()


def find_gpus(sandbox: Sandbox, cards: Cards) -> list[PodlistEntry]:
    """Returns one entry per container with GPUs.

    Raises BadAnnotation if koordinator's annotation is malformed.
    """
    pod = sandbox.pod
    # Programs that read podlist.json reject entries without names.
    if not pod.namespace or not pod.name:
        return []

    assigned = find_assigned(pod, cards)
    entries = []
    for container in sandbox.containers:
        gpus = assigned or _find_own(container, cards)
        if gpus:
            entry = PodlistEntry(pod.name, pod.namespace, container.name, list(gpus), pod.uid)
            entries.append(entry)
    return entries


def find_assigned(pod: Any, cards: Cards) -> tuple[str, ...]:
    """Returns the GPUs that koordinator assigned to the pod.

    Raises BadAnnotation if the annotation is malformed.
    """
    annotation = pod.annotations.get(KOORDINATOR_DEVICES, "")
    annotations = ((KOORDINATOR_DEVICES, annotation),)
    record = PodRecord(pod.namespace, pod.name, pod.uid, annotations=annotations)

    gpus = []
    for held in read_grants(record):
        device_id = parse_device_id(held.text)
        if device_id is None or device_id.minor is None:
            gpus.append(held.text)
        else:
            gpus.append(cards.find_by_minor(device_id.minor))
    return tuple(dict.fromkeys(gpus))


def read_variables(container: Any) -> dict[str, str]:
    """Returns the container's NVIDIA_* variables. If a name is repeated, its last value counts."""
    variables = {}
    for variable in container.env:
        if variable.startswith(b"NVIDIA_"):
            name, _, value = variable.decode(errors="replace").partition("=")
            variables[name] = value
    return variables


def _find_own(container: Any, cards: Cards) -> tuple[str, ...]:
    """Returns the GPUs that the container's variables name.

    If they name none, those of its mounts; if these name none, those of its device nodes.
    """
    variables = read_variables(container)
    visible = variables.get(VISIBLE_DEVICES, "").strip()
    if visible == "none":
        return ()

    words = variables.get(_CAPABILITIES, "").split(",")
    capabilities = {word.strip() for word in words if word.strip()}
    # `utility` gives nvidia-smi and NVML. Without `compute`, no program can run on a GPU.
    is_monitor = capabilities == {"utility"}

    gpus = _resolve(visible.split(","), is_monitor, cards)
    if gpus is None:
        gpus = _resolve(_list_mounted(container), is_monitor, cards)
    if gpus is None:
        minors = _read_minors(container.linux.devices)
        gpus = tuple(map(cards.find_by_minor, minors))
    return gpus


def _read_minors(devices: Sequence[Any]) -> list[int]:
    """Returns the minors of the GPUs.

    Ignores privileged containers, because they have all device nodes.
    """
    minors = set()
    for device in devices:
        if (device.major, device.minor) in _DEFAULT_DEVICES:
            return []
        if device.major == _NVIDIA_MAJOR and 0 <= device.minor < _FIRST_CONTROL_MINOR:
            minors.add(device.minor)

    return sorted(minors)


def _list_mounted(container: Any) -> Iterator[str]:
    """Yields the ids and CDI names of mounted GPUs.

    The path of a mount is `<id>` or `cdi/<vendor>/<class>/<id>` in the directory.
    """
    prefix = f"{MOUNTED_DEVICES}/".encode()
    for mount in container.mounts:
        if not mount.destination.startswith(prefix):
            continue
        name = mount.destination.removeprefix(prefix).decode(errors="replace")

        parts = name.split("/", 3)
        if parts[0] == "cdi" and len(parts) == 4:
            name = f"{parts[1]}/{parts[2]}={parts[3]}"
        yield name


def _resolve(words: Iterable[str], is_monitor: bool, cards: Cards) -> tuple[str, ...] | None:
    """Converts GPU names as the container toolkit does.

    Returns None if no word is a GPU name: the next source may have one. Returns an empty tuple if
    the words say that the container holds no GPU.

    With `is_monitor`, the container may only query GPUs, so `all` does not make it a holder.
    """
    ids: list[str] = []
    holds_none = False
    for word in map(str.strip, words):
        cdi = _CDI_NAME.fullmatch(word)
        name = cdi[1] if cdi else word
        if word.startswith(_MANAGEMENT) or (name == "all" and is_monitor):
            holds_none = True
        elif name == "all":
            # If a UUID is unknown, the reader of the file must resolve `all`.
            ids += cards.uuids or (name,)
        elif _NUMBER.fullmatch(name):
            ids.append(cards.find_by_index(int(name)))
        elif parse_id_or_minor(name) is not None:
            ids.append(name)

    if not ids and not holds_none:
        return None
    return tuple(dict.fromkeys(ids))
