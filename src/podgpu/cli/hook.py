"""`podgpu hook`: an NRI plugin that maintains koordinator's podlist.json."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from podgpu.cli.options import make_command
from podgpu.cli.terminal import stop_on_signal
from podgpu.errors import UsageError
from podgpu.files import AtomicFile
from podgpu.node.hook.devices import read_cards
from podgpu.node.hook.loop import Hook
from podgpu.node.hook.nri import PluginName

if TYPE_CHECKING:
    from podgpu.web.app import Address

_log = logging.getLogger("podgpu")


@make_command(
    "hook",
    ("podgpu hook", "maintain podlist.json"),
    ("podgpu hook -a :9403", "also serve metrics and probes"),
    (
        "podgpu hook --podlist /run/gpus/podlist.json --inject",
        "maintain another file, and set NVIDIA_VISIBLE_DEVICES from koordinator's annotation",
    ),
)
def command(**options: Any) -> None:
    """Maintain podlist.json: which container has which GPU, as reported by the container runtime
    (NRI).

    Connects to the runtime's NRI socket, or uses the runtime's connection if the runtime started
    the hook (NRI_PLUGIN_SOCKET). Changes containers only if --inject is given.
    """
    path = options["podlist"]
    if os.path.ismount(path):
        problem = "is a mount point and cannot be replaced: mount its directory"
        raise UsageError(f"--podlist {path} {problem}")
    # Set by a runtime that starts the plugin itself.
    descriptor = os.environ.get("NRI_PLUGIN_SOCKET", "")
    if descriptor and not descriptor.isdecimal():
        problem = "must be the number of an open connection"
        raise UsageError(f"NRI_PLUGIN_SOCKET {descriptor!r}: {problem}")

    file = AtomicFile(os.path.abspath(path), option="--podlist")
    hook = Hook(
        file,
        partial(read_cards, options["path_proc"]),
        options["socket"],
        inherited=int(descriptor) if descriptor else None,
        name=PluginName(
            os.environ.get("NRI_PLUGIN_NAME") or "podgpu",
            os.environ.get("NRI_PLUGIN_IDX") or "90",
        ),
        inject=options["inject"],
    )

    _log.info("maintaining %s", file.path)
    if options["address"] is None:
        _run_without_port(hook)
    else:
        _run_with_port(hook, options["address"])


def _run_with_port(hook: Hook, address: Address) -> None:
    from podgpu.web.app import Listener, make_application, run
    from podgpu.web.responses import metrics_route, probe_routes

    def ready() -> tuple[bool, str]:
        if not hook.is_synchronised:
            return False, "the runtime has not reported its containers yet\n"
        if not hook.writer.is_up_to_date:
            return False, "podlist.json is not up to date\n"
        return True, "OK\n"

    routes = [metrics_route(hook.families), *probe_routes(lambda: (True, "OK\n"), ready)]
    app = make_application(routes, None)
    run([hook], [Listener(app, address, announcement="the hook's own metrics are at %s/metrics")])


def _run_without_port(hook: Hook) -> None:
    """Runs without the web server.

    The hook then starts three times as fast; a runtime waits only 5 s for a plugin.
    """
    stopping = stop_on_signal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hook.start(on_fatal=stopping.set)
    stopping.wait()
    hook.stop()
    if hook.fatal is not None:
        raise hook.fatal
