"""`podgpu enrich`: adds pod labels to an existing dcgm-exporter's metrics.

The result is a file for node_exporter's textfile collector.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

import click

from podgpu.cli.options import is_set, make_command
from podgpu.cli.sources import make_holders, open_exposition, open_telemetry
from podgpu.cli.terminal import stop_on_signal
from podgpu.clock import Clock
from podgpu.errors import SourceError, StartError, UsageError
from podgpu.files import AtomicFile, OutputError
from podgpu.metrics.labels import Policy
from podgpu.metrics.parse import ParsedFamily
from podgpu.node.gpu.remote_exporter import ExpositionSource, FileExposition, parse_exposition
from podgpu.node.gpu.source import CompanionDriver
from podgpu.node.holders.api import ApiAccess
from podgpu.node.holders.reader import AllocationReader
from podgpu.tools.enrich import Enricher
from podgpu.workers import ErrorCounts, Workers

_log = logging.getLogger("podgpu")
_INTERVALS_KEPT = 5
_DEADLINE_SECONDS = 5.0


@make_command(
    "enrich",
    (
        "podgpu enrich --in localhost:9400 --out /var/lib/node_exporter/gpu.prom",
        "add pod labels to the metrics of this node's dcgm-exporter",
    ),
    (
        "podgpu enrich --in /run/dcgm.prom --out /var/lib/node_exporter/gpu.prom",
        "read the metrics from a file",
    ),
    ("podgpu enrich --in localhost:9400 --out gpu.prom --once", "write the file once and exit"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Add pod labels to the metrics of an existing dcgm-exporter, in a file for node_exporter."""
    if not options["in"] or not options["out"]:
        raise UsageError("enrich needs --in URL|PATH and --out FILE.prom")
    source = open_exposition(options["in"], options)
    textfile = AtomicFile(options["out"])
    if textfile.path.suffix != ".prom":
        _log.warning("--out %s: node_exporter reads only files that end in .prom", textfile.path)
    if isinstance(source, FileExposition):
        _check_paths(source.path, str(textfile.path))

    interval = options["interval"]
    if is_set(ctx, "stale_after"):
        stale_after = options["stale_after"]
    else:
        stale_after = None if options["once"] else _INTERVALS_KEPT * interval

    policy = Policy(
        old_namespace=options["use_old_namespace"], pod_uid=options["kubernetes_enable_pod_uid"]
    )

    with closing(ApiAccess(options["kubeconfig"])) as api, closing(Workers()) as workers:
        driver = open_telemetry("nvml", options)
        errors = ErrorCounts()
        reader = AllocationReader(make_holders(options, api, driver), workers, errors, Clock())
        enricher = Enricher(
            partial(_fetch, source, workers),
            reader.read,
            textfile,
            errors,
            policy,
            stale_after=stale_after,
            device_name_ids=options["kubernetes_gpu_id_type"] == "device-name",
            companion=CompanionDriver(driver),
        )
        if options["once"]:
            _run_once(enricher)
        else:
            _run(enricher, interval)


def _fetch(source: ExpositionSource, workers: Workers) -> Sequence[ParsedFamily]:
    """Reads the metrics in a worker with a deadline, because a read may hang."""
    read = {"exporter": lambda: parse_exposition(source.fetch(), source.shown)}
    result = workers.run(read, _DEADLINE_SECONDS)["exporter"]
    if result.value is None:
        raise result.error or SourceError("bug", "no metrics and no reason")
    return result.value


def _check_paths(source: str, out: str) -> None:
    if os.path.realpath(source) == os.path.realpath(out):
        raise UsageError(
            f"--in and --out are the same file, {out}: podgpu would read its own output"
        )

    source_folder = os.path.realpath(os.path.dirname(source))
    out_folder = os.path.realpath(os.path.dirname(out))
    if source.endswith(".prom") and source_folder == out_folder:
        _log.warning(
            "--in and --out are in the same directory: node_exporter will export every metric twice"
        )


def _run_once(enricher: Enricher) -> None:
    try:
        sources = enricher.update_file()
    except (SourceError, OutputError) as e:
        raise StartError(str(e)) from e
    if sources and not any(source.up for source in sources):
        reasons = "; ".join(f"{source.name}: {source.message}" for source in sources)
        raise StartError(
            "the file was written without pod labels, "
            f"because no source of pod labels could be read: {reasons}"
        )


def _run(enricher: Enricher, interval: float) -> None:
    """Updates the file until SIGTERM or SIGINT. Keeps the file at the end."""
    stopping = stop_on_signal()
    due = time.monotonic()
    while not stopping.is_set():
        # The error is already logged; the next update tries again.
        with suppress(SourceError, OutputError):
            enricher.update_file()
        due = max(due + interval, time.monotonic())
        stopping.wait(due - time.monotonic())
