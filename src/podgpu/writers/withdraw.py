"""Removes from Kubernetes what the exporters wrote, when podgpu is uninstalled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from podgpu.clock import Clock, double_delay, spread_delay
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.kube.objects import KubeObject, read_list, read_map
from podgpu.writers.device_taints import delete_if_present, list_rules, rules_path
from podgpu.writers.node_condition import TYPE, find_condition, patch_condition
from podgpu.writers.pod_events import LABELS, select_labels

_log = logging.getLogger(__name__)
_PAGE = "500"
_FIRST_DELAY = 1.0
_MAX_DELAY = 30.0
RETRY_SECONDS = 120.0
"""How long a request is repeated. The job of the chart may last 300 s."""
SELECTOR = select_labels(LABELS)
T = TypeVar("T")


class Withdrawn(NamedTuple):
    """How many objects were cleaned or deleted."""

    nodes: int
    events: int
    rules: int


class Withdrawal:
    """Removes everything, in one event loop."""

    def __init__(
        self,
        client: ApiClient,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._clock = clock or Clock()
        self._sleep = sleep

    async def run(self) -> Withdrawn:
        """Raises SourceError at the first object that cannot be removed."""
        nodes = await self._remove_conditions()
        events = await self._delete_events()
        rules = await self._delete_rules()
        return Withdrawn(nodes, events, rules)

    async def _remove_conditions(self) -> int:
        removed = 0
        async for node in self._list("/api/v1/nodes"):
            if find_condition(node):
                path = f"/api/v1/nodes/{node['metadata']['name']}"
                change = {"type": TYPE, "$patch": "delete"}
                await self._retry(partial(patch_condition, self._client, path, change))
                removed += 1
        return removed

    async def _delete_events(self) -> int:
        deleted = 0
        namespaces = set()
        async for event in self._list("/api/v1/events", SELECTOR):
            namespaces.add(event["metadata"]["namespace"])
            deleted += 1

        for namespace in sorted(namespaces):
            path = f"/api/v1/namespaces/{namespace}/events"
            selection = {"labelSelector": SELECTOR}
            await self._retry(partial(self._client.delete, path, selection))

        return deleted

    async def _delete_rules(self) -> int:
        try:
            version, rules = await self._retry(partial(list_rules, self._client, SELECTOR))
        except SourceError as error:
            if error.reason != "not_found":
                raise
            # This API server has no DeviceTaintRules.
            return 0

        names = [rule["metadata"]["name"] for rule in rules]
        for name in names:
            path = f"{rules_path(version)}/{name}"
            await self._retry(partial(delete_if_present, self._client, path))

        return len(names)

    async def _list(self, path: str, selector: str = "") -> AsyncIterator[KubeObject]:
        params = {"limit": _PAGE}
        if selector:
            params["labelSelector"] = selector

        while True:
            page = await self._retry(partial(self._client.get, path, params))
            for item in read_list(page, "items"):
                yield item
            next_page = read_map(page, "metadata").get("continue")
            if not next_page:
                return
            params["continue"] = next_page

    async def _retry(self, send: Callable[[], Awaitable[T]]) -> T:
        """Repeats a request while the API server is too busy or fails (429, 5xx)."""
        give_up_at = self._clock.monotonic() + RETRY_SECONDS
        failures = 0
        while True:
            try:
                return await send()
            except SourceError as error:
                if error.reason != "server_error":
                    raise

                longest = double_delay(failures, _FIRST_DELAY, _MAX_DELAY)
                wait = max(spread_delay(longest), error.retry_after)
                if self._clock.monotonic() + wait > give_up_at:
                    raise
                _log.warning("%s; podgpu retries in %.0f s", error, wait)

            failures += 1
            await self._sleep(wait)
