"""Tests identities of holders from log file names and the API server. Ambiguous fields stay
empty.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from podgpu.errors import SourceError
from podgpu.kube.objects import ContainerRecord, PodRecord
from podgpu.model import Workload
from podgpu.node.holders.identity import Identities, IdentityReader, parse_log_name

UID = "c3a3a1f0-0000-4000-8000-000000000001"
OLD_UID = "c3a3a1f0-0000-4000-8000-000000000002"
HASH = "6576683a93d91d8e2119df2c2755f2f1"
X, Y, Z = "3f" * 32, "4e" * 32, "5d" * 32


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"ml_train-0_{UID}", Workload("ml", "train-0", uid=UID)),
        (f"kube-system_etcd-node-1_{HASH}", Workload("kube-system", "etcd-node-1", uid=HASH)),
        (f"ml_web.v2.example_{UID}", Workload("ml", "web.v2.example", uid=UID)),
        *(
            (name, None)
            for name in (
                "ml_train-0",
                f"ml_train_0_{UID}",
                f"_train_{UID}",
                f"ml__{UID}",
                "ml_train_",
            )
        ),
        *(
            (name, None)
            for name in (
                f"ML_train_{UID}",
                f"ml_träin_{UID}",
                f"ml_train_{UID}\n",
                "lost+found",
                "",
            )
        ),
        (f"train-0_ml_main-{X}.log", Workload("ml", "train-0", "main", container_id=X)),
        (f"a.b-0_ml_side-car-1-{X}.log", Workload("ml", "a.b-0", "side-car-1", container_id=X)),
        *((f"train-0_ml_main-{X}{end}", None) for end in (".log.1", "0.log")),
        *((f"{start}-{X}.log", None) for start in ("train-0_ml_", "train-0_ml", "train_0_ml_main")),
        (f"train-0_ml_main-{X.upper()}.log", None),
    ],
)
def test_names_of_logs(name: str, expected: Workload | None) -> None:
    assert parse_log_name(name) == expected


def known(*names: str, pods: Sequence[PodRecord] = ()) -> Identities:
    return Identities(
        frozenset(one for one in map(parse_log_name, names) if one is not None), tuple(pods)
    )


def record(uid: str = UID, pod: str = "train", **container_ids: str) -> PodRecord:
    containers = tuple(
        ContainerRecord(name, container_id=one) for name, one in container_ids.items()
    )
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
    assert known(pods=[record(main=X)]).complete(part) == FULL
    assert known(DIRECTORY, LOG, pods=[record(main=X)]).complete(part) == FULL


BOTH = known(DIRECTORY, LOG)
RECREATED = known(DIRECTORY, OLD_DIRECTORY, LOG)
WITH_UID, WITH_ID = replace(BY_NAME, uid=UID), replace(BY_NAME, container_id=X)
INIT = PodRecord("ml", "train", UID, init_containers=(ContainerRecord("init", container_id=Z),))


@pytest.mark.parametrize(
    ("identities", "part", "expected"),
    [
        pytest.param(BOTH, Workload(job="7"), Workload(job="7"), id="an HPC job"),
        pytest.param(
            BOTH, Workload("ml", "train"), Workload("ml", "train", uid=UID), id="a whole pod"
        ),
        pytest.param(
            BOTH, Workload(uid=UID), Workload("ml", "train", uid=UID), id="a uid is no container"
        ),
        pytest.param(known(DIRECTORY), BY_NAME, WITH_UID, id="no log yet"),
        pytest.param(known(LOG), BY_NAME, WITH_ID, id="no directory yet"),
        pytest.param(RECREATED, BY_NAME, BY_NAME, id="recreated pod"),
        pytest.param(
            RECREATED,
            Workload(uid=OLD_UID, container="main"),
            Workload("ml", "train", "main", OLD_UID),
            id="recreated pod, by uid",
        ),
        pytest.param(
            RECREATED, Workload(container_id=X), WITH_ID, id="recreated pod, by container id"
        ),
        pytest.param(known(DIRECTORY, LOG, OLD_LOG), BY_NAME, WITH_UID, id="restarted container"),
        pytest.param(
            known(DIRECTORY, OLD_DIRECTORY, LOG, pods=[record()]),
            BY_NAME,
            WITH_UID,
            id="the API server has the current pod",
        ),
        pytest.param(
            known(OLD_DIRECTORY, OLD_LOG, pods=[record()]),
            BY_NAME,
            WITH_UID,
            id="current pod without directory",
        ),
        pytest.param(
            known(DIRECTORY, OLD_DIRECTORY, OLD_LOG, pods=[record(main=X)]),
            Workload(container_id=Y),
            replace(BY_NAME, container_id=Y),
            id="old container",
        ),
        pytest.param(
            known(DIRECTORY, LOG, OLD_LOG, pods=[record(main=X)]),
            BY_NAME,
            FULL,
            id="current container",
        ),
        pytest.param(
            known(DIRECTORY, OLD_LOG, pods=[record(main=X)]),
            BY_NAME,
            WITH_UID,
            id="the API server lags",
        ),
        pytest.param(
            known(pods=[INIT]),
            Workload(container_id=Z),
            Workload("ml", "train", "init", UID, Z),
            id="init container",
        ),
    ],
)
def test_only_certain_parts_are_completed(
    identities: Identities, part: Workload, expected: Workload
) -> None:
    assert identities.complete(part) == expected


@pytest.mark.parametrize(
    "part",
    [
        Workload("other", container_id=X),
        Workload(container="other", container_id=X),
        Workload("other", "train", uid=UID),
        replace(FULL, container="other"),
        Workload(uid=OLD_UID, container_id=Z),
    ],
)
def test_contradictions_are_rejected(part: Workload) -> None:
    identities = known(DIRECTORY, LOG, f"ml_gone_{OLD_UID}", f"train_ml_aside-{Z}.log")
    with pytest.raises(SourceError) as caught:
        identities.complete(part)
    assert caught.value.reason == "identity_conflict"


def test_an_unknown_uid_is_no_contradiction() -> None:
    fresh = replace(BY_NAME, uid=OLD_UID)
    assert known(DIRECTORY, LOG).complete(fresh) == fresh


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


def test_log_names_are_read(logs: tuple[Path, Path]) -> None:
    identities = IdentityReader(str(logs[0]), str(logs[1])).read()
    assert identities == known(DIRECTORY, f"kube-system_etcd_{HASH}", LOG)
    assert identities.problems == ()
    assert identities.complete(BY_NAME) == FULL


RUNNING = Workload(uid=UID, container_id=X)
ELSEWHERE = Workload("ml", "elsewhere", "main")


@pytest.mark.parametrize(
    ("identities", "workload", "processes", "is_alive"),
    [
        pytest.param(known(DIRECTORY, LOG), FULL, (), True, id="logs exist"),
        pytest.param(known(OLD_DIRECTORY, LOG), FULL, (), False, id="no log of the pod"),
        pytest.param(known(DIRECTORY, OLD_LOG), FULL, (), False, id="no log of the container"),
        pytest.param(known(DIRECTORY), FULL, (), True, id="logs of containers are not readable"),
        pytest.param(known(), FULL, (), None, id="no logs and no processes are visible"),
        pytest.param(known(), FULL, (RUNNING,), True, id="the container has a process"),
        pytest.param(
            known(),
            FULL,
            (replace(RUNNING, uid=OLD_UID, container_id=Y),),
            False,
            id="the pod has none",
        ),
        pytest.param(
            known(),
            FULL,
            (replace(RUNNING, container_id=Y),),
            None,
            id="another container of the pod has",
        ),
        pytest.param(
            known(DIRECTORY, LOG),
            replace(FULL, container_id="x-1"),
            (),
            True,
            id="other form of id",
        ),
        pytest.param(known(DIRECTORY, LOG), BY_NAME, (), None, id="nothing but names"),
        pytest.param(known(OLD_DIRECTORY), Workload(uid=UID), (), False, id="no log of this uid"),
        pytest.param(known(DIRECTORY), Workload(uid=UID), (), None, id="a log of this uid"),
        pytest.param(known(DIRECTORY), ELSEWHERE, (), False, id="no log of a pod of this name"),
        pytest.param(known(LOG), ELSEWHERE, (), None, id="logs of pods are not readable"),
        pytest.param(known(DIRECTORY), Workload(job="4711"), (), None, id="a job has no logs"),
    ],
)
def test_whether_a_container_runs(
    identities: Identities,
    workload: Workload,
    processes: tuple[Workload, ...],
    is_alive: bool | None,
) -> None:
    assert identities.is_alive(workload, processes) is is_alive


def test_a_directory_that_is_missing(logs: tuple[Path, Path]) -> None:
    os.rename(logs[0], logs[0].with_name("away"))
    without = IdentityReader(str(logs[0]), str(logs[1])).read()
    assert ([one.reason for one in without.problems], without.logged) == (
        ["file_missing"],
        known(LOG).logged,
    )
