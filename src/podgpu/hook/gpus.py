"""This module says which GPUs the containers of a sandbox have, by the first source that says it. Pure: records in,
entries out.

In order: the annotations of schedulers (koordinator's, HAMi's, Volcano's, gpu-manager's), NVIDIA_VISIBLE_DEVICES, the
files of the volume-mount strategy, device nodes. A scheduler's annotation is its word for the whole pod. What a user
can write freely (variables, mounts) counts only where it is in the form of a GPU's id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.errors import few_of
from podgpu.holders.annotation_formats import (
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
from podgpu.holders.podlist import parse_gpu
from podgpu.hook.cards import Cards
from podgpu.hook.sandboxes import MOUNTED_DEVICES, VISIBLE_DEVICES, ContainerFacts, Sandbox
from podgpu.kube.objects import ContainerRecord, PodRecord

MOST_IDS = 512
_MOST_LETTERS = 128
_MOST_PLACES = 512
_NODE = re.compile(r"/dev/nvidia(0|[1-9][0-9]{0,5})", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)
_CDI_NAME = re.compile(r"[a-z0-9.-]+/[a-z0-9-]+=(.+)", re.IGNORECASE | re.ASCII)
_MANAGEMENT = "management.nvidia.com/"
"""CDI names under which containers that look after GPUs see them: they were given none."""


class Entry(NamedTuple):
    """One entry of podlist.json."""

    namespace: str
    name: str
    container: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """What somebody should know about a pod. `reason` is the label of podgpu_hook_errors_total."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    entries: tuple[Entry, ...] = ()
    notes: tuple[Note, ...] = ()
    disagreeing: int = 0
    """Containers whose NVIDIA_VISIBLE_DEVICES names other GPUs than koordinator gave them."""


def gpus_of_sandbox(sandbox: Sandbox, cards: Cards) -> Found:
    if not sandbox.namespace or not sandbox.name:  # one such entry, and no reader takes the file
        return Found()
    try:
        held = _by_scheduler(sandbox, cards)
    except BadAnnotation as error:
        return Found(notes=(Note(error.reason, str(error)),))
    if held is None:
        held = {container.name: _by_container(container, cards) for container in sandbox.containers}
    entries = (
        Entry(sandbox.namespace, sandbox.name, container.name, _once(held.get(container.name, ())))
        for container in sandbox.containers
    )
    notes = tuple(_disagreements(sandbox, cards))
    return Found(tuple(entry for entry in entries if entry.gpus), notes, len(notes))


def _once(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(id_ for id_ in ids if len(id_) <= _MOST_LETTERS))[:MOST_IDS]


# What a scheduler says


def _by_scheduler(sandbox: Sandbox, cards: Cards) -> dict[str, tuple[str, ...]] | None:
    """None: no scheduler says anything about this pod."""
    own = {
        container.name: tuple(_gpu_manager_nodes(container, cards))
        for container in sandbox.containers
        if container.gpu_manager
    }
    grants = read_grants(_pod_record(sandbox))
    if not grants:
        return own or None
    for_all = tuple(_text(grant.device, cards) for grant in grants if grant.container is None)
    if for_all:
        return {container.name: for_all for container in sandbox.containers}
    return (_chosen_by_variable(sandbox, grants) or _by_place(grants, cards)) | own


def _pod_record(sandbox: Sandbox) -> PodRecord:
    """NRI tells of containers as they are made: the places of those to come are kept, under names no container has."""
    to_come = range(len(sandbox.order), min(_places(sandbox), _MOST_PLACES))
    names = (*sandbox.order, *(f"(container {number})" for number in to_come))
    containers = tuple(ContainerRecord(name) for name in names)
    return PodRecord(
        sandbox.namespace, sandbox.name, sandbox.uid, annotations=sandbox.annotations, containers=containers
    )


def _places(sandbox: Sandbox) -> int:
    places = 0
    for key, text in sandbox.annotations:
        if key in (HAMI_DEVICES, HAMI_1_DEVICES, VOLCANO_DEVICES):
            places = max(places, text.strip().removesuffix(";").count(";") + 1)
        elif key.startswith(GPU_MANAGER_CARDS) and _NUMBER.fullmatch(key.removeprefix(GPU_MANAGER_CARDS)):
            places = max(places, int(key.removeprefix(GPU_MANAGER_CARDS)) + 1)
    return places


def _gpu_manager_nodes(container: ContainerFacts, cards: Cards) -> Iterator[str]:
    nodes = (_NODE.fullmatch(word.strip()) for word in container.gpu_manager.split(",", MOST_IDS))
    return (cards.of_minor(int(node[1])) for node in nodes if node)


def _chosen_by_variable(sandbox: Sandbox, grants: Sequence[Grant]) -> dict[str, tuple[str, ...]]:
    """HAMi's plugin gives each container its own UUIDs in NVIDIA_VISIBLE_DEVICES: surer than a place in the order,
    which is lost when the hook starts after an init container is gone."""
    granted = {grant.device.lower(): grant.device for grant in grants if isinstance(grant.device, str)}
    chosen: dict[str, tuple[str, ...]] = {}
    for container in sandbox.containers:
        names = (word.strip().lower() for word in (container.visible or "").split(",", MOST_IDS))
        ids = tuple(granted[name] for name in names if name in granted)
        if ids:
            chosen[container.name] = ids
    return chosen


def _by_place(grants: Sequence[Grant], cards: Cards) -> dict[str, tuple[str, ...]]:
    held: dict[str, tuple[str, ...]] = {}
    for grant in grants:
        name = grant.container or ""
        held[name] = (*held.get(name, ()), _text(grant.device, cards))
    return held


def _text(device: str | int, cards: Cards) -> str:
    return cards.of_minor(device) if isinstance(device, int) else device


# What the container itself shows


def _by_container(container: ContainerFacts, cards: Cards) -> tuple[str, ...]:
    visible = (container.visible or "").strip()
    if visible == "none":
        return ()
    if visible and visible != "void" and not visible.startswith(MOUNTED_DEVICES):
        named = _named(visible.split(",", MOST_IDS), container, cards)
        if named is not None:
            return named
    if container.mounted:
        named = _named((_mounted_name(name) for name in container.mounted), container, cards)
        if named is not None:
            return named
    return tuple(map(cards.of_minor, container.minors))


def _mounted_name(name: str) -> str:
    """`<id>`, or `cdi/<vendor>/<class>/<id>`."""
    parts = name.split("/", 3)
    return f"{parts[1]}/{parts[2]}={parts[3]}" if parts[0] == "cdi" and len(parts) == 4 else name


def _named(words: Iterable[str], container: ContainerFacts, cards: Cards) -> tuple[str, ...] | None:
    """The GPUs the words name, as the container toolkit reads them; None when no word names any."""
    ids: list[str] = []
    understood = False
    for word in map(str.strip, words):
        if word.startswith(_MANAGEMENT):
            understood = True
            continue
        cdi = _CDI_NAME.fullmatch(word)
        name = cdi[1] if cdi else word
        if name == "all":
            # Who may only look was given nothing: monitoring agents, podgpu's own exporter among them.
            ids += () if container.only_looks else cards.uuids or (name,)
            understood = True
        elif _NUMBER.fullmatch(name):
            ids.append(cards.of_index(int(name)))
        elif len(name) <= _MOST_LETTERS and parse_gpu(name) is not None:
            ids.append(name)
    return tuple(ids) if ids or understood else None


# koordinator's annotation and the variable


def _disagreements(sandbox: Sandbox, cards: Cards) -> Iterator[Note]:
    grants = koordinator_grants(_pod_record(sandbox))
    if not grants or not cards.cards:
        return
    given = _uuids(grants, cards)
    for container in sandbox.containers:
        named = _explicitly_named(container, cards)
        if named and {id_.lower() for id_ in named} != {id_.lower() for id_ in given}:
            text = (
                f"pod {sandbox.namespace}/{sandbox.name}, container {container.name}: koordinator gave it"
                f" {few_of(given)}, but {VISIBLE_DEVICES}={(container.visible or '')[:200]} means {few_of(named)}"
                " to the container toolkit, which reads indices where koordinator writes minors: podlist.json has what"
                " koordinator gave; --inject puts the variable right for containers to come"
            )
            yield Note("disagreement", text)


def _uuids(grants: Sequence[Grant], cards: Cards) -> tuple[str, ...]:
    return _once(_text(grant.device, cards) for grant in grants)


def _explicitly_named(container: ContainerFacts, cards: Cards) -> tuple[str, ...]:
    """Not by `all`, which images say of themselves."""
    words = (container.visible or "").split(",", MOST_IDS)
    if any(word.strip() == "all" for word in words):
        return ()
    return _once(_named(words, container, cards) or ())


def wanted_variable(sandbox: Sandbox, container: ContainerFacts, cards: Cards) -> str | None:
    """What NVIDIA_VISIBLE_DEVICES has to be set to for koordinator's annotation; None: nothing, or it is right already.

    Minors, as koordinator's own hook writes them; on a node where the container toolkit would take those numbers for
    other GPUs, or where the annotation has none, UUIDs. Raises BadAnnotation.
    """
    pod = _pod_record(sandbox)
    grants = koordinator_grants(pod)
    if not grants:
        return None
    given = _uuids(grants, cards)
    if {id_.lower() for id_ in _explicitly_named(container, cards)} == {id_.lower() for id_ in given}:
        return None
    minors = koordinator_minors(pod)
    misread = any(cards.of_minor(minor) != cards.of_index(minor) for minor in minors)
    wanted = ",".join(given) if misread or not minors else ",".join(dict.fromkeys(map(str, minors)))
    return None if wanted == container.visible else wanted
