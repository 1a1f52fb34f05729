"""This module leads through the examination, part after part under a deadline: what hangs or fails is a finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from podgpu.device_selection import Selection
from podgpu.doctor.counters import fields_to_ask, judge_counters
from podgpu.doctor.findings import Finding, note, wrong
from podgpu.doctor.gpus import Gpus, judge_dcgm, judge_exposition, judge_gpus, read_gpus
from podgpu.doctor.host import (
    Host,
    judge_device_files,
    judge_host_name,
    judge_pid_namespace,
    judge_privileges,
    read_host,
)
from podgpu.doctor.kubelet import KubeletAnswer, ask_kubelet
from podgpu.doctor.mapping import judge_mapping
from podgpu.doctor.probe import StartLoad, probe_switches
from podgpu.doctor.sharing import judge_sharing
from podgpu.doctor.sources import Feed, Pods, judge_feeds, judge_node, read_sources
from podgpu.errors import UsageError
from podgpu.gpu.dcgm import DcgmTelemetry
from podgpu.gpu.exporter import ExporterTelemetry
from podgpu.gpu.source import Telemetry
from podgpu.holders import AllocationSource
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import SOURCE as KUBELET
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.holders.merge import merge
from podgpu.metrics.counters import Counter
from podgpu.model import UsageMethod
from podgpu.workers import Workers

DEADLINE = 5.0
PROC, SYSFS, DEV = "/proc", "/sys", "/dev"
SIMULATED = "simulated"


@dataclass(frozen=True)
class Question:
    """What the exporter is wanted to do here: the doctor says whether it can."""

    counters: tuple[Counter, ...] = ()
    selection: Selection = field(default_factory=Selection)
    sources: tuple[AllocationSource, ...] = ()
    """Who is asked for holders, the most trusted first. None: the user said that no pod labels are wanted."""
    kubelet_required: bool = False
    feeds: tuple[Feed, ...] = ()
    """What of the API server is watched: for those sources, for pod labels, for counters."""
    pods: Pods | None = None
    """This node's pods as the API server has them; None: it is not asked for them."""
    identities: IdentityReader = field(default_factory=IdentityReader)
    no_hostname: bool = False
    container_usage: bool = True
    usage_from: UsageMethod = "samples"
    start_load: StartLoad | None = None
    """Makes a load for `--probe-switches`; None: nothing is to be probed."""
    proc: str = PROC
    sysfs: str = SYSFS
    dev: str = DEV
    environment: Mapping[str, str] = field(default_factory=dict)


def examine(
    question: Question,
    telemetry: Telemetry,
    deadline: float = DEADLINE,
    pause: Callable[[float], object] = time.sleep,
) -> list[Finding]:
    isolation = Workers()
    try:
        host, findings = _look_at_host(question, isolation, deadline)
        gpus = read_gpus(telemetry, fields_to_ask(question.counters), isolation, deadline, pause)
        findings += _judge_figures(gpus, host, telemetry)
        findings += _judge_selection(question.selection, gpus)
        findings += judge_counters(gpus, question.counters, _lender(telemetry))
        findings += judge_privileges(host, question.usage_from == "exact" or question.start_load is not None)
        if telemetry.name == "nvml":
            findings += judge_device_files(host)
        if telemetry.name != SIMULATED and question.container_usage:
            findings += judge_pid_namespace(host)
        findings += _judge_sharing(question, gpus, telemetry, isolation, deadline, pause)
        findings += judge_feeds(question.feeds, deadline)
        findings += look_at_holders(question, gpus, isolation, deadline)
        return findings + judge_host_name(host, question.no_hostname)
    finally:
        isolation.run({"release": lambda: telemetry.release(deadline / 2)}, deadline)
        for source in question.sources:
            source.close()
        isolation.close()


def _look_at_host(question: Question, isolation: Workers, deadline: float) -> tuple[Host, list[Finding]]:
    q = question
    result = isolation.run({"host": lambda: read_host(q.proc, q.sysfs, q.dev, q.environment)}, deadline)["host"]
    if result.value is not None:
        return result.value, []
    return Host(), [wrong("host", str(result.error), f"see that {q.proc}, {q.sysfs} and {q.dev} can be listed")]


def _judge_figures(gpus: Gpus, host: Host, telemetry: Telemetry) -> list[Finding]:
    """Where the figures come from. Simulated GPUs are on no bus of this machine, nor is its driver theirs."""
    if isinstance(telemetry, ExporterTelemetry):
        return judge_exposition(telemetry, gpus)
    if telemetry.name == SIMULATED:
        return judge_gpus(gpus, Host(), None)
    findings = judge_dcgm(telemetry, gpus) if isinstance(telemetry, DcgmTelemetry) else []
    if gpus.inventory is not None or not findings:
        findings += judge_gpus(gpus, host, telemetry.expected)
    return findings


def _judge_sharing(
    question: Question,
    gpus: Gpus,
    telemetry: Telemetry,
    isolation: Workers,
    deadline: float,
    pause: Callable[[float], object],
) -> list[Finding]:
    shown = question.selection.of(gpus.devices)
    whole = [device for device in gpus.devices if not device.is_instance and device not in gpus.failures]
    findings = []
    if question.container_usage and whole:
        findings += judge_sharing(telemetry, whole, question.usage_from, isolation, deadline)
    if question.start_load is not None:
        chosen = [device for device in whole if device.key in shown]
        findings += probe_switches(telemetry, chosen, question.start_load, isolation, deadline, pause)
    return findings


def _lender(telemetry: Telemetry) -> str:
    if isinstance(telemetry, ExporterTelemetry):
        return "that exporter's counter file"
    return "DCGM" if isinstance(telemetry, DcgmTelemetry) else ""


def _judge_selection(selection: Selection, gpus: Gpus) -> list[Finding]:
    if not gpus.are_all_known:
        return []  # a GPU that is missing only now is no mistake of the person who wrote -d
    try:
        selection.check(gpus.devices)
    except UsageError as e:
        return [wrong("devices", str(e))]
    return []


def look_at_holders(question: Question, gpus: Gpus, isolation: Workers, deadline: float) -> list[Finding]:
    """Every source of holders on its own, then what they say together."""
    if not question.sources:
        return [note("kubelet", "not asked, as --kubernetes (DCGM_EXPORTER_KUBERNETES) is false: no pod labels")]
    kubelet = next((source for source in question.sources if isinstance(source, KubeletAllocation)), None)
    others = [source for source in question.sources if source is not kubelet]
    readings, findings = read_sources(others, gpus.devices, isolation, deadline)
    answer = None
    if kubelet is not None:
        answer, of_kubelet = ask_kubelet(kubelet, gpus.devices, question.kubelet_required, isolation, deadline)
        findings = of_kubelet + findings
    if answer is not None:
        readings[KUBELET] = answer.allocation
        findings += _judge_node(question, answer)
    if not readings:
        return findings
    names = isolation.run({"names": question.identities.read}, deadline)["names"].value
    in_order = {source.name: readings[source.name] for source in question.sources if source.name in readings}
    allocation = merge(in_order, names.complete) if names is not None else merge(in_order)
    return findings + judge_mapping(
        allocation,
        gpus,
        question.selection,
        kubelet.resource_names if kubelet is not None else frozenset(),
        answer.resources if answer is not None else frozenset(),
    )


def _judge_node(question: Question, answer: KubeletAnswer) -> list[Finding]:
    """Only when the API server has told everything: what is not there yet is no sign of another node."""
    pods = question.pods
    if pods is None or not pods.synced or pods.error is not None:
        return []
    told = frozenset((pod.namespace, pod.name) for pod in pods.items())
    return judge_node(question.environment.get("NODE_NAME", ""), answer.pods, told)
