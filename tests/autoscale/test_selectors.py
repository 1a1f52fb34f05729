"""Label selectors: Kubernetes' own examples, and what is none."""

from __future__ import annotations

import pytest

from podgpu.autoscale.refusal import Refusal, RefusalKind
from podgpu.autoscale.selectors import parse_selector

LABELS = {"app": "inference", "tier": "gpu", "size": "12", "example.com/team": "a"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "app=inference",
        "app==inference",
        "app!=web",
        "app = inference , tier=gpu",
        "app in (web, inference)",
        "app notin (web)",
        "none notin (web)",
        "none!=x",
        "tier",
        "!none",
        "! none",
        "size>11",
        "size<13",
        "example.com/team=a",
        "app in (inference),tier in (gpu,cpu),!none",
    ],
)
def test_matches(text: str) -> None:
    assert parse_selector(text).matches(LABELS)


@pytest.mark.parametrize(
    "text",
    ["app=web", "app!=inference", "app in (web)", "app notin (inference)", "none", "!app", "size>12", "app>1", "x="],
)
def test_does_not_match(text: str) -> None:
    assert not parse_selector(text).matches(LABELS)


def test_an_empty_value_is_a_value() -> None:
    assert parse_selector("x=").matches({"x": ""})
    assert parse_selector("x in (,y)").matches({"x": ""})


@pytest.mark.parametrize(
    "text",
    [
        "=a",
        "app=in ference",
        "app in inference",
        "app in (a",
        "app in a)",
        "app in ((a))",
        "a,,b",
        ",",
        "app=größe",
        "app=-a",
        "-app=a",
        "a/b/c=d",
        "app>x",
        "app=" + "a" * 64,
        "x" * 9000,
        ",".join("a" for _ in range(101)),
        "app\x00=a",
    ],
)
def test_what_is_no_selector_is_refused_with_words(text: str) -> None:
    with pytest.raises(Refusal) as raised:
        parse_selector(text)
    assert raised.value.kind is RefusalKind.BAD_REQUEST
    assert str(raised.value).isprintable()
