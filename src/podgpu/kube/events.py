"""This module owns the messages of list and watch: JSON lines put together, lists and events taken apart. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from podgpu.errors import SourceError
from podgpu.kube.answers import Object, Refused, api_sentence

LONGEST = 4 * 1024 * 1024
"""Of one object. etcd takes none over 1.5 MiB; written as JSON it is larger, but not by this much."""

_WINDOW = 64 * 1024
_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"[ \t\r\n]*")


class Lines:
    """Whole lines out of pieces that were cut anywhere."""

    def __init__(self, longest: int = LONGEST) -> None:
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
        raise SourceError("bad_answer", "a line of the watch is not an event")
    kind, body = event.get("type"), event["object"]
    if kind == "ERROR":
        raise _error(body)
    if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
        raise SourceError("bad_answer", "the watch has an event of a kind podgpu does not know")
    return Event(kind, body, resource_version(body))


def _error(status: Object) -> Refused:
    sentence = api_sentence(json.dumps(status).encode())
    if status.get("code") == 410 or status.get("reason") in ("Expired", "Gone"):
        return Refused(
            "gone", f"the API server no longer has the version watched from ({sentence}): podgpu lists it again"
        )
    return Refused("server_error", f"the API server ended the watch ({sentence}): podgpu lists it again")


class Listed(NamedTuple):
    version: str
    """To watch from."""
    more: str
    """What to ask the next page with; empty: that was all."""


def parse_list(body: bytes, take: Callable[[Object], object], longest: int = LONGEST) -> Listed:
    """Hands on the objects of a list, or of a page of one.

    One object at a time is made and let go of: a whole list as objects would take ten times its size in memory, and
    hold up every other thread while it is made. What was handed on counts for nothing when this raises SourceError.
    """
    try:
        return _ListText(body.decode(), longest).read(take)
    except (ValueError, RecursionError) as error:
        raise SourceError("bad_answer", "the answer to a list is not JSON: is this an API server?") from error


class _ListText:
    """A list as text, and how far it was read."""

    def __init__(self, text: str, longest: int) -> None:
        self._text = text
        self._longest = longest
        self._at = 0
        self._from, self._window = 0, text[: min(_WINDOW, longest)]

    def read(self, take: Callable[[Object], object]) -> Listed:
        metadata: object = None
        self._expect("{")
        while True:
            name = self._value()
            self._expect(":")
            if name == "items":
                self._items(take)
            elif name == "metadata":
                metadata = self._value()
            else:
                self._value()
            if self._mark() != ",":
                break
            self._at += 1
        self._expect("}")
        if self._mark():
            raise ValueError("there is more than one value")
        answer = {"metadata": metadata}
        more = _metadata(answer).get("continue")
        return Listed(resource_version(answer), more if isinstance(more, str) else "")

    def _items(self, take: Callable[[Object], object]) -> None:
        if self._mark() == "n":
            if self._value() is not None:
                raise _no_objects()
            return
        if self._mark() != "[":
            raise _no_objects()
        self._at += 1
        if self._mark() == "]":
            self._at += 1
            return
        while True:
            item = self._value()
            if not isinstance(item, dict):
                raise _no_objects()
            take(item)
            if self._mark() != ",":
                break
            self._at += 1
        self._expect("]")

    def _mark(self) -> str:
        """The next character that is not blank; empty at the end."""
        found = _BLANKS.match(self._text, self._at)
        self._at = found.end() if found is not None else self._at
        return self._text[self._at : self._at + 1]

    def _expect(self, mark: str) -> None:
        if self._mark() != mark:
            raise ValueError(f"no {mark} where one must be")
        self._at += 1

    def _value(self) -> object:
        """The next value. It is looked for in a window of the text that grows: past `longest` nothing is made."""
        self._mark()
        size = 0
        while True:
            if size:
                self._from, self._window = self._at, self._text[self._at : self._at + size]
            is_cut = self._from + len(self._window) < len(self._text)
            try:
                value, end = _DECODER.raw_decode(self._window, self._at - self._from)
            except json.JSONDecodeError:
                if not is_cut:
                    raise
            else:
                if end < len(self._window) or not is_cut:  # a number cut by the window's edge would be another number
                    self._at = self._from + end
                    return value
            if size >= self._longest:
                raise SourceError("bad_answer", f"an object is larger than the {self._longest} bytes podgpu accepts")
            size = min(max(_WINDOW, 8 * size), self._longest)


def _no_objects() -> SourceError:
    return SourceError("bad_answer", "the answer to a list has no list of objects")


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
