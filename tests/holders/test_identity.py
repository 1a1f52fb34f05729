"""Who is who, from names of log files and from the API server: filled in where it is sure, left empty where not."""

from __future__ import annotations

import os
import string
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from podgpu.errors import SourceError
from podgpu.holders.identity import (
    Contradiction,
    Identities,
    IdentityReader,
    parse_container_log,
    parse_pod_directory,
)
from podgpu.holders.merge import merge
from podgpu.kube.objects import ContainerRecord, PodRecord
from podgpu.model import WORKLOAD_PARTS, Allocation, Assignment, Workload

UID = "c3a3a1f0-0000-4000-8000-000000000001"
OLD_UID = "c3a3a1f0-0000-4000-8000-000000000002"
HASH = "6576683a93d91d8e2119df2c2755f2f1"
X, Y, Z = "3f" * 32, "4e" * 32, "5d" * 32


# Names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"ml_train-0_{UID}", Workload("ml", "train-0", uid=UID)),
        (f"kube-system_etcd-node-1_{HASH}", Workload("kube-system", "etcd-node-1", uid=HASH)),
        (f"ml_web.v2.example_{UID}", Workload("ml", "web.v2.example", uid=UID)),
        ("ml_train-0", None),
        (f"ml_train_0_{UID}", None),
        (f"_train_{UID}", None),
        (f"ml__{UID}", None),
        ("ml_train_", None),
        (f"ML_train_{UID}", None),
        (f"ml_träin_{UID}", None),
        (f"ml_train_{UID}\n", None),
        ("lost+found", None),
        ("", None),
    ],
)
def test_pod_directories(name: str, expected: Workload | None) -> None:
    assert parse_pod_directory(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"train-0_ml_main-{X}.log", Workload("ml", "train-0", "main", container_id=X)),
        (f"a.b-0_ml_side-car-1-{X}.log", Workload("ml", "a.b-0", "side-car-1", container_id=X)),
        (f"train-0_ml_main-{X}.log.1", None),
        (f"train-0_ml_main-{X[:-1]}.log", None),
        (f"train-0_ml_main-{X}0.log", None),
        (f"train-0_ml_main-{X.upper()}.log", None),
        (f"train-0_ml_-{X}.log", None),
        (f"train-0_ml-{X}.log", None),
        (f"train_0_ml_main-{X}.log", None),
        (f"train-0_ml_main-{X}", None),
        ("", None),
    ],
)
def test_container_logs(name: str, expected: Workload | None) -> None:
    assert parse_container_log(name) == expected


_ENDS = string.ascii_lowercase + string.digits
names = st.sampled_from(_ENDS) | st.tuples(
    st.sampled_from(_ENDS), st.text(_ENDS + "-", max_size=6), st.sampled_from(_ENDS)
).map("".join)
uids = st.uuids().map(str) | st.uuids().map(lambda one: one.hex)
ids = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(names, names, names, uids, ids)
def test_names_round_trip(namespace: str, pod: str, container: str, uid: str, container_id: str) -> None:
    assert parse_pod_directory(f"{namespace}_{pod}_{uid}") == Workload(namespace, pod, uid=uid)
    logged = parse_container_log(f"{pod}_{namespace}_{container}-{container_id}.log")
    assert logged == Workload(namespace, pod, container, container_id=container_id)


@given(st.text(max_size=80))
def test_any_name_is_somebody_or_nobody(name: str) -> None:
    for one in (parse_pod_directory(name), parse_container_log(name)):
        assert one is None or (one.namespace and one.pod)


# Completion


def known(*names: str) -> Identities:
    """From names of both kinds."""
    pods = (parse_pod_directory(name) for name in names)
    containers = (parse_container_log(name) for name in names)
    return Identities(
        frozenset(one for one in pods if one is not None), frozenset(one for one in containers if one is not None)
    )


def record(uid: str = UID, pod: str = "train", **container_ids: str) -> PodRecord:
    containers = tuple(ContainerRecord(name, container_id=one) for name, one in container_ids.items())
    return PodRecord("ml", pod, uid, containers=containers)


DIRECTORY, OLD_DIRECTORY = f"ml_train_{UID}", f"ml_train_{OLD_UID}"
LOG, OLD_LOG = f"train_ml_main-{X}.log", f"train_ml_main-{Y}.log"
FULL = Workload("ml", "train", "main", UID, X)
BY_NAME = Workload("ml", "train", "main")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(Workload(container_id=X), id="by container id"),
        pytest.param(Workload(uid=UID, container_id=X), id="as a cgroup has it"),
        pytest.param(Workload(container="main", uid=UID), id="as the checkpoint has it"),
        pytest.param(BY_NAME, id="as the kubelet has it"),
        pytest.param(FULL, id="known already"),
    ],
)
def test_all_parts_from_any_key(part: Workload) -> None:
    assert known(DIRECTORY, LOG).complete(part) == FULL
    assert Identities().with_pods([record(main=X)]).complete(part) == FULL
    assert known(DIRECTORY, LOG).with_pods([record(main=X)]).complete(part) == FULL


@pytest.mark.parametrize(
    ("about", "identities", "part", "expected"),
    [
        ("nothing known", known(), BY_NAME, BY_NAME),
        ("nothing asked", known(DIRECTORY, LOG), Workload(), Workload()),
        ("an HPC job", known(DIRECTORY, LOG), Workload(job="7"), Workload(job="7")),
        ("another pod", known(DIRECTORY, LOG), Workload("ml", "other", "main"), Workload("ml", "other", "main")),
        ("the pod as a whole", known(DIRECTORY, LOG), Workload("ml", "train"), Workload("ml", "train", uid=UID)),
        ("a uid alone is no container", known(DIRECTORY, LOG), Workload(uid=UID), Workload("ml", "train", uid=UID)),
        ("no log yet", known(DIRECTORY), BY_NAME, structs.replace(BY_NAME, uid=UID)),
        ("no directory yet", known(LOG), BY_NAME, structs.replace(BY_NAME, container_id=X)),
        ("a pod made anew", known(DIRECTORY, OLD_DIRECTORY), BY_NAME, BY_NAME),
        ("a pod made anew, one log", known(DIRECTORY, OLD_DIRECTORY, LOG), BY_NAME, BY_NAME),
        (
            "a pod made anew, by uid",
            known(DIRECTORY, OLD_DIRECTORY, LOG),
            Workload(uid=OLD_UID, container="main"),
            Workload("ml", "train", "main", OLD_UID),
        ),
        (
            "a pod made anew, by container id",
            known(DIRECTORY, OLD_DIRECTORY, LOG),
            Workload(container_id=X),
            structs.replace(BY_NAME, container_id=X),
        ),
        ("a restarted container", known(DIRECTORY, LOG, OLD_LOG), BY_NAME, structs.replace(BY_NAME, uid=UID)),
        (
            "the API server says which pod lives",
            known(DIRECTORY, OLD_DIRECTORY).with_pods([record()]),
            BY_NAME,
            structs.replace(BY_NAME, uid=UID),
        ),
        (
            "the API server says which pod lives, before its directory is there",
            known(OLD_DIRECTORY, OLD_LOG).with_pods([record()]),
            BY_NAME,
            structs.replace(BY_NAME, uid=UID),
        ),
        (
            "which pod lives does not say whose an old container is",
            known(DIRECTORY, OLD_DIRECTORY, OLD_LOG).with_pods([record(main=X)]),
            Workload(container_id=Y),
            structs.replace(BY_NAME, container_id=Y),
        ),
        (
            "the API server says which container lives",
            known(DIRECTORY, LOG, OLD_LOG).with_pods([record(main=X)]),
            BY_NAME,
            FULL,
        ),
        (
            "the API server is behind: the container it knows has no log",
            known(DIRECTORY, OLD_LOG).with_pods([record(main=X)]),
            BY_NAME,
            structs.replace(BY_NAME, uid=UID),
        ),
        (
            "an init container by its id",
            Identities().with_pods(
                [PodRecord("ml", "train", UID, init_containers=(ContainerRecord("init", container_id=Z),))]
            ),
            Workload(container_id=Z),
            Workload("ml", "train", "init", UID, Z),
        ),
        (
            "a container that is not made yet",
            Identities().with_pods([record(main="")]),
            BY_NAME,
            structs.replace(BY_NAME, uid=UID),
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_only_what_is_sure(about: str, identities: Identities, part: Workload, expected: Workload) -> None:
    assert identities.complete(part) == expected, about


@pytest.mark.parametrize(
    "part",
    [
        Workload("other", container_id=X),
        Workload(pod="other", container_id=X),
        Workload(container="other", container_id=X),
        Workload("other", "train", uid=UID),
        Workload("ml", "other", uid=UID),
        structs.replace(FULL, container="other"),
        Workload(uid=OLD_UID, container_id=Z),
    ],
)
def test_contradictions_are_refused(part: Workload) -> None:
    identities = known(DIRECTORY, LOG, f"ml_gone_{OLD_UID}", f"train_ml_aside-{Z}.log")
    with pytest.raises(Contradiction) as caught:
        identities.complete(part)
    assert caught.value.reason == "identity_conflict"
    assert isinstance(caught.value, SourceError)
    assert "known to be of ml/" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_api_server_contradicts_a_uid() -> None:
    with pytest.raises(Contradiction):
        Identities().with_pods([record(main=X)]).complete(Workload(uid=OLD_UID, container_id=X))


def test_a_uid_nobody_has_seen_is_no_contradiction() -> None:
    fresh = structs.replace(BY_NAME, uid=OLD_UID)
    assert known(DIRECTORY, LOG).complete(fresh) == fresh


def test_the_merge_takes_it() -> None:
    reading = Allocation(
        (
            Assignment("GPU-0", BY_NAME, "kubelet"),
            Assignment("GPU-1", Workload("other", "train", container_id=X), "kubelet"),
        )
    )
    merged = merge({"kubelet": reading}, known(DIRECTORY, LOG).complete)
    assert [one.holder for one in merged.assignments] == [FULL]
    assert [one.reason for one in merged.unmapped] == ["identity_conflict"]


# Properties: few values for each part, so that they meet

few_namespaces, few_pods, few_containers = (st.sampled_from(one) for one in (["m", "n"], ["p", "q"], ["c", "d"]))
few_uids, few_ids = st.sampled_from(["u1", "u2", "u3"]), st.sampled_from(["x1", "x2", "x3"])
pod_facts = st.builds(Workload, few_namespaces, few_pods, uid=few_uids)
container_facts = st.builds(Workload, few_namespaces, few_pods, few_containers, container_id=few_ids)
container_records = st.builds(ContainerRecord, few_containers, container_id=few_ids | st.just(""))
records = st.builds(PodRecord, few_namespaces, few_pods, few_uids, containers=st.tuples(container_records))
worlds = st.builds(
    lambda pods, containers, stated: Identities(pods, containers).with_pods(stated),
    st.frozensets(pod_facts, max_size=4),
    st.frozensets(container_facts, max_size=4),
    st.lists(records, max_size=3),
)
unsaid = st.just("")
workloads = st.builds(
    Workload, few_namespaces | unsaid, few_pods | unsaid, few_containers | unsaid, few_uids | unsaid, few_ids | unsaid
)


def completed(identities: Identities, workload: Workload) -> Workload | None:
    try:
        return identities.complete(workload)
    except Contradiction:
        return None


@given(worlds, workloads)
def test_completion_is_idempotent_and_changes_nothing_that_is_said(identities: Identities, workload: Workload) -> None:
    done = completed(identities, workload)
    assume(done is not None)
    assert done is not None
    assert all(getattr(done, part) == getattr(workload, part) for part in WORKLOAD_PARTS if getattr(workload, part))
    assert identities.complete(done) == done


@given(worlds, st.builds(Workload, container_id=few_ids) | st.builds(Workload, uid=few_uids, container=few_containers))
def test_one_key_alone_contradicts_nothing(identities: Identities, workload: Workload) -> None:
    assert completed(identities, workload) is not None


@given(worlds, st.builds(Workload, few_namespaces, few_pods, few_containers | unsaid))
def test_a_name_alone_contradicts_nothing(identities: Identities, workload: Workload) -> None:
    assert completed(identities, workload) is not None


@given(worlds, workloads)
def test_every_part_found_was_known(identities: Identities, workload: Workload) -> None:
    done = completed(identities, workload) or workload
    said = [*identities.pods, *identities.containers, *identities.stated]
    for part in WORKLOAD_PARTS:
        assert getattr(done, part) in {getattr(workload, part), *(getattr(one, part) for one in said)}


@given(st.lists(records, max_size=3), workloads)
def test_the_order_of_what_is_learnt_does_not_matter(stated: list[PodRecord], workload: Workload) -> None:
    answers = set()
    for order in permutations(stated):
        one_by_one = Identities()
        for one in order:
            one_by_one = one_by_one.with_pods([one])
        assert one_by_one == Identities().with_pods(order)
        answers.add(completed(one_by_one, workload))
    assert len(answers) == 1


# Directories


def make_names(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).mkdir()


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    pods, containers = tmp_path / "pods", tmp_path / "containers"
    make_names(pods, DIRECTORY, f"kube-system_etcd_{HASH}", "lost+found")
    containers.mkdir()
    (containers / LOG).symlink_to("/var/log/pods/nowhere")
    (containers / "README").touch()
    return pods, containers


def test_names_are_read_and_nothing_else(logs: tuple[Path, Path]) -> None:
    identities = IdentityReader(*map(str, logs)).read()
    assert identities == known(DIRECTORY, f"kube-system_etcd_{HASH}", LOG)
    assert identities.problems == ()
    assert identities.complete(BY_NAME) == FULL


def test_a_directory_that_is_not_there_is_a_problem_and_no_names(logs: tuple[Path, Path], tmp_path: Path) -> None:
    identities = IdentityReader(str(tmp_path / "no"), str(logs[1])).read()
    assert identities == known(LOG)
    assert [one.reason for one in identities.problems] == ["file_missing"]
    assert "mount" in str(identities.problems[0])
    assert identities.with_pods([record()]).problems == identities.problems
    nothing = IdentityReader(str(tmp_path / "no"), str(logs[1] / "README")).read()
    assert nothing == Identities()
    assert [one.reason for one in nothing.problems] == ["file_missing", "file_missing"]


def test_a_path_that_is_none(logs: tuple[Path, Path]) -> None:
    assert [one.reason for one in IdentityReader("\0", str(logs[1])).read().problems] == ["unreadable"]


def test_too_many_entries_are_no_entries(logs: tuple[Path, Path]) -> None:
    identities = IdentityReader(*map(str, logs), most=2).read()
    assert identities == known(LOG)
    assert [one.reason for one in identities.problems] == ["too_large"]


def reader_of(logs: tuple[Path, Path], later: int = 10) -> IdentityReader:
    """A reader whose clock is some seconds ahead: the folders were just made, but count as settled."""
    return IdentityReader(str(logs[0]), str(logs[1]), clock=lambda: time.time_ns() + later * 10**9)


def count_listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    listed: list[str] = []
    scandir: Callable[[str], object] = os.scandir

    def count(path: str) -> object:
        listed.append(os.path.basename(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", count)
    return listed


def test_an_unchanged_directory_is_not_listed_again(logs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    listed = count_listings(monkeypatch)
    reader = reader_of(logs)
    first = reader.read()
    assert reader.read() is first
    assert listed == ["pods", "containers"]
    (logs[1] / OLD_LOG).touch()
    second = reader.read()
    assert second == known(DIRECTORY, f"kube-system_etcd_{HASH}", LOG, OLD_LOG)
    assert listed == ["pods", "containers", "containers"]


def test_a_directory_that_changed_just_now_is_listed_again(
    logs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes within one tick of the kernel's clock leave one time stamp."""
    listed = count_listings(monkeypatch)
    reader = reader_of(logs, later=0)
    first = reader.read()
    assert reader.read() is first
    assert listed == ["pods", "containers"] * 2


def test_a_directory_comes_and_goes(logs: tuple[Path, Path]) -> None:
    reader = reader_of(logs)
    away = logs[0].with_name("away")
    os.rename(logs[0], away)
    without = reader.read()
    assert ([one.reason for one in without.problems], without.pods) == (["file_missing"], frozenset())
    assert reader.read() is without
    os.rename(away, logs[0])
    assert reader.read() == known(DIRECTORY, f"kube-system_etcd_{HASH}", LOG)
    assert reader.read().problems == ()


def test_a_full_node_is_completed_quickly() -> None:
    pods = frozenset(Workload("ml", f"p{n}", uid=f"u{n}") for n in range(250))
    containers = frozenset(Workload("ml", f"p{n}", "main", container_id=f"x{n}") for n in range(250))
    asked = [Workload("ml", f"p{n}", "main") for n in range(250)]

    def seconds() -> float:
        started = time.thread_time()
        identities = Identities(pods, containers)
        assert all(identities.complete(one).container_id for one in asked)
        return time.thread_time() - started

    assert min(seconds() for _ in range(5)) < 0.1
