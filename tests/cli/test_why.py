"""`podgpu why`: reads the queue of a cluster view and prints reasons."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from podgpu.cli.main import run
from tests.past.savings_world import record
from tests.past.savings_world import serving as serving_past
from tests.pending.situations import node, pod
from tests.pending.test_quotas import LOCAL_QUEUE, SAYS, cluster_queue, workload
from tests.top.servers import podgpu_server
from tests.web.server import Client
from tests.web.test_queue import Place, full_node, serving

SCHEDULER_SAYS = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu.\x1b[31m"


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    waiting = pod("train", gpus=2)
    condition = {"type": "PodScheduled", "status": "False", "message": SCHEDULER_SAYS}
    waiting["status"]["conditions"] = [condition]
    waiting["metadata"]["ownerReferences"] = [
        {"kind": "Job", "name": "train", "uid": "1", "controller": True}
    ]
    objects = [
        *full_node(),
        node("b", unschedulable=True),
        waiting,
        pod("train", gpus=1, namespace="web"),
        *(pod(f"many-{number}", gpus=16) for number in range(5)),
        pod("small", gpus=0, cpu="900"),
    ]
    with serving(False, *objects) as served:
        served.ask_until(7)
        yield served


def printed(place: Place, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["why", *arguments, "--url", url_of(place)]) == 0
    return capsys.readouterr().out


def url_of(place: Place) -> str:
    return f"http://127.0.0.1:{place.client.address.port}"


def test_all_reasons_of_a_pod(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(place, capsys, "train", "-n", "ml").splitlines()
    assert lines[0].startswith("ml/train (Job/train) has been pending for ")
    assert lines[0].endswith(": 2 nvidia.com/gpu, 1 CPU, 1 GiB of memory")
    assert lines[1].startswith("1. It needs 2 nvidia.com/gpu; 0 of 3 are free")
    assert lines[2] == "2. Cordoned nodes: 8 nvidia.com/gpu free on 1 node."
    assert "uncordon" in lines[3]
    assert lines[4].startswith("Idle pods.")
    assert lines[5].startswith("- a: ")
    assert "ml/idle (Deployment/chat), 1 GPU idle for " in lines[5]
    assert lines[5].endswith("8.00 USD/h")
    assert lines[6] == (
        "The scheduler says: 0/2 nodes are available: 1 Insufficient nvidia.com/gpu.\\x1b[31m"
    )


def test_a_name_in_two_namespaces(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(place, capsys, "train")
    assert "ml/train" in text
    assert "web/train" in text
    assert printed(place, capsys, "web/train").startswith("web/train has been pending")


def test_the_whole_queue(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(place, capsys)
    assert text.startswith("7 pods wait for 83 GPUs.")
    assert "It needs 16 nvidia.com/gpu on one node; the largest of 2 nodes has 8." in text
    assert "small" not in text
    row = next(line for line in text.splitlines() if "ml/many-0" in line)
    assert row.split()[:2] == ["5", "80"]


def test_a_pod_without_gpus_is_not_blamed_on_gpus(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(place, capsys, "small").splitlines()
    assert lines[1] == "1. It requests no GPU."


def test_a_workload_of_kueue(capsys: pytest.CaptureFixture[str]) -> None:
    objects = [LOCAL_QUEUE, cluster_queue(quota=10, used=4), workload()]
    with serving(False, node("a"), *objects) as place:
        place.ask_until(4)
        lines = printed(place, capsys, "train", "-n", "ml").splitlines()
    assert lines[0].startswith("Workload ml/job-train (Job/train) has had 4 pods held back for ")
    assert lines[1].startswith("1. ClusterQueue research allows 10 nvidia.com/gpu")
    assert lines[-1] == f"Kueue says: {SAYS}"


def test_json_is_that_of_the_server(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(place, capsys, "train", "-n", "ml", "-o", "json")
    assert json.loads(text)["groups"][0]["reasons"][0]["key"] == "in_use"


def test_a_pod_that_is_not_pending_on_a_server_without_a_past(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["why", "busy", "-n", "ml", "--url", url_of(place)]) == 1
    assert "ml/busy is not pending" in capsys.readouterr().err
    assert run(["why", "absent", "--url", url_of(place)]) == 1
    assert "absent is not pending and holds no GPU now" in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded() -> Iterator[Client]:
    """A cluster view with a past and without a queue."""
    cluster, recorder = record(2)
    with serving_past(cluster, recorder) as client:
        yield client
    recorder.stop()


def why(client: Client, *arguments: str) -> int:
    return run(["why", *arguments, "--url", f"http://127.0.0.1:{client.address.port}"])


def test_why_a_pod_that_runs_is_slow(recorded: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert why(recorded, "pair-a") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ml/pair-a has held a part of 1 GPU of node-b for 2h00m"
    assert lines[1].startswith("It waited for other containers 4.8 % of the time (5m45s)")
    first = lines[3].split(maxsplit=1)
    assert first[0] == "YES"
    assert first[1].startswith("waiting for other containers: ")
    assert lines[4].strip().startswith("To do: give it a GPU of its own")


def test_a_pod_whose_node_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"namespace": "ml", "pod": "a", "from": 0, "duration_seconds": 90, "gpus": 1}
    with podgpu_server({"/api/v1/summary": summary}) as server:
        assert run(["why", "a", "-n", "ml", "--url", server.address]) == 0
    assert capsys.readouterr().out.startswith("ml/a has held 1 GPU for 1m30s\n")


def test_nothing_slowed_it_down_or_it_is_not_known(
    recorded: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why(recorded, "hot", "-n", "ml") == 0
    text = capsys.readouterr().out
    assert "Nothing that was measured slowed it down. Not measured: " in text
    assert "\nno waiting for other containers: No other pod shares its GPUs." in re.sub(
        " +", " ", text
    )
    assert "To measure it: the exporter must export DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" in text
    assert why(recorded, "ml/idle") == 0
    assert "Its GPUs were never busy" in capsys.readouterr().out


def test_the_json_of_a_pod_that_runs_is_its_summary(
    recorded: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why(recorded, "hot", "-o", "json") == 0
    printed_json = json.loads(capsys.readouterr().out)
    assert printed_json == json.loads(recorded.ask("/api/v1/summary/ml/hot").body)
    assert why(recorded, "quiet", "-n", "nowhere") == 1
    assert "there is no record that pod nowhere/quiet held a GPU" in capsys.readouterr().err


def test_the_queue_itself_still_says_which_option_adds_it(
    recorded: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why(recorded) == 1
    assert "--queue" in capsys.readouterr().err


@pytest.mark.parametrize("pod", ["", "ml/", "a/b/c"])
def test_a_name_that_is_no_pod(place: Place, capsys: pytest.CaptureFixture[str], pod: str) -> None:
    assert run(["why", pod, "--url", url_of(place)]) == 2
    error = capsys.readouterr().err
    assert f"'{pod}' is no pod: write POD or NAMESPACE/POD" in error


def test_contradicting_namespaces(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["why", "a/b", "-n", "c", "--url", url_of(place)]) == 2
    assert "contradict" in capsys.readouterr().err
