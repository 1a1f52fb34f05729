"""This module knows what Prometheus is asked in a round: which families, with which of their labels. Pure.

Every selector has the user's `--match`. Series are brought to the labels needed here by `max by (…)`: the rest of them
(the driver's version, the copy of an HA pair) costs nothing on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from podgpu.cluster.prom import promql
from podgpu.cluster.prom.promql import Matcher, is_
from podgpu.figures.device import (
    FB_FREE,
    FB_RESERVED,
    FB_TOTAL,
    FB_USED,
    GR_ENGINE,
    POWER,
    SIMULATED,
    TEMPERATURE,
    UTIL,
)
from podgpu.metrics import families as f
from podgpu.metrics.conditions import FIELD_CONDITIONS
from podgpu.metrics.families import EXPORTED, JOB_LABEL, NAMELESS_LABELS, OLD_POD_LABELS, POD_LABELS, FamilySpec
from podgpu.metrics.fields import XID_FIELD, Field
from podgpu.metrics.names import names_of

_IDENTITY = (
    *("job", "instance", "UUID", "uuid", "gpu_uuid", "gpu"),
    *("GPU_I_ID", "GPU_I_PROFILE", "modelName", "model_name"),
)
HOLDER_LABELS = (
    *(*POD_LABELS, *EXPORTED.values(), *OLD_POD_LABELS),
    *(JOB_LABEL, *NAMELESS_LABELS, "vgpu"),
)
SAMPLE_LABELS = ("__name__", *_IDENTITY, *HOLDER_LABELS)
_SLIM_LABELS = ("__name__", "job", "instance", "UUID", "uuid", "gpu_uuid", "GPU_I_ID", *HOLDER_LABELS)
"""What tells whose a sample is, where others tell the rest of its GPU."""
_TARGET = ("job", "instance")

_TIMED = (UTIL, GR_ENGINE, TEMPERATURE)
"""Any of these tells when a target was last scraped; few counter files are without all of them. Where no GPU answers,
that is what is told of each."""


def _names(*ids: int) -> tuple[str, ...]:
    return tuple(name for number in ids for name in names_of(number))


_MEMORY = (*_names(FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED), f.DEVICE_MEMORY.name)


@dataclass(frozen=True, slots=True)
class Part:
    """One query of the round."""

    name: str
    names: tuple[str, ...]
    needed: bool = False
    """Without its answer the round has failed: what is held would look free, or the exporter's pod like a holder."""
    identifies: bool = False
    """Its series tell all about the GPUs they are of, in every round; the labels of others may be left out."""
    averaged: bool = False
    """The rolling average is made of its series."""
    whole: bool = False
    """Its labels are never left out."""
    extra: tuple[str, ...] = ()
    """Labels beside those of a sample."""
    matchers: tuple[Matcher, ...] = ()
    above_zero: bool = False
    """A zero says nothing, and is left on the server."""
    zero: bool = False
    """Only a zero says something."""


@dataclass(frozen=True, slots=True)
class Queries:
    match: tuple[Matcher, ...]
    node_labels: tuple[str, ...]
    used_field: Field
    beside: tuple[int, ...] = ()

    def parts(self, memory: tuple[str, ...] = _MEMORY) -> tuple[Part, ...]:
        """`memory`: the names to ask of a GPU's memory."""
        utilisation = dict.fromkeys(_names(UTIL, GR_ENGINE, self.used_field.id, *self.beside))
        return (
            Part("GPUs", (*utilisation, *_names(TEMPERATURE)), needed=True, identifies=True, averaged=True),
            Part(
                *("holders", _own(f.ALLOCATION_INFO, f.ALLOCATION_SHARE, f.CONTAINER_PROCESSES)),
                needed=True,
                averaged=True,
            ),
            Part("memory", memory),
            Part("power", (*_names(POWER), f.DEVICE_ENERGY.name)),
            Part("use by containers", _own(f.CONTAINER_UTILIZATION, f.CONTAINER_MEMORY)),
            Part("time by containers", _own(f.CONTAINER_BUSY, f.CONTAINER_IDLE, f.CONTAINER_ENERGY)),
            Part("namespaces", _own(f.NAMESPACE_ALLOCATED, f.NAMESPACE_BUSY, f.NAMESPACE_ENERGY), whole=True),
            Part("exporters", _own(f.BUILD_INFO, f.SNAPSHOT_TIMESTAMP), whole=True),
            Part(
                *("simulated sources", _own(f.SOURCE_UP)),
                whole=True,
                extra=("source",),
                matchers=(is_("source", SIMULATED),),
            ),
            Part("failing sources", _own(f.SOURCE_UP), whole=True, extra=("source",), zero=True),
            Part(*("lost GPUs", _own(f.DEVICE_COUNT)), whole=True, extra=("state",), matchers=(is_("state", "lost"),)),
            Part(
                *("conditions", _own(f.CONDITION_SINCE, f.LAST_HOLDER)),
                identifies=True,
                extra=("condition", "detail"),
            ),
            Part("faults", _names(*FIELD_CONDITIONS, XID_FIELD), whole=True, above_zero=True),
        )

    def samples(self, part: Part, copy_labels: Iterable[str] = (), slim: bool = False) -> str:
        """`slim`: without labels that other parts tell."""
        if slim and not (part.identifies or part.whole):
            labels: tuple[str, ...] = (*_SLIM_LABELS, *copy_labels)
        else:
            labels = (*SAMPLE_LABELS, *self.node_labels, *part.extra, *copy_labels)
        above = " > 0" if part.above_zero else ""
        highest = f"max{promql.by(*labels)} ({promql.selector(part.names, *part.matchers, *self.match)}{above})"
        return f"{highest} == 0" if part.zero else highest

    def targets(self, with_match: bool = True, names: Sequence[str] = ()) -> str:
        """`up` of the targets with GPUs, with all its labels: whose pods the exporters are, and what copies differ in.

        A label that `--match` asks for may be one that only the exporter's series have: `with_match` off, then.
        `names`: of series that every target has one of, where they are known.
        """
        up = promql.selector(("up",), *(self.match if with_match else ()))
        gpus = promql.selector(names or timed_names(), *self.match)
        return f"{up} and on (job, instance) group by (job, instance) ({gpus})"

    def times(self, copy_labels: Iterable[str] = (), names: Sequence[str] = ()) -> str:
        """When each target's newest sample is of. `timestamp` leaves the name out, so it takes one at a time."""
        labels = promql.by(*_TARGET, *copy_labels)
        each = (f"max{labels} (timestamp({promql.selector((name,), *self.match)}))" for name in names or timed_names())
        return " or ".join(each)


def timed_names() -> tuple[str, ...]:
    return (*_names(*_TIMED), f.CONDITION_SINCE.name)


def _own(*specs: FamilySpec) -> tuple[str, ...]:
    return tuple(spec.name for spec in specs)
