"""This module says which of DCGM's series figures are made of, and what a number under each name means, and
what their labels say: of which device it is, and of whose. Pure.

Names of either generation lead to one field, in its older unit: what is in a base unit is converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from podgpu.figures.device import FIELDS, nameless_uuid
from podgpu.metrics import families as f
from podgpu.metrics.conditions import FIELD_CONDITIONS
from podgpu.metrics.fields import XID_FIELD, fields
from podgpu.metrics.names import Meaning, meaning, names_of
from podgpu.model import Who, Workload

HEALTH_FIELDS = (*FIELD_CONDITIONS, XID_FIELD)
UNKNOWN_FIELD = 0
"""Of a series that was asked for by a name no field has."""


_UUID_LABELS = ("UUID", "uuid", "gpu_uuid")
_MODEL_LABELS = ("modelName", "model_name")
_POD_LABELS = (f.POD_LABELS, f.OLD_POD_LABELS)
_EXPORTED_LABELS = (tuple(f.EXPORTED.values()),)
_CONTAINER = f.POD_LABELS[2]
Labels = Mapping[str, str]


class FigureName(NamedTuple):
    """What a series of some name is about."""

    number: int
    """Of the field, in the older unit where there are two."""
    per_instance: bool
    """MIG instances have their own."""
    meaning: Meaning | None = None
    """How the number printed is brought to that unit; None: it is in it."""


@lru_cache(maxsize=16)
def field_names(measured: str, beside: tuple[int, ...]) -> dict[str, FigureName]:
    numbers = [*FIELDS, *HEALTH_FIELDS, *beside]
    known = meaning(measured)
    if known is not None:
        numbers.append(known.field.id)
    found = {name: _figure_name(name, number) for number in numbers for name in names_of(number)}
    if measured and known is None:
        found[measured] = FigureName(UNKNOWN_FIELD, True)
    return found


def _figure_name(name: str, number: int) -> FigureName:
    known = meaning(name)
    return FigureName(number, fields()[number].per_instance, known if known and known.factor != 1.0 else None)


# What labels say


class Place(NamedTuple):
    """What a label set says. Many series share one, so it is looked at once."""

    uuid: str
    instance: str
    model: str
    holder: Workload | None
    who: Who


def places_of(label_sets: Iterable[Labels]) -> dict[int, Place]:
    """By the id of the labels, which those of equal text share."""
    places: dict[int, Place] = {}
    models: dict[tuple[str, str], str] = {}
    for labels in label_sets:
        if id(labels) not in places:
            place = places[id(labels)] = _place(labels)
            if place.model:
                models.setdefault((place.uuid, place.instance), place.model)
                models.setdefault((place.uuid, ""), place.model)
    for key, place in places.items():
        if not place.model and (place.uuid, place.instance) in models:
            places[key] = place._replace(model=models[place.uuid, place.instance])
    return places


def _place(labels: Labels) -> Place:
    uuid = first_label(labels, _UUID_LABELS) or nameless_uuid(labels.get("gpu", "?"))
    holder = holder_of(labels)
    who = holder.who if holder else ()
    return Place(uuid, labels.get("GPU_I_ID", ""), first_label(labels, _MODEL_LABELS), holder, who)


def holder_of(labels: Labels) -> Workload | None:
    """Who holds what the series is about; `exported_pod` is what Prometheus makes of an exposition's own `pod`."""
    get = labels.get
    if job := get(f.JOB_LABEL):
        return Workload(job=job)
    for namespace, pod, container in _EXPORTED_LABELS if _EXPORTED_LABELS[0][1] in labels else _POD_LABELS:
        if name := get(pod):
            return Workload(intern(get(namespace, "")), intern(name), intern(get(container, "")))
    uid, container_id = (get(name, "") for name in f.NAMELESS_LABELS)
    return Workload("", "", get(_CONTAINER, ""), uid, container_id) if uid or container_id else None


def first_label(labels: Labels, names: Iterable[str]) -> str:
    for name in names:
        if value := labels.get(name):
            return value
    return ""
