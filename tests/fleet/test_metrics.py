"""The metric families of `podgpu cluster`: pod map, GPUs in use, idle holders, counts and costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.round import RollingAverage
from podgpu.fleet.series import metric_name, node_families
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, Scope, UsedMean
from podgpu.metrics.adapter import node_from_samples, samples_in
from podgpu.metrics.encode import encode
from podgpu.metrics.parse import parse_text
from podgpu.model import Holder, WorkloadOwner
from tests.fleet.states import (
    H100,
    WALL,
    World,
    duplicates,
    gpu,
    holder,
    mig,
    node,
    series,
    state_of,
    text_of,
    value,
)

DATA = Path(__file__).parents[1] / "data"
Row = tuple[str, str, str, str, str]
LABELS = ("gpu_id", "gpu_model", "namespace", "node", "pod_name")
RATIO, GPUS = "podgpu_used_gpu_utilization_ratio", "podgpu_used_gpus"
PRICE = "podgpu_gpu_price_per_hour"
SINCE = "podgpu_idle_allocated_gpu_since_timestamp_seconds"

# Seed 002 has hand-written samples in which one GPU has three models or several nodes. Each row is
# one cluster state.


def printed(sample: str) -> list[str]:
    return (DATA / f"cluster_seed_002_{sample}.prom").read_text(encoding="utf-8").splitlines()


def rows(sample: str) -> list[Row]:
    families = parse_text("\n".join(printed(sample)) + "\n")
    found: dict[Any, None] = {}
    for family in families:
        for line in family.samples:
            found[tuple(line.labels[name] for name in LABELS)] = None
    return list(found)


def state_with(row: Row, **settings: bool) -> ClusterState:
    uuid, model, namespace, name, pod = row
    labels = f'gpu="0",UUID="{uuid}",modelName="{model}",Hostname="{name}",container="c",namespace="{namespace}",pod="{pod}"'
    (document,) = node_from_samples(samples_in(f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} 42\n"))
    assert document.node == name
    return state_of(node(name, *document.devices), settings=ViewSettings(**settings))  # type: ignore[arg-type]


def lines(text: str, name: str) -> set[str]:
    return {line for line in text.splitlines() if re.search(rf"\b{name}\b", line)}


def test_pod_map_of_the_seed() -> None:
    ours = {
        line
        for row in rows("metrics")
        for line in lines(text_of(state_with(row)), "pod_and_gpu_map_info")
    }
    assert ours == set(printed("metrics"))


def test_nodes_of_the_seed() -> None:
    ours = {
        line
        for row in rows("nodes")
        for line in encode(node_families(state_with(row))).decode().splitlines()
    }
    assert ours == set(printed("nodes"))


def test_abandoned_metrics_of_the_seed() -> None:
    def unnumbered(text: str) -> set[str]:
        return {
            re.sub(r"INFO_\d+", "INFO_n", line)
            for line in text.splitlines()
            if "POD_GPU_MAP_INFO" in line
        }

    ours = {
        line
        for row in rows("legacy")
        for line in unnumbered(text_of(state_with(row, legacy_map_metrics=True)))
    }
    assert ours == unnumbered("\n".join(printed("legacy")))
    assert "POD_GPU_MAP_INFO" not in text_of(state_with(rows("legacy")[0]))
    state = state_of(
        node("n1", gpu(0, holder("a")), gpu(1, holder("b"))),
        settings=ViewSettings(legacy_map_metrics=True),
    )
    assert re.findall(r"^POD_GPU_MAP_INFO_(\d+)", text_of(state), re.MULTILINE) == ["0", "1"]


def test_rows_are_sorted_by_node_and_index_and_name_the_physical_gpu() -> None:
    state = state_of(
        node(
            "n2",
            gpu(0, holder("z")),
            gpu(1, holder("b"), holder("a"), holder("a", container="side")),
        ),
        node(
            "n-1.lab",
            gpu(9, instances=(mig(2, holder("y")), mig(1, Holder(job="7")))),
            gpu(10, holder('x"\n')),
        ),
    )
    found = re.findall(
        r'^pod_and_gpu_map_info{gpu_id="(\S+?)",.*node="(.*)",pod_name="(.*)"}',
        text_of(state),
        re.MULTILINE,
    )
    assert found == [
        ("GPU-9", "n-1.lab", "y"),
        ("GPU-10", "n-1.lab", r"x\"\n"),
        ("GPU-0", "n2", "z"),
        ("GPU-1", "n2", "a"),
        ("GPU-1", "n2", "b"),
    ]
    assert [family.name for family in node_families(state)] == ["n_1:lab_info", "n2_info"]


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("gpu-1.lab", "gpu_1:lab_info"),
        ("10.0.0.1", "_10:0:0:1_info"),
        ("my_node", "my::5f:node_info"),
        ("größe", "gr::f6:::df:e_info"),
    ],
)
def test_metric_names_of_nodes(name: str, metric: str) -> None:
    assert metric_name(name) == metric


def test_nodes_with_the_same_metric_name_share_a_family() -> None:
    state = state_of(node("-1", gpu(0, holder("a"))), node("1", gpu(1, holder("b"))))
    assert [(family.name, len(family.samples)) for family in node_families(state)] == [
        ("_1_info", 2)
    ]


# Seed 003


def test_mean_over_the_gpus_whose_field_is_above_zero() -> None:
    state = state_of(node("n1", gpu(0, used=30.0), gpu(1, used=0.0)), node("n2", gpu(2, used=50.0)))
    assert series(state, "avg_GPU_utilization") == {(): 40.0}
    assert series(state_of(node("n1", gpu(0, used=0.0))), "avg_GPU_utilization") == {(): 0.0}
    assert series(state_of(node("n1", gpu(0))), "avg_GPU_utilization") == {}
    for nonsense in (9223372036854775794.0, 4294967295.0):
        assert series(state_of(node("n1", gpu(0, used=nonsense))), "avg_GPU_utilization") == {}


def test_every_scope() -> None:
    owners = {
        ("ml", "train-1"): WorkloadOwner("Job", "train"),
        ("ml", "train-2"): WorkloadOwner("Job", "train"),
    }
    state = state_of(
        node("n1", gpu(0, holder("train-1"), used=20.0), gpu(1, holder("train-2"), used=40.0)),
        node("n2", gpu(2, holder("web", "shop"), holder("train-1"), used=90.0, model="NVIDIA A30")),
        owners=owners,
    )
    assert series(state, RATIO) == {
        (("scope", "cluster"),): 0.5,
        (("namespace", "ml"), ("scope", "namespace")): 0.5,
        (("namespace", "shop"), ("scope", "namespace")): 0.9,
        (("node", "n1"), ("scope", "node")): 0.3,
        (("node", "n2"), ("scope", "node")): 0.9,
        (("model", H100), ("scope", "model")): 0.3,
        (("model", "NVIDIA A30"), ("scope", "model")): 0.9,
        (
            ("namespace", "ml"),
            ("owner_kind", "Job"),
            ("owner_name", "train"),
            ("scope", "owner"),
        ): 0.5,
    }
    assert value(state, GPUS, scope="namespace", namespace="ml") == 3


def test_a_gpu_in_mig_mode_belongs_to_the_holders_of_its_instances() -> None:
    cut = gpu(0, used=40.0, instances=(mig(1, holder("a", "one")), mig(2, holder("b", "two"))))
    state = state_of(node("n1", cut))
    assert [value(state, RATIO, scope="namespace", namespace=name) for name in ("one", "two")] == [
        0.4,
        0.4,
    ]
    assert value(state, GPUS, scope="cluster") == 1


def test_rolling_average_over_the_window() -> None:
    settings, rolling = ViewSettings(interval=10.0, window=30.0), RollingAverage()

    def add(at: float, mean: float) -> float | None:
        rolling.add(
            at,
            settings,
            {Scope("cluster"): UsedMean(1, mean), Scope("owner", "ml"): UsedMean(1, 1.0)},
        )
        assert Scope("owner", "ml") not in rolling.means()
        return rolling.means().get(Scope("cluster"))

    assert add(0, 40) == pytest.approx(0.4)
    assert add(9.5, 80) == pytest.approx(0.6)
    assert add(20, 0) == pytest.approx(0.4)
    assert add(30, 100) == pytest.approx(0.6), "the first round is older than the window"


def test_a_window_that_is_shorter_than_the_interval_has_the_last_reading() -> None:
    settings, rolling = ViewSettings(interval=900.0, window=300.0), RollingAverage()
    for at, mean in ((0.0, 40), (900.0, 80)):
        rolling.add(at, settings, {Scope("cluster"): UsedMean(1, mean)})
        assert rolling.means() == {Scope("cluster"): mean / 100}


def test_holders_are_reported_once_they_are_idle_for_longer_than_idle_after() -> None:
    world = World(ViewSettings(idle_after=60.0))
    jobs = [Holder(job=job, source="slurm") for job in ("1", "2")]
    nameless = Holder(uid="u", container_id="c", source="kubelet")
    for at in (0.0, 60.0, 61.0):
        idle = [
            gpu(0, *jobs, busy=0.0),
            gpu(1, holder(), busy=0.0),
            gpu(2, instances=(mig(3, nameless, busy=0.0),)),
        ]
        state = world.round(node("n1", *idle, read_at=at), at=at)
        assert bool(series(state, SINCE)) == (at > 60)
    pod = {"namespace": "ml", "pod": "train", "container": "main"}
    assert value(state, SINCE, node="n1", gpu="1", gpu_id="GPU-1", model=H100, **pod) == WALL
    assert [dict(labels).get("hpc_job") for labels in series(state, SINCE)].count(None) == 2
    of_instance = {
        "node": "n1",
        "gpu": "2",
        "gpu_id": "GPU-2",
        "gpu_instance": "3",
        "model": f"{H100} MIG 1g.10gb",
    }
    assert value(state, SINCE, **of_instance, pod_uid="u", container_id="c") == WALL
    assert value(state, "podgpu_namespace_idle_gpus", namespace="ml", model=H100) == 1


def test_counts() -> None:
    cut = gpu(3, instances=(mig(1, holder(), busy=0.1), mig(2, busy=0.1)))
    half = holder("a", utilization_ratio=0.5), holder("b", "web", utilization_ratio=0.5)
    state = state_of(
        node("n1", gpu(0, *half, used=5.0), gpu(1, holder(), busy=0.0, used=0.0), gpu(2), cut)
    )
    names = ("", "allocated_", "used_", "free_")
    assert [value(state, f"podgpu_node_{of}gpus", node="n1", model=H100) for of in names] == [
        3,
        2,
        1,
        1,
    ]
    part = f"{H100} MIG 1g.10gb"
    assert [value(state, f"podgpu_model_{of}gpus", model=part) for of in names] == [2, 1, 2, 1]
    held = {"namespace": "ml", "model": H100}
    assert [
        value(state, f"podgpu_namespace_{of}_gpus", **held) for of in ("allocated", "used", "idle")
    ] == [
        1.5,
        0.5,
        0,
    ]


def test_cost_per_hour_counts_idle_from_the_first_second() -> None:
    prices = Prices("EUR", {H100: Price(7.0)})
    cut = gpu(2, instances=(mig(1, holder("c", utilization_ratio=0.5)),))
    state = state_of(
        node("n1", gpu(0, holder("a"), busy=0.0), gpu(1, holder("b"), busy=0.9), cut), prices=prices
    )
    money = {"namespace": "ml", "currency": "EUR"}
    assert value(state, "podgpu_namespace_cost_per_hour", **money) == pytest.approx(15)
    assert value(state, "podgpu_namespace_wasted_per_hour", **money) == 7
    assert duplicates(parse_text(text_of(state))) == []


def test_the_price_of_an_hour_is_that_of_all_nodes() -> None:
    spot = Prices("EUR", {H100: Price(3.0)})
    models = {H100: Price(7.0), "NVIDIA L4": Price(1.0)}
    prices = Prices("EUR", models, nodes=[({"capacity": "spot"}, spot)])
    cut = gpu(1, instances=(mig(1),), model="NVIDIA L4")
    first = node("n1", gpu(0), cut, gpu(2, model="unknown"), labels={"capacity": "spot"})
    second = node("n2", gpu(3), labels={"capacity": "reserved"})
    plain = Prices("EUR", models)

    assert value(state_of(second, prices=plain), PRICE, model=H100, currency="EUR") == 7
    found = series(state_of(first, second, prices=plain), PRICE)
    names = [(dict(labels)["model"], dict(labels).get("profile")) for labels in found]
    assert names == [(H100, None), ("NVIDIA L4", None), ("NVIDIA L4", "1g.10gb")]
    assert value(state_of(first, second, prices=prices), PRICE, model=H100, currency="EUR") is None
    assert series(state_of(second), PRICE) == {}
