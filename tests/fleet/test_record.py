"""Contents of the history: values, holders with their use, and conditions."""

from __future__ import annotations

import pytest

from podgpu.charge import Amounts, Figures
from podgpu.errors import collect_notes
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.round import Cluster, PublishedState
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState
from podgpu.model import DeviceState, WorkloadOwner
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.record import cluster_recorder, make_gpu_samples
from podgpu.past.books.store import HistoryStore
from podgpu.past.sqlite.sqlite_series import read_pod
from tests.fleet.states import H100, World, gpu, holder, lost, mig, node, state_of

PRICES = Prices("EUR", {H100: Price(7.0)})


class Recorded:
    def __init__(self) -> None:
        self.world, self.at = World(), 0.0
        self.state: ClusterState | None = None

    def read(self) -> list[GpuSample]:
        assert self.state is not None
        return make_gpu_samples(self.state)

    def round(self, *gpus: DeviceState, seconds: float = 15.0) -> None:
        self.at += seconds
        owners = {("ml", "train"): WorkloadOwner("Job", "train")}
        self.state = self.world.round(
            node("n1", *gpus, read_at=self.at), at=self.at, prices=PRICES, owners=owners
        )


def test_figures_holders_and_conditions() -> None:
    recorded = Recorded()
    working = holder(utilization_ratio=0.5, memory_used_bytes=7)
    cut = gpu(1, instances=(mig(3, holder("m"), busy=0.2),))
    recorded.round(
        gpu(0, working, busy=0.5, power_mw=300_000, temperature_celsius=40),
        cut,
        lost(2),
        gpu(3, uuid=""),
    )
    stored = recorded.read()
    whole, instance, parent, missing = stored
    assert (whole.uuid, whole.node, whole.gpu_index, whole.figures) == (
        "GPU-0",
        "n1",
        0,
        Figures(0.5, 7, 300.0, 40),
    )
    (sample,) = whole.charges
    assert (sample.account.pod, sample.account.owner_name, sample.currency) == (
        "train",
        "train",
        "EUR",
    )
    assert (sample.container, sample.amounts, sample.figures) == ("main", Amounts(), None)
    assert (parent.figures, instance.instance, instance.figures) == (None, "3", Figures(0.2))
    assert [condition.name for condition in missing.conditions] == ["lost"]


def test_the_holders_of_a_node_that_is_gone_have_ended() -> None:
    recorded = Recorded()
    recorded.round(gpu(0, holder(), busy=0.5))
    stored = recorded.read()
    assert [sample.account.pod for sample in stored[0].charges] == ["train"]
    recorded.state = recorded.world.round(
        node("n1", gpu(0, holder(), busy=0.5), read_at=15.0), at=90.0
    )
    stored = recorded.read()
    assert (stored[0].charges, stored[0].conditions[0][0]) == ([], "node_gone")


def test_if_holders_are_unknown_pods_have_not_ended_and_gpus_are_not_charged_as_unallocated() -> (
    None
):
    recorded, store = Recorded(), HistoryStore()
    recorded.round(gpu(0, holder(), busy=0.5))
    store.append(1000.0, recorded.read())
    for recorded.at in (90.0, 105.0):
        other = node(
            "n1",
            gpu(0, busy=0.5),
            read_at=recorded.at,
            producer="dcgm-exporter",
            target="http://dcgm",
        )
        recorded.state = recorded.world.round(other, at=recorded.at, prices=PRICES)
        stored = recorded.read()
        store.append(1000.0 + recorded.at, stored)
    with store.reader() as db:
        [history] = read_pod(db, "ml", "train", 1000, 1200)
    store.close()
    assert (stored[0].charges, history.holders[0].to) == ([], None)


def test_the_page_says_that_sqlite_is_made_for_fewer_gpus() -> None:
    def cluster_of(gpus: int) -> Cluster:
        cluster = Cluster(lambda: pytest.fail("no round is run"), ViewSettings())
        cluster_recorder(cluster).stop()
        cluster.published = PublishedState(
            state_of(node("n1", *(gpu(number) for number in range(gpus))))
        )
        return cluster

    assert collect_notes(cluster_of(8000).warnings) == []
    (note,) = collect_notes(cluster_of(8001).warnings)
    assert "8,001 GPUs" in note.text
    assert "--prometheus" in note.text
