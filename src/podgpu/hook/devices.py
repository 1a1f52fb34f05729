"""Finds the GPUs of a sandbox's containers, and how this node numbers its GPUs.

Sources, in order: annotations of schedulers (koordinator, HAMi, Volcano, gpu-manager), NVIDIA_VISIBLE_DEVICES, mounted
device files, device nodes. A scheduler's annotation applies to the whole pod. Users can set variables and mounts, so
these are used only if they have the form of a GPU id.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.errors import SourceError, few_of
from podgpu.files import read_bounded
from podgpu.holders.annotations import (
    GPU_MANAGER_CARDS,
    HAMI_1_DEVICES,
    HAMI_DEVICES,
    VOLCANO_DEVICES,
    BadAnnotation,
    Grant,
    koordinator_grants,
    koordinator_minors,
    read_grants,
)
from podgpu.holders.device_ids import parse_id_or_minor
from podgpu.kube.objects import ContainerRecord, Pairs, PodRecord

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
MOUNTED_DEVICES = "/var/run/nvidia-container-devices"
"""Directory in which NVIDIA's device plugin mounts one file per GPU (volume-mounts strategy)."""
MAX_IDS = 512
"""Maximum number of ids per container, so that a user cannot make podlist.json arbitrarily large. Nodes have fewer
GPUs and MIG instances than this."""
DISAGREEMENT = "disagreement"
"""NVIDIA_VISIBLE_DEVICES names other GPUs than koordinator assigned."""
_MAX_ID_LENGTH = 128
_NODE = re.compile(r"/dev/nvidia(0|[1-9][0-9]{0,5})", re.ASCII)
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


class CardsWatch:
    """Reads the cards periodically in a thread, because the driver may hang. `cards` is the last result."""

    def __init__(self, read: Callable[[], Cards], on_change: Callable[[], object], every: float = 10.0) -> None:
        self.cards = Cards()
        self._read = read
        self._on_change = on_change
        self._every = every
        self._was_read = threading.Event()
        self._stopping = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="hook-cards", daemon=True).start()

    def wait_read(self, seconds: float) -> None:
        self._was_read.wait(seconds)

    def stop(self) -> None:
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            cards = self._read()
            if cards != self.cards:
                self.cards = cards
                self._on_change()
            self._was_read.set()
            self._stopping.wait(self._every)


# The GPUs of a sandbox


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    id: str
    name: str
    visible: str | None = None  # NVIDIA_VISIBLE_DEVICES; None if it is not set
    is_monitor: bool = False  # its driver capabilities allow queries only
    mounted: tuple[str, ...] = ()  # names under MOUNTED_DEVICES
    minors: tuple[int, ...] = ()  # minors of its device nodes; empty if it is privileged, because it then has all nodes
    gpu_manager: str = ""  # value of gpu-manager's container annotation


@dataclass(frozen=True, slots=True)
class Sandbox:
    id: str
    namespace: str
    name: str
    uid: str = ""
    annotations: Pairs = ()  # only those with which schedulers assign GPUs
    containers: tuple[ContainerFacts, ...] = ()
    order: tuple[str, ...] = ()
    """Container names in the order of creation, which is the order of the pod's spec. Annotations use the position."""


class PodlistEntry(NamedTuple):
    namespace: str
    name: str
    container: str
    gpus: tuple[str, ...]


class PodProblem(NamedTuple):
    reason: str  # label of podgpu_hook_errors_total
    text: str


class SandboxGpus(NamedTuple):
    entries: tuple[PodlistEntry, ...] = ()
    problems: tuple[PodProblem, ...] = ()


def find_gpus(sandbox: Sandbox, cards: Cards) -> SandboxGpus:
    if not sandbox.namespace or not sandbox.name:  # readers reject a file with such an entry
        return SandboxGpus()
    try:
        held = _read_scheduler(sandbox, cards)
    except BadAnnotation as error:
        return SandboxGpus(problems=(PodProblem(error.reason, str(error)),))
    if held is None:
        held = {container.name: _read_own_devices(container, cards) for container in sandbox.containers}
    entries = (
        PodlistEntry(sandbox.namespace, sandbox.name, container.name, _unique(held.get(container.name, ())))
        for container in sandbox.containers
    )
    problems = tuple(_find_disagreements(sandbox, cards))
    return SandboxGpus(tuple(entry for entry in entries if entry.gpus), problems)


def _unique(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(id_ for id_ in ids if len(id_) <= _MAX_ID_LENGTH))[:MAX_IDS]


def _read_scheduler(sandbox: Sandbox, cards: Cards) -> dict[str, tuple[str, ...]] | None:
    """Returns the GPUs by container, or None if no scheduler assigned any."""
    own = {
        container.name: tuple(_gpu_manager_nodes(container, cards))
        for container in sandbox.containers
        if container.gpu_manager
    }
    grants = read_grants(_pod_record(sandbox))
    if not grants:
        return own or None
    for_all = tuple(_id_of(grant.device, cards) for grant in grants if grant.container is None)
    if for_all:
        return {container.name: for_all for container in sandbox.containers}
    chosen = _chosen_by_variable(sandbox, grants)
    if not chosen:
        for grant in grants:
            name = grant.container or ""
            chosen[name] = (*chosen.get(name, ()), _id_of(grant.device, cards))
    return chosen | own


def _pod_record(sandbox: Sandbox) -> PodRecord:
    """Builds the pod record. Containers that do not exist yet get placeholder names, so that positions are right."""
    to_come = range(len(sandbox.order), min(_count_positions(sandbox), MAX_IDS))
    names = (*sandbox.order, *(f"(container {number})" for number in to_come))
    containers = tuple(ContainerRecord(name) for name in names)
    return PodRecord(
        sandbox.namespace, sandbox.name, sandbox.uid, annotations=sandbox.annotations, containers=containers
    )


def _count_positions(sandbox: Sandbox) -> int:
    positions = 0
    for key, text in sandbox.annotations:
        if key in (HAMI_DEVICES, HAMI_1_DEVICES, VOLCANO_DEVICES):
            positions = max(positions, text.strip().removesuffix(";").count(";") + 1)
        elif key.startswith(GPU_MANAGER_CARDS) and _NUMBER.fullmatch(key.removeprefix(GPU_MANAGER_CARDS)):
            positions = max(positions, int(key.removeprefix(GPU_MANAGER_CARDS)) + 1)
    return positions


def _gpu_manager_nodes(container: ContainerFacts, cards: Cards) -> Iterator[str]:
    nodes = (_NODE.fullmatch(word.strip()) for word in container.gpu_manager.split(",", MAX_IDS))
    return (cards.find_by_minor(int(node[1])) for node in nodes if node)


def _chosen_by_variable(sandbox: Sandbox, grants: Sequence[Grant]) -> dict[str, tuple[str, ...]]:
    """Returns each container's devices that HAMi listed in NVIDIA_VISIBLE_DEVICES.

    This is more reliable than a container's position in the annotation, which is wrong if the hook started after an
    init container ended.
    """
    granted = {grant.device.lower(): grant.device for grant in grants if isinstance(grant.device, str)}
    chosen: dict[str, tuple[str, ...]] = {}
    for container in sandbox.containers:
        names = (word.strip().lower() for word in (container.visible or "").split(",", MAX_IDS))
        ids = tuple(granted[name] for name in names if name in granted)
        if ids:
            chosen[container.name] = ids
    return chosen


def _id_of(device: str | int, cards: Cards) -> str:
    return cards.find_by_minor(device) if isinstance(device, int) else device


def _read_own_devices(container: ContainerFacts, cards: Cards) -> tuple[str, ...]:
    visible = (container.visible or "").strip()
    if visible == "none":
        return ()
    sources = [[_mounted_name(name) for name in container.mounted]]
    if visible not in ("", "void") and not visible.startswith(MOUNTED_DEVICES):
        sources.insert(0, visible.split(",", MAX_IDS))
    for words in sources:
        named = _resolve(words, container, cards)
        if named is not None:
            return named
    return tuple(map(cards.find_by_minor, container.minors))


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
        elif len(name) <= _MAX_ID_LENGTH and parse_id_or_minor(name) is not None:
            ids.append(name)
    return tuple(ids) if ids or is_known else None


def _find_disagreements(sandbox: Sandbox, cards: Cards) -> Iterator[PodProblem]:
    grants = koordinator_grants(_pod_record(sandbox))
    if not grants or not cards.cards:
        return
    assigned = _uuids(grants, cards)
    for container in sandbox.containers:
        named = _explicitly_named(container, cards)
        if named and {id_.lower() for id_ in named} != {id_.lower() for id_ in assigned}:
            text = (
                f"pod {sandbox.namespace}/{sandbox.name}, container {container.name}: koordinator assigned"
                f" {few_of(assigned)}, but {VISIBLE_DEVICES}={(container.visible or '')[:200]} means {few_of(named)}"
                " to the container toolkit, which interprets koordinator's minors as indices: podlist.json contains"
                " koordinator's assignment; --inject corrects the variable of new containers"
            )
            yield PodProblem(DISAGREEMENT, text)


def _uuids(grants: Sequence[Grant], cards: Cards) -> tuple[str, ...]:
    return _unique(_id_of(grant.device, cards) for grant in grants)


def _explicitly_named(container: ContainerFacts, cards: Cards) -> tuple[str, ...]:
    """Returns the GPUs in NVIDIA_VISIBLE_DEVICES. Ignores `all`, which is the default of many images."""
    words = (container.visible or "").split(",", MAX_IDS)
    if any(word.strip() == "all" for word in words):
        return ()
    return _unique(_resolve(words, container, cards) or ())


def wanted_variable(sandbox: Sandbox, container: ContainerFacts, cards: Cards) -> str | None:
    """Returns the value of NVIDIA_VISIBLE_DEVICES that koordinator's annotation requires; None if it is already set.

    The value contains minors, as koordinator's own hook writes them, or UUIDs if the container toolkit would misread
    the minors or the annotation has none. Raises BadAnnotation.
    """
    pod = _pod_record(sandbox)
    grants = koordinator_grants(pod)
    if not grants:
        return None
    assigned = _uuids(grants, cards)
    if {id_.lower() for id_ in _explicitly_named(container, cards)} == {id_.lower() for id_ in assigned}:
        return None
    minors = koordinator_minors(pod)
    misread = any(cards.find_by_minor(minor) != cards.find_by_index(minor) for minor in minors)
    wanted = ",".join(assigned) if misread or not minors else ",".join(dict.fromkeys(map(str, minors)))
    return None if wanted == container.visible else wanted
