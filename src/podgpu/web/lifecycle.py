"""POST /-/release and /-/forget, for operators on this machine.

Browsers, sidecars and proxies on this machine also connect from a loopback address. Web pages of other sites cannot
make a browser send the header X-Podgpu-Request.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web

from podgpu.agent.loop import Agent

if TYPE_CHECKING:
    from podgpu.cluster.loop import Cluster

REQUEST_HEADER = "X-Podgpu-Request"
DEFAULT_RELEASE_SECONDS = 60.0
_MAX_RELEASE_SECONDS = 3600.0
_MAX_UUID_LENGTH = 256
_LOOPBACK = {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")}
"""Sidecars of service meshes forward requests from 127.0.0.6."""
Forget = Callable[[str], tuple[int, str]]
"""Forgets the GPU with this UUID. Returns the status and text of the response."""


def explain_refusal(request: web.Request, action: str) -> str:
    """Why the request is not from an operator on this machine who wants `action`; empty if it is."""
    if not is_loopback(request.remote):
        return "only from this machine (127.0.0.1 or ::1)"
    if any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "Via")):
        return "only from this machine, not through a proxy"
    if not _is_own_name(request.headers.get("Host", "")):
        return "use localhost, 127.0.0.1 or [::1], not another name"
    if request.headers.get(REQUEST_HEADER) != action:
        return f"send the header {REQUEST_HEADER}: {action}, to confirm that this is intended"
    return ""


def is_loopback(remote: str | None) -> bool:
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address) in _LOOPBACK


def _is_own_name(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in {"localhost", "127.0.0.1", "::1"}
    except ValueError:
        return False


def _operator_route(
    path: str, action: str, allowed: bool, handle: Callable[[web.Request], tuple[int, str]]
) -> web.RouteDef:
    """Runs `handle` in a thread, one request at a time: a hanging driver must not use up the threads."""
    lock = asyncio.Lock()

    async def check_and_handle(request: web.Request) -> web.Response:
        why = explain_refusal(request, action) if allowed else "turned off by --web-enable-lifecycle=false"
        if why:
            return web.Response(status=403, text=f"{why}\n")
        async with lock:
            status, text = await asyncio.to_thread(handle, request)
        return web.Response(status=status, text=f"{text}\n")

    return web.post(path, check_and_handle)


def release_route(agent: Agent, allowed: bool) -> web.RouteDef:
    """Closes the driver for some time, so that it can be unloaded."""

    def release(request: web.Request) -> tuple[int, str]:
        text = request.query.get("seconds", str(DEFAULT_RELEASE_SECONDS))
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= _MAX_RELEASE_SECONDS:
            return 400, f"seconds={text!r}: a number above 0, up to {_MAX_RELEASE_SECONDS:.0f}"
        if not agent.release(seconds):
            return 409, "a call into the driver has not returned: it cannot be released"
        return 200, f"driver released for {seconds:g} s"

    return _operator_route("/-/release", "release", allowed, release)


def forget_route(forget: Forget, allowed: bool) -> web.RouteDef:
    """Removes a GPU that is gone from the expected ones."""

    def handle(request: web.Request) -> tuple[int, str]:
        uuid = request.query.get("gpu", "")
        if not uuid or len(uuid) > _MAX_UUID_LENGTH or not uuid.isprintable():
            return 400, "name the GPU: POST /-/forget?gpu=UUID"
        return forget(uuid)

    return _operator_route("/-/forget", "forget", allowed, handle)


def forget_on_node(agent: Agent) -> Forget:
    def forget(uuid: str) -> tuple[int, str]:
        forgotten = agent.forget(uuid)
        if forgotten is None:
            return 404, f"there is no GPU {uuid} here, nor was there one"
        if forgotten == "nothing":
            return 409, f"{uuid} is here and has had no XID: there is nothing to forget"
        return 200, f"{uuid} is forgotten" if forgotten == "gpu" else f"the XIDs of {uuid} are forgotten"

    return forget


def forget_in_cluster(cluster: Cluster) -> Forget:
    def forget(uuid: str) -> tuple[int, str]:
        presence = cluster.forget(uuid)
        if presence == "unknown":
            return 404, f"no node has a GPU {uuid}, nor had one"
        if presence == "present":
            return 409, f"{uuid} is here, and so is its node: there is nothing to forget"
        return 200, f"{uuid} is forgotten here until it is back; its exporter forgets it by POST /-/forget there"

    return forget
