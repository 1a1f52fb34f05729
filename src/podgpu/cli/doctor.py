"""`podgpu doctor`: checks this node and prints what to fix."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from podgpu.agent.counters import collection_of_fields, counters_in_configmap
from podgpu.cli.exporter import list_ignored_options, resolve_options
from podgpu.cli.node import Options, choose_counters, make_allocations, make_identities, open_telemetry
from podgpu.cli.options import EXPORTER_OPTIONS, is_set, make_command, options_of
from podgpu.cli.terminal import print_out, quiet_logs, wants_colour
from podgpu.device_selection import parse_selection
from podgpu.doctor.findings import Finding, Level, as_json, as_text, count, note, ok, wrong
from podgpu.doctor.holders import check_holders, check_watches
from podgpu.doctor.node import (
    SIMULATED,
    GpuReadings,
    check_device_files,
    check_gpus,
    check_host_name,
    check_pid_namespace,
    check_privileges,
    check_usage,
    read_gpus,
)
from podgpu.errors import SourceError, UsageError
from podgpu.gpu.source import Telemetry
from podgpu.holders import AllocationSource
from podgpu.holders.api import ApiAccess, LabelFilter, NoApi
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.counters import CounterSpec
from podgpu.web.app import load_protection
from podgpu.workers import Workers

DEADLINE = 5.0
_CONFIGMAP = (
    "check that it exists (kubectl get configmap), and that podgpu's service account may list and watch configmaps in"
    " that namespace"
)


@make_command(
    "doctor",
    options_of("doctor", (option.flag for option in EXPORTER_OPTIONS), hidden=True),
    ("podgpu doctor", "check that podgpu can read the GPUs and find their pods"),
    ("podgpu doctor -k --allocation kubelet", "check `podgpu exporter` with these options"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Check this node: driver, GPUs, permissions, kubelet, mapping of GPUs to pods.

    Accepts every option and variable of the exporter (see --help-all), and checks whether they work here. The exit
    code is 0 if nothing is wrong, otherwise 1.
    """
    kubernetes_is_set = is_set(ctx, "kubernetes")
    options = resolve_options(ctx, options)
    load_protection(options["web_config_file"])
    ignored = list_ignored_options(ctx, options["config"])
    examination = NodeExamination(options, options["kubernetes"] or not kubernetes_is_set)
    with quiet_logs(options["debug"]):
        findings = [*(note("options", text) for text in ignored), *examination.run()]
    print_out((as_json(findings) if options["json"] else as_text(findings, wants_colour())) + "\n")
    return 1 if count(findings, Level.WRONG) else 0


class NodeExamination:
    """Examines this node with the exporter's options. Errors that would stop the exporter are reported as findings."""

    def __init__(self, options: Options, kubernetes: bool, telemetry: Telemetry | None = None) -> None:
        """If `kubernetes` is set, the allocation sources are checked."""
        self._options = options
        self._kubernetes = kubernetes
        self._selection = parse_selection(options["devices"])
        self._counters = choose_counters(options, options["dcgm_names"])[0]
        collection_of_fields(self._counters, options["config"].collections)
        LabelFilter(options["kubernetes_pod_label_allowlist_regex"])
        self._telemetry = telemetry or open_telemetry(options["telemetry"], options)
        self._api = ApiAccess(options["kubeconfig"])
        self._workers = Workers()

    def run(
        self, deadline: float = DEADLINE, pause: Callable[[float], object] = time.sleep, dev: str = "/dev"
    ) -> list[Finding]:
        options, telemetry, workers = self._options, self._telemetry, self._workers
        counters, findings = self._read_configmap()
        sources, source_findings = self._make_sources(deadline)
        findings += source_findings
        try:
            readings = read_gpus(telemetry, counters, workers, deadline, pause)
            findings += check_gpus(readings, telemetry, counters, options["path_proc"], options["path_sysfs"])
            findings += self._check_selection(readings) + self._check_host(dev)
            whole = [
                device for device in readings.devices if not device.is_instance and device not in readings.failures
            ]
            if options["usage_from"] != "none" and whole:
                findings += check_usage(telemetry, whole, options["usage_from"], workers, deadline)
            findings += check_watches(self._api.feeds, deadline)
            identities, required = make_identities(options, self._api), options["kubernetes"]
            findings += check_holders(
                sources, readings, self._selection, identities, required, self._api, workers, deadline
            )
            return [*findings, check_host_name(options["no_hostname"])]
        finally:
            workers.run({"release": lambda: telemetry.release(deadline / 2)}, deadline)
            for source in sources:
                source.close()
            self._api.close()
            workers.close()

    def _read_configmap(self) -> tuple[tuple[CounterSpec, ...], list[Finding]]:
        name = self._options["configmap_data"]
        if name == "none":
            return self._counters, []
        try:
            counters = counters_in_configmap(name, self._api.configmap(name), self._options["dcgm_names"])()
        except NoApi as error:
            return self._counters, [wrong("counters", f"-m {name}: {error}")]
        except SourceError as error:
            text = f"-m {name}: {error}; the counters of -f are used until it can be read"
            return self._counters, [wrong("counters", text, _CONFIGMAP)]
        return counters, [ok("counters", f"{len(counters)} from the ConfigMap {name}")]

    def _make_sources(self, deadline: float) -> tuple[list[AllocationSource], list[Finding]]:
        """Opens the sources and watches that the exporter would open."""
        options, findings = self._options, []
        if options["kubernetes_enable_pod_labels"]:
            try:
                self._api.pods()
            except NoApi as error:
                findings.append(wrong("pod labels", f"--kubernetes-enable-pod-labels: {error}"))
        try:
            sources = make_allocations({**options, "kubernetes": self._kubernetes}, self._api, self._telemetry)
        except NoApi as error:
            return [], [*findings, wrong("allocation", f"--allocation {options['allocation']}: {error}")]
        for source in sources:
            if isinstance(source, KubeletAllocation):
                source.deadline = 0.8 * deadline  # the API client's own message is clearer than the worker's
                if options["kubernetes_enable_dra"] and source.claims is None:
                    findings.append(self._explain_no_claims())
        return sources, findings

    def _explain_no_claims(self) -> Finding:
        try:
            self._api.check()
        except NoApi as error:
            return wrong("DRA", f"--kubernetes-enable-dra: {error}")
        return wrong("DRA", "--kubernetes-enable-dra: cannot watch ResourceSlices", "run it again with --debug")

    def _check_selection(self, readings: GpuReadings) -> list[Finding]:
        try:
            if readings.is_complete:
                self._selection.check(readings.devices)
        except UsageError as error:
            return [wrong("devices", str(error))]
        return []

    def _check_host(self, dev: str) -> list[Finding]:
        options, name = self._options, self._telemetry.name
        findings = check_privileges(options["path_proc"], options["usage_from"] == "exact")
        if name == "nvml":
            findings += check_device_files(dev)
        if name != SIMULATED and options["usage_from"] != "none":
            findings.append(check_pid_namespace(options["path_proc"]))
        return findings
