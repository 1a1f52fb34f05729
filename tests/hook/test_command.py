"""Tests the process `podgpu hook`, started manually or by the runtime, and an exporter that reads
its file.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_option_table import execute
from tests.hook.conftest import wait_written
from tests.hook.runtime import Container, Pod, Runtime, gpu_pod
from tests.hook.test_gpus import koordinator
from tests.nodes.clock import wait_until
from tests.privilege import mounted_file

PODGPU = [sys.executable, "-m", "podgpu"]


def options(folder: Path) -> list[str]:
    return [
        "--socket",
        str(folder / "nri.sock"),
        "--podlist",
        str(folder / "podlist.json"),
        "--path-proc",
        str(folder),
    ]


@contextmanager
def running(*arguments: str, **more: object) -> Iterator[subprocess.Popen[str]]:
    command = [*PODGPU, "hook", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_it_runs_until_sigterm(runtime: Runtime, folder: Path, podlist: Path) -> None:
    with running(*options(folder)) as hook:
        runtime.accept()
        runtime.create(gpu_pod(1))
        hook.send_signal(
            signal.SIGTERM
        )  # the hook must write all reported containers before it exits
        log = hook.communicate(timeout=60)[1]
    assert hook.returncode == 0
    wait_written(runtime, podlist)
    assert "registered with containerd v2.2.1" in log
    assert "Traceback" not in log


def test_started_by_the_runtime(folder: Path, podlist: Path) -> None:
    runtime = Runtime(folder / "unused.sock")
    ours, theirs = socket.socketpair()
    environment = {
        **os.environ,
        "NRI_PLUGIN_SOCKET": str(theirs.fileno()),
        "NRI_PLUGIN_NAME": "gpus",
        "NRI_PLUGIN_IDX": "42",
    }
    with running(*options(folder), env=environment, pass_fds=[theirs.fileno()]) as hook:
        theirs.close()
        runtime.take(ours)
        assert runtime.registered == ("gpus", "42")
        runtime.create(gpu_pod(1))
        wait_written(runtime, podlist)
        runtime.drop()
        assert hook.wait(timeout=60) == 0, "must exit cleanly; the runtime restarts it"
    runtime.stop()


def test_metrics_and_probes_on_a_port(runtime: Runtime, folder: Path, podlist: Path) -> None:
    with running(*options(folder), "-a", "127.0.0.1:0") as hook:
        assert hook.stderr is not None
        url = next(
            found[1]
            for line in hook.stderr
            if (found := re.search(r"metrics are at (http://\S+)/metrics", line))
        )
        assert _status(f"{url}/livez") == 200
        assert _status(f"{url}/ready") == 503
        runtime.accept()
        runtime.create(gpu_pod(1))
        wait_written(runtime, podlist)
        wait_until(lambda: _status(f"{url}/ready") == 200)
        exposition = urllib.request.urlopen(f"{url}/metrics", timeout=20).read().decode()
        for line in (
            "podgpu_hook_synchronised 1",
            "podgpu_hook_podlist_up_to_date 1",
            "podgpu_hook_gpu_containers 1",
            'podgpu_hook_requests_total{method="CreateContainer"} 1',
        ):
            assert f"\n{line}\n" in exposition
        assert "pod-1" not in exposition
        runtime.stop()
        wait_until(lambda: _status(f"{url}/ready") == 503)
        assert _status(f"{url}/livez") == 200, "must stay alive while the runtime is unavailable"


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_seed_end_to_end(runtime: Runtime, folder: Path, podlist: Path) -> None:
    """A pod with koordinator's annotation is a holder in the exporter's metrics."""
    with running(*options(folder)):
        runtime.accept()
        given = Pod("s", "train", annotations=koordinator({"minor": 0}))
        runtime.create(Container("c", given, gpus=("0",)))
        wait_written(runtime, podlist)
    command = [
        "exporter",
        "--telemetry",
        "simulated:1xH100",
        "--allocation",
        f"podlist:{podlist}",
        "--once",
    ]
    (line,) = (
        line
        for line in execute(command).out.splitlines()
        if line.startswith("podgpu_allocation_info")
    )
    assert 'namespace="ml",pod="train",container="main"' in line
    assert 'source="podlist"' in line


@pytest.mark.fault(
    (
        "podlist.json itself is mounted into the hook's container, as the seed's manifest does, "
        "and "
        "not its directory"
    ),
    (
        "The hook does not start; its message says to mount the directory, because a mounted file "
        "cannot be replaced"
    ),
)
def test_a_mount_point_is_refused(folder: Path, podlist: Path) -> None:
    with mounted_file(podlist):
        assert f"--podlist {podlist} is a mount point" in _refused(*options(folder))


@pytest.mark.parametrize(
    ("more", "environment", "message"),
    [
        (
            ["--podlist", "/nowhere/podlist.json"],
            {},
            "the directory /nowhere does not exist; create or mount it",
        ),
        ([], {"NRI_PLUGIN_SOCKET": "three"}, "NRI_PLUGIN_SOCKET 'three'"),
    ],
)
def test_usage_errors(
    folder: Path, more: list[str], environment: dict[str, str], message: str
) -> None:
    assert message in _refused(*options(folder), *more, **environment)


def _refused(*arguments: str, **environment: str) -> str:
    """Returns the message of a usage error."""
    ran = execute(["hook", *arguments], **environment)
    assert ran.code == 2, ran.err
    return ran.complaint
