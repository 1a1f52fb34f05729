"""Tests the details of one GPU on terminals of any width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.fleet.view import ConditionView, FieldView, GpuDetails, GpuView, SourceView, XidView
from podgpu.model import WaitPart, Workload, WorkloadOwner, parts_of
from podgpu.past.job import JobSummary
from podgpu.top.feed import FetchedDetails, Sparklines
from podgpu.top.screen import render_details
from podgpu.top.table import as_text
from tests.top import scene
from tests.top.scene import BATCH, GIB, LOST, NOW, TRAINER, gpu, holder, instance

TRAINING = holder(
    TRAINER,
    utilization_ratio=0.93,
    memory_used_bytes=61 * GIB,
    processes=2,
    share_ratio=1.0,
    owner=WorkloadOwner("Job", "train-bert"),
    cost_per_hour=2.5,
    use="used",
)
HEALTHY = gpu(
    7,
    TRAINING,
    utilization_ratio=0.93,
    memory_used_bytes=61 * GIB,
    memory_total_bytes=80 * GIB,
    power_watts=612.3,
    temperature_celsius=67.0,
    price_per_hour=2.5,
)
DETAILS = GpuDetails(
    fields=[
        FieldView(name="sm_clock", value=1980, unit="MHz"),
        FieldView(name="pcie_gen", value=5.0),
    ],
    xids=[XidView(xid=79, says="GPU has fallen off the bus", class_="hardware"), XidView(xid=13)],
    sources=[
        SourceView(source="nvml", ok=True),
        SourceView(source="gpu7", ok=False, error="gpu_lost"),
    ],
    method="samples",
)


def shown(device: GpuView, width: int = 80, **more: Any) -> list[str]:
    seen = replace(
        scene.seen(device, currency="EUR"), **{"fetched": FetchedDetails("GPU-7"), **more}
    )
    return [as_text(spans) for spans in render_details(seen.lines[0], seen, width)]


def test_a_healthy_gpu() -> None:
    points = {("GPU-7", ""): bytes([0, 100, 200] * 20)}
    assert shown(HEALTHY, sparklines=Sparklines(points, 3600.0)) == [
        "GPU 7  H100 80GB HBM3  on n  GPU-7",
        "utilisation 93%   memory 61.0 of 80.0 GiB   power 612W   temperature 67C",
        "  price 2.50 EUR/h",
        "last 1h " + "▁▅█" * 20,
        "held by research/train/main, part of Job train-bert",
        "  utilisation 93%   memory 61.0 GiB   processes 2   busy   share 100%",
        "  costs 2.50 EUR/h",
    ]


def test_a_lost_gpu() -> None:
    hot = ConditionView(condition="thermal", says="it is throttled by heat", do="")
    lines = shown(
        gpu(7, utilization_ratio=0.5, conditions=[LOST, hot], absent=True, last_holders=[BATCH])
    )
    assert lines[1].startswith("lost for 1m40s: GPU 1 has fallen off the bus (since 20")
    assert lines[2:] == [
        "  do: Drain the node and reset the GPU.",
        "thermal: it is throttled by heat",
        "utilisation –   memory – of – GiB   power –   temperature –",
        "last held by batch/embed/worker",
    ]


def test_an_instance_with_several_holders() -> None:
    idle = holder(BATCH, share_ratio=0.25, use="idle", idle_since=NOW - 301)
    seen = scene.seen(gpu(7, instances=[instance(3, TRAINING, idle)]))
    lines = [as_text(spans) for spans in render_details(seen.lines[0].beneath[0], seen, 80)]
    assert lines[0] == "GPU 7/3 1g.10gb  H100 80GB HBM3  on n  GPU-7"
    assert lines[-1] == "  utilisation –   memory – GiB   processes –   idle 5m01s   share 25%"


def test_a_holder_that_waits() -> None:
    waits_for = (
        WaitPart(*parts_of(BATCH), seconds=0.13, ratio=0.128),
        WaitPart(seconds=0.12, ratio=0.117),
    )
    waiter = holder(TRAINER, wait_ratio=0.268, waits_for=waits_for)
    assert "waited 27% (13% for batch/embed/worker)" in shown(gpu(7, waiter), 120)[-1]
    lines = shown(gpu(7, waiter, holder(BATCH, wait_ratio=0.0)), 120)
    assert [line.split() for line in lines[-4:]] == [
        ["1", "2", "3"],
        ["1", "research/train/main", "–", "0.13", "0.12"],
        ["2", "batch/embed/worker", "0.00", "–", "0.00"],
        ["3", "processes", "outside", "pods"],
    ]


def test_what_a_job_used_since_it_started() -> None:
    job = JobSummary(
        namespace="research",
        pod="train",
        from_=NOW - 7260,
        duration_seconds=7260.0,
        gpu_hours=2.02,
        mean_use=0.07,
        peak_use=0.31,
        peak_memory_bytes=5.0 * 1024**3,
        energy_kwh=0.4,
        cost=5.0,
        currency="EUR",
        wait_seconds=90.0,
        errors=1,
        hint="10 % of a GPU would be enough.",
        gpus=2,
    )
    lines = shown(HEALTHY, 200, fetched=FetchedDetails("GPU-7", jobs=[job]))
    assert lines[-2:] == [
        "  ran for 2h01m   2.02 GPU-hours   mean 7%   peak 31%   peak memory of one GPU 5.0 GiB   "
        "0.40 kWh   5.00 EUR"
        "   waited 1m30s   errors 1",
        "  10 % of a GPU would be enough.",
    ]


def test_the_servers_details() -> None:
    lines = shown(HEALTHY, fetched=FetchedDetails("GPU-7", DETAILS))
    assert lines[1:4] == [
        "XID 79 (hardware): GPU has fallen off the bus",
        "XID 13",
        "source gpu7: gpu_lost",
    ]
    assert lines[-1].split() == ["sm_clock", "1980", "MHz", "pcie_gen", "5"]


@pytest.mark.parametrize(
    ("fetched", "line"),
    [
        (FetchedDetails(), "fetching details …"),
        (FetchedDetails("GPU-1", DETAILS), "fetching details …"),
        (
            FetchedDetails("GPU-7", error="no answer within 5 s"),
            "details are not available: no answer within 5 s",
        ),
    ],
)
def test_missing_details(fetched: FetchedDetails | None, line: str) -> None:
    assert line in shown(HEALTHY, fetched=fetched)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (
            FieldView(name="DCGM_FI_DEV_NAME", value="NVIDIA H100", unit="string"),
            "DCGM_FI_DEV_NAME NVIDIA H100",
        ),
        (
            FieldView(name="CUDA_COMPUTE_CAPABILITY", value=589824, unit="packed"),
            "CUDA_COMPUTE_CAPABILITY 9.0",
        ),
        (FieldView(name="ROW_REMAP_PENDING", value=0, unit="bool"), "ROW_REMAP_PENDING no"),
        (FieldView(name="RATIO", value=0.25, unit="%"), "RATIO 0.25 %"),
        (FieldView(name="POWER", value=300.0, unit="W"), "POWER 300 W"),
        (
            FieldView(name="PCI_BUSID", value="00000000:18:00.0", unit="string"),
            "PCI_BUSID 00000000:18:00.0",
        ),
    ],
)
def test_values(field: FieldView, text: str) -> None:
    assert shown(HEALTHY, fetched=FetchedDetails("GPU-7", GpuDetails(fields=[field])))[-1] == text


@given(st.text(max_size=40), st.integers(1, 200))
def test_any_name_and_width(text: str, width: int) -> None:
    device = gpu(
        7,
        holder(Workload(text, "p" + text, text), owner=WorkloadOwner(text, text)),
        model=text,
        conditions=[ConditionView(condition="xid", since=1e300, says=text, do=text)],
        last_holders=[Workload(text, text)],
    )
    assert all(line.isprintable() for line in shown(device, width))


def test_how_usage_is_measured_and_what_would_improve_it() -> None:
    details = GpuDetails(method="switches", improvement="exact busy time needs more")
    lines = shown(HEALTHY, fetched=FetchedDetails("GPU-7", details))
    assert lines[-2:] == ["usage measured by: switches", "better: exact busy time needs more"]
