"""Serves the hook's own metrics and probes on its optional port."""

from __future__ import annotations

from aiohttp import web

from podgpu.hook.loop import Hook
from podgpu.metrics.encode import Exposition, encode
from podgpu.web.app import make_application
from podgpu.web.responses import Handler, metrics_response, probe_routes


def hook_application(hook: Hook) -> web.Application:
    return make_application(
        [
            web.get("/metrics", _metrics(hook)),
            *probe_routes(lambda: _live(hook), lambda: _ready(hook)),
        ],
        None,
    )


def _metrics(hook: Hook) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return await metrics_response(request, Exposition.of(encode(hook.families())))

    return handle


def _live(hook: Hook) -> tuple[bool, str]:
    """A missing runtime is no reason for a restart; an ended thread is."""
    return (True, "OK\n") if hook.is_alive else (False, "a thread of the hook has ended\n")


def _ready(hook: Hook) -> tuple[bool, str]:
    state = hook.state
    if not state.is_synchronised:
        return False, "the runtime has not reported its containers yet\n"
    if not state.is_up_to_date:
        return False, "podlist.json is not up to date\n"
    return True, "OK\n"
