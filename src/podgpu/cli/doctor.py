"""`podgpu doctor`: checks this node and prints what to fix."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from podgpu.cli.exporter import list_ignored_options, lock_directory, resolve_options
from podgpu.cli.options import (
    EXPORTER_OPTIONS,
    Options,
    is_set,
    make_command,
    normalize_arguments,
)
from podgpu.cli.sources import (
    choose_counters,
    make_allocations,
    make_identities,
    node_name,
    open_telemetry,
)
from podgpu.cli.terminal import print_out, quiet_logs, wants_colour
from podgpu.errors import SourceError, UsageError, one_line, plural
from podgpu.kube.config import NoApi
from podgpu.node.agent.device_selection import parse_selection
from podgpu.node.agent.schedule import CounterSpecs, collection_of_fields, counters_in_configmap
from podgpu.node.gpu.source import Telemetry
from podgpu.node.holders import AllocationSource
from podgpu.node.holders.api import ApiAccess, LabelFilter
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.tools.doctor import checks
from podgpu.tools.doctor.checks import Finding, Level, note, ok, wrong
from podgpu.tools.doctor.running_exporter import RunningExporter, find_exporter
from podgpu.tools.doctor.writer_checks import check_writers
from podgpu.web.app import load_protection
from podgpu.workers import Workers
from podgpu.writers.write_option import parse_write

_DEADLINE = 5.0
_POD_VARIABLE = "KUBERNETES_SERVICE_HOST"
"""The kubelet sets it in every container. On other machines, several exporters may run."""
_CONFIGMAP = (
    "check that it exists (kubectl get configmap), "
    "and that podgpu's service account may list and watch configmaps in that namespace"
)


@make_command(
    "doctor",
    ("podgpu doctor", "check that podgpu can read the GPUs and find their pods"),
    ("podgpu doctor -k --allocation kubelet", "check `podgpu exporter` with these options"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Check this node: driver, GPUs, permissions, kubelet, mapping of GPUs to pods.

    Accepts every option and variable of the exporter (see --help-all), and checks whether they work
    here. In a pod of the exporter, the exporter's own arguments are the defaults. The exit code is
    0 if nothing is wrong, otherwise 1.
    """
    findings = []
    running = None
    if _POD_VARIABLE in os.environ:
        running = find_exporter(options["path_proc"])
    if running is not None:
        exporter_ctx = ctx.command.make_context(
            ctx.info_name, normalize_arguments(running.arguments), parent=ctx.parent
        )
        findings.append(_describe_running(exporter_ctx, running))
        _copy_flags(ctx, exporter_ctx)
        ctx = exporter_ctx
        options = ctx.params

    kubernetes_is_set = is_set(ctx, "kubernetes")
    options = resolve_options(ctx, options)

    # Raises UsageError, as in the exporter.
    load_protection(options["web_config_file"])
    # By default, doctor checks the kubelet too, although the exporter does not read it.
    options["check_kubernetes"] = options["kubernetes"] or not kubernetes_is_set
    ignored = list_ignored_options(ctx, options["config"])

    findings += [note("options", text) for text in ignored]
    with quiet_logs(options["debug"]):
        findings += examine_node(options)

    text = as_json(findings) if options["json"] else as_text(findings, wants_colour())
    print_out(text + "\n")
    if _count(findings, Level.WRONG):
        return 1
    return 0


def _describe_running(ctx: click.Context, running: RunningExporter) -> Finding:
    """Names the options of the exporter without their values, which may be secret."""
    flags = []
    for option in EXPORTER_OPTIONS:
        if ctx.get_parameter_source(option.parameter) is ParameterSource.COMMANDLINE:
            flags.append(f"--{option.flag}")
    text = f"those of the exporter that runs here (pid {running.pid})"
    if flags:
        text += f": {' '.join(flags)}"
    return ok("options", text)


def _copy_flags(ctx: click.Context, exporter_ctx: click.Context) -> None:
    """Lets doctor's own flags override the exporter's."""
    for name, value in ctx.params.items():
        source = ctx.get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE:
            exporter_ctx.params[name] = value
            exporter_ctx.set_parameter_source(name, source)


def examine_node(
    options: Options,
    telemetry: Telemetry | None = None,
    deadline: float = _DEADLINE,
    pause: Callable[[float], object] = time.sleep,
    dev: str = "/dev",
) -> list[Finding]:
    """Checks this node with the options of the exporter.

    Errors that would stop the exporter become findings.
    """
    counters, _ = choose_counters(options)
    # These two raise UsageError for options that would stop the exporter.
    collection_of_fields(counters, options["config"].collections)
    LabelFilter(options["kubernetes_pod_label_allowlist_regex"])
    selection = parse_selection(options["devices"])
    telemetry = telemetry or open_telemetry(options["telemetry"], options)
    proc = options["path_proc"]
    usage_from = options["usage_from"]

    with ExitStack() as stack:
        workers = Workers()
        stack.callback(workers.close)
        api = ApiAccess(options["kubeconfig"])
        stack.callback(api.close)
        # In a worker, because a driver that hangs must not keep doctor from ending.
        release = partial(telemetry.release, deadline / 2)
        stack.callback(workers.run, {"release": release}, deadline)

        counters, findings = _read_configmap(options, api, counters)
        sources, source_findings = _make_sources(options, api, telemetry, deadline)
        readings = checks.read_gpus(telemetry, counters, workers, deadline, pause)
        findings += source_findings
        findings += checks.check_gpus(readings, telemetry, counters, proc, options["path_sysfs"])
        has_pods = os.path.exists(options["pod_resources_kubelet_socket"])
        findings += checks.list_repairs(readings, node_name(), has_pods)
        if readings.is_complete:
            try:
                selection.check(readings.devices)
            except UsageError as error:
                findings.append(wrong("devices", str(error)))

        findings += _check_process(options, telemetry, dev)
        gpus = [device for device in readings.devices if not device.is_instance]
        readable = [gpu for gpu in gpus if gpu not in readings.failures]
        if usage_from != "none" and readable:
            findings += checks.check_usage(telemetry, readable, usage_from, workers, deadline)

        findings += checks.check_watches(api.feeds, deadline)
        identities = make_identities(options, api)
        findings += checks.check_holders(
            sources,
            readings,
            selection,
            identities,
            options["kubernetes"],
            api,
            workers,
            deadline,
        )

        writers = parse_write(options["write"])
        directory = lock_directory(options)
        findings += check_writers(writers, api, directory, options["path_nvsentinel"], deadline)
        findings.append(checks.check_host_name(options["no_hostname"]))
        return findings


def _check_process(options: Options, telemetry: Telemetry, dev: str) -> Iterator[Finding]:
    """Checks what this process may read."""
    proc = options["path_proc"]
    usage_from = options["usage_from"]
    yield from checks.check_privileges(proc, usage_from)
    if telemetry.name == "nvml":
        yield from checks.check_device_files(dev)
    if telemetry.name == checks.SIMULATED or usage_from == "none":
        return

    yield checks.check_pid_namespace(proc)
    if options["path_kmsg"] != "none":
        yield checks.check_kernel_log(options["path_kmsg"])


def _read_configmap(
    options: Options, api: ApiAccess, counters: CounterSpecs
) -> tuple[CounterSpecs, list[Finding]]:
    name = options["configmap_data"]
    if name == "none":
        return counters, []

    try:
        counters = counters_in_configmap(name, api.watch_configmap(name), options["dcgm_names"])()
    except NoApi as error:
        return counters, [wrong("counters", f"-m {name}: {error}")]
    except SourceError as error:
        text = f"-m {name}: {error}; the counters of -f are used until it can be read"
        return counters, [wrong("counters", text, _CONFIGMAP)]
    return counters, [ok("counters", f"{len(counters)} from the ConfigMap {name}")]


def _make_sources(
    options: Options, api: ApiAccess, telemetry: Telemetry, deadline: float
) -> tuple[list[AllocationSource], list[Finding]]:
    """Opens the allocation sources and watches that the exporter would open."""
    findings = []
    sources = []

    @contextmanager
    def reporting(subject: str, option: str) -> Iterator[None]:
        try:
            yield
        except NoApi as error:
            findings.append(wrong(subject, f"--{option}: {error}"))

    if options["kubernetes_enable_pod_labels"]:
        with reporting("pod labels", "kubernetes-enable-pod-labels"):
            api.watch_pods()
    with reporting("allocation", f"allocation {options['allocation']}"):
        checked = {**options, "kubernetes": options["check_kubernetes"]}
        sources = make_allocations(checked, api, telemetry)

    for source in sources:
        if isinstance(source, KubeletAllocation):
            # Ends before the worker's deadline, because its error message is clearer.
            source.deadline = 0.8 * deadline
            if options["kubernetes_enable_dra"] and source.claims is None:
                with reporting("DRA", "kubernetes-enable-dra"):
                    api.check()
    return sources, findings


def _count(findings: Sequence[Finding], level: Level) -> int:
    return sum(finding.level is level for finding in findings)


_STYLES = {Level.OK: ("ok", "32"), Level.NOTE: ("note", "33"), Level.WRONG: ("WRONG", "1;31")}
"""Level -> word and colour."""


def as_text(findings: Sequence[Finding], colour: bool = False) -> str:
    """Returns one line per finding, followed by its advice, and a summary at the end."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        word, code = _STYLES[finding.level]
        start = f"{word:<5}"
        if colour:
            start = f"\x1b[{code}m{start}\x1b[0m"
        lines.append(f"{start} {finding.subject:<{width}}  {one_line(finding.text)}")
        if finding.advice:
            lines.append(f"{'':{width + 8}}→ {one_line(finding.advice)}")

    problems = _count(findings, Level.WRONG)
    notes = _count(findings, Level.NOTE)
    if not problems and not notes:
        summary = "no problems found"
    else:
        summary = plural(problems, "problem") if problems else "no problems"
        if notes:
            summary += f", {plural(notes, 'note')}"
    lines += ["", summary]
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    report = {
        "wrong": _count(findings, Level.WRONG),
        "notes": _count(findings, Level.NOTE),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=2, ensure_ascii=False)
