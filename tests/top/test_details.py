"""The detail pane: everything that is known of the GPU under the cursor, in words, on a terminal of any width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.model import Workload, WorkloadOwner
from podgpu.top.api_answers import FieldFact, GpuFacts, SourceFact, XidFact
from podgpu.top.cells import ASCII, PLAIN, width_of
from podgpu.top.details import More, Subject, details_of
from podgpu.top.figures import Condition, DeviceFigures, HolderFigures
from podgpu.top.history import Idle
from podgpu.top.table import Watched, as_text
from tests.top.scene import BATCH, GIB, TRAINER

ROW = ("gpu-node-1", "GPU-7", "", "")
NOW = 1_800_000_000.0
LOST = Condition("lost", NOW - 724, "GPU 7 has fallen off the bus", "Drain the node and reset the GPU.")
HOT = Condition("thermal", None, "it is throttled by heat", "")
TRAINING = HolderFigures(
    TRAINER, 0.93, 61 * GIB, 2, share=1.0, owner=WorkloadOwner("Job", "train-bert"), cost_per_hour=2.5, idle_since=None
)
HEALTHY = DeviceFigures(
    "GPU-7",
    7,
    "NVIDIA H100 80GB HBM3",
    "gpu-node-1",
    utilization=0.93,
    memory_used=61 * GIB,
    memory_total=80 * GIB,
    power_watts=612.3,
    temperature=67.0,
    holders=(TRAINING,),
    price_per_hour=2.5,
)
GONE = DeviceFigures("GPU-7", 7, "NVIDIA L4", "n", conditions=(LOST, HOT), present=False, last_holders=(BATCH,))
FACTS = GpuFacts(
    fields=(FieldFact("sm_clock", "1980", "MHz"), FieldFact("power_limit", "700", "W"), FieldFact("pcie_gen", "5")),
    xids=(XidFact(79, "GPU has fallen off the bus", "hardware", None), XidFact(13)),
    sources=(SourceFact("nvml", True), SourceFact("gpu7", False, "it does not answer")),
    method="samples",
)


def shown(device: DeviceFigures, width: int = 80, **more: object) -> list[str]:
    subject = Subject(device, ROW, NOW, **more)  # type: ignore[arg-type]
    return [as_text(line) for line in details_of(subject, width, PLAIN)]


def test_a_healthy_gpu() -> None:
    points = {ROW: bytes([0, 100, 200] * 20)}
    assert shown(HEALTHY, currency="EUR", idle=(Idle(0),), watched=Watched(points, 3600.0)) == [
        "GPU 7  H100 80GB HBM3  on gpu-node-1  GPU-7",
        "utilisation 93%   memory 61.0 of 80.0 GiB   power 612W   temperature 67C",
        "  price 2.50 EUR/h",
        "last 1h " + "▁▅█" * 20,
        "held by research/train/main, of Job train-bert",
        "  utilisation 93%   memory 61.0 GiB   processes 2   busy   share 100%",
        "  costs 2.50 EUR/h",
    ]


def test_a_lost_gpu_says_since_when_what_to_do_and_who_had_it() -> None:
    lines = shown(GONE)
    assert lines[1].startswith("lost for 12m04s: GPU 7 has fallen off the bus (since 20")
    assert "  do: Drain the node and reset the GPU." in lines
    assert "thermal: it is throttled by heat" in lines
    assert "last held by batch/embed/worker" in lines
    assert "utilisation –   memory – of – GiB   power –   temperature –" in lines
    styles = {style for line in details_of(Subject(GONE, ROW, NOW), 80, PLAIN) for _, style in line}
    assert {"bad", "warn"} <= styles


def test_a_free_one() -> None:
    assert shown(DeviceFigures("GPU-7", -1))[-1] == "held by nobody"


def test_several_holders_and_an_instance() -> None:
    shared = DeviceFigures(
        "GPU-7", 7, "H100", "n", "3", "1g.10gb", holders=(TRAINING, HolderFigures(BATCH, share=0.25))
    )
    lines = shown(shared, idle=(None, Idle(301)))
    assert lines[0] == "GPU 7/3 1g.10gb  H100  on n  GPU-7"
    assert "  utilisation –   memory – GiB   processes –   idle 5m01s   share 25%" in lines


def test_what_the_server_knows_beside() -> None:
    lines = shown(HEALTHY, more=More(FACTS))
    assert "XID 79 (hardware): GPU has fallen off the bus" in lines
    assert "XID 13" in lines
    assert "source gpu7: it does not answer" in lines
    assert not any("nvml" in line for line in lines)
    assert lines[-1].split() == ["sm_clock", "1980", "MHz", "power_limit", "700", "W", "pcie_gen", "5"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (More(), "asking for more …"),
        (More(error="http://n: no whole answer within 5 s"), "no more is known: http://n: no whole answer within 5 s"),
        (More(FACTS, error="it is away"), "what follows could not be renewed: it is away"),
    ],
)
def test_how_asking_fares(more: More, line: str) -> None:
    assert line in shown(HEALTHY, more=more)


@given(
    st.text(max_size=40),
    st.integers(1, 200),
    st.sampled_from([More(FACTS), More(), None]),
)
def test_no_width_and_no_name_breaks_it(text: str, width: int, more: More | None) -> None:
    device = DeviceFigures(
        text,
        3,
        text,
        text,
        holders=(HolderFigures(Workload(text, "p" + text, text), owner=WorkloadOwner(text, text)),),
        conditions=(Condition("xid", 1e300, text, text),),
        last_holders=(Workload(text, text),),
    )
    for glyphs in (PLAIN, ASCII):
        for line in details_of(Subject(device, ROW, NOW, more=more), width, glyphs):
            drawn = "".join(part for part, _ in line)
            assert drawn.isprintable()
            assert width_of(drawn) <= max(width, 5) + 2 * sum(width_of(c) > 1 for c in drawn)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (FieldFact("DCGM_FI_DEV_NAME", "NVIDIA H100", "string"), "DCGM_FI_DEV_NAME NVIDIA H100"),
        (FieldFact("CUDA_COMPUTE_CAPABILITY", "589824", "packed"), "CUDA_COMPUTE_CAPABILITY 9.0"),
        (FieldFact("ROW_REMAP_PENDING", "0", "bool"), "ROW_REMAP_PENDING no"),
        (FieldFact("SM_CLOCK", "1980", "MHz"), "SM_CLOCK 1980 MHz"),
        (FieldFact("CUDA_COMPUTE_CAPABILITY", "nine", "packed"), "CUDA_COMPUTE_CAPABILITY nine"),
    ],
)
def test_units_that_say_nothing_are_left_out(field: FieldFact, text: str) -> None:
    assert text in shown(HEALTHY, more=More(GpuFacts(fields=(field,))))
