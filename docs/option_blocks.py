"""Generates the tables of options: those of each command, and dcgm-exporter's flags that differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import click

from podgpu.cli.main import COMMANDS, cli
from podgpu.cli.options import EXPORTER_OPTIONS, GroupedCommand, Option


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def prose(text: str) -> str:
    escaped = re.sub(r"([*|\\])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))
    return re.sub(r"(\w+_)\\\*", r"`\1*`", escaped)  # podgpu_exporter_* is a name, not emphasis


def list_commands() -> Iterator[str]:
    return table(
        ("Command", "Purpose"),
        ((f"[`podgpu {n}`](#podgpu-{n})", prose(t)) for n, t in COMMANDS.items()),
    )


def exporter_options() -> Iterator[str]:
    return table(_HEAD, map(_option_row, _options("exporter")))


def other_commands() -> Iterator[str]:
    """Lists the options of every command except exporter. Options that an earlier table describes
    are only named.
    """
    exporter = set(map(_option_row, _options("exporter")))
    cluster = {
        tuple(cell.replace("_CLUSTER_", "_AUTOSCALE_") for cell in _option_row(o))
        for o in _options("cluster")
    }
    for name in COMMANDS:
        if name == "exporter":
            continue
        yield from ("", f"## podgpu {name}", "")
        rows = list(map(_option_row, _options(name)))
        earlier = [("exporter", "", exporter)]
        if name == "autoscale":
            earlier.append(
                (
                    "cluster",
                    ", with variables such as `PODGPU_AUTOSCALE_SCRAPE`",
                    cluster - exporter,
                )
            )
        own = [row for row in rows if not any(row in known for _, _, known in earlier)]
        yield from table(_HEAD, own) if own else ("This command has no options.",)
        for command, note, known in earlier:
            if same := ", ".join(row[0].removesuffix(" †") for row in rows if row in known):
                link = f"[`podgpu {command}`](#podgpu-{command})"
                yield from ("", f"`podgpu {name}` also has these options of {link}{note}: {same}.")
    yield ""


_HEAD = ("Flag", "Variable", "Default", "Meaning")


def _options(name: str) -> list[Option]:
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, GroupedCommand)
    return [option for option in command.rows if option.common and option.flag != "help-all"]


def _is_ours(option: Option) -> bool:
    """Returns True if dcgm-exporter does not have the option."""
    return not option.env or option.env.startswith("PODGPU_")


def _option_row(option: Option) -> tuple[str, ...]:
    flags = ", ".join(
        code(name)
        for name in (f"-{option.short}" if option.short else "", f"--{option.flag}")
        if name
    )
    _, _, words = option.kind.partition("choice:")
    choices = f" One of {', '.join(map(code, words.split('|')))}." if words else ""
    default = "" if option.default == "false" else option.default
    return (
        flags + (" †" if _is_ours(option) else ""),
        code(option.env),
        code(default),
        prose(option.help) + choices,
    )


_DIFFERENCES: Mapping[str, str] = {
    "collect-interval": "at least 100 ms; also accepts `5s` or `1m`",
    "kubernetes": "uses every source of holders ([holders](holders.md))",
    "cpu-devices": "works only with `--telemetry dcgm` or `-r`",
    "switch-devices": "works only with `--telemetry dcgm` or `-r`",
    "configmap-data": "reloads changes; if the ConfigMap cannot be read, uses the counters of `-f`",
    "remote-hostengine-info": (
        "needs libdcgm ([dcgm](dcgm.md)). Without `-r`, podgpu does not use DCGM"
    ),
    "kubernetes-enable-pod-labels": "reads only this node's pods; needs `NODE_NAME`",
    "kubernetes-enable-pod-uid": "reads uids from `/var/log/pods`, without the API server",
    "kubernetes-gpu-id-type": "not needed: podgpu understands both forms",
    "devices": "`i:0,2` counts the MIG instances of the node from 0",
    "enable-exporter-metrics": "adds `process_*`, not `go_*`",
    "web-config-file": "reloads changes; no HTTP/2 ([security](security.md))",
    "nvidia-resource-names": "not needed: podgpu finds every resource whose ids identify a GPU",
    "kubernetes-virtual-gpus": "each holder has its own values ([below](#one-series-per-holder))",
    "kubernetes-enable-dra": (
        "keeps idle GPUs and maps MIG devices ([holders](holders.md#dra-claims))"
    ),
}


def differing_flags() -> Iterator[str]:
    theirs = [option for option in EXPORTER_OPTIONS if not _is_ours(option)]
    unknown = _DIFFERENCES.keys() - {option.flag for option in theirs if option.works}
    if unknown:
        raise SystemExit(
            f"docs/option_blocks.py names unknown options: {', '.join(sorted(unknown))}"
        )
    flags: dict[str, list[str]] = {}
    for option in theirs:
        if option.flag in _DIFFERENCES or not option.works:
            text = _DIFFERENCES.get(option.flag) or f"**no effect**: {prose(option.help)}"
            flags.setdefault(text, []).append(code(f"--{option.flag}"))
    return table(("Flag", "In podgpu"), ((", ".join(names), text) for text, names in flags.items()))


OPTION_BLOCKS: Mapping[str, Callable[[], Iterator[str]]] = {
    "commands": list_commands,
    "exporter-options": exporter_options,
    "other-commands": other_commands,
    "migration": differing_flags,
}
