"""A node's own files do not reach the tests: here they are on a machine that is a node, with a GPU and koordinator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.host.guard import NODES_PLACES, NOTES

AS_ON_A_NODE = """
set -e
mount -t tmpfs none /var/lib
mkdir -p /var/lib/kubelet/pod-resources
echo '[{"namespace": "a", "name": "hosts-own", "container": "c", "gpu_list": ["0"]}]' \\
    > /var/lib/kubelet/pod-resources/podlist.json
mount -t tmpfs none /sys
mkdir -p /sys/bus/pci/devices/0000:01:00.0
echo 0x10de > /sys/bus/pci/devices/0000:01:00.0/vendor
echo 0x030200 > /sys/bus/pci/devices/0000:01:00.0/class
exec "$@"
"""
ON_A_NODE = ["unshare", "--map-root-user", "--mount", "sh", "-c", AS_ON_A_NODE, "sh"]
PODLIST = "open /var/lib/kubelet/pod-resources/podlist.json"
BUS = "os.listdir /sys/bus/pci/devices"


def run_on_a_node(environment: Mapping[str, str], notes: Path) -> str:
    """What `exporter --once` prints there, before it says that no GPU could be read."""
    exporter = [sys.executable, "-m", "podgpu", "exporter", "--once", "-k", "-c", "100"]
    told = {**environment, NOTES: str(notes)}
    done = subprocess.run([*ON_A_NODE, *exporter], env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    try:
        subprocess.run([*ON_A_NODE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here, not even in a namespace: {error}")


def test_a_command_sees_the_node_and_the_guard_notes_it(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in NODES_PLACES}
    exposition = run_on_a_node(variables, tmp_path / "notes")
    assert 'podgpu_exporter_source_up{source="podlist"} 1' in exposition
    assert 'podgpu_device_count{state="expected"' in exposition
    assert {PODLIST, BUS} <= set((tmp_path / "notes").read_text(encoding="utf-8").splitlines())


def test_with_the_variables_that_every_test_has_it_does_not(tmp_path: Path) -> None:
    exposition = run_on_a_node(os.environ, tmp_path / "notes")
    assert 'source="kubelet"' in exposition
    assert "podlist" not in exposition
    assert 'state="expected"' not in exposition
    assert not (tmp_path / "notes").exists()
