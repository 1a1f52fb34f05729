"""Test API server for APIServices, over real HTTP, in the caller's event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig

_APISERVICES = "/apis/apiregistration.k8s.io/v1/apiservices/{name}"


@dataclass
class ApiDouble:
    """Its attributes may be changed while it runs."""

    is_ill: bool = False
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    """APIServices by name."""
    patches: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    changes_after_get: bool = False
    """An APIService is changed by somebody else after each GET."""
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ApiClient]:
        app = web.Application()
        app.router.add_get(_APISERVICES, self._get)
        app.router.add_patch(_APISERVICES, self._patch)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        try:
            async with ApiClient(ApiConfig(self.url, "the test"), deadline=5.0) as client:
                yield client
        finally:
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        if self.is_ill:
            raise web.HTTPInternalServerError(text="etcd is away")
        found = self.services.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text='{"message":"not found"}')
        answer = web.json_response(found)
        if self.changes_after_get:
            found["metadata"]["resourceVersion"] += "0"
        return answer

    async def _patch(self, request: web.Request) -> web.Response:
        """A merge patch; one of an older version is refused."""
        name = request.match_info["name"]
        assert request.content_type == "application/merge-patch+json"
        patch, found = json.loads(await request.read()), self.services[name]
        self.patches.append((name, patch))
        version = patch["metadata"]["resourceVersion"]
        if version != found["metadata"]["resourceVersion"]:
            return web.json_response({"message": "the object has been modified", "code": 409}, status=409)
        found["spec"] |= patch["spec"]
        found["metadata"]["resourceVersion"] = str(int(version) + 1)
        return web.json_response(found)


def api_service(namespace: str = "podgpu", name: str = "podgpu-autoscale", bundle: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = {"service": {"namespace": namespace, "name": name, "port": 443}}
    return {"metadata": {"resourceVersion": "1"}, "spec": {**spec, "caBundle": bundle} if bundle else spec}
