"""The commands that repair a GPU, as they are in the JSON of the page."""

from __future__ import annotations

import msgspec
import pytest

from podgpu.fleet.repair import Repair
from podgpu.fleet.view import make_view
from podgpu.model import Condition, DeviceState, Holder
from podgpu.web.redaction import hide_in_view
from tests.fleet.states import gpu, holder, node, state_of

CORDON = "kubectl cordon gpu-7"
DRAIN = "kubectl drain gpu-7 --ignore-daemonsets --delete-emptydir-data"
UNCORDON = "kubectl uncordon gpu-7"


def repair(*gpus: DeviceState, name: str = "gpu-7") -> Repair | None:
    return make_view(state_of(node(name, *gpus))).nodes[0].gpus[0].repair


def commands(found: Repair | None) -> list[str]:
    return [] if found is None else [step.command for step in found.commands]


def broken(condition: str, detail: str = "", *holders: Holder) -> DeviceState:
    return gpu(3, *holders, conditions=(Condition(condition, 1.0, detail),))


def test_a_reset_begins_with_cordon_and_releases_the_driver() -> None:
    found = repair(broken("xid", "48", holder("a", "ml")), gpu(1, holder("b", "web")))
    assert commands(found) == [
        CORDON,
        f"{DRAIN} --dry-run=server",
        DRAIN,
        "podgpu release --seconds 600 --node gpu-7",
        "nvidia-smi -r -i 3",
        UNCORDON,
    ]
    assert found is not None
    assert found.evicts == ("ml/a", "web/b"), "the drain evicts the pods of all GPUs of the node"
    assert [step.place for step in found.commands].count("node") == 1


@pytest.mark.parametrize(
    ("condition", "detail", "action"),
    [
        ("xid", "48", "reset"),
        ("xid", "79", "reboot"),
        ("recovery_action", "reset", "reset"),
        ("recovery_action", "reboot", "reboot"),
        ("recovery_action", "drain_p2p", ""),
        ("row_remap_failure", "", "replace"),
        ("lost", "", "reboot"),
        ("thermal", "", ""),
        ("application_xid", "13", ""),
        ("a_condition_of_a_newer_version", "", ""),
    ],
)
def test_the_repair_follows_the_condition(condition: str, detail: str, action: str) -> None:
    found = repair(broken(condition, detail))
    assert (found.action if found else "") == action
    assert ("systemctl reboot" in commands(found)) == (action == "reboot")
    assert ("systemctl poweroff" in commands(found)) == (action == "replace")
    assert any("podgpu release" in each for each in commands(found)) == (action == "reset")


def test_the_most_drastic_repair_is_taken() -> None:
    several = (Condition("ecc", 1.0), Condition("row_remap_failure", 1.0), Condition("lost", 1.0))
    found = repair(gpu(0, conditions=several))
    assert found is not None
    assert found.action == "replace"


def test_the_driver_decides_before_the_list_of_xids() -> None:
    both = (Condition("recovery_action", 1.0, "reboot"), Condition("xid", 1.0, "48"))
    assert "systemctl reboot" in commands(repair(gpu(0, conditions=both)))


def test_a_machine_without_kubernetes_needs_no_kubectl() -> None:
    job = Holder(job="4711", user="ann")
    found = repair(broken("ecc", "", job))
    assert commands(found) == ["podgpu release --seconds 600", "nvidia-smi -r -i 3"]
    assert found is not None
    assert found.evicts == ()


def test_names_are_quoted_for_the_shell() -> None:
    found = repair(broken("ecc"), name="gpu 7; reboot")
    assert commands(found)[0] == "kubectl cordon 'gpu 7; reboot'"


def test_a_user_sees_only_his_pods_among_those_to_evict() -> None:
    view = make_view(
        state_of(node("gpu-7", broken("ecc", "", holder("a", "ml"), holder("b", "x"))))
    )
    hidden = hide_in_view(view, frozenset({"ml"}))
    shown = hidden.nodes[0].gpus[0].repair
    assert shown is not None
    assert shown.evicts == ("ml/a",)
    assert b"x/b" not in msgspec.json.encode(hidden)
