"""An exporter's exposition to a node's reading, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.reading import NamespaceCounters, NodeReading
from podgpu.cluster.scraping.exposition import (
    LONGEST_NAME,
    MOST_DEVICES,
    MOST_HOLDERS,
    MOST_NAMESPACES,
    ExpositionReader,
    Shelf,
)
from podgpu.errors import SourceError

NODES = Path(__file__).parents[1] / "nodes"
GOLDEN = sorted(path.parent.name for path in NODES.glob("*/expected.prom"))
SHARED = (NODES / "usage-time-sliced" / "expected.prom").read_text(encoding="utf-8")


def read(
    exposition: str | bytes, measured: str = "DCGM_FI_DEV_MEM_COPY_UTIL", wall: float = 0.0, **options: object
) -> NodeReading:
    body = exposition.encode() if isinstance(exposition, str) else exposition
    return ExpositionReader("http://h:9400/metrics", "h:9400", measured, **options).read(body, 7.0, wall)  # type: ignore[arg-type]


def series(name: str, value: str = "1", **labels: str) -> str:
    pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value}\n"


GPU = {"gpu": "0", "UUID": "GPU-1", "modelName": "H100", "Hostname": "node-1"}


# What is on an exposition


def test_a_node_of_podgpu() -> None:
    node = read(SHARED)
    assert (node.target, node.node, node.named, node.read_at) == ("http://h:9400/metrics", "node-1", True, 7.0)
    assert node.taken_at is not None
    shared = next(d for d in node.devices if len(d.holders) > 1)
    assert all(h.share is not None and h.share < 1 for h in shared.holders)
    assert {d.node for d in node.devices} == {"node-1"}
    assert node.namespaces
    for counters in node.namespaces:
        assert counters.model
        assert None not in counters


def test_figures_that_are_made_up_say_so() -> None:
    made_up = series("podgpu_exporter_source_up", source="simulated")
    real = series("podgpu_exporter_source_up", source="nvml")
    exposition = series("DCGM_FI_DEV_GPU_UTIL", "12", **GPU)
    assert (read(exposition + made_up).simulated, read(exposition + real).simulated, read(exposition).simulated) == (
        True,
        False,
        False,
    )
    assert read(exposition + made_up.replace("} 1", "} 0")).simulated, "also while that driver is away"


def test_what_is_measured_is_of_the_field_asked_for() -> None:
    exposition = series("DCGM_FI_DEV_MEM_COPY_UTIL", "12", **GPU) + series("DCGM_FI_DEV_GPU_UTIL", "34", **GPU)
    exposition += series("my_own_figure", "56", **GPU)
    assert read(exposition).devices[0].measured == 12
    assert read(exposition, "DCGM_FI_DEV_GPU_UTIL").devices[0].measured == 34
    assert read(exposition, "dcgm_gpu_utilization").devices[0].measured == 34, "another generation's name of it"
    assert read(exposition, "my_own_figure").devices[0].measured == 56
    assert read(exposition, "DCGM_FI_DEV_FB_USED").devices[0].measured is None


def test_namespaces() -> None:
    exposition = series("DCGM_FI_DEV_GPU_UTIL", **GPU)
    exposition += series("podgpu_namespace_gpu_allocated_seconds_total", "10", namespace="a", modelName="H100")
    exposition += series("podgpu_namespace_gpu_energy_joules_total", "20", namespace="a", modelName="H100")
    exposition += series("podgpu_namespace_gpu_busy_seconds_total", "5", namespace="b", modelName="L4")
    assert read(exposition).namespaces == (
        NamespaceCounters("a", "H100", 10.0, None, 20.0),
        NamespaceCounters("b", "L4", None, 5.0, None),
    )


def test_one_uuid_under_several_models_is_several_devices() -> None:
    """Seed 002's own data."""
    exposition = "".join(
        series("DCGM_FI_DEV_GPU_UTIL", "1", **GPU | {"modelName": model, "pod": pod, "namespace": "default"})
        for model, pod in [("4080ti", "test2"), ("2080ti", "test2"), ("2080ti", "test4"), ("2040ti", "test2")]
    )
    found = {(d.uuid, d.model): [h.holder.pod for h in d.holders] for d in read(exposition).devices}
    assert found == {
        ("GPU-1", "4080ti"): ["test2"],
        ("GPU-1", "2080ti"): ["test2", "test4"],
        ("GPU-1", "2040ti"): ["test2"],
    }


def test_what_names_no_model_goes_to_the_device_that_has_one() -> None:
    held = {"gpu": "0", "UUID": "GPU-1", "namespace": "a", "pod": "p", "container": "c"}
    for exposition in (
        series("podgpu_allocation_info", **held) + series("DCGM_FI_DEV_GPU_UTIL", **GPU),
        series("DCGM_FI_DEV_GPU_UTIL", **GPU) + series("podgpu_allocation_share_ratio", "0.5", **held),
    ):
        (device,) = read(exposition).devices
        assert (device.model, [h.holder.pod for h in device.holders]) == ("H100", ["p"])


def test_prometheus_own_renaming_is_undone() -> None:
    target = {"pod": "dcgm-exporter-x", "namespace": "gpu-operator", "container": "exporter"}
    real = {"exported_pod": "train", "exported_namespace": "research", "exported_container": "main"}
    (device,) = read(series("DCGM_FI_DEV_GPU_UTIL", **GPU, **target, **real)).devices
    (holder,) = device.holders
    assert (holder.holder.namespace, holder.holder.pod, holder.holder.container) == ("research", "train", "main")


def test_names_of_dcgm_exporter_1() -> None:
    labels = {"gpu": "0", "uuid": "GPU-1", "pod_name": "p", "pod_namespace": "n", "container_name": "c"}
    node = read(series("dcgm_gpu_utilization", "40", **labels) + series("dcgm_mem_copy_utilization", "9", **labels))
    (device,) = node.devices
    assert (device.uuid, device.utilization, device.measured) == ("GPU-1", 0.4, 9)
    assert device.holders[0].holder.pod == "p"
    assert (node.node, node.named) == ("h:9400", False)
    assert device.node == "h:9400"


@pytest.mark.parametrize(
    ("labels", "wanted", "node"),
    [
        ({"Hostname": "a", "node": "b"}, None, "a"),
        ({"Hostname": "", "hostname": "b"}, None, "b"),
        ({"Hostname": "a", "kubernetes_node": "k"}, ("kubernetes_node", "Hostname"), "k"),
        ({"Hostname": "a"}, ("kubernetes_node",), "h:9400"),
    ],
)
def test_the_nodes_name(labels: dict[str, str], wanted: tuple[str, ...] | None, node: str) -> None:
    options = {} if wanted is None else {"node_labels": wanted}
    found = read(series("DCGM_FI_DEV_GPU_UTIL", gpu="0", UUID="GPU-1", **labels), **options)
    assert found.node == node
    assert found.named == (node != "h:9400")


def test_several_nodes_on_an_exposition_are_noted() -> None:
    exposition = "".join(
        series("DCGM_FI_DEV_GPU_UTIL", **GPU | {"UUID": f"GPU-{n}", "Hostname": f"n{n}"}) for n in range(5)
    )
    (note,) = read(exposition).notes
    assert "5 nodes (n0, n1, n2)" in note


def test_a_podgpu_without_gpus_is_a_node_all_the_same() -> None:
    exposition = series("podgpu_exporter_build_info", version="1") + series(
        "podgpu_device_count", "0", state="visible", Hostname="n"
    )
    exposition += series("podgpu_exporter_source_up", "0", source="nvml")
    node = read(exposition)
    assert (node.node, node.devices, node.notes) == ("n", (), ("the exporter cannot read: nvml",))


def test_a_clock_ahead_is_skew_and_one_behind_may_be_age() -> None:
    exposition = series("DCGM_FI_DEV_GPU_UTIL", **GPU) + "podgpu_exporter_snapshot_timestamp_seconds 1000.0\n"
    assert (read(exposition, wall=1000.0).taken_at, read(exposition, wall=1000.0).skew_seconds) == (1000.0, None)
    assert read(exposition, wall=996.0).skew_seconds is None
    assert read(exposition, wall=900.0).skew_seconds == 100.0
    assert read(exposition, wall=5000.0).skew_seconds is None


@pytest.mark.parametrize(
    ("exposition", "reason"), [("up 1\n", "no_gpu"), ("", "no_gpu"), ("a 1", "malformed"), (b"a\xff 1\n", "malformed")]
)
def test_what_is_refused(exposition: str | bytes, reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        read(exposition)
    assert caught.value.reason == reason
    assert "http://h:9400/metrics" in str(caught.value)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_golden_exposition(name: str) -> None:
    exposition = (NODES / name / "expected.prom").read_bytes()
    if name in ("no-driver",):
        assert read(exposition).devices == ()
    else:
        assert all(d.uuid for d in read(exposition).devices)


# Lines that are no figures


@pytest.mark.parametrize("line", [" # hello 5", "\t# hello 5", "# hello{ 5", "#", " ", "other 5 1700000000000"])
def test_a_line_that_is_no_figure_changes_nothing(line: str) -> None:
    gpu = series("DCGM_FI_DEV_GPU_UTIL", "7", **GPU)
    assert read(f"{line}\n{gpu}") == read(f"{gpu}{line}\n") == read(gpu)


@pytest.mark.parametrize("line", ['# HELP x{a="b"} 1', "x{a} 1", 'x{a="b"', 'x{a="b} 1', "x 1 2 3", 'x{a="b"}} 1'])
def test_a_line_that_breaks_the_format_is_named(line: str) -> None:
    """Beside lines whose like are right."""
    gpu = series("DCGM_FI_DEV_GPU_UTIL", "7", **GPU)
    with pytest.raises(SourceError, match=r"line 3: ") as caught:
        read(f'{gpu}x{{a="b"}} 1\n{line}\n')
    assert caught.value.reason == "malformed"


_EDITS = st.sampled_from(["swap", "repeat", "blank before", "comment between"])


@given(st.lists(st.tuples(_EDITS, st.integers(0, 10_000), st.integers(0, 10_000)), min_size=1, max_size=4))
def test_the_order_and_the_blanks_of_an_exposition_say_nothing(edits: list[tuple[str, int, int]]) -> None:
    lines = [line for line in SHARED.splitlines() if not line.startswith("#")]
    for edit, one, other in edits:
        here, there = one % len(lines), other % len(lines)
        if edit == "swap":
            lines[here], lines[there] = lines[there], lines[here]
        elif edit == "repeat":
            lines.insert(there, lines[here])
        elif edit == "blank before":
            lines[here] = f"  {lines[here]}"
        else:
            lines.insert(there, " # a comment 5")
    exposition, usual = read("\n".join(lines) + "\n"), read(SHARED)
    assert {d.key: d.utilization for d in exposition.devices} == {d.key: d.utilization for d in usual.devices}
    assert set(exposition.namespaces) == set(usual.namespaces)


@given(st.text(max_size=200))
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(SourceError) as caught:
        read(text.encode("utf-8", "surrogatepass"))
    assert caught.value.reason in ("malformed", "no_gpu")


# More than a node could have


def devices(count: int) -> str:
    return _numbered(series("DCGM_FI_DEV_GPU_UTIL", "1", **GPU | {"UUID": "GPU-#"}), count)


def holders(count: int) -> str:
    return _numbered(series("DCGM_FI_DEV_GPU_UTIL", "1", **GPU, namespace="n", pod="p-#"), count)


def namespaces(count: int) -> str:
    name = "podgpu_namespace_gpu_busy_seconds_total"
    return devices(1) + _numbered(series(name, "1", namespace="n-#", modelName="H100"), count)


def _numbered(line: str, count: int) -> str:
    return "".join([line.replace("#", str(number)) for number in range(count)])


@pytest.mark.parametrize(
    ("exposition", "most", "what"),
    [
        (devices, MOST_DEVICES, "devices"),
        (holders, MOST_HOLDERS, "holders"),
        (namespaces, MOST_NAMESPACES, "namespaces"),
    ],
)
def test_more_than_any_node_has_is_refused_by_name(exposition: Callable[[int], str], most: int, what: str) -> None:
    assert read(exposition(most)).devices
    errors = [_refused(exposition(count)) for count in (most + 1, 30 * most)]
    for error in errors:
        assert error.reason == "too_much"
        assert "http://h:9400/metrics: the exposition of node node-1 has " in str(error)
    assert f"{most + 1:,} {what}" in str(errors[0])


def _refused(exposition: str) -> SourceError:
    with pytest.raises(SourceError) as caught:
        read(exposition)
    return caught.value


@pytest.mark.parametrize("label", ["UUID", "modelName", "Hostname", "pod", "container", "hpc_job", "GPU_I_PROFILE"])
def test_a_name_that_nobody_has_is_refused(label: str) -> None:
    held = GPU | {"namespace": "n", "pod": "p", "container": "c", "GPU_I_ID": "1"}
    assert read(series("DCGM_FI_DEV_GPU_UTIL", **held | {label: "x" * LONGEST_NAME})).devices
    error = _refused(series("DCGM_FI_DEV_GPU_UTIL", **held | {label: "x" * (LONGEST_NAME + 1)}))
    assert error.reason == "too_much"
    assert len(str(error)) < 3 * LONGEST_NAME


def test_all_expositions_together_are_bounded_and_who_is_there_stays() -> None:
    shelf = Shelf({"devices": 5, "holders": 5, "namespaces": 5})
    shelf.put("a", read(devices(3)))
    with pytest.raises(
        SourceError, match="with the 3 devices of node node-1 there would be 6 in all, and podgpu keeps"
    ):
        shelf.put("b", read(devices(3)))
    shelf.put("b", read(devices(2)))
    shelf.put("a", read(devices(3)))
    with pytest.raises(SourceError, match="at most 5"):
        shelf.put("a", read(devices(4)))
    shelf.remove("b")
    shelf.put("a", read(devices(5)))
    shelf.remove("nobody")


# When it was


@pytest.mark.parametrize("told", ["0", "1", "86400", "-5", "4102444800", "1e300"])
def test_a_snapshot_of_another_age_is_not_fresh(told: str) -> None:
    wall = 1_790_000_000.0
    exposition = series("DCGM_FI_DEV_GPU_UTIL", **GPU)
    assert read(exposition, wall=wall).dated
    assert read(f"{exposition}podgpu_exporter_snapshot_timestamp_seconds {wall - 3600}\n", wall=wall).dated
    assert not read(f"{exposition}podgpu_exporter_snapshot_timestamp_seconds {told}\n", wall=wall).dated
