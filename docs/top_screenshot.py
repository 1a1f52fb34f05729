"""What `podgpu top --cluster` shows of the demo, as coloured HTML for `docs.screenshots`: from a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

SIZE = (112, 34)
"""Columns and rows."""
_SETTLE_SECONDS = 12.0
"""So long the demo runs before it is looked at: idle ones have been idle for a while."""
_STYLE = (
    "body{margin:0;background:#14181f;padding:14px 18px;display:inline-block} pre{margin:0;font:13px/1.35 monospace}"
)


def top_html() -> str:
    with _demo() as url:
        time.sleep(_SETTLE_SECONDS)
        shown = _in_terminal("top", "--cluster", url, "--once")
    console = Console(record=True, width=SIZE[0], file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text.from_ansi(f"$ podgpu top --cluster http://localhost:9401\n{shown}"), no_wrap=True, crop=True)
    code = console.export_html(theme=SVG_EXPORT_THEME, inline_styles=True, code_format="<pre>{code}</pre>")
    return f'<!doctype html><meta charset="utf-8"><style>{_STYLE} pre{{color:#d9dee7}}</style>{code}'


@contextmanager
def _demo() -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "podgpu",
        "demo",
        "--calm",
        "-a",
        "127.0.0.1:0",
        "--cluster-address",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (re.search(r"the cluster +(http://\S+?)/ ", line) for line in process.stdout)
            url = next(found[1] for found in lines if found)
            _wait_until_ready(url)
            yield url
        finally:
            process.terminate()


def _wait_until_ready(url: str) -> None:
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise SystemExit(f"{url} did not become ready")


def _in_terminal(*arguments: str) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with subprocess.Popen([sys.executable, "-m", "podgpu", *arguments], stdin=theirs, stdout=theirs, env=environment):
        os.close(theirs)
        return "".join(_read(ours)).replace("\r\n", "\n")


def _read(terminal: int) -> Iterator[str]:
    try:
        while piece := os.read(terminal, 65536):
            yield piece.decode()
    except OSError:  # EIO: the other end is closed
        return
    finally:
        os.close(terminal)
