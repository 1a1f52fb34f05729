"""Reading a text costs what the text is long: work is counted in bytecodes, which no load on the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from podgpu.enrich.relabel import relabel
from podgpu.gpu.exporter import ExporterTelemetry
from podgpu.gpu.exposition import parse_exposition
from podgpu.metrics.fields import field_named
from podgpu.metrics.labels import Policy
from podgpu.model import Assignment, Workload

SHAPES = {
    "an instance on each GPU": 'a{{gpu="{n}",UUID="G{n}",GPU_I_ID="1"}} 1\n',
    "all instances on one GPU": 'a{{gpu="0",UUID="G",GPU_I_ID="{n}"}} 1\n',
    "GPUs": 'a{{gpu="{n}",UUID="G{n}"}} 1\n',
    "pods on one GPU": 'a{{gpu="0",UUID="G",pod="p{n}"}} 1\n',
    "metrics of one GPU": 'a{n}{{gpu="0",UUID="G"}} 1\n',
}
TEMPERATURE = field_named("DCGM_FI_DEV_GPU_TEMP")


class Text:
    shown = "the exposition"

    def __init__(self, content: bytes) -> None:
        self.content = content

    def fetch(self) -> bytes:
        return self.content


def bytecodes(act: Callable[[], object]) -> int:
    count = 0

    def follow(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def exposition_of(shape: str, rows: int) -> bytes:
    return "".join(SHAPES[shape].format(n=n) for n in range(rows)).encode()


def telemetry(content: bytes) -> None:
    source = ExporterTelemetry(Text(content))
    for gpu in source.inventory().gpus:
        source.read(gpu, [TEMPERATURE] if TEMPERATURE else [])


def enrichment(content: bytes) -> None:
    exposition = parse_exposition(content, "exposition")
    relabel(
        exposition, [Assignment(d.key, Workload("ns", "pod", "c"), "kubelet") for d in exposition.devices], Policy()
    )


@pytest.mark.parametrize("read", [telemetry, enrichment])
@pytest.mark.parametrize("shape", SHAPES)
def test_four_times_the_exposition_is_four_times_the_work(shape: str, read: Callable[[bytes], None]) -> None:
    """Sixteen times, if it were quadratic."""
    read(exposition_of(shape, 100))  # what is done once
    small, large = (bytecodes(lambda n=n: read(exposition_of(shape, n))) for n in (100, 400))
    assert large < 5 * small
