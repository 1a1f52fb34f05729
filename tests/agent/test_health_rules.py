"""Rules of `HealthWatch`: which conditions a GPU has after a reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from podgpu.clock import Clock
from podgpu.metrics.conditions import FABRIC_FIELD
from podgpu.metrics.fields import CLOCK_EVENTS_FIELD, fields
from podgpu.model import (
    HEALTHY,
    NS,
    UNHEALTHY,
    Assignment,
    Device,
    ErrorEvent,
    FieldValues,
    GpuReading,
    KubernetesHealth,
    SourceStatus,
    Workload,
)
from podgpu.node.agent.gpus import TelemetryResult
from podgpu.node.agent.health import HealthReport, HealthWatch, PastFailure
from podgpu.node.agent.xid_blame import Verdict
from podgpu.node.gpu.source import FieldGroup
from tests.nodes.clock import FakeClock

UUID = "GPU-0"
GPU = Device(0, UUID, model="H200")
OTHERS = tuple(Device(index, f"GPU-{index}", model="H200") for index in (1, 2))
POD = Workload("ns", "train", "main")
TRAIN = Assignment(UUID, POD, "kubelet")
THERMAL, OLD_THERMAL, BRAKE, ENERGY = 1423, 241, 1424, 156
ECC = 311


class Gpu:
    """Readings of one GPU. Two others of the same model answer always."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        clock = Clock(self.clock.monotonic, self.clock.wall)
        self.watch = HealthWatch(clock, xid_window=300.0, clock_window=60.0)
        self.holders: Sequence[Assignment] = [TRAIN]
        self.kubernetes: dict[str, KubernetesHealth] = {}
        self.last = HealthReport()

    def read(
        self,
        values: FieldValues | None = None,
        seconds: float = 1.0,
        *,
        error: str = "",
        links: int | None = None,
        usual_links: int | None = None,
        groups: Sequence[FieldGroup] = (),
        inventory: str = "",
        others: str = "",
        absent: bool = False,
        more: Sequence[SourceStatus] = (),
        selected: bool = True,
    ) -> dict[str, str]:
        """Returns the details of the conditions. `error`, `inventory`, `others`: of the sources."""
        self.clock.advance(seconds)
        sources = [SourceStatus("nvml", not inventory, 0.0, inventory)]
        if not absent:
            sources.append(SourceStatus("gpu0", not error, 0.0, error, device=UUID))
        sources += [SourceStatus("gpu", not others, 0.0, others, device=d.uuid) for d in OTHERS]
        readings = {}
        for device in OTHERS:
            readings[device.uuid] = GpuReading({device: {}}, links_up=usual_links)
        if not (error or inventory or absent):
            own = {} if values is None else values
            readings[UUID] = GpuReading({GPU: own}, links_up=links)
        result = TelemetryResult(
            devices=(GPU, *OTHERS),
            selected=(GPU, *OTHERS) if selected else (),
            readings=readings,
            sources=(*sources, *more),
            absent=frozenset({UUID} if absent else ()),
            groups=tuple(groups),
        )
        self.watch.update(result)
        self.last = self.watch.report(self.holders, result, self.kubernetes)
        if UUID not in self.last.gpus:
            return {}
        return {one.name: one.detail for one in self.last.gpus[UUID].conditions}

    def count_xids(self) -> dict[int, tuple[int, int]]:
        """Returns the number of XIDs since the start and in the window, by XID."""
        self.read()
        xids = self.last.devices[UUID].xids
        return {each.xid: (each.total, each.in_window) for each in xids}

    def name_cause(self, xid: int, workload: Workload, pid: int = 40) -> list[tuple[str, int]]:
        """Returns pod and total of each culprit."""
        verdict = Verdict(UUID, xid, self.clock.wall(), workload, pid, "a.out", (Workload(),))
        self.watch.add_verdicts([verdict])
        self.read()
        (count,) = self.last.devices[UUID].xids
        return [(culprit.pod, culprit.total) for culprit in count.culprits]

    def add_xid(self, code: int) -> None:
        self.watch.add_xids([ErrorEvent(UUID, code, self.clock.wall())])


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


# Absence


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        ({"error": "deadline"}, {"unreadable": "hung"}),
        ({"error": "nvml_999"}, {"unreadable": "nvml_999"}),
        ({"error": "gpu_lost"}, {"lost": ""}),
        ({"error": "gpu_lost", "others": "gpu_lost"}, {"lost": ""}),
        ({"error": "stale_handle"}, {"lost": ""}),
        ({"error": "stale_handle", "others": "stale_handle"}, {"driver_away": "stale_handle"}),
        ({"inventory": "driver_not_loaded"}, {"driver_away": "driver_not_loaded"}),
        ({"absent": True}, {"lost": ""}),
        ({"absent": True, "more": [SourceStatus("gpu0", False, 0.0, "hung")]}, {"unreadable": "hung"}),
        ({"absent": True, "more": [SourceStatus("gpu1", False, 0.0, "hung")]}, {"lost": ""}),
        ({"absent": True, "more": [SourceStatus("gpu0", False, 0.0, "unreachable")]}, {"lost": ""}),
        ({"absent": True, "selected": False}, {}),
    ],
)  # fmt: skip
def test_why_a_gpu_was_not_read(
    gpu: Gpu, reading: dict[str, Any], expected: dict[str, str]
) -> None:
    assert gpu.read() == {}
    assert gpu.read(**reading) == expected


def test_a_lost_gpu_keeps_its_last_holders(gpu: Gpu) -> None:
    gpu.read()
    gpu.read(absent=True)
    assert gpu.last.gpus[UUID].last_holders == ()
    gpu.holders = []
    gpu.read(absent=True)
    assert gpu.last.gpus[UUID].last_holders == (POD,)
    gpu.read()
    assert gpu.last.gpus[UUID].last_holders == ()
    gpu.read(absent=True)
    assert gpu.last.gpus[UUID].last_holders == ()


# XIDs


def test_a_reset_clears_xids(gpu: Gpu) -> None:
    gpu.read({ENERGY: 100})
    gpu.add_xid(79)
    assert "xid" in gpu.read({ENERGY: 200})
    assert "xid" in gpu.read({ENERGY: 200})
    assert gpu.read({ENERGY: 50}) == {}


def test_a_gpu_that_was_lost_has_no_old_xids(gpu: Gpu) -> None:
    gpu.read()
    gpu.add_xid(79)
    assert "xid" in gpu.read(error="deadline")
    assert "xid" in gpu.read(), "it only did not answer"
    gpu.read(error="gpu_lost")
    assert gpu.read() == {}


def test_xids_end_a_day_after_the_last_one(gpu: Gpu) -> None:
    gpu.read()
    gpu.add_xid(79)
    gpu.read(seconds=86_000.0)
    gpu.add_xid(79)
    assert "xid" in gpu.read(seconds=86_000.0)
    (condition, *_) = gpu.last.gpus[UUID].conditions
    assert condition.since == pytest.approx(gpu.clock.wall() - 172_000.0, abs=1.0)
    assert gpu.read(seconds=400.0) == {}


def test_a_known_cause_ends_after_ten_minutes(gpu: Gpu) -> None:
    gpu.read()
    other = Workload("ns", "other", "main")
    for _ in range(2):
        verdict = Verdict(UUID, 13, gpu.clock.wall(), POD, 40, "a.out", (other,))
        gpu.watch.add_verdicts([verdict])
        assert "application_xid" in gpu.read(seconds=400.0)
    assert gpu.read() == {"application_xid": "13 by ns/train/main, beside ns/other/main"}
    assert gpu.read(seconds=200.0) == {}


def test_xids_are_counted_since_the_start_and_in_the_window(gpu: Gpu) -> None:
    gpu.read()
    gpu.add_xid(79)
    gpu.clock.advance(200.0)
    gpu.add_xid(13)
    gpu.add_xid(79)
    assert gpu.count_xids() == {13: (1, 1), 79: (2, 2)}
    assert gpu.last.devices[UUID].last_xid == 79
    gpu.clock.advance(100.0)
    assert gpu.count_xids() == {13: (1, 1), 79: (2, 1)}
    gpu.clock.advance(200.0)
    assert gpu.count_xids() == {13: (1, 0), 79: (2, 0)}


def test_the_xid_of_an_application_is_no_condition_of_the_gpu(gpu: Gpu) -> None:
    gpu.read()
    gpu.add_xid(13)
    assert gpu.read() == {}
    assert gpu.last.gpus[UUID].failures == ()


def test_culprits_are_counted_and_the_newest_is_last(gpu: Gpu) -> None:
    gpu.read()
    gpu.add_xid(13)
    other = Workload("ns", "other", "main")
    assert gpu.name_cause(13, POD) == [("train", 1)]
    assert gpu.name_cause(13, other) == [("train", 1), ("other", 1)]
    assert gpu.name_cause(13, POD, pid=41) == [("other", 1), ("train", 2)]
    culprit = gpu.last.devices[UUID].xids[0].culprits[-1]
    assert (culprit.pid, culprit.program) == (41, "a.out")
    assert gpu.read()["application_xid"] == "13 by ns/train/main, 13 by ns/other/main"

    for number in range(70):
        names = gpu.name_cause(13, Workload("ns", f"p{number}", "main"))
    assert [pod for pod, _ in names] == [f"p{number}" for number in range(6, 70)]
    assert gpu.read()["application_xid"].endswith("and 70 more")


def test_forgotten_xids_and_failures(gpu: Gpu) -> None:
    gpu.watch.failures.restore([PastFailure(UUID, "lost", gpu.clock.wall(), is_present=True)])
    gpu.read()
    assert gpu.watch.forget_xids(UUID), "a failure"
    assert not gpu.watch.forget_xids(UUID)
    gpu.add_xid(79)
    gpu.watch.add_verdicts([Verdict(UUID, 13, gpu.clock.wall(), POD)])
    assert set(gpu.read()) == {"xid", "application_xid"}
    assert gpu.watch.forget_xids(UUID)
    assert gpu.read() == {}

    assert not gpu.watch.is_lost(UUID)
    gpu.read(error="gpu_lost")
    assert gpu.watch.is_lost(UUID)
    gpu.watch.forget(UUID)
    assert not gpu.watch.is_lost(UUID)


def test_a_forgotten_gpu_that_is_still_lost_has_failed_again(gpu: Gpu) -> None:
    gpu.watch.failures.restore([PastFailure(UUID, "lost", gpu.clock.wall(), is_present=True)])
    gpu.read(error="gpu_lost")
    gpu.watch.forget(UUID)
    gpu.read(error="gpu_lost")
    (failure,) = gpu.last.gpus[UUID].failures
    assert (failure.count, failure.first) == (1, gpu.clock.wall())


def test_a_known_cause_is_forgotten_too(gpu: Gpu) -> None:
    gpu.read()
    gpu.watch.add_verdicts([Verdict(UUID, 13, gpu.clock.wall(), POD)])
    assert gpu.watch.forget_xids(UUID)
    assert gpu.read() == {}


def test_failures_are_counted_until_a_quiet_day(gpu: Gpu) -> None:
    gpu.read()
    for _ in range(3):
        gpu.read(error="gpu_lost", seconds=3600.0)
        gpu.read()
    assert gpu.read() == {"recurring": ""}
    (failure,) = gpu.last.gpus[UUID].failures
    assert (failure.condition, failure.count) == ("lost", 3)
    assert failure.last - failure.first == pytest.approx(7202.0)
    assert "recurring" in gpu.read(seconds=86_390.0)
    assert gpu.read(seconds=20.0) == {}
    assert "recurring" in gpu.last.gpus[UUID].healthy


def test_failures_within_a_minute_are_one(gpu: Gpu) -> None:
    gpu.read()
    for _ in range(5):
        gpu.read(error="gpu_lost", seconds=5.0)
        gpu.read(seconds=5.0)
    (failure,) = gpu.last.gpus[UUID].failures
    assert failure.count == 1


@pytest.mark.parametrize(("is_present", "count"), [(True, 1), (False, 2)])
def test_a_failure_that_goes_on_after_a_restart_is_not_counted_again(
    gpu: Gpu, is_present: bool, count: int
) -> None:
    at = gpu.clock.wall() - 3600.0
    gpu.watch.failures.restore([PastFailure(UUID, "lost", at, is_present)])
    gpu.read(error="gpu_lost")
    assert gpu.last.gpus[UUID].failures[0].count == count
    gpu.read()
    gpu.read(error="gpu_lost", seconds=120.0)
    assert gpu.last.gpus[UUID].failures[0].count == count + 1


# Throttling and NVLinks


def test_throttling_begins_at_half_of_a_minute_and_ends_at_a_tenth(gpu: Gpu) -> None:
    throttled_ns = 0
    seen = []
    for share in [0.6] * 7 + [0.3] * 7 + [0.0] * 7:
        throttled_ns += int(share * 10 * NS)
        seen.append("thermal" in gpu.read({THERMAL: throttled_ns, BRAKE: 0}, seconds=10.0))
    # It is unknown in the first minute.
    assert seen == [False] * 6 + [True] * 12 + [False] * 3
    assert "power_brake" not in gpu.read({THERMAL: throttled_ns, BRAKE: 0}, seconds=10.0)
    assert {"thermal", "power_brake"} <= set(gpu.last.gpus[UUID].healthy)


def test_frequent_readings_and_a_reset_do_not_change_throttling(gpu: Gpu) -> None:
    for number in range(70):
        gpu.read({OLD_THERMAL: number * NS, THERMAL: 0})
    assert gpu.read({OLD_THERMAL: 70 * NS, THERMAL: 0}) == {"thermal": ""}
    # After a reset, it is unknown for a minute.
    assert gpu.read({OLD_THERMAL: 0, THERMAL: 0}) == {}
    assert "thermal" not in gpu.last.gpus[UUID].healthy


def test_links_that_went_down(gpu: Gpu) -> None:
    assert gpu.read(links=18) == {}
    assert "nvlink" in gpu.last.gpus[UUID].healthy
    assert gpu.read(links=17) == {"nvlink": "1/18"}
    assert gpu.read(links=18) == {}


def test_links_that_were_never_up(gpu: Gpu) -> None:
    assert gpu.read(links=16, usual_links=18) == {"nvlink": "2/18"}


def test_a_gpu_that_is_not_registered_with_the_fabric(gpu: Gpu) -> None:
    assert "fabric" in gpu.read({FABRIC_FIELD: 1}, links=18, usual_links=18)


def test_clock_events_are_counted_when_they_begin(gpu: Gpu) -> None:
    group = FieldGroup((fields()[CLOCK_EVENTS_FIELD],), 1.0)
    power_cap, thermal = 0x4, 0x20
    for mask in (power_cap, power_cap, power_cap | thermal, 0, thermal):
        gpu.read({CLOCK_EVENTS_FIELD: mask}, groups=[group])
    gpu.read({}, groups=[group])
    events = gpu.last.devices[UUID].clock_events
    assert sorted(events.values()) == [(2, 2), (3, 0)]
    gpu.read({CLOCK_EVENTS_FIELD: 0}, seconds=61.0, groups=[group])
    assert list(gpu.last.devices[UUID].clock_events.values()) == [(0, 2)]


def test_a_gpu_without_a_bridge_has_no_links(gpu: Gpu) -> None:
    gpu.read(links=0)
    assert "nvlink" not in gpu.last.gpus[UUID].healthy


# Kubernetes


def test_opinions_of_kubernetes_that_last_for_two_minutes(gpu: Gpu) -> None:
    gpu.kubernetes = {UUID: KubernetesHealth(UNHEALTHY, "xid 48")}
    assert gpu.read() == {}
    assert gpu.read(seconds=119.0) == {}
    assert gpu.read(seconds=1.0) == {"kubernetes_unhealthy": "xid 48"}
    assert gpu.last.devices[UUID].kubernetes_health == UNHEALTHY

    gpu.kubernetes = {UUID: KubernetesHealth(HEALTHY)}
    assert gpu.read() == {}
    assert {"kubernetes_unhealthy", "kubernetes_healthy"} <= set(gpu.last.gpus[UUID].healthy)
    gpu.read({ECC: 2}, error="gpu_lost")
    assert gpu.read(error="gpu_lost", seconds=120.0) == {"lost": "", "kubernetes_healthy": ""}


def test_without_an_opinion_or_a_driver_there_is_no_disagreement(gpu: Gpu) -> None:
    gpu.read(error="gpu_lost")
    gpu.read(error="gpu_lost", seconds=120.0)
    assert "kubernetes_healthy" not in gpu.last.gpus[UUID].healthy
    gpu.kubernetes = {UUID: KubernetesHealth(HEALTHY)}
    gpu.read(inventory="driver_not_loaded")
    away = gpu.read(inventory="driver_not_loaded", seconds=120.0)
    assert away == {"driver_away": "driver_not_loaded"}


def test_both_agree_that_a_gpu_is_broken(gpu: Gpu) -> None:
    gpu.kubernetes = {UUID: KubernetesHealth(UNHEALTHY)}
    gpu.read(error="gpu_lost")
    assert gpu.read(error="gpu_lost", seconds=120.0) == {"lost": ""}
