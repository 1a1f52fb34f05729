"""Serves the hook's own metrics and probes on its optional port."""

from __future__ import annotations

from aiohttp import web

from podgpu.hook.loop import Hook
from podgpu.metrics.encode import Body, encode
from podgpu.web.app import make_application
from podgpu.web.responses import metrics_response, probe_routes


def hook_application(hook: Hook) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        return metrics_response(request, Body(encode(hook.families())))

    def ready() -> tuple[bool, str]:
        if not hook.is_synchronised:
            return False, "the runtime has not reported its containers yet\n"
        return (True, "OK\n") if hook.is_up_to_date else (False, "podlist.json is not up to date\n")

    return make_application([web.get("/metrics", metrics), *probe_routes(lambda: (True, "OK\n"), ready)], None)
