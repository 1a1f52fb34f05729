"""Runs the containers of node-device-exporter-daemonset.yaml with simulated GPUs: names and labels
of seed 000.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.render import MANIFESTS, ROOT
from podgpu.labs.simulate.simulated_kubelet import SimulatedKubelet, SimulatedPod
from podgpu.node.gpu.remote_exporter import parse_exposition
from tests.deploy.chart import pods_of
from tests.net import free_port, read_if_ready
from tests.nodes.clock import wait_until

NODE_EXPORTER = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
SEED = (ROOT / "tests" / "fixtures" / "seeds" / "000-sample.prom").read_text(encoding="utf-8")
POD_LABELS = {"container_name": "pod1-ctr", "pod_name": "pod1", "pod_namespace": "default"}
PROGRAMS = {
    "podgpu": [sys.executable, "-m", "podgpu", "enrich"],
    "dcgm-exporter": [
        sys.executable,
        "-m",
        "podgpu",
        "exporter",
        "--telemetry",
        "simulated:2xH100",
    ],
    "node-exporter": [str(NODE_EXPORTER)],
}


def _containers() -> dict[str, dict[str, Any]]:
    text = (MANIFESTS / "node-device-exporter-daemonset.yaml").read_text(encoding="utf-8")
    (spec,) = pods_of([one for one in yaml.safe_load_all(text) if one])
    return {one["name"]: one for one in spec["containers"]}


@contextmanager
def _run(
    container: Mapping[str, Any], places: Mapping[str, str], **variables: str
) -> Iterator[None]:
    """Runs a container's command with other paths and ports."""
    arguments = [str(word) for word in container["args"]]
    for place, here in places.items():
        arguments = [word.replace(place, here) for word in arguments]
    own = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    command = [*PROGRAMS[container["name"]], *arguments]
    with subprocess.Popen(
        command, env=os.environ | own | variables, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.terminate()


def _read(url: str, text: str) -> str:
    """Waits until the response contains a text."""
    answers = [""]

    def has_text() -> bool:
        answers.append((read_if_ready(url) or b"").decode())
        return text in answers[-1]

    wait_until(has_text, f"{url} has {text}")
    return answers[-1]


@pytest.mark.skipif(NODE_EXPORTER is None, reason="prometheus-node-exporter is not installed")
def test_names_and_labels_of_seed_000(folder: Path) -> None:
    containers, textfile, socket = _containers(), folder / "textfile", folder / "kubelet.sock"
    dcgm, node = free_port(), free_port()
    places = {
        "127.0.0.1:9400": f"127.0.0.1:{dcgm}",
        ":9100": f"127.0.0.1:{node}",
        "/run/textfile": str(textfile),
    }
    textfile.mkdir()
    with ExitStack() as stack:
        stack.enter_context(_run(containers["dcgm-exporter"], places))
        uuids = re.findall(
            r'dcgm_gpu_temp{.*?uuid="(.*?)"',
            _read(f"http://127.0.0.1:{dcgm}/metrics", "dcgm_gpu_temp{"),
        )
        pod = SimulatedPod("default", "pod1", {"pod1-ctr": {"nvidia.com/gpu": uuids}})
        stack.enter_context(SimulatedKubelet(str(socket), [pod]))
        variables = {"DCGM_POD_RESOURCES_KUBELET_SOCKET": str(socket)}
        stack.enter_context(_run(containers["podgpu"], places, **variables))
        stack.enter_context(_run(containers["node-exporter"], places))
        text = _read(f"http://127.0.0.1:{node}/metrics", 'pod_name="pod1"')

    found = {family.name: family for family in parse_exposition(text.encode(), "node_exporter")}
    for wanted in parse_exposition(SEED.encode(), "seed"):
        family = found[wanted.name]
        assert (family.help, family.type) == (wanted.help, wanted.type)
        assert len(family.samples) == len(uuids) == len(wanted.samples)
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.keys() == {
                *dict(wanted.samples[0].labels),
                "pci_bus_id",
                "device",
                "modelName",
            }
            assert POD_LABELS.items() <= labels.items()
