"""Runs all checks of a node with the exporter's options. Each read has a deadline; a failure is a finding."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podgpu.agent.api_access import ApiAccess, LabelFilter, NoApi
from podgpu.agent.assemble import (
    Options,
    make_allocations,
    make_identities,
    open_telemetry,
)
from podgpu.agent.counter_feeds import choose_counters, counters_in_configmap
from podgpu.agent.lanes import collection_of_fields
from podgpu.device_selection import Selection, parse_selection
from podgpu.doctor.findings import Finding, note, ok, wrong
from podgpu.doctor.gpus import SIMULATED, check_gpus, check_usage, read_gpus
from podgpu.doctor.holders import check_holders, check_watches
from podgpu.doctor.host import Host, check_host, check_host_name, read_host
from podgpu.errors import SourceError, UsageError
from podgpu.gpu.source import Telemetry
from podgpu.holders import AllocationSource
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.kube.objects import PodRecord
from podgpu.kube.reflector import Store
from podgpu.metrics.counters import CounterSpec, shipped_counters
from podgpu.model import UsageMethod
from podgpu.web.app import load_protection
from podgpu.workers import Workers

DEADLINE = 5.0
CONFIG_FILE = "configuration file"
_CONFIGMAP = (
    "check that it exists (kubectl get configmap), and that podgpu's service account may list and watch configmaps in"
    " that namespace"
)


@dataclass(frozen=True)
class NodeSettings:
    """The settings of the exporter on this node."""

    counters: tuple[CounterSpec, ...] = ()
    selection: Selection = field(default_factory=Selection)
    sources: tuple[AllocationSource, ...] = ()  # highest precedence first; empty if pod labels are off
    kubelet_required: bool = False
    watches: tuple[Store[Any], ...] = ()  # all watches of the API server
    pods: Store[PodRecord] | None = None  # this node's pods in the API server, if watched
    identities: IdentityReader = field(default_factory=IdentityReader)
    no_hostname: bool = False
    container_usage: bool = True
    usage_from: UsageMethod = "samples"
    proc: str = "/proc"
    sysfs: str = "/sys"
    dev: str = "/dev"
    environment: Mapping[str, str] = field(default_factory=dict)


def examine(
    settings: NodeSettings,
    telemetry: Telemetry,
    deadline: float = DEADLINE,
    pause: Callable[[float], object] = time.sleep,
) -> list[Finding]:
    workers = Workers()
    try:
        host, findings = _read_host(settings, workers, deadline)
        gpus = read_gpus(telemetry, settings.counters, workers, deadline, pause)
        findings += check_gpus(gpus, host, telemetry, settings.counters)
        if gpus.is_complete:
            try:
                settings.selection.check(gpus.devices)
            except UsageError as error:
                findings.append(wrong("devices", str(error)))
        findings += check_host(
            host,
            exact_usage=settings.usage_from == "exact",
            device_files=telemetry.name == "nvml",
            pid_namespace=telemetry.name != SIMULATED and settings.container_usage,
        )
        whole = [device for device in gpus.devices if not device.is_instance and device not in gpus.failures]
        if settings.container_usage and whole:
            findings += check_usage(telemetry, whole, settings.usage_from, workers, deadline)
        findings += check_watches(settings.watches, deadline)
        findings += check_holders(
            settings.sources,
            gpus,
            selection=settings.selection,
            identities=settings.identities,
            kubelet_required=settings.kubelet_required,
            pods=settings.pods,
            node_name=settings.environment.get("NODE_NAME", ""),
            workers=workers,
            deadline=deadline,
        )
        return [*findings, check_host_name(host, settings.no_hostname)]
    finally:
        workers.run({"release": lambda: telemetry.release(deadline / 2)}, deadline)
        for source in settings.sources:
            source.close()
        workers.close()


def _read_host(settings: NodeSettings, workers: Workers, deadline: float) -> tuple[Host, list[Finding]]:
    proc, sysfs, dev = settings.proc, settings.sysfs, settings.dev
    result = workers.run({"host": lambda: read_host(proc, sysfs, dev, settings.environment)}, deadline)["host"]
    if result.value is not None:
        return result.value, []
    return Host(), [wrong("host", str(result.error), f"check that {proc}, {sysfs} and {dev} can be listed")]


class NodeExamination:
    """Examines this node with the exporter's options. Errors that keep the exporter from starting are findings."""

    def __init__(self, options: Options, kubernetes_is_set: bool) -> None:
        """Checks the allocation sources unless -k is explicitly false (`kubernetes_is_set`). Raises UsageError."""
        self._options = options
        self._kubernetes = options["kubernetes"] or not kubernetes_is_set
        self._selection = parse_selection(options["devices"])
        self._telemetry = open_telemetry(options["telemetry"], options)
        self._api = ApiAccess(options["kubeconfig"])

    def close(self) -> None:
        self._api.close()

    def run(self, config_findings: Sequence[Finding], ignored: Sequence[str]) -> list[Finding]:
        """Runs all checks. `config_findings` are errors in the configuration file, `ignored` are options without
        effect. Raises UsageError."""
        options = self._options
        counters, findings = self._read_counters()
        findings += [*config_findings, *self._check_collections(counters)]
        findings += [note("options", text) for text in ignored]
        findings += [*_check_web_config(options["web_config_file"]), *self._check_pod_labels()]
        sources, source_findings = self._make_sources()
        settings = NodeSettings(
            counters=counters,
            selection=self._selection,
            sources=tuple(sources),
            kubelet_required=options["kubernetes"],
            watches=tuple(self._api.feeds),
            pods=self._api.watched_pods,
            identities=make_identities(options, self._api),
            no_hostname=options["no_hostname"],
            container_usage=options["usage_from"] != "none",
            usage_from=options["usage_from"],
            proc=options["path_proc"],
            sysfs=options["path_sysfs"],
            environment=dict(os.environ),
        )
        return [*findings, *examine(settings, self._telemetry), *source_findings]

    def _read_counters(self) -> tuple[tuple[CounterSpec, ...], list[Finding]]:
        findings, names = [], self._options["dcgm_names"]
        try:
            counters = choose_counters(self._options, names)[0]
        except UsageError as error:
            counters, findings = shipped_counters("default") or (), [wrong("counters", str(error))]
        name = self._options["configmap_data"]
        if name == "none":
            return counters, findings
        try:
            counters = counters_in_configmap(name, self._api.configmap(name), names)()
            findings.append(ok("counters", f"{len(counters)} from the ConfigMap {name}"))
        except NoApi as error:
            findings.append(wrong("counters", f"-m {name}: {error}"))
        except SourceError as error:
            text = f"-m {name}: {error}; the counters of -f are used until it can be read"
            findings.append(wrong("counters", text, _CONFIGMAP))
        return counters, findings

    def _check_collections(self, counters: tuple[CounterSpec, ...]) -> list[Finding]:
        config = self._options["config"]
        if not config.path:
            return []
        try:
            chosen = collection_of_fields(counters, config.collections)
        except UsageError as error:
            return [wrong(CONFIG_FILE, str(error))]
        parts = [f"{len(counters) - len(chosen)} fields every {self._options['collect_interval']:g} s"]
        for collection in config.collections:
            number = sum(owner is collection for owner in chosen.values())
            parts.append(f"{collection.name}: {number} every {collection.every:g} s")
        return [ok(CONFIG_FILE, f"{config.path}: {'; '.join(parts)}")]

    def _check_pod_labels(self) -> list[Finding]:
        """Opens the exporter's watch of pods, which is checked together with the other watches."""
        LabelFilter(self._options["kubernetes_pod_label_allowlist_regex"])
        if self._options["kubernetes_enable_pod_labels"]:
            try:
                self._api.pods()
            except NoApi as error:
                return [wrong("pod labels", f"--kubernetes-enable-pod-labels: {error}")]
        return []

    def _make_sources(self) -> tuple[list[AllocationSource], list[Finding]]:
        options = self._options
        try:
            sources = make_allocations({**options, "kubernetes": self._kubernetes}, self._api, self._telemetry)
        except NoApi as error:
            return [], [wrong("allocation", f"--allocation {options['allocation']}: {error}")]
        findings = []
        for source in sources:
            if isinstance(source, KubeletAllocation):
                # Shorter than the worker's deadline, because the client's message is clearer.
                source.client.deadline = DEADLINE * 0.8
                if options["kubernetes_enable_dra"] and source.claims is None:
                    findings.append(self._explain_no_claims())
        return sources, findings

    def _explain_no_claims(self) -> Finding:
        try:
            self._api.check()
        except NoApi as error:
            return wrong("DRA", f"--kubernetes-enable-dra: {error}")
        return wrong("DRA", "--kubernetes-enable-dra: cannot watch ResourceSlices", "run it again with --debug")


def _check_web_config(path: str) -> list[Finding]:
    if not path:
        return []
    try:
        load_protection(path)
    except UsageError as error:
        return [wrong("web config", str(error))]
    return [ok("web config", path)]
