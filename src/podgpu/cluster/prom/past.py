"""This module knows what Prometheus is asked about the past of some GPUs, and what its answers come to. Pure.

Each question is about the end of every step of the window. Where a step is longer than 15 s, figures are the mean of
looks 15 s apart, and whoever was there at one of the looks was there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from podgpu.cluster.prom import promql
from podgpu.cluster.prom.answer import Line
from podgpu.cluster.prom.promql import Matcher, by, has, is_
from podgpu.cluster.prom.queries import HOLDER_LABELS
from podgpu.cluster.prom.targets import Labels, with_own_holder
from podgpu.figures.device import FB_USED, GR_ENGINE, POWER, TEMPERATURE, UTIL
from podgpu.figures.figure_names import first_label, holder_of
from podgpu.history.asking import STEP, Kept, Window
from podgpu.history.columns import Sample
from podgpu.history.rows import Key
from podgpu.history.spans import PATIENCE, Mark, Span
from podgpu.metrics import families as f
from podgpu.metrics.conditions import conditions, words_for
from podgpu.metrics.fields import fields
from podgpu.metrics.names import meaning, names_of
from podgpu.model import Who, Workload

UUIDS = ("UUID", "uuid", "gpu_uuid")
_INSTANCE = "GPU_I_ID"
_BLANK = 0x7FFFFFF0
"""From here on DCGM's marks for "no value" begin."""
_MIB = 1024 * 1024
_MOST_RATIO = 1.01
_POD_NAMES = ((f.EXPORTED["namespace"], f.EXPORTED["pod"]), f.POD_LABELS[:2], f.OLD_POD_LABELS[:2])
Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class PastQueries:
    match: tuple[Matcher, ...]
    node_labels: tuple[str, ...]
    step: int

    def utilization(self, uuids: Sequence[str] = ()) -> str:
        """A GPU's own where there is one, and else its engine's activity; ratios."""
        return self._mean(f"({self._field(UTIL, uuids)}) / 100 or {self._field(GR_ENGINE, uuids)}")

    def figures(self, uuids: Sequence[str]) -> dict[str, str]:
        """By the names of a sample; bytes, watts and degrees."""
        memory = f"({self._field(FB_USED, uuids)}) * {_MIB} or {self._own((f.DEVICE_MEMORY.name,), uuids)}"
        return {
            "utilization": self.utilization(uuids),
            "memory": self._mean(memory),
            "watts": self._mean(self._field(POWER, uuids)),
            "temperature": self._mean(self._field(TEMPERATURE, uuids)),
        }

    def presence(self, uuids: Sequence[str]) -> str:
        """Which series there were of the GPUs: who held them, where they are."""
        labels = (_INSTANCE, "job", "instance", "gpu", *self.node_labels, *HOLDER_LABELS)
        names = (f.ALLOCATION_INFO.name, *names_of(UTIL), *names_of(GR_ENGINE))
        return self._any(" or ".join(f"group{by(x, *labels)} ({self._of(names, x, uuids)})" for x in UUIDS))

    def targets(self, uuids: Sequence[str]) -> str:
        """The exporters' own pods, which hold nothing: Prometheus may have put them on every series."""
        names = (f.ALLOCATION_INFO.name, *names_of(UTIL), *names_of(GR_ENGINE))
        theirs = " or ".join(f"group by (job, instance) ({self._of(names, x, uuids)})" for x in UUIDS)
        return self._any(f"group by (job, instance, namespace, pod) (up) and on (job, instance) ({theirs})")

    def held_by(self, namespace: str, pod: str) -> str:
        names = (f.ALLOCATION_INFO.name, *names_of(UTIL), *names_of(GR_ENGINE))
        found = []
        for of_namespace, of_pod in _POD_NAMES:
            whose = (is_(of_namespace, namespace), is_(of_pod, pod), *self.match)
            found.append(f"group{by(*UUIDS, _INSTANCE)} ({promql.selector(names, *whose)})")
        return self._any(" or ".join(found))

    def own(self, name: str, uuids: Sequence[str]) -> str:
        """A family of podgpu's about holders."""
        labels = (_INSTANCE, "job", "instance", *HOLDER_LABELS)
        each = (f"max{by(x, *labels)} ({self._of((name,), x, uuids)})" for x in UUIDS)
        return self._mean(" or ".join(each))

    def health(self, uuids: Sequence[str]) -> str:
        each = (
            f"max{by(x, _INSTANCE, 'condition')} ({self._of((f.DEVICE_HEALTH.name,), x, uuids)} == 1)" for x in UUIDS
        )
        return self._any(" or ".join(each))

    def _field(self, number: int, uuids: Sequence[str]) -> str:
        """In the older unit. dcgm-exporter repeats a GPU's own figures on its instances: they stay the GPU's."""
        by_factor: dict[float, list[str]] = {}
        for name in names_of(number):
            known = meaning(name)
            by_factor.setdefault(1.0 if known is None else known.factor, []).append(name)
        keys = (_INSTANCE,) if fields()[number].per_instance else ()
        parts = []
        for factor, names in by_factor.items():
            for label in UUIDS:
                series = f"max{by(label, *keys)} ({self._of(names, label, uuids)} < {_BLANK * factor:.0f})"
                parts.append(series if factor == 1.0 else f"{series} / {factor!r}")
        return " or ".join(parts)

    def _own(self, names: Sequence[str], uuids: Sequence[str]) -> str:
        return " or ".join(f"max{by(x, _INSTANCE)} ({self._of(names, x, uuids)})" for x in UUIDS)

    def _of(self, names: Sequence[str], label: str, uuids: Sequence[str]) -> str:
        whose = Matcher(label, "=~", promql.any_of(uuids)) if uuids else has(label)
        return promql.selector(tuple(names), whose, *self.match)

    def _mean(self, series: str) -> str:
        return series if self.step <= STEP else f"avg_over_time(({series})[{self.step}s:{STEP}s])"

    def _any(self, series: str) -> str:
        return series if self.step <= STEP else f"max_over_time(({series})[{self.step}s:{STEP}s])"


# What is answered


@dataclass(frozen=True, slots=True)
class PastAnswers:
    """What was answered about some GPUs, each step of the window by its number."""

    window: Window
    figures: Mapping[str, Sequence[Line]]
    presence: Sequence[Line]
    targets: Sequence[Line]
    own_utilization: Sequence[Line]
    own_memory: Sequence[Line]
    health: Sequence[Line]


def kept_of(answers: PastAnswers, node_labels: Sequence[str]) -> list[Kept]:
    """All devices that were told of."""
    window = answers.window
    figures = {name: _by_device(lines, window) for name, lines in answers.figures.items()}
    own_pods = _own_pods(answers.targets)
    there = _Presence(answers.presence, window, own_pods, node_labels)
    own = _own_samples(answers, own_pods)
    marks = _marks(answers.health, window, there.told)
    devices = there.told.keys() | {key for of_name in figures.values() for key in of_name}
    nothing: Values = [None] * window.count
    return [
        Kept(
            key,
            there.nodes.get(key.uuid, ""),
            there.indexes.get(key.uuid, -1),
            [
                Sample(_ratio(utilization), None if memory is None else round(memory), watts, temperature)
                for utilization, memory, watts, temperature in zip(
                    *(figures[name].get(key, nothing) for name in ("utilization", "memory", "watts", "temperature")),
                    strict=True,
                )
            ],
            sorted([*there.spans.get(key, ()), *marks.get(key, ())], key=lambda span: span.start),
            own.get(key, {}),
        )
        for key in sorted(devices)
    ]


def device_of(labels: Labels) -> Key:
    return Key(first_label(labels, UUIDS), labels.get(_INSTANCE, ""))


def values_of(line: Line, window: Window) -> list[float | None]:
    """One for each step: that of its end."""
    found: list[float | None] = [None] * window.count
    for at, value in line.points:
        number = round((at - window.start) / window.step) - 1
        if 0 <= number < window.count:
            found[number] = value
    return found


def _by_device(lines: Iterable[Line], window: Window) -> dict[Key, list[float | None]]:
    return {key: values_of(line, window) for line in lines if (key := device_of(line.labels)).uuid}


def _own_pods(targets: Iterable[Line]) -> dict[tuple[str, str], frozenset[tuple[str, str]]]:
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for line in targets:
        get = line.labels.get
        if get("pod"):
            found.setdefault((get("job", ""), get("instance", "")), set()).add((get("namespace", ""), get("pod", "")))
    return {target: frozenset(pods) for target, pods in found.items()}


def _holder(labels: Labels, own_pods: Mapping[tuple[str, str], frozenset[tuple[str, str]]]) -> Workload | None:
    theirs = own_pods.get((labels.get("job", ""), labels.get("instance", "")), frozenset())
    return holder_of(with_own_holder(labels, theirs))


class _Presence:
    """Where the devices are, and who held them when."""

    def __init__(
        self,
        lines: Iterable[Line],
        window: Window,
        own_pods: Mapping[tuple[str, str], frozenset[tuple[str, str]]],
        node_labels: Sequence[str],
    ) -> None:
        self.told: dict[Key, set[int]] = {}
        """Steps in which there was anything of a device."""
        self.nodes: dict[str, str] = {}
        self.indexes: dict[str, int] = {}
        ranks: dict[str, int] = {}
        steps: dict[Key, dict[Who, tuple[Workload, set[int]]]] = {}
        for line in lines:
            labels, key = line.labels, device_of(line.labels)
            if not key.uuid:
                continue
            there = {n for n, value in enumerate(values_of(line, window)) if value is not None}
            self.told.setdefault(key, set()).update(there)
            rank = next((n for n, name in enumerate(node_labels) if labels.get(name)), len(node_labels))
            if rank < ranks.get(key.uuid, len(node_labels)):
                ranks[key.uuid], self.nodes[key.uuid] = rank, labels[node_labels[rank]]
            index = labels.get("gpu", "")
            if index.isdecimal() and len(index) < 9:
                self.indexes[key.uuid] = int(index)
            holder = _holder(labels, own_pods)
            if holder is not None:
                steps.setdefault(key, {}).setdefault(holder.who, (holder, set()))[1].update(there)
        self.spans = {
            key: [
                Span(start, holder, end)
                for holder, there in of_key.values()
                for start, end in runs(there, window, self.told[key])
            ]
            for key, of_key in steps.items()
        }


def runs(steps: Iterable[int], window: Window, told: Container[int] = ()) -> list[tuple[float, float | None]]:
    """From when to when it was there. A single step without it is no end, nor are five minutes in which nothing at all
    was told of its device."""
    found: list[list[int]] = []
    for step in sorted(steps):
        if found:
            missing = range(found[-1][1] + 1, step)
            nobody_knows = len(missing) * window.step <= PATIENCE and not any(n in told for n in missing)
            if len(missing) <= 1 or nobody_knows:
                found[-1][1] = step
                continue
        found.append([step, step])
    return [
        (
            window.start + first * window.step,
            None if last >= window.count - 1 else window.start + (last + 1) * window.step,
        )
        for first, last in found
    ]


def _own_samples(
    answers: PastAnswers, own_pods: Mapping[tuple[str, str], frozenset[tuple[str, str]]]
) -> dict[Key, dict[Who, list[Sample]]]:
    def lines(of: Iterable[Line], fits: Callable[[float | None], float | None]) -> dict[tuple[Key, Who], Values]:
        found: dict[tuple[Key, Who], Values] = {}
        for line in of:
            holder = _holder(line.labels, own_pods)
            if holder is not None:
                found[device_of(line.labels), holder.who] = [fits(v) for v in values_of(line, answers.window)]
        return found

    ratios, memories = lines(answers.own_utilization, _ratio), lines(answers.own_memory, lambda value: value)
    nothing: Values = [None] * answers.window.count
    found: dict[Key, dict[Who, list[Sample]]] = {}
    for key, who in ratios.keys() | memories.keys():
        pairs = zip(ratios.get((key, who), nothing), memories.get((key, who), nothing), strict=True)
        found.setdefault(key, {})[who] = [Sample(r, None if m is None else round(m)) for r, m in pairs]
    return found


def _marks(lines: Iterable[Line], window: Window, told: Mapping[Key, set[int]]) -> dict[Key, list[Span]]:
    found: dict[Key, list[Span]] = {}
    for line in lines:
        name = line.labels.get("condition", "")
        mark = Mark(name, words_for(name)[0] if name in conditions() else name)
        there = (n for n, value in enumerate(values_of(line, window)) if value is not None)
        key = device_of(line.labels)
        spans = [Span(start, mark, end) for start, end in runs(there, window, told.get(key, set()))]
        found.setdefault(key, []).extend(spans)
    return found


def _ratio(value: float | None) -> float | None:
    return None if value is None or not 0 <= value <= _MOST_RATIO else min(value, 1.0)
