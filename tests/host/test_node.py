"""Tests that commands do not find the files of a node if the tests run on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host.guard import NOTES

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


def test_files_of_the_node_are_not_read(tmp_path: Path) -> None:
    try:
        subprocess.run([*ON_A_NODE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespaces here: {error}")
    exporter = [sys.executable, "-m", "podgpu", "exporter", "--once", "-k", "-c", "100"]
    environment = {**os.environ, NOTES: str(tmp_path / "notes")}
    done = subprocess.run(
        [*ON_A_NODE, *exporter], env=environment, capture_output=True, text=True, check=False
    )
    assert 'source="kubelet"' in done.stdout
    assert "podlist" not in done.stdout
    assert 'state="expected"' not in done.stdout
    assert not (tmp_path / "notes").exists()
