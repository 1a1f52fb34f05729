"""Used-GPU utilisation: what counts as in use, for whom, and that it is the mean one would compute by hand."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.settings import ViewSettings, check_settings, full_scale
from podgpu.errors import UsageError
from podgpu.figures.device import DeviceFigures, Owner
from tests.cluster.view_readings import H100, gpu, holder, node, series, value, view_of

RATIO = "podgpu_used_gpu_utilization_ratio"
GPUS = "podgpu_used_gpus"


def test_the_seeds_meaning() -> None:
    """The mean over the GPUs where the field is above 0."""
    view = view_of(node("n1", gpu(0, measured=30.0), gpu(1, measured=0.0)), node("n2", gpu(2, measured=50.0)))
    assert series(view, "avg_GPU_utilization") == {(): 40.0}


def test_zero_when_there_is_data_and_absent_without() -> None:
    assert series(view_of(node("n1", gpu(0, measured=0.0))), "avg_GPU_utilization") == {(): 0.0}
    assert series(view_of(node("n1", gpu(0))), "avg_GPU_utilization") == {}
    assert series(view_of(), "avg_GPU_utilization") == {}


def test_what_is_no_value_is_no_data() -> None:
    """A sentinel, more than everything, less than nothing."""
    for nonsense in (9223372036854775794.0, 4294967295.0, -1.0, math.nan, math.inf):
        assert series(view_of(node("n1", gpu(0, measured=nonsense))), "avg_GPU_utilization") == {}


def test_every_scope() -> None:
    owners = {("ml", "train-1"): Owner("Job", "train"), ("ml", "train-2"): Owner("Job", "train")}
    view = view_of(
        node("n1", gpu(0, holder("train-1"), measured=20.0), gpu(1, holder("train-2"), measured=40.0)),
        node("n2", gpu(2, holder("web", "shop"), holder("train-1"), measured=90.0, model="NVIDIA A30")),
        owners=owners,
    )
    assert series(view, RATIO) == {
        (("scope", "cluster"),): 0.5,
        (("namespace", "ml"), ("scope", "namespace")): 0.5,
        (("namespace", "shop"), ("scope", "namespace")): 0.9,
        (("node", "n1"), ("scope", "node")): 0.3,
        (("node", "n2"), ("scope", "node")): 0.9,
        (("model", H100), ("scope", "model")): 0.3,
        (("model", "NVIDIA A30"), ("scope", "model")): 0.9,
        (("namespace", "ml"), ("owner_kind", "Job"), ("owner_name", "train"), ("scope", "owner")): 0.5,
    }
    assert value(view, GPUS, scope="namespace", namespace="ml") == 3


def test_a_scope_with_data_and_nothing_in_use_is_there() -> None:
    view = view_of(node("n1", gpu(0, holder(), measured=0.0)))
    assert value(view, RATIO, scope="namespace", namespace="ml") == 0
    assert value(view, GPUS, scope="node", node="n1") == 0


def test_two_containers_of_a_namespace_on_one_gpu_are_one_gpu() -> None:
    view = view_of(node("n1", gpu(0, holder("a"), holder("b"), measured=10.0)))
    assert value(view, GPUS, scope="namespace", namespace="ml") == 1


def test_allocated() -> None:
    nodes = node("n1", gpu(0, holder(), measured=0.0), gpu(1, measured=60.0), gpu(2, holder(), measured=10.0))
    view = view_of(nodes, settings=ViewSettings(used_means="allocated"))
    assert value(view, "avg_GPU_utilization") == 5
    assert value(view, GPUS, scope="cluster") == 2


def test_processes_where_somebody_counts_them() -> None:
    counted, none, untold = holder(processes=2), holder(processes=0), holder()
    nodes = node("n1", gpu(0, counted, measured=8.0), gpu(1, none, measured=60.0), gpu(2, untold, measured=90.0))
    view = view_of(nodes, settings=ViewSettings(used_means="processes"))
    assert value(view, "avg_GPU_utilization") == 8
    nobody = view_of(node("n1", gpu(0, untold, measured=90.0)), settings=ViewSettings(used_means="processes"))
    assert series(nobody, "avg_GPU_utilization") == {}


def mig(instance: str, *holders: object, **figures: object) -> DeviceFigures:
    return DeviceFigures("GPU-0", 0, H100, instance=instance, profile="1g.10gb", holders=holders, **figures)  # type: ignore[arg-type]


def test_a_gpu_in_mig_mode_is_held_by_who_holds_its_instances() -> None:
    view = view_of(node("n1", gpu(0, measured=40.0), mig("1", holder("a", "one")), mig("2", holder("b", "two"))))
    for namespace in ("one", "two"):
        assert value(view, RATIO, scope="namespace", namespace=namespace) == 0.4
    assert value(view, GPUS, scope="cluster") == 1


def test_instances_with_a_figure_of_their_own_count() -> None:
    settings = ViewSettings(used_field="DCGM_FI_PROF_GR_ENGINE_ACTIVE")
    view = view_of(
        node("n1", gpu(0), mig("1", measured=0.5), mig("2", measured=1.0), mig("3", measured=0.0)), settings=settings
    )
    assert value(view, "avg_GPU_utilization") == 75
    assert value(view, RATIO, scope="model", model=f"{H100} MIG 1g.10gb") == 0.75


def test_fields() -> None:
    assert full_scale("DCGM_FI_DEV_MEM_COPY_UTIL") == 100
    assert full_scale("DCGM_FI_PROF_DRAM_ACTIVE") == 1
    with pytest.raises(UsageError, match="is it DCGM_FI_DEV_GPU_UTIL"):
        full_scale("DCGM_FI_DEV_GPU_UTL")
    with pytest.raises(UsageError, match="is not a utilisation"):
        full_scale("DCGM_FI_DEV_GPU_TEMP")


def test_settings_that_cannot_be_meant() -> None:
    assert check_settings(ViewSettings()) == ViewSettings()
    with pytest.raises(UsageError, match="--window 7d holds more than 1000 rounds of --interval 15s"):
        check_settings(ViewSettings(window=7 * 86400.0))
    with pytest.raises(UsageError, match="--drop-after 10s is shorter than --stale-after 45s"):
        check_settings(ViewSettings(drop_after=10.0))


@given(st.lists(st.lists(st.none() | st.floats(0, 100), max_size=4), max_size=4))
def test_the_mean_by_hand(nodes: list[list[float | None]]) -> None:
    view = view_of(
        *(
            node(f"n{n}", *(gpu(g, uuid=f"GPU-{n}-{g}", measured=m) for g, m in enumerate(measured)))
            for n, measured in enumerate(nodes)
        )
    )
    told = [m for measured in nodes for m in measured if m is not None]
    average = value(view, "avg_GPU_utilization")
    if not told:
        assert average is None
    else:
        assert average == pytest.approx(fmean([m for m in told if m > 0] or [0.0]))


def test_a_gpu_does_not_count_beside_its_instances() -> None:
    settings = ViewSettings(used_field="DCGM_FI_PROF_GR_ENGINE_ACTIVE")
    view = view_of(node("n1", gpu(0, measured=0.9), mig("1", measured=0.5), mig("2", measured=0.1)), settings=settings)
    assert value(view, "podgpu_used_gpus", scope="cluster") == 2
    assert value(view, "podgpu_used_gpu_utilization_ratio", scope="cluster") == pytest.approx(0.3)
