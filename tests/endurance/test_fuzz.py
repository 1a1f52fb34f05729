"""The short run of `make fuzz`: every parser, a few hundred made-up inputs each, the same in every run."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from random import Random

import pytest

from endurance.fuzz import __main__ as command
from endurance.fuzz.mutate import documents, texts
from endurance.fuzz.target import Result, Target, fuzz, replay
from endurance.fuzz.targets import TARGETS
from podgpu.errors import SourceError

ROOT = Path(__file__).parents[2]
CASES = 400
_PARSER = re.compile(r"^def ((?:parse|decode|load)_[a-z_]+)\b", re.MULTILINE)


@cache
def fuzzed(name: str) -> Result:
    return fuzz(TARGETS[name], CASES, "tests")


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_a_value_or_an_error_it_says_it_raises(name: str) -> None:
    result = fuzzed(name)
    assert result.failure is None, f"{result.failure.what}: {result.failure.case!r}\n{result.failure.trace}"
    assert result.cases == CASES


@pytest.mark.parametrize("name", TARGETS)
def test_good_input_is_among_it(name: str) -> None:
    """Input that is always refused early tests nothing behind that."""
    assert fuzzed(name).outcomes["value"] >= CASES / 100


def test_there_is_a_target_for_every_parser() -> None:
    harness = "\n".join(path.read_text() for path in (ROOT / "endurance" / "fuzz").glob("targets_*.py"))
    parsers = {
        name: path.name
        for path in (ROOT / "src").rglob("*.py")
        if path.parent.name != "simulate"  # for tests and the demo; --telemetry simulated is fuzzed by its spec
        for name in _PARSER.findall(path.read_text())
    }
    of_a_whole = {"parse_json", "parse_labels", "parse_mapping", "load_config", "load_pair"}
    """Parts of others that are fuzzed: files' JSON, a sample's labels, strict YAML; which kubeconfig to read; and a
    certificate with its key, which OpenSSL reads."""
    reached = set(re.findall(r"\w+", harness))
    assert {f"{name} of {file}" for name, file in parsers.items() if name not in reached | of_a_whole} == set()


# The harness itself


def _careless(case: object) -> object:
    if "é" in str(case):
        raise KeyError("é")
    if "loop" in str(case):
        while True:
            pass
    if "two" in str(case):
        raise SourceError("bad", "two\nlines")
    return case


def test_what_gets_through_is_cut_to_the_least_that_does() -> None:
    result = fuzz(Target("careless", lambda rng: f"abc{rng.random()}é{'x' * 50}", _careless), 10, "0")
    assert result.failure is not None
    assert (result.cases, result.failure.case) == (1, "é")
    assert result.failure.what.startswith("KeyError at")


def test_what_does_not_end_is_ended() -> None:
    target = Target("careless", lambda _rng: "loop", _careless, seconds=0.05)
    assert replay(target, "loop") == "!took longer than 0.05 s of CPU"
    result = fuzz(target, 5, "0")
    assert result.cases == 1
    assert result.failure is not None


def test_a_message_of_two_lines_is_a_failure() -> None:
    assert replay(Target("careless", texts([""]), _careless), "two").startswith("!SourceError is not one line")


def test_the_same_seed_draws_the_same_cases() -> None:
    make = documents([{"a": [1, "b", {"c": None}]}])
    first, second, other = ([make(rng) for _ in range(200)] for rng in (Random("1"), Random("1"), Random("2")))
    assert first == second != other


def test_a_failure_is_saved_can_be_run_again_and_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = {"careless": Target("careless", texts(["é" * 20]), _careless)}
    out = tmp_path / "out"
    assert command.main(["careless", "--cases", "50", "--jobs", "1", "--out", str(out)], targets) == 1
    assert (out / "careless.txt").read_text() == "é"
    assert "KeyError" in (out / "careless.trace").read_text()
    assert "FAILED: KeyError" in capsys.readouterr().out
    assert command.main(["careless", "--case", str(out / "careless.txt")], targets) == 1
    assert command.main(["device-ids", "--cases", "50", "--jobs", "1"]) == 0
