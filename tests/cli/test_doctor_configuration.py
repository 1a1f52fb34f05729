"""`podgpu doctor` checks the exporter's configuration: options, variables, API server,
ConfigMap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podgpu.cli.doctor import command
from podgpu.cli.main import run
from podgpu.cli.options import EXPORTER_OPTIONS, GroupedCommand
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from tests.cli.test_doctor import Tree, _no_variables, kubelet, socket, tree, uuids
from tests.cli.test_option_table import execute
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.node import kubeconfig
from tests.simulated_kubelet import FaultyKubelet
from tests.test_http_client import answer, serving

__all__ = ["_no_variables", "kubelet", "socket", "tree"]
NODE = "gpu-7"
GPU = "GPU-11111111-2222-3333-4444-555555555555"
EXPOSITION = f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="{GPU}",modelName="T4"}} 33\n'


def simulated_pod(name: str, *ids: str) -> SimulatedPod:
    return SimulatedPod("ns", name, {"main": {"nvidia.com/gpu": ids}} if ids else {"main": {}})


def api_pod(name: str, node: str = NODE) -> dict[str, object]:
    return {
        "metadata": {"namespace": "ns", "name": name, "labels": {"team": "a"}},
        "spec": {"nodeName": node},
    }


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedApiServer]:
    monkeypatch.setenv("NODE_NAME", NODE)
    with SimulatedApiServer() as server:
        yield server


class Doctor:
    """Runs the command with this kubelet, API server and /proc."""

    def __init__(
        self, tree: Tree, kubelet: FaultyKubelet, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._kubelet = kubelet
        self._usual = kubelet.pods = (simulated_pod("train"),)
        self._folder = Path(kubelet.socket).parent
        self._arguments = [
            "doctor",
            "--json",
            "--pod-resources-kubelet-socket",
            kubelet.socket,
            *tree.options,
        ]
        self._capsys = capsys
        self.code = -1

    def know(self, api: SimulatedApiServer) -> None:
        path = self._folder / "kubeconfig"
        path.write_text(kubeconfig(api.url), encoding="utf-8")
        self._arguments += ["--kubeconfig", str(path)]

    def examine(
        self, *arguments: str, gpus: str = "simulated:2xH100"
    ) -> dict[str, list[tuple[str, str, str]]]:
        """Returns level, text and advice of each finding, by subject."""
        if (
            self._kubelet.pods is self._usual
        ):  # UUIDs depend on the node name, which a test may have changed
            self._kubelet.pods = (simulated_pod("train", *uuids("2xH100")),)
        self.code = run([*self._arguments, "--telemetry", gpus, *arguments])
        found: dict[str, list[tuple[str, str, str]]] = {}
        for finding in json.loads(self._capsys.readouterr().out)["findings"]:
            entry = (finding["level"], finding["text"], finding["advice"])
            found.setdefault(finding["subject"], []).append(entry)
        return found


@pytest.fixture
def doctor(tree: Tree, kubelet: FaultyKubelet, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(tree, kubelet, capsys)


def wrong(found: dict[str, list[tuple[str, str, str]]]) -> dict[str, str]:
    return {
        subject: text
        for subject, all_ in found.items()
        for level, text, _ in all_
        if level == "wrong"
    }


def test_every_option_of_the_exporter_is_accepted() -> None:
    assert isinstance(command, GroupedCommand)
    options = {option.flag: replace(option, help="", common=True) for option in command.rows}
    for option in EXPORTER_OPTIONS:
        assert options[option.flag] == replace(option, help="", common=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-a", "nowhere"],
        ["-f", "/nowhere/counters.csv"],
        ["--config-file", "/nowhere/config.yaml"],
        ["--web-config-file", "/nowhere/web.yml"],
        ["--gpu-manager-address", ":5678"],
        ["--kubernetes-virtual-gpus", "--dcgm-holder-labels=false"],
        ["--kubernetes-pod-label-allowlist-regex", "("],
        ["-m", "no-colon"],
        ["--allocation", "oracle"],
        ["--exporter-username", "u", "--telemetry", "exporter:http://h"],
    ],
    ids=" ".join,
)
def test_invalid_options_are_rejected_like_by_the_exporter(arguments: list[str]) -> None:
    exporter, doctor = (
        execute([command, "--telemetry", "simulated:1xH100", *arguments])
        for command in ("exporter", "doctor")
    )
    assert (exporter.code, doctor.code) == (2, 2)
    assert doctor.complaint.replace("podgpu doctor", "podgpu exporter") == exporter.complaint


def test_options_without_effect_are_noted(doctor: Doctor) -> None:
    ((level, text, _),) = doctor.examine("--fake-gpus")["options"]
    assert (level, doctor.code) == ("note", 0)
    assert "use --telemetry simulated" in text


@pytest.mark.fault(
    "Pod labels are wanted, and the API server forbids reading pods",
    "podgpu doctor says so with the API server's words, and ends with exit code 1",
)
@pytest.mark.parametrize("kubernetes", ["true", "false"])
def test_forbidden_pod_labels(kubernetes: str, doctor: Doctor, api: SimulatedApiServer) -> None:
    doctor.know(api)
    api.refusal = (403, "pods is forbidden")
    found = doctor.examine(
        "--kubernetes-enable-pod-labels", "--allocation", "kubelet", f"-k={kubernetes}"
    )
    assert doctor.code == 1
    assert "pods" in wrong(found)["API server"]


def configmap(text: str | None) -> dict[str, object]:
    data = {} if text is None else {"metrics": text}
    return {"metadata": {"namespace": "ns", "name": "counters"}, "data": data}


@pytest.mark.fault(
    "the ConfigMap of -m is missing, forbidden, without its key or invalid",
    "podgpu doctor reports it and that the counters of -f are used; exit code 1",
)
@pytest.mark.parametrize(
    ("held", "refusal", "words"),
    [
        (None, None, "there is no ConfigMap ns:counters"),
        (configmap(None), None, "with the key 'metrics'"),
        (
            configmap("DCGM_FI_DEV_GPU_TEMPERATUR, gauge, x\n"),
            None,
            "ConfigMap ns:counters:1: unknown field",
        ),
        (
            configmap("DCGM_FI_DEV_GPU_TEMP, gauge, x\n"),
            (403, "configmaps is forbidden"),
            "there is no ConfigMap",
        ),
    ],
    ids=["missing", "no key", "malformed", "forbidden"],
)
def test_an_unreadable_configmap(
    held: dict[str, object] | None,
    refusal: tuple[int, str] | None,
    words: str,
    doctor: Doctor,
    api: SimulatedApiServer,
) -> None:
    doctor.know(api)
    api.put("pods", api_pod("train"))
    if held is not None:
        api.put("configmaps", held)
    api.refusal = refusal
    found = doctor.examine("-m", "ns:counters", "--allocation", "kubelet")
    assert doctor.code == 1
    (bad,) = (one for one in found["counters"] if one[0] == "wrong")
    assert bad[1].startswith("-m ns:counters: ")
    assert words in bad[1]
    assert "service account may list and watch configmaps" in bad[2]
    assert any("supports all 26" in text for _, text, _ in found["counters"]), (
        "the counters of -f are checked"
    )
    assert ("API server" in wrong(found)) is (refusal is not None)


def test_a_configmap_is_checked(doctor: Doctor, api: SimulatedApiServer) -> None:
    doctor.know(api)
    api.put("configmaps", configmap("DCGM_FI_DEV_GPU_TEMP, gauge, x\n"))
    found = doctor.examine("-m", "ns:counters", "--allocation", "kubelet")
    assert doctor.code == 0
    assert [text for _, text, _ in found["counters"]] == [
        "1 from the ConfigMap ns:counters",
        "NVIDIA H100 80GB HBM3 supports all 1",
    ]


@pytest.mark.fault(
    (
        "NODE_NAME is not this node: the kubelet has seven pods, the API server none or others for "
        "that name"
    ),
    "podgpu doctor compares the two and reports it; exit code 1",
)
@pytest.mark.parametrize(
    ("known", "words"),
    [
        ((), "the API server has 0 pods on the node 'gpu-7', this node's kubelet has 7 pods"),
        (
            ("web", "db"),
            (
                "the API server has 2 pods on the node 'gpu-7', this node's kubelet has 7 pods, "
                "and "
                "none is"
            ),
        ),
    ],
)
def test_a_wrong_node_name(
    known: tuple[str, ...],
    words: str,
    doctor: Doctor,
    kubelet: FaultyKubelet,
    api: SimulatedApiServer,
) -> None:
    kubelet.pods = tuple(simulated_pod(f"p{n}") for n in range(7))
    api.put("pods", *(api_pod(name) for name in known), api_pod("p1", node="gpu-8"))
    doctor.know(api)
    found = doctor.examine()
    assert doctor.code == 1
    assert words in wrong(found)["node name"]
    assert "spec.nodeName" in found["node name"][0][2]


def test_a_correct_node_name(
    doctor: Doctor, kubelet: FaultyKubelet, api: SimulatedApiServer
) -> None:
    """A pod that is starting or ending may be on only one of the lists."""
    kubelet.pods = tuple(simulated_pod(f"p{n}") for n in range(3))
    api.put("pods", *(api_pod(name) for name in ("p1", "p2", "new")))
    doctor.know(api)
    assert "node name" not in doctor.examine()
    assert doctor.code == 0
    kubelet.pods = ()  # the kubelet has just restarted
    found = doctor.examine()
    assert "node name" not in found
    assert "lists no pods, and the API server has 3 pods on this node" in wrong(found)["kubelet"]


def test_an_unreadable_exporter(doctor: Doctor, tree: Tree) -> None:
    tree.pci_gpus(4)
    with serving(answer(b"", 403)) as url:
        found = doctor.examine("--allocation", "kubelet", gpus=f"exporter:{url}")
    assert doctor.code == 1
    ((level, text, advice),) = found["exporter"]
    assert level == "wrong"
    assert "rejected the credentials (403): see --exporter-username" in text
    everything = json.dumps(found)
    assert "driver" not in found
    assert "GPUs" not in found
    assert not [word for word in ("dmesg", "NVRM", "nvidia-smi", "PCI bus") if word in everything]
    assert advice == ""


def test_another_exporter_as_the_source(doctor: Doctor, kubelet: FaultyKubelet, tree: Tree) -> None:
    kubelet.pods = (simulated_pod("train", GPU),)
    tree.pci_gpus(4)
    with serving(answer(EXPOSITION.encode())) as url:
        found = doctor.examine("--allocation", "kubelet", gpus=f"exporter:{url}")
    assert not wrong(found)
    assert doctor.code == 0
    assert found["exporter"] == [("ok", f"{url} has 1 GPU: 1 × T4", "")]
    assert "profiling" not in found
    assert "PCI bus" not in json.dumps(found)
    ((_, text, advice),) = found["counters"]
    assert "does not support 25 of 26" in text
    assert "that exporter's counter file" in advice


def test_what_write_needs(doctor: Doctor, api: SimulatedApiServer) -> None:
    doctor.know(api)
    findings = doctor.examine("-k", "--write", "events")["write"]
    assert [level for level, _, _ in findings] == ["ok", "wrong"]
    assert "only one exporter of the node writes" in findings[0][1]
    assert findings[1][1] == (
        "--write events: not allowed to create events, get events, patch events"
    )

    api.own_grants = frozenset({"create events", "get events", "patch events"})
    findings = doctor.examine("-k", "--write", "events")["write"]
    assert [level for level, _, _ in findings] == ["ok", "ok"]
    assert "write" not in doctor.examine("-k")


def test_write_without_an_api_server(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", NODE)
    [_, (level, text, _)] = doctor.examine("-k", "--write", "events")["write"]
    assert level == "wrong"
    assert "no Kubernetes API server is configured" in text


def test_write_to_nvsentinel(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_NAME", NODE)
    path = tmp_path / "nvsentinel.sock"
    arguments = ("-k", "--write", "nvsentinel", "--path-nvsentinel", str(path))
    levels = [level for level, _, _ in doctor.examine(*arguments)["write"]]
    assert levels == ["ok", "wrong"]
    path.touch()
    levels = [level for level, _, _ in doctor.examine(*arguments)["write"]]
    assert levels == ["ok", "ok"]
