"""The MCP server: offers the questions as tools, over standard input and output or over HTTP."""

from __future__ import annotations

import functools
import hmac
import inspect
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import CallToolResult, TextContent, ToolAnnotations

from podgpu import __version__
from podgpu.errors import PodgpuError, SourceError
from podgpu.files import read_bounded
from podgpu.tools.assistant.questions import Questions
from podgpu.tools.assistant.untrusted import MOST_ROWS, WARNING
from podgpu.view_address import ViewClient
from podgpu.web.app import Address

PATH = "/mcp"
_INSTRUCTIONS = (
    "podgpu knows which pod uses which GPU, how much of it, and what that costs. All tools only"
    f" read. Lists have at most {MOST_ROWS} rows, and the `count` of all: arguments narrow them."
    " A value that is absent is unknown, not zero. Times are UTC. `simulated: true` means that no"
    f" GPU is real. {WARNING}"
)
TITLES = {
    "gpu_overview": "GPUs: overview",
    "gpus_list": "GPUs: list",
    "gpu_get": "GPUs: one GPU",
    "pod_gpus": "Pods: GPUs of a pod",
    "pod_summary": "Pods: summary of a pod",
    "waste_list": "Waste: list",
    "cost_range": "Cost of a period",
    "events_list": "Events: list",
    "state_at": "GPUs at a past time",
    "who_waits": "Shared GPUs: who waits",
    "problems_list": "Problems: list",
}
"""Tool -> title."""
_MAX_TOKEN_BYTES = 4096
_MAX_REQUEST_BYTES = 256 * 1024
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def make_server(client: ViewClient) -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer(
        "podgpu",
        title="podgpu",
        instructions=_INSTRUCTIONS,
        version=__version__,
        log_level="WARNING",
    )
    questions = Questions(client)
    for name, title in TITLES.items():
        question = getattr(questions, name)
        server.add_tool(
            _make_tool(question),
            name=name,
            title=title,
            description=" ".join((inspect.getdoc(question) or "").split()),
            annotations=ToolAnnotations(
                title=title,
                read_only_hint=True,
                destructive_hint=False,
                idempotent_hint=True,
                open_world_hint=False,
            ),
        )

    return server


def _make_tool(question: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for the SDK. The assistant sees errors as text."""

    @functools.wraps(question)
    def ask(**arguments: Any) -> Any:
        try:
            answer = question(**arguments)
        except PodgpuError as error:
            raise ToolError(str(error)) from error

        # The SDK would indent the text, which doubles it.
        text = json.dumps(answer, ensure_ascii=False)
        return CallToolResult(
            content=[TextContent(type="text", text=text)], structured_content=answer
        )

    return ask


def serve_stdio(client: ViewClient) -> None:
    make_server(client).run(transport="stdio")


def serve_http(client: ViewClient, address: Address, token_file: str) -> None:
    """Serves until a signal. Every request needs the token, which is read again each time."""
    # A page of another site does not know the token, and a proxy may send any host name.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = make_server(client).streamable_http_app(
        streamable_http_path=PATH,
        stateless_http=True,
        json_response=True,
        max_request_body_size=_MAX_REQUEST_BYTES,
        transport_security=security,
    )
    uvicorn.run(
        require_token(app, token_file),
        host=address.host or "0.0.0.0",
        port=address.port,
        log_level="warning",
        server_header=False,
    )


def require_token(app: App, token_file: str) -> App:
    """Returns an application that answers only requests with `Authorization: Bearer TOKEN`."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_allowed(scope, token_file):
            await _refuse(send)
            return
        await app(scope, receive, send)

    return check


def _is_allowed(scope: Scope, token_file: str) -> bool:
    try:
        token = read_token(token_file)
    except SourceError:
        return False
    credentials = [value for name, value in scope["headers"] if name == b"authorization"]
    expected = b"Bearer " + token
    return len(credentials) == 1 and hmac.compare_digest(credentials[0], expected)


def read_token(path: str) -> bytes:
    """Raises SourceError if the file has no usable token."""
    token = read_bounded(path, _MAX_TOKEN_BYTES).strip()
    has_only_visible_ascii = all(0x20 < byte < 0x7F for byte in token)
    if not token or not has_only_visible_ascii:
        raise SourceError("unauthorized", f"{path} has no usable token: write one line into it")
    return token


async def _refuse(send: Send) -> None:
    headers = [(b"www-authenticate", b"Bearer"), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    body = b'{"error": "send the token of --token-file: Authorization: Bearer TOKEN"}'
    await send({"type": "http.response.body", "body": body})
