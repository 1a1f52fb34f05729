"""Tests the sources that `--allocation` creates, including `auto`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.sources import SOURCES, make_allocations
from podgpu.errors import SourceError, UsageError
from podgpu.kube.config import NoApi
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.holders import AllocationSource
from tests.simulated import OTHER_PID_NAMESPACE, FaultyNvml, FaultyProc

Create = Callable[..., list[AllocationSource]]
DEFAULT_SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"


@dataclass
class Api:
    """A fake of the API access, with or without a configured API server."""

    is_available: bool = False
    works: bool = True

    @property
    def config(self) -> Any:
        return object()

    def known_pods(self) -> Any:
        return ()

    def watch_pods(self) -> Any:
        if not self.works:
            raise NoApi("no kubeconfig")
        return object()

    @property
    def node(self) -> str:
        return "node-1"

    def watch(self, *arguments: object) -> Any:
        return self.watch_pods()


@pytest.fixture
def create(folder: Path) -> Create:
    FaultyProc(folder / "proc", OTHER_PID_NAMESPACE)

    def run(text: str, api: Api | None = None, **options: Any) -> list[AllocationSource]:
        values: dict[str, Any] = {
            "allocation": text,
            "kubernetes": True,
            "kubernetes_enable_dra": False,
            "pod_resources_kubelet_socket": f"{folder}/pod-resources/kubelet.sock",
            "nvidia_resource_names": "",
            "hpc_job_mapping_dir": "",
            "path_proc": f"{folder}/proc",
        }
        access: Any = api or Api()
        return make_allocations(values | options, access, NvmlTelemetry(FaultyNvml("1xH100")))

    return run


def names(sources: list[AllocationSource]) -> list[str]:
    return [source.name for source in sources]


def test_order_and_arguments(create: Create, folder: Path) -> None:
    assert names(create("hpc:/jobs, kubelet ,podlist:/p.json")) == ["hpc", "kubelet", "podlist"]
    assert names(create("hpc", hpc_job_mapping_dir="/jobs")) == ["hpc"]
    podlist, checkpoint = create(f"podlist:{folder}/p.json,checkpoint:{folder}/c")
    assert podlist.paths == [f"{folder}/p.json"]  # type: ignore[attr-defined]
    assert checkpoint.path == f"{folder}/c"  # type: ignore[attr-defined]
    (kubelet,) = create("kubelet", nvidia_resource_names="a.b/c", kubernetes_enable_dra=True)
    assert kubelet.resource_names == {"a.b/c"}  # type: ignore[attr-defined]
    assert kubelet.claims is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "crystal-ball",
            f"'crystal-ball': unknown source; write auto alone, or some of {', '.join(SOURCES)}",
        ),
        ("kubelet,", "'': unknown source"),
        ("auto,kubelet", "write auto alone"),
        ("kubelet:/run/k.sock", "takes no argument, but '/run/k.sock' was given"),
        ("hpc", "set the directory of the job files, as in hpc:/run/dcgm-job-map"),
        ("annotations", "no kubeconfig"),
    ],
)
def test_invalid_options(create: Create, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        create(text, api=Api(works=False))


def test_a_podlist_is_searched_in_the_folder_of_the_kubelets_socket(
    create: Create, folder: Path
) -> None:
    """The mount point in koordinator's manifest is searched only if the socket is the default."""
    (source,) = create("podlist", pod_resources_kubelet_socket=DEFAULT_SOCKET)
    assert source.paths == (f"{os.path.dirname(DEFAULT_SOCKET)}/podlist.json", "/podlist.json")  # type: ignore[attr-defined]
    (source,) = create("podlist")
    with pytest.raises(
        SourceError, match=f"{folder}/pod-resources/podlist.json does not exist: mount"
    ):
        source.assignments(())


def test_auto_without_kubernetes(create: Create, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert names(create("auto", kubernetes=False)) == []
    assert caplog.messages == []
    assert names(create("auto", kubernetes=False, hpc_job_mapping_dir="/jobs")) == ["hpc"]


def test_auto_uses_the_sources_that_are_present(
    create: Create, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert names(create("auto")) == ["kubelet"]
    (folder / "device-plugins").mkdir()
    (folder / "device-plugins" / "kubelet_internal_checkpoint").touch()
    assert names(create("auto")) == ["kubelet", "checkpoint"], (
        "the checkpoint is used if the socket is missing"
    )
    (folder / "pod-resources").mkdir()
    (folder / "pod-resources" / "kubelet.sock").touch()
    assert names(create("auto")) == ["kubelet"], "an outdated checkpoint must not be used"
    (folder / "pod-resources" / "podlist.json").touch()
    (folder / "proc" / "self" / "ns" / "pid").unlink()
    (folder / "proc" / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
    every = ["annotations", "podlist", "kubelet", "hpc", "processes"]
    assert names(create("auto", api=Api(is_available=True), hpc_job_mapping_dir="/jobs")) == every
    assert f"allocation sources: {', '.join(every)}" in caplog.messages


def test_auto_and_dra_continue_without_the_api_server(
    create: Create, caplog: pytest.LogCaptureFixture
) -> None:
    sources = create("auto", api=Api(is_available=True, works=False), kubernetes_enable_dra=True)
    assert names(sources) == ["kubelet"]
    assert sources[0].claims is None  # type: ignore[attr-defined]
    assert [message.partition(": ")[0] for message in caplog.messages] == [
        "--allocation auto (annotations)",
        "--kubernetes-enable-dra",
    ]
