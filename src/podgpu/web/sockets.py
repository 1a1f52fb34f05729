"""Parses listen addresses, and opens sockets that podgpu or systemd has bound."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from podgpu.errors import StartError, UsageError

ADDRESS_OPTION = "-a"
SYSTEMD_OPTION = "--web-systemd-socket"
_BACKLOG = 512
_UNIX = "unix:"
_FIRST_DESCRIPTOR = 3


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    """Empty for all interfaces."""
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        if self.host.startswith(_UNIX):
            return self.host
        host = self.host or "localhost"
        return f"{self.scheme}://[{host}]:{self.port}" if ":" in host else f"{self.scheme}://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parses `:9400`, `127.0.0.1:9400`, `[::1]:9400` and `name:9400`. Raises UsageError for other texts."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not colon or not is_port or (":" in host and not bracketed):
        raise UsageError(f"{text!r} must be HOST:PORT, :PORT or [IPV6]:PORT, such as :9400")
    return Address(host, int(port))


async def bind(address: Address, option: str) -> list[socket.socket]:
    """Listens on every IP address of the host name. Raises StartError if that fails."""
    loop = asyncio.get_running_loop()
    try:
        # Used only to resolve and bind: LimitedServer accepts the connections.
        server = await loop.create_server(
            asyncio.Protocol, address.host or None, address.port, backlog=_BACKLOG, start_serving=False
        )
    except (OSError, UnicodeError) as e:  # UnicodeError: an invalid host name such as a..b
        why = getattr(e, "strerror", None) or e
        raise StartError(
            f"cannot listen on {address.host}:{address.port}: {why}; choose another address with {option}"
        ) from e
    bound = [socket.socket(fileno=os.dup(opened.fileno())) for opened in server.sockets]
    server.close()
    for listener in bound:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    return bound


def open_systemd_sockets(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Returns the sockets that systemd passed to this process (see sd_listen_fds). Raises UsageError if there are none.

    Removes the LISTEN_* variables, so that child processes do not use the sockets.
    """
    is_for_us = environment.pop("LISTEN_PID", "") == str(os.getpid())
    count = environment.pop("LISTEN_FDS", "")
    try:
        sockets = [socket.socket(fileno=_FIRST_DESCRIPTOR + number) for number in range(int(count) if is_for_us else 0)]
        is_listening = all(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for each in sockets)
    except (OSError, ValueError) as error:
        raise UsageError(f"{SYSTEMD_OPTION}: cannot use systemd's sockets (LISTEN_FDS={count}): {error}") from error
    if not sockets or not is_listening:
        raise UsageError(
            f"{SYSTEMD_OPTION}: systemd passed no listening socket to this process. Start podgpu through podgpu.socket "
            "(systemctl enable --now podgpu.socket; it needs ListenStream= and Accept=no), or use -a instead"
        )
    for each in sockets:
        each.set_inheritable(False)
        each.setblocking(False)
    return sockets


def address_of(listening: socket.socket, host: str | None, secure: bool) -> Address:
    """Returns the address of a bound socket, including the port chosen for port 0. `host` is the configured host."""
    name = listening.getsockname()
    scheme = "https" if secure else "http"
    if not isinstance(name, tuple):
        return Address(f"{_UNIX}{name}", 0, scheme)
    own = "" if name[0] in ("0.0.0.0", "::") else name[0]
    return Address(own if host is None else host, name[1], scheme)
