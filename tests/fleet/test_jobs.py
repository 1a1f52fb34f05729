"""Jobs with all their pods: the alert, the metric and the JSON of the slowest GPU."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from podgpu.fleet.job_view import make_job, make_jobs
from podgpu.fleet.jobs import JobDetector
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state
from podgpu.model import DeviceState, PodName, WorkloadOwner
from tests.fleet.states import WALL, gpu, holder, node, series, state_of

FIELDS = {"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4, "DCGM_FI_PROF_PCIE_TX_BYTES": 1e9}
RATIO = "podgpu_gpu_slower_than_siblings_ratio"
OWNERS: dict[PodName, WorkloadOwner] = {
    ("ml", "run-0"): WorkloadOwner("JobSet", "run"),
    ("ml", "run-1"): WorkloadOwner("JobSet", "run"),
    ("ml", "chat"): WorkloadOwner("Deployment", "chat"),
}


def busy_gpu(number: int, pod: str, clock: float, **more: Any) -> DeviceState:
    usage = holder(pod, "ml", utilization_ratio=0.98)
    device = gpu(number, usage, busy=0.98, power_mw=600_000, power_limit_mw=700_000, **more)
    fields = FIELDS | {"DCGM_FI_DEV_SM_CLOCK": clock}
    return DeviceState(
        **{name: getattr(device, name) for name in device.__struct_fields__} | {"fields": fields}
    )


def run(minutes: int, clock: float, heat: float = 0.0, **first_gpu: str) -> ClusterState:
    """Runs a job of two pods with two GPUs each, and a Deployment, for some minutes."""
    detector = JobDetector()
    state: ClusterState | None = None
    for number in range(2 * minutes + 1):
        now = 30.0 * number
        throttled = {"hw_thermal": int(heat * now * 1e9)}
        slow = busy_gpu(0, "run-0", clock, throttled_ns=throttled, **first_gpu)
        first = [slow, busy_gpu(1, "run-0", 1700.0)]
        second = [
            busy_gpu(2, "run-1", 1700.0),
            busy_gpu(3, "run-1", 1700.0),
            busy_gpu(4, "chat", 900.0),
        ]
        nodes = (node("n1", *first, read_at=now), node("n2", *second, read_at=now))
        reading = ClusterReading(nodes, owners=OWNERS)
        state = build_cluster_state(
            reading, state, ViewSettings(), now, WALL + now, detector=detector
        )
    assert state is not None
    return state


def test_the_slowest_gpu_is_an_alert_a_metric_and_in_the_json() -> None:
    state = run(8, 1615.0)
    (alert,) = state.alerts
    assert (alert.severity, alert.node, alert.uuid) == ("warning", "n1", "GPU-0")
    assert alert.job == "JobSet/ml/run"
    assert alert.text == (
        "JobSet ml/run: GPU 0 of n1 is slower than its siblings: its SM clock is 5 % lower"
    )
    ((labels, value),) = series(state, RATIO).items()
    assert value == 0.05
    named = dict(labels)
    assert (named["owner_kind"], named["owner_name"], named["reason"]) == ("JobSet", "run", "clock")
    assert (named["gpu_id"], named["against"], named["namespace"]) == ("GPU-0", "siblings", "ml")

    (job,) = make_jobs(state).jobs
    assert (job.kind, job.name, job.pods, job.nodes, job.gpus) == ("JobSet", "run", 2, 2, 4)
    assert (job.utilization_ratio, job.wait_ratio) == (0.98, 0.0)
    assert job.slowest is not None
    assert (job.slowest.uuid, job.slowest.difference_ratio) == ("GPU-0", 0.05)
    assert WALL <= job.slowest.since <= WALL + 180

    answer = make_job(state, "JobSet", "ml", "run")
    assert answer is not None
    shown = [(each.uuid, each.sm_clock_mhz, each.is_slowest) for each in answer.devices]
    assert shown[:2] == [("GPU-0", 1615.0, True), ("GPU-1", 1700.0, False)]
    assert [each.pods for each in answer.devices] == [["run-0"]] * 2 + [["run-1"]] * 2
    assert answer.devices[0].bytes_per_second == 1e9
    assert answer.devices[0].wait_ratio == 0.0, "its pod is alone on the GPU"
    # The GPUs of other owners are not compared.
    other = make_job(state, "Deployment", "ml", "chat")
    assert other is not None
    assert (other.pods, other.slowest) == (1, None)
    assert make_job(state, "JobSet", "ml", "walk") is None


def test_gpus_without_a_uuid_on_two_nodes_are_two_devices() -> None:
    nodes = [node(name, gpu(0, holder("run-0", "ml"), uuid="")) for name in ("n1", "n2")]
    state = state_of(*nodes, owners=OWNERS)
    (job,) = make_jobs(state).jobs
    assert (job.nodes, job.gpus) == (2, 2)
    details = make_job(state, "JobSet", "ml", "run")
    assert details is not None
    assert [device.node for device in details.devices] == ["n1", "n2"]


def test_gpus_of_another_model_are_no_siblings() -> None:
    assert not run(8, 1615.0, model="NVIDIA A100-SXM4-80GB").slow


def test_time_of_throttling_is_the_increase_of_its_counter() -> None:
    answer = make_job(run(8, 1700.0, heat=0.25), "JobSet", "ml", "run")
    assert answer is not None
    assert answer.slowest is None  # the siblings do not report throttling
    assert [each.throttled_ratio for each in answer.devices] == [0.25, None, None, None]


def test_equal_gpus_are_no_alert() -> None:
    state = run(8, 1690.0)
    assert not state.alerts
    assert not series(state, RATIO)
    (job,) = make_jobs(state).jobs
    assert job.slowest is None


def test_a_job_that_gets_a_neighbour_waits_more_than_before() -> None:
    """The log of context switches is not read while the job is alone, so its waits are unknown."""
    detector = JobDetector()
    state: ClusterState | None = None
    for number in range(2 * 40):
        now = 30.0 * number
        usage = holder("run-0", "ml", utilization_ratio=0.98)
        holders = [usage]
        if number >= 2 * 32:
            waiting = structs.replace(usage.known_usage, wait_ratio=0.4)
            holders = [structs.replace(usage, usage=waiting), holder("chat", "ml")]
        fields = FIELDS | {"DCGM_FI_DEV_SM_CLOCK": 1700.0}
        device = structs.replace(gpu(0, *holders, busy=0.98), fields=fields)
        reading = ClusterReading((node("n1", device, read_at=now),), owners=OWNERS)
        state = build_cluster_state(
            reading, state, ViewSettings(), now, WALL + now, detector=detector
        )
        if number == 2 * 32:
            assert not state.alerts

    assert state is not None
    assert [alert.text for alert in state.alerts if "waits" in alert.text]
