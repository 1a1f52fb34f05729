"""Totals of pictures: against a direct computation on random clusters, and adding up whatever comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from podgpu.cluster.pictures import picture_of
from podgpu.cluster.reading import ClusterReading
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import Memory, assemble
from podgpu.figures.as_json import encode_picture, picture_json
from podgpu.figures.device import Condition, DeviceFigures, HolderFigures
from podgpu.figures.from_json import parse_view
from podgpu.figures.picture import NodePicture, Picture
from podgpu.figures.prices import Price, Prices, PriceTags, with_prices
from podgpu.figures.totals import totals_of, totals_of_devices, use_of
from podgpu.figures.waste_rows import hourly_by_namespace
from podgpu.model import Workload
from tests.cluster.view_readings import H100, WALL, gpu, holder, holdings, node, series

A30 = "NVIDIA A30"
LAYOUTS = {
    H100: (("3g.40gb", "3g.40gb"), ("7g.80gb",), ("1g.10gb",) * 7, ("1g.10gb", "2g.20gb", "4g.40gb"), ("1g.10gb",)),
    A30: (("1g.6gb",) * 4, ("2g.12gb", "1g.6gb"), ("4g.24gb",)),
}
SLICES = {H100: 7, A30: 4}
PRICES = Prices("EUR", {H100: Price(Fraction("2.80")), A30: Price(Fraction("0.60"))})
LOST = Condition("lost", 1.0, "it fell off the bus", "reset the node")
HOT = Condition("thermal", 1.0, "it is too hot", "look at the fans")

namespaces = st.sampled_from(["ml", "web", ""])
figures = st.fixed_dictionaries(
    {
        "utilization": st.none() | st.sampled_from([0.0, 0.3, 1.0]),
        "processes": st.none() | st.integers(0, 2),
        "idle_since": st.none() | st.just(WALL),
    }
)
equal_shares = st.lists(figures, max_size=5).map(lambda all_: [(Fraction(1, len(all_)), f, None) for f in all_])
given_shares = st.lists(st.tuples(st.integers(1, 4), figures), max_size=3).map(
    lambda all_: [(Fraction(tenths, 16), f, tenths / 16) for tenths, f in all_]
)


@st.composite
def held(draw: st.DrawFn) -> list[tuple[Fraction, HolderFigures]]:
    """Holders of a device with the part of it that each has."""
    found = []
    for number, (part, told, share) in enumerate(draw(equal_shares | given_shares)):
        name = Workload(draw(namespaces), f"pod-{number}", "main")
        found.append((part, HolderFigures(name, share=share, **told)))
    return found


@st.composite
def gpus(
    draw: st.DrawFn, number: int
) -> tuple[list[DeviceFigures], list[tuple[DeviceFigures, HolderFigures, Fraction]]]:
    """A GPU's devices, and who holds what part of it."""
    model = draw(st.sampled_from([H100, A30]))
    uuid, conditions = f"GPU-{number}", draw(st.sampled_from([(), (), (), (LOST,), (HOT,)]))
    ratio = st.none() | st.sampled_from([0.0, 0.5])
    bare = DeviceFigures(uuid, number, model, conditions=conditions, power_watts=draw(st.none() | st.just(100.5)))
    if draw(st.booleans()):
        people = draw(held())
        whole = replace(bare, utilization=draw(ratio), holders=tuple(of for _, of in people))
        return [whole], [(whole, of, part) for part, of in people]
    devices, parts = [bare], []
    for instance, profile in enumerate(draw(st.sampled_from(LAYOUTS[model]))):
        people = draw(held())
        device = replace(
            bare,
            instance=str(instance),
            profile=profile,
            power_watts=None,
            utilization=draw(ratio),
            holders=tuple(of for _, of in people),
        )
        devices.append(device)
        parts += [(device, of, part * int(profile[0]) / SLICES[model]) for part, of in people]
    return devices, parts


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[NodePicture], list[tuple[bool, Any]]]:
    nodes, parts, number = [], [], 0
    for name in ("n1", "n2", "n3")[: draw(st.integers(1, 3))]:
        old, devices = draw(st.booleans()), []
        for _ in range(draw(st.integers(0, 3))):
            number += 1
            of_gpu, held_of_it = draw(gpus(number))
            devices += of_gpu
            parts += [(old, *one) for one in held_of_it]
        nodes.append(NodePicture(name, tuple(devices), old))
    return nodes, parts


@given(clusters(), st.booleans())
@settings(max_examples=150)
def test_totals_against_a_direct_computation(cluster: tuple[list[NodePicture], list[Any]], watched: bool) -> None:
    nodes, parts = cluster
    priced = [replace(n, devices=with_prices(n.devices, PriceTags(PRICES))) for n in nodes]
    picture = Picture(
        "cluster", WALL, 15.0, tuple(priced), idle_after_seconds=60.0 if watched else None, currency="EUR"
    )
    said = totals_of(picture)
    sums = {"used": Fraction(0), "idle": Fraction(0), "unknown": Fraction(0)}
    cost = wasted = Fraction(0)
    for old, device, of, part in parts:
        use = "unknown" if old or LOST in device.conditions else use_of(device, of, watched)
        sums[use] += part
        price = PRICES.models[device.model].gpu_hour
        assert price is not None
        cost += part * price
        wasted += part * price if use == "idle" else 0
    physical = {device.uuid: (n, device) for n in nodes for device in reversed(n.devices)}
    assert said.gpus == len(physical)
    assert said.broken == sum(bool(device.conditions) for _, device in physical.values())
    for name, exact in sums.items():
        assert abs(Fraction(getattr(said, name)) - exact) < Fraction(1, 10_000), name
    watts = sum(d.power_watts for n, d in physical.values() if d.power_watts and not n.old)
    assert (said.power_watts or 0) == pytest.approx(watts)
    assert (said.cost_per_hour, said.wasted_per_hour) == (pytest.approx(float(cost)), pytest.approx(float(wasted)))
    assert adds_up(picture_json(picture)["totals"])


def adds_up(totals: dict[str, Any]) -> bool:
    """To the last digit that is written."""
    said = {name: Decimal(repr(value)) for name, value in totals.items()}
    return (
        said["allocated"] == said["used"] + said["idle"] + said["unknown"]
        and said["gpus"] == said["allocated"] + said["free"]
        and min(said.values()) >= 0
        and said["broken"] <= said["gpus"]
    )


@given(holdings())
@settings(max_examples=150)
def test_they_add_up_whatever_is_read(reading: ClusterReading) -> None:
    devices = [device for of_node in reading.nodes for device in of_node.devices]
    assume(all(len({of.who for of in device.holders}) == len(device.holders) for device in devices))  # as readers do
    view = assemble(reading, Memory(), ViewSettings(idle_after=1.0), 0.0, WALL, prices=PRICES)
    picture = picture_of(view)
    written = picture_json(picture)
    assert adds_up(written["totals"])
    by_namespace = {n.namespace: n for n in picture.namespaces}
    held_there = sum(n.allocated_gpus for n in picture.namespaces)
    assert held_there <= written["totals"]["allocated"] + 1e-4 * (1 + len(by_namespace))
    told = hourly_by_namespace(view.waste)
    wasted = series(view, "podgpu_namespace_wasted_per_hour") if told else {}
    for name, hourly in told.items():
        assert by_namespace[name].cost_per_hour == pytest.approx(hourly.cost, abs=1e-9)
        assert by_namespace[name].wasted_per_hour == pytest.approx(hourly.wasted, abs=1e-9)
        labels = (("currency", "EUR"), ("namespace", name))
        assert wasted[labels] == pytest.approx(hourly.wasted, abs=1e-9)
    assert {n.namespace for n in picture.namespaces if n.cost_per_hour} <= told.keys()


@given(holdings())
@settings(max_examples=50)
def test_top_counts_what_the_page_counts(reading: ClusterReading) -> None:
    """As far as the JSON says which node is old, that is: fresh ones here."""
    fresh = tuple(replace(r, read_at=0.0, node=f"n{i}", target=f"t{i}") for i, r in enumerate(reading.nodes))
    picture = picture_of(assemble(replace(reading, nodes=fresh), Memory(), ViewSettings(), 0.0, WALL))
    shown = parse_view(encode_picture(picture))
    totals = totals_of_devices(shown.devices, watched=True)
    written = picture_json(picture)["totals"]
    assert (totals.gpus, totals.broken) == (written["gpus"], written["broken"])
    assert totals.allocated == pytest.approx(written["allocated"], abs=2e-3)


@pytest.mark.parametrize(
    ("device", "of", "watched", "use"),
    [
        ({"utilization": 0.5}, {}, False, "used"),
        ({"utilization": 0.0}, {}, False, "idle"),
        ({}, {}, False, "unknown"),
        ({}, {"processes": 0}, False, "idle"),
        ({}, {"processes": 2}, False, "unknown"),
        ({"utilization": 0.0}, {"utilization": 0.4}, False, "used"),
        ({"utilization": 0.9}, {"utilization": 0.0, "processes": 0}, False, "idle"),
        ({"utilization": 0.9}, {"utilization": 0.0, "processes": 1}, False, "unknown"),
        ({"utilization": 0.0}, {"utilization": 0.0, "processes": 1}, False, "idle"),
        ({"utilization": 0.9}, {"idle_since": WALL}, False, "idle"),
        ({"utilization": 0.0}, {"utilization": 0.0}, True, "used"),
        ({"utilization": 0.0, "present": False}, {"idle_since": WALL}, True, "unknown"),
        ({"utilization": 0.9, "conditions": (LOST,)}, {}, True, "unknown"),
        ({"utilization": 0.9, "conditions": (HOT,)}, {}, True, "used"),
    ],
)
def test_what_a_holder_does(device: dict[str, Any], of: dict[str, Any], watched: bool, use: str) -> None:
    assert use_of(gpu(0, **device), holder(**of), watched) == use


def test_a_lost_gpu_that_is_held_stays_allocated() -> None:
    lost = gpu(0, holder(), present=False, conditions=(LOST,))
    said = totals_of(Picture("node", 1.0, 1.0, (NodePicture("n1", (lost, gpu(1, present=False, conditions=(LOST,)))),)))
    assert (said.gpus, said.allocated, said.unknown, said.free, said.broken) == (2, 1.0, 1.0, 1.0, 2)


def test_a_gpu_that_two_nodes_claim_is_one() -> None:
    both = [NodePicture(name, (gpu(0, holder(), utilization=0.5),)) for name in ("n1", "n2")]
    nameless = [NodePicture(name, (gpu(0, uuid="gpu 0"),)) for name in ("n3", "n4")]
    said = totals_of(Picture("cluster", 1.0, 1.0, (*both, *nameless)))
    assert (said.gpus, said.allocated, said.used, said.free) == (3, 1.0, 1.0, 2.0)


def test_thirds_are_rounded_so_that_they_add_up() -> None:
    people = [holder(f"p{i}", utilization=ratio) for i, ratio in enumerate([0.5, 0.0, None])]
    device = gpu(0, *people)
    (written,) = [picture_json(Picture("node", 1.0, 1.0, (NodePicture("n", (device,)),)))["totals"]]
    assert adds_up(written)
    assert sorted((written["used"], written["idle"], written["unknown"])) == [0.3333, 0.3333, 0.3334]


def test_what_is_not_cut_off_is_free_or_its_holders() -> None:
    cut = [replace(gpu(0), instance=str(i), profile="2g.20gb", holders=(holder(f"p{i}"),)) for i in range(2)]
    said = totals_of(Picture("node", 1.0, 1.0, (NodePicture("n", (gpu(0), *cut)),)))
    assert (said.allocated, said.free) == (0.5714, 0.4286)
    whole_too = (gpu(0, holder("all")), *cut)
    assert totals_of(Picture("node", 1.0, 1.0, (NodePicture("n", whole_too),))).allocated == 1.0
    priced = with_prices(whole_too, PriceTags(PRICES))
    assert sum(of.cost_per_hour or 0 for d in priced for of in d.holders) == pytest.approx(2.80)


def mean_of(layout: Sequence[tuple[str, float | None]]) -> float | None:
    cut = [replace(gpu(0), instance=str(i), profile=p, utilization=u) for i, (p, u) in enumerate(layout)]
    (written,) = picture_json(Picture("node", 1.0, 1.0, (NodePicture("n", (gpu(0), *cut)),)))["nodes"][0]["gpus"]
    return written.get("utilization_ratio")


def test_a_mig_gpus_utilisation_is_the_mean_by_compute_slices() -> None:
    assert mean_of([("3g.40gb", 1.0), ("1g.10gb", 0.0)]) == 0.75
    assert mean_of([("3g.40gb", 1.0), ("1g.10gb", None)]) == 1.0
    assert mean_of([("3g.40gb", None)]) is None
    assert mean_of([("odd", 0.2), ("1g.10gb", 0.4)]) == 0.3


def test_money_is_absent_where_nothing_held_has_a_price() -> None:
    odd = gpu(0, holder(), model="Odd GPU")
    picture = Picture("node", 1.0, 1.0, (NodePicture("n", with_prices([odd], PriceTags(PRICES))),), currency="EUR")
    assert totals_of(picture).cost_per_hour is None
    assert totals_of(replace(picture, nodes=())).cost_per_hour == 0
    assert totals_of(replace(picture, currency="")).cost_per_hour is None


def test_what_an_old_node_holds_is_paid_for_and_nobody_knows_what_it_does() -> None:
    reading = ClusterReading((node("n1", gpu(0, holder(utilization=0.0), power_watts=300.0), read_at=-60.0),))
    picture = picture_of(assemble(reading, Memory(), ViewSettings(), 0.0, WALL, prices=PRICES))
    said = totals_of(picture)
    assert (said.gpus, said.unknown, said.power_watts) == (1, 1.0, None)
    assert (said.cost_per_hour, said.wasted_per_hour) == (2.8, 0.0)
