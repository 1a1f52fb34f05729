"""DeviceTaintRules in a simulated API server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.clock import Clock
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.model import DeviceState, MigInstance, NodeState
from podgpu.writers.device_taints import DraDeviceRef, Effect, TaintWriter, label_of
from podgpu.writers.gpu_changes import GpuRecord
from podgpu.writers.health_writer import NodeUpdate
from podgpu.writers.write_queue import WriteQueue
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import FakeClock
from tests.nodes.node import kubeconfig

XID = GpuRecord("GPU 0", {"xid": "it reported XID 79"}, {"xid": "48,79"})
FAILED = GpuRecord("GPU 0", {"row_remap_failure": "remapping failed"})
HEALTHY = GpuRecord("GPU 0")
RULE = "podgpu-node-7.gpu-0"


def device(name: str, uuid: str) -> dict[str, Any]:
    return {"name": name, "attributes": {"uuid": {"string": uuid}}}


@pytest.fixture
def server() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as running:
        running.put("nodes", {"metadata": {"name": "node-7", "uid": "uid-of-node-7"}})
        spec = {
            "driver": "gpu.nvidia.com",
            "nodeName": "node-7",
            "pool": {"name": "node-7", "generation": 1},
            "devices": [device("gpu-0", "a"), device("gpu-1-mig-1", "MIG-b"), device("gpu-2", "c")],
        }
        running.put("resourceslices", {"metadata": {"name": "slice"}, "spec": spec})
        yield running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Exporter:
    def __init__(
        self, server: SimulatedApiServer, clock: FakeClock, effect: Effect = "None"
    ) -> None:
        self._server = server
        self._clock = clock
        self.queue = WriteQueue(clock.monotonic, lambda limit: limit)
        self._loop = asyncio.new_event_loop()
        self._client = ApiClient(ApiConfig(server.url, "the test"))
        times = Clock(clock.monotonic, clock.wall)
        self._writer = TaintWriter(self._client, "node-7", effect, times)

    def see(self, stale: bool = False, after: float = 2.0, **records: GpuRecord) -> dict[str, str]:
        """Writes, and returns the values of the taints by name of the rule."""
        self._clock.advance(after)
        part = MigInstance(id=1, uuids=("MIG-b",))
        devices = []
        for uuid, record in records.items():
            instances = (part,) if uuid == "b" and "lost" not in record.problems else ()
            devices.append(DeviceState(uuid=uuid, instances=instances))
        state = NodeState(producer="podgpu", devices=tuple(devices))
        for write in self._writer.update(NodeUpdate(state, records, (), stale)):
            self.queue.put(write)
        self._loop.run_until_complete(self.queue.flush())
        return taints(self._server)

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


def taints(server: SimulatedApiServer) -> dict[str, str]:
    rules = server.objects("devicetaintrules")
    return {rule["metadata"]["name"]: rule["spec"]["taint"]["value"] for rule in rules}


@pytest.fixture
def exporter(server: SimulatedApiServer, clock: FakeClock) -> Iterator[Exporter]:
    made = Exporter(server, clock)
    yield made
    made.close()


def test_a_broken_gpu_has_a_rule_until_it_works_again(
    exporter: Exporter, server: SimulatedApiServer
) -> None:
    assert exporter.see(a=HEALTHY, c=HEALTHY) == {}
    assert exporter.see(a=XID, c=HEALTHY) == {RULE: "xid-48-79"}
    [rule] = server.objects("devicetaintrules")
    assert rule["apiVersion"] == "resource.k8s.io/v1"
    assert rule["spec"] == {
        "deviceSelector": {"driver": "gpu.nvidia.com", "pool": "node-7", "device": "gpu-0"},
        "taint": {"key": "podgpu.dev/unhealthy", "value": "xid-48-79", "effect": "None"},
    }
    labels = {"app.kubernetes.io/managed-by": "podgpu", "podgpu.dev/node": "node-7"}
    assert rule["metadata"]["labels"] == labels
    # Kubernetes deletes the rule together with the Node.
    [owner] = rule["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Node", "uid-of-node-7")

    assert exporter.see(a=FAILED, c=HEALTHY) == {RULE: "row-remap-failure"}
    assert exporter.see(a=HEALTHY, c=HEALTHY) == {}


def test_writes_only_changes(exporter: Exporter, server: SimulatedApiServer) -> None:
    for _ in range(910):
        exporter.see(a=XID)
    assert [write.method for write in server.writes] == ["POST"]
    # Every ten minutes, it looks whether the rule still exists.
    server.remove("devicetaintrules", RULE)
    assert exporter.see(a=XID) == {}
    assert exporter.see(a=XID, after=600.0) == {RULE: "xid-48-79"}


def test_mig_devices_of_a_lost_gpu(exporter: Exporter) -> None:
    assert exporter.see(b=HEALTHY) == {}
    # It has no MIG instances any more.
    lost = GpuRecord("GPU 1", {"lost": "the driver no longer lists it"})
    assert exporter.see(b=lost) == {"podgpu-node-7.gpu-1-mig-1": "lost"}
    assert exporter.see(b=HEALTHY) == {}


def test_mig_devices_that_appear_later_are_known_when_the_gpu_is_lost(exporter: Exporter) -> None:
    lost = GpuRecord("GPU 1", {"lost": "the driver no longer lists it"})
    assert exporter.see(b=lost) == {}
    assert exporter.see(b=HEALTHY) == {}
    assert exporter.see(b=lost) == {"podgpu-node-7.gpu-1-mig-1": "lost"}


def test_without_a_broken_gpu_nothing_is_read_again(
    exporter: Exporter, server: SimulatedApiServer
) -> None:
    exporter.see(a=HEALTHY)
    reads = len(server.requests)
    exporter.see(a=HEALTHY, after=3600.0)
    assert len(server.requests) == reads


def test_a_gpu_without_a_uuid_taints_no_device(
    exporter: Exporter, server: SimulatedApiServer
) -> None:
    spec = {
        "driver": "gpu.nvidia.com",
        "nodeName": "node-7",
        "pool": {"name": "node-7", "generation": 1},
        "devices": [{"name": "gpu-9", "attributes": {}}],
    }
    server.put("resourceslices", {"metadata": {"name": "slice"}, "spec": spec})
    unnamed: dict[str, Any] = {"": XID}
    assert exporter.see(**unnamed) == {}


def test_only_xids_are_part_of_the_value(exporter: Exporter) -> None:
    links = GpuRecord("GPU 0", {"nvlink": "3 of its 4 links are up"}, {"nvlink": "3/4"})
    assert exporter.see(a=links) == {RULE: "nvlink"}
    without_number = GpuRecord("GPU 0", {"xid": "an XID"}, {"xid": ""})
    assert exporter.see(a=without_number) == {RULE: "xid"}


def test_effect(server: SimulatedApiServer, clock: FakeClock, exporter: Exporter) -> None:
    exporter.see(a=XID)
    other = Exporter(server, clock, "NoSchedule")
    other.see(a=XID)
    [rule] = server.objects("devicetaintrules")
    assert rule["spec"]["taint"]["effect"] == "NoSchedule"
    other.close()


def test_a_restart_deletes_rules_of_gpus_that_work_again(
    server: SimulatedApiServer, clock: FakeClock, exporter: Exporter
) -> None:
    exporter.see(a=XID, c=XID)
    restarted = Exporter(server, clock)
    # Before the driver answers, no GPU is known.
    assert len(restarted.see()) == 2
    assert restarted.see(a=HEALTHY, c=XID) == {"podgpu-node-7.gpu-2": "xid-48-79"}
    # A GPU that was forgotten.
    assert restarted.see(a=HEALTHY) == {}
    restarted.close()


def test_rules_of_others_are_not_touched(exporter: Exporter, server: SimulatedApiServer) -> None:
    ours = {"app.kubernetes.io/managed-by": "podgpu", "podgpu.dev/node": "node-8"}
    spec = {"taint": {"value": "x"}}
    server.put(
        "devicetaintrules",
        {"metadata": {"name": "theirs"}, "spec": spec},
        {"metadata": {"name": "of another node", "labels": ours}, "spec": spec},
    )
    exporter.see(a=XID)
    assert exporter.see(a=HEALTHY) == {"theirs": "x", "of another node": "x"}


def test_nothing_changes_while_the_state_is_unknown(exporter: Exporter) -> None:
    assert len(exporter.see(a=XID)) == 1
    assert len(exporter.see(stale=True)) == 1


def test_devices_that_are_published_later(exporter: Exporter, server: SimulatedApiServer) -> None:
    [slices] = server.objects("resourceslices")
    server.remove("resourceslices", "slice")
    assert exporter.see(a=XID) == {}
    server.put("resourceslices", slices)
    assert exporter.see(a=XID, after=600.0) == {RULE: "xid-48-79"}
    # The DRA driver is stopped, and removes its slices.
    server.remove("resourceslices", "slice")
    assert exporter.see(a=XID, after=600.0) == {RULE: "xid-48-79"}


def test_kubernetes_1_36(server: SimulatedApiServer, exporter: Exporter) -> None:
    server.missing_paths = frozenset({"/apis/resource.k8s.io/v1/devicetaintrules"})
    server.resource_api_versions = ("v1", "v1beta2")
    assert exporter.see(a=XID) == {RULE: "xid-48-79"}
    [rule] = server.objects("devicetaintrules")
    assert rule["apiVersion"] == "resource.k8s.io/v1beta2"
    assert exporter.see(a=HEALTHY) == {}


def test_older_kubernetes(server: SimulatedApiServer, exporter: Exporter) -> None:
    server.resource_api_versions = ()
    exporter.see(a=XID)
    assert "Kubernetes 1.37, or 1.36" in exporter.queue.problems["taints"]


@pytest.mark.parametrize("status", [403, 409, 410, 429])
def test_a_refused_rule_is_written_later(
    exporter: Exporter, server: SimulatedApiServer, status: int
) -> None:
    server.write_failures = [status]
    assert exporter.see(a=XID) == {}
    assert list(exporter.queue.problems) == ["taints"]
    assert exporter.see(a=XID) == {RULE: "xid-48-79"}
    assert exporter.queue.problems == {}


def test_a_rule_that_somebody_has_deleted_meanwhile(
    exporter: Exporter, server: SimulatedApiServer
) -> None:
    exporter.see(a=XID)
    server.write_failures = [404]
    exporter.see(a=HEALTHY)
    assert exporter.queue.problems == {}


def test_names_are_unambiguous_and_valid() -> None:
    assert DraDeviceRef("a-b", "c").rule_name != DraDeviceRef("a", "b-c").rule_name
    longest = DraDeviceRef("n" * 240, "gpu-0").rule_name
    assert longest == f"podgpu-{'n' * 240}.gpu-0"
    assert len(longest) == 253
    long = DraDeviceRef("n" * 250, "gpu-0").rule_name
    assert len(long) <= 253
    assert long != DraDeviceRef("m" * 250, "gpu-0").rule_name
    assert "/" not in DraDeviceRef("zone/node", "gpu-0").rule_name
    assert len(label_of("n" * 200)) <= 63


def test_a_value_that_is_cut_is_a_valid_label(
    exporter: Exporter, server: SimulatedApiServer
) -> None:
    xids = [119, 120, *range(10, 28)]
    detail = ",".join(map(str, xids))
    exporter.see(a=GpuRecord("GPU 0", {"xid": "it reported XIDs"}, {"xid": detail}))
    [value] = taints(server).values()
    assert len(value) == 62
    assert value.endswith("-26")


def test_withdraw_deletes_the_rules_of_all_nodes(
    exporter: Exporter,
    server: SimulatedApiServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exporter.see(a=XID, c=XID)
    server.put("devicetaintrules", {"metadata": {"name": "x"}, "spec": {"taint": {"value": "y"}}})
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(server.url), encoding="utf-8")
    assert run(["withdraw", "--kubeconfig", str(path)]) == 0
    assert "2 DeviceTaintRules" in capsys.readouterr().out
    assert taints(server) == {"x": "y"}

    server.resource_api_versions = ()
    assert run(["withdraw", "--kubeconfig", str(path)]) == 0


def test_withdraw_fails_if_a_rule_cannot_be_deleted(
    exporter: Exporter, server: SimulatedApiServer, tmp_path: Path
) -> None:
    exporter.see(a=XID)
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(server.url), encoding="utf-8")
    server.write_failures = [403]
    assert run(["withdraw", "--kubeconfig", str(path)]) == 1
    server.forbidden_paths = frozenset({"/apis/resource.k8s.io/v1/devicetaintrules"})
    assert run(["withdraw", "--kubeconfig", str(path)]) == 1
