"""Renames the metrics of dcgm-exporter 4.8 to those of 4.9, or writes both."""

from __future__ import annotations

import re

from podgpu.metrics.fields import NameSet, rename_of

_SAMPLE = re.compile(r"(?P<name>DCGM_\w+)\{(?P<labels>.*)\} (?P<value>\S+)")
_COMMENT = re.compile(r"# (?P<kind>HELP|TYPE) (?P<name>DCGM_\w+) (?P<rest>.*)")


def renamed(exposition: str, names: NameSet) -> str:
    """Returns a 4.8 exposition with other metric names."""
    if names == "4.8":
        return exposition
    return "".join(
        f"{line}\n" for old in exposition.splitlines() for line in _lines(old, keep=names == "both")
    )


def _lines(line: str, keep: bool) -> list[str]:
    if comment := _COMMENT.fullmatch(line):
        new = _new_name(comment["name"])
        written = f"# {comment['kind']} {new} {comment['rest']}"
        return [line, written] if keep and new != comment["name"] else [written]
    if sample := _SAMPLE.fullmatch(line):
        name, labels = sample["name"], _labels(sample["labels"], keep)
        new, value = _new_name(name), _value(name, sample["value"])
        both = keep and new != name
        return [f"{name}{{{labels}}} {sample['value']}"] * both + [f"{new}{{{labels}}} {value}"]
    return [_labels(line, keep)]


def _new_name(name: str) -> str:
    rename = rename_of(name)
    return name if rename is None else rename.new_name


def _value(name: str, text: str) -> str:
    rename = rename_of(name)
    return (
        text
        if rename is None or rename.factor == 1.0
        else repr(round(float(text) * rename.factor, 6))
    )


def _labels(labels: str, keep: bool) -> str:
    for old, new in (
        ("Hostname", "hostname"),
        ("DCGM_FI_DRIVER_VERSION", "DCGM_FI_SYSTEM_DRIVER_VERSION"),
    ):
        labels = re.sub(
            rf'\b{old}=("[^"]*")', rf"{old}=\1,{new}=\1" if keep else rf"{new}=\1", labels
        )
    return labels
