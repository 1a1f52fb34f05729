"""Removes from Kubernetes what the exporters wrote, when podgpu is uninstalled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.kube.objects import KubeObject, read_list, read_map
from podgpu.writers.device_taints import delete_if_present, list_rules, rules_path
from podgpu.writers.node_condition import TYPE, find_condition, patch_condition
from podgpu.writers.pod_events import LABELS, select_labels

_PAGE = "500"
SELECTOR = select_labels(LABELS)


class Withdrawn(NamedTuple):
    """How many objects were cleaned or deleted."""

    nodes: int
    events: int
    rules: int


async def withdraw(client: ApiClient) -> Withdrawn:
    """Removes everything. Raises SourceError at the first object that cannot be removed."""
    return Withdrawn(
        await _remove_conditions(client), await _delete_events(client), await _delete_rules(client)
    )


async def _remove_conditions(client: ApiClient) -> int:
    removed = 0
    async for node in _list(client, "/api/v1/nodes"):
        if find_condition(node):
            path = f"/api/v1/nodes/{node['metadata']['name']}"
            await patch_condition(client, path, {"type": TYPE, "$patch": "delete"})
            removed += 1
    return removed


async def _delete_events(client: ApiClient) -> int:
    deleted = 0
    namespaces = set()
    async for event in _list(client, "/api/v1/events", SELECTOR):
        namespaces.add(event["metadata"]["namespace"])
        deleted += 1

    for namespace in sorted(namespaces):
        path = f"/api/v1/namespaces/{namespace}/events"
        await client.delete(path, {"labelSelector": SELECTOR})

    return deleted


async def _delete_rules(client: ApiClient) -> int:
    try:
        version, rules = await list_rules(client, SELECTOR)
    except SourceError as error:
        if error.reason != "not_found":
            raise
        # This API server has no DeviceTaintRules.
        return 0

    names = [rule["metadata"]["name"] for rule in rules]
    for name in names:
        await delete_if_present(client, f"{rules_path(version)}/{name}")

    return len(names)


async def _list(client: ApiClient, path: str, selector: str = "") -> AsyncIterator[KubeObject]:
    params = {"limit": _PAGE}
    if selector:
        params["labelSelector"] = selector

    while True:
        page = await client.get(path, params)
        for item in read_list(page, "items"):
            yield item
        next_page = read_map(page, "metadata").get("continue")
        if not next_page:
            return
        params["continue"] = next_page
