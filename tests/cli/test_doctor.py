"""`podgpu doctor`: the command, and its findings about failing drivers."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket as sockets
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from podgpu.cli.doctor import as_text, command, examine_node
from podgpu.cli.exporter import merge_config_file
from podgpu.cli.main import run
from podgpu.cli.sources import simulated_driver
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry, count_pci_gpus
from podgpu.node.holders.node_files import CHECKPOINT_NAME as CHECKPOINT
from podgpu.tools.doctor.checks import Finding, Level, note, ok, wrong
from tests.host.guard import HOST_VARIABLES, NODE_PATHS
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import PATIENCE, FakeClock
from tests.nodes.node import kubeconfig
from tests.simulated import FaultyNvml
from tests.simulated_kubelet import FaultyKubelet

HOST_PID_NAMESPACE = "pid:[4026531836]"
NO_CAPABILITIES, SYS_ADMIN = "0000000000000000", "0000000000200000"
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  "
    "(root@host)\n"
)
CLOSED_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
)
NO_LIBRARY, NO_DRIVER = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED
MISMATCH = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
STRANGER = "GPU-99999999-1111-2222-3333-444444444444"
SOON = 0.3
"""Deadline of tests in which something hangs."""


class Tree:
    """/proc, /sys and /dev of a host."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sysfs, self.dev, self.logs = (
            root / name for name in ("proc", "sys", "dev", "log")
        )
        for folder in (self.proc / "self" / "ns", self.sysfs / "bus/pci/devices", self.dev):
            folder.mkdir(parents=True)
        self.process()
        self.pid_namespace(HOST_PID_NAMESPACE)

    def process(self, uid: int = 0, capabilities: str = NO_CAPABILITIES) -> None:
        status = f"Name:\tpodgpu\nUid:\t1\t{uid}\t1\t1\nCapPrm:\tffff\nCapEff:\t{capabilities}\n"
        (self.proc / "self/status").write_text(status)

    def pid_namespace(self, name: str) -> None:
        link = self.proc / "self/ns/pid"
        link.unlink(missing_ok=True)
        link.symlink_to(name)

    def kernel_driver(self, text: str = OPEN_MODULE) -> None:
        (self.proc / "driver/nvidia").mkdir(parents=True)
        (self.proc / "driver/nvidia/version").write_text(text)

    def pci_gpus(self, number: int) -> None:
        for slot in range(number):
            device = self.sysfs / f"bus/pci/devices/0000:{slot:02x}:00.0"
            device.mkdir()
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")

    @property
    def options(self) -> list[str]:
        roots = (
            ("--path-proc", self.proc),
            ("--path-sysfs", self.sysfs),
            ("--path-varlog", self.logs),
        )
        return [str(word) for pair in roots for word in pair]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name not in NODE_PATHS and name.startswith((*HOST_VARIABLES, "NO_COLOR")):
            monkeypatch.delenv(name)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def socket() -> Iterator[str]:
    """Uses a short folder name, because tmp_path is too long for a socket path. Adds an empty
    checkpoint, because doctor would otherwise read the host's.
    """
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    checkpoint = folder / CHECKPOINT
    checkpoint.parent.mkdir()
    checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": []}, "Checksum": 1}))
    (folder / "pod-resources").mkdir()
    yield str(folder / "pod-resources/kubelet.sock")
    shutil.rmtree(folder)


@pytest.fixture
def kubelet(socket: str) -> Iterator[FaultyKubelet]:
    with FaultyKubelet(socket) as running:
        yield running


Examined = Callable[..., list[Finding]]


@pytest.fixture
def examined(tree: Tree, clock: FakeClock) -> Iterator[Examined]:
    """Examines a node with this driver and these arguments. Releases hanging calls after the
    test.
    """
    drivers: list[FaultyNvml] = []

    def examine(
        driver: FaultyNvml,
        *arguments: str,
        kubernetes: bool = True,
        deadline: float = PATIENCE,
        **more: Any,
    ) -> list[Finding]:
        drivers.append(driver)
        expected = partial(count_pci_gpus, str(tree.sysfs))
        telemetry = NvmlTelemetry(driver, "nvml", expected, clock=clock.monotonic, **more)
        context = command.make_context("doctor", [*tree.options, *arguments])
        options = merge_config_file(context, context.params)
        options["check_kubernetes"] = kubernetes
        return examine_node(options, telemetry, deadline, clock.advance, str(tree.dev))

    yield examine
    for driver in drivers:
        driver.faults.release_all()
        driver.faults.reload_driver(pynvml.NVML_ERROR_UNINITIALIZED)  # ends the event threads


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def driver(clock: FakeClock) -> FaultyNvml:
    return FaultyNvml("2xH100", clock=clock.monotonic, minors=(3, 5))


def uuids(spec: str) -> list[str]:
    return [gpu.uuid for gpu in NvmlTelemetry(simulated_driver(spec)).inventory().gpus]


def pod(*ids: str, resource: str = "nvidia.com/gpu") -> SimulatedPod:
    return SimulatedPod("ns", "train", {"main": {resource: ids}})


def only_kubelet(kubelet: FaultyKubelet) -> list[str]:
    return ["--allocation", "kubelet", "--pod-resources-kubelet-socket", kubelet.socket]


def about(findings: list[Finding], subject: str) -> list[Finding]:
    return [f for f in findings if f.subject == subject]


def only(findings: list[Finding], subject: str) -> Finding:
    (found,) = about(findings, subject)
    return found


# The command


def test_no_problems(
    tree: Tree, kubelet: FaultyKubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    kubelet.pods = (pod(*uuids("2xH100")), SimulatedPod("ns", "web", {"main": {}}))
    tree.pci_gpus(2)
    arguments = [
        "doctor",
        "--telemetry",
        "simulated:2xH100",
        "--pod-resources-kubelet-socket",
        kubelet.socket,
    ]
    assert run([*arguments, *tree.options]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out == (
        "ok    driver      NVIDIA 580.159.04, NVML 13.580.159.04, 2 GPUs\n"
        "ok    GPUs        2 × NVIDIA H100 80GB HBM3\n"
        "ok    health      the driver advises no recovery action for any GPU\n"
        "ok    MIG         off\n"
        "ok    counters    NVIDIA H100 80GB HBM3 supports all 26\n"
        "ok    privileges  running as uid 0; root is needed only for the kubelet socket; "
        "capabilities needed: none\n"
        "ok    sharing     GPUs 0, 1: busy time is exact: it comes from context switches and "
        "busy samples\n"
        f"ok    kubelet     {kubelet.socket} responds: 2 pods, 1 with GPUs, 2 assignments\n"
        "ok    processes   0 assignments\n"
        "ok    mapping     2 assignments, all to devices of this node\n"
        f"ok    host name   {sockets.gethostname()}\n"
        "\n"
        "no problems found\n"
    )


def test_json(tree: Tree, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "doctor",
        "--telemetry",
        "simulated:1xT4",
        "--json",
        "-k",
        "--pod-resources-kubelet-socket",
        socket,
    ]
    assert run([*arguments, *tree.options]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["wrong"], answer["notes"]) == (1, 2)
    (bad,) = (f for f in answer["findings"] if f["level"] == "wrong")
    assert bad["subject"] == "kubelet"
    assert f"{socket} does not exist: mount the host's pod-resources directory" in bad["text"]
    assert "/var/lib/k0s/kubelet" in bad["advice"]


@pytest.mark.parametrize(
    ("said", "code", "line"),
    [
        (
            [],
            0,
            "note  kubelet     no pod labels, because the kubelet's socket {socket} does not exist",
        ),
        (
            ["-k"],
            1,
            "WRONG kubelet     no pod labels, because the kubelet's socket {socket} does not exist",
        ),
        (
            ["-k", "false"],
            0,
            "note  kubelet     not used, because --kubernetes (DCGM_EXPORTER_KUBERNETES) is false",
        ),
    ],
)
def test_a_missing_socket_is_wrong_if_pod_labels_are_wanted(
    said: list[str],
    code: int,
    line: str,
    tree: Tree,
    socket: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "doctor",
        "--telemetry",
        "simulated:2xH100",
        "--pod-resources-kubelet-socket",
        socket,
    ]
    assert run([*arguments, *tree.options, *said]) == code
    assert line.format(socket=socket) in capsys.readouterr().out


def test_the_repair_follows_the_drivers_advice(
    examined: Examined, kubelet: FaultyKubelet, socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FaultyNvml("2xH100")
    driver.advise(0, pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT)
    driver.advise(1, pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P)
    monkeypatch.setenv("NODE_NAME", "gpu-7")
    findings = examined(driver, "--pod-resources-kubelet-socket", socket)
    [repair] = [finding for finding in findings if finding.subject == "repair"]
    assert repair.text.startswith("GPU 0: ")
    assert repair.advice.split("; ") == [
        "kubectl cordon gpu-7",
        "kubectl drain gpu-7 --ignore-daemonsets --delete-emptydir-data --dry-run=server",
        "kubectl drain gpu-7 --ignore-daemonsets --delete-emptydir-data",
        "systemctl reboot",
        "kubectl uncordon gpu-7",
    ]


def test_a_gpu_for_which_the_driver_advises_a_reset(examined: Examined) -> None:
    driver = FaultyNvml("2xH100")
    driver.advise(1, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
    driver.answer("nvmlDeviceGetRemappedRows", (0, 0, 1, 0), gpu=1)
    findings = [finding for finding in examined(driver) if finding.subject == "health"]
    assert findings == [
        wrong(
            "health",
            "GPU 1: remapping a faulty memory row is pending",
            "drain the node and reset the GPU, as the driver advises",
        ),
        wrong(
            "health",
            "GPU 1: the driver advises: reset the GPU",
            "drain the node and reset the GPU",
        ),
    ]
    [repair] = [finding for finding in examined(driver) if finding.subject == "repair"]
    assert repair.text == "GPU 1: run these commands in order"
    assert repair.advice == "podgpu release --seconds 600; nvidia-smi -r -i 1"

    driver = FaultyNvml("1xH100")
    driver.unsupported(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
    assert "health" not in {finding.subject for finding in examined(driver)}


def test_node_name_in_a_pod(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--telemetry", "simulated:2xH100", "-k", "false", *tree.options]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert run(arguments) == 1
    out = capsys.readouterr().out
    assert "WRONG host name   NODE_NAME is not set" in out
    assert "fieldPath: spec.nodeName" in out
    monkeypatch.setenv("NODE_NAME", "gpu-7")
    assert run(arguments) == 0
    assert "ok    host name   gpu-7, from NODE_NAME\n" in capsys.readouterr().out


# The driver


def test_a_hanging_driver_is_a_finding(driver: FaultyNvml, examined: Examined) -> None:
    driver.faults.hang("nvmlInit")
    findings = examined(driver, kubernetes=False, deadline=SOON)
    assert "no answer within " in only(findings, "driver").text
    assert only(findings, "host name").level is Level.OK


def test_a_hanging_gpu_does_not_affect_others(driver: FaultyNvml, examined: Examined) -> None:
    driver.faults.hang("nvmlDeviceGetPowerUsage", gpu=1)
    findings = examined(driver, kubernetes=False, deadline=SOON)
    bad = [f for f in about(findings, "GPUs") if f.level is Level.WRONG]
    assert [f.text.partition(":")[0] for f in bad] == ["GPU 1"]
    assert "no answer within " in bad[0].text
    assert only(findings, "driver").text.endswith("2 GPUs")


def test_mig(clock: FakeClock, examined: Examined) -> None:
    driver = FaultyNvml("1xH100,1xH100/2x1g.10gb+1x3g.40gb,1xH100", clock=clock.monotonic)
    driver.faults.relayout(2, [])
    findings = about(examined(driver, kubernetes=False), "MIG")
    assert [(f.level, f.text) for f in findings] == [
        (Level.OK, "GPU 1: 1 × 3g.40gb, 2 × 1g.10gb"),
        (Level.NOTE, "GPU 2: on, but without instances, so no pod can use it"),
    ]


def test_unsupported_counters_are_notes(clock: FakeClock, examined: Examined) -> None:
    findings = examined(FaultyNvml("1xH100,2xT4", clock=clock.monotonic), kubernetes=False)
    (t4,) = (f for f in about(findings, "counters") if "T4" in f.text)
    assert t4.level is Level.NOTE
    assert "DCGM_FI_DEV_MEMORY_TEMP" in t4.text
    assert "DCGM_FI_PROF_* need Hopper" in t4.advice


@pytest.mark.parametrize(
    ("error", "kernel", "gpus", "text", "advice"),
    [
        (
            NO_LIBRARY,
            "",
            0,
            "in the kernel: none; NVIDIA GPUs on the PCI bus: none",
            "on nodes without GPUs",
        ),
        (
            NO_DRIVER,
            "",
            8,
            "in the kernel: none; NVIDIA GPUs on the PCI bus: 8",
            "install the driver",
        ),
        (NO_LIBRARY, OPEN_MODULE, 0, "libnvidia-ml.so.1 was not found", "runtimeClassName: nvidia"),
        (NO_DRIVER, OPEN_MODULE, 0, "driver in the kernel: 580.159.04", "runtimeClassName: nvidia"),
        (MISMATCH, CLOSED_MODULE, 0, "driver in the kernel: 535.104.05", "delete the pod"),
    ],
)
def test_no_driver(
    error: int,
    kernel: str,
    gpus: int,
    text: str,
    advice: str,
    tree: Tree,
    driver: FaultyNvml,
    examined: Examined,
) -> None:
    tree.pci_gpus(gpus)
    if kernel:
        tree.kernel_driver(kernel)
    driver.faults.unload_driver(error)
    finding = only(examined(driver, kubernetes=False), "driver")
    assert finding.level is Level.WRONG
    assert text in finding.text
    assert advice in finding.advice


def test_missing_and_failing_gpus(tree: Tree, driver: FaultyNvml, examined: Examined) -> None:
    tree.pci_gpus(3)
    driver.faults.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN, gpu=0)
    driver.faults.lose(1)
    findings = about(examined(driver, kubernetes=False), "GPUs")
    assert [(one.level, one.text.partition(":")[0]) for one in findings] == [
        (Level.WRONG, "the PCI bus has 3, the driver lists 2"),
        (Level.WRONG, "GPU 1 does not respond"),
        (Level.NOTE, "GPU 0"),
    ]


# The process


def test_the_process(tree: Tree, driver: FaultyNvml, examined: Examined) -> None:
    tree.process(uid=1000, capabilities=SYS_ADMIN)
    tree.pid_namespace("pid:[4026532288]")
    for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
        (tree.dev / name).touch()
    findings = examined(driver, "--usage-from", "samples", kubernetes=False)
    first, second = about(findings, "privileges")
    assert (first.text[:19], second.level, "does not need" in second.text) == (
        "running as uid 1000",
        Level.NOTE,
        True,
    )
    assert only(findings, "pid namespace").level is Level.NOTE
    assert only(findings, "device files") == ok("device files", "2 files, all can be opened")
    (tree.dev / "nvidia1").symlink_to("gone")  # root can open every file that exists
    shutil.rmtree(tree.proc)
    findings = examined(driver, kubernetes=False)
    assert only(findings, "device files").level is Level.WRONG
    assert only(findings, "privileges").text.startswith("running as unknown uid;")
    assert only(findings, "pid namespace").level is Level.NOTE


# The kubelet


@pytest.mark.parametrize(
    ("device_id", "why"),
    [
        (STRANGER, "this node has no such GPU"),
        ("nvidia0", "this node has no such GPU"),
        ("nvidia3/gi7", "this node has no such MIG instance"),
        ("MIG-99999999-1111-2222-3333-444444444444", "this node has no such MIG instance"),
        ("gibberish", "the format of the id is not recognised"),
    ],
)
def test_unknown_ids_are_explained(
    device_id: str, why: str, kubelet: FaultyKubelet, driver: FaultyNvml, examined: Examined
) -> None:
    kubelet.pods = (pod(device_id),)
    finding = only(examined(driver, *only_kubelet(kubelet)), "mapping")
    assert finding.level is Level.WRONG
    assert finding.text == f"ns/train/main holds nvidia.com/gpu {device_id}: {why}"
    assert finding.advice


@pytest.mark.fault(
    "The kubelet was restarted and does not know its pods yet",
    (
        "podgpu doctor reports it instead of `0 pods`; exit code 1 in a pod, or if the API server "
        "has "
        "pods on the node"
    ),
)
def test_a_kubelet_without_pods(
    kubelet: FaultyKubelet, driver: FaultyNvml, examined: Examined, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = only(examined(driver, *only_kubelet(kubelet)), "kubelet")
    assert (outside.level, "was just restarted" in outside.text) == (Level.NOTE, True)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    inside = only(examined(driver, *only_kubelet(kubelet)), "kubelet")
    assert (inside.level, "not even this one" in inside.text) == (Level.WRONG, True)
    assert "run doctor again" in inside.advice


def test_a_hanging_kubelet(kubelet: FaultyKubelet, driver: FaultyNvml, examined: Examined) -> None:
    kubelet.hang()
    finding = only(examined(driver, *only_kubelet(kubelet), deadline=SOON), "kubelet")
    assert (finding.level, "answer" in finding.text) == (Level.WRONG, True)


@pytest.mark.parametrize(
    ("device_id", "resource", "text"),
    [
        (
            "tencent.com/vcuda-core-3",
            "tencent.com/vcuda-core",
            "pods hold devices of tencent.com/vcuda",
        ),
        ("0000:3b:00.2", "nvidia.com/hostdev", "not a GPU"),
        ("nvidia5", "nvidia.com/gpu", "1 assignment on devices excluded by -d g:0"),
    ],
)
def test_notes_about_the_mapping(
    device_id: str,
    resource: str,
    text: str,
    kubelet: FaultyKubelet,
    driver: FaultyNvml,
    examined: Examined,
) -> None:
    kubelet.pods = (pod(device_id, resource=resource),)
    finding = about(examined(driver, "-d", "g:0", *only_kubelet(kubelet)), "mapping")[-1]
    assert (finding.level, text in finding.text) == (Level.NOTE, True)


def test_a_gpu_that_kubernetes_calls_unhealthy(
    tree: Tree,
    kubelet: FaultyKubelet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu-7")
    first, second = uuids("2xH100")
    kubelet.pods = (pod(second),)
    entry = {"resourceID": second, "health": "Unhealthy", "message": "XID 79"}
    status = {
        "name": "main",
        "allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": [entry]}],
    }
    body = {
        "metadata": {"namespace": "ns", "name": "train", "uid": "u-1"},
        "spec": {"nodeName": "gpu-7", "containers": [{"name": "main"}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }
    with SimulatedApiServer() as api:
        api.put("pods", body)
        config = Path(kubelet.socket).parent / "kubeconfig"
        config.write_text(kubeconfig(api.url))
        arguments = ["--telemetry", "simulated:2xH100", "--kubeconfig", str(config)]
        arguments += ["--pod-resources-kubelet-socket", kubelet.socket]
        run(["doctor", *arguments, "--kubernetes-enable-pod-labels", *tree.options])
    out = capsys.readouterr().out
    text = f"Kubernetes calls GPU {second} unhealthy (XID 79)"
    assert re.search(f"note  health +{re.escape(text)}", out)
    assert f"calls GPU {first}" not in out


# The other allocation sources


def test_every_source_of_auto_is_examined(
    tree: Tree,
    kubelet: FaultyKubelet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu-7")
    first, second = uuids("2xH100")
    kubelet.pods = (pod(second),)
    folder = Path(kubelet.socket).parent
    listed = [{"name": "train", "namespace": "ns", "container": "main", "gpu_list": [first]}]
    (folder / "podlist.json").write_text(json.dumps(listed))
    (folder / "jobs").mkdir()
    (folder / "jobs" / "7").write_text("4711\n")
    annotations = {"scheduling.koordinator.sh/device-allocated": "no JSON"}
    body = {
        "metadata": {"namespace": "ns", "name": "bad", "annotations": annotations},
        "spec": {"nodeName": "gpu-7"},
    }
    with SimulatedApiServer() as api:
        api.put(
            "pods",
            body,
            {"metadata": {"namespace": "ns", "name": "train"}, "spec": {"nodeName": "gpu-7"}},
        )
        (folder / "kubeconfig").write_text(kubeconfig(api.url))
        arguments = [
            "--telemetry",
            "simulated:2xH100",
            "--pod-resources-kubelet-socket",
            kubelet.socket,
        ]
        arguments += [
            "--kubeconfig",
            str(folder / "kubeconfig"),
            "--hpc-job-mapping-dir",
            str(folder / "jobs"),
        ]
        assert run(["doctor", *arguments, *tree.options]) == 1
    out = capsys.readouterr().out
    assert [
        line[6:].split("  ")[0].strip()
        for line in out.splitlines()
        if line.startswith(("ok", "note", "WRONG"))
    ][-10:-1] == [
        "API server",
        "annotations",
        "podlist",
        "kubelet",
        "hpc",
        "processes",
        "mapping",
        "mapping",
        "mapping",
    ]
    assert (
        "WRONG mapping      ns/bad has the annotation scheduling.koordinator.sh/device-allocated"
        in out
    )
    assert "WRONG mapping      job 4711 is in the job file 7 (hpc): no such GPU" in out
    assert (
        f"note  mapping      ns/train/main holds {second} (kubelet): a more trusted source lists"
        in out
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--allocation", "annotations"],
            "WRONG allocation  --allocation annotations: NODE_NAME is not set",
        ),
        (
            ["--kubernetes-enable-dra"],
            "WRONG DRA         --kubernetes-enable-dra: NODE_NAME is not set",
        ),
    ],
)
def test_options_that_need_the_api_server(
    arguments: list[str],
    line: str,
    tree: Tree,
    kubelet: FaultyKubelet,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [
        "doctor",
        "--telemetry",
        "simulated:1xH100",
        "--pod-resources-kubelet-socket",
        kubelet.socket,
    ]
    assert run([*command, *tree.options, *arguments]) == 1
    assert line in capsys.readouterr().out


def test_holders_with_unknown_names(
    tree: Tree, driver: FaultyNvml, examined: Examined, tmp_path: Path
) -> None:
    noted = {
        "PodUID": "u-1",
        "ContainerName": "main",
        "ResourceName": "nvidia.com/gpu",
        "DeviceIDs": {"0": ["nvidia3"]},
    }
    (tmp_path / "checkpoint").write_text(
        json.dumps({"Data": {"PodDeviceEntries": [noted]}, "Checksum": 1})
    )
    checkpoint = f"checkpoint:{tmp_path / 'checkpoint'}"
    mapped, nameless = about(examined(driver, "--allocation", checkpoint), "mapping")
    assert mapped.level is Level.OK
    assert nameless.text == "1 assignment of pods with unknown names (pod u-1/main)"
    (tree.logs / "pods" / "ns_train_u-1").mkdir(parents=True)
    assert only(examined(driver, "--allocation", checkpoint), "mapping").level is Level.OK


# Output


def test_output() -> None:
    findings = [ok("a", "b"), note("a", "b"), wrong("mapping", "id \x1b[2J\nx", "correct it")]
    assert as_text(findings[:1]).endswith("no problems found")
    assert as_text(findings[:2]).endswith("no problems, 1 note")
    assert (
        as_text(findings[2:])
        == "WRONG mapping  id \\x1b[2J\\nx\n               → correct it\n\n1 problem"
    )
    assert as_text(findings[2:] * 2, colour=True).startswith("\x1b[1;31mWRONG\x1b[0m mapping  id")


# podlist.json without a hook that maintains it


def examine_podlist(
    kubelet: FaultyKubelet, examined: Examined, age: float, **more: str
) -> list[Finding]:
    first, _ = uuids("2xH100")
    entry = {"name": "gone", "namespace": "ns", "container": "main", "gpu_list": [first], **more}
    path = Path(kubelet.socket).parent / "podlist.json"
    path.write_text(json.dumps([entry]))
    written_at = time.time() - age
    os.utime(path, (written_at, written_at))
    arguments = ["--allocation", f"podlist:{path},kubelet"]
    arguments += ["--pod-resources-kubelet-socket", kubelet.socket]
    return examined(FaultyNvml("2xH100", uuids=uuids("2xH100")), *arguments)


def test_a_podlist_that_no_hook_updates(kubelet: FaultyKubelet, examined: Examined) -> None:
    findings = examine_podlist(kubelet, examined, age=3600.0, uid="u-1")
    finding = only(findings, "podlist")
    assert finding.level == Level.WRONG
    assert "podlist.json has not been updated since" in finding.text
    assert "delete the file" in finding.text


def test_a_podlist_with_a_pod_that_does_not_exist(
    kubelet: FaultyKubelet, examined: Examined
) -> None:
    kubelet.pods = (pod(uuids("2xH100")[1]),)
    findings = examine_podlist(kubelet, examined, age=3600.0)
    (finding,) = about(findings, "mapping")
    assert finding.level == Level.NOTE
    assert "ns/gone/main holds" in finding.text
    assert "(podlist): the pod does not exist any more on this node" in finding.text
    assert "delete the file" in finding.advice


def test_an_old_podlist_is_right_if_its_pods_exist(
    kubelet: FaultyKubelet, examined: Examined
) -> None:
    kubelet.pods = (pod(uuids("2xH100")[1]),)
    findings = examine_podlist(kubelet, examined, age=3600.0, name="train")
    assert "does not exist" not in str(about(findings, "mapping"))
    assert [one.level for one in about(findings, "podlist")] == [Level.OK]
    kubelet.pods = ()
    findings = examine_podlist(kubelet, examined, age=3600.0, name="train")
    assert "does not exist" not in str(about(findings, "mapping"))
