"""This module owns what somebody on this machine may ask of a running podgpu (POST /-/release, /-/forget), and the
guard of such requests.

A browser on this machine, a sidecar and a proxy all come from a loopback address. The guard tells them from the people
and programs that mean podgpu: they say so in a header that no page can make a browser send to us.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.web.aside import Turns

if TYPE_CHECKING:
    from podgpu.cluster.loop import Cluster

REQUEST_HEADER = "X-Podgpu-Request"
DEFAULT_RELEASE_SECONDS = 60.0
MOST_RELEASE_SECONDS = 3600.0
_THIS_MACHINE = {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")}
"""No other of 127.0.0.0/8: 127.0.0.6 is where a service mesh's sidecar hands on what came from elsewhere."""
_OUR_NAMES = {"localhost", "127.0.0.1", "::1"}
_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "Via")


def refusal(request: web.Request, action: str) -> web.Response | None:
    """Why this request is not from somebody on this machine who means `action`; None when it is."""
    if not is_this_machine(request.remote):
        return _refused("only from this machine (127.0.0.1 or ::1)")
    if any(name in request.headers for name in _OF_PROXIES):
        return _refused("only from this machine, not through a proxy")
    if not _is_ours(request.headers.get("Host", "")):
        return _refused("ask for localhost, 127.0.0.1 or [::1], not for another name")
    if not _is_same_site(request):
        return _refused("not from a web page of another site")
    if request.headers.get(REQUEST_HEADER) != action:
        return _refused(f"send the header {REQUEST_HEADER}: {action}, which says that you mean it")
    return None


def _refusal(request: web.Request, action: str, allowed: bool) -> web.Response | None:
    return refusal(request, action) if allowed else _refused("turned off by --web-enable-lifecycle=false")


def _refused(why: str) -> web.Response:
    return web.Response(status=403, text=f"{why}\n")


def is_this_machine(remote: str | None) -> bool:
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address) in _THIS_MACHINE


def _is_ours(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in _OUR_NAMES
    except ValueError:
        return False


def _is_same_site(request: web.Request) -> bool:
    """Programs send neither header; browsers cannot leave them out."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return False
    origin = request.headers.get("Origin")
    return origin is None or origin == f"{request.scheme}://{request.headers.get('Host', '')}"


def release(agent: Agent, allowed: bool) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Lets go of the driver so that it can be unloaded."""
    turns = Turns(1)

    async def handle(request: web.Request) -> web.Response:
        if (refused := _refusal(request, "release", allowed)) is not None:
            return refused
        asked = request.query.get("seconds", str(DEFAULT_RELEASE_SECONDS))
        try:
            seconds = float(asked)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= MOST_RELEASE_SECONDS:
            limits = f"a number above 0, up to {MOST_RELEASE_SECONDS:.0f}"
            return web.Response(status=400, text=f"seconds={asked!r}: {limits}\n")
        if not await turns.do(agent.release, seconds):
            return web.Response(status=409, text="a call into the driver has not returned: it cannot be let go\n")
        return web.Response(text=f"driver let go for {seconds:g} s\n")

    return handle


Forget = Callable[[str], tuple[int, str]]
"""Given a UUID: the status of the answer, and its words."""
_LONGEST_UUID = 256


def forget(act: Forget, allowed: bool) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Leaves out a GPU that is gone, once an operator has said so."""
    turns = Turns(1)

    async def handle(request: web.Request) -> web.Response:
        if (refused := _refusal(request, "forget", allowed)) is not None:
            return refused
        uuid = request.query.get("gpu", "")
        if not uuid or len(uuid) > _LONGEST_UUID or not uuid.isprintable():
            return web.Response(status=400, text="say which GPU: POST /-/forget?gpu=UUID\n")
        status, words = await turns.do(act, uuid)
        return web.Response(status=status, text=f"{words}\n")

    return handle


def forget_of_node(agent: Agent) -> Forget:
    def act(uuid: str) -> tuple[int, str]:
        forgotten = agent.forget(uuid)
        if forgotten is None:
            return 404, f"there is no GPU {uuid} here, nor was there one"
        if forgotten == "nothing":
            return 409, f"{uuid} is here and has had no XID: there is nothing to forget"
        return 200, f"{uuid} is forgotten" if forgotten == "gpu" else f"the XIDs of {uuid} are forgotten"

    return act


def forget_of_cluster(cluster: Cluster) -> Forget:
    def act(uuid: str) -> tuple[int, str]:
        found = cluster.forget(uuid)
        if found == "unknown":
            return 404, f"no node has a GPU {uuid}, nor had one"
        if found == "here":
            return 409, f"{uuid} is here, and so is its node: there is nothing to forget"
        return 200, f"{uuid} is forgotten here until it is back; its exporter forgets it by POST /-/forget there"

    return act
