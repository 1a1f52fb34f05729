"""`podgpu doctor`: the command as a person runs it, and the examination of drivers that are ill on purpose."""

from __future__ import annotations

import json
import os
import shutil
import socket as sockets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest

from podgpu.cli.main import run
from podgpu.compose.telemetries import simulated_driver
from podgpu.device_selection import Selection
from podgpu.doctor.examine import Question, examine
from podgpu.doctor.findings import Finding, Level, as_text, closing_line, note, ok, wrong
from podgpu.doctor.gpus import Gpus
from podgpu.doctor.host import parse_kernel_driver, parse_status
from podgpu.doctor.mapping import judge_mapping
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.gpu.pci import count_pci_gpus
from podgpu.gpu.source import GpuAnswer, Inventory
from podgpu.holders.checkpoint import NAME as CHECKPOINT
from podgpu.holders.checkpoint import CheckpointAllocation
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.counters import shipped_counters
from podgpu.model import Allocation, Device, Reading, Unmapped, Workload
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod
from tests.host.guard import MEANS_SOMETHING, NODES_PLACES
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.node import kubeconfig

HOST_PID_NAMESPACE = "pid:[4026531836]"
NO_CAPABILITIES, SYS_ADMIN = "0000000000000000", "0000000000200000"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\n"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
STRANGER = "GPU-99999999-1111-2222-3333-444444444444"
DEADLINE = 0.3


class Tree:
    """A host as files: what /proc, /sys and /dev of one show."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sysfs, self.dev, self.logs = (root / name for name in ("proc", "sys", "dev", "log"))
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
        roots = ("--path-proc", self.proc), ("--path-sysfs", self.sysfs), ("--path-varlog", self.logs)
        return [str(word) for pair in roots for word in pair]


class Clock:
    """Moves when the examination pauses: GPM wants two samples some time apart."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name not in NODES_PLACES and name.startswith((*MEANS_SOMETHING, "NO_COLOR")):
            monkeypatch.delenv(name)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def socket() -> Iterator[str]:
    """Not in tmp_path: pytest's names are too long for a socket path. With an empty checkpoint beside: where there is
    none, that of the machine the tests run on would count."""
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    checkpoint = folder / CHECKPOINT
    checkpoint.parent.mkdir()
    checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": []}, "Checksum": 1}))
    (folder / "pod-resources").mkdir()
    yield str(folder / "pod-resources/kubelet.sock")
    shutil.rmtree(folder)


@pytest.fixture
def kubelet(socket: str) -> Iterator[SimulatedKubelet]:
    with SimulatedKubelet(socket) as running:
        yield running


@pytest.fixture
def examined(tree: Tree) -> Iterator[Callable[..., list[Finding]]]:
    """Examines a node with this driver; whatever hangs in it is let go after the test."""
    drivers: list[SimulatedNvml] = []

    def examine_node(driver: SimulatedNvml, clock: Clock, name: str = "nvml", **asked: Any) -> list[Finding]:
        drivers.append(driver)
        telemetry = NvmlTelemetry(driver, name, count_expected=partial(count_pci_gpus, str(tree.sysfs)), clock=clock)
        question = Question(
            counters=shipped_counters("default") or (),
            sources=tuple(source for source in [asked.pop("kubelet", None)] if source is not None),
            identities=IdentityReader(str(tree.logs / "pods"), str(tree.logs / "containers")),
            proc=str(tree.proc),
            sysfs=str(tree.sysfs),
            dev=str(tree.dev),
        )
        return examine(replace(question, **asked), telemetry, DEADLINE, clock.pass_by)

    yield examine_node
    for driver in drivers:
        driver.faults.release_all()
        driver.faults.reload_driver(pynvml.NVML_ERROR_UNINITIALIZED)  # ends the threads that wait for events


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def driver(clock: Clock) -> SimulatedNvml:
    return SimulatedNvml("2xH100", clock=clock, minors=(3, 5))


def uuids(spec: str) -> list[str]:
    return [gpu.uuid for gpu in NvmlTelemetry(simulated_driver(spec)).inventory().gpus]


def pod(*ids: str, resource: str = "nvidia.com/gpu") -> SimulatedPod:
    return SimulatedPod("ns", "train", {"main": {resource: ids}})


def about(findings: list[Finding], subject: str) -> list[Finding]:
    return [f for f in findings if f.subject == subject]


def only(findings: list[Finding], subject: str) -> Finding:
    (found,) = about(findings, subject)
    return found


# The command


def test_all_well(tree: Tree, kubelet: SimulatedKubelet, capsys: pytest.CaptureFixture[str]) -> None:
    kubelet.pods = (pod(*uuids("2xH100")), SimulatedPod("ns", "web", {"main": {}}))
    tree.pci_gpus(2)
    arguments = ["doctor", "--telemetry", "simulated:2xH100", "--pod-resources-kubelet-socket", kubelet.socket]
    assert run([*arguments, *tree.options]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out == (
        "ok    driver      NVIDIA 580.159.04, NVML 13.580.159.04, 2 GPUs\n"
        "ok    GPUs        2 × NVIDIA H100 80GB HBM3\n"
        "ok    MIG         off\n"
        "ok    counters    NVIDIA H100 80GB HBM3 gives all 26\n"
        "ok    profiling   NVIDIA H100 80GB HBM3: GPM works, so DCGM_FI_PROF_* need no DCGM\n"
        "ok    privileges  uid 0; root is needed for the kubelet's socket alone, capabilities for nothing\n"
        "ok    sharing     the time of shared GPUs is divided by the driver's samples, each given whole to one"
        " process; --usage-from switches or exact divide it better\n"
        f"ok    kubelet     {kubelet.socket} answers (v1): 2 pods, 1 with GPUs, 2 assignments\n"
        "ok    processes   0 assignments\n"
        "ok    mapping     2 assignments, every id names a device here\n"
        f"ok    host name   {sockets.gethostname()}\n"
        "\n"
        "all well\n"
    )


def test_json(tree: Tree, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--telemetry", "simulated:1xT4", "--json", "-k", "--pod-resources-kubelet-socket", socket]
    assert run([*arguments, *tree.options]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["wrong"], answer["notes"]) == (1, 2)
    (bad,) = (f for f in answer["findings"] if f["level"] == "wrong")
    assert bad["subject"] == "kubelet"
    assert bad["text"] == f"{socket}: no such file"
    assert "mount the host's /var/lib/kubelet/pod-resources directory" in bad["advice"]


@pytest.mark.parametrize(
    ("said", "code", "line"),
    [
        ([], 0, "note  kubelet     {socket}: no such file, so there are no pod labels here"),
        (["-k"], 1, "WRONG kubelet     {socket}: no such file"),
        (["-k", "false"], 0, "note  kubelet     not asked, as --kubernetes (DCGM_EXPORTER_KUBERNETES) is false"),
    ],
)
def test_a_missing_socket_is_wrong_when_pod_labels_are_wanted(
    said: list[str], code: int, line: str, tree: Tree, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--telemetry", "simulated:2xH100", "--pod-resources-kubelet-socket", socket]
    assert run([*arguments, *tree.options, *said]) == code
    assert line.format(socket=socket) in capsys.readouterr().out


def test_the_exporters_variables_count(
    tree: Tree, socket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DCGM_EXPORTER_KUBERNETES", "true")
    monkeypatch.setenv("DCGM_POD_RESOURCES_KUBELET_SOCKET", socket)
    monkeypatch.setenv("PODGPU_TELEMETRY", "simulated:2xH100")
    assert run(["doctor", *tree.options]) == 1
    assert f"WRONG kubelet     {socket}: no such file" in capsys.readouterr().out


def test_a_bad_counter_file_is_a_finding(tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "counters.csv"
    bad.write_text("DCGM_FI_DEV_GPU_TEMPERATUR, gauge, x\n")
    assert run(["doctor", "--telemetry", "simulated:2xH100", "-f", str(bad), *tree.options]) == 1
    out = capsys.readouterr().out
    assert f"WRONG counters    {bad}:1: unknown field" in out
    assert "gives all 26" in out


def test_a_wrong_call_is_no_finding(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--telemetry", "crystal-ball", *tree.options]) == 2
    assert run(["doctor", "--telemetry", "simulated:1xH100", "-d", "z", *tree.options]) == 2
    assert capsys.readouterr().out == ""


def test_in_a_pod_the_node_must_be_named(
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


def test_no_driver_and_no_gpu(tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    driver.faults.remove_library()
    finding = only(examined(driver, clock), "driver")
    assert finding.level is Level.WRONG
    assert finding.text == "no NVIDIA GPU on the PCI bus, no NVIDIA driver in the kernel, no libnvidia-ml.so.1 here"


def test_gpus_without_a_driver(tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    tree.pci_gpus(8)
    driver.faults.unload_driver()
    finding = only(examined(driver, clock), "driver")
    assert finding.text == "8 NVIDIA GPUs on the PCI bus, but no NVIDIA driver in the kernel"
    assert "install the driver on the host" in finding.advice


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("remove_library", "libnvidia-ml.so.1 is not here, though the kernel has the driver, version 580.159.04"),
        ("unload_driver", "NVML does not reach the driver, though the kernel has the driver, version 580.159.04"),
    ],
)
def test_a_driver_that_is_not_in_the_container(
    fault: str, text: str, tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    tree.kernel_driver()
    getattr(driver.faults, fault)()
    finding = only(examined(driver, clock), "driver")
    assert finding.text.startswith(text)
    assert "runtimeClassName: nvidia" in finding.advice


def test_library_and_driver_of_different_versions(
    tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    tree.kernel_driver(CLOSED_MODULE)
    driver.faults.mismatch_versions()
    finding = only(examined(driver, clock), "driver")
    assert finding.level is Level.WRONG
    assert "different versions (the kernel has the driver, version 535.104.05)" in finding.text


def test_a_hung_driver_is_a_finding(driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    driver.faults.hang("nvmlInit")
    findings = examined(driver, clock)
    assert only(findings, "driver").text.startswith("no answer within ")
    assert only(findings, "host name").level is Level.OK


def test_one_hung_gpu_leaves_the_others(driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    driver.faults.hang("nvmlDeviceGetPowerUsage", gpu=1)
    findings = examined(driver, clock)
    bad = [f for f in about(findings, "GPUs") if f.level is Level.WRONG]
    assert [f.text.split(" (")[0] for f in bad] == ["GPU 1"]
    assert "no answer within " in bad[0].text
    assert only(findings, "driver").text.endswith("2 GPUs")


def test_a_lost_gpu(tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    driver.faults.lose(1)
    (bad,) = (f for f in about(examined(driver, clock), "GPUs") if f.level is Level.WRONG)
    assert bad.text.startswith("GPU 1 does not answer: ")


def test_a_gpu_on_the_bus_that_the_driver_does_not_list(
    tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    tree.pci_gpus(3)
    finding = only(examined(driver, clock), "GPUs")
    assert finding.level is Level.WRONG
    assert finding.text.startswith("the PCI bus shows 3, the driver lists 2")


def test_a_failing_call_is_a_note(driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    driver.faults.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN, gpu=0)
    notes = [f for f in about(examined(driver, clock), "GPUs") if f.level is Level.NOTE]
    assert [f.text for f in notes] == ["GPU 0: single calls failed this time (unknown)"]


def test_mig(clock: Clock, examined: Any) -> None:
    driver = SimulatedNvml("1xH100,1xH100/2x1g.10gb+1x3g.40gb,1xH100", clock=clock)
    driver.faults.relayout(2, [])
    findings = about(examined(driver, clock), "MIG")
    assert [(f.level, f.text) for f in findings] == [
        (Level.OK, "GPU 1: 1 × 3g.40gb, 2 × 1g.10gb"),
        (Level.NOTE, "GPU 2: on, but there is no instance on it, so no pod can use it"),
    ]


def test_what_a_model_does_not_give_is_a_note(clock: Clock, examined: Any) -> None:
    findings = examined(SimulatedNvml("1xH100,2xT4", clock=clock), clock)
    (t4,) = (f for f in about(findings, "counters") if "T4" in f.text)
    assert t4.level is Level.NOTE
    assert "DCGM_FI_DEV_MEMORY_TEMP" in t4.text
    assert "PROF" not in t4.text
    levels = {f.text.partition(":")[0]: f.level for f in about(findings, "profiling")}
    assert levels == {"NVIDIA H100 80GB HBM3": Level.OK, "Tesla T4": Level.NOTE}


def test_gpus_that_are_asked_for_but_not_there(driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    finding = only(examined(driver, clock, selection=Selection("g", (9,))), "devices")
    assert finding.level is Level.WRONG
    assert "no such GPU here: 9" in finding.text


# The process


def test_needless_privilege(tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    tree.process(uid=1000, capabilities=SYS_ADMIN)
    first, second = about(examined(driver, clock), "privileges")
    assert first.text.startswith("uid 1000;")
    assert second.level is Level.NOTE
    assert "does not need" in second.text


@pytest.mark.parametrize("namespace", ["pid:[4026532288]", ""])
def test_another_pid_namespace_is_a_note(
    namespace: str, tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    if namespace:
        tree.pid_namespace(namespace)
    else:
        (tree.proc / "self/ns/pid").unlink()
    assert only(examined(driver, clock), "pid namespace").level is Level.NOTE


def test_device_files(tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
        (tree.dev / name).touch()
    assert only(examined(driver, clock, name="nvml"), "device files") == ok(
        "device files", "2 files, all can be opened"
    )
    (tree.dev / "nvidia1").symlink_to("gone")  # root may open whatever there is
    assert only(examined(driver, clock, name="nvml"), "device files").level is Level.WRONG


def test_an_empty_proc_is_no_error(tree: Tree, driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    shutil.rmtree(tree.proc)
    findings = examined(driver, clock)
    assert only(findings, "privileges").text.startswith("uid not known;")
    assert not [f for f in findings if f.level is Level.WRONG]


# The kubelet


@pytest.mark.parametrize(
    ("device_id", "why"),
    [
        (STRANGER, "no GPU of this node has this UUID"),
        ("nvidia0", "no GPU has the minor number 0 (nvidia3 is GPU 0, nvidia5 is GPU 1)"),
        ("nvidia3/gi7", "GPU 0 is not in MIG mode"),
        ("MIG-99999999-1111-2222-3333-444444444444", "no GPU here is in MIG mode"),
        ("gibberish", "podgpu cannot read ids of this form"),
    ],
)
def test_an_id_that_names_nothing_is_explained(
    device_id: str, why: str, kubelet: SimulatedKubelet, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    kubelet.pods = (pod(device_id),)
    finding = only(examined(driver, clock, kubelet=KubeletAllocation(kubelet.socket)), "mapping")
    assert finding.level is Level.WRONG
    assert finding.text == f"ns/train/main holds nvidia.com/gpu {device_id}: {why}"
    assert finding.advice


def test_a_mig_layout_that_changed(kubelet: SimulatedKubelet, clock: Clock, examined: Any) -> None:
    driver = SimulatedNvml("1xH100/7x1g.10gb", clock=clock)
    old = driver.machine.gpus[0].instances[0].uuid
    driver.faults.relayout(0, ["3g.40gb"])
    kubelet.pods = (pod(old), pod("nvidia0/gi99"))
    findings = about(examined(driver, clock, kubelet=KubeletAllocation(kubelet.socket)), "mapping")
    assert [f.text.rpartition(": ")[2] for f in findings] == [
        "no MIG device has this UUID",
        "GPU 0 has no GPU instance 99",
    ]
    assert all("MIG layout was changed" in f.advice for f in findings)


@pytest.mark.parametrize("device_id", [STRANGER, "nvidia5"])
def test_a_gpu_that_does_not_answer_may_be_the_one_meant(
    device_id: str, kubelet: SimulatedKubelet, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    driver.faults.lose(1)
    kubelet.pods = (pod(device_id),)
    finding = only(examined(driver, clock, kubelet=KubeletAllocation(kubelet.socket)), "mapping")
    assert finding.text.endswith("it may be a GPU that does not answer")


def test_without_a_driver_the_mapping_is_not_judged(
    kubelet: SimulatedKubelet, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    driver.faults.unload_driver()
    kubelet.pods = (pod(STRANGER),)
    findings = examined(driver, clock, kubelet=KubeletAllocation(kubelet.socket))
    assert only(findings, "kubelet").level is Level.OK
    assert only(findings, "mapping").level is Level.NOTE


def test_other_resources_are_named_when_no_gpu_is_held(
    kubelet: SimulatedKubelet, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    kubelet.pods = (pod("tencent.com/vcuda-core-3", resource="tencent.com/vcuda-core"),)
    finding = only(examined(driver, clock, kubelet=KubeletAllocation(kubelet.socket)), "mapping")
    assert finding.level is Level.NOTE
    assert "tencent.com/vcuda-core" in finding.text


def test_an_nvidia_resource_that_is_no_gpu_is_not_wrong(
    kubelet: SimulatedKubelet, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    kubelet.pods = (pod("0000:3b:00.2", resource="nvidia.com/hostdev"),)
    assert only(examined(driver, clock, kubelet=KubeletAllocation(kubelet.socket)), "mapping").level is Level.NOTE


def test_pods_on_gpus_that_are_not_shown(
    kubelet: SimulatedKubelet, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    kubelet.pods = (pod("nvidia3", "nvidia5"),)
    asked = examined(driver, clock, kubelet=KubeletAllocation(kubelet.socket), selection=Selection("g", (0,)))
    mapped, hidden = about(asked, "mapping")
    assert mapped.level is Level.OK
    assert hidden.text.startswith("1 assignment on devices that -d g:0 leaves out")


def test_an_old_kubelet(kubelet: SimulatedKubelet, driver: SimulatedNvml, clock: Clock, examined: Any) -> None:
    kubelet.versions = frozenset({"v1alpha1"})
    finding = only(examined(driver, clock, kubelet=KubeletAllocation(kubelet.socket)), "kubelet")
    assert "answers (v1alpha1): 0 pods" in finding.text


@pytest.mark.parametrize("patience", [DEADLINE / 2, 60.0])
def test_a_hung_kubelet(
    patience: float, kubelet: SimulatedKubelet, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    kubelet.hang()
    asked = KubeletAllocation(kubelet.socket, deadline=patience)
    finding = only(examined(driver, clock, kubelet=asked), "kubelet")
    assert finding == wrong(
        "kubelet",
        f"{kubelet.socket}: no answer in time",
        "the kubelet hangs or is overloaded: look at its log on the host",
    )


def test_a_dead_kubelet_and_a_file_in_its_place(
    socket: str, driver: SimulatedNvml, clock: Clock, examined: Any
) -> None:
    kubelet = SimulatedKubelet(socket)
    kubelet.start()
    kubelet.stop(leave_socket=True)
    found = only(examined(driver, clock, kubelet=KubeletAllocation(socket)), "kubelet")
    assert found.text == f"{socket}: nothing answers"
    os.replace(socket, f"{socket}.old")
    Path(socket).touch()
    found = only(examined(driver, clock, kubelet=KubeletAllocation(socket)), "kubelet")
    assert found.text == f"{socket}: is not a socket"


# The other sources of holders


def unmapped(source: str, reason: str, device_id: str = "GPU-x", resource: str = "", **holder: str) -> Unmapped:
    return Unmapped(source, reason, device_id, resource, Workload(**(holder or {"namespace": "ns", "pod": "p"})))


CLAIM = {"device_id": "gpu.nvidia.com/pool/gpu-0", "resource": "claim ns/c"}


@pytest.mark.parametrize(
    ("one", "level", "text", "advice"),
    [
        (
            unmapped("kubelet", "contradicted"),
            Level.NOTE,
            "ns/p holds GPU-x (kubelet): a source with higher precedence",
            "--allocation",
        ),
        (
            unmapped("processes", "identity_conflict", uid="u-1", container_id="c" * 64),
            Level.WRONG,
            f"pod u-1/{'c' * 12} uses GPU-x (processes): its name, uid and container id",
            "/var/log/pods",
        ),
        (
            unmapped("annotations", "bad_annotation", "hami.io/x"),
            Level.WRONG,
            "ns/p has the annotation hami.io/x (annotations): the annotation cannot be parsed",
            "kubectl get pod -o yaml",
        ),
        (
            unmapped("kubelet", "unknown_pool", **CLAIM),
            Level.WRONG,
            "ns/p holds claim ns/c gpu.nvidia.com/pool/gpu-0 (kubelet): no ResourceSlice of this node has that pool",
            "kubectl get resourceslices",
        ),
        (unmapped("kubelet", "unknown_claim_device", **CLAIM), Level.WRONG, "no device of that name", "delete the pod"),
        (unmapped("kubelet", "claim_device_without_uuid", **CLAIM), Level.WRONG, "has no UUID", "update the DRA"),
        (
            unmapped("kubelet", "ambiguous_mig_device", **CLAIM),
            Level.NOTE,
            "several MIG instances",
            "its checkpoint contains",
        ),
        (unmapped("kubelet", "slices_not_synced", **CLAIM), Level.WRONG, "were not read yet", "may list and watch"),
        (
            unmapped("kubelet", "claim_without_device_name", **CLAIM),
            Level.NOTE,
            "does not report the device",
            "1.31 and later",
        ),
        (
            Unmapped("processes", "not_permitted", "GPU-x", "pid", Workload()),
            Level.WRONG,
            "a process uses GPU-x (processes): no permission to read the cgroup",
            "runAsUser: 0",
        ),
        (unmapped("hpc", "unknown_device", "9", job="4711"), Level.WRONG, "job 4711 is in the job file 9", "prolog"),
        (
            Unmapped("hpc", "bad_job_id", "0", "hpc", Workload()),
            Level.WRONG,
            "job file 0 (hpc): a line",
            "prolog",
        ),
        (Unmapped("hpc", "too_many_jobs", "0", "hpc", Workload()), Level.WRONG, "more than 64 jobs", "prolog"),
        (
            Unmapped("hpc", "permission_denied", "0", "hpc", Workload()),
            Level.WRONG,
            "no permission to read it",
            "runAsUser",
        ),
        (unmapped("podlist", "unknown_device", STRANGER), Level.WRONG, "no GPU of this node has this UUID", "replaced"),
        (unmapped("podlist", "unknown_device", "7"), Level.WRONG, "no GPU has the minor number 7", "minor numbers"),
        (
            unmapped("podlist", "unrecognised_id", "a card"),
            Level.WRONG,
            "cannot read ids of this form",
            "report the id",
        ),
        (unmapped("annotations", "something_new"), Level.WRONG, "(something_new)", "log"),
    ],
    ids=lambda value: f"{value.source}-{value.reason}" if isinstance(value, Unmapped) else "",
)
def test_every_reason_is_explained(one: Unmapped, level: Level, text: str, advice: str) -> None:
    gpu = Device(0, "GPU-00000000-1111-2222-3333-444444444444", "00000000:01:00.0", "NVIDIA A100", minor=0)
    gpus = Gpus(Inventory((gpu,)), answers={gpu: GpuAnswer((Reading(gpu, {}),))})
    (finding,) = judge_mapping(Allocation(unmapped=(one,)), gpus, Selection(), frozenset())
    assert (finding.level, finding.subject) == (level, "mapping")
    assert text in finding.text
    assert advice in finding.advice


def test_every_source_that_auto_takes_is_examined(
    tree: Tree, kubelet: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """koordinator's podlist says other than the kubelet, a job file is astray, a pod's annotation is no JSON."""
    monkeypatch.setenv("NODE_NAME", "gpu-7")
    first, second = uuids("2xH100")
    kubelet.pods = (pod(second),)
    folder = Path(kubelet.socket).parent
    listed = [{"name": "train", "namespace": "ns", "container": "main", "gpu_list": [first]}]
    (folder / "podlist.json").write_text(json.dumps(listed))
    (folder / "jobs").mkdir()
    (folder / "jobs" / "7").write_text("4711\n")
    annotations = {"scheduling.koordinator.sh/device-allocated": "no JSON"}
    body = {"metadata": {"namespace": "ns", "name": "bad", "annotations": annotations}, "spec": {"nodeName": "gpu-7"}}
    with SimulatedApiServer() as api:
        api.put("pods", body, {"metadata": {"namespace": "ns", "name": "train"}, "spec": {"nodeName": "gpu-7"}})
        (folder / "kubeconfig").write_text(kubeconfig(api.url))
        arguments = ["--telemetry", "simulated:2xH100", "--pod-resources-kubelet-socket", kubelet.socket]
        arguments += ["--kubeconfig", str(folder / "kubeconfig"), "--hpc-job-mapping-dir", str(folder / "jobs")]
        assert run(["doctor", *arguments, *tree.options]) == 1
    out = capsys.readouterr().out
    assert [line[6:].split("  ")[0].strip() for line in out.splitlines() if line.startswith(("ok", "note", "WRONG"))][
        -10:-1
    ] == ["API server", "kubelet", "annotations", "podlist", "hpc", "processes", "mapping", "mapping", "mapping"]
    assert "WRONG mapping      ns/bad has the annotation scheduling.koordinator.sh/device-allocated" in out
    assert "WRONG mapping      job 4711 is in the job file 7 (hpc): no such GPU" in out
    assert f"note  mapping      ns/train/main holds {second} (kubelet): a source with higher precedence" in out


def test_a_source_that_fails_is_a_finding_and_the_others_are_judged(
    tree: Tree, kubelet: SimulatedKubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    kubelet.pods = (pod(*uuids("1xH100")),)
    Path(kubelet.socket).with_name("podlist.json").write_text("[")
    arguments = ["--telemetry", "simulated:1xH100", "--pod-resources-kubelet-socket", kubelet.socket]
    assert run(["doctor", *arguments, *tree.options]) == 1
    out = capsys.readouterr().out
    assert "WRONG podlist " in out
    assert "cannot parse" in out
    assert "ok    mapping     1 assignment, every id names a device here" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--allocation", "annotations"], "WRONG allocation  --allocation annotations: the API server is asked"),
        (["--kubernetes-enable-dra"], "WRONG DRA         --kubernetes-enable-dra: the API server is asked"),
    ],
)
def test_what_needs_the_api_server_where_it_cannot_be_asked(
    arguments: list[str], line: str, tree: Tree, kubelet: SimulatedKubelet, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["doctor", "--telemetry", "simulated:1xH100", "--pod-resources-kubelet-socket", kubelet.socket]
    assert run([*command, *tree.options, *arguments]) == 1
    assert line in capsys.readouterr().out


def test_an_api_server_that_refuses_or_is_silent(
    tree: Tree, kubelet: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODE_NAME", "gpu-7")
    config = Path(kubelet.socket).with_name("kubeconfig")
    arguments = ["doctor", "--telemetry", "simulated:1xH100", "--pod-resources-kubelet-socket", kubelet.socket]
    with SimulatedApiServer() as api:
        config.write_text(kubeconfig(api.url))
        api.refusal = (403, "pods is forbidden")
        assert run([*arguments, *tree.options, "--kubeconfig", str(config)]) == 1
        out = capsys.readouterr().out
        assert "WRONG API server" in out
        assert "pods" in out
        assert "ok    kubelet " in out


def test_holders_without_names(tree: Tree, clock: Clock, driver: SimulatedNvml, examined: Any, tmp_path: Path) -> None:
    noted = {"PodUID": "u-1", "ContainerName": "main", "ResourceName": "nvidia.com/gpu", "DeviceIDs": ["nvidia3"]}
    (tmp_path / "checkpoint").write_text(json.dumps({"Data": {"PodDeviceEntries": [noted]}, "Checksum": 1}))
    checkpoint = CheckpointAllocation(str(tmp_path / "checkpoint"))
    mapped, nameless = about(examined(driver, clock, sources=(checkpoint,)), "mapping")
    assert mapped.level is Level.OK
    assert nameless.text == "1 assignment of pods whose names are not known (pod u-1/main)"
    (tree.logs / "pods" / "ns_train_u-1").mkdir(parents=True)
    assert only(examined(driver, clock, sources=(checkpoint,)), "mapping").level is Level.OK


# How it is told


@pytest.mark.parametrize(
    ("findings", "line"),
    [
        ([ok("a", "b")], "all well"),
        ([note("a", "b")], "nothing is wrong, 1 note"),
        ([wrong("a", "b")], "1 thing is wrong"),
        ([wrong("a", "b"), wrong("a", "b"), note("a", "b"), note("a", "b")], "2 things are wrong, 2 notes"),
    ],
)
def test_closing_line(findings: list[Finding], line: str) -> None:
    assert closing_line(findings) == line


def test_colour_changes_no_column_and_foreign_text_moves_no_cursor() -> None:
    findings = [wrong("mapping", "id \x1b[2J\nx", "mend it")]
    assert as_text(findings) == "WRONG mapping  id \\x1b[2J\\nx\n               → mend it\n\n1 thing is wrong"
    assert as_text(findings, colour=True).startswith("\x1b[1;31mWRONG\x1b[0m mapping  id")


@pytest.mark.parametrize(
    ("text", "version"), [(OPEN_MODULE, "580.159.04"), (CLOSED_MODULE, "535.104.05"), ("", ""), ("garbage 1.2", "")]
)
def test_parse_kernel_driver(text: str, version: str) -> None:
    assert parse_kernel_driver(text) == version


def test_parse_status() -> None:
    assert parse_status("Uid:\t1\t7\t1\t1\nCapEff:\t00000000a80425fb\n") == (7, 0xA80425FB)
    assert parse_status("garbage") == (None, None)
