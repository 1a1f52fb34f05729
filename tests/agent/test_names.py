"""Pod uids in the metrics: static pods, and log directories that cannot be read."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from podgpu.web import exporter_app
from tests.nodes.clock import wait_until
from tests.nodes.node import Description, Node, node_of

GPU = "GPU-00000000-1111-2222-3333-444444444444"
ID = "a" * 64
ON_NODE, IN_API = "2dc8f1d45af43985ee32ada4c7377f02", "a8ebd3e1-cd2a-436b-a655-f765426d9cb5"
MIRROR = {
    "metadata": {
        "namespace": "ns",
        "name": "train",
        "uid": IN_API,
        "annotations": {
            "kubernetes.io/config.hash": ON_NODE,
            "kubernetes.io/config.mirror": ON_NODE,
        },
    },
    "spec": {"nodeName": "node-1", "containers": [{"name": "main"}]},
    "status": {"phase": "Running"},
}
HELD = {"namespace": "ns", "name": "train", "containers": {"main": {"nvidia.com/gpu": [GPU]}}}


def description(*arguments: str, **more: object) -> Description:
    return Description(
        "one GPU, one pod",
        "1xH100",
        ["-k", "--allocation", "kubelet", "--kubernetes-enable-pod-uid", *arguments],
        uuids=[GPU],
        pods=[HELD],
        **more,  # type: ignore[arg-type]
    )


def exposition(node: Node) -> str:
    return node.agent.published.fresh.plain.decode()


def uids(text: str) -> set[str]:
    return set(re.findall(r'pod_uid="([^"]*)"', text))


@pytest.mark.parametrize(
    "asked", [False, True], ids=["without the API server", "with the API server"]
)
def test_a_static_pod_is_shown_by_the_uid_people_know(folder: Path, asked: bool) -> None:
    """Logs and cgroups contain the kubelet's internal uid. Usage is still attributed to the pod."""
    arguments = (
        ["--kubernetes-enable-pod-labels", "--kubeconfig", "{folder}/kubeconfig"] if asked else []
    )
    static = description(
        *arguments,
        logs=[f"pods/ns_train_{ON_NODE}", f"containers/train_ns_main-{ID}.log"],
        processes={"41": {"uid": ON_NODE, "container_id": ID}},
        loads=[{"gpu": 0, "pid": 41, "duty": 0.5}],
        api_objects={"pods": [MIRROR]} if asked else None,
        usage_turns=3,
    )
    with node_of(static, folder) as node:
        if asked:
            wait_until(lambda: node.api.known_pods(), "the pods are read")
        node.take_turns()
        assert uids(exposition(node)) == {IN_API if asked else ON_NODE}
        (ratio,) = re.findall(
            r'podgpu_container_gpu_utilization_ratio\{.*?pod="train".*?\} (\S+)', exposition(node)
        )
        assert float(ratio) == pytest.approx(0.5, abs=0.05)


@pytest.mark.fault(
    "/var/log/pods cannot be read",
    (
        "pod_uid is missing; source_up of identities is 0, /health names the directory, and the "
        "rest "
        "is exported"
    ),
)
def test_unreadable_log_names(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with node_of(description(logs=[f"pods/ns_train_{IN_API}"]), folder) as node:
        node.take_turns()
        assert uids(exposition(node)) == {IN_API}
        assert "identities" not in exposition(node)
        pods, moved = folder / "log" / "pods", folder / "log" / "moved"
        pods.rename(moved)
        pods.symlink_to(pods)
        for turn in (1, 2):
            node.clock.advance(5.0)
            node.agent.read_allocation()
            assert 'podgpu_exporter_source_up{source="identities"} 0' in exposition(node)
            errors = (
                f'podgpu_exporter_source_errors_total{{source="identities",reason="unreadable"}} '
                f"{turn}"
            )
            assert errors in exposition(node)
        assert 'pod="train"' in exposition(node), "the other series are exported"
        assert str(pods) in exporter_app.is_live(node.agent)[1]
        assert (
            len([message for message in caplog.messages if message.startswith("identities: ")]) == 1
        )
        pods.unlink()
        moved.rename(pods)
        node.clock.advance(5.0)
        node.agent.read_allocation()
        assert 'podgpu_exporter_source_up{source="identities"} 1' in exposition(node)
        assert uids(exposition(node)) == {IN_API}
