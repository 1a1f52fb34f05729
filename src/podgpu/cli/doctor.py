"""`podgpu doctor`: checks this node and prints what to fix."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import click
from click.core import ParameterSource

from podgpu.agent.counter_feeds import counters_in_configmap
from podgpu.agent.lanes import collection_of_fields
from podgpu.cli.config_file import merge_config_file
from podgpu.cli.exporter import check_options, list_ignored_options, parse_host_engine
from podgpu.cli.exporter_options import EXPORTER_OPTIONS, hide, pick_options
from podgpu.cli.node import Options, choose_counters, make_allocations, make_identities, open_telemetry
from podgpu.cli.options import Option, make_command
from podgpu.cli.terminal import print_out, quiet_logs, wants_colour
from podgpu.device_selection import parse_selection
from podgpu.doctor.autoscale import check_autoscaling
from podgpu.doctor.examine import DEADLINE, NodeSettings, examine
from podgpu.doctor.findings import Finding, Level, as_json, as_text, count, note, ok, wrong
from podgpu.errors import SourceError, UsageError
from podgpu.holders import AllocationSource
from podgpu.holders.api import ApiAccess, LabelFilter, NoApi
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.counters import Counter, Naming, shipped_counters
from podgpu.web.app import load_protection

CONFIG_FILE = "configuration file"
_CONFIGMAP = (
    "check that it exists (kubectl get configmap), and that podgpu's service account may list and watch configmaps in"
    " that namespace"
)

_CHANGES = {"kubernetes": {"help": "Check pod labels. Default: true if the kubelet's socket exists."}}
DOCTOR_OPTIONS = (
    *hide(pick_options((option.flag for option in EXPORTER_OPTIONS), _CHANGES)),
    Option(
        "autoscale",
        default="false",
        help="Check autoscaling instead: the value of every podgpu metric that HPAs and ScaledObjects use, or the"
        " reason why there is none. Needs the API server.",
        kind="bool",
    ),
    Option("json", default="false", help="Print the findings as JSON.", kind="bool"),
)


@make_command(
    "doctor",
    DOCTOR_OPTIONS,
    ("podgpu doctor", "check that podgpu can read the GPUs and find their pods"),
    ("podgpu doctor -k --allocation kubelet", "check `podgpu exporter` with these options"),
    ("podgpu doctor --autoscale", "check the GPU metrics of this cluster's HPAs"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Check this node: driver, GPUs, permissions, kubelet, mapping of GPUs to pods.

    Accepts every option and variable of the exporter (see --help-all), and checks whether they work here. The exit
    code is 0 if nothing is wrong, otherwise 1.
    """
    if options["autoscale"]:
        with quiet_logs(options["debug"]):
            return _print(options, check_autoscaling(options["kubeconfig"]))
    kubernetes_is_set = ctx.get_parameter_source("kubernetes") is not ParameterSource.DEFAULT
    options, config_findings = _merge_config_file(ctx, options)
    check_options(options)
    options = parse_host_engine(ctx, options)
    ignored = (*list_ignored_options(ctx), *options["config"].ignored)
    examination = _NodeExamination(options, kubernetes_is_set)
    with closing(examination), quiet_logs(options["debug"]):
        findings = examination.run(config_findings, ignored)
    return _print(options, findings)


def _print(options: dict[str, Any], findings: list[Finding]) -> int:
    print_out((as_json(findings) if options["json"] else as_text(findings, wants_colour())) + "\n")
    return 1 if count(findings, Level.WRONG) else 0


def _merge_config_file(ctx: click.Context, options: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Merges the configuration file. An invalid file becomes a finding, and the other checks run without it."""
    path = options["config_file"]
    try:
        merged = merge_config_file(ctx, options)
    except UsageError as e:
        if not path:
            raise
        return merge_config_file(ctx, {**options, "config_file": ""}), [wrong(CONFIG_FILE, str(e))]
    return merged, []


class _NodeExamination:
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
            container_usage=options["container_usage"],
            usage_from=options["usage_from"],
            proc=options["path_proc"],
            sysfs=options["path_sysfs"],
            environment=dict(os.environ),
        )
        return [*findings, *examine(settings, self._telemetry), *source_findings]

    def _read_counters(self) -> tuple[tuple[Counter, ...], list[Finding]]:
        findings, naming = [], Naming(self._options["dcgm_names"])
        try:
            counters = choose_counters(self._options, naming)[0]
        except UsageError as error:
            counters, findings = shipped_counters("default") or (), [wrong("counters", str(error))]
        name = self._options["configmap_data"]
        if name == "none":
            return counters, findings
        try:
            counters = counters_in_configmap(name, self._api.configmap(name), naming)()
            findings.append(ok("counters", f"{len(counters)} from the ConfigMap {name}"))
        except NoApi as error:
            findings.append(wrong("counters", f"-m {name}: {error}"))
        except SourceError as error:
            text = f"-m {name}: {error}; the counters of -f are used until it can be read"
            findings.append(wrong("counters", text, _CONFIGMAP))
        return counters, findings

    def _check_collections(self, counters: tuple[Counter, ...]) -> list[Finding]:
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
