"""Rewrites the generated tables of README.md and docs/*.md: `python -m docs.generate [--check]`.

A table is between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from docs.option_blocks import OPTION_BLOCKS, code, prose, table
from podgpu.metrics.conditions import conditions, recovery_actions, words_for
from podgpu.metrics.counters import SHIPPED, CounterSpec, shipped_counters
from podgpu.metrics.encode import families_in
from podgpu.metrics.fields import Gpm, Rename, renames
from podgpu.metrics.otlp import HARDWARE, Metric, own_metrics
from podgpu.node.holders.reader import explanations

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(
    r"(<!-- generated:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /generated:(?P=name) -->)",
    re.DOTALL,
)
_MARK = re.compile(r"<!-- /?generated:[\w-]+ -->")
_DETAILS = {
    "xid": "79",
    "nvlink": "2/18",
    "driver_away": "driver_not_loaded",
    "unreadable": "hung",
    "recovery_action": "reset",
    "fabric": "in_progress",
    "kubernetes_unhealthy": "XID 79",
    "orphaned_memory": "pid 4711 (python3) of research/train-0/main holds 12.0 GiB",
    "recurring": "lost 3 times within 24 hours; last at 2026-11-19T06:10:00Z",
    "application_xid": "13 by research/train-0/main",
}
"""Condition -> example of its detail."""

_LABEL_GROUPS = {
    "device": (
        "gpu",
        "UUID",
        "pci_bus_id",
        "device",
        "modelName",
        "GPU_I_PROFILE",
        "GPU_I_ID",
        "Hostname",
    ),
    "container": ("container", "namespace", "pod"),
}
"""Name of a group -> labels that many metrics have in common."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a table is out of date"
    )
    check = parser.parse_args(arguments).check
    stale = 0
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        fresh = refresh(text, path.name)
        if fresh != text:
            stale += 1
            if check:
                print(
                    f"{path.relative_to(ROOT)} is out of date: "
                    f"{_first_difference(text, fresh)} "
                    "(run make docs)"
                )
            else:
                path.write_text(fresh, encoding="utf-8")
                print(f"{path.relative_to(ROOT)}: rewritten")
    return 1 if check and stale else 0


def refresh(text: str, name: str) -> str:
    fresh = _BLOCK.sub(
        lambda match: f"{match[1]}{_make_block(match['name'], name)}{match[4]}", text
    )
    if len(_MARK.findall(text)) != 2 * len(_BLOCK.findall(text)):
        raise SystemExit(f"{name}: a generated block is not closed, or not opened")
    return fresh


def _make_block(block: str, file: str) -> str:
    if block not in BLOCKS:
        raise SystemExit(f"{file}: unknown generated block {block}; valid are {', '.join(BLOCKS)}")
    return "".join(f"{line}\n" for line in BLOCKS[block]())


def _first_difference(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    changed = [line[:120] for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return " -> ".join(changed[:2])


def _metrics(group: str, note: str = "") -> Iterator[tuple[str, ...]]:
    for family in families_in(group).values():
        yield code(family.name), family.type, _labels(family.labels), prose(f"{note}{family.help}")


def _labels(labels: Sequence[str]) -> str:
    """Lists labels. Replaces the labels of a group by the name that docs/metrics.md defines."""
    text = ", ".join(map(code, labels))
    for name, group in _LABEL_GROUPS.items():
        text = text.replace(", ".join(map(code, group)), f"*{name}*")
    return text


def _metrics_table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    return table(("Metric", "Type", "Labels", "Meaning"), rows)


def _exporter_metrics() -> Iterator[str]:
    note = "With --gpu-manager-metrics: "
    return _metrics_table((*_metrics("exporter"), *_metrics("gpu-manager", note)))


def _conditions() -> Iterator[str]:
    rows = []
    for spec in conditions().values():
        says, _ = words_for(spec.name, _DETAILS.get(spec.name, ""))
        rows.append((code(spec.name), spec.severity, prose(says)))
    yield from table(("Condition", "Severity", "Text"), rows)


def _recovery_actions() -> Iterator[str]:
    rows = []
    for action in recovery_actions().values():
        rows.append((code(action.name), prose(action.says), prose(action.do)))
    yield from table(("Action", "The driver advises", "What to do"), rows)


def _unmapped() -> Iterator[str]:
    rows = [
        (code(reason), prose(f"source {source}: {text.reason}" if source else text.reason))
        for (source, reason), text in explanations().items()
    ]
    yield from table(("Reason", "Meaning"), rows)


def _counters() -> Iterator[str]:
    names = [short for short in SHIPPED if short != "1.x-all"]
    files = {short: {c.field.id: c for c in shipped_counters(short) or ()} for short in names}
    ids = sorted({i for counters in files.values() for i in counters})
    if files["default"].keys() != files["dcp"].keys():
        raise SystemExit(
            "docs/counters.md says that default and dcp have the same fields, but they differ"
        )
    head = ("Field", "Type", "In `default`", "Name in `1.x`")
    return table(head, (_counter_row({short: c.get(i) for short, c in files.items()}) for i in ids))


def _counter_row(counters: Mapping[str, CounterSpec | None]) -> tuple[str, ...]:
    old, new = counters["1.x"], counters["default"]
    counter = new or old
    assert counter is not None
    since = " (Hopper and later)" if isinstance(counter.field.recipe, Gpm) else ""
    return (
        code(counter.field.name) + since,
        counter.type,
        "yes" if new else "no",
        code(old.name if old else ""),
    )


def _changed_units() -> Iterator[str]:
    shipped = {counter.field.id for counter in shipped_counters("default") or ()}
    changed = [
        r for r in renames() if r.old.recipe is not None and r.old.id in shipped and r.factor != 1.0
    ]
    head = ("4.8", "Unit", "4.9", "Unit", "New = old ×", "Source of the new name")
    return table(head, map(_rename_row, changed))


def _rename_row(rename: Rename) -> tuple[str, ...]:
    old, new = rename.old, rename.new
    names = code(old.name), prose(old.unit), code(rename.new_name), prose(new.unit)
    return *names, f"{rename.factor:.10g}", new.seen or "DCGM 4.6 header"


def _otlp_metrics() -> Iterator[str]:
    metrics: dict[str, Metric] = {metric.name: metric for metric in HARDWARE}
    for part in ("holder_usage", "device_totals", "namespaces"):
        metrics.update((member.metric.name, member.metric) for member in own_metrics(part))
    rows = []
    for metric in metrics.values():
        rows.append(
            (code(metric.name), metric.instrument, code(metric.unit), prose(metric.description))
        )
    return table(("Metric", "Instrument", "Unit", "Meaning"), rows)


BLOCKS: Mapping[str, Callable[[], Iterator[str]]] = {
    **OPTION_BLOCKS,
    "metrics": _exporter_metrics,
    "cluster-metrics": lambda: _metrics_table((*_metrics("seed"), *_metrics("cluster"))),
    "hook-metrics": lambda: _metrics_table(_metrics("hook")),
    "autoscale-metrics": lambda: _metrics_table(_metrics("autoscale")),
    "otlp-metrics": _otlp_metrics,
    "conditions": _conditions,
    "recovery-actions": _recovery_actions,
    "unmapped": _unmapped,
    "counters": _counters,
    "changed-units": _changed_units,
}

if __name__ == "__main__":
    sys.exit(main())
