"""Faults of one GPU or of the driver: effects on the scrapes of the other GPUs, and recovery."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pynvml
import pytest

from tests.agent.documents import errors_of
from tests.agent.gpu_bench import bench_of
from tests.nodes.clock import PATIENCE, wait_until

MINUTE = 60


def lines_about(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    return [message for message in caplog.messages if any(word in message for word in words)]


@pytest.mark.fault(
    "A call into the driver about one GPU hangs for ever",
    "The other GPUs are in every scrape; the hung one has no figures, is named in /health and in "
    "one line of the log,"
    " and is back with the first reading after the call returns",
)
def test_a_hung_gpu_never_takes_the_others_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with bench_of(tmp_path, "3xH100", 0, 1, 2) as bench:
        hang = bench.faults.hang("nvmlDeviceGetTemperature", 1)
        for _ in range(3 * MINUTE // 5):
            bench.turn(0, 2, seconds=5.0)
            assert not bench.shown(1)
            assert bench.client.ask("/ready").status == 200
        assert hang.entered.is_set()
        assert bench.driver.calls["nvmlInit"] == 1
        assert "gpu1: hung: " in bench.client.ask("/health").text
        said = lines_about(caplog, "gpu1", bench.uuid(1))
        assert len(said) == 1, "logged once, not in every turn"
        bench.faults.release_all()
        wait_until(lambda: bench.turn(0, 2) and bench.shown(1), "the GPU is back")
        assert lines_about(caplog, "answers again") == [f"gpu1 ({bench.uuid(1)}): answers again"]


@pytest.mark.fault(
    "Prometheus scrapes at the very moment in which a turn waits for a GPU that hangs",
    (
        "The scrape does not wait: it answers with the figures of the last turn before the driver "
        "returns"
    ),
)
def test_a_scrape_waits_for_no_driver(tmp_path: Path) -> None:
    with bench_of(tmp_path, "3xH100", 0, 1, 2) as bench:
        hang = bench.faults.hang("nvmlDeviceGetTemperature", 1)
        bench.time += 1.0
        turn = threading.Thread(target=bench.agent.read_telemetry)
        turn.start()
        assert hang.entered.wait(PATIENCE)
        bench.scrape()
        assert all(map(bench.shown, range(3)))
        turn.join()
        bench.turn(0, 2)
        assert not bench.shown(1)


@pytest.mark.fault(
    "A GPU hangs in its very first calls, while podgpu starts",
    "The other GPUs are there after the first deadline; the hung one is named in /health and "
    "joins them when its call"
    " returns",
)
@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetPciInfo",
    ],
)
def test_a_gpu_that_hangs_at_the_start(tmp_path: Path, function: str) -> None:
    with bench_of(
        tmp_path, "3xH100", 0, 2, before=lambda faults: faults.hang(function, 1)
    ) as bench:
        bench.turns(MINUTE, 0, 2)
        assert "gpu1: hung: GPU 1 does not answer" in bench.client.ask("/health").text
        assert 'podgpu_device_count{state="lost",Hostname="h"} 1' in bench.scraped
        bench.faults.release_all()
        wait_until(lambda: bench.turn(0, 2) and bench.shown(1), "the GPU is met late")
        assert bench.client.ask("/health").text == "OK\n"


@pytest.mark.fault(
    "A GPU is lost (XID 79, fell off the bus) and comes back",
    "NVML is not initialised anew for it, so the others' figures and sums stay exact; their XIDs "
    "are watched on; the"
    " lost one is looked for by its slot and goes on where it was",
)
def test_a_lost_gpu_hurts_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with bench_of(tmp_path, "3xH100", 0, 1, 2) as bench:
        bench.faults.lose(1)
        for _ in range(3 * MINUTE // 5):
            bench.turn(0, 2, seconds=5.0)
            assert not bench.shown(1)
        assert bench.driver.calls["nvmlInit"] == 1
        bench.faults.raise_xid(2, 31)
        wait_until(
            lambda: 'xid="31"' in bench.turn(0, 2, seconds=0.5), "the XID of another GPU is counted"
        )
        assert len(lines_about(caplog, "gpu1", bench.uuid(1))) == 1
        bench.faults.recover(1)
        bench.turn(0, 2)
        bench.turn(0, 1, 2)
        assert f"gpu1 ({bench.uuid(1)}): answers again" in caplog.messages


@pytest.mark.fault(
    "A GPU has fallen off the bus when the driver is loaded again, and comes back later",
    (
        "The others have figures as ever; the driver lists its GPUs again every two minutes, and "
        "so "
        "it is found"
    ),
)
def test_a_gpu_that_was_lost_when_the_driver_was_loaded(tmp_path: Path) -> None:
    with bench_of(tmp_path, "3xH100", 0, 1, 2) as bench:
        bench.faults.lose(1, enumerated=False)
        bench.faults.reload_driver()
        bench.turns(MINUTE)
        assert bench.shown(0)
        assert not bench.shown(1)
        bench.faults.recover(1)
        bench.turns(2 * MINUTE)
        assert bench.shown(1), (
            "the GPU returns although the number of GPUs on the bus did not change"
        )
        begun = bench.driver.calls["nvmlInit"]
        bench.turns(2 * MINUTE)
        assert bench.driver.calls["nvmlInit"] == begun, (
            "the driver is not opened again when all GPUs are present"
        )


def test_of_two_lost_gpus_the_one_that_the_driver_lists_returns_at_once(tmp_path: Path) -> None:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as bench:
        bench.faults.lose(1, enumerated=False)
        bench.faults.lose(2)
        bench.faults.reload_driver()
        bench.turns(MINUTE)
        for gpu in (1, 2):
            bench.faults.recover(gpu)
        bench.run(10)
        assert bench.shown(2)
        bench.turns(2 * MINUTE)
        assert bench.shown(1)


@pytest.mark.fault(
    "One GPU is lost while a call into another hangs",
    "The healthy ones are in every scrape: nobody is shut out so that the driver can be let go of",
)
def test_a_lost_gpu_beside_a_hung_one(tmp_path: Path) -> None:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as bench:
        bench.faults.lose(1)
        bench.faults.hang("nvmlDeviceGetFieldValues", 2)
        bench.turns(2 * MINUTE, 0, 3)
        assert not any(reason == "released" for _, reason in errors_of(bench.agent.published.state))
        bench.expected = 5  # a GPU was added, but the driver cannot be opened again during the hang
        bench.turns(2 * MINUTE, 0, 3)
        bench.faults.release_all()
        bench.faults.recover(1)
        wait_until(lambda: bench.turn() and bench.shown(1) and bench.shown(2), "both are back")
        # The driver is still opened again from time to time, and rates need two readings.
        wait_until(
            lambda: bench.turn() and bench.value("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0) is not None,
            "rates, too",
        )


@pytest.mark.fault(
    "The driver must be reopened to list a repaired GPU, while a call to another GPU hangs",
    "the repaired GPU is listed 10 s after the call returns",
)
def test_a_repaired_gpu_is_listed_soon_after_a_call_that_hung(tmp_path: Path) -> None:
    with bench_of(tmp_path, "3xH100", 0, 1, 2) as bench:
        bench.faults.lose(1, enumerated=False)
        bench.faults.reload_driver()
        bench.turns(MINUTE)
        bench.faults.recover(1)
        bench.faults.hang("nvmlDeviceGetPowerUsage", 2)
        bench.turns(90)
        bench.faults.release_all()
        bench.run(12)
        assert bench.shown(1)


@pytest.mark.fault(
    "A GPU with MIG instances that was lost is listed again, and its first reading hangs",
    "its instances stay known, so that their holders and counters stay",
)
def test_instances_of_a_gpu_that_is_listed_again_stay_known(tmp_path: Path) -> None:
    with bench_of(tmp_path, "2xH100") as bench:
        bench.faults.relayout(1, ("3g.40gb", "1g.10gb"))
        bench.turn()
        bench.faults.lose(1, enumerated=False)
        bench.faults.reload_driver()
        bench.run(20)
        bench.faults.recover(1)
        bench.faults.hang("nvmlDeviceGetPowerUsage", 1)
        seen = set()
        for _ in range(2 * MINUTE // 5):
            bench.turn(seconds=5.0)
            seen |= {
                len(gpu.instances)
                for gpu in bench.agent.published.state.devices
                if gpu.uuid == bench.uuid(1)
            }
        assert seen == {2}


@pytest.mark.fault(
    "A GPU's MIG instances are laid out anew",
    "The new instances have figures with the next reading; the other GPUs notice nothing",
)
def test_mig_laid_out_anew(tmp_path: Path) -> None:
    with bench_of(tmp_path, "1xH100,1xH100/7x1g.10gb", 0) as bench:
        for layout in (["3g.40gb", "3g.40gb"], None, ["1g.10gb"] * 7):
            bench.faults.relayout(1, layout)
            bench.turn(0)
            bench.turn(0)
            instances = bench.agent.published.state.devices[1].instances
            profiles = [instance.profile for instance in instances if instance.fields is not None]
            assert profiles == (layout or [])


@pytest.mark.fault(
    "A GPU sends thousands of XID errors",
    "Each is counted; the log has one line a minute for the same XID of the same GPU",
)
def test_an_xid_storm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storm = 5000
    with bench_of(tmp_path, "2xH100", 0, 1) as bench:
        for _ in range(storm):
            bench.faults.raise_xid(1, 94)
        wait_until(
            lambda: (
                bench.turn(0, 1, seconds=0.5)
                and bench.value("podgpu_xid_errors_total", 1, 'xid="94"') == storm
            ),
            "all are counted",
        )
        assert len(lines_about(caplog, "XID 94")) == 1


@pytest.mark.fault(
    "The wall clock jumps forward and back",
    "Nothing is counted twice or lost: sums, windows and ages go by the clock that never jumps",
)
@pytest.mark.parametrize("leap", [3600.0, -3600.0, 86400.0 * 365])
def test_the_wall_clock_jumps(tmp_path: Path, leap: float) -> None:
    with bench_of(tmp_path, "2xH100", 0, 1) as bench:
        bench.faults.raise_xid(0, 31)
        in_window = ("DCGM_EXP_XID_ERRORS_COUNT", 0, 'xid="31"')
        wait_until(
            lambda: bench.turn(0, 1, seconds=0.5) and bench.value(*in_window) == 1,
            "the XID is counted",
        )
        for seconds in (leap, -leap, leap):
            bench.leap(seconds)
            for _ in range(10):
                bench.turn(0, 1)
                assert bench.value(*in_window) == 1
        bench.turn(0, 1, seconds=5 * MINUTE)
        assert bench.value(*in_window) is None, "the XID is older than the five-minute window"


@pytest.mark.fault(
    "The driver answers an impossible figure for energy",
    "The figure is left out and counted as refused; the next good one makes up for it",
)
def test_an_energy_counter_without_a_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bench_of(tmp_path, "2xH100", 0, 1) as bench:
        bench.faults.answer("nvmlDeviceGetTotalEnergyConsumption", 2**64 - 1, 1)
        for _ in range(5):
            bench.turn(0)
            assert bench.value("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1) is None
        assert errors_of(bench.agent.published.state).keys() == {("usage", "bad_value")}
        bench.faults.clear("nvmlDeviceGetTotalEnergyConsumption", 1)
        bench.turn(0, 1)
    assert "Traceback" not in caplog.text
    assert "please report" not in caplog.text


@pytest.mark.fault(
    "The driver counts GPUs and gives a handle for none of them",
    "/health names each of them and why, and /ready is 503",
)
def test_no_handle_for_any_gpu(tmp_path: Path) -> None:
    error = pynvml.NVML_ERROR_UNKNOWN
    with bench_of(
        tmp_path, "2xH100", before=lambda faults: faults.fail("nvmlDeviceGetHandleByIndex", error)
    ) as bench:
        health = bench.client.ask("/health").text
        assert health.startswith("degraded\n")
        assert "gpu0: unreachable: " in health
        assert "gpu1: unreachable: " in health
        assert bench.client.ask("/ready").status == 503
        bench.faults.clear("nvmlDeviceGetHandleByIndex")
        wait_until(
            lambda: bench.turn() and bench.shown(0) and bench.shown(1), "it is over by itself"
        )


@pytest.mark.fault(
    "A GPU is taken out of the machine and put back",
    "The others' sums stay exact; its own counters go on where they were, and the GPU that has "
    "its number meanwhile is"
    " not said to have recovered",
)
def test_a_gpu_that_goes_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with bench_of(tmp_path, "3xH100", 0, 1, 2) as bench:
        for _ in range(20):
            bench.turn(0, 1, 2)
        before = bench.value("podgpu_device_energy_joules_total", 1)
        assert before
        bench.faults.lose(1)
        bench.turn(0, 2)
        bench.faults.lose(1, enumerated=False)
        bench.expected = 2
        wait_until(
            lambda: bench.turn() and bench.driver.calls["nvmlInit"] == 2, "the bus was looked at"
        )
        bench.run(10)
        assert bench.agent.published.state.devices[1].uuid == bench.uuid(2), "GPU 2 has index 1 now"
        assert not lines_about(caplog, "answers again")
        bench.turn(0, 2)
        bench.faults.recover(1)
        bench.expected = 3
        wait_until(lambda: bench.turn() and bench.shown(1), "it is back")
        bench.turn(0, 2)
        after = bench.value("podgpu_device_energy_joules_total", 1)
        assert after is not None
        assert after >= before


@pytest.mark.fault(
    "How a GPU is used cannot be read, although all else about it can",
    (
        "Its device series stand; the usage source is not up, and /health says whose figures are "
        "left "
        "out and why"
    ),
)
def test_a_gpu_that_hangs_where_only_use_is_read(tmp_path: Path) -> None:
    with bench_of(tmp_path, "2xH100", 0, 1) as bench:
        bench.faults.hang("nvmlDeviceGetProcessUtilization", 1)
        for _ in range(3):
            bench.turn(0)
            assert bench.shown(1)
        assert (
            f"usage: hung: container usage of {bench.uuid(1)} is unknown"
            in bench.client.ask("/health").text
        )
        assert 'podgpu_exporter_source_up{source="usage"} 0' in bench.scraped
        bench.faults.release_all()
        wait_until(
            lambda: bench.turn(0) and bench.client.ask("/health").text == "OK\n",
            "it is over by itself",
        )
