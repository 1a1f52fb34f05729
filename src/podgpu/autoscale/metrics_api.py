"""This module serves the custom and the external metrics API: discovery, metrics, refusals as the API server's clients
read them.

Who asks and whether they may is the gate's affair; nothing but the probes is answered without asking it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu import __version__
from podgpu.autoscale import api_json
from podgpu.autoscale.api import answer_custom, answer_external
from podgpu.autoscale.api_paths import (
    CUSTOM,
    CUSTOM_VERSIONS,
    EXTERNAL,
    EXTERNAL_VERSION,
    Attributes,
    custom_attributes,
    external_attributes,
    parse_custom,
    parse_external,
)
from podgpu.autoscale.refusal import Refusal
from podgpu.autoscale.scene import Store

_PROBES = ("/healthz", "/livez", "/readyz")


class Rejection(NamedTuple):
    """Why a request is not answered."""

    code: int
    reason: str
    """The API server's word for it: Unauthorized, Forbidden."""
    message: str


class Gate(Protocol):
    """Knows who asks and whether they may."""

    async def admit(self, request: web.Request, asked: Attributes | None) -> Rejection | None:
        """`asked`: None where it is about the path alone (discovery). None: let it through."""


class MetricsApi:
    def __init__(self, store: Store, gate: Gate, *, external: bool = False) -> None:
        self._store = store
        self._gate = gate
        self._external = external
        self.calls: Counter[tuple[str, str]] = Counter()
        """(API group, status) -> how often."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024, middlewares=[self._refuse_in_json])
        for probe in _PROBES:
            app.router.add_get(probe, _ok)
        app.router.add_get("/version", self._guarded(lambda: {"gitVersion": f"v{__version__}"}))
        app.router.add_get("/apis", self._groups)
        app.router.add_get("/openapi/v2", self._guarded(lambda: api_json.openapi_v2(__version__)))
        app.router.add_get("/openapi/v3", self._guarded(lambda: {"paths": {}}))
        for version in CUSTOM_VERSIONS:
            app.router.add_get(f"/apis/{CUSTOM}/{version}", self._guarded(_custom_resources(version)))
            app.router.add_get(f"/apis/{CUSTOM}/{version}/{{path:.+}}", self._custom(version))
        app.router.add_get(f"/apis/{CUSTOM}", self._guarded(lambda: api_json.group(CUSTOM)))
        if self._external:
            base = f"/apis/{EXTERNAL}/{EXTERNAL_VERSION}"
            app.router.add_get(base, self._guarded(api_json.external_resources))
            app.router.add_get(f"{base}/{{path:.+}}", self._external_metric)
            app.router.add_get(f"/apis/{EXTERNAL}", self._guarded(lambda: api_json.group(EXTERNAL)))
        return app

    # What is answered

    def _guarded(self, make: Callable[[], api_json.Object]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            rejection = await self._gate.admit(request, None)
            return _rejected(rejection) if rejection is not None else _json(make())

        return handle

    async def _groups(self, request: web.Request) -> web.StreamResponse:
        rejection = await self._gate.admit(request, None)
        if rejection is not None:
            return _rejected(rejection)
        if _wants_aggregated(",".join(request.headers.getall("Accept", ()))):
            body = json.dumps(api_json.aggregated_discovery(self._external), separators=(",", ":"))
            return web.Response(body=body.encode(), headers={"Content-Type": api_json.AGGREGATED_TYPE})
        return _json(api_json.group_list(self._external))

    def _custom(self, version: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            asked = custom_attributes(version, request.match_info["path"])
            rejection = await self._gate.admit(request, asked)
            if rejection is not None:
                return self._counted(CUSTOM, _rejected(rejection))
            question = parse_custom(asked, request.query, self._store.longest_window)
            return self._counted(CUSTOM, _json(answer_custom(self._store.scene(), version, question)))

        return handle

    async def _external_metric(self, request: web.Request) -> web.StreamResponse:
        asked = external_attributes(request.match_info["path"], request.query)
        rejection = await self._gate.admit(request, asked)
        if rejection is not None:
            return self._counted(EXTERNAL, _rejected(rejection))
        question = parse_external(asked, request.query, self._store.longest_window)
        return self._counted(EXTERNAL, _json(answer_external(self._store.scene(), question)))

    def _counted(self, group: str, response: web.Response) -> web.Response:
        self.calls[group, str(response.status)] += 1
        return response

    @web.middleware
    async def _refuse_in_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as error:
            code = api_json.STATUS_OF[error.kind]
            group = EXTERNAL if request.path.startswith(f"/apis/{EXTERNAL}/") else CUSTOM
            return self._counted(group, _json(api_json.status(code, error.kind.value, str(error)), code))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            words = {404: "NotFound", 405: "MethodNotAllowed"}
            message = "there is nothing at this path: see /apis" if error.status == 404 else f"{error.reason}"
            return _json(api_json.status(error.status, words.get(error.status, "BadRequest"), message), error.status)


def _wants_aggregated(accept: str) -> bool:
    wanted = set(api_json.AGGREGATED_TYPE.split(";"))
    return any(wanted <= {part.strip() for part in kind.split(";")} for kind in accept.split(","))


def _custom_resources(version: str) -> Callable[[], api_json.Object]:
    return lambda: api_json.custom_resources(version)


async def _ok(_request: web.Request) -> web.Response:
    """I can answer; whether there are figures is each metric's answer."""
    return web.Response(text="ok")


def _rejected(rejection: Rejection) -> web.Response:
    return _json(api_json.status(rejection.code, rejection.reason, rejection.message), rejection.code)


def _json(body: api_json.Object | bytes, code: int = 200) -> web.Response:
    written = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return web.Response(body=written, status=code, content_type="application/json")
