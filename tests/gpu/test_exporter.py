"""Tests telemetry from the metrics of a dcgm-exporter: devices, values and faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.errors import SourceError
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.fields import Field, field_named, fields
from podgpu.metrics.labels import Policy
from podgpu.metrics.parse import ParsedSample, parse_text
from podgpu.model import Allocation, Assignment, Workload
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.gpu.remote_exporter import ExporterTelemetry, FileExposition
from podgpu.node.holders.reader import HolderSources
from tests.gpu.nvml_bench import of_gpu
from tests.simulated import FaultyNvml

FIXTURES = Path(__file__).parents[1] / "fixtures"
H200 = "GPU-11111111-2222-3333-4444-555555555555"
A100 = "GPU-34319582-d595-d1c7-d1d2-179bcfa61660"


class Text(FileExposition):
    shown = "the exposition"

    def __init__(self, text: str) -> None:
        self.text: str | SourceError = text
        self.fetches = 0

    def fetch(self) -> bytes:
        self.fetches += 1
        if isinstance(self.text, SourceError):
            raise self.text
        return self.text.encode()


def fixture(name: str) -> Text:
    return Text((FIXTURES / name).read_text(encoding="utf-8"))


def field(name: str) -> Field:
    found = field_named(name)
    assert found is not None
    return found


TEMPERATURE, UTILISATION, MEMORY = map(
    field, ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED")
)
ENGINE, POWER = field("DCGM_FI_PROF_GR_ENGINE_ACTIVE"), field("DCGM_FI_DEV_POWER_USAGE")


def values(exposition: Text, *wanted: Field) -> dict[str, dict[int, object]]:
    telemetry = ExporterTelemetry(exposition)
    answers = [telemetry.read(gpu, wanted) for gpu in telemetry.inventory().gpus]
    return {
        device.key: dict(values) for answer in answers for device, values in answer.values.items()
    }


@pytest.mark.parametrize("name", ["default", "old", "dcp_pod", "dcp_shared", "shared_noflag"])
def test_the_gpu_of_recorded_texts(name: str) -> None:
    (gpu,) = ExporterTelemetry(fixture(f"h200/{name}.prom")).inventory().gpus
    assert (gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.model) == (
        0,
        H200,
        "00000000:00:06.0",
        "NVIDIA H200",
    )
    assert (gpu.minor, gpu.mig_enabled) == (None, False)


def test_mig_labels() -> None:
    found = values(fixture("seeds/001-mig.prom"), ENGINE, TEMPERATURE)
    assert found == {
        A100: {ENGINE.id: 0.99563, TEMPERATURE.id: 61},
        f"{A100}/gi13": {ENGINE.id: 0.995687},
    }


def test_the_companion_driver_completes_devices() -> None:
    driver = FaultyNvml("1xH100/2x1g.10gb")
    nvml = NvmlTelemetry(driver, count_expected=lambda: 1)
    uuid = driver.gpus[0].uuid
    gi_ids = [device.gi_id for device in nvml.read(nvml.inventory().gpus[0], ()).values][1:]
    exposition = Text(
        "".join(
            f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="{uuid}",GPU_I_ID="{gi}"}} 40\n' for gi in gi_ids
        )
    )
    telemetry = ExporterTelemetry(exposition, nvml)
    (gpu,) = telemetry.inventory().gpus
    assert gpu.minor == 0
    instances = [*telemetry.read(gpu, ()).values][1:]
    assert [d.mig_uuids for d in instances] == [(i.uuid,) for i in driver.gpus[0].instances]
    assert telemetry.usage(gpu)
    assert telemetry.release(1.0)


def test_copies_for_several_pods_must_agree() -> None:
    rows = "".join(
        f'{name}{{gpu="0",UUID="GPU-1",pod="{pod}"}} {value}\n'
        for name, pod, value in [
            (UTILISATION.name, "a", 7),
            (UTILISATION.name, "b", 7),
            (MEMORY.name, "a", 1),
            (MEMORY.name, "b", 2),
        ]
    )
    telemetry = ExporterTelemetry(Text(rows))
    answer = telemetry.read(telemetry.inventory().gpus[0], [UTILISATION, MEMORY])
    assert of_gpu(answer) == {UTILISATION.id: 7}
    assert (answer.errors, answer.unsupported) == (("copies_differ",), ())


@pytest.mark.parametrize(
    ("one", "printed"),
    [
        (TEMPERATURE, "9223372036854775794"),
        (TEMPERATURE, "2147483632"),
        (TEMPERATURE, "NaN"),
        (POWER, "140737488355328.000000"),
        (UTILISATION, "101"),
        (ENGINE, "1.5"),
    ],
)
def test_impossible_values_are_dropped_and_counted(one: Field, printed: str) -> None:
    telemetry = ExporterTelemetry(Text(f'{one.name}{{gpu="0",UUID="GPU-1"}} {printed}\n'))
    answer = telemetry.read(telemetry.inventory().gpus[0], [one, MEMORY])
    assert (of_gpu(answer), answer.dropped) == ({}, (one.id,))
    assert answer.unsupported == (("GPU-1", MEMORY.id),)


def test_an_xid_is_an_event_when_it_changes() -> None:
    row = 'DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="GPU-1",err_code="{0}"}} {0}\n'
    exposition = Text(row.format(0))
    telemetry = ExporterTelemetry(exposition, wall=lambda: 5.0)
    seen = []
    for xid in (0, 79, 79, 0, 31):
        exposition.text = row.format(xid)
        telemetry.inventory()
        seen += [(event.device, event.code, event.at) for event in telemetry.error_events()]
    assert seen == [("GPU-1", 79, 5.0), ("GPU-1", 31, 5.0)]


def test_values_are_converted_to_the_unit_of_the_field() -> None:
    of = '{gpu="0",UUID="GPU-0"}'
    exposition = Text(
        f"DCGM_FI_DEV_GPU_UTIL{of} 94\nDCGM_FI_DEV_FB_USED_BYTES{of} "
        f"1073741999\nDCGM_FI_DEV_SM_CLOCK{of} 1980\n"
    )
    wanted = [fields()[i] for i in (203, 1613, 252, 1627, 100, 1603)]
    assert values(exposition, *wanted) == {
        "GPU-0": {
            203: 94,
            1613: 0.94,
            252: 1024,
            1627: 1_073_741_999,
            100: 1980,
            1603: 1_980_000_000,
        }
    }


class Holder:
    name = "kubelet"

    def assignments(self, _devices: object) -> Allocation:
        return Allocation((Assignment(H200, Workload("ours", "mine", "main"), "kubelet"),))


def agent_over(exposition: Text) -> Agent:
    policy = Policy(counters=shipped_counters("dcp") or (), hostname="node-1")
    return Agent(ExporterTelemetry(exposition), HolderSources([Holder()]), Settings(policy=policy))


def dcgm_samples(agent: Agent) -> list[ParsedSample]:
    families = parse_text(agent.published.fresh.plain.decode())
    return [s for family in families for s in family.samples if s.name.startswith("DCGM_")]


def test_labels_of_pods_are_replaced() -> None:
    exposition = fixture("h200/dcp_shared.prom")
    agent = agent_over(exposition)
    agent.read_telemetry()
    agent.read_allocation()
    assert exposition.fetches == 1
    samples = dcgm_samples(agent)
    agent.stop()
    known = {
        s.name: s.value
        for f in parse_text(str(exposition.text))
        for s in f.samples
        if "pod" not in s.labels
    }
    assert len({s.name for s in samples}) > 20
    for sample in samples:
        assert (sample.labels["pod"], sample.labels["namespace"], sample.labels["Hostname"]) == (
            "mine",
            "ours",
            "node-1",
        )
        assert "vgpu" not in sample.labels
        assert known.get(sample.name, sample.value) == sample.value


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (SourceError("unreachable", "cannot be reached"), "unreachable"),
        ("<html>\n", "not_prometheus"),
        ("a one\n", "malformed"),
        ("# TYPE a thing\n", "malformed"),
        ("# nothing\n", "no_gpu"),
    ],
)
def test_after_a_bad_exposition_no_old_value_is_reported(
    bad: str | SourceError, reason: str
) -> None:
    exposition = fixture("h200/default.prom")
    good = exposition.text
    agent = agent_over(exposition)
    agent.read_telemetry()
    assert dcgm_samples(agent)
    exposition.text = bad
    agent.read_telemetry()
    assert dcgm_samples(agent) == []
    assert f'podgpu_exporter_source_errors_total{{source="exporter",reason="{reason}"}} 1\n' in (
        agent.published.fresh.plain.decode()
    )
    exposition.text = good
    agent.read_telemetry()
    assert dcgm_samples(agent)
    agent.stop()


@pytest.mark.fault(
    "A GPU vanishes from the dcgm-exporter's metrics that podgpu reads (--telemetry exporter:)",
    (
        "The GPU and its last holder stay in the metrics with the condition `lost`, until it is "
        "back "
        "or removed"
    ),
)
def test_a_gpu_that_vanished_is_lost() -> None:
    exposition = fixture("seeds/000-sample.prom")
    whole = str(exposition.text)
    agent = agent_over(exposition)
    agent.read_telemetry()
    first, second = agent.published.state.devices
    exposition.text = "".join(
        line for line in whole.splitlines(keepends=True) if second.uuid not in line
    )

    def conditions() -> dict[str, list[str]]:
        agent.read_telemetry()
        devices = agent.published.state.devices
        return {
            device.uuid: [condition.name for condition in device.conditions] for device in devices
        }

    assert conditions() == {first.uuid: [], second.uuid: ["lost"]}
    lines = agent.published.fresh.plain.decode().splitlines()
    assert (
        next(
            line for line in lines if f'UUID="{second.uuid}"' in line and 'condition="lost"' in line
        )[-1]
        == "1"
    )
    exposition.text = whole
    assert conditions() == {first.uuid: [], second.uuid: []}
    exposition.text = "".join(
        line for line in whole.splitlines(keepends=True) if second.uuid not in line
    )
    assert conditions()[second.uuid] == ["lost"]
    assert agent.forget(second.uuid)
    assert conditions() == {first.uuid: []}
    agent.stop()
