"""Where the JSON API of `podgpu cluster` or of an exporter is (docs/api.md), and how to read it.

A command reads a view by its URL, or through the proxy of a Kubernetes API server
(`kube/service_proxy.py`). Commands do not distinguish the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from podgpu.decode import BAD_JSON, find_decoder
from podgpu.errors import SourceError
from podgpu.http_client import HttpClient

_Answer = TypeVar("_Answer")


class ViewClient(Protocol):
    """Reads paths of one view. May be used in any thread without an event loop."""

    shown: str  # the view, for messages

    def get_blocking(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """Returns the body. Raises SourceError if there is none.

        The reason of an error status is `http_STATUS`, or `unauthorized`.
        """


class ViewAddress(Protocol):
    def open(self, timeout: float) -> ViewClient:
        """Returns a client whose requests take at most `timeout` seconds.

        Raises UsageError if the address is invalid.
        """


@dataclass(frozen=True, slots=True)
class UrlAddress:
    url: str  # HOST:PORT or a URL

    def open(self, timeout: float) -> ViewClient:
        return HttpClient(self.url.rstrip("/"), timeout=timeout)


def read_answer(
    client: ViewClient, path: str, kind: type[_Answer], query: Mapping[str, str] | None = None
) -> _Answer:
    """Reads and decodes one answer."""
    return decode_answer(client.get_blocking(path, query), path, kind, client.shown)


def decode_answer(body: bytes, path: str, kind: type[_Answer], shown: str) -> _Answer:
    try:
        return find_decoder(kind).decode(body)
    except BAD_JSON as error:
        text = f"{shown} returned no valid /{path}: is it the address of podgpu cluster? ({error})"
        raise SourceError("malformed", text) from error
