"""This module asks for the used-GPU utilisation by scope at an instant, as Prometheus computes it, for the rolling
average. Pure.

At each instant a scope's figure is the mean over its devices in use, 0 when it has devices with data and none is in
use; the average is that of the instants at which it had data. Instants are multiples of the interval. Each is asked
for once, and kept: a subquery over the window would have the server work out all of them anew in every round, which
takes Prometheus 2 ten seconds for 8,000 GPUs.

A device is its UUID, so that the copies of an HA pair count once. Series without a UUID are left out: nothing says
which of them are the same GPU. What the view does with one round (`used.py`) is done here with each instant.

Prometheus works out every part of an expression anew wherever it stands, at every instant: what is not needed is not in
it, and the 0 of a scope is taken from the bare series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from podgpu.cluster.prom import promql
from podgpu.cluster.prom.promql import Matcher, by, has, is_
from podgpu.cluster.prom.spellings import Spellings
from podgpu.cluster.reading import Scope
from podgpu.cluster.rolling import RollingMemory
from podgpu.cluster.settings import ViewSettings
from podgpu.metrics import families as f
from podgpu.metrics.families import EXPORTED, OLD_POD_LABELS, POD_LABELS
from podgpu.metrics.fields import Field
from podgpu.metrics.mig import billed_name
from podgpu.metrics.names import generations, names_of, successors
from podgpu.metrics.parse import ParsedSample

_NAMESPACE = "podgpu_namespace"
"""A label of our own, for what may stand under three names."""
NAMESPACE_OF = {names[1]: names[0] for names in (tuple(EXPORTED.values()), POD_LABELS, OLD_POD_LABELS)}
OVER_FULL = 1.01
_ANYTHING = "(?s)(.+)"


def last_instant(at: float, interval: float) -> float:
    """The last multiple of the interval."""
    step = max(1, round(interval * 1000))
    return round(at * 1000) // step * step / 1000


@dataclass(frozen=True, slots=True)
class RollingQueries:
    match: tuple[Matcher, ...]
    up_match: tuple[Matcher, ...]
    """What `up` has of `match`."""
    node_labels: tuple[str, ...]
    used_field: Field
    settings: ViewSettings
    spelt: Spellings

    def all(self) -> dict[str, str]:
        """Kind of scope -> query."""
        return {
            "cluster": self._ratio(self._mean(())),
            "node": self._ratio(" or ".join(self._mean((label,), *self._named_by(label)) for label in self._names)),
            "model": self._ratio(self._mean(self._model_labels)),
            "namespace": self._ratio(self._mean_by_namespace()),
        }

    # Scopes

    @property
    def _names(self) -> tuple[str, ...]:
        return self.spelt.nodes or self.node_labels

    def _named_by(self, label: str) -> tuple[Matcher, ...]:
        """Series that have this label, and none of those that count before it."""
        before = self.node_labels[: self.node_labels.index(label)]
        return has(label), *(is_(name) for name in before if name in self._names)

    @property
    def _model_labels(self) -> tuple[str, ...]:
        """MIG instances are of a model of their own, where they have a figure of their own."""
        return ("modelName", "GPU_I_PROFILE") if self.used_field.per_instance else ("modelName",)

    def _ratio(self, expression: str) -> str:
        return f"({expression}) / {self.settings.full:g}"

    def _mean(self, labels: tuple[str, ...], *more: Matcher) -> str:
        """Of the devices in use, by these labels; 0 where there are only others."""
        devices = self._devices(labels, *more)
        if self.settings.used_means == "processes":  # a device counts where somebody counts its processes
            there = f"{devices} and on ({self._key}) {self._own(f.CONTAINER_PROCESSES.name)}"
        else:
            there = " or ".join(f"group{by(*labels)} ({series})" for series in self._series_of_devices(*more))
        return f"(avg{by(*labels)} ({self._used(devices)}) or group{by(*labels)} ({there}) * 0)"

    def _mean_by_namespace(self) -> str:
        """A GPU held from several namespaces counts in each."""
        held = f"({self._held_from()} * on ({self._key}) group_left () {self._devices(())})"
        there = held
        if self.settings.used_means == "processes":
            there = f"{held} and on ({self._key}) {self._own(f.CONTAINER_PROCESSES.name)}"
        return f"(avg by ({_NAMESPACE}) ({self._used(held)}) or group by ({_NAMESPACE}) ({there}) * 0)"

    def _used(self, devices: str) -> str:
        match self.settings.used_means:
            case "busy":
                return f"{devices} > 0"
            case "allocated":
                return f"{devices} and on ({self._key}) {self._held()}"
            case "processes":
                return f"{devices} and on ({self._key}) ({self._own(f.CONTAINER_PROCESSES.name)} > 0)"

    # Devices

    @property
    def _keys(self) -> tuple[str, ...]:
        """A MIG instance is a device where the field is one of instances; else its GPU is."""
        return ("UUID", "GPU_I_ID") if self.used_field.per_instance else ("UUID",)

    @property
    def _key(self) -> str:
        return ", ".join(self._keys)

    def _devices(self, labels: Iterable[str], *more: Matcher) -> str:
        """The field of each device, whatever its series carry beside `labels`."""
        wanted = (*self._keys, *labels)
        each = [
            f"max{by(*wanted)} ({series})"
            if uuid == "UUID"
            else f"max{by(*wanted)} ({_with_upper_case(f'max{by(uuid, *wanted)} ({series})')})"
            for uuid, series in zip(self.spelt.uuids, self._series_of_devices(*more), strict=True)
        ]
        return f"({' or '.join(each)})"

    def _series_of_devices(self, *more: Matcher) -> list[str]:
        """One for each way to spell a UUID. No sentinel is a percentage, and no NaN is less than anything."""
        identity = {"UUID": (has("UUID"),), "uuid": (is_("UUID"), has("uuid"))}
        possible = f"<= {self.settings.full * OVER_FULL:g}"
        return [
            f"{self._field(*identity[uuid], *more)} {possible}{self._but_for_cut_gpus(uuid, identity[uuid])}"
            for uuid in self.spelt.uuids
        ]

    def _but_for_cut_gpus(self, uuid: str, identity: tuple[Matcher, ...]) -> str:
        """A GPU whose instances have the field does not count beside them."""
        if not self.used_field.per_instance:
            return ""
        whole, instance = is_("GPU_I_ID"), has("GPU_I_ID")
        return f" unless ({self._field(*identity, whole)} and on ({uuid}) {self._field(*identity, instance)})"

    # Holders

    def _held(self) -> str:
        """Devices that somebody holds."""
        own = (f.ALLOCATION_INFO.name, f.CONTAINER_PROCESSES.name) if self.spelt.has_allocations else ()
        holding = [*map(self._own, own), *(self._of_pods(self._names_of_field, label) for label in self.spelt.pods)]
        if not holding:
            holding = [self._own(f.ALLOCATION_INFO.name)]
        each = " or ".join(f"group{by('uuid', *self._keys)} ({series})" for series in holding)
        return f"group{by(*self._keys)} ({_with_upper_case(each)})"

    def _held_from(self) -> str:
        """Devices and the namespaces they are held from, each with the value 1."""
        own = (f.ALLOCATION_INFO.name,) if self.spelt.has_allocations else ()
        names = (*self._names_of_field, *own)
        spelt = [label for label in self.spelt.pods if label in NAMESPACE_OF] or ["pod"]
        each = " or ".join(
            _copied(
                NAMESPACE_OF[label],
                _NAMESPACE,
                f"group{by('uuid', *self._keys, NAMESPACE_OF[label])} ({self._of_pods(names, label)})",
            )
            for label in spelt
        )
        return f"group{by(*self._keys, _NAMESPACE)} ({_with_upper_case(each)})"

    def _of_pods(self, names: tuple[str, ...], label: str) -> str:
        """Series with a holder under this label. A plain `pod` may be the scrape target's own, put on by Prometheus."""
        if label != "pod":
            return self._series(names, has(label))
        up = promql.selector(("up",), *self.up_match)
        series = self._series(names, has("pod"), is_(EXPORTED["pod"]))
        return f"({series} unless on (job, instance, namespace, pod) {up})"

    @property
    def _names_of_field(self) -> tuple[str, ...]:
        return names_of(self.used_field.id)

    def _field(self, *matchers: Matcher) -> str:
        """In the field's own unit, whichever of its names a node has. Where one has both, the series are alike."""
        each = [
            self._in_own_unit(names, self._series(names, *matchers))
            for names, used in zip(generations(self.used_field.id), self.spelt.generations, strict=True)
            if names and used
        ]
        return each[0] if len(each) == 1 else f"({' or '.join(each)})"

    def _in_own_unit(self, names: tuple[str, ...], series: str) -> str:
        new = successors().get(self.used_field.id)
        return series if new is None or new.name not in names else f"({series} / {new.factor:g})"

    def _own(self, name: str) -> str:
        return self._series((name,))

    def _series(self, names: tuple[str, ...], *matchers: Matcher) -> str:
        return promql.selector(names, *matchers, *self.match)


def _with_upper_case(series: str) -> str:
    """The 1.x names come with `uuid`, podgpu's own of the same GPU with `UUID`."""
    return _copied("uuid", "UUID", series)


def _copied(label: str, to: str, series: str) -> str:
    """A label also under another name, where it is there."""
    return f'label_replace({series}, "{to}", "$1", "{label}", "{_ANYTHING}")'


def scope_of(kind: str, labels: Mapping[str, str], node_labels: Iterable[str]) -> Scope | None:
    """Whose figure a sample of the answer is; None: nobody's (a namespace without a name)."""
    match kind:
        case "node":
            return Scope("node", node=next((labels[name] for name in node_labels if labels.get(name)), ""))
        case "model":
            profile = labels.get("GPU_I_PROFILE", "")
            model = labels.get("modelName", "")
            return Scope("model", model=billed_name(model, profile) if profile else model)
        case "namespace":
            namespace = labels.get(_NAMESPACE, "")
            return Scope("namespace", namespace=namespace) if namespace else None
    return Scope("cluster")


def figures_by_scope(answers: Mapping[str, Iterable[ParsedSample]], node_labels: Iterable[str]) -> dict[Scope, float]:
    """Of one instant. `answers`: kind of scope -> samples. What is no ratio was not asked for, and is nobody's."""
    labels = tuple(node_labels)
    found: dict[Scope, float] = {}
    for kind, samples in answers.items():
        for sample in samples:
            scope = scope_of(kind, sample.labels, labels)
            if scope is not None and sample.value <= OVER_FULL:
                found[scope] = max(sample.value, found.get(scope, 0.0))
    return found


class RollingInstants:
    """What the server said of each instant of the window. Another set of queries begins anew."""

    def __init__(self, settings: ViewSettings) -> None:
        self._interval, self._window = settings.interval, settings.window
        self._memory = RollingMemory()
        self._queries: Mapping[str, str] = {}
        self._known_to = -math.inf
        """The last instant that is known; all of the window before it are."""

    def missing(self, queries: Mapping[str, str], at: float) -> list[float]:
        """Instants up to `at` that are not known yet, the oldest first."""
        if queries != self._queries or at < self._known_to:
            self._queries, self._known_to = queries, -math.inf
            self._memory.clear()
        count = math.ceil(self._window / self._interval)
        instants = (round(at - n * self._interval, 3) for n in reversed(range(count)))
        return [instant for instant in instants if instant > self._known_to]

    def take(self, instant: float, figures: Mapping[Scope, float]) -> None:
        self._memory.add(instant, self._interval, figures)
        self._known_to = instant

    def averages(self, at: float) -> dict[Scope, float]:
        return self._memory.averages(at, self._interval, self._window)
