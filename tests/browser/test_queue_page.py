"""The tab *Queue*: why pods wait, and who could make room."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from podgpu.pending.explain import explain_queue
from podgpu.pending.idle_pods import IdlePod
from podgpu.pending.queue import QueueQuery, QueueSnapshot, make_queue
from tests.browser.chromium import Tab, opened, visited
from tests.browser.pictures import Showing, three_nodes
from tests.browser.test_fit import CUT
from tests.pending.situations import node, pod
from tests.pending.test_explain import snapshot

HOSTILE = "<img src=x onerror=alert(1)>\u202egpj.exe " + 40 * "long"
HASH = "#view=queue"


def queue(checked_namespace: str = "") -> dict[str, Any]:
    """Pods that lack GPUs, CPU and a model. If a namespace is given, the answer for its user."""
    hostile = pod("strange", gpus=4)
    condition = {"type": "PodScheduled", "status": "False", "message": HOSTILE}
    hostile["status"]["conditions"] = [condition]
    objects = [
        node("node-1", gpus=4, cpu="40"),
        node("node-2", cpu="40", unschedulable=True),
        *(pod(f"chat-{number}", on="node-1", namespace="web") for number in range(3)),
        pod("train", gpus=2),
        hostile,
        *(pod(f"night-{number}", cpu="60", namespace="batch") for number in range(30)),
    ]
    now = time.time()
    idle = {}
    for number in range(2):
        name = f"chat-{number}"
        idle["web", name] = IdlePod(
            namespace="web", pod=name, gpus=1.0, idle_since=now - 7200, cost_per_hour=2.5
        )
    state = explain_queue(snapshot(objects), idle, now)
    visible = {checked_namespace} if checked_namespace else None
    answer = make_queue(QueueSnapshot(now, state, currency="USD"), QueueQuery(), visible)
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    return decoded


def answers(answer: Mapping[str, Any] | None) -> Showing:
    return Showing(three_nodes(), lambda path, _: answer if path == "queue" else None)


@pytest.fixture(scope="module")
def usual() -> Showing:
    return answers(queue())


def lines(tab: Tab) -> list[str]:
    return tab.texts(".queue summary")


def test_one_line_per_reason(tab: Tab, page: str) -> None:
    visited(tab, page, HASH)
    tab.wait_for("document.querySelectorAll('.queue summary').length === 3")
    assert tab.texts(".queue .facts.sums dd")[:2] == ["32 pods", "36"]
    night = next(line for line in lines(tab) if "night" in line)
    assert night.startswith("CPU, memory batch/night-0 and 29 pods more 30 GPUs")
    assert "It needs 60 CPUs; the largest of 2 nodes with such GPUs has 40 CPUs." in night
    assert tab.texts("#tab-queue[aria-current=page]") == ["Queue 32"]
    assert tab.evaluate("document.title").split(" \u00b7 ")[0].endswith("Queue")
    free = tab.texts(".queue section table tbody tr")
    assert free[-1].split()[-5:] == ["1", "4", "1", "1", "8"]


def test_a_line_shows_who_could_make_room(tab: Tab, page: str) -> None:
    visited(tab, page, HASH)
    tab.wait_for("document.querySelectorAll('.queue summary').length === 3")
    tab.evaluate(
        "[...document.querySelectorAll('.queue details')]"
        ".find(each => each.innerText.includes('train')).open = true"
    )
    text = " ".join(tab.text(".queue details[open]").split())
    assert "Cordoned nodes: 8 nvidia.com/gpu free on 1 node. kubectl uncordon" in text
    assert "node-1: web/chat-0, 1 GPU idle for 2 h 0 min, $2.50/h" in text
    assert "Each needs" in text
    assert "2 nvidia.com/gpu, 1 CPU, 1 GiB of memory" in text
    (link,) = tab.evaluate(
        "[...document.querySelectorAll('.queue details[open] .marks a')].map(a => a.hash)"
    )
    assert link == "#pod=web/chat-0"


def test_the_scheduler_speaks_without_a_click(tab: Tab, page: str) -> None:
    visited(tab, page, HASH)
    tab.wait_for("document.querySelectorAll('.queue summary').length === 3")
    (said,) = tab.texts(".queue details:not([open]) .queue-message")
    assert said.startswith("The scheduler says: <img src=x onerror=alert(1)>")
    height = "document.querySelector('.queue-message').getBoundingClientRect().height"
    assert tab.evaluate(height) < 45, "a long message has two lines until its line is opened"


def test_every_view_shows_how_many_pods_wait(tab: Tab, page: str) -> None:
    visited(tab, page, "#view=nodes")
    tab.wait_for("document.querySelector('#tab-queue').innerText.includes('32')")
    assert tab.evaluate("document.querySelector('#tab-queue').title") == "32 pods wait for GPUs"
    assert "32" not in tab.evaluate("document.title")


def test_no_number_without_the_queue(tab: Tab, url: str, shown: Showing) -> None:
    shown.records = None
    opened(tab, url, "")
    tab.wait_for("document.querySelectorAll('.tile').length > 0")
    assert tab.texts("#tab-queue") == ["Queue"]


def test_texts_of_tenants_are_not_markup(tab: Tab, page: str) -> None:
    visited(tab, page, HASH)
    tab.wait_for("document.querySelectorAll('.queue summary').length === 3")
    tab.evaluate("document.querySelectorAll('.queue details').forEach(each => each.open = true)")
    assert tab.count(".queue img") == 0
    assert "<img src=x onerror=alert(1)>\ufffdgpj.exe" in tab.text(".queue")


def test_filters(tab: Tab, page: str) -> None:
    visited(tab, page, f"{HASH}&q=night")
    tab.wait_for("document.querySelectorAll('.queue summary').length === 1")
    visited(tab, page, f"{HASH}&q=absent")
    tab.wait_for("document.querySelector('.queue').innerText.includes('No waiting pod matches')")


@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_nothing_is_cut_off(tab: Tab, page: str, width: int) -> None:
    tab.look(width)
    visited(tab, page, HASH)
    tab.wait_for("document.querySelectorAll('.queue summary').length === 3")
    tab.evaluate("document.querySelectorAll('.queue details').forEach(each => each.open = true)")
    assert tab.evaluate(CUT) == []


def test_the_setting_that_adds_the_queue(tab: Tab, url: str, shown: Showing) -> None:
    shown.records = None
    opened(tab, url, HASH)
    tab.wait_for(
        "document.querySelector('.queue').innerText"
        ".includes('podgpu cluster --queue (chart: cluster.queue=true)')"
    )


def test_pods_that_the_user_may_not_see(tab: Tab, url: str, shown: Showing) -> None:
    shown.records = answers(queue("ml")).records
    opened(tab, url, HASH)
    tab.wait_for("document.querySelectorAll('.queue summary').length === 2")
    text = tab.text("main")
    assert "30 pods, 30 GPUs" in text
    assert "night" not in text
    assert "chat" not in text
    assert "a pod that you may not see" in tab.evaluate(
        "document.querySelector('main').textContent"
    )


def test_an_empty_queue_and_the_past(tab: Tab, url: str, shown: Showing) -> None:
    shown.records = answers({"api": "podgpu/v1", "taken_at": time.time()}).records
    opened(tab, url, HASH)
    tab.wait_for("document.querySelector('.queue').innerText.includes('No pod waits for GPUs.')")
    visited(tab, url, f"{HASH}&at={int(time.time()) - 600}")
    tab.wait_for("document.querySelector('.queue').innerText.includes('shows only now')")
