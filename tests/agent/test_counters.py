"""Counters that change at run time, and fields with their own interval."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import Event

import pynvml
import pytest

from podgpu.errors import SourceError
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.metrics.counters import CounterSpec, parse_counters
from podgpu.metrics.labels import Policy
from podgpu.node.agent.agent import Settings
from podgpu.node.agent.schedule import (
    Collection,
    ReadCounters,
    counters_in_configmap,
    counters_in_file,
)
from tests.agent.simulated_node import SimulatedNode

CSV = (
    "DCGM_FI_DEV_GPU_TEMP,gauge,t\n"
    "DCGM_FI_DEV_POWER_USAGE,gauge,w\n"
    "DCGM_FI_DEV_SM_CLOCK,gauge,c\n"
    "DCGM_FI_DEV_MEMORY_TEMP,gauge,m\n"
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE,gauge,g\n"
)
TEMP, POWER, CLOCK = "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"
FIELD_VALUES, GPM = "nvmlDeviceGetFieldValues", "nvmlGpmSampleGet"
QUICK = Collection("quick", 2.0, ("DCGM_FI_DEV_POWER_USAGE",), place="c.yaml:1:1")


def counters(text: str = CSV) -> tuple[CounterSpec, ...]:
    return parse_counters(text, "counters.csv")


class Bench(SimulatedNode):
    def __init__(
        self,
        *collections: Collection,
        gpus: str = "1xH100",
        interval: float = 30.0,
        feed: ReadCounters | None = None,
        text: str = CSV,
    ) -> None:
        policy = Policy(counters=counters(text), hostname="h")
        settings = Settings(interval=interval, collections=collections, policy=policy)
        super().__init__(gpus, settings, sources=(), read_counters=feed)

    def run(self, seconds: int) -> Counter[str]:  # type: ignore[override]
        """Runs the agent second by second, like its loop. Returns the driver calls."""
        before = Counter(self.driver.calls)
        for _ in range(seconds):
            self.time += 1.0
            self.agent.read_telemetry(only_due=True)
        return self.driver.calls - before

    def value(self, family: str) -> float | None:
        """Returns the value of the first series whose line begins with `family`."""
        start = family if "{" in family else f"{family}{{"
        lines = [line for line in self.exposition.splitlines() if line.startswith(start)]
        return float(lines[0].rpartition(" ")[2]) if lines else None


@pytest.fixture
def bench() -> Bench:
    bench = Bench(QUICK)
    bench.run(2)  # rates need two readings
    return bench


def test_a_field_every_2_s_beside_others_every_30_s_costs_only_that(bench: Bench) -> None:
    calls = bench.run(58)  # once a minute, all fields of a GPU are read
    assert calls[POWER] == 29
    assert (calls[TEMP], calls[CLOCK], calls[GPM]) == (1, 1, 1)
    plain = Bench()
    plain.run(2)
    before = plain.run(58)
    assert {name for name in calls if calls[name] > before[name]} <= {
        POWER,
        "nvmlDeviceGetUUID",  # checks before each reading that it is still the same GPU
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetCount",
        "nvmlEventSetWait_v2",  # the XID watch runs in its own thread
    }
    assert calls[FIELD_VALUES] == before[FIELD_VALUES] == 1


def test_what_is_only_podgpus_own_and_dear_is_read_every_5_s() -> None:
    """Fields of the counter file are read every second, for example the memory temperature."""
    quick = Bench(interval=1.0)
    quick.run(2)
    assert quick.run(50)[FIELD_VALUES] == 50 + 10
    asked_for = Bench(interval=1.0, text=CSV + "DCGM_FI_DEV_POWER_VIOLATION,counter,p\n")
    asked_for.run(2)
    before = asked_for.value("DCGM_FI_DEV_POWER_VIOLATION")
    assert before is not None
    asked_for.driver.faults.answer(pynvml.NVML_FI_DEV_PERF_POLICY_POWER, 10**12)
    asked_for.run(1)
    assert asked_for.value("DCGM_FI_DEV_POWER_VIOLATION") != before, (
        "the file's fields are read every second"
    )


def test_a_mean_is_over_its_own_interval() -> None:
    """Profiling ratios are means since the field was last read. Fields with a shorter interval do
    not shorten them.
    """
    quick = Collection("quick", 2.0, ("DCGM_FI_PROF_GR_ENGINE_ACTIVE",), place="c.yaml:1:1")
    bench = Bench(quick, text=f"{CSV}DCGM_FI_PROF_SM_ACTIVE,gauge,s\n")
    load = SimulatedLoad(0, 4000, duty=1.0)
    bench.driver.place(load)
    bench.run(2)
    bench.run(15)
    bench.driver.remove(4000)
    bench.run(15)
    assert bench.value("DCGM_FI_PROF_GR_ENGINE_ACTIVE") == pytest.approx(0.0, abs=0.01)
    busy_half_of_the_time = bench.value("DCGM_FI_PROF_SM_ACTIVE")
    assert busy_half_of_the_time is not None
    assert 0.1 < busy_half_of_the_time < 0.9


@pytest.mark.fault(
    "A GPU fails for one turn, while some of its fields are read far more seldom than others",
    (
        "Nothing it said before is told again; all its fields are read as soon as it answers, "
        "whatever their interval"
    ),
)
@pytest.mark.parametrize("seconds_before", [10, 28])  # during the slow interval, and at its end
def test_a_gpu_that_failed_once_is_read_whole_as_soon_as_it_answers(seconds_before: int) -> None:
    bench = Bench(QUICK, gpus="2xH100")
    bench.run(3)
    bench.run(seconds_before)
    bench.driver.faults.answer(TEMP, 77)
    bench.driver.faults.lose(0)
    bench.run(2)
    assert bench.value('DCGM_FI_DEV_GPU_TEMP{gpu="0"') is None
    bench.driver.faults.recover(0)
    calls = bench.run(2)
    assert calls[TEMP] == 1  # the field of the other GPU is not due
    assert bench.value('DCGM_FI_DEV_GPU_TEMP{gpu="0"') == 77
    assert bench.value('DCGM_FI_DEV_SM_CLOCK{gpu="0"') is not None
    assert bench.run(2)[TEMP] == 0


@pytest.mark.fault(
    (
        "Counters change to an invalid file, or so that a collection of the configuration file has "
        "none of them"
    ),
    "The last good counters stay; the source counters is down until the file is valid",
)
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"DCGM_FI_DEV_GPU_TEMP,gauge,t\n", "malformed"),  # the collection becomes empty
        (b"NOT_A_FIELD,gauge,x\n", "malformed"),
        (b"", "malformed"),
        (b"\x00\xff", "malformed"),
        (None, "file_missing"),
    ],
)
def test_bad_counters_keep_the_last_good_ones(
    tmp_path: Path, bad: bytes | None, reason: str
) -> None:
    path = tmp_path / "counters.csv"
    path.write_text(CSV, encoding="utf-8")
    bench = Bench(QUICK, feed=counters_in_file(str(path), "4.8"))
    bench.run(2)
    path.unlink()
    if bad is not None:
        path.write_bytes(bad)
    bench.agent.read_counters()
    bench.run(2)
    assert bench.value("DCGM_FI_DEV_POWER_USAGE") is not None
    assert 'podgpu_exporter_source_up{source="counters"} 0' in bench.exposition
    assert (
        f'podgpu_exporter_source_errors_total{{source="counters",reason="{reason}"}} 1'
        in bench.exposition
    )
    path.write_text(CSV, encoding="utf-8")
    bench.agent.read_counters()
    bench.run(2)
    assert 'podgpu_exporter_source_up{source="counters"} 1' in bench.exposition


def test_a_counter_file_that_hangs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    answers = Event()
    bench = Bench(feed=lambda: counters() if answers.wait() else (), interval=1.0)
    bench.agent.read_counters()
    bench.run(1)
    answers.set()
    assert "counters: no answer" in caplog.text


def test_the_counters_of_a_configmap() -> None:
    text: list[str | None] = [None]
    feed = counters_in_configmap("gpu:counters", lambda: text[0], "4.8")
    with pytest.raises(SourceError, match="no ConfigMap gpu:counters") as caught:
        feed()
    assert caught.value.reason == "configmap_missing"
    text[0] = CSV
    assert feed() == counters()
    text[0] = "nonsense"
    with pytest.raises(SourceError, match="ConfigMap gpu:counters"):
        feed()
