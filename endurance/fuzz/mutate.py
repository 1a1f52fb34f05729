"""Made-up input: good input spoilt in a few places, texts and bytes alike, and JSON spoilt in its structure.

Seeded and pure: the same number gives the same case on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any, TypeVar

Case = str | bytes
C = TypeVar("C", str, bytes)
Make = Callable[[Random], Case]

NUMBERS = (
    *("0", "-0", "1", "-1", "00", "01", "255", "256", "2147483632", "2147483647", "2147483648", "4294967295"),
    *("9223372036854775792", "9223372036854775807", "9223372036854775808", "18446744073709551615", "1e999", "-1e999"),
    *("NaN", "Inf", "+Inf", "-inf", "1e308", "5e-324", "1_000", "0x10", "1e-7", "٣", "9" * 400, "140737488355328.0"),
)
WORDS = (
    *(
        "",
        " ",
        "\t",
        "\n",
        "\r",
        "\r\n",
        "\0",
        '"',
        "'",
        "\\",
        "\\n",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "::",
        ";",
        "=",
        "#",
    ),
    *("/", "//", "..", "%", "*", "&", "@", "|", "-", "+", ".", "true", "null", "\ufeff", "é", "\u2028", "\x85", "𝔾"),
    *("\ud800", "A" * 300, "(" * 40, "# HELP", "# TYPE", " # hello 5", "GPU-", "MIG-", "nvidia.com/gpu", "$", "<none>"),
)
_TOKENS_TEXT = NUMBERS + WORDS
_NO_TEXT = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\x00\x00\x00\x00")
_TOKENS_BYTES = (*(token.encode("utf-8", "surrogatepass") for token in _TOKENS_TEXT), *_NO_TEXT)
_LONGEST = 1 << 16


def texts(corpus: Sequence[str], words: Sequence[str] = ()) -> Make:
    """Spoilt texts of the corpus; `words` are worth putting in beside those that always are."""
    tokens = (*_TOKENS_TEXT, *words)
    return lambda rng: _spoil(rng, corpus, tokens, lambda r: chr(r.choice((r.randrange(128), r.randrange(0xD800)))))


def blobs(corpus: Sequence[bytes], words: Sequence[bytes] = ()) -> Make:
    tokens = (*_TOKENS_BYTES, *words)
    return lambda rng: _spoil(rng, corpus, tokens, lambda r: bytes((r.randrange(256),)))


def _spoil(rng: Random, corpus: Sequence[C], tokens: Sequence[C], letter: Callable[[Random], C]) -> C:
    case = rng.choice(corpus)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 8))):
        at = rng.randrange(len(case) + 1)
        end = min(len(case), at + rng.choice((1, 1, 2, 4, 16, 200)))
        match rng.randrange(8):
            case 0:
                case = case[:at] + letter(rng) + case[at:]
            case 1:
                case = case[:at] + letter(rng) + case[at + 1 :]
            case 2:
                case = case[:at] + rng.choice(tokens) + case[at:]
            case 3:
                case = case[:at] + rng.choice(tokens) + case[end:]
            case 4:
                case = case[:at] + case[end:]
            case 5:
                case = case[:end] + case[at:end] * rng.choice((1, 2, 30)) + case[end:]
            case 6:
                case = case[:at]
            case 7:
                other = rng.choice(corpus)
                start = rng.randrange(len(other) + 1)
                case = case[:at] + other[start : start + rng.choice((4, 40, 4000))] + case[end:]
    return case[:_LONGEST]


# Structure


_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "0", "-1", "NaN", "nvidia0", "\ud800", "\0", "a\nb", "x" * 300, [], {}, [[]], [None], {"": None}),
)


def documents(corpus: Sequence[object], words: Sequence[object] = ()) -> Make:
    """JSON of the corpus with parts left out, doubled, moved about or replaced; sometimes spoilt as text on top."""
    dumped = [json.dumps(document) for document in corpus]
    odd = (*_ODD, *words)
    as_bytes = [text.encode() for text in dumped]

    def make(rng: Random) -> bytes:
        tree = json.loads(rng.choice(dumped))
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            tree = _spoil_tree(rng, tree, odd)
        body = json.dumps(tree, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
        if rng.random() < 0.15:
            return _spoil(rng, [body, *as_bytes], _TOKENS_BYTES, lambda r: bytes((r.randrange(256),)))
        return b"[" * 3000 + body if rng.random() < 0.001 else body

    return make


def _spoil_tree(rng: Random, tree: Any, odd: Sequence[object]) -> Any:
    parent, key = _somewhere(rng, tree)
    if parent is None:
        return deepcopy(rng.choice(odd)) if rng.random() < 0.3 else tree
    match rng.randrange(6):
        case 0:
            del parent[key]
        case 1:
            other, at = _somewhere(rng, tree)
            parent[key] = None if other is None else deepcopy(other[at])
        case 2 if isinstance(parent, list):
            parent.extend([parent[key]] * rng.choice((1, 2, 20)))
        case 2 if isinstance(parent, dict):
            parent[rng.choice((str(key) + "x", "", "\ud800", str(key).upper()))] = parent.pop(key)
        case 3 if isinstance(parent[key], str):
            parent[key] = _spoil(rng, [parent[key]], _TOKENS_TEXT, lambda r: chr(r.randrange(0x250)))
        case _:
            parent[key] = deepcopy(rng.choice(odd))
    return tree


def _somewhere(rng: Random, tree: Any) -> tuple[Any, Any]:
    """A place in the tree: the container and the key in it; None: there is no place."""
    found: tuple[Any, Any] = (None, None)
    here = tree
    while isinstance(here, dict | list) and here:
        key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
        found = (here, key)
        if rng.random() < 0.25:
            break
        here = here[key]
    return found


def either(*makes: Make) -> Make:
    return lambda rng: rng.choice(makes)(rng)
