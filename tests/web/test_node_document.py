"""`GET /api/v1/node`: the document of one node."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from podgpu.agent.loop import Agent, Settings
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.model import NodeState, decode_node, encode_node
from podgpu.simulate.driver import SimulatedNvml
from podgpu.web.exporter_app import application


def fetch(agent: Agent) -> tuple[int, str, bytes]:
    async def get() -> tuple[int, str, bytes]:
        async with TestClient(TestServer(application(agent))) as client:
            response = await client.get("/api/v1/node")
            return response.status, response.content_type, await response.read()

    return asyncio.run(get())


def test_document_has_the_devices() -> None:
    agent = Agent(NvmlTelemetry(SimulatedNvml("2xA100")), settings=Settings())
    agent.read_telemetry()
    status, content_type, body = fetch(agent)
    state = decode_node(body)
    agent.stop()
    assert (status, content_type) == (200, "application/json")
    assert [gpu.index for gpu in state.devices] == [0, 1]
    assert state.producer == "podgpu"
    assert state.exporter_id
    assert encode_node(state) == body


def test_newer_schema_is_refused() -> None:
    body = encode_node(NodeState(producer="podgpu", schema=99))
    with pytest.raises(msgspec.ValidationError, match="newer"):
        decode_node(body)
