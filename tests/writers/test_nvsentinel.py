"""Events on the socket of NVSentinel, received by a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from podgpu.clock import Clock
from podgpu.model import DeviceState, NodeState
from podgpu.writers.gpu_changes import GpuRecord
from podgpu.writers.health_events_pb2 import HealthEvents
from podgpu.writers.health_writer import NodeUpdate
from podgpu.writers.nvsentinel import SentinelWriter, recommend
from podgpu.writers.write_queue import WriteQueue
from tests.nodes.clock import FakeClock

XID = GpuRecord("GPU 0", {"xid": "it reported XID 79"}, {"xid": "79"})
HEALTHY = GpuRecord("GPU 0")


class Connector:
    """NVSentinel's platform connector."""

    def __init__(self, path: Path) -> None:
        self.received: list[Any] = []
        self.error: grpc.StatusCode | None = None
        self._server = grpc.server(ThreadPoolExecutor(2))
        method = grpc.unary_unary_rpc_method_handler(self._receive)
        name = "datamodels.PlatformConnector"
        handler = grpc.method_handlers_generic_handler(name, {"HealthEventOccurredV1": method})
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(f"unix://{path}")
        self._server.start()

    def _receive(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if self.error is not None:
            context.abort(self.error, "no")
        message = HealthEvents.FromString(request)
        assert message.version == 1
        self.received += message.events
        return b""

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nvsentinel.sock"


@pytest.fixture
def connector(path: Path) -> Iterator[Connector]:
    running = Connector(path)
    yield running
    running.stop()


class Exporter:
    def __init__(self, path: Path, strategy: str = "") -> None:
        self.devices: list[DeviceState] = []  # by default, made for the records
        self.clock = FakeClock()
        self.queue = WriteQueue(self.clock.monotonic, lambda limit: limit)
        clock = Clock(self.clock.monotonic, self.clock.wall)
        self._writer = SentinelWriter(str(path), "node-7", strategy, clock)

    def see(self, stale: bool = False, after: float = 2.0, **records: GpuRecord) -> None:
        self.see_all(records, stale, after)

    def see_all(
        self, records: Mapping[str, GpuRecord], stale: bool = False, after: float = 2.0
    ) -> None:
        self.clock.advance(after)
        devices = self.devices or [
            DeviceState(uuid=uuid, index=0, pci_bus_id="0000:04:00.0") for uuid in records
        ]
        state = NodeState(producer="podgpu", devices=tuple(devices))
        for write in self._writer.update(NodeUpdate(state, records, (), stale)):
            self.queue.put(write)
        asyncio.run(self.queue.flush())


def test_broken_and_healthy_again(path: Path, connector: Connector) -> None:
    exporter = Exporter(path)
    exporter.see(a=HEALTHY)
    exporter.see(a=XID)
    exporter.see(a=XID)
    exporter.see(a=HEALTHY)
    first, broken, healthy = connector.received
    assert first.is_healthy
    assert healthy.is_healthy
    assert not healthy.is_fatal
    assert healthy.recommended_action == 0
    assert list(healthy.error_code) == []

    assert broken.agent == "podgpu"
    assert broken.component_class == "GPU"
    assert broken.check_name == healthy.check_name == "PodgpuGpuHealth"
    assert broken.is_fatal
    assert not broken.is_healthy
    assert broken.message == "GPU 0 (a): it reported XID 79"
    assert broken.recommended_action == 24  # RESTART_BM
    assert list(broken.error_code) == ["79"]
    entities = [(one.entity_type, one.entity_value) for one in broken.entities_impacted]
    assert entities == [("GPU", "0"), ("PCI", "0000:04:00.0"), ("GPU_UUID", "a")]
    assert broken.node_name == "node-7"
    assert broken.processing_strategy == 2  # STORE_ONLY
    assert broken.generated_timestamp.seconds == 1_700_001_004


def test_a_gpu_is_named_by_what_is_known_of_it(path: Path, connector: Connector) -> None:
    exporter = Exporter(path)
    exporter.devices = [DeviceState(uuid="a")]
    exporter.see(a=XID)
    [event] = connector.received
    entities = [(one.entity_type, one.entity_value) for one in event.entities_impacted]
    assert entities == [("GPU_UUID", "a")]


def test_it_may_act_only_if_the_operator_says_so(path: Path, connector: Connector) -> None:
    Exporter(path, "EXECUTE_REMEDIATION").see(a=XID)
    [event] = connector.received
    assert event.processing_strategy == 1


def test_only_changes_are_sent(path: Path, connector: Connector) -> None:
    exporter = Exporter(path)
    for _ in range(1000):
        exporter.see(a=HEALTHY, b=XID)
    assert len(connector.received) == 2
    # An XID is added to the problem.
    exporter.see(a=HEALTHY, b=GpuRecord("GPU 1", XID.problems, {"xid": "48,79"}))
    assert list(connector.received[-1].error_code) == ["48", "79"]
    exporter.see(stale=True)
    assert len(connector.received) == 3


def test_a_forgotten_gpu_is_healthy(path: Path, connector: Connector) -> None:
    exporter = Exporter(path)
    exporter.see(a=XID)
    exporter.see()
    exporter.see()
    assert [event.is_healthy for event in connector.received] == [False, True]
    assert connector.received[1].message == "a removed GPU (a): podgpu knows no problem"
    exporter.see(b=HEALTHY)
    exporter.see()
    assert len(connector.received) == 3


def test_without_a_socket_nothing_is_kept(path: Path) -> None:
    """When the socket appears, only the current state is sent."""
    exporter = Exporter(path)
    exporter.see(a=HEALTHY)
    exporter.see(a=XID, after=400.0)
    assert "does not exist" in exporter.queue.problems["nvsentinel"]
    exporter.see(a=HEALTHY, after=400.0)
    connector = Connector(path)
    exporter.see(a=HEALTHY, after=400.0)
    connector.stop()
    assert [event.is_healthy for event in connector.received] == [True]
    assert exporter.queue.problems == {}


def test_a_refused_event_is_sent_later(path: Path, connector: Connector) -> None:
    exporter = Exporter(path)
    connector.error = grpc.StatusCode.UNAVAILABLE
    exporter.see(a=XID)
    assert "did not accept events" in exporter.queue.problems["nvsentinel"]
    connector.error = None
    exporter.see(a=XID, after=400.0)
    assert len(connector.received) == 1


def test_many_gpus_in_one_message(path: Path, connector: Connector) -> None:
    """The message is longer than a frame of HTTP/2."""
    long = GpuRecord("GPU", {"ecc": "x" * 5000})
    Exporter(path).see_all({f"GPU-{number}": long for number in range(32)})
    assert len(connector.received) == 32


@pytest.mark.parametrize(
    ("problems", "details", "action"),
    [
        (["lost"], {}, "RESTART_BM"),
        (["ecc"], {}, "COMPONENT_RESET"),
        (["ecc", "row_remap_failure"], {}, "CONTACT_SUPPORT"),
        (["recurring"], {}, "RUN_DCGMEUD"),
        (["xid"], {"xid": "48"}, "COMPONENT_RESET"),
        (["xid"], {"xid": "54"}, "CONTACT_SUPPORT"),
        (["xid"], {"xid": "48,79"}, "RESTART_BM"),
        (["xid"], {}, "RUN_DCGMEUD"),
        (["recovery_action", "xid"], {"recovery_action": "reset", "xid": "79"}, "COMPONENT_RESET"),
        (["recovery_action"], {"recovery_action": "recover_imex"}, "CONTACT_SUPPORT"),
        (["of a newer version"], {}, "CONTACT_SUPPORT"),
    ],
)
def test_recommended_action(problems: list[str], details: dict[str, str], action: str) -> None:
    record = GpuRecord("GPU 0", dict.fromkeys(problems, "text"), details)
    assert recommend(record) == action
