"""Tests how podgpu identifies containers whose pod name is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.cli.main import run
from tests.nodes.node import Description, node_of
from tests.web.server import running

UUID = "GPU-00000000-1111-2222-3333-444444444444"
POD_UID = "11111111-2222-3333-4444-555555555555"


def test_two_containers_of_a_pod_without_a_name_are_distinguished(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the kubelet's checkpoint lists the holders, and it has no names of pods."""
    entries = [
        {
            "PodUID": POD_UID,
            "ContainerName": name,
            "ResourceName": "nvidia.com/gpu",
            "DeviceIDs": {"0": [f"{UUID}::{n}"]},
        }
        for n, name in enumerate(("trainer", "sidecar"))
    ]
    registered = {"nvidia.com/gpu": [f"{UUID}::0", f"{UUID}::1"]}
    described = Description(
        about="one shared GPU, two containers of one pod without a name",
        gpus="1xH100",
        uuids=[UUID],
        arguments=["-k", "--allocation", "checkpoint:{folder}/checkpoint"],
        files={
            "checkpoint": {
                "Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered},
                "Checksum": 1,
            }
        },
    )
    with node_of(described, folder) as node:
        node.take_turns()
        with running(node.agent) as client:
            lines = [
                line
                for line in client.ask("/metrics").text.splitlines()
                if "podgpu_allocation_info{" in line
            ]
            assert len(lines) == 2
            assert run(["top", "--once", "--url", f"{client.address.url}/metrics"]) == 0
    table = capsys.readouterr().out
    assert [table.count(name) for name in ("trainer", "sidecar")] == [1, 1], table
