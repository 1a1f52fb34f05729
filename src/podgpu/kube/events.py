"""The list and watch protocol's messages: JSON lines put together from pieces, lists and events taken apart. Pure."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from podgpu.errors import SourceError
from podgpu.kube.answers import Object, Refused, api_sentence

LONGEST_LINE = 8 * 1024 * 1024


class Lines:
    """Whole lines out of pieces that were cut anywhere."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._begun = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines this piece completes. Raises SourceError when one grows past all bounds."""
        *ends, rest = piece.split(b"\n")
        whole = []
        for end in ends:
            self._begun += end
            self._check()
            if line := bytes(self._begun).strip():
                whole.append(line)
            self._begun = bytearray()
        self._begun += rest
        self._check()
        return whole

    def _check(self) -> None:
        if len(self._begun) > self._longest:
            raise SourceError("bad_answer", f"an event is larger than the {self._longest} bytes podgpu accepts")


class Event(NamedTuple):
    kind: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    object: Object
    version: str


def parse_event(line: bytes) -> Event:
    """One line of a watch. Raises SourceError: what the server said in an ERROR event, or `bad_answer`."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError("bad_answer", "a line of the watch is not JSON") from error
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
        raise SourceError("bad_answer", "a line of the watch is no event")
    kind, body = event.get("type"), event["object"]
    if kind == "ERROR":
        raise _error(body)
    if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
        raise SourceError("bad_answer", "the watch has an event of a kind podgpu does not know")
    return Event(kind, body, resource_version(body))


def _error(status: Object) -> Refused:
    said = api_sentence(json.dumps(status).encode())
    if status.get("code") == 410 or status.get("reason") in ("Expired", "Gone"):
        return Refused("gone", f"the API server has forgotten the version watched from ({said}): listed again")
    return Refused("server_error", f"the API server ended the watch ({said}): listed again")


def parse_list(answer: Object, *, is_page: bool = False) -> tuple[list[Object], str]:
    """The objects of a list, and the version to watch from. `is_page`: there may be more of them."""
    items = answer.get("items") or []
    if not isinstance(items, list) or not all(isinstance(one, dict) for one in items):
        raise SourceError("bad_answer", "the answer to a list has no list of objects")
    if continue_of(answer) and not is_page:
        raise SourceError("bad_answer", "the API server gave part of a list though all of it was asked for")
    return items, resource_version(answer)


def continue_of(answer: Object) -> str:
    """What to ask the next page of a list with; empty: this was the last."""
    token = _metadata(answer).get("continue")
    return token if isinstance(token, str) else ""


def resource_version(body: Object) -> str:
    version = _metadata(body).get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise SourceError("bad_answer", "an object or a list has no resourceVersion")
    return version


def uid(body: Object) -> str:
    """What tells an object from a later one of the same name."""
    found = _metadata(body).get("uid")
    if not isinstance(found, str) or not found:
        raise SourceError("bad_answer", "an object has no uid")
    return found


def is_older(version: str, than: str) -> bool:
    """Kubernetes promises decimal numbers since 1.35, and always had them; what is no number cannot be compared."""
    if not (_is_number(version) and _is_number(than)):
        return False
    return int(version) < int(than)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 40


def _metadata(body: Object) -> dict[str, Any]:
    metadata = body.get("metadata")
    return metadata if isinstance(metadata, dict) else {}
