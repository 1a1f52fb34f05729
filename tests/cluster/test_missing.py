"""GPUs that leave an exporter's exposition, nodes that do not come back: over real HTTP, and by random histories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.missing import MOST_MISSING
from podgpu.cluster.publish import Publisher
from podgpu.cluster.scraping.backend import ScrapeBackend
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory
from podgpu.figures.device import DeviceFigures
from tests.cluster.test_scrape import Exporters, Listed, Ticking, exporters
from tests.cluster.view_readings import gpu, holder, node, value, view_of

SETTINGS = ViewSettings(interval=15.0, stale_after=45.0, drop_after=300.0)
PODGPU = b'podgpu_exporter_build_info{version="0.2.0",python="3.12"} 1\n'
Turn = Callable[..., Awaitable[ClusterView]]


def exposition(*gpus: int, node: str = "n1", mig: int | None = None) -> bytes:
    """As dcgm-exporter writes it: GPU 1 is held by a pod."""
    lines = []
    for number in gpus:
        labels = f'gpu="{number}",UUID="GPU-{number}",modelName="H100",Hostname="{node}"'
        labels += ',namespace="ml",pod="train-0",container="main"' if number == 1 else ""
        labels += ',GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"' if number == mig else ""
        name = "DCGM_FI_PROF_GR_ENGINE_ACTIVE" if number == mig else "DCGM_FI_DEV_GPU_UTIL"
        lines.append(f"{name}{{{labels}}} {0.5 if number == mig else 50}\n")
    return "".join(lines).encode()


def broken(view: ClusterView) -> dict[tuple[str, int, str], list[str]]:
    """(node, index, instance) -> conditions."""
    return {
        (of.name, device.index, device.instance): [condition.name for condition in device.conditions]
        for of in view.nodes
        for device in of.devices
        if device.conditions
    }


def device_of(view: ClusterView, uuid: str) -> DeviceFigures:
    (found,) = (device for of in view.nodes for device in of.devices if device.uuid == uuid)
    return found


def over_http(story: Callable[[Exporters, Listed, Publisher, Turn], Awaitable[None]], *bodies: bytes) -> None:
    async def go() -> None:
        time, publisher = Ticking(), Publisher(SETTINGS)
        async with exporters(*bodies) as fleet:
            targets = Listed(fleet.urls)
            backend = ScrapeBackend(targets, clock=time.clock())

            async def turn(rounds: int = 1) -> ClusterView:
                for _ in range(rounds):
                    await backend.turn()
                    view = publisher.publish(backend.reading(), time.now, time.now + 1000.0, whole_round=True).view
                    time.now += 15.0
                return view

            await story(fleet, targets, publisher, turn)
            await backend.close()

    asyncio.run(go())


@pytest.mark.fault(
    "A GPU vanishes from a dcgm-exporter's metrics",
    "podgpu cluster keeps it as lost, with its number, who held it last, since when and what to do, until it is back,"
    " has moved, or is forgotten",
)
def test_a_gpu_that_leaves_the_exposition_is_lost() -> None:
    async def story(fleet: Exporters, targets: Listed, publisher: Publisher, turn: Turn) -> None:
        assert broken(await turn()) == {}
        fleet.bodies[0] = exposition(0, 2)
        view = await turn()
        assert broken(view) == {("n1", 1, ""): ["lost"]}
        gone = device_of(view, "GPU-1")
        assert (gone.present, gone.utilization, gone.holders) == (False, None, ())
        assert [workload.pod for workload in gone.last_holders] == ["train-0"]
        since = gone.conditions[0].since
        assert since == view.taken_at
        (alert,) = view.alerts
        assert alert.text.startswith("GPU 1 of node n1 (GPU-1): ")
        later = await turn(20)
        assert device_of(later, "GPU-1").conditions[0].since == since, "it stays, and since then"
        fleet.bodies[0] = exposition(0, 1, 2)
        assert broken(await turn()) == {}, "it is back"
        fleet.bodies[0] = exposition(0, 2)
        again = await turn()
        assert device_of(again, "GPU-1").conditions[0].since == again.taken_at
        publisher.forget("GPU-1")
        assert [device.uuid for device in (await turn()).nodes[0].devices] == ["GPU-0", "GPU-2"]
        fleet.bodies[0] = exposition(0, 1, 2)
        assert [device.uuid for device in (await turn()).nodes[0].devices] == ["GPU-0", "GPU-1", "GPU-2"]

    over_http(story, exposition(0, 1, 2))


def test_another_gpu_under_the_number_of_one_that_is_lost() -> None:
    async def story(fleet: Exporters, targets: Listed, publisher: Publisher, turn: Turn) -> None:
        await turn()
        fleet.bodies[0] = exposition(0, 1).replace(b"GPU-1", b"GPU-9")
        view = await turn()
        assert [(d.uuid, d.index, d.present) for d in view.nodes[0].devices] == [
            ("GPU-0", 0, True),
            ("GPU-1", 1, False),
            ("GPU-9", 1, True),
        ]

    over_http(story, exposition(0, 1))


def test_one_that_moved_is_not_lost_and_one_that_was_cut_into_instances_neither() -> None:
    async def story(fleet: Exporters, targets: Listed, publisher: Publisher, turn: Turn) -> None:
        await turn()
        fleet.bodies[:] = [exposition(0), exposition(5, 1, node="n2")]
        assert broken(await turn()) == {}
        fleet.bodies[:] = [exposition(0, mig=0), exposition(5, 1, node="n2")]
        assert broken(await turn()) == {}
        fleet.bodies[0] = exposition(7)
        assert broken(await turn()) == {("n1", 0, "7"): ["lost"]}, "with its instances"

    over_http(story, exposition(0, 1), exposition(5, node="n2"))


def test_podgpu_s_own_exporters_are_believed() -> None:
    """What they do not tell of any more, an operator has had forgotten there."""

    async def story(fleet: Exporters, targets: Listed, publisher: Publisher, turn: Turn) -> None:
        await turn()
        fleet.bodies[0] = PODGPU + exposition(0)
        view = await turn()
        assert [device.uuid for device in view.nodes[0].devices] == ["GPU-0"]

    over_http(story, PODGPU + exposition(0, 1))


@pytest.mark.fault(
    "a node dies and does not come back",
    "it stays, with its GPUs as broken, for as long as its exporter is in the list; when it leaves the list it is"
    " dropped after --drop-after; when an operator has all its GPUs forgotten, at once",
)
def test_a_node_that_does_not_come_back_stays_while_it_is_listed() -> None:
    async def story(fleet: Exporters, targets: Listed, publisher: Publisher, turn: Turn) -> None:
        await turn()
        fleet.bodies[0] = exposition(0)
        await turn()
        fleet.status[0] = 500
        view = await turn(240)  # an hour
        assert broken(view) == {("n1", 0, ""): ["node_gone"], ("n1", 1, ""): ["lost", "node_gone"]}
        assert any(alert.text.startswith("node n1 does not answer; 2 GPUs went with it") for alert in view.alerts)
        assert value(view, "podgpu_cluster_node_up", node="n1") == 0
        publisher.forget("GPU-1")
        assert broken(await turn()) == {("n1", 0, ""): ["node_gone"]}
        publisher.forget("GPU-0")
        view = await turn()
        assert [of.name for of in view.nodes] == ["n2"]
        assert not [alert for alert in view.alerts if alert.severity == "broken"]
        fleet.status[0] = 200
        assert broken(await turn()) == {}, "the one that is still missing was forgotten"
        fleet.status[0] = 500
        await turn(5)
        targets.now = targets.now[1:]
        assert [of.name for of in (await turn()).nodes] == ["n1", "n2"], "it left the list just now"
        assert [of.name for of in (await turn(21)).nodes] == ["n2"]

    over_http(story, exposition(0, 1), exposition(5, node="n2"))


def test_a_dead_address_does_not_keep_the_name_from_its_successor() -> None:
    async def story(fleet: Exporters, targets: Listed, publisher: Publisher, turn: Turn) -> None:
        targets.now = fleet.urls[:1]
        await turn()
        fleet.status[0] = 500
        targets.now = fleet.urls
        view = await turn(30)
        assert [(of.name, of.target, of.old) for of in view.nodes] == [("n1", fleet.urls[1], False)]
        assert broken(view) == {}

    over_http(story, exposition(0, 1), exposition(0, 1))


def test_a_node_under_another_name_leaves_nothing_behind() -> None:
    async def story(fleet: Exporters, targets: Listed, publisher: Publisher, turn: Turn) -> None:
        await turn()
        fleet.status[0] = 500
        fleet.bodies[1] = exposition(0, 1, node="n9")
        view = await turn(30)
        assert [of.name for of in view.nodes] == ["n9"]

    over_http(story, exposition(0, 1), exposition(0, 1, node="n9").replace(b"GPU-", b"GPU-x"))


def test_since_when_moves_with_the_clock_and_what_is_kept_is_bounded() -> None:
    memory = Memory()
    view_of(node("a", gpu(0), gpu(1, holder()), tells_lost=False), memory=memory)
    lost = view_of(node("a", gpu(0), read_at=15.0, tells_lost=False), at=15.0, memory=memory)
    before = lost.nodes[0].devices[1].conditions[0].since
    assert before is not None
    for turn in range(2, 200):
        made_up = [gpu(n, uuid=f"GPU-{turn}-{n}") for n in range(8)]
        last = view_of(node("a", *made_up, read_at=15.0 * turn, tells_lost=False), at=15.0 * turn, memory=memory)
    assert len(last.nodes[0].devices) == 8 + MOST_MISSING


@given(st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=8))
def test_whatever_an_exposition_shows_a_gpu_that_was_there_is_there_once(history: list[set[int]]) -> None:
    memory, ever = Memory(), set[int]()
    for turn, there in enumerate(history):
        ever |= there
        at = 15.0 * turn
        told = node("a", *(gpu(n, holder(f"p{n}")) for n in sorted(there)), read_at=at, tells_lost=False)
        view = view_of(told, at=at, memory=memory)
        shown = [(d.index, d.present) for of in view.nodes for d in of.devices]
        assert sorted(shown) == [(n, n in there) for n in sorted(ever)]
