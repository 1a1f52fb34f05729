"""This module owns what `podgpu hook` answers on its optional port: its own metrics and probes. It names no pod."""

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
    """A runtime that is away is no reason to restart us; a thread that ended is."""
    return (True, "OK\n") if hook.is_alive else (False, "a part of the hook has stopped working\n")


def _ready(hook: Hook) -> tuple[bool, str]:
    state = hook.state
    if not state.is_synchronised:
        return False, "the runtime has not listed its containers yet\n"
    if not state.is_up_to_date:
        return False, "podlist.json is not up to date\n"
    return True, "OK\n"
