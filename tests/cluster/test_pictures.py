"""The view as the picture that people look at."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings

from podgpu import __version__
from podgpu.cluster.pictures import picture_of
from podgpu.cluster.reading import ClusterReading, NamespaceCounters
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import Memory, assemble
from podgpu.figures.as_json import encode_picture
from podgpu.figures.device import DeviceFigures
from podgpu.figures.from_json import parse_view
from podgpu.figures.picture import NamespacePicture
from podgpu.figures.prices import Price, Prices
from tests.cluster.view_readings import H100, WALL, gpu, holder, node, readings, view_of


def test_the_cluster() -> None:
    view = view_of(
        node("n2", gpu(0, holder(utilization=0.0), measured=50.0)),
        node("n1", gpu(1), read_at=-60.0, notes=("the exporter cannot read: gpu3",), simulated=True),
        notes=("partial data",),
    )
    picture = picture_of(view)
    assert (picture.scope, picture.taken_at, picture.interval_seconds) == ("cluster", WALL, 15)
    assert (picture.version, picture.simulated) == (__version__, True)
    (gone,) = picture.alerts
    assert (gone.severity, gone.node) == ("broken", "n1")
    assert gone.text.startswith("node n1 does not answer; 1 GPU went with it: ")
    assert picture.notes == (gone.text, "partial data")
    assert (picture.used_utilization, picture.used_field) == (0.5, "DCGM_FI_DEV_MEM_COPY_UTIL")
    assert picture.idle_after_seconds == 1800
    old, fresh = picture.nodes
    assert (old.name, old.old, old.gone, old.age_seconds) == ("n1", True, True, 60)
    assert [(c.name, c.since) for d in old.devices for c in d.conditions] == [("node_gone", WALL - 60)]
    assert old.notes == ("the exporter cannot read: gpu3",)
    assert not fresh.old
    assert (old.simulated, fresh.simulated) == (True, False)
    assert [h.idle_since for d in fresh.devices for h in d.holders] == [WALL]


def test_only_the_idle_holder_of_a_shared_gpu_is_idle() -> None:
    shared = gpu(0, holder("a", utilization=0.0), holder("b", utilization=0.4))
    (one,) = picture_of(view_of(node("n1", shared))).nodes
    assert [(h.holder.pod, h.idle_since) for h in one.devices[0].holders] == [("a", WALL), ("b", None)]


def test_namespaces_in_gpus_hours_and_money() -> None:
    mig = f"{H100} MIG 1g.10gb"
    instance = DeviceFigures("GPU-1", 1, H100, instance="3", profile="1g.10gb", holders=(holder(),), utilization=0.5)
    memory, prices = Memory(), Prices("EUR", {H100: Price(Fraction(7), Fraction("0.5"))})
    for at in (0.0, 3600.0):
        counters = (NamespaceCounters("ml", H100, at, at / 2, at * 1000), NamespaceCounters("ml", mig, at))
        told = node("n1", gpu(0, holder(), utilization=0.1), instance, read_at=at, namespaces=counters)
        view = assemble(ClusterReading((told,)), memory, ViewSettings(), at, WALL + at, prices=prices)
    picture = picture_of(view)
    (ml,) = picture.namespaces
    assert (picture.currency, picture.counting_since) == ("EUR", WALL)
    assert ml.allocated_gpus == 1.1429
    assert (ml.used_gpus, ml.idle_gpus) == (1.1429, 0)
    assert (ml.cost_per_hour, ml.wasted_per_hour) == (pytest.approx(8), 0)
    assert ml.allocated_hours == pytest.approx(1 + 1 / 7)
    assert (ml.busy_hours, ml.energy_kwh) == (0.5, 1)
    assert dict(ml.cost) == {"allocated": 8, "used": 3.5, "energy": 0.5}


def test_what_nobody_counts_is_not_known() -> None:
    (ml,) = picture_of(view_of(node("n1", gpu(0, holder())))).namespaces
    assert ml == NamespacePicture("ml", allocated_gpus=1.0, used_gpus=None, unknown_gpus=1.0)


def test_who_holds_nothing_uses_nothing() -> None:
    memory = Memory()
    for at in (0.0, 3600.0):
        told = node("n1", gpu(0), read_at=at, namespaces=(NamespaceCounters("ml", H100, at),))
        view = assemble(ClusterReading((told,)), memory, ViewSettings(), at, WALL + at)
    assert picture_of(view).namespaces == (NamespacePicture("ml", allocated_hours=1.0),)


@given(readings())
@settings(max_examples=50)
def test_every_picture_can_be_sent_and_read_back(reading: ClusterReading) -> None:
    view = assemble(reading, Memory(), ViewSettings(idle_after=1.0), 0.0, WALL)
    back = parse_view(encode_picture(picture_of(view)))
    assert {d.node for d in back.devices} <= {n.name for n in view.nodes}
