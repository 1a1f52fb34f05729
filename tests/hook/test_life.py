"""Tests that podlist.json lists the containers of a simulated runtime after every event."""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.node.hook import HookCounters, nri_pb2
from podgpu.node.hook.devices import Cards, Sandbox, find_gpus
from podgpu.node.hook.loop import Hook
from podgpu.node.hook.nri import (
    PLUGIN_SERVICE,
    RUNTIME_SERVICE,
    Message,
    Plugin,
    encode,
    split_messages,
)
from tests.hook.conftest import StartHook, wait_written
from tests.hook.runtime import (
    CREATED,
    PLUGIN,
    RUNNING,
    RUNTIME,
    STOPPED,
    Container,
    Ended,
    PluginError,
    Pod,
    Runtime,
    gpu_pod,
    uuid,
)
from tests.nodes.clock import wait_until


def errors(hook: Hook) -> dict[str, float]:
    family = next(one for one in hook.families() if one.name == "podgpu_hook_errors_total")
    return {dict(sample.labels.pairs)["reason"]: sample.value for sample in family.samples}


def count(hook: Hook, name: str) -> float:
    return next(one for one in hook.families() if one.name == name).samples[0].value


@pytest.mark.parametrize("dedicated", [True, False], ids=["own methods", "StateChange"])
def test_every_event(
    runtime: Runtime, podlist: Path, start_hook: StartHook, dedicated: bool
) -> None:
    runtime.dedicated = dedicated
    before = gpu_pod(1, (0, 1))
    runtime.pods[before.pod.id], runtime.containers[before.id] = (
        before.pod,
        replace(before, state=3),
    )
    start_hook()
    runtime.accept()
    assert runtime.registered == ("podgpu", "90")
    assert (
        runtime.events == 0b110_1010_1111
    )  # no bit above REMOVE_CONTAINER, because runtimes reject unknown bits
    wait_written(runtime, podlist)
    assert podlist.read_text().count("pod-1") == 1

    one, without = gpu_pod(2, (2,)), Container("c-3", Pod("s-3", "web"))
    for container in (one, without):
        runtime.run_pod(container.pod)
        assert runtime.create(container) == {}
        wait_written(runtime, podlist)
        runtime.start(container)
        wait_written(runtime, podlist)
    runtime.update(
        replace(one, env=(f"NVIDIA_VISIBLE_DEVICES={uuid(5)}",), gpus=(uuid(5),), state=3)
    )
    wait_written(runtime, podlist)
    runtime.stop_container(one)
    wait_written(runtime, podlist)
    runtime.remove(one)
    runtime.end_pod(one.pod, "StopPodSandbox")
    runtime.end_pod(one.pod)
    runtime.end_pod(before.pod)
    wait_written(runtime, podlist)
    assert json.loads(podlist.read_text()) == []


def test_nothing_is_written_before_the_synchronisation_is_complete(
    folder: Path, podlist: Path, start_hook: StartHook
) -> None:
    runtime = Runtime(folder / "nri.sock")
    podlist.write_text('["of an earlier hook"]')
    start_hook()
    runtime.connected()
    runtime.take_registration()
    runtime.configure()
    runtime.pods["sandbox-1"], runtime.containers["container-1"] = gpu_pod(1).pod, gpu_pod(1)
    runtime.synchronize(more=True)
    runtime.create(gpu_pod(1))
    assert podlist.read_text() == '["of an earlier hook"]'
    runtime.pods["sandbox-2"], runtime.containers["container-2"] = gpu_pod(2).pod, gpu_pod(2)
    runtime.synchronize()
    wait_written(runtime, podlist)
    runtime.stop()


@pytest.mark.fault(
    "The container runtime restarts, and containers start and end while the hook is not connected",
    (
        "podlist.json stays unchanged until the hook is connected and synchronised again; then it "
        "is "
        "correct"
    ),
)
def test_a_runtime_that_restarts(runtime: Runtime, podlist: Path, start_hook: StartHook) -> None:
    hook = start_hook()
    runtime.accept()
    stays, ends = gpu_pod(1, (0,)), gpu_pod(2, (1,))
    for one in (stays, ends):
        runtime.create(one)
    wait_written(runtime, podlist)
    was = podlist.read_bytes()
    runtime.stop()
    wait_until(lambda: not hook.is_synchronised)
    assert podlist.read_bytes() == was
    runtime.forget_pod(ends.pod)
    new = gpu_pod(3, (2,))
    runtime.pods[new.pod.id], runtime.containers[new.id] = new.pod, new
    runtime.listen()
    runtime.accept()
    wait_written(runtime, podlist)
    assert count(hook, "podgpu_hook_synchronisations_total") == 2


def test_containers_without_an_end_event_are_removed(
    runtime: Runtime, podlist: Path, start_hook: StartHook
) -> None:
    start_hook()
    runtime.accept()
    pod = Pod("s-1", "train", uid="u")
    crashed = Container("c-1", pod, env=(f"NVIDIA_VISIBLE_DEVICES={uuid(0)}",), gpus=(uuid(0),))
    runtime.create(crashed)
    del runtime.containers["c-1"]
    runtime.create(replace(crashed, id="c-2"))  # the same container, restarted
    wait_written(runtime, podlist)
    runtime.containers.clear()
    del runtime.pods["s-1"]
    runtime.run_pod(replace(pod, id="s-2"))  # the same pod in a new sandbox
    wait_written(runtime, podlist)
    other = gpu_pod(5)
    runtime.create(other)
    runtime.end_pod(other.pod)  # the runtime reports no event for the container
    wait_written(runtime, podlist)


@pytest.mark.fault(
    "A runtime speaks another version of NRI",
    (
        "It gets the error 'no such service'; a log line names both versions, and podlist.json "
        "stays "
        "unchanged"
    ),
)
def test_another_version_of_the_protocol(
    runtime: Runtime, podlist: Path, start_hook: StartHook, caplog: pytest.LogCaptureFixture
) -> None:
    hook = start_hook()
    runtime.connected()
    runtime.take_registration(status=nri_pb2.Status(code=12, message="unknown service"))
    wait_until(lambda: errors(hook).get("refused"))
    assert "rejects the plugin 90-podgpu (unknown service)" in caplog.text
    assert "v1alpha1" in caplog.text
    runtime.connected()
    runtime.send(RUNTIME, runtime.receive(RUNTIME)[0], 2, b"\xff\xff")
    wait_until(lambda: errors(hook).get("refused") == 2)
    assert "is not an NRI message" in caplog.text
    runtime.accept()
    with pytest.raises(PluginError) as caught:
        runtime.call("CreateContainer", b"", service="nri.pkg.api.v1beta9.Plugin")
    assert caught.value.code == 12
    assert "nri.pkg.api.v1beta9.Plugin/CreateContainer" in caplog.text
    assert "podgpu implements nri.pkg.api.v1alpha1.Plugin" in caplog.text
    runtime.create(gpu_pod(1))
    wait_written(runtime, podlist)


BAD_FRAMES = {
    "oversized piece": struct.pack(">II", PLUGIN, 4 * 1024 * 1024 + 11),
    "oversized message": struct.pack(">IIIIBB", PLUGIN, 10, 4 * 1024 * 1024 + 1, 1, 1, 0),
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.fault(
    (
        "The runtime's side of the NRI connection sends garbage: a frame over the limit, another "
        "protocol"
    ),
    (
        "The connection is closed with a log line and opened again; until then podlist.json stays "
        "unchanged"
    ),
)
@pytest.mark.parametrize("bad", BAD_FRAMES)
def test_bad_frames(
    runtime: Runtime,
    podlist: Path,
    start_hook: StartHook,
    bad: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = start_hook()
    runtime.accept()
    runtime.create(gpu_pod(1))
    wait_written(runtime, podlist)
    was = podlist.read_bytes()
    assert runtime.connection is not None
    runtime.connection.sendall(BAD_FRAMES[bad])
    with pytest.raises(Ended):
        runtime.receive(PLUGIN)
    assert podlist.read_bytes() == was
    wait_until(lambda: errors(hook).get("bad_frame") == 1)
    assert "data that is not valid NRI" in caplog.text
    runtime.accept()
    runtime.create(gpu_pod(2))
    wait_written(runtime, podlist)


def test_invalid_requests_are_answered(
    runtime: Runtime, podlist: Path, start_hook: StartHook
) -> None:
    """If the hook returned an error, the container would not start."""
    hook = start_hook()
    runtime.accept()
    for method in (
        "CreateContainer",
        "UpdateContainer",
        "StopContainer",
        "StateChange",
        "RunPodSandbox",
    ):
        assert runtime.call(method, b"\x0a\xff\xff\xff\xff\x0f") == b""
        assert runtime.call(method, b"") == b""
    runtime.send(PLUGIN, 99, 1, b"\xff\xff\xff")
    assert runtime.receive(PLUGIN) == (99, 2, b"")
    runtime.send(PLUGIN, 101, 3, b"data of a stream that is not open")
    runtime.create(gpu_pod(1))
    wait_written(runtime, podlist)
    assert errors(hook)["bad_request"] == 6
    assert errors(hook)["unexpected_message"] == 1


def test_a_runtime_that_rejects_plugins(
    runtime: Runtime, start_hook: StartHook, caplog: pytest.LogCaptureFixture
) -> None:
    hook = start_hook()
    runtime.connected()
    assert runtime.connection is not None
    runtime.receive(2)
    runtime.connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: errors(hook).get("refused"))
    assert "disable_connections" in caplog.text


def report_all(runtime: Runtime, pods: Iterable[Pod], containers: Iterable[Container]) -> None:
    """Connects, and reports these pods and containers in this order."""
    runtime.connected()
    runtime.take_registration()
    runtime.configure()
    request = nri_pb2.SynchronizeRequest(
        pods=[pod.message for pod in pods],
        containers=[container.message for container in containers],
    )
    assert runtime.call("Synchronize", request) == b""


def with_gpu(container: Container, number: int) -> Container:
    env = (f"NVIDIA_VISIBLE_DEVICES={uuid(number)}",)
    return replace(container, env=env, gpus=(uuid(number),))


POD = Pod("live", "train", uid="u")
MAIN = with_gpu(Container("c-main", POD, state=RUNNING, created_at=5), 1)
# The first container still runs, and the second one was just created.
SIDECAR = with_gpu(Container("c-side", POD, name="side", state=CREATED, created_at=6), 2)
DEAD = [replace(POD, id="dead-1"), replace(POD, id="dead-2"), replace(POD, id="dead-3")]
LEFTOVERS = [
    with_gpu(Container("c-1", DEAD[0], state=STOPPED, created_at=9), 7),
    # The runtime could not read the state of this container after a reboot.
    with_gpu(Container("c-2", DEAD[1], state=0, created_at=8), 8),
    with_gpu(Container("c-3", DEAD[1], name="side", state=0, created_at=8), 8),
]


@given(st.permutations([POD, *DEAD]), st.permutations([MAIN, SIDECAR, *LEFTOVERS]))
def test_a_pod_with_several_sandboxes_keeps_its_running_containers(
    pods: list[Pod], containers: list[Container]
) -> None:
    """After a reboot, the runtime reports the stopped sandboxes too, in any order."""
    reported: list[tuple[Sandbox, ...]] = []
    plugin = Plugin(reported.append, HookCounters())
    request = nri_pb2.SynchronizeRequest(
        pods=[pod.message for pod in pods],
        containers=[container.message for container in containers],
    )
    plugin.answer("Synchronize", request.SerializeToString())
    assert list_gpus(reported[-1]) == {"main": uuid(1), "side": uuid(2)}

    # The kubelet removes the stopped sandboxes later.
    for pod in DEAD:
        plugin.answer("StopPodSandbox", nri_pb2.Subject(pod=pod.message).SerializeToString())
        plugin.answer("RemovePodSandbox", nri_pb2.Subject(pod=pod.message).SerializeToString())
    assert list_gpus(reported[-1]) == {"main": uuid(1), "side": uuid(2)}
    assert plugin.container_count == 2


def list_gpus(sandboxes: Iterable[Sandbox]) -> dict[str, str]:
    gpus = {}
    for sandbox in sandboxes:
        for entry in find_gpus(sandbox, Cards()):
            assert entry.container not in gpus, "a container is listed once"
            gpus[entry.container] = ",".join(entry.gpu_list or ())
    return gpus


@given(st.permutations([POD, *DEAD]))
def test_a_pod_without_a_running_container_has_the_newest_one(pods: list[Pod]) -> None:
    """The hook may start between the creation and the start of a container."""
    newest = with_gpu(Container("c-0", POD, state=CREATED, created_at=9), 1)
    reported: list[tuple[Sandbox, ...]] = []
    plugin = Plugin(reported.append, HookCounters())
    request = nri_pb2.SynchronizeRequest(
        pods=[pod.message for pod in pods],
        containers=[one.message for one in [*LEFTOVERS, newest, *LEFTOVERS]],
    )
    plugin.answer("Synchronize", request.SerializeToString())
    assert list_gpus(reported[-1]) == {"main": uuid(1)}


def test_events_of_a_sandbox_replace_the_older_sandbox_of_its_pod(
    runtime: Runtime, podlist: Path, start_hook: StartHook
) -> None:
    """The runtime may send only the id of a known pod."""
    start_hook()
    old = with_gpu(Container("c-1", replace(POD, id="s-1"), state=CREATED), 3)
    report_all(runtime, [POD, old.pod], [old])
    runtime.containers[old.id] = old
    wait_written(runtime, podlist)

    del runtime.containers[old.id]
    only_id = nri_pb2.Subject(pod=nri_pb2.PodSandbox(id=POD.id), container=MAIN.message)
    assert runtime.call("StartContainer", only_id) == b""
    runtime.containers[MAIN.id] = MAIN
    wait_written(runtime, podlist)


def test_events_of_a_pod_keep_its_other_containers(
    runtime: Runtime, podlist: Path, start_hook: StartHook
) -> None:
    start_hook()
    report_all(runtime, [POD], [MAIN])
    runtime.containers[MAIN.id] = MAIN
    runtime.create(SIDECAR)
    runtime.start(SIDECAR)
    wait_written(runtime, podlist)


def test_a_full_report_with_older_sandboxes_and_containers(
    runtime: Runtime, podlist: Path, start_hook: StartHook
) -> None:
    """Only the newest running container of a name is listed."""
    newest = with_gpu(Container("c-2", POD, created_at=2), 2)
    older = replace(with_gpu(newest, 1), id="c-1", created_at=1)
    stopped = replace(older, id="c-3", created_at=3, state=STOPPED)
    in_old_sandbox = replace(older, id="c-0", pod=replace(POD, id="s-1"))
    in_unknown_sandbox = replace(older, id="c-4", pod=replace(POD, id="s-3"), name="other")
    containers = [newest, older, stopped, in_old_sandbox, in_unknown_sandbox]
    start_hook()
    report_all(runtime, [in_old_sandbox.pod, POD], containers)
    runtime.containers[newest.id] = newest
    wait_written(runtime, podlist)


def test_the_work_for_a_full_report_is_proportional_to_its_containers() -> None:
    """The runtime waits for the answer, and starts no container until then."""

    def count_steps(size: int) -> int:
        large = Pod("large", "large")
        many = [Container(f"large-{number}", large, name=f"c-{number}") for number in range(size)]
        many += [gpu_pod(number) for number in range(size)]
        request = nri_pb2.SynchronizeRequest(
            pods=[large.message] + [container.pod.message for container in many[size:]],
            containers=[container.message for container in many],
        )
        plugin = Plugin(lambda sandboxes: None, HookCounters())
        payload = request.SerializeToString()
        steps = count_traced_lines(lambda: plugin.answer("Synchronize", payload))
        assert plugin.container_count == 2 * size
        return steps

    assert count_steps(400) < 5 * count_steps(100)


def count_traced_lines(action: Callable[[], object]) -> int:
    """Returns how many lines of Python code the action executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(earlier)
    return count


MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from([PLUGIN_SERVICE, RUNTIME_SERVICE]),
        st.integers(0, 2**32 - 1),
        st.sampled_from([1, 2]),
        st.binary(max_size=200) | st.just(b"x" * 10_000),
    ),
    max_size=5,
)


@given(MESSAGES, st.integers(1, 5000))
def test_round_trip_in_any_pieces(messages: list[Message], size: int) -> None:
    sent = b"".join(map(encode, messages))
    assert (
        list(split_messages(sent[at : at + size] for at in range(0, len(sent), size))) == messages
    )


@given(st.binary(max_size=300))
def test_garbage_is_rejected_or_incomplete(garbage: bytes) -> None:
    with suppress(SourceError):
        list(split_messages([garbage]))
