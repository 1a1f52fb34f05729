"""Tests the usage of simulated GPUs: busy time, energy and MIG."""

from __future__ import annotations

import random

import pynvml
import pytest

from tests.gpu.nvml_bench import NvmlBench

GIB = 1024**3
SECOND = 10**9
SAMPLES = "nvmlDeviceGetSamples"
PROCESSES = "nvmlDeviceGetProcessUtilization"
RATES = "nvmlDeviceGetUtilizationRates"
ENERGY = "nvmlDeviceGetTotalEnergyConsumption"


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> NvmlBench:
    return NvmlBench(*getattr(request, "param", ()))


def on(*specs: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bench", [(spec,) for spec in specs], indirect=True, ids=specs)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "loads", [{41: 0.5, 42: 0.2}, {41: 0.9, 42: 0.6}], ids=["steady", "more than 100 %"]
)
def test_busy_time_of_a_minute(seed: int, loads: dict[int, float]) -> None:
    bench, moments = NvmlBench(), random.Random(seed)
    for pid, duty in loads.items():
        bench.place(pid, duty)
    bench.start()
    gpu, begin = bench.driver.gpus[0], bench.now
    worked = gpu.meter.busy
    window = busy = 0
    of_processes = dict.fromkeys(loads, 0)
    while bench.now < begin + 60:
        usage = bench.after(moments.uniform(0.3, 3))
        assert usage.busy_ns is not None
        assert usage.process_busy_ns is not None
        rounding = (len(loads) + 1) * usage.window_ns // 200
        assert (
            abs(sum(part or 0 for part in usage.process_busy_ns.values()) - usage.busy_ns)
            <= rounding
        )
        window += usage.window_ns
        busy += usage.busy_ns
        for pid, part in usage.process_busy_ns.items():
            of_processes[pid] += part or 0
    assert window == pytest.approx((bench.now - begin) * SECOND, abs=0.4 * SECOND)
    assert busy == pytest.approx((gpu.meter.busy - worked) * SECOND, rel=0.02)
    assert sum(of_processes.values()) == pytest.approx(busy, rel=0.02)


@pytest.mark.parametrize(("seconds", "is_known"), [(59, True), (62, False)])
def test_the_usage_of_more_than_a_minute_is_unknown(
    bench: NvmlBench, seconds: float, is_known: bool
) -> None:
    """The driver keeps only the samples of the last seconds."""
    bench.place(41, 0.5)
    bench.start()
    usage = bench.after(seconds)
    assert (usage.window_ns > 0) == is_known
    assert (usage.busy_ns is not None) == is_known
    assert (usage.process_busy_ns is not None) == is_known
    following = bench.after(1)
    assert following.window_ns == pytest.approx(SECOND, abs=0.4 * SECOND)
    assert following.busy_ns == pytest.approx(following.window_ns / 2, rel=0.05)


# GPUs that support only the newer call, such as some Blackwell models


@on("1xH100", "1xB200", "1xA100")
@pytest.mark.fault(
    "a GPU refuses the old call for per-process utilisation, as some Blackwell parts do",
    "the newer call is used instead and per-container use is the same",
)
def test_the_newer_call_is_used_if_the_old_one_is_refused(bench: NvmlBench) -> None:
    bench.faults.unsupported(PROCESSES)
    bench.place(41, 0.5)
    bench.place(42, 0.2)
    bench.start()
    for _ in range(3):
        assert bench.after(1).process_busy_ns == {41: SECOND // 2, 42: SECOND // 5}
    assert bench.driver.calls[PROCESSES] == 1, "a refused call must not be repeated"
    assert not bench.lacks, "the newer call works"
    assert not bench.problems.errors


@on("1xH100", "1xA100")
def test_busy_time_without_samples(bench: NvmlBench) -> None:
    bench.faults.unsupported(SAMPLES)
    bench.place(41, 0.5)
    bench.place(42, 0.2)
    bench.start()
    moments, begin, total = random.Random(1), bench.now, {"window": 0, "busy": 0, 41: 0, 42: 0}
    while bench.now < begin + 60:
        usage = bench.after(moments.uniform(0.3, 3))
        assert usage.busy_ns is not None
        total["window"] += usage.window_ns
        total["busy"] += usage.busy_ns
        for pid, part in (usage.process_busy_ns or {}).items():
            total[pid] += part or 0
    assert total["window"] == pytest.approx((bench.now - begin) * SECOND, abs=2000)
    assert total["busy"] == pytest.approx(0.7 * total["window"], rel=0.01)
    assert total[41] == pytest.approx(0.5 * total["window"], rel=0.01)
    assert total[42] == pytest.approx(0.2 * total["window"], rel=0.01)
    assert bench.driver.calls[SAMPLES] == 1


def test_energy_counter_is_not_read_again_after_a_telemetry_reading(bench: NvmlBench) -> None:
    """A reading of the counter is expensive. Telemetry reads it every second here."""
    bench.place(11)
    for _ in range(3):
        bench.read()
        bench.after(1.01)
    before, total = bench.driver.calls[ENERGY], 0
    for _ in range(20):
        bench.read()
        total += bench.after(1.01).energy_mj or 0
    assert bench.driver.calls[ENERGY] - before == 20, "only the readings of telemetry"
    assert total > 0
    bench.place(12)
    bench.after(0.1)
    assert bench.driver.calls[ENERGY] - before == 21, (
        "processes changed, so the energy up to now is read"
    )


def test_energy_adds_up_to_the_difference_of_the_counter(bench: NvmlBench) -> None:
    moments, gpu = random.Random(2), bench.driver.gpus[0]
    bench.place(41, 0.7, sway=0.9, sway_period=5)
    assert bench.after(1).energy_mj == 0, "the first reading has no previous counter"
    before, total = gpu.energy_mj, 0
    for turn in range(50):
        if turn % 10 == 3:
            bench.faults.fail(ENERGY, pynvml.NVML_ERROR_UNKNOWN)
        usage = bench.after(moments.uniform(0.01, 3))
        assert turn % 10 != 3 or usage.energy_mj is None
        bench.faults.clear(ENERGY)
        total += usage.energy_mj or 0
    total += bench.after(5).energy_mj or 0
    assert total == gpu.energy_mj - before
    assert bench.driver.calls[ENERGY] < 40


@on("1xH100/2x3g.40gb")
def test_busy_time_of_an_instance_is_from_gpm(bench: NvmlBench) -> None:
    first, second = (i.gi_id for i in bench.driver.gpus[0].instances)
    bench.place(41, 0.6, gi_id=first, memory=3 * GIB)
    bench.place(42, 0.25, gi_id=second, memory=2 * GIB)
    assert [usage.busy_ns for usage in bench.usages()] == [None, None, None], (
        "busy time needs two samples"
    )
    moments, begin = random.Random(3), bench.now
    window, busy = {first: 0, second: 0}, {first: 0, second: 0}
    while bench.now < begin + 60:
        bench.now += moments.uniform(0.05, 3)
        whole, *parts = bench.usages()
        assert (whole.window_ns, whole.busy_ns, whole.process_busy_ns) == (0, None, None)
        assert whole.processes == ()
        assert whole.memory_used == 5 * GIB
        for part in parts:
            assert part.device.gi_id is not None
            assert part.busy_ns is not None
            assert part.process_busy_ns is None
            assert part.energy_mj is None, "only the whole GPU has an energy counter"
            window[part.device.gi_id] += part.window_ns
            busy[part.device.gi_id] += part.busy_ns
    assert window[first] == pytest.approx((bench.now - begin) * SECOND, abs=0.1 * SECOND)
    assert busy[first] == pytest.approx(0.6 * window[first], rel=0.01)
    assert busy[second] == pytest.approx(0.25 * window[second], rel=0.01)
    assert [part.memory_used for part in parts] == [3 * GIB, 2 * GIB]
    assert [[(p.pid, p.device) for p in part.processes or ()] for part in parts] == [
        [(41, f"{bench.gpu.uuid}/gi{first}")],
        [(42, f"{bench.gpu.uuid}/gi{second}")],
    ]
    assert whole.device.mig_enabled
    assert whole.energy_mj is not None
    assert not bench.driver.calls[PROCESSES]
    assert not bench.driver.calls[SAMPLES]


class Answer:
    """A structure of the driver."""

    def __init__(self, **members: object) -> None:
        self.__dict__.update(members)


def test_more_memory_in_use_than_there_is_is_dropped(bench: NvmlBench) -> None:
    bench.start()
    memory = "nvmlDeviceGetMemoryInfo"
    for used, expected in ((80 * GIB, 80 * GIB), (81 * GIB, None), (-1, None)):
        bench.faults.answer(memory, Answer(used=used, total=80 * GIB, free=0, reserved=0), 0)
        assert bench.after(1).memory_used == expected
        assert ("nvmlDeviceGetMemoryInfo" in bench.problems.dropped) == (expected is None)


@pytest.mark.parametrize(
    ("power", "expected"), [(0, None), (1, 1), (5_000_000, 5_000_000), (5_000_001, None)]
)
def test_impossible_power_is_ignored(bench: NvmlBench, power: int, expected: int | None) -> None:
    bench.start()
    bench.faults.answer("nvmlDeviceGetPowerUsage", power, 0)
    assert bench.after(1).power_mw == expected


def test_an_impossible_increase_of_the_energy_counter_is_dropped(bench: NvmlBench) -> None:
    bench.faults.answer(ENERGY, 1_000_000, 0)
    bench.start()
    bench.faults.answer(ENERGY, 1_000_000 + 5_000_000 * 6, 0)
    assert bench.after(5).energy_mj == 30_000_000, "5 kW for 5 s, and a late second"
    bench.faults.answer(ENERGY, 31_000_000 + 30_000_001, 0)
    assert bench.after(5).energy_mj is None
    assert ENERGY in bench.problems.dropped
    bench.faults.answer(ENERGY, 61_000_101, 0)
    assert bench.after(5).energy_mj == 100, "since the impossible reading"


def test_entries_without_a_process_have_no_busy_time(bench: NvmlBench) -> None:
    bench.place(41, 0.5)
    bench.start()
    entries = [Answer(pid=pid, timeStamp=1 << 62, smUtil=10) for pid in (0, 1, 1 << 31)]
    bench.faults.answer(PROCESSES, entries, 0)
    usage = bench.after(1)
    assert usage.process_busy_ns is not None
    assert usage.process_busy_ns.keys() == {1}
    old = [Answer(pid=7, timeStamp=1, smUtil=10)]
    bench.faults.answer(PROCESSES, old, 0)
    assert bench.after(1).process_busy_ns == {}


def test_a_problem_of_one_reading_is_not_one_of_the_next(bench: NvmlBench) -> None:
    bench.start()
    memory = "nvmlDeviceGetMemoryInfo"
    bench.faults.answer(memory, Answer(used=2, total=1, free=0, reserved=0), 0)
    bench.after(1)
    assert bench.problems.dropped
    bench.faults.clear(memory, 0)
    bench.after(1)
    assert not bench.problems.dropped


@pytest.mark.parametrize("is_old", [False, True], ids=["no sample", "an old sample"])
def test_without_new_samples_the_use_is_unknown_after_ten_seconds(
    bench: NvmlBench, is_old: bool
) -> None:
    bench.start()
    bench.faults.fail(SAMPLES, pynvml.NVML_ERROR_NOT_FOUND, 0)
    if is_old:
        old = Answer(timeStamp=1, sampleValue=Answer(uiVal=100))
        bench.faults.answer(SAMPLES, (1, [old]), 0)
    usage = bench.after(5)
    assert (usage.window_ns, usage.busy_ns) == (0, 0)
    assert not bench.problems.errors
    assert bench.after(6).busy_ns is None


# Values that the driver does not have, or that cannot be right


def answer_sample(bench: NvmlBench, percent: int) -> None:
    """Makes the driver return one sample, which is taken in a second."""
    sample = Answer(timeStamp=int((bench.wall() + 1) * 1e6), sampleValue=Answer(uiVal=percent))
    bench.faults.answer(SAMPLES, (1, [sample]), 0)


@pytest.mark.parametrize(
    ("percent", "is_possible"), [(100, True), (101, False)], ids=["all busy", "impossible"]
)
def test_an_impossible_sample_is_dropped(bench: NvmlBench, percent: int, is_possible: bool) -> None:
    bench.start()
    answer_sample(bench, percent)
    usage = bench.after(1)
    assert usage.window_ns == pytest.approx(SECOND, abs=0.4 * SECOND)
    assert usage.busy_ns == (usage.window_ns if is_possible else None)
    assert (SAMPLES in bench.problems.dropped) == (not is_possible)


def test_a_sample_is_counted_once(bench: NvmlBench) -> None:
    """A driver may repeat the last sample of the previous window."""
    bench.start()
    taken = int((bench.wall() + 1) * 1e6)
    sample = Answer(timeStamp=taken, sampleValue=Answer(uiVal=50))
    bench.faults.answer(SAMPLES, (1, [sample]), 0)
    entries = [Answer(pid=7, timeStamp=taken, smUtil=50)]
    bench.faults.answer(PROCESSES, entries, 0)
    first = bench.after(1)
    assert first.busy_ns == first.window_ns // 2
    assert first.process_busy_ns == {7: first.busy_ns}
    again = bench.after(1)
    assert (again.window_ns, again.busy_ns) == (0, 0)

    newer = Answer(timeStamp=taken + 1_000_000, sampleValue=Answer(uiVal=100))
    bench.faults.answer(SAMPLES, (1, [sample, newer]), 0)
    last = bench.after(1)
    assert (last.window_ns, last.busy_ns) == (SECOND, SECOND)
    assert last.process_busy_ns == {}, "the entry is of the first window"


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_busy_time_if_samples_fail(bench: NvmlBench, error: int) -> None:
    """Only a driver without samples is asked for the current utilisation instead."""
    bench.place(41, 0.5)
    bench.start()
    bench.faults.fail(SAMPLES, error, 0)
    usage = bench.after(1)
    if error == pynvml.NVML_ERROR_NOT_SUPPORTED:
        assert usage.busy_ns == pytest.approx(SECOND / 2, rel=0.3)
        assert not bench.problems.errors
    else:
        assert usage.busy_ns is None
        assert bench.problems.errors == ("unknown",)
        assert not bench.driver.calls[RATES]


def test_the_current_utilisation_may_fail_or_be_impossible(bench: NvmlBench) -> None:
    bench.faults.unsupported(SAMPLES)
    bench.start()
    bench.faults.answer(RATES, Answer(gpu=100, memory=0), 0)
    usage = bench.after(1)
    assert usage.busy_ns == usage.window_ns
    bench.faults.answer(RATES, Answer(gpu=101, memory=0), 0)
    assert bench.after(1).busy_ns is None
    assert RATES in bench.problems.dropped
    bench.faults.fail(RATES, pynvml.NVML_ERROR_UNKNOWN, 0)
    usage = bench.after(1)
    assert usage.window_ns == pytest.approx(SECOND, rel=0.01)
    assert usage.busy_ns is None
    assert bench.problems.errors == ("unknown",)


def test_a_driver_that_never_had_samples_to_return(bench: NvmlBench) -> None:
    bench.faults.fail(SAMPLES, pynvml.NVML_ERROR_NOT_FOUND, 0)
    assert bench.after(1).busy_ns == 0
    assert bench.after(5).busy_ns == 0
    assert bench.after(6).busy_ns is None


@pytest.mark.parametrize("samples", [True, False], ids=["samples", "no samples"])
@pytest.mark.parametrize("jump", [-3600.0, 30.0], ids=["back", "forward"])
def test_the_use_is_unknown_while_the_clock_jumps(
    bench: NvmlBench, samples: bool, jump: float
) -> None:
    bench.place(41, 0.5)
    for step in (0.0, 0.0, jump, 0.0):
        bench.epoch += step
        if samples:
            answer_sample(bench, 50)
        else:
            bench.faults.unsupported(SAMPLES)
        usage = bench.after(1)
        if step:
            assert (usage.window_ns, usage.busy_ns, usage.process_busy_ns) == (0, None, None)
    assert usage.window_ns == pytest.approx(SECOND, rel=0.01), "a second after the jump"
    assert usage.busy_ns == pytest.approx(SECOND / 2, rel=0.01)


def test_processes_are_not_read_while_the_gpu_is_idle(bench: NvmlBench) -> None:
    bench.start()
    assert bench.after(1).process_busy_ns == {}
    assert not bench.driver.calls[PROCESSES]
    bench.place(41, 0.5)
    bench.after(1)
    assert bench.driver.calls[PROCESSES] == 1


def test_an_idle_gpu_whose_processes_cannot_be_measured(bench: NvmlBench) -> None:
    bench.faults.unsupported(PROCESSES)
    bench.faults.unsupported("nvmlDeviceGetProcessesUtilizationInfo")
    bench.place(41, 0.5)
    bench.start()
    assert bench.lacks == {"no_process_utilization"}
    answer_sample(bench, 0)
    usage = bench.after(1)
    assert usage.busy_ns == 0
    assert usage.process_busy_ns is None, "not 0, because this counts as measured"


@pytest.mark.parametrize("bench", [("1xH100", False)], indirect=True, ids=["another namespace"])
def test_without_the_pids_of_the_host_processes_are_not_read(bench: NvmlBench) -> None:
    bench.place(41, 0.5)
    bench.read()
    assert bench.after(0.1).energy_mj == 0, "the first reading, which telemetry has taken"
    usage = bench.after(1)
    assert usage.busy_ns == pytest.approx(usage.window_ns / 2, rel=0.05)
    assert usage.processes is None
    assert usage.process_busy_ns is None
    assert not bench.driver.calls[PROCESSES]


def test_power_that_cannot_be_read_is_unknown(bench: NvmlBench) -> None:
    bench.start()
    bench.faults.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN, 0)
    assert bench.after(1).power_mw is None
    assert not bench.problems.errors


# Readings of the energy counter


def test_the_energy_counter_is_read_every_five_seconds(bench: NvmlBench) -> None:
    """And again after its first reading, so that the energy of a new process is soon known."""
    bench.place(41)
    bench.start()
    assert bench.after(1).energy_mj
    read = []
    for _ in range(10):
        read.append(bench.after(1).energy_mj is not None)
    assert read == [False, False, False, False, True] * 2


def test_a_counter_that_stands_still_is_not_read_more_often(bench: NvmlBench) -> None:
    bench.faults.answer(ENERGY, 1000, 0)
    bench.start()
    assert bench.after(1).energy_mj == 0
    assert bench.after(5).energy_mj == 0
    assert bench.after(1).energy_mj is None


def test_a_counter_that_was_reset_is_read_again_at_once(bench: NvmlBench) -> None:
    bench.faults.answer(ENERGY, 1_000_000, 0)
    bench.start()
    bench.faults.answer(ENERGY, 500, 0)
    assert bench.after(5).energy_mj == 0
    bench.faults.answer(ENERGY, 600, 0)
    assert bench.after(1).energy_mj == 100


@pytest.mark.parametrize("code", [-1, 1 << 63])
def test_codes_for_no_value_are_no_energy(bench: NvmlBench, code: int) -> None:
    bench.faults.answer(ENERGY, 1000, 0)
    bench.start()
    bench.faults.answer(ENERGY, code, 0)
    assert bench.after(5).energy_mj is None
    assert ENERGY in bench.problems.dropped
    bench.faults.answer(ENERGY, 1500, 0)
    assert bench.after(5).energy_mj == 500


def test_a_reading_of_telemetry_before_the_last_one_is_not_used(bench: NvmlBench) -> None:
    gpu = bench.driver.gpus[0]
    bench.place(41)
    bench.read()
    assert bench.after(0.1).energy_mj == 0
    before = gpu.energy_mj
    assert bench.after(0.5).energy_mj == gpu.energy_mj - before


@pytest.mark.parametrize(("age", "is_used"), [(1.4, True), (1.6, False)])
def test_a_recent_reading_of_telemetry_is_used(bench: NvmlBench, age: float, is_used: bool) -> None:
    bench.place(41)
    bench.start()
    bench.after(1)
    bench.now += 5
    bench.read()
    calls = bench.driver.calls[ENERGY]
    assert bench.after(age).energy_mj
    assert (bench.driver.calls[ENERGY] == calls) == is_used


# The layout of a GPU with MIG


def test_what_the_driver_did_not_support_is_tried_again_after_a_change_of_mig(
    bench: NvmlBench,
) -> None:
    memory = "nvmlDeviceGetMemoryInfo"
    bench.faults.unsupported(memory)
    bench.place(41, 0.5, memory=3 * GIB)
    bench.start()
    assert bench.after(1).memory_used is None
    assert bench.lacks == {"no_memory"}
    bench.faults.clear(memory)
    assert bench.after(1).memory_used is None, "not asked again"

    bench.driver.relayout(0, ["3g.40gb"])
    bench.after(11)
    bench.driver.relayout(0, None)
    assert bench.after(11).memory_used is not None
    assert not bench.lacks


def test_busy_time_of_a_gpu_does_not_include_its_time_with_mig(bench: NvmlBench) -> None:
    bench.start()
    bench.driver.relayout(0, ["3g.40gb"])
    assert bench.after(11).device.mig_enabled
    bench.after(11)
    bench.driver.relayout(0, None)
    usage = bench.after(11)
    assert not usage.device.mig_enabled
    assert usage.window_ns == pytest.approx(SECOND, abs=0.4 * SECOND)


@on("1xH100/2x3g.40gb")
def test_samples_of_instances_are_freed(bench: NvmlBench) -> None:
    bench.usages()
    bench.after(1)
    assert bench.driver.calls["nvmlGpmSampleAlloc"] == 4, "two for each instance"
    bench.driver.relayout(0, None)
    usage = bench.after(11)
    assert not usage.instances
    assert bench.driver.calls["nvmlGpmSampleFree"] == 4


@on("1xH100/2x3g.40gb")
def test_busy_time_of_an_instance_that_gpm_cannot_measure(bench: NvmlBench) -> None:
    first = bench.driver.gpus[0].instances[0].gi_id
    bench.place(41, 0.6, gi_id=first, memory=3 * GIB)
    bench.usages()

    bench.now += 0.01
    soon = bench.usages()[1]
    assert (soon.window_ns, soon.busy_ns) == (0, 0), "too early for another sample"

    bench.faults.answer("gpm 1", 100.9)
    full = bench.usages_after(1)[1]
    assert full.busy_ns == full.window_ns, "slightly more than everything"
    bench.faults.answer("gpm 1", 101.1)
    assert bench.usages_after(1)[1].busy_ns is None
    assert bench.problems.dropped
    bench.faults.fail("gpm 1", pynvml.NVML_ERROR_UNKNOWN)
    assert bench.usages_after(1)[1].busy_ns is None
    assert bench.problems.errors == ("unknown", "unknown"), "of both instances"
    bench.faults.unsupported("gpm 1")
    failed = bench.usages_after(1)[1]
    assert (failed.window_ns, failed.busy_ns) == (0, None)
    assert bench.lacks == {"no_instance_utilization"}
