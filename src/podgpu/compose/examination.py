"""This module assembles what `podgpu doctor` examines: this node as the exporter would see it with the same options,
or the cluster's autoscalers. What keeps the exporter from starting is a finding here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from podgpu.agent.collections import collection_of_fields
from podgpu.agent.pod_labels import LabelFilter
from podgpu.compose.agent import Naming, Options, choose_counters, dcgm_naming
from podgpu.compose.allocations import make_allocations, make_identities
from podgpu.compose.servers import ApiAccess, NoApi
from podgpu.compose.telemetries import open_telemetry
from podgpu.device_selection import parse_selection
from podgpu.doctor.examine import DEADLINE, Question, examine
from podgpu.doctor.findings import Finding, note, ok, wrong
from podgpu.errors import SourceError, UsageError
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.counters import Counter, shipped_counters
from podgpu.web.app import load_protection

if TYPE_CHECKING:
    from podgpu.doctor.probe import Load
    from podgpu.holders import AllocationSource
    from podgpu.model import Device

CONFIG_FILE = "configuration file"
_CONFIGMAP = (
    "see that it is there (kubectl get configmap), and that podgpu's service account may list and watch configmaps in"
    " that namespace"
)


class NodeExamination:
    """Of this node, with the exporter's options. Close it."""

    def __init__(self, options: Options, naming: Naming, kubernetes_said: bool) -> None:
        """`kubernetes_said`: whether -k is wanted was said; if not, pod labels are taken to be. Raises UsageError."""
        self._options = options
        self._naming = naming
        self._kubernetes_said = kubernetes_said
        with naming("devices"):
            self._selection = parse_selection(options["devices"])
        with naming("telemetry"):
            self._telemetry = open_telemetry(options["telemetry"], options)
        self._api = ApiAccess(options["kubeconfig"])

    def close(self) -> None:
        self._api.close()

    def findings(self, of_file: Sequence[Finding], ignored: Sequence[str]) -> list[Finding]:
        """`of_file`: what is wrong with the configuration file. `ignored`: what was said and has no effect, each in a
        sentence. Raises UsageError."""
        options = self._options
        counters, findings = self._counters()
        findings += [*of_file, *self._collections(counters)]
        findings += [note("options", sentence) for sentence in ignored]
        findings += [*_web_config(options["web_config_file"]), *self._pod_labels()]
        with self._naming("allocation"):
            sources, of_sources = self._sources()
        question = Question(
            counters=counters,
            selection=self._selection,
            sources=sources,
            kubelet_required=options["kubernetes"],
            feeds=tuple(self._api.feeds),
            pods=self._api.watched_pods,
            identities=make_identities(options, self._api),
            no_hostname=options["no_hostname"],
            container_usage=options["container_usage"],
            usage_from=options["usage_from"],
            start_load=_load_on if options["probe_switches"] else None,
            proc=options["path_proc"],
            sysfs=options["path_sysfs"],
            environment=dict(os.environ),
        )
        return [*findings, *examine(question, self._telemetry), *of_sources]

    def _counters(self) -> tuple[tuple[Counter, ...], list[Finding]]:
        """A counter file that keeps the exporter from starting is what the doctor is there to say."""
        findings = []
        try:
            with self._naming("collectors"):
                counters = choose_counters(self._options)[0]
        except UsageError as e:
            counters, findings = shipped_counters("default") or (), [wrong("counters", str(e))]
        name = self._options["configmap_data"]
        if name == "none":
            return counters, findings
        with self._naming("configmap_data"):
            try:
                counters = self._api.configmap(name, dcgm_naming(self._options)).read()
                findings.append(ok("counters", f"{len(counters)} from the ConfigMap {name}"))
            except NoApi as e:
                findings.append(wrong("counters", f"-m {name}: {e}"))
            except SourceError as e:
                words = f"-m {name}: {e}; until it can be read those of -f are used"
                findings.append(wrong("counters", words, _CONFIGMAP))
        return counters, findings

    def _collections(self, counters: tuple[Counter, ...]) -> list[Finding]:
        """Whether each has fields of its own, and how often they are read."""
        config = self._options["config"]
        if not config.path:
            return []
        try:
            chosen = collection_of_fields(counters, config.collections)
        except UsageError as e:
            return [wrong(CONFIG_FILE, str(e))]
        own = [
            f"{c.name}: {sum(chosen_by is c for chosen_by in chosen.values())} every {c.every:g} s"
            for c in config.collections
        ]
        every = f"every {self._options['collect_interval']:g} s"
        return [ok(CONFIG_FILE, "; ".join((f"{config.path}: {len(counters) - len(chosen)} fields {every}", *own)))]

    def _pod_labels(self) -> list[Finding]:
        """Opens the watch that the exporter would open; how it fares is judged with the others."""
        LabelFilter(self._options["kubernetes_pod_label_allowlist_regex"])
        if not self._options["kubernetes_enable_pod_labels"]:
            return []
        try:
            self._api.pods()
        except NoApi as e:
            return [wrong("pod labels", f"--kubernetes-enable-pod-labels: {e}")]
        return []

    def _sources(self) -> tuple[tuple[AllocationSource, ...], list[Finding]]:
        """Those the exporter would ask."""
        options = self._options
        asked: dict[str, Any] = {**options, "kubernetes": options["kubernetes"] or not self._kubernetes_said}
        findings = []
        try:
            sources = make_allocations(asked, self._api, self._telemetry)
        except NoApi as e:
            sources, findings = [], [wrong("allocation", f"--allocation {options['allocation']}: {e}")]
        for source in sources:
            if isinstance(source, KubeletAllocation):
                source.client.deadline = DEADLINE * 0.8  # the shorter one: its message says more than the worker's
                if options["kubernetes_enable_dra"] and source.claims is None:
                    findings.append(self._no_claims())
        return tuple(sources), findings

    def _no_claims(self) -> Finding:
        try:
            self._api.check()
        except NoApi as e:
            return wrong("DRA", f"--kubernetes-enable-dra: {e}")
        return wrong(
            "DRA", "--kubernetes-enable-dra: the ResourceSlices cannot be watched", "run it again with --debug"
        )


def _load_on(gpu: Device) -> Load:
    from podgpu.doctor.probe_load import ProbeLoad

    return ProbeLoad(gpu.uuid)


def _web_config(path: str) -> list[Finding]:
    if not path:
        return []
    try:
        load_protection(path)
    except UsageError as e:
        return [wrong("web config", str(e))]
    return [ok("web config", path)]


def autoscaling_findings(kubeconfig: str) -> list[Finding]:
    """Raises UsageError where no API server is known."""
    import asyncio

    from podgpu.compose.cluster import api_config
    from podgpu.doctor.autoscale import examine_autoscaling
    from podgpu.kube.client import ApiClient

    config = api_config(kubeconfig)

    async def examined() -> list[Finding]:
        async with ApiClient(config) as client:
            return await examine_autoscaling(client)

    return asyncio.run(examined())
