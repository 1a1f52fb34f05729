"""This module says who was given which GPU, as koordinator's hook writes it into podlist.json: its scheduler hands out
GPUs, so the kubelet knows of none. Reads; never writes.

The file is a JSON list of {"name", "namespace", "container", "gpu_list": [ids]}; other keys are passed over.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence

from podgpu.errors import SourceError
from podgpu.files import ReadOnChange, read_bounded
from podgpu.holders.device_ids import DeviceId
from podgpu.holders.holdings import HeldId, map_held, parse_id
from podgpu.json_shape import as_list, as_object, as_text, parse_json
from podgpu.model import Allocation, Device, Workload

SOURCE = "podlist"
DEFAULT_PATHS = ("/var/lib/kubelet/pod-resources/podlist.json", "/podlist.json")
"""Beside the kubelet's socket, and where koordinator's own manifest mounts it."""
MOST_BYTES = 16 * 1024 * 1024

_log = logging.getLogger(__name__)
# As in device ids, no leading zeros: "00" is no minor number.
_MINOR = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_OCTAL_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")

Podlist = tuple[HeldId, ...]


class PodlistAllocation:
    """Reads podlist.json; without a path, the first of the `defaults` that is there at the time."""

    name = SOURCE

    def __init__(
        self,
        path: str | None = None,
        mountinfo: str = "/proc/self/mountinfo",
        defaults: Sequence[str] = DEFAULT_PATHS,
    ) -> None:
        self.path = None if path is None else os.path.abspath(path)
        self.defaults = defaults
        self.mountinfo = mountinfo
        self._file = ReadOnChange(parse_podlist, MOST_BYTES)
        self._mount_checked: set[str] = set()

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """The file as it is now, mapped onto the devices given."""
        path = self.path or find_podlist(self.defaults)
        self._check_mount(path)
        return map_podlist(self._file.read(path), devices)

    def close(self) -> None:
        """Nothing stays open between readings."""

    def _check_mount(self, path: str) -> None:
        """Warn, once, of a mount that a new file in the old one's place is not seen through."""
        if path in self._mount_checked or not os.path.exists(path):
            return
        self._mount_checked.add(path)
        if is_mount_point(path, self.mountinfo):
            _log.warning(
                "%s is mounted as a single file: should its writer replace it, podgpu would go on reading the old one;"
                " mount the directory it is in",
                path,
            )


def find_podlist(paths: Sequence[str]) -> str:
    """The first path that is there; one that cannot be looked at counts, and reading it will say why."""
    for path in paths:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass
        return path
    raise SourceError(
        "file_missing",
        f"there is no {' and no '.join(paths)}: mount the host's directory in which koordinator's hook keeps"
        " podlist.json, or name the file",
    )


def parse_podlist(content: bytes, path: str = "podlist.json") -> Podlist:
    """Who holds which ids, from the file's bytes. An empty list is nobody; an empty file is no answer."""
    return parse_json(content, path, _podlist)


def _podlist(value: object) -> Podlist:
    entries = as_list(value, "the whole")
    return tuple(held for number, entry in enumerate(entries, 1) for held in _entry(entry, f"entry {number}"))


def map_podlist(podlist: Podlist, devices: Sequence[Device]) -> Allocation:
    """Who holds which of the devices. The file does not say how much of them: koordinator also hands out parts."""
    return map_held(SOURCE, podlist, devices)


def _entry(value: object, where: str) -> Iterator[HeldId]:
    entry = as_object(value, where)
    namespace, name, container = (
        as_text(entry.get(key), f"{where}: {key}") for key in ("namespace", "name", "container")
    )
    if not namespace or not name:
        raise ValueError(f"{where}: namespace or name is empty")
    if "gpu_list" not in entry:
        raise ValueError(f"{where}: there is no gpu_list")
    holder = Workload(namespace, name, container)
    place = f"{where}: an id in gpu_list"
    for id_value in as_list(entry["gpu_list"], f"{where}: gpu_list"):
        text = as_text(id_value, place)
        yield HeldId(holder, SOURCE, text, parse_gpu(text))


def parse_gpu(text: str) -> DeviceId | None:
    """Any device id, or a plain minor number: the form koordinator's hook gives containers their GPUs in."""
    return DeviceId(minor=int(text)) if _MINOR.fullmatch(text) else parse_id(text)


def is_mount_point(path: str, mountinfo: str) -> bool:
    """Whether something is mounted exactly there; no, when that cannot be told."""
    try:
        content = read_bounded(mountinfo, MOST_BYTES)
    except SourceError:
        return False
    return os.fsencode(os.path.realpath(path)) in parse_mount_points(content)


def parse_mount_points(content: bytes) -> frozenset[bytes]:
    """Every mount point in a mountinfo file: the fifth word of each line. Bytes, as paths are."""
    lines = (line.split(b" ") for line in content.split(b"\n"))
    return frozenset(_unescape(words[4]) for words in lines if len(words) > 4)


def _unescape(word: bytes) -> bytes:
    r"""The kernel writes blanks, line ends and backslashes of a path as \ooo."""
    return _OCTAL_ESCAPE.sub(lambda found: bytes((int(found[1], 8),)), word)
