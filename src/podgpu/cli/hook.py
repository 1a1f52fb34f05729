"""`podgpu hook` keeps podlist.json from within the container runtime's path, as an NRI plugin."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from podgpu.cli.help import podgpu_command
from podgpu.cli.option_table import exporter_options
from podgpu.cli.params import Option, naming_variable, with_options
from podgpu.compose.hook import run_hook
from podgpu.compose.process import configure_logging
from podgpu.errors import UsageError
from podgpu.files import AtomicFile
from podgpu.holders.podlist import DEFAULT_PATHS, is_mount_point
from podgpu.hook.loop import HookSettings

if TYPE_CHECKING:
    from podgpu.web.sockets import Address

_SHARED = ("path-proc", "debug", "log-format")
_OTHERWISE = {"path-proc": {"help": "Where the host's /proc is: driver/nvidia in it says which GPU has which number."}}

HOOK_OPTIONS = (
    Option("socket", "", "PODGPU_NRI_SOCKET", "/var/run/nri/nri.sock", "The runtime's NRI socket.", ours=True),
    Option(
        "podlist",
        "",
        "PODGPU_HOOK_PODLIST",
        DEFAULT_PATHS[0],
        "The file to keep. Mount the directory it is in: a mount of the file itself is refused.",
        ours=True,
    ),
    Option(
        "inject",
        "",
        "PODGPU_HOOK_INJECT",
        "false",
        "Set NVIDIA_VISIBLE_DEVICES of new containers to what koordinator's annotation says, where it is not right "
        "already. Otherwise the hook changes nothing.",
        "bool",
        ours=True,
    ),
    Option(
        "address",
        "a",
        "PODGPU_HOOK_LISTEN",
        "",
        "Address for the hook's own metrics and probes, such as :9403; without it there is none.",
        ours=True,
    ),
    Option(
        "plugin-name",
        "",
        "PODGPU_HOOK_PLUGIN_NAME",
        "podgpu",
        "The plugin's name in the runtime's log. Also, from the runtime: NRI_PLUGIN_NAME.",
        ours=True,
    ),
    Option(
        "plugin-index",
        "",
        "PODGPU_HOOK_PLUGIN_INDEX",
        "90",
        "Two digits: plugins with lower ones are asked first, and what they set is seen. Also: NRI_PLUGIN_IDX.",
        ours=True,
    ),
    *exporter_options(_SHARED, _OTHERWISE),
)


@podgpu_command(
    "hook",
    ("podgpu hook", "keep podlist.json, by the runtime's NRI socket"),
    ("podgpu hook -a :9403", "the same, with metrics and probes of its own"),
    (
        "podgpu hook --podlist /run/gpus/podlist.json --inject",
        "another file; set NVIDIA_VISIBLE_DEVICES by koordinator's annotation",
    ),
)
@with_options(HOOK_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Keep podlist.json: which container was given which GPU, as the container runtime (NRI) reports it.

    Connects to the runtime's NRI socket, or takes the connection of a runtime that started it (NRI_PLUGIN_SOCKET).
    Only watches, unless --inject is given.
    """
    configure_logging(options["log_format"], options["debug"])
    with naming_variable(ctx, "podlist"):
        file = _podlist(options["podlist"], options["path_proc"])
    with naming_variable(ctx, "address"):
        address = _address(options["address"])
    run_hook(_settings(options, os.environ), file, address)


def _address(text: str) -> Address | None:
    if not text:
        return None
    from podgpu.web.sockets import parse_address  # the web server, for those who have a port only

    return parse_address(text)


def _podlist(path: str, proc: str) -> AtomicFile:
    if is_mount_point(path, os.path.join(proc, "self", "mountinfo")):
        raise UsageError(
            f"--podlist {path}: is a mount point, where no new file can be put in the old one's place; mount the"
            " directory it is in"
        )
    return AtomicFile(os.path.abspath(path), option="--podlist")


def _settings(options: Mapping[str, Any], environment: Mapping[str, str]) -> HookSettings:
    descriptor = environment.get("NRI_PLUGIN_SOCKET", "")
    if descriptor and not (descriptor.isascii() and descriptor.isdecimal() and len(descriptor) < 6):
        raise UsageError(f"NRI_PLUGIN_SOCKET {descriptor!r}: the runtime gives the number of an open connection there")
    name = environment.get("NRI_PLUGIN_NAME") or options["plugin_name"]
    index = environment.get("NRI_PLUGIN_IDX") or options["plugin_index"]
    if not re.fullmatch(r"[A-Za-z0-9_.+-]+", name):
        raise UsageError(f"--plugin-name {name!r}: letters, digits, and _ . + - only")
    if not re.fullmatch(r"[0-9]{2}", index, re.ASCII):
        raise UsageError(f"--plugin-index {index!r}: write two digits, such as 90")
    return HookSettings(
        socket=options["socket"],
        inherited=int(descriptor) if descriptor else None,
        name=name,
        index=index,
        inject=options["inject"],
        proc=options["path_proc"],
    )
