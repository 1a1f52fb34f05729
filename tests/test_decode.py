"""Decoding of JSON from other programs, and of YAML files from users."""

from __future__ import annotations

import msgspec
import pytest

from podgpu.decode import decode_yaml
from podgpu.errors import UsageError


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
