"""`--at`: what the commands of a view print about an earlier time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from podgpu.cli.main import run
from podgpu.clock import parse_moment
from podgpu.errors import UsageError, utc_text
from tests.cli.test_view_commands import printed, read_table
from tests.cli.view_server import served_cluster

THEN = "1970-01-12T13:56:40Z"  # ten minutes after the first record
NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_cluster() as served:
        yield served


def test_pods(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "pods", "--url", url, "--at", THEN)
    assert out.startswith(f"As of {THEN}\n")
    assert read_table(out)["notes/idle"]["Idle GPUs"] == "1"
    listed = json.loads(printed(capsys, "pods", "--url", url, "--at", THEN, "-o", "json"))
    assert listed["taken_at"] == pytest.approx(parse_moment(THEN, NOW), abs=15)


def test_top(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "top", "--cluster", url, "--at", THEN)
    assert out.startswith(f"As of {THEN}\n")
    assert "notes/idle" in out
    view = json.loads(printed(capsys, "top", "--cluster", url, "--at", THEN, "--json"))
    assert view["at"] == pytest.approx(parse_moment(THEN, NOW))


@pytest.mark.parametrize("command", ["cost", "waste"])
def test_a_period_ends_at_this_time(
    command: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, "--url", url, "--at", THEN, "-o", "json"]
    minutes = json.loads(printed(capsys, *arguments, "--range", "5m"))
    assert minutes["to"] == parse_moment(THEN, NOW)
    assert minutes["to"] - minutes["from"] == 300
    assert minutes["totals"]["gpu_hours"] == pytest.approx(7 * 5 / 60, abs=0.1)
    everything = json.loads(printed(capsys, *arguments, "--range", "9999w"))
    assert (everything["from"], everything["to"]) == (0, minutes["to"])
    month = json.loads(printed(capsys, *arguments, "--range", "month"))
    first = datetime.fromtimestamp(month["from"], UTC)
    assert (first.month, first.day, first.hour) == (1, 1, 0)
    assert month["to"] == minutes["to"]


def test_a_report(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["report", "--url", url, "--range", "1h", "--at"]
    out = printed(capsys, *arguments, THEN)
    assert f"to {THEN}" in out
    assert f"## Broken GPUs at {THEN}" in out
    assert "GPU-6" in out
    out = printed(capsys, *arguments, "1970-01-12T12:00:00Z")
    assert "- Which GPUs were broken at that time is not recorded" in out


def test_a_time_without_a_record(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pods", "--url", url, "--at", "1970-01-02"]) == 1
    error = capsys.readouterr().err
    assert "there is no record of 1970-01-0" in error
    assert "the next record is of 1970-01-12T13:4" in error
    refused = read_refusal(f"{url}/api/v1/view?at=86400")
    assert utc_text(refused["next_record_at"]).startswith("1970-01-12T13:4")


def test_a_refusal_names_the_wrong_parameter(url: str) -> None:
    assert read_refusal(f"{url}/api/v1/range?range=soon")["parameter"] == "range"
    assert read_refusal(f"{url}/api/v1/range?from=never")["parameter"] == "from"


def read_refusal(url: str) -> dict[str, Any]:
    with pytest.raises(HTTPError) as refused:
        urlopen(url)
    with refused.value as answer:
        body: dict[str, Any] = json.load(answer)
    return body


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pods", "--at", "soon"), "--at 'soon' is not a time such as 2026-11-19T14:30:00Z, or an"),
        (("cost", "--at", "-5m"), "--at '-5m' is not a time such as"),
        (("waste", "--at", "5"), "--at '5' is not a time such as"),
        (("pods", "--at", "2099-01-01"), "--at '2099-01-01' is in the future"),
        (("cost", "--at", "9999w"), "--at '9999w' is not after 1970-01-01T00:00:00Z"),
        (("cost", "--at", "9999999999d"), "--at '9999999999d' is not a time"),
        (("report", "--at", "2026-13-40"), "--at '2026-13-40' is not a time such as"),
        (("top", "--at", "5m"), "--at needs --cluster or --kube"),
        (("top", "--at", "5m", "--url", "h:9400"), "--at needs --cluster or --kube"),
        (("cost", "--at", "1h", "--range", "x"), "--range='x': write a length of time"),
    ],
)
def test_wrong_times(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(list(arguments)) == 2
    assert capsys.readouterr().err.startswith(f"podgpu: {message}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", NOW - 5400),
        ("1d12h", NOW - 129_600),
        ("1.5h", NOW - 5400),
        ("2w", NOW - 1_209_600),
        ("1763562600", 1_763_562_600.0),
        ("2025-11-19T14:30:00Z", 1_763_562_600.0),
        ("2025-11-19T15:30+01:00", 1_763_562_600.0),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_moment(text, NOW) == seconds


def test_a_time_without_a_zone_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert parse_moment("2025-11-19T23:30", NOW) == 1_763_562_600.0
        assert parse_moment("2025-11-19", NOW) == 1_763_478_000.0
        with pytest.raises(UsageError, match="no time zone"):
            parse_moment("2025-11-19T23:30", NOW, needs_zone=True)
    finally:
        monkeypatch.undo()
        time.tzset()
