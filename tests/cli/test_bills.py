"""The tables of `podgpu waste` and `podgpu cost`, from answers with unknown and partial values."""

from __future__ import annotations

from typing import Any

import pytest

from podgpu.cli.main import run
from tests.top.servers import podgpu_server

DAY = {"api": "podgpu/v1", "from": 1_700_000_000.0, "to": 1_700_086_400.0}
TITLE = "2023-11-14T22:13:20Z to 2023-11-15T22:13:20Z"
TRAIN = {
    "namespace": "ml",
    "pod": "train",
    "gpu_hours": 24.0,
    "allocated_hours": 24.0,
    "used_hours": 30.0,
    "idle_hours": 0.0,
    "mean_use": 1.25,
    "energy_kwh": 9.0,
    "cost": 1200.0,
    "unpriced_hours": 4.0,
    "waste": {"hours": {"underused": 1.5}, "cost": {"underused": 75.0}},
    "do": "ask for one GPU",
}
IDLE = {
    "namespace": "notes",
    "pod": "idle",
    "gpu_hours": 12.0,
    "allocated_hours": 12.0,
    "idle_hours": 12.0,
    "mean_use": 0.0,
}
TOTALS = {
    "gpu_hours": 48.0,
    "allocated_hours": 36.0,
    "used_hours": 30.0,
    "idle_hours": 12.0,
    "mean_use": 0.625,
    "energy_kwh": 10.0,
    "cost": 2400.0,
    "waste": {
        "hours": {"idle": 12.0, "underused": 1.5, "unallocated": 12.0},
        "cost": {"idle": 600.0, "underused": 75.0, "unallocated": 525.0},
    },
}


def print_answer(
    capsys: pytest.CaptureFixture[str], document: dict[str, Any], *arguments: str
) -> list[str]:
    """Returns the lines that a command prints of this answer."""
    answer = DAY | document
    with podgpu_server({"/api/v1/waste": answer, "/api/v1/range": answer}) as server:
        assert run([*arguments, "--url", server.address]) == 0
    return capsys.readouterr().out.splitlines()


def test_waste(capsys: pytest.CaptureFixture[str]) -> None:
    bill = {"by": "pod", "currency": "EUR", "rows": [TRAIN, IDLE], "totals": TOTALS}
    document = bill | {"simulated": True, "prices": "example", "notes": ["a\nb"]}
    lines = print_answer(capsys, document, "waste")
    assert lines[:6] == [
        f"Waste, {TITLE} (SIMULATED GPUs)",
        "Wasted: 1,200.00 of 2,400.00 EUR (50%): "
        "idle 600.00, under-used 75.00, unallocated 525.00.",
        "- The prices are examples: set yours with podgpu cluster --prices FILE",
        r"- a\nb",
        "- podgpu savings says which of these GPUs could be given back",
        "",
    ]
    assert [line.split("  ")[0] for line in lines[7:]] == [
        "ml/train",
        "notes/idle",
        "unallocated",
        "Total",
    ]
    do = "podgpu why: do pods wait for them? If none, fewer nodes would do"
    assert [" ".join(line.split()[1:]) for line in lines[7:]] == [
        "24.00 0.00 1.50 125% of its share ≥ 75.00 – ≥ 75.00 – ask for one GPU",
        "12.00 12.00 – 0% – – – – –",
        f"– – – – 525.00 – – 525.00 {do}",
        "36.00 12.00 1.50 62% 1,200.00 600.00 75.00 525.00 –",
    ]
    # Numbers are aligned to the right, texts to the left.
    assert lines[6].index("What to do") == lines[7].index("ask for one GPU") == lines[9].index(do)
    end = lines[6].index("Allocated, h") + len("Allocated, h")
    assert all(line[end - 1] in "0–" and line[end] == " " for line in lines[7:])


def test_waste_in_hours_if_there_are_no_prices(capsys: pytest.CaptureFixture[str]) -> None:
    totals = {"gpu_hours": 48.0, "waste": {"hours": {"idle": 12.0}}}
    lines = print_answer(capsys, {"by": "pod", "rows": [IDLE], "totals": totals}, "waste")
    wasted = "idle 12.00, under-used –, unallocated –"
    assert lines[1] == f"Wasted: 12.00 of 48.00 GPU-hours (25%): {wasted}."
    assert not any(line.startswith("unallocated") for line in lines)
    assert "Wasted, idle" in lines[4]


def test_nothing_was_held(capsys: pytest.CaptureFixture[str]) -> None:
    lines = print_answer(capsys, {"by": "pod", "rows": [], "totals": {}}, "waste")
    unknown = "idle –, under-used –, unallocated –"
    assert lines[:4] == [
        f"Waste, {TITLE}",
        f"Wasted: 0.00 of 0.00 GPU-hours: {unknown}.",
        "- podgpu savings says which of these GPUs could be given back",
        "",
    ]
    assert len(lines) == 6, "the header and the total"


@pytest.mark.parametrize(
    ("by", "header", "nameless"),
    [
        ("namespace", "Namespace", "(no namespace)"),
        ("label:team", "Team", "(without this label)"),
    ],
)
def test_rows_without_a_name(
    by: str, header: str, nameless: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {"by": by, "rows": [{"gpu_hours": 2.0}], "totals": TOTALS}
    lines = print_answer(capsys, document, "cost", "--by", by)
    assert lines[:2] == [f"Cost, {TITLE}", ""]
    assert [line.split("  ")[0] for line in lines[2:]] == [header, nameless, "Total"]
    assert "  Cost  Wasted, idle  " in lines[2], "no currency is known"
    end = lines[2].index("GPU-hours") + len("GPU-hours")
    assert [line[:end].split("  ")[-1].strip() for line in lines[3:]] == ["2.00", "48.00"]


def test_underused_time_is_unknown_only_if_something_was_held(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note = "- under-used time is not known: no exporter counted it (docs/usage.md#waste)"
    totals = TOTALS | {"waste": {"hours": {"idle": 12.0}}}
    for held, expected in ((36.0, True), (0.0, False)):
        document = {"by": "pod", "rows": [], "totals": totals | {"allocated_hours": held}}
        assert (note in print_answer(capsys, document, "cost", "--by", "pod")) is expected


def test_a_wrong_group_has_no_advice_about_periods(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["waste", "--by", "team"]) == 2
    assert "month" not in capsys.readouterr().err
