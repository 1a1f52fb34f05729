"""POST /-/release and /-/forget, which only operators on this machine may use.

Checking for a loopback address is not sufficient, because local browsers, sidecars and proxies also
use loopback. Requests must also have the header X-Podgpu-Request. Browsers do not let pages of
other sites send this header.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.node.agent.agent import Agent

if TYPE_CHECKING:
    from podgpu.fleet.round import Cluster

REQUEST_HEADER = "X-Podgpu-Request"
DEFAULT_RELEASE_SECONDS = 60.0
_MAX_RELEASE_SECONDS = 3600.0
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
"""Allowed clients. Excludes 127.0.0.6, from which service mesh sidecars forward remote requests."""
Forget = Callable[[str], tuple[int, str]]
"""Removes the GPU with this UUID. Returns status code and text of the response."""


def explain_refusal(request: web.Request, action: str) -> str:
    """Returns why the request is rejected, or an empty string if it is allowed.

    It must come from this machine, without a proxy, and its header must confirm `action`.
    """
    is_proxied = any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "Via"))
    if request.remote not in _LOOPBACK or is_proxied:
        return "allowed only from this machine (127.0.0.1 or ::1), not through a proxy"
    if not re.fullmatch(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", request.host):
        return "the host name in the URL must be localhost, 127.0.0.1 or [::1]"
    if request.headers.get(REQUEST_HEADER) != action:
        return f"send the header {REQUEST_HEADER}: {action} to confirm that this is intended"

    return ""


def _operator_route(
    path: str, action: str, allowed: bool, handle: Callable[[web.Request], tuple[int, str]]
) -> web.RouteDef:
    """Handles requests in a thread, one at a time: a hanging driver blocks at most one thread."""
    lock = asyncio.Lock()

    async def check_and_handle(request: web.Request) -> web.Response:
        why = "disabled by --web-enable-lifecycle=false"
        if allowed:
            why = explain_refusal(request, action)
        if why:
            return web.Response(status=403, text=f"{why}\n")

        async with lock:
            status, text = await asyncio.to_thread(handle, request)

        return web.Response(status=status, text=f"{text}\n")

    return web.post(path, check_and_handle)


def release_route(agent: Agent, allowed: bool) -> web.RouteDef:
    """POST /-/release: closes the driver for some time, so that it can be unloaded."""

    def release(request: web.Request) -> tuple[int, str]:
        text = request.query.get("seconds", str(DEFAULT_RELEASE_SECONDS))
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0

        if not 0 < seconds <= _MAX_RELEASE_SECONDS:
            highest = f"{_MAX_RELEASE_SECONDS:.0f}"
            return 400, f"seconds={text!r}: must be a number above 0, at most {highest}"
        if not agent.release(seconds):
            return 409, "the driver cannot be released, because a call into it has not returned"

        return 200, f"driver released for {seconds:g} s"

    return _operator_route("/-/release", "release", allowed, release)


def forget_route(forget: Forget, allowed: bool) -> web.RouteDef:
    """POST /-/forget: removes a lost GPU, or clears the XIDs of a present one."""

    def handle(request: web.Request) -> tuple[int, str]:
        uuid = request.query.get("gpu", "")
        if not uuid or not uuid.isprintable():
            return 400, "name the GPU: POST /-/forget?gpu=UUID"
        return forget(uuid)

    return _operator_route("/-/forget", "forget", allowed, handle)


def forget_on_node(agent: Agent, uuid: str) -> tuple[int, str]:
    removed = agent.forget(uuid)
    if removed is None:
        return 404, f"this node has no GPU {uuid} and has never had one"
    if removed == "nothing":
        return 409, f"{uuid} is present and has no XIDs: nothing to remove"
    if removed == "gpu":
        return 200, f"removed {uuid}"

    return 200, f"removed the XIDs of {uuid}"


def forget_in_cluster(cluster: Cluster, uuid: str) -> tuple[int, str]:
    result = cluster.forget(uuid)
    if result == "unknown":
        return 404, f"no node has a GPU {uuid} or has ever had one"
    if result == "present":
        return 409, f"{uuid} and its node are both present: nothing to remove"

    return 200, (
        f"{uuid} is removed from this page until it reappears. "
        "To remove it from its exporter, run `podgpu forget` on its node."
    )
