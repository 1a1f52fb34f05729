"""This module assembles `podgpu hook` and runs it: with a web server where it has an address, without where it has
none."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

from podgpu.compose.process import stop_on_signal
from podgpu.files import AtomicFile
from podgpu.hook.loop import Hook, HookSettings

if TYPE_CHECKING:  # it brings the web server
    from podgpu.web.sockets import Address

_log = logging.getLogger("podgpu")


def run_hook(settings: HookSettings, file: AtomicFile, address: Address | None) -> None:
    """Until SIGTERM, SIGINT or the end of an inherited connection. Raises StartError."""
    hook = Hook(settings, file)
    _log.info("keeping %s", file.path)
    if address is None:
        _run_without_port(hook)
    else:
        _run_with_port(hook, address)


def _run_with_port(hook: Hook, address: Address) -> None:
    from podgpu.hook.hook_app import hook_application
    from podgpu.web.app import Listener, run

    run(hook, [Listener(hook_application(hook), address, announcement="the hook's own metrics on %s/metrics")])


def _run_without_port(hook: Hook) -> None:
    """Without the web server it starts three times as fast, in half the memory: a runtime that starts plugins itself
    gives each of them 5 seconds."""
    stopping = stop_on_signal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hook.start(on_fatal=stopping.set)
    stopping.wait()
    hook.stop()
    if hook.fatal is not None:
        raise hook.fatal
