"""What the Prometheus backend carries from round to round: owners, idle devices, spellings. None of it grows."""

from __future__ import annotations

from podgpu.cluster.prom.idle import ASK_EVERY, IdleDevices, IdleQuery
from podgpu.cluster.prom.owners import (
    ASK_AGAIN,
    MOST_AT_A_TIME,
    Owners,
    parse_pod_owners,
    parse_replica_set_owners,
    resolved,
)
from podgpu.cluster.prom.spellings import SpellingMemory, Spellings
from podgpu.cluster.reading import NodeReading
from podgpu.figures.device import DeviceFigures, HolderFigures, Owner
from podgpu.metrics.parse import ParsedSample
from podgpu.model import Workload

JOB = Owner("Job", "train")


def node(*pods: str, utilization: float | None = 0.0) -> NodeReading:
    holders = tuple(HolderFigures(Workload("ns", pod, "main")) for pod in pods)
    device = DeviceFigures("GPU-1", 0, utilization=utilization, holders=holders)
    return NodeReading("target", "node", devices=(device,))


def sample(**labels: str) -> ParsedSample:
    return ParsedSample("", labels, 1.0)


# Owners


def test_only_pods_not_known_are_asked_about() -> None:
    owners = Owners()
    assert owners.pods([node("a", "b")], 0.0) == (("ns", "a"), ("ns", "b"))
    owners.take([("ns", "a"), ("ns", "b")], {("ns", "a"): JOB, ("ns", "other"): JOB}, 0.0)
    assert owners.known() == {("ns", "a"): JOB}
    assert owners.pods([node("a", "b", "c")], 1.0) == (("ns", "c"),)
    assert owners.pods([node("a", "b")], ASK_AGAIN) == (("ns", "b"),)


def test_pods_that_are_gone_are_forgotten() -> None:
    owners = Owners()
    owners.take(owners.pods([node("a")], 0.0), {("ns", "a"): JOB}, 0.0)
    assert owners.pods([node()], 1.0) == ()
    assert owners.known() == {}
    assert owners.pods([node("a")], 2.0) == (("ns", "a"),)


def test_many_pods_are_asked_about_in_turns() -> None:
    owners = Owners()
    everybody = node(*(f"p{n}" for n in range(MOST_AT_A_TIME + 1)))
    first = owners.pods([everybody], 0.0)
    assert len(first) == MOST_AT_A_TIME
    owners.take(first, {}, 0.0)
    assert len(owners.pods([everybody], 1.0)) == 1


def test_somebody_else_is_asked_about_the_rest_only() -> None:
    owners = Owners()
    owners.take(owners.pods([node("a", "b")], 0.0), {("ns", "a"): JOB}, 0.0)
    elsewhere = owners.known(lambda pods: {pod: Owner("DaemonSet", "d") for pod in pods})
    assert elsewhere == {("ns", "a"): JOB, ("ns", "b"): Owner("DaemonSet", "d")}


def test_owners_as_kube_state_metrics_has_them() -> None:
    pods = parse_pod_owners(
        [
            sample(namespace="ns", pod="a", owner_kind="ReplicaSet", owner_name="web-1"),
            sample(namespace="m", pod="k", exported_namespace="ns", exported_pod="b", owner_kind="Job", owner_name="t"),
            sample(namespace="ns", pod="c", owner_kind="<none>", owner_name="<none>"),
            sample(namespace="ns", pod="d"),
            sample(namespace="other", pod="a", owner_kind="ReplicaSet", owner_name="web-1"),
        ]
    )
    sets = parse_replica_set_owners(
        [sample(namespace="ns", replicaset="web-1", owner_kind="Deployment", owner_name="web")]
    )
    assert resolved(pods, sets) == {
        ("ns", "a"): Owner("Deployment", "web"),
        ("ns", "b"): Owner("Job", "t"),
        ("other", "a"): Owner("ReplicaSet", "web-1"),
    }


# Idle devices


def test_idle_until_seen_busy() -> None:
    idle = IdleDevices(window=1800)
    assert idle.is_due(10_000)
    idle.take([sample(UUID="GPU-1"), sample(uuid="GPU-2", GPU_I_ID="3"), sample()], 10_000)
    assert idle.idle_for(10_030) == {("GPU-1", ""): 1830, ("GPU-2", "3"): 1830}
    idle.watch([node()])
    assert idle.idle_for(10_030) == {("GPU-1", ""): 1830}
    idle.watch([node(utilization=0.1)])
    assert idle.idle_for(10_030) == {}
    assert not idle.is_due(10_000 + ASK_EVERY - 1)
    assert idle.is_due(10_000 + ASK_EVERY)


def test_what_was_known_longer_stays_known() -> None:
    idle = IdleDevices(window=1800)
    idle.take([sample(UUID="GPU-1")], 10_000)
    idle.take([sample(UUID="GPU-1"), sample(UUID="GPU-2")], 11_000)
    assert idle.idle_for(11_000) == {("GPU-1", ""): 2800, ("GPU-2", ""): 1800}


def test_looks_cover_the_window() -> None:
    for window in (600.0, 1800.0, 7.0, 0.5, 86400.0 * 30):
        query = IdleQuery((), window)
        assert 0 <= query.looks * query.step - window < query.step
        assert query.instant(1_800_000_007.0) <= 1_800_000_007.0


# Spellings


def used(**labels: str) -> ParsedSample:
    return ParsedSample("DCGM_FI_DEV_MEM_COPY_UTIL", labels, 1.0)


FIELD = 204
OLD_ONLY, BOTH = (True, False), (True, True)


def test_spellings_in_use() -> None:
    memory = SpellingMemory(("Hostname", "node"), window=300)
    found = memory.take([used(UUID="a", Hostname="n", pod="p"), used(uuid="b", node="m")], FIELD, 1000)
    assert found == Spellings(
        ("UUID", "uuid"), ("Hostname", "node"), ("pod",), has_allocations=False, generations=OLD_ONLY
    )
    own = ParsedSample("podgpu_allocation_info", {"UUID": "a", "exported_pod": "p"}, 1.0)
    found = memory.take([used(UUID="a", Hostname="n"), own], FIELD, 1200)
    assert found == Spellings(("UUID", "uuid"), ("Hostname", "node"), ("exported_pod", "pod"), True, OLD_ONLY)
    found = memory.take([used(UUID="a", Hostname="n")], FIELD, 1400)
    assert found == Spellings(("UUID",), ("Hostname",), ("exported_pod",), True, OLD_ONLY)


def test_without_data_every_spelling_is_tried() -> None:
    found = SpellingMemory(("Hostname",), window=300).take([], FIELD, 0)
    assert (found.uuids, found.nodes) == (("UUID", "uuid"), ("Hostname",))
    assert found.generations == BOTH


def test_names_of_either_generation_are_remembered_for_the_window() -> None:
    memory = SpellingMemory(("Hostname",), window=300)
    new = ParsedSample("DCGM_FI_DEV_MEMORY_UTIL_RATIO", {"UUID": "b", "hostname": "m"}, 0.5)
    assert memory.take([new], FIELD, 1000).generations == (False, True)
    assert memory.take([used(UUID="a")], FIELD, 1200).generations == BOTH
    assert memory.take([used(UUID="a")], FIELD, 1400).generations == OLD_ONLY
