"""Generated blocks about options: every option of every command, and dcgm-exporter's flag by flag."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import click

from podgpu.cli.cluster import CLUSTER_OPTIONS
from podgpu.cli.exporter_options import EXPORTER_OPTIONS
from podgpu.cli.main import COMMANDS, cli
from podgpu.cli.options import Option


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def prose(text: str) -> str:
    return re.sub(r"([*|\\])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


# --- from the option table


def exporter_options() -> Iterator[str]:
    head = ("Flag", "Short", "Variable", "Default", "Meaning")
    return table(head, (_option_row(o) for o in EXPORTER_OPTIONS if o.works))


def cluster_options() -> Iterator[str]:
    return table(("Flag", "Short", "Variable", "Default", "Meaning"), (_option_row(o) for o in CLUSTER_OPTIONS))


def _option_row(option: Option) -> tuple[str, ...]:
    return (*_names(option), code(option.default), prose(option.help) + _choices(option.kind))


def _names(option: Option) -> tuple[str, str, str]:
    flag = " ".join(code(f"--{name}") for name in (option.flag, option.alias) if name)
    return flag + (" †" if option.ours else ""), code(f"-{option.short}" if option.short else ""), code(option.env)


def _choices(kind: str) -> str:
    _, _, words = kind.partition("choice:")
    return f" One of {', '.join(map(code, words.split('|')))}." if words else ""


def accepted_options() -> Iterator[str]:
    """dcgm-exporter's options that do nothing here."""
    unbuilt = (o for o in EXPORTER_OPTIONS if not o.works)
    rows = ((*_names(o), prose(o.help.removeprefix("accepted; "))) for o in unbuilt)
    return table(("Flag", "Short", "Variable", "Why it does nothing"), rows)


# --- from the commands themselves


def commands() -> Iterator[str]:
    rows = ((f"[`podgpu {name}`](#podgpu-{name})", prose(text)) for name, text in COMMANDS.items())
    return table(("Command", "What it does"), rows)


def other_commands() -> Iterator[str]:
    """A section for each command but the exporter: as click has them, so that no command can be forgotten."""
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        if name == "exporter" or command is None:
            continue
        yield from ("", f"## podgpu {name}", "", prose(COMMANDS[name]), "")
        yield from table(("Flag", "Short", "Variable", "Default", "Meaning"), map(_parameter_row, _options_of(command)))
    yield ""


def _options_of(command: click.Command) -> Iterator[click.Option]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield parameter


def _parameter_row(option: click.Option) -> tuple[str, ...]:
    flags = " ".join(code(name) for name in (*option.opts, *option.secondary_opts) if name.startswith("--"))
    short = " ".join(code(name) for name in option.opts if not name.startswith("--"))
    variable = code(option.envvar if isinstance(option.envvar, str) else "")
    words = option.type.name if "|" in option.type.name and option.type.name != "true|false" else ""
    meaning = re.sub(r"(\w+_)\\\*", r"`\1*`", prose(option.help or ""))  # podgpu_exporter_* is a name, not emphasis
    return flags, short, variable, code(_default(option)), meaning + _choices(f"choice:{words}")


def _default(option: click.Option) -> str:
    value = option.default
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else ""


# --- migration


_HERE: Mapping[str, str] = {
    "collectors": "The names `default`, `dcp`, `1.x` and `none` too. NVIDIA's three file names find podgpu's own copy"
    " where the image has none",
    "collect-interval": "100 ms at least; `5s` and `1m` too",
    "kubernetes": "Asks every source of holders that is present, not the kubelet alone: [holders.md](holders.md)",
    "cpu-devices": "With `--telemetry dcgm` or `-r` only",
    "switch-devices": "With `--telemetry dcgm` or `-r` only",
    "configmap-data": "`list` and `watch` on that ConfigMap. Changes are taken up; while it cannot be read the counters"
    " of `-f` stand, where dcgm-exporter exits",
    "remote-hostengine-info": "Needs libdcgm beside podgpu: [dcgm.md](dcgm.md). Without `-r` no DCGM is used at"
    " all. `tcp://` and `vsock://` too; vsock is handed to libdcgm as it is, and was not tried",
    "kubernetes-enable-pod-labels": "This node's pods only, so `NODE_NAME` must be set. A pod label never takes the"
    " place of one of the exporter's",
    "kubernetes-enable-pod-uid": "From the names under `/var/log/pods` where that is mounted: no API server needed",
    "kubernetes-gpu-id-type": "Not needed: both forms are understood, always",
    "kubernetes-pod-label-allowlist-regex": "A pattern that is no regular expression, or has more than 1,000 parts,"
    " ends podgpu at start; there it is passed over",
    "devices": "`f` on a MIG GPU is the GPU and its instances; `i:0,2` counts the node's instances from 0, GPU by GPU",
    "no-hostname": "Leaves the label out; there it does nothing from 4.0 to 4.8.2",
    "config-file": "Versions 1 and 2, with intervals of their own for some fields: [config-file.md](config-file.md)",
    "web-read-timeout": "100 ms to 24 h; a value that is none ends podgpu, there it is passed over",
    "web-write-timeout": "100 ms to 24 h; a value that is none ends podgpu, there it is passed over",
    "watch-max-keep-age": "With `--telemetry dcgm` or `-r` only: NVML keeps no samples",
    "watch-max-keep-samples": "With `--telemetry dcgm` or `-r` only: NVML keeps no samples",
    "max-concurrent-scrapes": "Counted until the answer is read; a scrape waits for no driver, so it is seldom reached",
    "enable-exporter-metrics": "`process_*`; not `go_*` and `promhttp_*`, for there is no Go",
    "xid-count-window-size": "A plain number is milliseconds; `5m` too",
    "clock-events-count-window-size": "A plain number is milliseconds; `5m` too",
    "web-config-file": "Followed without a restart; HTTP/2 is not spoken: [security.md](security.md)",
    "pod-resources-kubelet-socket": "A socket that is not there is an error that is counted and logged, not silence",
    "hpc-job-mapping-dir": "A GPU with several jobs carries no `hpc_job`; `podgpu_allocation_info` names each of them",
    "nvidia-resource-names": "Not needed: a resource whose ids name a GPU counts by itself",
    "kubernetes-virtual-gpus": "Utilisation, memory, power and energy are the holder's own, and absent where they"
    " cannot be known: [sharing.md](sharing.md)",
    "kubernetes-enable-dra": "Keeps idle GPUs, maps MIG devices to their instance, adds pod labels: [dra.md](dra.md)",
}
"""Where an option of dcgm-exporter's means more or less here than there."""


def migration() -> Iterator[str]:
    theirs = [option for option in EXPORTER_OPTIONS if not option.ours]
    unknown = _HERE.keys() - {option.flag for option in theirs if option.works}
    if unknown:
        raise SystemExit(f"docs/option_blocks.py tells of options that are not there: {', '.join(sorted(unknown))}")
    return table(("Flag", "Variable", "Default", "Here"), map(_migration_row, theirs))


def _migration_row(option: Option) -> tuple[str, ...]:
    flags = (
        f"-{option.short}" if option.short else "",
        f"--{option.flag}",
        f"--{option.alias}" if option.alias else "",
    )
    names = ", ".join(code(name) for name in flags if name)
    if option.works:
        return names, code(option.env), code(option.default), _HERE.get(option.flag, "the same")
    why = prose(option.help.removeprefix("accepted; "))
    return names, code(option.env), code(option.default), f"**no effect**: {why}"


OPTION_BLOCKS: Mapping[str, Callable[[], Iterator[str]]] = {
    "options": exporter_options,
    "accepted-options": accepted_options,
    "cluster-options": cluster_options,
    "commands": commands,
    "other-commands": other_commands,
    "migration": migration,
}
