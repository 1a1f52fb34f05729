"""A simulated API server: get, list and watch over real HTTP on 127.0.0.1, with faults on request.

Tests may change its objects from any thread. Like kube-apiserver 1.35, it has no old versions after
a restart. A watch from an old version gets an ERROR event.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from aiohttp import ClientSession, web

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Resource, namespace, name."""
KINDS = {
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "nodes": "Node",
    "services": "Service",
    "endpointslices": "EndpointSlice",
    "resourceslices": "ResourceSlice",
    "resourceclaims": "ResourceClaim",
    "deviceclasses": "DeviceClass",
    "events": "Event",
    "devicetaintrules": "DeviceTaintRule",
    "workloads": "Workload",
    "clusterqueues": "ClusterQueue",
    "localqueues": "LocalQueue",
}
_OF_DRA = ("resourceslices", "resourceclaims", "deviceclasses", "devicetaintrules")
_PATH = re.compile(
    r"/(?:api/v1|apis/discovery\.k8s\.io/v1|apis/kueue\.x-k8s\.io/v1beta1|apis/resource\.k8s\.io/(?P<version>v1|v1beta2|v1beta1|v1alpha3))"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/status)?"
)
_PROXY = re.compile(
    r"/api/v1/namespaces/(?P<namespace>[^/]+)/services/(?P<segment>[^/]+)/proxy/(?P<rest>.*)"
)
_FIELDS = ("metadata.name", "metadata.namespace", "spec.nodeName", "spec.driver", "status.phase")


# Objects


class Change(NamedTuple):
    version: int
    key: Key
    before: Object | None
    after: Object | None


@dataclass(frozen=True, slots=True)
class Selection:
    """A parsed path and its selectors."""

    version: str
    resource: str
    namespace: str
    name: str
    fields: tuple[tuple[str, str], ...]
    labels: tuple[tuple[str, str], ...]  # key, and allowed values separated by commas
    metadata_only: bool = False  # the client accepts objects without spec and status

    def convert(self, item: Object) -> Object:
        if self.metadata_only:
            return {"kind": "PartialObjectMetadata", "metadata": item["metadata"]}
        return _in_version(item, self.version)

    def takes(self, resource: str, item: Object | None) -> bool:
        if item is None or resource != self.resource:
            return False
        metadata = item["metadata"]
        if self.namespace and metadata.get("namespace") != self.namespace:
            return False
        labels = metadata.get("labels") or {}
        return all(labels.get(name) in values.split(",") for name, values in self.labels) and all(
            _has_value(item, path, value) for path, value in self.fields
        )

    def events(self, change: Change) -> Iterable[bytes]:
        """Yields ADDED if an object enters the selection, DELETED if it leaves, and otherwise
        MODIFIED.
        """
        was, stays = (self.takes(change.key[0], item) for item in (change.before, change.after))
        if stays and change.after is not None:
            yield _event("MODIFIED" if was else "ADDED", self.convert(change.after))
        elif was and change.before is not None:
            metadata = change.before["metadata"] | {"resourceVersion": str(change.version)}
            yield _event("DELETED", self.convert(change.before | {"metadata": metadata}))


def _parse_selection(
    path: str, query: Mapping[str, str], versions: Iterable[str]
) -> Selection | None:
    """Returns None for unknown paths. Raises ValueError for unknown selectors."""
    match = _PATH.fullmatch(path)
    if match is None or match["resource"] not in KINDS:
        return None
    version, resource = match["version"] or "", match["resource"]
    if bool(version) != (resource in _OF_DRA) or (version and version not in versions):
        return None
    fields = tuple(_parse_terms(query.get("fieldSelector", "")))
    if any(path.removesuffix("!") not in _FIELDS for path, _ in fields):
        raise ValueError(f"field label not supported: {fields}")
    labels = tuple(_parse_terms(query.get("labelSelector", "")))
    return Selection(
        version, resource, match["namespace"] or "", match["name"] or "", fields, labels
    )


def _parse_terms(selector: str) -> Iterable[tuple[str, str]]:
    for term in filter(None, re.split(r",(?![^(]*\))", selector)):
        match = re.fullmatch(r"([^=()! ]+!?)(?:==?([^=()! ]*)| in \(([^()! ]*)\))", term)
        if match is None:
            raise ValueError(f"unable to parse requirement: {term!r}")
        yield match[1], match[2] if match[3] is None else match[3]


def _has_value(item: Object, path: str, value: str) -> bool:
    """A path that ends with `!` must not have the value."""
    is_equal = _read_field(item, path.removesuffix("!")) == value
    return is_equal != path.endswith("!")


def _read_field(item: Object, path: str) -> str:
    value: Any = item
    for word in path.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def _event(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _in_version(item: Object, version: str) -> Object:
    """Converts a slice from v1 to another version. Up to v1beta1, `basic` contains the attributes
    of a device.
    """
    devices = item.get("spec", {}).get("devices") or []
    if version not in ("v1beta1", "v1alpha3") or not isinstance(
        devices, list
    ):  # `devices` of a claim is not a list
        return item
    old = [
        {"name": each["name"], "basic": {k: v for k, v in each.items() if k != "name"}}
        for each in devices
    ]
    return item | {"spec": item["spec"] | {"devices": old}}


def _status_object(code: int, message: str) -> Object:
    reasons = {
        401: "Unauthorized",
        403: "Forbidden",
        404: "NotFound",
        409: "AlreadyExists",
        410: "Expired",
        429: "TooManyRequests",
    }
    reason = reasons.get(code, "InternalError")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "message": message,
        "reason": reason,
        "code": code,
    }


# Patches


def _merge(before: Object, changes: Object, strategic: bool) -> Object:
    """Applies a merge patch. With `strategic`, conditions are merged by type."""
    after = dict(before)
    for key, value in changes.items():
        if value is None:
            after.pop(key, None)
        elif isinstance(value, dict):
            known = after.get(key)
            after[key] = _merge(known if isinstance(known, dict) else {}, value, strategic)
        elif strategic and key == "conditions":
            after[key] = _merge_conditions(after.get(key) or [], value)
        else:
            after[key] = value
    return after


def _merge_conditions(before: list[Object], changes: list[Object]) -> list[Object]:
    by_type = {each["type"]: each for each in before}
    for change in changes:
        if change.get("$patch") == "delete":
            by_type.pop(change["type"], None)
        else:
            by_type[change["type"]] = by_type.get(change["type"], {}) | change
    return list(by_type.values())


# The server


class WriteRequest(NamedTuple):
    method: str
    path: str
    document: Object


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str] = field(repr=False)
    port: int  # the client's port, which identifies the connection

    @property
    def watches(self) -> bool:
        return self.query.get("watch") == "true"

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")


@dataclass(eq=False, slots=True)
class _Watch:
    selection: Selection
    queue: asyncio.Queue[bytes | None]  # None ends the response
    request: web.Request

    def cut(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


class SimulatedApiServer:
    """Tests may change all attributes while the server runs."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tokens: frozenset[str] | None = None  # valid tokens; None if no token is needed
        self.resource_api_versions: tuple[str, ...] = (
            "v1",
            "v1beta1",
        )  # empty if resource.k8s.io does not exist
        self.has_kueue = False
        self.refusal: tuple[int, str] | None = None  # status and message of every response
        self.refuse_watches_only = False
        # Of the next requests: status and header Retry-After, or None for the usual answer.
        self.failures: list[tuple[int, str] | None] = []
        self.forbidden_paths: frozenset[str] = frozenset()
        self.missing_paths: frozenset[str] = frozenset()
        # Services that the proxy reaches: "NAMESPACE/SEGMENT" -> URL of the server behind it
        self.proxied: Mapping[str, str] = {}
        self.may_proxy = True
        self.unproxied_namespaces: frozenset[str] = frozenset()  # where the user may not
        self.raw_answer: bytes | None = None  # sent with status 200 instead of any list
        self.raw_headers: Mapping[str, str] = {"Content-Type": "application/json"}
        self.raw_endless = False  # repeats `raw_answer` until the client closes the connection
        self.forget_pages = 0  # number of requests for a next page to answer with 410
        self.gone_as_event = (
            True  # ERROR event instead of status 410 for a watch from an old version
        )
        self.ignores_timeout = False  # a watch lasts longer than its timeoutSeconds
        self.holds_back = False  # sends no events, like a proxy that buffers them
        self.requests: list[Request] = []
        self.writes: list[WriteRequest] = []  # those that were accepted
        self.write_failures: list[int] = []  # statuses of the next answers to writes
        self.users: Mapping[str, Object] = {}  # token -> user, for TokenReview
        # users or groups, with what they may do: a namespace, "*", or "VERB PATH"
        self.grants: Mapping[str, frozenset[str]] = {}
        # what the client itself may do, such as `patch nodes/status`, for SelfSubjectAccessReview
        self.own_grants: frozenset[str] = frozenset()
        self.review_status: Object = {}  # replaces parts of the status of each review
        self.reviews: list[Object] = []  # the specs of all reviews
        self.version = 100
        self._oldest = 0
        self._objects: dict[Key, Object] = {}
        self._history: list[Change] = []
        self._tls = tls
        self._port = 0
        self._watches: set[_Watch] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()
        self._answering = asyncio.Event()
        self._answering.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def open_watches(self) -> int:
        return len(self._watches)

    def start(self) -> None:
        """Starts the server. A restart uses the same port and removes old versions."""
        if self._port:
            self.version += 1
            self.compact()
        ready = threading.Event()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)), name="simulated-api-server"
        )
        self._thread.start()
        assert ready.wait(30), "another process uses the port"

    def stop(self) -> None:
        """Stops the server and closes open connections."""
        if self._loop is None or self._thread is None:
            return
        self._do(self._stopping.set)
        self._thread.join()
        self._loop = self._thread = None

    def put(self, resource: str, *objects: Object) -> None:
        """Adds or replaces objects. Sets uid and resourceVersion."""

        def change_all() -> None:
            for item in objects:
                self._change(
                    (resource, item["metadata"].get("namespace", ""), item["metadata"]["name"]),
                    item,
                )

        self._do(change_all)

    def remove(self, resource: str, name: str, namespace: str = "") -> None:
        self._do(lambda: self._change((resource, namespace, name), None))

    def send(self, raw: bytes | None) -> None:
        """Sends these bytes on every open watch."""
        self._each(lambda watch: watch.queue.put_nowait(raw))

    def end_watches(self) -> None:
        """Ends every watch, as if timeoutSeconds had passed."""
        self.send(None)

    def cut_watches(self) -> None:
        self._each(_Watch.cut)

    def compact(self) -> None:
        """Removes old versions. A watch from an old version then gets 410."""

        def compact() -> None:
            self._oldest = self.version
            self._history.clear()

        self._do(compact)

    def hang(self) -> None:
        """Accepts requests, but sends no answers until `resume`."""
        self._do(self._answering.clear)

    def resume(self) -> None:
        self._do(self._answering.set)

    def _do(self, act: Callable[[], object]) -> None:
        """Runs a function in the server's thread."""
        if self._loop is None:
            act()
            return

        async def run() -> None:
            act()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _each(self, act: Callable[[_Watch], None]) -> None:
        self._do(lambda: [act(watch) for watch in self._watches])

    async def _serve(self, ready: threading.Event) -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._handle)
        application.router.add_post("/apis/authorization.k8s.io/v1/{reviews}", self._review)
        application.router.add_post("/apis/authentication.k8s.io/v1/{reviews}", self._review)
        for method in ("POST", "PATCH", "DELETE"):
            application.router.add_route(method, "/{path:.*}", self._write_object)
        runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=0.05, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port, ssl_context=self._tls).start()
        self._port = runner.addresses[0][1]
        self._loop = asyncio.get_running_loop()
        ready.set()
        await self._stopping.wait()
        for watch in self._watches:
            watch.cut()
        await runner.cleanup()

    def _change(self, key: Key, after: Object | None) -> None:
        self.version += 1
        before = self._objects.pop(key, None)
        if after is not None:
            after = copy.deepcopy(after)
            uid = before["metadata"]["uid"] if before else f"uid-{key[2]}-{self.version}"
            after["metadata"] = (
                {"uid": uid} | after["metadata"] | {"resourceVersion": str(self.version)}
            )
            self._objects[key] = after
        change = Change(self.version, key, before, after)
        self._history.append(change)
        for watch in () if self.holds_back else self._watches:
            for line in watch.selection.events(change):
                watch.queue.put_nowait(line)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        port = (
            request.transport.get_extra_info("peername")[1] if request.transport is not None else 0
        )
        noted = Request(request.path, dict(request.query), dict(request.headers), port)
        self.requests.append(noted)
        await self._answering.wait()
        if self.tokens is not None and noted.token not in self.tokens:
            return _status(401, "Unauthorized")
        if self.refusal is not None and (noted.watches or not self.refuse_watches_only):
            return _status(*self.refusal)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            return _fail(*failure)
        if request.path in self.forbidden_paths:
            return _status(403, f'forbidden: cannot get path "{request.path}"')
        proxied = _PROXY.fullmatch(request.path)
        if proxied is not None:
            return await self._proxy(request, proxied)
        if request.path == "/apis/resource.k8s.io" and self.resource_api_versions:
            versions = [{"version": version} for version in self.resource_api_versions]
            return web.json_response(
                {"kind": "APIGroup", "name": "resource.k8s.io", "versions": versions}
            )
        if request.path == "/apis/kueue.x-k8s.io" and self.has_kueue:
            return web.json_response({"kind": "APIGroup", "versions": [{"version": "v1beta1"}]})
        if request.path in self.missing_paths:
            return _status(404, "the server could not find the requested resource")
        try:
            selection = _parse_selection(request.path, request.query, self.resource_api_versions)
        except ValueError as error:
            return _status(400, str(error))
        if selection is None:
            return _status(404, "the server could not find the requested resource")
        accept = request.headers.get("Accept", "")
        selection = replace(selection, metadata_only="as=PartialObjectMetadata" in accept)
        if selection.name:
            item = self._objects.get((selection.resource, selection.namespace, selection.name))
            if item is None:
                return _status(404, f'{selection.resource} "{selection.name}" not found')
            return web.json_response(selection.convert(item))
        return await (self._watch if noted.watches else self._list)(request, selection)

    async def _write_object(self, request: web.Request) -> web.StreamResponse:
        """Creates, patches or deletes an object, or deletes all objects of a selection."""
        noted = Request(request.path, dict(request.query), dict(request.headers), 0)
        self.requests.append(noted)
        await self._answering.wait()
        if self.tokens is not None and noted.token not in self.tokens:
            return _status(401, "Unauthorized")
        if self.refusal is not None:
            return _status(*self.refusal)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            return _fail(*failure)
        if self.write_failures:
            return _status(self.write_failures.pop(0), "the test lets this write fail")
        if request.path in self.forbidden_paths:
            return _status(403, f'forbidden: cannot write path "{request.path}"')
        selection = _parse_selection(request.path, request.query, self.resource_api_versions)
        if selection is None:
            return _status(404, "the server could not find the requested resource")
        document = json.loads(await request.text() or "{}")
        name = selection.name or document.get("metadata", {}).get("name", "")
        key = selection.resource, selection.namespace, name
        before = self._objects.get(key)
        if request.method == "DELETE" and not selection.name:
            chosen = [
                each for each, item in self._objects.items() if selection.takes(each[0], item)
            ]
            for each in chosen:
                self._change(each, None)
        elif request.method == "POST":
            if before is not None:
                return _status(409, f'{selection.resource} "{name}" already exists')
            self._change(key, document)
        elif before is None:
            return _status(404, f'{selection.resource} "{name}" not found')
        elif request.method == "PATCH":
            strategic = "strategic" in request.headers["Content-Type"]
            self._change(key, _merge(before, document, strategic))
        else:
            self._change(key, None)
        self.writes.append(WriteRequest(request.method, request.path, document))
        status = 201 if request.method == "POST" else 200
        return web.json_response(self._objects.get(key) or _status_object(200, ""), status=status)

    def objects(self, resource: str) -> list[Object]:
        return [item for key, item in sorted(self._objects.items()) if key[0] == resource]

    async def _proxy(self, request: web.Request, place: re.Match[str]) -> web.StreamResponse:
        """Passes a request on as the service proxy does, without credentials."""
        namespace, segment = place["namespace"], place["segment"]
        name = segment.split(":")[-2] if ":" in segment else segment
        if not self.may_proxy or namespace in self.unproxied_namespaces:
            user = 'User "ann" cannot get resource "services/proxy" in API group ""'
            text = f'services "{segment}" is forbidden: {user} in the namespace "{namespace}"'
            return _status(403, text)
        key = f"{namespace}/{segment}"
        if key not in self.proxied:
            return _status(404, f'services "{name}" not found')
        if not self.proxied[key]:
            return _status(503, f'no endpoints available for service "{name}"')
        headers = {key: request.headers[key] for key in ("Accept", "Accept-Encoding")}
        url = f"{self.proxied[key]}/{place['rest']}"
        async with (
            ClientSession(auto_decompress=False) as session,
            session.get(url, params=request.query, headers=headers) as answer,
        ):
            kept = ("Content-Type", "Content-Encoding")
            passed = {key: answer.headers[key] for key in kept if key in answer.headers}
            body = await answer.read()
            return web.Response(status=answer.status, body=body, headers=passed)

    async def _review(self, request: web.Request) -> web.StreamResponse:
        """Answers TokenReview, SubjectAccessReview and SelfSubjectReview."""
        noted = Request(request.path, {}, dict(request.headers), 0)
        self.requests.append(noted)
        await self._answering.wait()
        if self.tokens is not None and noted.token not in self.tokens:
            return _status(401, "Unauthorized")
        if self.refusal is not None:
            return _status(*self.refusal)
        document = await request.json()
        if document["kind"] == "SelfSubjectReview":
            user_info = self.users.get(noted.token) or {}
            return web.json_response({**document, "status": {"userInfo": user_info}}, status=201)
        spec = document["spec"]
        self.reviews.append(spec)
        if document["kind"] == "TokenReview":
            user = self.users.get(spec["token"])
            status = {"authenticated": user is not None, "user": user or {}}
        elif document["kind"] == "SelfSubjectAccessReview":
            status = {"allowed": _name_access(spec["resourceAttributes"]) in self.own_grants}
        else:
            status = {"allowed": self._allows(spec)}
        return web.json_response({**document, "status": status | self.review_status}, status=201)

    def _allows(self, spec: Object) -> bool:
        granted: set[str] = set()
        for name in (spec["user"], *(spec.get("groups") or ())):
            granted |= self.grants.get(name, frozenset())
        path = spec.get("nonResourceAttributes")
        if path:
            return f"{path['verb']} {path['path']}" in granted
        attributes = spec["resourceAttributes"]
        if (attributes["verb"], attributes["resource"]) != ("list", "pods"):
            return False
        return "*" in granted or (attributes["namespace"] or "*") in granted

    async def _list(self, request: web.Request, selection: Selection) -> web.StreamResponse:
        if self.raw_answer is not None:
            return await self._write_raw(request, self.raw_answer)
        version = self.version
        chosen = (
            item for key, item in sorted(self._objects.items()) if selection.takes(key[0], item)
        )
        items = [selection.convert(item) for item in chosen]
        metadata = {"resourceVersion": str(version)}
        if limit := int(request.query.get("limit", "0")):
            began, _, first = request.query.get("continue", f"{version}/0").partition("/")
            if "continue" in request.query and self.forget_pages:
                self.forget_pages -= 1
                return _status(410, "The provided continue parameter is too old")
            items, left = items[int(first) : int(first) + limit], items[int(first) + limit :]
            metadata |= {"resourceVersion": began} | (
                {"continue": f"{began}/{int(first) + limit}"} if left else {}
            )
        return web.json_response(
            {"kind": f"{KINDS[selection.resource]}List", "metadata": metadata, "items": items}
        )

    async def _write_raw(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if not self.raw_endless:
            return web.Response(body=body, headers=self.raw_headers)
        response = web.StreamResponse(headers=self.raw_headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        while True:  # writing raises after the client has closed the connection
            await response.write(body)
            await asyncio.sleep(0)

    async def _watch(self, request: web.Request, selection: Selection) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion") or 0)
        gone = since < self._oldest
        if gone and not self.gone_as_event:
            return _status(410, f"too old resource version: {since} ({self._oldest})")
        watch = _Watch(selection, asyncio.Queue(), request)
        for change in self._history:
            for line in selection.events(change) if change.version > since else ():
                watch.queue.put_nowait(line)
        if gone:
            watch.queue.put_nowait(
                _event("ERROR", _status_object(410, f"too old resource version: {since}"))
            )
            watch.queue.put_nowait(None)
        self._watches.add(watch)
        try:
            seconds = float(request.query.get("timeoutSeconds", "1800"))
            return await self._write(watch, 1800.0 if self.ignores_timeout else seconds)
        finally:
            self._watches.discard(watch)

    async def _write(self, watch: _Watch, seconds: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(watch.request)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (line := await watch.queue.get()) is not None:
                    await response.write(line)
        return response


def _name_access(attributes: Mapping[str, str]) -> str:
    resource = "/".join(filter(None, (attributes["resource"], attributes["subresource"])))
    return f"{attributes['verb']} {resource}"


def _status(code: int, message: str) -> web.Response:
    return web.json_response(_status_object(code, message), status=code)


def _fail(code: int, retry_after: str) -> web.Response:
    response = _status(code, "the test lets this request fail")
    response.headers["Retry-After"] = retry_after
    return response
