"""Tests the process lists of NVML: duplicates, MIG and failing calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pynvml
import pytest

from podgpu.errors import Unsupported
from podgpu.model import ProcessUsage
from tests.gpu.nvml_bench import NvmlBench
from tests.simulated import FaultyNvml

GIB = 1024**3
COMPUTE, MPS, GRAPHICS = (
    f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "MPSCompute", "Graphics")
)


class Bench(NvmlBench):
    def place(self, pid: int, kind: Any = "compute", memory: int = GIB, **more: Any) -> None:  # type: ignore[override]
        super().place(pid, kind=kind, memory=memory, **more)

    def list_processes(self) -> Sequence[ProcessUsage]:
        return self.telemetry.processes(self.gpu)


class Wrapped:
    """A simulated driver. Subclasses replace some of its functions."""

    def __init__(self, driver: FaultyNvml) -> None:
        self.driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)


def entry(pid: int, memory: int | None = GIB, gi_id: int = 0xFFFFFFFF) -> Any:
    return pynvml.nvmlFriendlyObject(
        {
            "pid": pid,
            "usedGpuMemory": memory,
            "gpuInstanceId": gi_id,
            "computeInstanceId": 0xFFFFFFFF,
        }
    )


def test_all_kinds_of_processes_are_listed() -> None:
    bench = Bench()
    bench.place(41, "compute", 3 * GIB)
    bench.place(42, "mps", 2 * GIB)
    bench.place(43, "graphics", GIB)
    key = bench.gpu.key
    assert bench.list_processes() == (
        ProcessUsage(key, 41, 3 * GIB),
        ProcessUsage(key, 42, 2 * GIB, mps=True),
        ProcessUsage(key, 43, GIB),
    )


@pytest.mark.parametrize(
    ("compute", "graphics", "both"), [(2, 3, 3), (3, 2, 3), (None, 2, 2), (2, None, 2)]
)
def test_a_process_in_two_lists_is_listed_once(
    compute: int | None, graphics: int | None, both: int
) -> None:
    bench = Bench()
    bench.faults.answer(COMPUTE, [entry(41, compute)])
    bench.faults.answer(GRAPHICS, [entry(41, graphics)])
    assert bench.list_processes() == (ProcessUsage(bench.gpu.key, 41, both),)


def test_mps_clients_are_recognised_in_both_lists() -> None:
    """On an H200 with driver 580, the MPS server is only in the first list, and clients are in both
    lists.
    """
    bench = Bench()
    bench.faults.answer(COMPUTE, [entry(9, 1), entry(41, 2)])
    bench.faults.answer(MPS, [entry(41, 2)])
    assert [(process.pid, process.mps) for process in bench.list_processes()] == [
        (9, False),
        (41, True),
    ]


def test_without_any_list_processes_are_unsupported() -> None:
    bench = Bench()
    bench.place(41)
    for function in (COMPUTE, MPS, GRAPHICS):
        bench.faults.unsupported(function)
    with pytest.raises(Unsupported, match=bench.gpu.uuid):
        bench.list_processes()


class Growing(Wrapped):
    """The first three calls fail, as if processes started between NVML's count and its list."""

    times = 3

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        return self.driver.nvmlDeviceGetComputeRunningProcesses_v3(handle)


def test_a_list_that_grows_while_it_is_read_is_read_again() -> None:
    bench = Bench(wrap=Growing)
    bench.place(41)
    assert [usage.pid for usage in bench.list_processes()] == [41]


class OnlyParts(Wrapped):
    """Simulates missing privileges: the list of a GPU in MIG mode is refused or empty."""

    def __init__(self, refuses: bool, driver: FaultyNvml) -> None:
        super().__init__(driver)
        self.refuses = refuses

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.driver, name)
        if "RunningProcesses" not in name:
            return call

        def list_processes(handle: Any) -> Any:
            is_part = self.driver.nvmlDeviceGetUUID(handle).startswith("MIG-")
            if is_part or not self.driver.nvmlDeviceGetMigMode(handle)[0]:
                return call(handle)
            if self.refuses:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
            return []

        return list_processes


@pytest.mark.parametrize("refuses", [True, False])
def test_without_a_list_of_the_gpu_its_instances_are_read(refuses: bool) -> None:
    bench = Bench("1xH100/2x3g.40gb", wrap=partial(OnlyParts, refuses))
    first, second = (i.gi_id for i in bench.driver.gpus[0].instances)
    bench.place(41, gi_id=first)
    bench.place(42, "mps", gi_id=second)
    uuid = bench.gpu.uuid
    expected = (
        ProcessUsage(f"{uuid}/gi{first}", 41, GIB),
        ProcessUsage(f"{uuid}/gi{second}", 42, GIB, True),
    )
    assert bench.list_processes() == expected
