"""The error for requests that are rejected or cannot be answered. Its kind determines the gRPC or HTTP status."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from functools import partial

from podgpu.errors import PodgpuError

_MAX_LENGTH = 80


class RefusalKind(Enum):
    """HTTP status, and the reason in Kubernetes' error format."""

    BAD_REQUEST = 400, "BadRequest"  # the request is invalid; retrying does not help
    FORBIDDEN = 403, "Forbidden"
    NOT_FOUND = 404, "NotFound"  # no such metric, no matching pod, or no pod with a GPU
    NO_DATA = 503, "ServiceUnavailable"  # values are missing now, but may be available later


class Refusal(PodgpuError):
    """An error with a message for the user: what is wrong, and what to do."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


bad_request = partial(Refusal, RefusalKind.BAD_REQUEST)
forbidden = partial(Refusal, RefusalKind.FORBIDDEN)
not_found = partial(Refusal, RefusalKind.NOT_FOUND)
no_data = partial(Refusal, RefusalKind.NO_DATA)


def quote(text: str) -> str:
    """Quotes user input for messages, truncated and without control characters."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_LENGTH])
    return f"'{shown}…'" if len(text) > _MAX_LENGTH else f"'{shown}'"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word[:_MAX_LENGTH].lower(), by_lower, n=1)
    return f": did you mean {by_lower[matches[0]]}?" if matches else f"; must be one of {', '.join(by_lower.values())}"
