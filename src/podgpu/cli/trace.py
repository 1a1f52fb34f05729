"""`podgpu trace`: records the context switches of one GPU for ui.perfetto.dev.

The trace has the Trace Event Format. It shows a container as a process, and its processes as
threads with slices named `run` and `wait`. A `run (cut)` ended because its time slice ended. GPUs
and MIG instances are also shown as processes, with slices named `switch`, the counter `busy`, and
instant events for XIDs. Times are microseconds since the start of the recording.
"""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Event
from typing import Any, NamedTuple

import click
import msgspec

from podgpu import __version__
from podgpu.cli.kubectl_exec import Kubectl, list_exporters
from podgpu.cli.options import Options, is_kubectl_plugin, make_command
from podgpu.cli.sources import make_identities, open_telemetry, simulated_driver
from podgpu.cli.terminal import print_out, quiet_logs, stop_on_signal
from podgpu.errors import SourceError, StartError, UsageError, few_of
from podgpu.files import AtomicFile
from podgpu.metrics.fields import CLOCK_EVENTS_FIELD, clock_events_in_words, fields
from podgpu.model import HIDDEN_PID, Device
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.gpu.nvml.switch_attribution import (
    KERNEL_PID,
    MAX_SWITCH_NS,
    BusySample,
    Period,
    Residency,
    SwitchLogError,
    estimate_without_samples,
)
from podgpu.node.gpu.nvml.switch_waiting import WaitEstimator
from podgpu.node.holders.api import ApiAccess
from podgpu.node.usage.containers import ContainerFinder, require_host_pid_namespace

_STEP_SECONDS = 0.5
_STANDARD_OUTPUT = "-"
_MORE_SECONDS = 60.0  # to start podgpu in a pod, and to copy the trace
TraceEvent = dict[str, Any]


class Track(NamedTuple):
    container: str  # name of the container, or of the GPU
    process: str


@make_command(
    "trace",
    (
        "podgpu trace --gpu 0 --seconds 10 -o trace.json",
        "record GPU 0, then open the file in ui.perfetto.dev",
    ),
    ("podgpu trace --node gpu-7 --gpu 0", "the same from a machine with kubectl"),
    ("podgpu trace --gpu 4 --telemetry simulated", "try it without a GPU"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Record when each container ran on a GPU and when it waited for the GPU, as a trace for
    ui.perfetto.dev.

    Needs root on the GPU's node and driver 550 or later. Containers are not restarted or changed.
    Ctrl-C ends the recording early.

    With --node, uses kubectl and its current context. You need permission to list pods and to run
    commands in podgpu's namespace (`pods/exec`). The exporter needs root and SYS_ADMIN there.
    """
    if options["context"] and not options["node"]:
        raise UsageError("--context needs --node")
    if is_kubectl_plugin(ctx) and not options["node"]:
        raise UsageError("--node is missing: name the node whose GPU is recorded")

    out = None
    if options["out"] != _STANDARD_OUTPUT:
        out = _open_file(options["out"])
    if options["node"]:
        # The command in the pod prints the summary.
        _write_trace(out, _record_on_node(options))
        return

    with quiet_logs(), _with_simulated_files(options) as paths:
        telemetry = open_telemetry(options["telemetry"], {**paths, "usage_from": "exact"})
        if not isinstance(telemetry, NvmlTelemetry):
            text = f"--telemetry {options['telemetry']}: podgpu trace needs nvml or simulated"
            raise UsageError(text)
        require_host_pid_namespace(paths["path_proc"])

        seconds = options["seconds"]
        try:
            gpu = _find_gpu(telemetry, options["gpu"])
            recording = Recording(telemetry, gpu, paths)
            text = f"podgpu: recording GPU {gpu.index} for {seconds} s (Ctrl-C ends it)"
            click.echo(text, err=True)
            failure = recording.run(seconds, stop_on_signal())
        finally:
            telemetry.release(1.0)

    _write_trace(out, msgspec.json.encode(recording.make_trace()))
    text = f"podgpu: {options['out']}: {recording.summarize()}; open it in https://ui.perfetto.dev"
    click.echo(text, err=True)
    if failure:
        raise StartError(f"the recording ended early: {failure}")


def _open_file(path: str) -> AtomicFile:
    """Raises UsageError if the file cannot be written, before the recording starts."""
    out = AtomicFile(path, option="-o")
    try:
        TemporaryFile(dir=out.path.parent).close()
    except OSError as error:
        text = f"-o {out.path}: the directory cannot be written ({error.strerror})"
        raise UsageError(text) from error
    return out


def _write_trace(out: AtomicFile | None, trace: bytes) -> None:
    """Without a file, prints the trace to standard output."""
    if out is None:
        print_out(trace)
        return

    if out.path.suffix == ".gz":
        trace = gzip.compress(trace)
    out.write(trace)


def _record_on_node(options: Options) -> bytes:
    """Records in the pod of the node's exporter. Returns the trace."""
    context = options["context"]
    kubectl = Kubectl("trace", ("--context", context) if context else ())
    pod = list_exporters(kubectl, options["node"])[0]  # each of them sees all GPUs

    seconds = options["seconds"]
    words = ["podgpu", "trace", "--gpu", options["gpu"], "--seconds", str(seconds)]
    words += ["--telemetry", options["telemetry"], "--out", _STANDARD_OUTPUT]
    trace = pod.run(kubectl, *words, seconds=seconds + _MORE_SECONDS, shows_messages=True)
    return trace.encode()


@contextmanager
def _with_simulated_files(options: Options) -> Iterator[Options]:
    """If the driver is simulated, creates its containers' /proc and /var/log.

    Yields `options` with the paths.
    """
    name, _, argument = options["telemetry"].partition(":")
    if name != "simulated":
        yield options
        return
    from podgpu.labs.simulate.simulated_node import create_host_files, tenants

    with TemporaryDirectory() as folder:
        create_host_files(Path(folder), tenants(simulated_driver(argument)))
        yield {**options, "path_proc": f"{folder}/proc", "path_varlog": folder}


def _find_gpu(telemetry: NvmlTelemetry, wanted: str) -> Device:
    inventory = telemetry.inventory()
    for gpu in inventory.gpus:
        if wanted in (str(gpu.index), gpu.uuid):
            return gpu

    if wanted.isdecimal() and int(wanted) in inventory.unreachable:
        raise StartError(f"GPU {wanted} cannot be read: {inventory.unreachable[int(wanted)]}")

    present = few_of(gpu.index for gpu in inventory.gpus)
    raise UsageError(f"--gpu {wanted}: this node has no such GPU; it has {present}")


class Recording:
    """Reads the context-switch log, busy samples, XIDs and clock events of one GPU."""

    def __init__(self, telemetry: NvmlTelemetry, gpu: Device, paths: Options) -> None:
        """Opens the log. Raises StartError if this fails.

        `paths`: the options `path_proc` and `path_varlog`.
        """
        self._telemetry = telemetry
        self._gpu = gpu
        self._finder = ContainerFinder(paths["path_proc"], finds_users=True)
        self._identities = make_identities(paths, ApiAccess(""))
        self._tracks = {
            HIDDEN_PID: Track("processes of other users (visible with CAP_SYS_ADMIN)", "all"),
            KERNEL_PID: Track("driver", "driver"),
        }
        self._engines: dict[str, EngineTrace] = {}
        self._clock_events = ""

        if any(process.mps for process in telemetry.processes(gpu)):
            raise StartError(
                f"GPU {gpu.index} is shared by MPS: "
                "all clients use one context, which is never switched"
            )

        # Starts the first window. Its end is the next call, in `_read`.
        telemetry.usage(gpu)
        try:
            self._listener = telemetry.open_switch_log(gpu)
        except SwitchLogError as error:
            advice = "; run podgpu trace as root" if os.geteuid() else ""
            text = f"the context switches of GPU {gpu.index} cannot be read: {error}{advice}"
            raise StartError(text) from error

        self._began_at = time.time()
        self._elapsed = 0.0

    def run(self, seconds: float, stopping: Event) -> str:
        """Records until the time is over or `stopping` is set.

        Returns an error message, or "" after success.
        """
        try:
            with closing(self._listener):
                while self._elapsed < seconds and not stopping.is_set():
                    stopping.wait(min(_STEP_SECONDS, seconds - self._elapsed))
                    self._read()
        except SourceError as error:
            return str(error)
        return ""

    def make_trace(self) -> dict[str, Any]:
        detected: dict[str, float] = {}
        assumed: dict[str, float] = {}
        for engine in self._engines.values():
            slices = detected if engine.estimator.is_slice_detected else assumed
            slices[engine.name] = engine.estimator.slice / 1e6

        began = datetime.fromtimestamp(self._began_at, UTC)
        about = {
            "recorder": f"podgpu {__version__}",
            "gpu": self._gpu.index,
            "uuid": self._gpu.uuid,
            "model": self._gpu.model,
            "began": began.isoformat(timespec="milliseconds"),
            "seconds": round(self._elapsed, 3),
            "slice_ms": detected,
            "assumed_slice_ms": assumed,
            "unsampled": self._listener.no_samples_reason,
        }
        return make_trace(self._engines.values(), self._listener.began, self._tracks, about)

    def summarize(self) -> str:
        runs = 0
        has_hidden = False
        for engine in self._engines.values():
            runs += len(engine.periods)
            has_hidden |= any(period.pid == HIDDEN_PID for period in engine.periods)

        summary = f"{self._elapsed:.1f} s, "
        if runs:
            summary += "1 run" if runs == 1 else f"{runs:,} runs"
        else:
            summary += "no context switch, because fewer than two processes used the GPU"
        if has_hidden:
            summary += ", processes of other users without names (run as root)"
        return summary

    def _read(self) -> None:
        now = time.time()
        whole = self._telemetry.usage(self._gpu)
        for usage in (whole, *whole.instances):
            device = usage.device
            residency, samples = self._listener.take_window(now, device.gi_id)
            self._find_tracks({period.pid for period in residency.periods})
            if device.key not in self._engines:
                self._engines[device.key] = EngineTrace(_name_engine(device))

            # If it is not measured, a resident process counts as busy.
            busy_share = 1.0
            if usage.busy_ns is not None:
                busy_share = usage.busy_ns / max(1, usage.window_ns)
            engine = self._engines[device.key]
            engine.add(residency, samples, busy_share)

        self._elapsed = now - self._began_at
        self._add_marks(self._engines[self._gpu.key].marks, now)

    def _add_marks(self, marks: list[tuple[int, str]], now: float) -> None:
        reading = self._telemetry.read(self._gpu, [fields()[CLOCK_EVENTS_FIELD]])
        mask = reading.values.get(self._gpu, {}).get(CLOCK_EVENTS_FIELD)
        clock_events = ""
        if isinstance(mask, int):
            clock_events = clock_events_in_words(mask)
        if clock_events != self._clock_events:
            self._clock_events = clock_events
            moment = self._listener.to_gpu_time(now)
            marks.append((moment, f"clocks reduced by: {clock_events}"))

        for event in self._telemetry.error_events():
            if event.device.startswith(self._gpu.uuid):
                moment = self._listener.to_gpu_time(event.at)
                marks.append((moment, f"XID {event.code}"))

    def _find_tracks(self, pids: set[int]) -> None:
        """Finds the containers of new processes. Called often, because a process may end soon."""
        new = pids - self._tracks.keys()
        if not new:
            return

        identities = self._identities.read()
        for pid in new:
            lookup = self._finder.find(pid)
            container = lookup.workload
            # If the sources disagree, the container is shown by its id.
            with suppress(SourceError):
                container = identities.complete(container)
            process = f"{lookup.command or 'process'} {pid}"
            is_known = container.uid or container.container_id
            name = container.text if is_known else process
            self._tracks[pid] = Track(name, process)


def _name_engine(device: Device) -> str:
    if device.is_instance:
        instance = f"MIG instance {device.gi_id} ({device.profile})"
        return f"GPU {device.index}, {instance}: {device.model}"
    return f"GPU {device.index}: {device.model}"


# The trace


@dataclass
class EngineTrace:
    """Collects the trace of one GPU or MIG instance, one time window after the other."""

    name: str
    samples: list[BusySample] = field(default_factory=list)
    # Time and text of XIDs and changes of the clock events.
    marks: list[tuple[int, str]] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end and pid
    periods: list[Period] = field(default_factory=list)
    estimator: WaitEstimator = field(default_factory=partial(WaitEstimator, is_complete=True))

    def add(self, residency: Residency, samples: Iterable[BusySample], busy_share: float) -> None:
        """Adds a window. `busy_share`: fraction of the window in which the device was busy."""
        self.samples += samples
        for period in residency.periods:
            last = self.periods[-1] if self.periods else None
            # A period that does not end with a window is reported again in the next window.
            if last is not None and (last.pid, last.began) == (period.pid, period.began):
                self.periods[-1] = last._replace(until=period.until)
            else:
                self.periods.append(period)

        worked = int(busy_share * residency.window) - residency.switching
        self.estimator.add(residency, estimate_without_samples(residency, worked))
        for begin, end, pid in self.estimator.intervals:
            # Hidden processes are not told apart, so it is unknown which of them waited.
            if begin < end and pid != HIDDEN_PID:
                self.waits.append((begin, end, pid))

    def make_events(self, tracks: Mapping[int, Track], since: int) -> Iterator[TraceEvent]:
        """Yields the events, unsorted. `since`: start of the recording.

        Times are nanoseconds. The format has microseconds.
        """
        gpu = Track(self.name, "context switches")
        before: Period | None = None
        for period in self.periods:
            # A longer gap is no switch: nothing was resident, or it is unknown what was.
            if before is not None and period.since - before.until < MAX_SWITCH_NS:
                yield _make_slice("switch", gpu, before.until - since, period.since - since)
            is_cut = self.estimator.is_cut(period.until - period.began)
            name = "run (cut)" if is_cut else "run"
            yield _make_slice(name, tracks[period.pid], period.since - since, period.until - since)
            before = period

        for begin, end, pid in self.waits:
            yield _make_slice("wait", tracks[pid], begin - since, end - since)

        for at, busy in self.samples:
            yield {
                "ph": "C",
                "name": "busy",
                "ts": (at - since) / 1000,
                "track": gpu,
                "args": {"busy": int(busy)},
            }

        for at, text in self.marks:
            scope = {"s": "p"}  # drawn across all tracks of the process
            yield {"ph": "i", "name": text, "ts": (at - since) / 1000, "track": gpu, **scope}


def make_trace(
    engines: Iterable[EngineTrace],
    since: int,
    tracks: Mapping[int, Track],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the trace as a JSON object.

    `tracks`: by pid. `about`: content of the object `otherData`.
    """
    events: list[TraceEvent] = []
    for engine in engines:
        events += engine.make_events(tracks, since)
    events.sort(key=lambda event: event["ts"])

    # The format identifies a container by a number `pid`, and a track by a number `tid`.
    pids: dict[str, int] = {}
    tids: dict[Track, int] = {}
    for event in events:
        track: Track = event.pop("track")
        event["pid"] = pids.setdefault(track.container, len(pids) + 1)
        event["tid"] = tids.setdefault(track, len(tids) + 1)

    titles: list[TraceEvent] = []
    for track, tid in tids.items():
        pid = pids[track.container]
        titles.append(_title("process_name", pid, tid, track.container))
        titles.append(_title("thread_name", pid, tid, track.process))
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": titles + events}


def _title(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _make_slice(name: str, track: Track, begin: int, end: int) -> TraceEvent:
    # X: a complete event. `make_trace` replaces the track by numbers.
    return {
        "ph": "X",
        "name": name,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "track": track,
    }
