"""Writes the man page podgpu(1) from the help texts of the commands."""

from __future__ import annotations

import time

import click

from podgpu.cli.main import cli


def render_man_page(version: str, at: int) -> str:
    date = time.strftime("%Y-%m-%d", time.gmtime(at))
    lines = [
        f'.TH PODGPU 1 "{date}" "podgpu {version}"',
        ".SH NAME",
        "podgpu \\- GPU metrics for Prometheus: which pod uses which GPU",
        ".SH SYNOPSIS",
        ".B podgpu\nCOMMAND [OPTIONS]",
        ".SH COMMANDS",
    ]
    context = click.Context(cli, info_name="podgpu")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is None or command.hidden:
            continue
        lines += [f".SS podgpu {name}", _escape(command.help or ""), ".PP", "Options:"]
        for parameter in command.get_params(click.Context(command, parent=context, info_name=name)):
            record = parameter.get_help_record(context)
            if record is not None:
                lines += [".TP", f".B {_escape(record[0])}", _escape(record[1])]
    lines += [".SH FILES", "/etc/default/podgpu", ".PP", "/lib/systemd/system/podgpu.service", ""]
    return "\n".join(lines)


def _escape(text: str) -> str:
    lines = (
        line.strip().replace("\\", "\\e").replace("-", "\\-")
        for line in text.replace("\b", "").splitlines()
    )
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)
