"""Rewrites the generated blocks of README.md and docs/*.md from the code: `python -m docs.generate [--check]`.

A block lies between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`; everything else is written by people.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from docs.fault_table import fault_table
from docs.option_blocks import OPTION_BLOCKS, code, prose, table
from podgpu.agent.loop import Agent, Settings
from podgpu.clock import Clock
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.holders.kubelet import decode_list, parse_assignments
from podgpu.metrics.conditions import conditions, words_for
from podgpu.metrics.counters import SHIPPED, Counter, shipped_counters
from podgpu.metrics.families import (
    AUTOSCALE_FAMILIES,
    CLUSTER_FAMILIES,
    GPU_MANAGER_FAMILIES,
    HOOK_FAMILIES,
    OWN_FAMILIES,
    SEED_FAMILIES,
    FamilySpec,
)
from podgpu.metrics.fields import Call, Field, FieldValue, Gpm, Recorded, fields
from podgpu.metrics.names import Rename, renames
from podgpu.metrics.render import Policy
from podgpu.model import Allocation, Device
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedPod, list_answer
from podgpu.simulate.node import place_loads, pods, tenants

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(<!-- generated:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /generated:(?P=name) -->)", re.DOTALL)
_MARK = re.compile(r"<!-- /?generated:[\w-]+ -->")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a block is stale")
    check = parser.parse_args(arguments).check
    stale = 0
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        fresh = refresh(text, path.name)
        if fresh != text:
            stale += 1
            if check:
                print(f"{path.relative_to(ROOT)} is stale: {_first_difference(text, fresh)} (run make docs)")
            else:
                path.write_text(fresh, encoding="utf-8")
                print(f"{path.relative_to(ROOT)}: rewritten")
    return 1 if check and stale else 0


def refresh(text: str, name: str) -> str:
    """The text with every block made anew."""
    fresh = _BLOCK.sub(lambda m: f"{m[1]}{_body(m['name'], name)}{m[4]}", text)
    if len(_MARK.findall(text)) != 2 * len(_BLOCK.findall(text)):
        raise SystemExit(f"{name}: a generated block is opened and not closed, or closed and not opened")
    return fresh


def _body(block: str, file: str) -> str:
    if block not in BLOCKS:
        raise SystemExit(f"{file}: no such generated block: {block}; there are {', '.join(BLOCKS)}")
    return "".join(f"{line}\n" for line in BLOCKS[block]())


def _first_difference(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    changed = [line[:120] for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return " -> ".join(changed[:2])


# --- tables


def _metrics() -> Iterator[str]:
    own = (_metric_row(f, f.help) for f in OWN_FAMILIES)
    theirs = (_metric_row(f, f"With --gpu-manager-metrics: {f.help}.") for f in GPU_MANAGER_FAMILIES)
    return table(("Metric", "Type", "Labels", "Meaning"), (*own, *theirs))


def _cluster_metrics() -> Iterator[str]:
    rows = (_metric_row(family, family.help) for family in (*SEED_FAMILIES, *CLUSTER_FAMILIES))
    return table(("Metric", "Type", "Labels", "Meaning"), rows)


def _hook_metrics() -> Iterator[str]:
    return table(
        ("Metric", "Type", "Labels", "Meaning"), (_metric_row(family, family.help) for family in HOOK_FAMILIES)
    )


def _autoscale_metrics() -> Iterator[str]:
    return table(
        ("Metric", "Type", "Labels", "Meaning"), (_metric_row(family, family.help) for family in AUTOSCALE_FAMILIES)
    )


def _metric_row(family: FamilySpec, meaning: str) -> tuple[str, ...]:
    return code(family.name), family.type, ", ".join(map(code, family.labels)), prose(meaning)


def _conditions() -> Iterator[str]:
    rows = []
    for spec in conditions().values():
        says, do = words_for(spec.name, _DETAILS.get(spec.name, ""))
        rows.append((code(spec.name), spec.severity, says, do))
    yield from table(("condition", "severity", "says", "what to do"), rows)


_DETAILS = {"xid": "79", "nvlink": "2/18", "driver_away": "driver_not_loaded", "unreadable": "hung"}
"""For example."""


def _counters() -> Iterator[str]:
    """Every field of the shipped files in one row; how the 1.x file names it in the row's own column."""
    files = {short: {c.field.id: c for c in shipped_counters(short) or ()} for short in SHIPPED}
    head = ("Field", "Type", *(code(f"-f {short}") for short in ("default", "dcp")), "Name with `-f 1.x`", "Meaning")
    ids = sorted({i for counters in files.values() for i in counters})
    return table(head, (_counter_row({short: c.get(i) for short, c in files.items()}) for i in ids))


def _counter_row(of: Mapping[str, Counter | None]) -> tuple[str, ...]:
    old, new = of["1.x"], of["default"] or of["dcp"]
    counter = new or old
    assert counter is not None
    kind = f"{new.type} (1.x: {old.type})" if new and old and new.type != old.type else counter.type
    ticks = ("yes" if of[short] else "" for short in ("default", "dcp"))
    since = " Hopper and later." if isinstance(counter.field.recipe, Gpm) else ""
    return code(counter.field.name), kind, *ticks, code(old.name if old else ""), prose(counter.help) + since


def _fields() -> Iterator[str]:
    head = ("Id", "Name", "Name since DCGM 4.6", "Name in 1.x", "Unit", "Is", "MIG instances", "From")
    rows = (_field_row(f) for f in fields().values() if f.recipe is not None)
    return table(head, rows)


def _field_row(field: Field) -> tuple[str, ...]:
    names = (code(name) for name in (field.name, field.name_since_4_6, field.name_1x))
    own = "own value" if field.per_instance else ""
    return str(field.id), *names, prose(field.unit), _in_other_unit(field), own, _origin(field)


def _in_other_unit(field: Field) -> str:
    """Of a field in a base unit: the older one it stands for, and where its name was seen."""
    if field.legacy is None:
        return ""
    return f"field {field.legacy} × {field.factor:.10g} ({field.seen})"


def _renames(default: bool) -> Iterator[str]:
    """Fields with another name in dcgm-exporter 4.9: those of the default file, or the others that podgpu gives."""
    shipped = {counter.field.id for counter in shipped_counters("default") or ()}
    found = [r for r in renames() if r.old.recipe is not None and (r.old.id in shipped) == default]
    head = ("4.8", "Id", "Unit", "4.9", "Id", "Unit", "New = old ×", "New name seen in")
    return table(head, map(_rename_row, found))


def _rename_row(rename: Rename) -> tuple[str, ...]:
    old, new = rename.old, rename.new
    same = rename.factor == 1.0
    seen = new.seen or "DCGM 4.6 header"
    return (
        *(code(rename.old_name), str(old.id), prose(old.unit), code(rename.new_name)),
        *("" if same else str(new.id), "" if same else prose(new.unit)),
        *("" if same else f"{rename.factor:.10g}", f"**{seen}**" if seen == "inferred" else seen),
    )


def _origin(field: Field) -> str:
    match field.recipe:
        case Call(function=function):
            return code(function)
        case FieldValue(ids=ids):
            return f"NVML field {'+'.join(map(str, ids))}"
        case Gpm(metric=metric):
            return f"GPM metric {metric} (Hopper and later)"
        case Recorded():
            return "kept by podgpu"
    return ""


# --- the sample: the demo's node on a clock that moves when told, with loads that do not stray


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_800_000_000.0 + self.now


class _Kubelet:
    """The kubelet's answer without its socket."""

    name = "kubelet"

    def __init__(self, on_node: list[SimulatedPod]) -> None:
        self._answer = decode_list(list_answer(on_node))

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        return parse_assignments(self._answer, devices)

    def close(self) -> None:
        pass


def _demo_exposition() -> list[str]:
    clock = _Clock()
    driver = SimulatedNvml("8xH100", clock=clock, wall=clock.wall, unrest=0.0)
    on_node = tenants(driver)
    place_loads(driver, on_node)
    policy = Policy(counters=shipped_counters("dcp") or (), hostname="simulated-node")
    telemetry = NvmlTelemetry(driver, "simulated", lambda: len(driver.machine.gpus), clock, clock.wall)
    agent = Agent(telemetry, [_Kubelet(pods(on_node))], Settings(policy=policy), Clock(clock, clock.wall))
    for _ in range(2):
        clock.now += 30.0
        agent.read_telemetry()
    agent.read_allocation()
    agent.stop()
    return agent.published.fresh.plain.decode().splitlines()


_SAMPLES = (
    ("DCGM_FI_DEV_GPU_UTIL", 'gpu="0"'),
    ("DCGM_FI_DEV_POWER_USAGE", 'gpu="0"'),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 'gpu="2"'),
    ("podgpu_device_count", 'state="lost"'),
)


def _sample() -> Iterator[str]:
    """One whole line of each family."""
    lines = _demo_exposition()
    yield "```text"
    for family, label in _SAMPLES:
        yield next(line for line in lines if line.startswith(f"{family}{{") and label in line)
    yield "```"


BLOCKS: Mapping[str, Callable[[], Iterator[str]]] = {
    "sample": _sample,
    **OPTION_BLOCKS,
    "metrics": _metrics,
    "cluster-metrics": _cluster_metrics,
    "hook-metrics": _hook_metrics,
    "autoscale-metrics": _autoscale_metrics,
    "conditions": _conditions,
    "counters": _counters,
    "fields": _fields,
    "renames-default": lambda: _renames(default=True),
    "renames-others": lambda: _renames(default=False),
    "faults": fault_table,
}

if __name__ == "__main__":
    gc.disable()  # it ends soon: looking for garbage among six hundred syntax trees is more than half of its time
    sys.exit(main())
