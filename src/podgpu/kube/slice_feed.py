"""This node's ResourceSlices, watched in whichever version of the API the server has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from podgpu.errors import SourceError
from podgpu.kube.access import ApiConfig
from podgpu.kube.client import ApiClient
from podgpu.kube.resource_slices import GROUP_PATH, PoolSlice, choose_version, parse_slice, slices_params, slices_path
from podgpu.kube.watch import Watcher

_NEWEST = "v1"
_ASK_AGAIN_SECONDS = 60.0
_DEADLINE = 5.0


class SliceFeed:
    """A Watcher's items; the version is asked for again while the server answers that it does not have it."""

    def __init__(self, config: ApiConfig, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._node = node
        self._clock = clock
        self._asked_at = clock()
        self._watcher = self._watch()

    def items(self) -> tuple[PoolSlice, ...]:
        error = self._watcher.error
        now = self._clock()
        if error is not None and error.reason == "not_found" and now - self._asked_at >= _ASK_AGAIN_SECONDS:
            self._asked_at = now
            self._watcher.close()
            self._watcher = self._watch()
        return self._watcher.items()

    @property
    def synced(self) -> bool:
        return self._watcher.synced

    @property
    def error(self) -> SourceError | None:
        return self._watcher.error

    @property
    def failures(self) -> Mapping[str, int]:
        return self._watcher.failures

    def close(self) -> None:
        self._watcher.close()

    def _watch(self) -> Watcher[PoolSlice]:
        path = slices_path(asyncio.run(self._version()))
        return Watcher(self._config, path, slices_params(self._node), parse_slice)

    async def _version(self) -> str:
        """A server that is away at the start is taken to be new."""
        async with ApiClient(self._config, deadline=_DEADLINE) as client:
            try:
                return choose_version(await client.get(GROUP_PATH)) or _NEWEST
            except SourceError:
                return _NEWEST
