"""Runs `podgpu top --cluster` with the demo in a pseudo-terminal and converts its screen to
HTML.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
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
_BROKEN_SECONDS = 345.0
"""How long the demo runs first. Then there are an XID, a lost GPU and a lost node, and the
sparklines have data.
"""
_LOOK_SECONDS = 6.0
_PLACED = re.compile(r"\x1b\[(\d*);?(\d*)H")
_ERASING = re.compile(r"\x1b\[\??[0-9;]*[hlJK]")
_STYLE = (
    "body{margin:0;background:#14181f;padding:14px 18px;display:inline-block}"
    " pre{margin:0;font:13px/1.35 DejaVu Sans Mono,monospace}"
)


def top_html() -> str:
    """Returns the live screen as an HTML page, at a time when the demo has faults."""
    with _demo() as url:
        time.sleep(_BROKEN_SECONDS)
        screen = _live("top", "--cluster", url)
    console = Console(record=True, width=SIZE[0], file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(
        Text.from_ansi(f"$ podgpu top --cluster localhost:9401\n{screen}"), no_wrap=True, crop=True
    )
    code = console.export_html(
        theme=SVG_EXPORT_THEME, inline_styles=True, code_format="<pre>{code}</pre>"
    )
    return (
        f'<!doctype html><meta charset="utf-8"><style>{_STYLE} pre{{color:#d9dee7}}</style>{code}'
    )


@contextmanager
def _demo() -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "podgpu",
        "demo",
        "-a",
        "127.0.0.1:0",
        "--cluster-address",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
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


def _live(*arguments: str) -> str:
    """Runs a command for some seconds. Returns the last complete frame, with its colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "podgpu", *arguments]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        _read(ours, _LOOK_SECONDS)
        written = _read(ours, _LOOK_SECONDS)
        os.write(ours, b"q")
        _read(ours, _LOOK_SECONDS)
        process.wait()
        os.close(ours)
    frames = _PLACED.split(written.replace("\r\n", "\n"))
    whole = max(frames[-12:], key=lambda frame: frame.count("\n"))
    return _ERASING.sub("", whole)


def _read(terminal: int, seconds: float) -> str:
    pieces, end = [], time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                pieces.append(os.read(terminal, 65536))
            except OSError:  # EIO: the other end is closed
                break
    return b"".join(pieces).decode(errors="replace")
