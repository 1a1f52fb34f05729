"""Everything that --write writes, in a real API server with a real scheduler.

Needs PODGPU_KUBE_BIN, see tests/kube/real_api_server.py. The exporters have the roles of the chart.
The GPUs are simulated, and there is no kubelet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.render import CHART, run_helm
from podgpu.cli.main import run
from podgpu.kube.config import load_config
from podgpu.model import Assignment, Workload
from podgpu.node.agent.agent import Settings
from podgpu.writers.health_writer import HealthWriter
from podgpu.writers.node_lock import NodeLock
from podgpu.writers.open_writers import make_session_opener
from podgpu.writers.write_option import parse_write
from tests.agent.simulated_node import SimulatedNode
from tests.certificates import Certificates
from tests.kube.real_cluster import RealCluster, run_cluster
from tests.nodes.clock import wait_until
from tests.simulated import stop_after_test

pytestmark = pytest.mark.reads_host
WRITE = "events,condition,taints:NoSchedule"
SELECTOR = "app.kubernetes.io/managed-by=podgpu"


@dataclass(frozen=True)
class Cluster:
    real: RealCluster

    def run(self, *arguments: str) -> str:
        """Runs kubectl."""
        return self.real.server.kubectl(*arguments)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.run("get", *arguments, "-o", "json"))

    def apply_chart(self, *templates: str) -> None:
        """Applies some templates of the chart's exporter, in the namespace gpu. Omits jobs."""
        shown = [part for one in templates for part in ("-s", f"templates/exporter/{one}.yaml")]
        values = ("--set", f"exporter.write={{{WRITE}}}")
        text = run_helm("template", "podgpu", str(CHART), "-n", "gpu", *values, *shown).stdout
        objects = [one for one in yaml.safe_load_all(text) if one and one["kind"] != "Job"]
        self.real.server.apply(*objects)

    def write_kubeconfig(self, account: str, name: str) -> str:
        """Returns a kubeconfig with a token of a service account."""
        token = self.run("create", "token", account, "-n", "gpu").strip()
        return self.real.server.kubeconfig(name, token=token)


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Cluster]:
    with (
        run_cluster(tmp_path_factory.mktemp("cluster"), certificates) as real,
        real.running_controllers("garbage-collector-controller"),
    ):
        running = Cluster(real)
        for name in ("gpu", "team"):
            real.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        expression = "device.driver == 'gpu.nvidia.com'"
        real.create(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "metadata": {"name": "gpu.nvidia.com"},
                "spec": {"selectors": [{"cel": {"expression": expression}}]},
            }
        )
        running.apply_chart("serviceaccount", "rbac")
        yield running


class RealNode:
    """A node with two simulated GPUs, which a DRA driver offers. A pod holds GPU 0."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self.cluster = cluster
        self.name = name
        self.folder = folder
        self.gpus = SimulatedNode("2xH100", Settings(node_name=name, interval=1.0))
        self.gpus.leapt = time.time() - self.gpus.wall()
        amounts = {"cpu": "8", "memory": "16Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        metadata = {"name": name}
        cluster.real.create(
            {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}
        )
        devices = [
            {"name": f"gpu-{number}", "attributes": {"uuid": {"string": self.gpus.uuid(number)}}}
            for number in range(2)
        ]
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": "gpu.nvidia.com", "nodeName": name, "pool": pool, "devices": devices}
        slices = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
        cluster.real.create({**slices, "metadata": metadata, "spec": spec})
        self.pod = self.add_pod(f"train-{name}", nodeName=name)
        self.gpus.holders.now = [Assignment(self.gpus.uuid(0), self.pod, "kubelet")]
        self.gpus.turn()
        self.gpus.turn()

    def add_pod(self, name: str, **spec: Any) -> Workload:
        containers = [{"name": "main", "image": "train"}]
        metadata = {"name": name, "namespace": "team"}
        spec = {"containers": containers, "restartPolicy": "Never"} | spec
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.cluster.real.create(pod)
        uid = self.cluster.get("pod", name, "-n", "team")["metadata"]["uid"]
        return Workload("team", name, "main", uid)

    def start_exporter(self) -> HealthWriter:
        """Starts the writers with the permissions of the chart, as an exporter does."""
        config = load_config(self.cluster.write_kubeconfig("podgpu-exporter", self.name))
        agent = self.gpus.agent

        def read() -> tuple[Any, bool]:
            published = agent.published
            return published.state, agent.is_fresh(published)

        opener = make_session_opener(parse_write(WRITE), config, self.name, agent.clock)
        lock = NodeLock(str(self.folder))
        writer = HealthWriter(read, opener, lock, 1800.0, agent.clock, interval=0.1)
        stop_after_test.append(writer.stop)
        writer.start(lambda: None)
        return writer

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        wait_until(lambda: self.gpus.turn(0.2) and condition(), what)

    @property
    def rules(self) -> list[Any]:
        rules = self.cluster.get("devicetaintrules", "-l", SELECTOR)["items"]
        return [one for one in rules if one["spec"]["deviceSelector"]["pool"] == self.name]

    @property
    def condition(self) -> dict[str, str]:
        conditions = self.cluster.get("node", self.name)["status"]["conditions"]
        found = [one for one in conditions if one["type"] == "GpuUnhealthy"]
        return found[0] if found else {}

    def events(self) -> list[Any]:
        events = self.cluster.get("events", "-A", "-l", SELECTOR)["items"]
        return [one for one in events if one["source"]["host"] == self.name]

    def is_scheduled(self, pod: str) -> bool:
        return "nodeName" in self.cluster.get("pod", pod, "-n", "team")["spec"]

    def request_gpu_0(self, name: str) -> None:
        """Adds a pod that can run only on GPU 0 of this node."""
        uuid = self.gpus.uuid(0)
        expression = f"device.attributes['gpu.nvidia.com'].uuid == '{uuid}'"
        selectors = [{"cel": {"expression": expression}}]
        exactly = {"deviceClassName": "gpu.nvidia.com", "selectors": selectors}
        claim = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        self.cluster.real.create(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "team"},
                "spec": claim,
            }
        )
        self.add_pod(name, resourceClaims=[{"name": "gpu", "resourceClaimName": name}])


@pytest.fixture
def node(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> RealNode:
    name = request.node.name.removeprefix("test_").replace("_", "-")
    return RealNode(cluster, name[:40].strip("-"), tmp_path)


def test_kubectl_describe(node: RealNode) -> None:
    node.start_exporter()
    node.wait_for(lambda: node.condition.get("status") == "False", "the condition is False")
    node.gpus.driver.raise_xid(0, 48)
    node.wait_for(lambda: len(node.events()) == 2, "Events of the XID")
    node.gpus.faults.lose(0)
    node.wait_for(lambda: len(node.events()) == 4, "Events of the lost GPU")
    node.wait_for(lambda: node.condition.get("reason") == "GpuLost", "the condition is True")

    pod = node.cluster.run("describe", "pod", node.pod.pod, "-n", "team")
    shown = node.cluster.run("describe", "node", node.name)
    print(pod[pod.index("Events:") :], shown, sep="\n")
    for text in (pod, shown):
        events = text[text.index("Events:") :]
        assert "GpuXid" in events
        assert "XID 48 (double-bit ECC error)" in events
        assert "GpuLost" in events
        assert "podgpu" in events
    [line] = [line for line in shown.splitlines() if line.startswith("  GpuUnhealthy")]
    assert line.split()[1] == "True"
    assert "the driver no longer lists it" in line
    assert "Ready" in shown


def test_taint_keeps_a_pod_off_the_device(node: RealNode) -> None:
    node.start_exporter()
    node.gpus.faults.lose(0)
    node.wait_for(lambda: len(node.rules) == 1, "a DeviceTaintRule")
    [rule] = node.rules
    assert rule["spec"]["taint"]["value"] == "lost"
    assert rule["metadata"]["ownerReferences"][0]["name"] == node.name

    node.request_gpu_0("waits")
    node.wait_for(lambda: "FailedScheduling" in _events_of(node, "waits"), "the scheduler refuses")
    time.sleep(2.0)
    assert not node.is_scheduled("waits")
    print(_events_of(node, "waits"))

    node.gpus.faults.recover(0)
    node.wait_for(lambda: not node.rules, "the rule is deleted")
    node.wait_for(lambda: node.is_scheduled("waits"), "the pod gets the device")
    assert node.condition["status"] == "False"


def _events_of(node: RealNode, pod: str) -> str:
    return node.cluster.run("events", "-n", "team", "--for", f"pod/{pod}")


def test_rules_end_with_their_node(node: RealNode) -> None:
    node.start_exporter()
    node.gpus.faults.lose(0)
    node.wait_for(lambda: len(node.rules) == 1, "a DeviceTaintRule")
    node.cluster.run("delete", "node", node.name)
    wait_until(lambda: not node.rules, "the garbage collector deletes the rule")


def test_two_exporters_do_not_fight(node: RealNode) -> None:
    first = node.start_exporter()
    node.gpus.faults.lose(0)
    node.wait_for(lambda: len(node.events()) == 2 and node.rules, "all is written")
    node.wait_for(lambda: node.condition.get("status") == "True", "the condition is True")
    second = node.start_exporter()
    before = node.events(), node.rules, node.condition
    for _ in range(30):
        node.gpus.turn(0.1)
        time.sleep(0.1)
    assert (node.events(), node.rules, node.condition) == before

    first.stop()
    node.gpus.faults.recover(0)
    node.wait_for(lambda: len(node.events()) == 4, "the second one writes GpuRecovered")
    node.wait_for(lambda: not node.rules, "the rule is deleted")
    lost = [one for one in node.events() if one["reason"] == "GpuLost"]
    assert {one["count"] for one in lost} == {1}
    second.stop()


def test_uninstall_leaves_nothing(
    node: RealNode, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """`podgpu withdraw` has the permissions of the chart's job."""
    writer = node.start_exporter()
    node.gpus.faults.lose(0)
    node.wait_for(lambda: len(node.events()) == 2 and node.rules, "all is written")
    node.wait_for(lambda: node.condition.get("status") == "True", "the condition is True")
    writer.stop()
    cluster.apply_chart("withdraw")
    path = cluster.write_kubeconfig("podgpu-exporter-withdraw", "withdraw")
    assert run(["withdraw", "--kubeconfig", path]) == 0
    print(capsys.readouterr().out)

    assert cluster.get("events", "-A", "-l", SELECTOR)["items"] == []
    assert cluster.get("devicetaintrules")["items"] == []
    for each in cluster.get("nodes")["items"]:
        types = [one["type"] for one in each["status"]["conditions"]]
        assert "GpuUnhealthy" not in types
        assert "Ready" in types
