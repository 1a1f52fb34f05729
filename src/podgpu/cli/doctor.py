"""`podgpu doctor` checks this node and says what is right, what is wrong and what to do."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

from podgpu.allocation.kubelet import KubeletAllocation
from podgpu.allocation.source import AllocationSource
from podgpu.catalog.counters import Counter, shipped_counters
from podgpu.cli.config_file import of_file_without_effect, with_config_file
from podgpu.cli.exporter import check_options, with_host_engine, without_effect
from podgpu.cli.help import podgpu_command
from podgpu.cli.option_table import EXPORTER_OPTIONS, exporter_options
from podgpu.cli.params import Option, naming_variable, with_options
from podgpu.compose.agent import choose_counters, dcgm_naming
from podgpu.compose.allocations import Surroundings, make_allocations, make_identities
from podgpu.compose.process import configure_logging, print_out
from podgpu.compose.servers import ApiAccess, NoApi
from podgpu.compose.telemetries import open_telemetry
from podgpu.configuration.collections import collection_of_fields
from podgpu.configuration.pod_labels import LabelFilter
from podgpu.device_selection import Selection, parse_selection
from podgpu.doctor.examine import DEADLINE, Question, examine
from podgpu.doctor.findings import Finding, Level, as_json, as_text, count, note, ok, wrong
from podgpu.doctor.probe import Load
from podgpu.errors import SourceError, UsageError
from podgpu.model import Device
from podgpu.telemetry.source import Telemetry

_OTHERWISE = {"kubernetes": {"help": "Pod labels are wanted. Default: the kubelet is asked if its socket exists."}}

_CONFIGMAP = (
    "see that it is there (kubectl get configmap), and that podgpu's service account may list and watch configmaps in"
    " that namespace"
)

DOCTOR_OPTIONS = (
    *exporter_options((option.flag for option in EXPORTER_OPTIONS), _OTHERWISE),
    Option(
        "probe-switches",
        default="false",
        help="Measure whether a GPU's busy register is right (--usage-from exact relies on it): two loads of its"
        " own share one idle GPU of every architecture for half a minute. Needs CAP_SYS_ADMIN, and PyTorch or"
        " cuda-python.",
        kind="bool",
        ours=True,
    ),
    Option(
        "autoscale",
        default="false",
        help="Look at the cluster instead, as its autoscalers see it: what every HPA and ScaledObject that asks for a"
        " metric of podgpu's would be told, and why not. Asks the API server.",
        kind="bool",
        ours=True,
    ),
    Option("json", default="false", help="Print the findings as JSON.", kind="bool", ours=True),
)


@podgpu_command(
    "doctor",
    ("podgpu doctor", "can podgpu read the GPUs here and name their pods? If not: what to do"),
    ("podgpu doctor -k --allocation kubelet", "check what `podgpu exporter` would do with these options"),
    ("podgpu doctor --autoscale", "what would this cluster's HPAs be told of GPUs, and why not?"),
)
@with_options(DOCTOR_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Check this node with the exporter's own options and variables: driver, GPUs, permissions, kubelet, mapping.

    Takes every option of the exporter, and says whether the exporter can do here what they ask for. The exit code is 0
    when nothing is wrong, 1 when something is.
    """
    if options["autoscale"]:
        with _logs(options["debug"]):
            return _told(options, _autoscaling(options["kubeconfig"]))
    kubernetes_said = ctx.get_parameter_source("kubernetes") is not ParameterSource.DEFAULT
    options, of_file = _with_config_file(ctx, options)
    check_options(ctx, options)
    with naming_variable(ctx, "devices"):
        selection = parse_selection(options["devices"])
    options = with_host_engine(ctx, options)
    with naming_variable(ctx, "telemetry"):
        telemetry = open_telemetry(options["telemetry"], options)
    api = ApiAccess(options["kubeconfig"])
    try:
        with _logs(options["debug"]):
            counters, findings = _counters(ctx, options, api)
            findings += [*of_file, *_collections(options, counters)]
            ignored = (*without_effect(ctx), *of_file_without_effect(options))
            findings += [note("options", sentence) for sentence in ignored]
            findings += [*_web_config(options["web_config_file"]), *_pod_labels(options, api)]
            with naming_variable(ctx, "allocation"):
                sources, of_sources = _sources(options, kubernetes_said, api, telemetry)
            question = _question(options, counters, selection, sources, api)
            findings += [*examine(question, telemetry), *of_sources]
    finally:
        api.close()
    return _told(options, findings)


def _told(options: dict[str, Any], findings: list[Finding]) -> int:
    print_out((as_json(findings) if options["json"] else as_text(findings, _wants_colour())) + "\n")
    return 1 if count(findings, Level.WRONG) else 0


def _autoscaling(kubeconfig: str) -> list[Finding]:
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


_CONFIG_FILE = "configuration file"


def _with_config_file(ctx: click.Context, options: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """What keeps the exporter from starting, the doctor is there to say; the rest is judged without the file."""
    path = options["config_file"]
    try:
        merged = with_config_file(ctx, options)
    except UsageError as e:
        if not path:
            raise
        return with_config_file(ctx, {**options, "config_file": ""}), [wrong(_CONFIG_FILE, str(e))]
    return merged, []


def _collections(options: dict[str, Any], counters: tuple[Counter, ...]) -> list[Finding]:
    """Whether each has fields of its own, and how often they are read."""
    config = options["config"]
    if not config.path:
        return []
    try:
        chosen = collection_of_fields(counters, config.collections)
    except UsageError as e:
        return [wrong(_CONFIG_FILE, str(e))]
    own = [
        f"{c.name}: {sum(chosen_by is c for chosen_by in chosen.values())} every {c.every:g} s"
        for c in config.collections
    ]
    every = f"every {options['collect_interval']:g} s"
    return [ok(_CONFIG_FILE, "; ".join((f"{config.path}: {len(counters) - len(chosen)} fields {every}", *own)))]


def _sources(
    options: dict[str, Any], kubernetes_said: bool, api: ApiAccess, telemetry: Telemetry
) -> tuple[tuple[AllocationSource, ...], list[Finding]]:
    """Those the exporter would ask. Without -k said, pod labels are taken to be wanted."""
    asked = {**options, "kubernetes": options["kubernetes"] or not kubernetes_said}
    findings = []
    try:
        sources = make_allocations(options["allocation"], Surroundings(asked, api, telemetry))
    except NoApi as e:
        sources, findings = [], [wrong("allocation", f"--allocation {options['allocation']}: {e}")]
    for source in sources:
        if isinstance(source, KubeletAllocation):
            source.client.deadline = DEADLINE * 0.8  # the shorter one: its message says more than the worker's
            if options["kubernetes_enable_dra"] and source.claims is None:
                findings.append(_no_claims(api))
    return tuple(sources), findings


def _no_claims(api: ApiAccess) -> Finding:
    try:
        api.check()
    except NoApi as e:
        return wrong("DRA", f"--kubernetes-enable-dra: {e}")
    return wrong("DRA", "--kubernetes-enable-dra: the ResourceSlices cannot be watched", "run it again with --debug")


def _question(
    options: dict[str, Any],
    counters: tuple[Counter, ...],
    selection: Selection,
    sources: tuple[AllocationSource, ...],
    api: ApiAccess,
) -> Question:
    return Question(
        counters=counters,
        selection=selection,
        sources=sources,
        kubelet_required=options["kubernetes"],
        feeds=tuple(api.feeds),
        pods=api.watched_pods,
        identities=make_identities(options, api),
        no_hostname=options["no_hostname"],
        container_usage=options["container_usage"],
        usage_from=options["usage_from"],
        start_load=_load_on if options["probe_switches"] else None,
        proc=options["path_proc"],
        sysfs=options["path_sysfs"],
        environment=dict(os.environ),
    )


def _load_on(gpu: Device) -> Load:
    from podgpu.doctor.probe_load import ProbeLoad

    return ProbeLoad(gpu.uuid)


def _counters(ctx: click.Context, options: dict[str, Any], api: ApiAccess) -> tuple[tuple[Counter, ...], list[Finding]]:
    """A counter file that keeps the exporter from starting is what the doctor is there to say."""
    findings = []
    try:
        with naming_variable(ctx, "collectors"):
            counters = choose_counters(options)[0]
    except UsageError as e:
        counters, findings = shipped_counters("default") or (), [wrong("counters", str(e))]
    name = options["configmap_data"]
    if name == "none":
        return counters, findings
    with naming_variable(ctx, "configmap_data"):
        try:
            counters = api.configmap(name, dcgm_naming(options)).read()
            findings.append(ok("counters", f"{len(counters)} from the ConfigMap {name}"))
        except NoApi as e:
            findings.append(wrong("counters", f"-m {name}: {e}"))
        except SourceError as e:
            findings.append(wrong("counters", f"-m {name}: {e}; until it can be read those of -f are used", _CONFIGMAP))
    return counters, findings


def _pod_labels(options: dict[str, Any], api: ApiAccess) -> list[Finding]:
    """Opens the watch that the exporter would open; how it fares is judged with the others."""
    LabelFilter(options["kubernetes_pod_label_allowlist_regex"])
    if not options["kubernetes_enable_pod_labels"]:
        return []
    try:
        api.pods()
    except NoApi as e:
        return [wrong("pod labels", f"--kubernetes-enable-pod-labels: {e}")]
    return []


def _web_config(path: str) -> list[Finding]:
    if not path:
        return []
    from podgpu.serve.protection import protect

    try:
        protect(path).close()
    except UsageError as e:
        return [wrong("web config", str(e))]
    return [ok("web config", path)]


@contextmanager
def _logs(debug: bool) -> Iterator[None]:
    """What the exporter would log, the findings say; --debug shows both."""
    before = logging.root.manager.disable
    if debug:
        configure_logging("text", debug)
    else:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
