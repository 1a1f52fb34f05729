"""This module makes the JSON of `/api/v1/history` (docs/api.md), from what is kept of devices. A gap is null, never 0.
Pure."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from podgpu.history.asking import JSON, Kept, Window
from podgpu.history.columns import BYTE_NONE, NO_SAMPLE, Sample
from podgpu.history.spans import Mark, Span
from podgpu.model import WORKLOAD_PARTS, Workload

N = TypeVar("N", int, float)


def sparklines_json(window: Window, lines: Mapping[str, bytes]) -> bytes:
    """`lines`: what a device is called -> a byte for each point. Those without any data are left out."""
    known = {name: b64encode(line).decode() for name, line in lines.items() if line.count(BYTE_NONE) < len(line)}
    document = {
        "api": "podgpu/v1",
        "from": round(window.start, 1),
        "step_seconds": window.step,
        "points": window.count,
        "devices": known,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def gpu_json(window: Window, kept: Kept) -> JSON:
    return {
        "api": "podgpu/v1",
        "uuid": kept.key.uuid,
        **({"instance": kept.key.instance} if kept.key.instance else {}),
        **_node(kept),
        **_times(window),
        "series": series_json(kept.samples),
        "holders": [_holder(span) for span in kept.spans if _is_in(span, window) and isinstance(span.what, Workload)],
        "marks": list(_marks(window, kept.spans)),
    }


def pod_json(window: Window, namespace: str, pod: str, devices: Iterable[Kept]) -> JSON | None:
    """None: it held none of them in that time."""
    found: list[JSON] = []
    marks: list[JSON] = []
    for kept in sorted(devices, key=lambda k: (k.node, k.index, k.key)):
        mine = [span for span in kept.spans if _is_in(span, window) and _is_of(span.what, namespace, pod)]
        if mine:
            name = {"uuid": kept.key.uuid, **({"instance": kept.key.instance} if kept.key.instance else {})}
            series = series_json(_of_pod(window, kept, mine))
            held = [_holder(span) for span in mine]
            found.append({**_node(kept), **name, "series": series, "holders": held})
            marks += [mark | name for mark in _marks(window, kept.spans)]
    if not found:
        return None
    head = {"api": "podgpu/v1", "namespace": namespace, "pod": pod, **_times(window)}
    return {**head, "devices": found, "marks": sorted(marks, key=lambda mark: mark["at"])}


# What a pod used


def _of_pod(window: Window, kept: Kept, mine: Sequence[Span]) -> list[Sample]:
    """While it held the device: what its containers used themselves where that is kept, and else the device's figures
    where nobody else held it. Watts of a device that several hold are nobody's."""
    containers = [(_steps(window, [span]), _own(kept, span)) for span in mine]
    whose = {id(span) for span in mine}
    shared = _steps(window, [s for s in kept.spans if isinstance(s.what, Workload) and id(s) not in whose])
    samples: list[Sample] = []
    for step, device in enumerate(kept.samples):
        here = [own[step] for steps, own in containers if step in steps]
        if not here:
            samples.append(NO_SAMPLE)
            continue
        used = Sample(_sum(own.utilization for own in here), _sum(own.memory for own in here))
        if step in shared:
            samples.append(used._replace(temperature=device.temperature))
        else:
            samples.append(device._replace(**{name: v for name, v in used._asdict().items() if v is not None}))
    return samples


def _own(kept: Kept, span: Span) -> Sequence[Sample]:
    nothing = [NO_SAMPLE] * len(kept.samples)
    return kept.own.get(span.what.who, nothing) if isinstance(span.what, Workload) else nothing


def _steps(window: Window, spans: Iterable[Span]) -> set[int]:
    return {step for span in spans for step in window.steps(span.start, span.end)}


def _sum(values: Iterable[N | None]) -> N | None:
    """None where one of them is not known: the rest would be less than the whole."""
    total = list(values)
    return None if None in total else sum(total)  # type: ignore[arg-type]


# Parts


def series_json(samples: Sequence[Sample]) -> JSON:
    return {
        "utilization_ratio": [_rounded(sample.utilization, 4) for sample in samples],
        "memory_used_bytes": [sample.memory for sample in samples],
        "power_watts": [_rounded(sample.watts, 1) for sample in samples],
        "temperature_celsius": [_rounded(sample.temperature, 0) for sample in samples],
    }


def _times(window: Window) -> JSON:
    return {"from": round(window.start, 1), "to": round(window.end, 1), "step_seconds": window.step}


def _node(kept: Kept) -> JSON:
    return {**({"node": kept.node} if kept.node else {}), **({"index": kept.index} if kept.index >= 0 else {})}


def _holder(span: Span) -> JSON:
    named = {name: value for name in WORKLOAD_PARTS if (value := getattr(span.what, name))}
    return {"from": round(span.start, 1), **_until("to", span), **named}


def _marks(window: Window, spans: Iterable[Span]) -> Iterator[JSON]:
    for span in spans:
        if isinstance(span.what, Mark) and _is_in(span, window):
            named = {"condition": span.what.condition, "says": span.what.says}
            yield {"at": round(span.start, 1), **_until("until", span), **named}


def _until(name: str, span: Span) -> JSON:
    return {} if span.end is None else {name: round(span.end, 1)}


def _is_in(span: Span, window: Window) -> bool:
    return span.overlaps(window.start, window.end)


def _is_of(what: Workload | Mark, namespace: str, pod: str) -> bool:
    return isinstance(what, Workload) and (what.namespace, what.pod) == (namespace, pod)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
