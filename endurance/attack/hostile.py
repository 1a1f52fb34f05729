"""Exporters that mean no good, for the cluster view: each exposition is one of the ways it was once brought down.

`python -m endurance.attack.hostile` listens on ports of loopback, prints them, and answers until its standard input
ends: on the first port each path with its text, on each of the others one text, for those who can name no path.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import zlib
from collections.abc import Callable
from functools import cache

from endurance.attack.victims import NODE

_PEACEFUL = 4
"""Expositions before it claims a name: who comes first has it, and that is the honest node."""
_HEAD = "# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n"
Exposition = Callable[[int], str]


def _bomb(mebibytes: int = 512) -> bytes:
    """Half a gibibyte in half a mebibyte: after a full flush the same again is packed the same, whatever was before.
    Only the sum at the very end is wrong, and who gets so far has unpacked it all."""
    part = b"# " + b"a" * ((1 << 20) - 3) + b"\n"
    packer = zlib.compressobj(9, wbits=31)
    first, again = (packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + again * (mebibytes - 1) + packer.flush()


def _gpu(number: int, host: str, value: float = 5.0, more: str = "") -> str:
    labels = f'gpu="{number}",UUID="GPU-{host}-{number}",modelName="FAKE",Hostname="{host}"{more}'
    return f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {value}\n"


def indented_comment(turn: int) -> str:
    return f' # hello 5\n{_HEAD}{_gpu(0, "indented", turn % 100)}# HELP x{{a="b"}} 1\n \t# 7\n'


def devices(_turn: int) -> str:
    """200,000 of them in less than 16 MiB."""
    return _HEAD + "".join(
        f'DCGM_FI_DEV_GPU_UTIL{{gpu="{n}",UUID="GPU-{n}",Hostname="many"}} 1\n' for n in range(200_000)
    )


def holders(_turn: int) -> str:
    lines = (
        f'podgpu_allocation_info{{gpu="0",UUID="GPU-h",namespace="n{n % 5000}",pod="p{n}",container="c"}} 1\n'
        for n in range(120_000)
    )
    return _HEAD + _gpu(0, "held").replace("GPU-held-0", "GPU-h") + "".join(lines)


def namespaces(turn: int) -> str:
    """New ones in each exposition."""
    lines = (
        f'podgpu_namespace_gpu_energy_joules_total{{namespace="ns-{turn}-{n}",modelName="FAKE",Hostname="churn"}} 5\n'
        for n in range(2000)
    )
    return _HEAD + _gpu(0, "churn") + "# TYPE podgpu_namespace_gpu_energy_joules_total counter\n" + "".join(lines)


def claimed_name(turn: int) -> str:
    """Says after a while that it is the honest node, with a GPU of its own; the newest figures win, it hopes."""
    return (
        _HEAD
        + _gpu(0, NODE if turn > _PEACEFUL else "claimer", turn % 100)
        + f"podgpu_exporter_snapshot_timestamp_seconds {time.time() + 3600}\n"
    )


def long_ago(_turn: int) -> str:
    return _HEAD + _gpu(0, "old") + "podgpu_exporter_snapshot_timestamp_seconds 5\n"


def long_labels(turn: int) -> str:
    return _HEAD + _gpu(0, "long", turn % 100, f',pod="{"x" * 1_000_000}",namespace="{turn}{"y" * 100_000}"')


def impossible(_turn: int) -> str:
    return _HEAD + "".join(_gpu(n, "impossible", value) for n, value in enumerate((-1.0, 1e300, float("nan"), 9e18)))


EXPOSITIONS: dict[str, Exposition] = {
    exposition.__name__: exposition
    for exposition in (indented_comment, devices, holders, namespaces, claimed_name, long_ago, long_labels, impossible)
}
OTHERS = ("bomb", "endless", "redirect", "silent", "short", "latin")
PATHS = (*EXPOSITIONS, *OTHERS)
DISCOVERED = ("indented_comment", "claimed_name", "long_labels", "redirect", "silent", "short")
"""Those with a port of their own, in the order of the ports."""


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turns: dict[str, int], only: str) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = only or head.split(b" ", 2)[1].decode().strip("/")
            turns[path] = turns.get(path, 0) + 1
            await _serve(path, turns[path], writer)
    except (asyncio.IncompleteReadError, ConnectionError, IndexError):
        pass
    finally:
        writer.close()


async def _serve(path: str, turn: int, writer: asyncio.StreamWriter) -> None:
    ok = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
    if path in EXPOSITIONS:
        body = _large(path) if path in _LARGE else EXPOSITIONS[path](turn).encode()
        writer.write(ok + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    elif path == "bomb":
        body = _large(path)
        writer.write(ok + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    elif path == "endless":
        writer.write(ok + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(2000):
            writer.write(b"8000\r\n" + b"# " + b"a" * 0x7FFD + b"\n\r\n")
            await writer.drain()
    elif path == "redirect":
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n")
    elif path == "silent":
        await asyncio.sleep(60.0)
    elif path == "short":
        writer.write(ok + b"Content-Length: 5000\r\n\r\nDCGM_FI_DEV_GPU_UTIL{")
        raise ConnectionError
    else:
        writer.write(ok + b"Content-Length: 4\r\n\r\n\xff\xfe 1")
    await writer.drain()


_LARGE: dict[str, Callable[[], bytes]] = {
    "devices": lambda: devices(0).encode(),
    "holders": lambda: holders(0).encode(),
    "bomb": _bomb,
}


@cache
def _large(path: str) -> bytes:
    """The same each time, and made for who asks first."""
    return _LARGE[path]()


async def main() -> None:
    os.nice(19)
    servers = [await _listen(path) for path in ("", *DISCOVERED)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _listen(only: str) -> asyncio.Server:
    """`only`: the one exposition that is served, whatever the path; empty: as the path says."""
    turns: dict[str, int] = {}
    return await asyncio.start_server(lambda r, w: _answer(r, w, turns, only), "127.0.0.1", 0, limit=1 << 20)


if __name__ == "__main__":
    asyncio.run(main())
