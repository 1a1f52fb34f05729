"""Decoding of JSON from other programs, and of YAML files from users."""

from __future__ import annotations

import msgspec
import pytest

from podgpu.decode import convert, decode_json, decode_yaml, find_decoder, format_error, malformed
from podgpu.errors import SourceError, UsageError


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    names: list[str] = []
    number: float = 0.0
    enabled: bool | None = None
    more: Limits | None = None


def refused(text: str | bytes) -> str:
    content = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(UsageError) as raised:
        decode_yaml(content, "limits.yaml", Limits)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", Limits()),
        ("# nothing", Limits()),
        ("null", Limits()),
        ("\ufeffname: x", Limits("x")),
        ("enabled: true", Limits(enabled=True)),
        ("enabled: false", Limits(enabled=False)),
        ("enabled: null", Limits()),
        ("enabled: ~", Limits()),
        ("enabled:", Limits()),
        ("number: 1.5", Limits(number=1.5)),
        ("number: '2'", Limits(number=2)),
        # plain texts that YAML 1.1 or a prefix would make another type
        ("name: true-story", Limits("true-story")),
        (
            "names: [falsehood, truest, on, 0123, 1e3, 2024-01-01, =]",
            Limits(names=["falsehood", "truest", "on", "0123", "1e3", "2024-01-01", "="]),
        ),
        ("more: &a {name: x}", Limits(more=Limits("x"))),
        ("more: {<<: {name: x, number: 1}, number: 2}", Limits(more=Limits("x", number=2))),
    ],
)
def test_yaml_values(text: str, limits: Limits) -> None:
    assert decode_yaml(text.encode(), "limits.yaml", Limits) == limits


def nest(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"name: \xff", "limits.yaml: not UTF-8 text"),
        (
            "nam: x",
            "limits.yaml: object contains unknown field `nam`; "
            "valid keys are name, names, number, enabled, more",
        ),
        ("more: {number: secret}", "limits.yaml: more.number: expected `float`, got `str`"),
        ("names: [a, [b]]", "limits.yaml: names[1]: expected `str`, got `array`"),
        ("enabled: yes", "limits.yaml: enabled: expected `bool | null`, got `str`"),
        ("- name", "limits.yaml: expected `object`, got `array`"),
        ("name: [a", "limits.yaml: line 2: not YAML: did not find expected …"),
        ("a: 1\nb: 'x\ny", "limits.yaml: line 3: not YAML: found unexpected end of stream"),
        ("name: *secret", "limits.yaml: line 1: not YAML: found undefined alias"),
        (
            "name: !!secret x",
            "limits.yaml: line 1: not YAML: could not determine a constructor for the tag …",
        ),
        ("name: a\nnumber: 1\nname: b", "limits.yaml: line 3: not YAML: the key name is repeated"),
        (
            "more:\n  number: 1\n  number: 2",
            "limits.yaml: line 3: not YAML: the key number is repeated",
        ),
        ("enabled: !!bool x", "limits.yaml: not YAML that podgpu can read (KeyError)"),
        ("number: !!int x", "limits.yaml: not YAML that podgpu can read (ValueError)"),
        ("name: a\0b", "limits.yaml: not YAML that podgpu can read (ReaderError)"),
        (nest(101), "limits.yaml: nested deeper than 100 levels"),
        (nest(100), "limits.yaml: expected `object`, got `array`"),
        ("names: [" + "[], " * 200 + "]", "limits.yaml: names[0]: expected `str`, got `array`"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_is_refused(text: str | bytes, message: str) -> None:
    assert refused(text) == message


def test_json_of_other_programs() -> None:
    assert decode_json(b'{"name": "x"}', "podlist.json", Limits) == Limits("x")
    advice = "if this persists, check the program that writes it"
    for content, problem in (
        (b"", "it is empty"),
        (b"{", "input data was truncated"),
        (b'{"number": "1"}', "number: expected `float`, got `str`"),
        (b'{"name": "\xff"}', "'utf-8' codec can't decode byte 0xff in position 0"),
        (b'{"more": ' * 100_000, "it is nested too deeply"),
    ):
        with pytest.raises(SourceError) as raised:
            decode_json(content, "podlist.json", Limits)
        assert raised.value.reason == "malformed"
        text = str(raised.value)
        assert text.startswith(f"podlist.json cannot be decoded ({problem}"), text
        assert text.endswith(f"): {advice}")


def test_a_long_problem_is_shortened_to_one_line() -> None:
    text = str(malformed("f", "a\nb" + "c" * 300))
    assert text.startswith("f cannot be decoded (a\\nb" + "c" * 196 + "): ")


def test_messages_begin_with_the_path() -> None:
    assert format_error(ValueError("Expected `str` - at `$.users[0].name`")) == (
        "users[0].name: expected `str`"
    )
    assert format_error(ValueError("JSON is malformed")) == "JSON is malformed"
    assert format_error(ValueError("Object is too small - at `$[1]`")) == "[1]: object is too small"


def test_decoders_are_created_once() -> None:
    assert find_decoder(Limits) is find_decoder(Limits)
    assert convert({"number": "2"}, Limits, strict=False) == Limits(number=2)
    with pytest.raises(msgspec.ValidationError):
        convert({"number": "2"}, Limits)
