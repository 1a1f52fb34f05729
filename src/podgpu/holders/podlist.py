"""Allocation source `podlist`: podlist.json, written by koordinator's hook or `podgpu hook`.

koordinator's scheduler assigns GPUs without the kubelet. The file does not contain shares.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from podgpu.decode import decode_json
from podgpu.errors import SourceError
from podgpu.files import ReadOnChange
from podgpu.holders import AllocationSource
from podgpu.holders.device_ids import HeldId, map_held, parse_id_or_minor
from podgpu.model import Allocation, Device, Workload

SOURCE = "podlist"
DEFAULT_PATHS = ("/var/lib/kubelet/pod-resources/podlist.json", "/podlist.json")
"""Next to the kubelet's socket, and the mount point in koordinator's manifest."""
MAX_BYTES = 16 * 1024 * 1024

_log = logging.getLogger(__name__)
_NonEmpty = Annotated[str, Meta(min_length=1)]


class PodlistEntry(Struct, frozen=True):
    name: _NonEmpty
    namespace: _NonEmpty
    container: str
    gpu_list: list[str] | None


class PodlistAllocation(AllocationSource):
    """Reads `path`, or the first existing file of `defaults`."""

    name = SOURCE

    def __init__(self, path: str | None = None, defaults: Sequence[str] = DEFAULT_PATHS) -> None:
        self.path = None if path is None else os.path.abspath(path)
        self.defaults = defaults
        self._file = ReadOnChange(parse_podlist, MAX_BYTES)
        self._mount_checked: set[str] = set()

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        path = self.path or _find_podlist(self.defaults)
        held = self._file.read(path)
        if path not in self._mount_checked:
            self._mount_checked.add(path)
            if os.path.ismount(path):
                _log.warning(
                    "%s is mounted as a single file: if its writer replaces it, podgpu keeps reading the old file;"
                    " mount its directory instead",
                    path,
                )
        return map_held(SOURCE, held, devices)


def _find_podlist(paths: Sequence[str]) -> str:
    for path in paths:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # such as no permission; reading the file reports it
        return path
    raise SourceError(
        "file_missing",
        f"{' and '.join(paths)} not found: mount the host's directory in which koordinator's hook writes podlist.json,"
        " or set its path",
    )


def parse_podlist(content: bytes, path: str = "podlist.json") -> tuple[HeldId, ...]:
    """Parses the file. An empty list means that no GPU is held; an empty file is an error. Raises SourceError."""
    entries: list[PodlistEntry] = decode_json(content, path, list[PodlistEntry] | None) or []  # type: ignore[arg-type]
    return tuple(
        HeldId(holder, SOURCE, text, parse_id_or_minor(text))
        for entry in entries
        for holder in [Workload(entry.namespace, entry.name, entry.container)]
        for text in entry.gpu_list or ()
    )
