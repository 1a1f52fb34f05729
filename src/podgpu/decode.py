"""Decodes JSON of other programs into typed structs."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from podgpu.errors import SourceError, one_line

T = TypeVar("T")


def shorten_path(error: Exception) -> str:
    """Returns the message of a msgspec error with the path first: "users[0].name: expected `str`, got `int`"."""
    message, _, path = str(error).partition(" - at `$")
    if message[1:2].islower():
        message = message[:1].lower() + message[1:]
    return f"{path.rstrip('`').lstrip('.')}: {message}" if path else message


def decode_json(content: bytes, path: str, kind: type[T]) -> T:
    """Decodes JSON written by another program. Raises SourceError ("malformed")."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(path, shorten_path(error) if content else "it is empty") from error


def malformed(path: str, problem: str) -> SourceError:
    return SourceError(
        "malformed",
        f"{path} cannot be decoded ({one_line(problem)[:200]}): if this persists, check the program that writes it",
    )
