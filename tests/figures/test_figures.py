"""Figures from snapshots and from expositions: dcgm-exporter's own and the golden ones."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest

from podgpu.agent.node_document import from_snapshot
from podgpu.figures.device import FIELDS, DeviceFigures, View, holder_text
from podgpu.figures.from_exposition import view_of_exposition
from podgpu.figures.from_snapshot import view_of_snapshot
from podgpu.metrics.counters import Counter
from podgpu.metrics.fields import fields
from podgpu.metrics.parse import parse_text
from podgpu.metrics.render import Policy, render_node
from podgpu.metrics.text import encode
from podgpu.model import ContainerUsage, DeviceTotals, Outcome, Reading, Snapshot, Workload
from tests.top.scene import GIB, MIB, SERVER, TRAINER, gpu, snapshot

NODES = Path(__file__).parents[1] / "nodes"


def golden(name: str) -> View:
    return view_of_exposition(parse_text((NODES / name / "expected.prom").read_bytes().decode()))


def exposition(text: str) -> View:
    return view_of_exposition(parse_text(text))


def device(view: View, index: int, instance: str = "") -> DeviceFigures:
    (found,) = (d for d in view.devices if (d.index, d.instance) == (index, instance))
    return found


def names(figures: DeviceFigures) -> list[str]:
    return sorted(holder_text(h.holder) for h in figures.holders)


# Snapshots

USED = ContainerUsage("GPU-0", TRAINER, 0.5, 9 * GIB, 2, busy_ns=5 * 10**9, idle_ns=10**9, energy_mj=70_000)


def test_a_device_with_its_holder() -> None:
    reading = Reading(gpu(0), {203: 97, 250: 81559, 252: 1024, 155: 301.5, 150: 55})
    totals = (DeviceTotals("GPU-0", energy_mj=90_000),)
    (found,) = view_of_snapshot(
        snapshot(reading, held={"GPU-0": (TRAINER,)}, usage=(USED,), totals=totals), "n"
    ).devices
    assert (found.node, found.index, found.model, found.instance) == ("n", 0, "NVIDIA H100 80GB HBM3", "")
    assert (found.utilization, found.power_watts, found.temperature) == (0.97, 301.5, 55)
    assert (found.memory_used, found.memory_total, found.energy_joules) == (GIB, 81559 * MIB, 90.0)
    (holder,) = found.holders
    assert (holder.utilization, holder.memory, holder.processes) == (0.5, 9 * GIB, 2)
    assert (holder.busy_seconds, holder.idle_seconds, holder.energy_joules) == (5.0, 1.0, 70.0)


def test_what_was_not_read_is_absent() -> None:
    (found,) = view_of_snapshot(snapshot(Reading(gpu(0), {})), "n").devices
    figures = (found.utilization, found.memory_used, found.memory_total, found.power_watts, found.temperature)
    assert figures == (None,) * 5
    assert found.holders == ()


def test_a_holder_without_use_and_a_user_without_a_claim_are_both_there() -> None:
    shot = snapshot(Reading(gpu(0), {}), held={"GPU-0": (SERVER,)}, usage=(USED,))
    (found,) = view_of_snapshot(shot, "n").devices
    assert names(found) == ["research/train/main", "serving/chat/engine"]


def test_instances_take_their_engines_activity_and_the_ledgers_memory() -> None:
    instance = gpu(1, gi_id=7, profile="1g.10gb")
    totals = (DeviceTotals(instance.key, memory_used=3 * GIB),)
    (found,) = view_of_snapshot(snapshot(Reading(instance, {1001: 0.25}), totals=totals), "n").devices
    assert (found.instance, found.profile, found.utilization, found.memory_used) == ("7", "1g.10gb", 0.25, 3 * GIB)


def test_what_went_wrong_is_noted() -> None:
    outcomes = (Outcome("nvml", 0.1), Outcome("kubelet", 0.1, "refused", "nobody answers: mount its socket"))
    assert view_of_snapshot(Snapshot(1.0, outcomes=outcomes), "n").notes == (
        "kubelet: nobody answers: mount its socket",
    )


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        (TRAINER, "research/train/main"),
        (Workload("ns", "pod"), "ns/pod"),
        (Workload(job="4711"), "job 4711"),
        (Workload(uid="u", container_id="c" * 64), "pod u/cccccccccccc"),
        (Workload(container="main", uid="u", container_id="c" * 64), "pod u/main"),
        (Workload(container_id="c" * 64), "container cccccccccccc"),
        (Workload(uid="u"), "pod u"),
        (Workload(container="main", uid="u"), "pod u/main"),
        (Workload(), "-"),
    ],
)
def test_names_of_holders(workload: Workload, text: str) -> None:
    assert holder_text(workload) == text
    assert bool(workload.who) == (text != "-")


# Expositions


def test_an_exposition_tells_what_its_snapshot_told() -> None:
    """The same node, through the join, the encoder and the parser."""
    readings = (
        Reading(gpu(0), {203: 97, 250: 81559, 252: 1024, 155: 301.5, 150: 55}),
        Reading(gpu(1, gi_id=7, profile="1g.10gb"), {1001: 0.25, 250: 9984, 252: 10}),
    )
    totals = (DeviceTotals("GPU-0", energy_mj=90_000, memory_used=GIB),)
    held = {"GPU-0": (TRAINER, SERVER), "GPU-1/gi7": (SERVER,)}
    shot = snapshot(*readings, held=held, usage=(USED,), totals=totals)
    counters = tuple(Counter(fields()[i], fields()[i].name, "gauge", "h") for i in FIELDS)
    parsed = exposition(encode(render_node(from_snapshot(shot), Policy(counters, hostname="n"))).decode())

    def comparable(view: View) -> list[tuple[object, ...]]:
        return [
            astuple(replace(d, holders=tuple(sorted(d.holders, key=lambda h: h.who))))
            for d in sorted(view.devices, key=lambda d: d.place)
        ]

    assert comparable(parsed) == comparable(view_of_snapshot(shot, "n"))


def test_golden_shared() -> None:
    view = golden("shared")
    assert names(device(view, 0)) != names(device(view, 1)) == ["batch/two-slices/worker"]
    assert len(device(view, 0).holders) > 1
    assert (device(view, 0).utilization, device(view, 0).temperature, device(view, 0).power_watts) == (0.7, 52, 44.812)
    assert device(view, 0).memory_used == 2048 * MIB
    assert device(view, 0).memory_total == (20474 + 2048 + 512) * MIB
    assert {d.node for d in view.devices} == {"node-1"}


@pytest.mark.parametrize("name", ["mig", "mig-copy-parent"])
def test_golden_mig(name: str) -> None:
    """A GPU's own figures stay the GPU's, also where the exporter repeats them on the instances."""
    view = golden(name)
    parent = next(d for d in view.devices if d.index == 1 and not d.instance)
    instances = [d for d in view.devices if d.index == 1 and d.instance]
    assert len(instances) >= 2
    assert parent.power_watts is not None
    assert {(d.power_watts, d.temperature) for d in instances} == {(None, None)}
    assert any(d.holders for d in instances)
    assert all(d.memory_used is not None for d in instances)


def test_golden_old_names() -> None:
    view = golden("old-namespace")
    assert view.devices
    assert all(d.uuid.startswith("GPU-") for d in view.devices)
    assert any(d.holders for d in view.devices)
    assert any(d.utilization is not None for d in view.devices)


def test_golden_without_gpus() -> None:
    view = golden("no-driver")
    assert view.devices == ()
    assert "nvml" in view.notes[0]


def test_every_golden_exposition_is_read() -> None:
    for path in NODES.glob("*/expected.prom"):
        for found in golden(path.parent.name).devices:
            assert found.index >= 0
            assert all(h.who for h in found.holders)


SOLE = 'gpu="0",UUID="GPU-a",modelName="NVIDIA L4",Hostname="n",container="c",namespace="ns",pod="p"'
VIRTUAL = 'gpu="1",UUID="GPU-b",modelName="NVIDIA L4",Hostname="n",container="c",namespace="ns"'
FIRST, SECOND = VIRTUAL + ',pod="p1",vgpu="0"', VIRTUAL + ',pod="p2",vgpu="1"'
DCGM = f"""# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{SOLE}}} 40
DCGM_FI_DEV_GPU_UTIL{{{FIRST}}} 60
DCGM_FI_DEV_GPU_UTIL{{{SECOND}}} 60
DCGM_FI_DEV_POWER_USAGE{{{FIRST}}} 70.5
DCGM_FI_DEV_POWER_USAGE{{{SECOND}}} 70.5
"""


def test_plain_dcgm_exporter() -> None:
    view = exposition(DCGM)
    assert (device(view, 0).utilization, names(device(view, 0))) == (0.4, ["ns/p/c"])
    assert device(view, 0).holders[0].utilization is None


def test_figures_that_dcgm_exporter_repeats_are_counted_once() -> None:
    shared = device(exposition(DCGM), 1)
    assert (shared.utilization, shared.power_watts, names(shared)) == (0.6, 70.5, ["ns/p1/c", "ns/p2/c"])


def test_parts_of_the_power_that_podgpu_gives_add_up() -> None:
    build = 'podgpu_exporter_build_info{version="1"} 1\n'
    assert device(exposition(DCGM + build), 1).power_watts == 141.0


def test_a_mig_exposition_of_dcgm_exporter_has_instances_only() -> None:
    labels = 'gpu="0",UUID="GPU-a",modelName="NVIDIA A100",GPU_I_PROFILE="1g.5gb",GPU_I_ID="{}",Hostname="n"'
    view = exposition(
        "".join(
            f"DCGM_FI_DEV_POWER_USAGE{{{labels.format(i)}}} 80\nDCGM_FI_DEV_FB_USED{{{labels.format(i)}}} {i}\n"
            for i in (7, 8)
        )
    )
    assert device(view, 0).power_watts == 80
    assert [device(view, 0, i).memory_used for i in ("7", "8")] == [7 * MIB, 8 * MIB]


def test_names_since_dcgm_4_6_mean_the_same() -> None:
    """GPU_UTIL_RATIO stays 0 to 100, whatever it is called."""
    labels = '{gpu="0",UUID="GPU-a"}'
    (found,) = exposition(f"DCGM_FI_DEV_GPU_UTIL_RATIO{labels} 40\nDCGM_FI_DEV_BOARD_POWER_WATTS{labels} 99\n").devices
    assert (found.utilization, found.power_watts) == (0.4, 99)


def test_what_is_no_number_is_absent() -> None:
    (found,) = exposition(
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="a"} 5\nDCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="a"} NaN\n'
    ).devices
    assert (found.utilization, found.temperature) == (None, 5)


def test_an_exposition_about_other_things() -> None:
    assert exposition("# TYPE up gauge\nup 1\n") == View()
