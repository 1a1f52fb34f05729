"""Opens the writers of `--write`.

Imported only if there are any, because they need protobuf and HTTP/2.
"""

from __future__ import annotations

from collections.abc import Callable

from podgpu.clock import Clock
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.writers.device_taints import Effect, TaintWriter
from podgpu.writers.health_writer import Writer, WriterSession
from podgpu.writers.node_condition import NodeConditionWriter
from podgpu.writers.nvsentinel import SentinelWriter
from podgpu.writers.pod_events import EventWriter
from podgpu.writers.write_option import (
    DEFAULT_SOCKET,
    EVENTS,
    NODE_CONDITION,
    NVSENTINEL,
    TAINTS,
    WriterOptions,
)

_DEADLINE = 8.0  # seconds of one request


def make_session_opener(
    wanted: WriterOptions,
    config: ApiConfig,
    node: str,
    clock: Clock,
    sentinel_socket: str = DEFAULT_SOCKET,
) -> Callable[[], WriterSession]:
    def open_session() -> WriterSession:
        client = ApiClient(config, _DEADLINE)
        writers: list[Writer] = []
        for name, argument in wanted.arguments.items():
            if name == EVENTS:
                writers.append(EventWriter(client, node, clock))
            elif name == NODE_CONDITION:
                writers.append(NodeConditionWriter(client, node, clock))
            elif name == TAINTS:
                # Without an argument, a taint only informs.
                effect: Effect = "NoSchedule" if argument == "NoSchedule" else "None"
                writers.append(TaintWriter(client, node, effect, clock))
            elif name == NVSENTINEL:
                writers.append(SentinelWriter(sentinel_socket, node, argument, clock))

        return WriterSession(writers, client)

    return open_session
