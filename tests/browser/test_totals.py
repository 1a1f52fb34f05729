"""The sums in the head of the page, over random pictures: they agree with the server's, and they add up."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from podgpu.cluster.parts import Totals
from podgpu.model import Workload
from tests.browser.chromium import Tab, opened, went
from tests.browser.flat_documents import ConditionWords, DeviceFigures, HolderFigures
from tests.browser.flat_pictures import NodePicture, Picture, view_of
from tests.browser.pictures import Showing

PICTURES = 20
CONDITIONS = ("lost", "unreadable", "xid", "ecc", "thermal", "row_remap_pending", "driver_away", "node_gone", "new_one")
MODELS = ("NVIDIA H100 80GB HBM3", "NVIDIA A30", "NVIDIA RTX PRO 6000 Blackwell")
PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "odd")
NAMES = ("GPUs", "Allocated", "Used", "Idle", "Not known", "Free", "Broken")


def random_picture(seed: int) -> Picture:
    dice = random.Random(seed)
    now = time.time()
    nodes = tuple(_node(dice, number, now) for number in range(dice.randint(1, 5)))
    return Picture(
        "cluster",
        now,
        1.0,
        nodes,
        notes=(f"picture {seed}",),
        currency=dice.choice(("", "USD", "EUR")),
        idle_after_seconds=dice.choice((None, 1800.0)),
    )


def _node(dice: random.Random, number: int, now: float) -> NodePicture:
    name = f"node-{number}"
    devices: list[DeviceFigures] = []
    for index in range(dice.randint(0, 5)):
        uuid = f"GPU-{number}-{index}"
        devices += _gpu(dice, DeviceFigures(uuid, index, dice.choice(MODELS), name), now)
    return NodePicture(name, tuple(devices), old=dice.random() < 0.15, age_seconds=90.0)


def _gpu(dice: random.Random, bare: DeviceFigures, now: float) -> list[DeviceFigures]:
    own = _with_figures(dice, bare, now, holders=dice.choice((0, 1, 1, 2, 3)))
    if dice.random() < 0.7:
        return [own]
    instances = [
        _with_figures(dice, replace(bare, instance=str(i), profile=dice.choice(PROFILES)), now, dice.choice((0, 1, 2)))
        for i in range(dice.randint(1, 4))
    ]
    return [replace(own, holders=own.holders[:1] if dice.random() < 0.2 else ()), *instances]


def _with_figures(dice: random.Random, bare: DeviceFigures, now: float, holders: int) -> DeviceFigures:
    said = ConditionWords(dice.choice(CONDITIONS), now - 100, "something is wrong", "do something")
    return replace(
        bare,
        utilization=dice.choice((None, 0.0, 0.0, 0.37, 1.0)),
        memory_used=dice.choice((None, 0, 40 * 1024**3)),
        power_watts=dice.choice((None, 70.0, 512.3)),
        price_per_hour=dice.choice((None, 2.5)),
        conditions=(said,) if dice.random() < 0.2 else (),
        present=dice.random() > 0.1,
        holders=tuple(_holder(dice, i, now) for i in range(holders)),
    )


def _holder(dice: random.Random, number: int, now: float) -> HolderFigures:
    return HolderFigures(
        Workload(dice.choice(("a", "b", "c")), f"pod-{dice.randint(0, 99)}-{number}", "main"),
        utilization=dice.choice((None, 0.0, 0.2)),
        processes=dice.choice((None, 0, 1)),
        share=dice.choice((None, None, 0.25, 0.5, 1.0)),
        idle_since=dice.choice((None, None, now - 60, now - 90_000)),
        cost_per_hour=dice.choice((None, 1.25)),
    )


def read(tab: Tab) -> dict[str, str]:
    return dict(zip(tab.texts(".total-name"), tab.texts(".total-value"), strict=True))


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def agree(shown: Callable[[str], float], totals: Totals, what: str) -> None:
    """To the hundredth that is written."""
    of = {"GPUs": totals.gpus, "Allocated": totals.allocated, "Used": totals.used, "Idle": totals.idle}
    of |= {"Not known": totals.unknown, "Free": totals.free, "Broken": totals.broken}
    for name, expected in of.items():
        assert shown(name) == pytest.approx(expected, abs=0.0101), (what, name)
    assert round(100 * (shown("Used") + shown("Idle") + shown("Not known"))) == round(100 * shown("Allocated")), what
    assert round(100 * (shown("Allocated") + shown("Free"))) == round(100 * shown("GPUs")), what


def test_the_head_says_what_a_direct_computation_says(tab: Tab) -> None:
    showing = Showing(random_picture(0))
    with showing.served() as client:
        tab.open(client.address.url)
        for seed in range(PICTURES):
            showing.picture = random_picture(seed)
            tab.look_again()
            tab.wait_for(f"document.querySelector('#notes-list').textContent.includes('picture {seed}')")
            totals, said = view_of(showing.picture).totals, read(tab)
            agree(lambda name, said=said: number(said[name]), totals, f"seed {seed}")  # type: ignore[misc]
            if totals.cost_per_hour is None:
                assert "Cost/h" not in said
            else:
                assert number(said["Cost/h"]) == pytest.approx(totals.cost_per_hour, abs=0.0051)
                assert number(said["Wasted/h"]) == pytest.approx(totals.wasted_per_hour, abs=0.0051)
            watts = said["Power"]
            assert (watts == "\u2013") == (totals.power_watts is None)
            if totals.power_watts is not None:
                assert number(watts) == pytest.approx(totals.power_watts, abs=0.51)


def test_what_is_filtered_has_the_sums_of_what_is_left(tab: Tab) -> None:
    showing = Showing(random_picture(0))
    words = {"allocated": "Allocated", "used": "Used", "idle": "Idle", "not known": "Not known", "free": "Free"}
    looked_at = 0
    with showing.served() as client:
        for seed in range(1, 8):
            whole = random_picture(seed)
            # A GPU that two nodes claim counts where it is first told of: of one node alone it would count there.
            first = {d.uuid: node.name for node in reversed(whole.nodes) for d in node.devices}
            nodes = [node for node in whole.nodes if node.devices]
            if not nodes or any(first[d.uuid] != node.name for node in nodes for d in node.devices):
                continue
            showing.picture = whole
            if not looked_at:
                opened(tab, client.address.url)
            tab.look_again()
            tab.wait_for(f"document.querySelector('#notes-list').textContent.includes('picture {seed}')")
            went(tab, f"#node={nodes[-1].name}")
            text = tab.text("#shown")
            looked_at += 1
            figures = dict.fromkeys(NAMES, 0.0)
            for told in text.split("\u00b7"):
                for word, name in {**words, "broken": "Broken"}.items():
                    if re.fullmatch(rf"\s*[\d.,]+ {word}\s*", told):
                        figures[name] = number(told)
            figures["GPUs"] = number(text.split(" of ")[0])
            totals = view_of(replace(whole, nodes=(nodes[-1],))).totals
            agree(figures.__getitem__, totals, f"seed {seed}: {text}")
    assert looked_at > 2, "some are left, whose GPUs are all claimed by one node"
