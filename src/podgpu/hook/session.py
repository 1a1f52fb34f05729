"""Session is one connection to the runtime: it registers the plugin, then answers until the connection ends.

Whatever goes wrong inside, the runtime gets an answer without an adjustment, and at once: an error would be the end of
the container. The plugin works in a thread of its own; what it has not answered by the deadline is answered for it, and
what comes while it is still busy is answered straight away. It is told all the same: late is better than wrong.
"""

from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
import time
from typing import Protocol

from google.protobuf.message import DecodeError

from podgpu.errors import SourceError
from podgpu.hook import nri_pb2
from podgpu.hook.frames import PLUGIN_SERVICE, REQUEST, RESPONSE, RUNTIME_SERVICE, BadFrame, Message, Trunk, encode
from podgpu.hook.plugin import RUNTIME, SERVICE, NoSuchMethod
from podgpu.hook.tallies import Tallies

DEADLINE = 0.5
"""Seconds; the runtime gives up after 2 unless told otherwise."""
_PART_OF_TIMEOUT = 0.25
_MOST_WAITING = 4096
_SEND_SECONDS = 5
_REGISTRATION_SECONDS = 60.0
"""The runtime takes plugins one after the other, and waits for each of them."""
_READ_BYTES = 256 * 1024
_UNIMPLEMENTED = 12

_log = logging.getLogger("podgpu")


class Answers(Protocol):
    """What a session asks for the answers: `Plugin`."""

    @property
    def request_timeout(self) -> float | None: ...

    def answer(self, method: str, payload: bytes) -> bytes: ...


class Session:
    def __init__(
        self,
        connection: socket.socket,
        plugin: Answers,
        name: tuple[str, str],
        tallies: Tallies,
        deadline: float = DEADLINE,
    ) -> None:
        """`name`: the plugin's, and its index of two digits."""
        self._connection = connection
        self._plugin = plugin
        self._name, self._index = name
        self._tallies = tallies
        self._deadline = deadline
        self._worker = _Worker(plugin, tallies)
        self._registered = False

    def run(self) -> None:
        """Until the connection ends. Raises SourceError when it does so in any other way than between two messages."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECONDS, 0))
        try:
            self._register()
            self._read_all()
        except TimeoutError as error:
            raise SourceError(
                "no_answer",
                f"the runtime did not answer for {_REGISTRATION_SECONDS:.0f} s after it was asked to register",
            ) from error
        except OSError as error:
            raise SourceError("connection_lost", f"the connection to the runtime broke ({error.strerror})") from error
        finally:
            self._worker.end()
            self._connection.close()

    def _register(self) -> None:
        self._connection.settimeout(_REGISTRATION_SECONDS)
        asked = nri_pb2.RegisterPluginRequest(plugin_name=self._name, plugin_idx=self._index)
        request = nri_pb2.Request(service=RUNTIME, method="RegisterPlugin", payload=asked.SerializeToString())
        self._send(Message(RUNTIME_SERVICE, 1, REQUEST, request.SerializeToString()))

    def _read_all(self) -> None:
        trunk = Trunk()
        while received := self._connection.recv(_READ_BYTES):
            for message in trunk.feed(received):
                self._take(message)
        if not trunk.is_between_messages:
            raise SourceError("truncated", "the connection to the runtime ended in the middle of a message")
        if not self._registered:
            raise SourceError(
                "refused",
                "the runtime closed the connection before it took the plugin: see its log; it may not let plugins in"
                " that it did not start itself (containerd: disable_connections)",
            )

    def _take(self, message: Message) -> None:
        if message.service == RUNTIME_SERVICE and message.kind == RESPONSE:
            self._registration_answered(message.data)
        elif message.service == PLUGIN_SERVICE and message.kind == REQUEST:
            self._send(message._replace(kind=RESPONSE, data=self._answer(message.data)))
        else:
            self._tallies.error("unexpected_message")

    def _registration_answered(self, data: bytes) -> None:
        try:
            answer = nri_pb2.Response.FromString(data)
        except DecodeError as error:
            raise BadFrame("the answer to the registration is not a ttrpc message") from error
        if answer.status.code:
            raise SourceError(
                "refused",
                f"the runtime does not take the plugin {self._index}-{self._name} ({answer.status.message}): it may"
                " speak another version of NRI than v1alpha1, which is containerd's since 1.7 and CRI-O's since 1.26",
            )
        self._registered = True
        self._connection.settimeout(None)

    # Answers

    def _answer(self, data: bytes) -> bytes:
        began = time.monotonic()
        try:
            asked = nri_pb2.Request.FromString(data)
        except DecodeError:
            self._tallies.error("bad_request")
            return b""
        if asked.service != SERVICE:
            self._refuse_service(asked.service)
            return _status(_UNIMPLEMENTED, f"podgpu answers {SERVICE} only")
        answer = self._worker.answer(asked.method, asked.payload, self._patience)
        self._tallies.answered(asked.method if answer is not None else "other", time.monotonic() - began)
        if answer is None:
            return _status(_UNIMPLEMENTED, f"podgpu has no {asked.method[:80]}")
        response: bytes = nri_pb2.Response(payload=answer).SerializeToString()
        return response

    @property
    def _patience(self) -> float:
        timeout = self._plugin.request_timeout
        return self._deadline if timeout is None else min(self._deadline, timeout * _PART_OF_TIMEOUT)

    def _refuse_service(self, service: str) -> None:
        self._tallies.error("other_protocol")
        _log.warning("the runtime asks for %s, another protocol than %s: refused", service[:200], SERVICE)

    def _send(self, message: Message) -> None:
        self._connection.sendall(encode(message))


def _status(code: int, text: str) -> bytes:
    response: bytes = nri_pb2.Response(status=nri_pb2.Status(code=code, message=text)).SerializeToString()
    return response


class _Asked:
    """One question on its way through the worker."""

    __slots__ = ("answer", "done", "method", "payload")

    def __init__(self, method: str, payload: bytes) -> None:
        self.method = method
        self.payload = payload
        self.answer: bytes | None = b""
        self.done = threading.Event()


class _Worker:
    """Has the plugin answer, in order, in its own thread."""

    def __init__(self, plugin: Answers, tallies: Tallies) -> None:
        self._plugin = plugin
        self._tallies = tallies
        self._waiting: queue.Queue[_Asked | None] = queue.Queue()
        self._late: _Asked | None = None
        self._said: set[str] = set()
        threading.Thread(target=self._work, name="hook-answers", daemon=True).start()

    def answer(self, method: str, payload: bytes, patience: float) -> bytes | None:
        """None: there is no such method. Without an adjustment when the plugin takes too long."""
        if self._waiting.qsize() > _MOST_WAITING:
            raise SourceError("hung", "the plugin hangs: it connects again, and the runtime lists everything again")
        asked = _Asked(method, payload)
        self._waiting.put(asked)
        is_behind = self._late is not None and not self._late.done.is_set()
        if is_behind or not asked.done.wait(patience):
            self._late = asked
            self._tallies.error("deadline")
            if not is_behind:
                _log.warning("%s took longer than %.1f s: answered without an adjustment", method[:80], patience)
            return b""
        return asked.answer

    def end(self) -> None:
        self._waiting.put(None)

    def _work(self) -> None:
        while (asked := self._waiting.get()) is not None:
            asked.answer = self._try(asked)
            asked.done.set()

    def _try(self, asked: _Asked) -> bytes | None:
        try:
            return self._plugin.answer(asked.method, asked.payload)
        except NoSuchMethod:
            return None
        except DecodeError:
            self._failed(asked, "bad_request", "what the runtime sent is not an NRI message")
        except SourceError as error:
            self._failed(asked, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - the edge: a bug here must not cost a pod its start
            _log.exception("unexpected error, please report it")
            self._failed(asked, "bug", f"{type(error).__name__}: {error}")
        return b""

    def _failed(self, asked: _Asked, reason: str, what: str) -> None:
        """Counted every time, said once."""
        self._tallies.error(reason)
        level = logging.DEBUG if reason in self._said else logging.WARNING
        self._said.add(reason)
        _log.log(level, "%s is answered without an adjustment: %s", asked.method[:80], what)
