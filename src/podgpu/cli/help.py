"""This module says how `--help` reads: options in groups, the common ones first, three examples at the end, where the
prompt is.

`GROUPS` names every option of every command once, in the order people need them; a test fails for one that is missing.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import click

from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import shown_default, shown_name

Example = tuple[str, str]
"""A command line, and what it does."""

_INDENT = "  "
_NAMES_WIDTH = 30
_KEPT = "\N{NO-BREAK SPACE}"
"""Between words that stay on one line where they can."""
_WIDEST = 110
_SWITCHES = "An option that is on or off may be written --NAME, --NAME=true or --NAME=false."
_WITHOUT_EFFECT = "Without effect (accepted for dcgm-exporter's sake)"

GROUPS: dict[str, tuple[str, ...]] = {
    "Common": (
        *("url", "cluster", "prometheus", "scrape", "discover-kubernetes", "in", "out", "socket", "podlist"),
        *("address", "cluster-address", "gpus", "calm", "kubernetes", "config-file", "telemetry", "collectors"),
        *("devices", "collect-interval"),
        *("interval", "sort", "filter", "processes", "prices", "idle-after", "stale-after", "drop-after", "json"),
        *("once", "dump-snapshot", "probe-switches", "mode", "owner", "self-metrics", "inject", "plugin-name"),
        *("plugin-index", "to", "expr", "in-place", "force", "log-format", "debug", "help"),
    ),
    "Kubernetes": (
        *("allocation", "allocation-interval", "kubernetes-enable-pod-labels", "kubernetes-pod-label-allowlist-regex"),
        *("kubernetes-enable-pod-uid", "kubernetes-virtual-gpus", "kubernetes-enable-dra", "nvidia-resource-names"),
        *("pod-resources-kubelet-socket", "kubeconfig", "configmap-data", "owners", "node-label"),
        *("path-varlog", "hpc-job-mapping-dir"),
    ),
    "Autoscaling": (
        *("autoscale", "keda-address", "keda-namespaces", "keda-cert-file", "keda-key-file", "keda-client-ca-file"),
        *("keda-client-name", "api-address", "api-service", "api-cert-file", "api-key-file", "external-metrics"),
        *("longest-window", "unregister"),
    ),
    "Usage accounting": (
        *("container-usage", "usage-interval", "usage-from", "used-field", "window"),
        *("history-dir", "mig-copy-parent-values", "gpu-manager-metrics"),
        *("gpu-manager-address", "legacy-map-metrics", "match", "path-proc", "path-sysfs"),
    ),
    "Access (TLS, logins, probes, other servers)": (
        *("web-config-file", "web-systemd-socket", "probe-address", "web-enable-lifecycle", "web-read-timeout"),
        *("web-write-timeout", "max-concurrent-scrapes", "scrape-timeout"),
        *("exporter-ca-file", "exporter-insecure-skip-verify", "exporter-username"),
        *("exporter-password-file", "exporter-token-file", "exporter-max-age", "prometheus-ca-file"),
        *("prometheus-insecure-skip-verify", "prometheus-username", "prometheus-password-file"),
        *("prometheus-token-file", "prometheus-tenant", "prometheus-timeout"),
    ),
    "DCGM compatibility": (
        *("remote-hostengine-info", "switch-devices", "cpu-devices", "enable-dcgm-log", "dcgm-log-level"),
        *("dcgm-names", "use-old-namespace", "hostname-label", "no-hostname", "replace-blanks-in-model-name"),
        *("xid-count-window-size", "clock-events-count-window-size", "kubernetes-gpu-id-type"),
        *("watch-max-keep-age", "watch-max-keep-samples", "enable-exporter-metrics"),
    ),
    _WITHOUT_EFFECT: tuple(option.flag for option in EXPORTER_OPTIONS if not option.works),
}


def podgpu_command(name: str, *examples: Example) -> Callable[[Callable[..., Any]], click.Command]:
    """click's command of this name, with grouped help."""
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST}
    return click.command(name, cls=_Grouped, examples=examples, context_settings=settings)


class _Grouped(click.Command):
    def __init__(self, *arguments: Any, examples: Sequence[Example], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {_flag(p): p for p in self.get_params(ctx) if isinstance(p, click.Option) and not p.hidden}
        for title, members in grouped(options):
            _write_section(formatter, title, (line for flag in members for line in _entry(options[flag], formatter)))
        if any(option.flag_value == "true" for option in options.values()):  # click's own flags take no value
            formatter.write_paragraph()
            formatter.write("".join(f"{line}\n" for line in textwrap.wrap(_SWITCHES, formatter.width)))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, self.examples)


def grouped(flags: Sequence[str] | dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Title and flags of each group that has any; what no group names comes last."""
    left = dict.fromkeys(flags)
    for title, members in GROUPS.items():
        here = [flag for flag in members if flag in left]
        for flag in here:
            del left[flag]
        if here:
            yield title, here
    if left:
        yield "Other", list(left)


def write_examples(formatter: click.HelpFormatter, examples: Sequence[Example]) -> None:
    lines: list[str] = []
    for command, meaning in examples:
        lines.append(f"{_INDENT}$ {command}")
        lines += textwrap.wrap(meaning, formatter.width, initial_indent=_INDENT * 3, subsequent_indent=_INDENT * 3)
    _write_section(formatter, "Examples", lines)


def write_list(formatter: click.HelpFormatter, title: str, items: Collection[tuple[str, str]]) -> None:
    """Names left, meanings right."""
    width = max(len(name) for name, _ in items)
    _write_section(formatter, title, (line for item in items for line in _item(*item, width, formatter.width)))


def _write_section(formatter: click.HelpFormatter, title: str, lines: Iterable[str]) -> None:
    formatter.write_paragraph()
    formatter.write("".join(f"{line}\n" for line in (f"{title}:", *lines)))


def _flag(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--")).lstrip("-")


def _entry(option: click.Option, formatter: click.HelpFormatter) -> Iterator[str]:
    """Names left, meaning right; names that are too long have a line of their own. Words are never broken: they are
    there to be copied."""
    facts = [fact for fact in (option.envvar, shown_default(option)) if isinstance(fact, str) and fact]
    meaning = (option.help or "").removeprefix("accepted; ")  # its group says so
    text = " ".join(filter(None, (meaning, f"[{', '.join(facts).replace(' ', _KEPT)}]" if facts else "")))
    return _item(shown_name(option), text, _NAMES_WIDTH - 2, formatter.width)


def _item(name: str, text: str, names_width: int, width: int) -> Iterator[str]:
    left = len(_INDENT) + names_width + 2
    room = max(20, width - left)
    wrapped = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False)
    lines = [part for line in wrapped for part in _broken_facts(line.replace(_KEPT, " "), room)]
    if len(name) <= names_width:
        yield f"{_INDENT}{name}".ljust(left) + (lines.pop(0) if lines else "")
    else:
        yield f"{_INDENT}{name}"
    yield from (" " * left + line for line in lines)


def _broken_facts(line: str, room: int) -> list[str]:
    """Variable and default on a line each, where they are too long for one."""
    return [line] if len(line) <= room else [part.strip() for part in re.split(r"(?<=,) ", line)]
