"""An API server that means no good, for the cluster view that finds its exporters there.

`python -m endurance.attack.hostile_api HONEST PORT...` says that there is an exporter at 127.0.0.1:HONEST, over TLS,
and others at these ports. It listens on a port of loopback, prints it, and until its standard input ends it changes its
mind, breaks off, falls silent and talks nonsense by turns. Of the honest exporter it never says that it is gone.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from tests.kube.api_server import SimulatedApiServer

LABELS = {"app": "podgpu"}
_NAMESPACE = "monitoring"
_SLICES, _PODS = "endpointslices", "pods"
_EVERY = 1.5
_NOBODY = 250
"""Endpoints at which nobody listens."""
_MIB = 1 << 20


def slice_of(name: str, port: int, port_name: str = "metrics") -> dict[str, Any]:
    labels = LABELS | {"kubernetes.io/service-name": "podgpu"}
    return {
        "metadata": {"name": name, "namespace": _NAMESPACE, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["127.0.0.1"], "targetRef": {"kind": "Pod", "name": name, "uid": name}}],
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
    }


def _nobody(turn: int) -> dict[str, Any]:
    """Other addresses each time."""
    body = slice_of("nobody", 9)
    addresses = [f"127.{turn % 200 + 20}.{n // 250}.{n % 250 + 1}" for n in range(_NOBODY)]
    return body | {"endpoints": [{"addresses": [address]} for address in addresses]}


def _pod(turn: int, number: int) -> dict[str, Any]:
    owner = {"kind": "ReplicaSet", "name": f"owner-{turn}", "controller": True}
    return {"metadata": {"name": f"p{number}", "namespace": "ns", "ownerReferences": [owner]}, "spec": {}}


class Mischief:
    """What is done by turns. `pause` waits for so many seconds."""

    def __init__(self, server: SimulatedApiServer, hostile: Sequence[int], pause: Callable[[float], object]) -> None:
        self._server = server
        self._hostile = hostile
        self._pause = pause
        self._turn = count()

    def next(self) -> None:
        turn = next(self._turn)
        _ACTS[turn % ACTS](self, turn)

    def others(self, turn: int) -> None:
        """Who comes, who goes, and many where nobody is."""
        self._server.put(_SLICES, _nobody(turn))
        gone = turn % max(1, len(self._hostile))
        for number, port in enumerate(self._hostile):
            if number != gone:
                self._server.put(_SLICES, slice_of(f"hostile-{number}", port))
        self._server.remove(_SLICES, f"hostile-{gone}", _NAMESPACE)

    def garbage_in_the_watch(self, _turn: int) -> None:
        self._server.send(b'{"type":"MODIFIED","object":{"metadata":{"name":"\xff\xfe')
        self._server.cut_watches()

    def huge_event(self, _turn: int) -> None:
        self._server.send(b'{"type":"ADDED","object":' + b"[" * (8 * _MIB) + b"\n")

    def cut(self, _turn: int) -> None:
        self._server.cut_watches()

    def compact(self, _turn: int) -> None:
        self._server.compact()
        self._server.cut_watches()

    def no_list(self, _turn: int) -> None:
        with self._answering(b'{"metadata":{"resourceVersion":"1"},"items":[' + b"{}," * 100_000):
            self._server.compact()
            self._server.cut_watches()
            self._pause(_EVERY)

    def endless_list(self, _turn: int) -> None:
        self._server.raw_endless = True
        with self._answering(b'{"items":["' + b"a" * _MIB):
            self._server.compact()
            self._server.cut_watches()
            self._pause(_EVERY)
        self._server.raw_endless = False

    def pods(self, turn: int) -> None:
        self._server.put(_PODS, *(_pod(turn, number) for number in range(500)))

    def refuse(self, _turn: int) -> None:
        self._server.refusal = 503, "etcd is away" * 1000
        self._server.cut_watches()
        self._pause(_EVERY)
        self._server.refusal = None

    def silence(self, _turn: int) -> None:
        self._server.hang()
        self._pause(2 * _EVERY)
        self._server.resume()

    @contextmanager
    def _answering(self, body: bytes) -> Iterator[None]:
        self._server.raw_answer = body
        try:
            yield
        finally:
            self._server.raw_answer = None


_ACTS: Sequence[Callable[[Mischief, int], None]] = (
    Mischief.others,
    Mischief.garbage_in_the_watch,
    Mischief.cut,
    Mischief.no_list,
    Mischief.compact,
    Mischief.huge_event,
    Mischief.pods,
    Mischief.refuse,
    Mischief.endless_list,
    Mischief.silence,
)
ACTS = len(_ACTS)


def main(arguments: Sequence[str]) -> None:
    honest, *hostile = map(int, arguments)
    os.nice(19)
    ended = threading.Event()
    with SimulatedApiServer() as server:
        server.put(_SLICES, slice_of("honest", honest, "https-metrics"))
        mischief = Mischief(server, hostile, ended.wait)
        mischief.next()
        print(server.url.rpartition(":")[2], flush=True)
        threading.Thread(target=_end_with_input, args=(ended,), daemon=True).start()
        while not ended.wait(_EVERY):
            mischief.next()


def _end_with_input(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main(sys.argv[1:])
