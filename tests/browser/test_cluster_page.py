"""The page with many nodes in a real browser: filters, sorting, the view of a pod, nodes and
servers that disappear.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from podgpu.fleet.view import ConditionView
from podgpu.web.app import Address
from tests.browser.chromium import DRAWN, Tab, opened, visited, went
from tests.browser.pictures import Showing, gpu, held, node, picture, three_nodes

GPU = "GPU-gpu-a-01-0005-4c5e-9d3f-000000000000"
ROOT = Path(__file__).parents[2]
TILES = "document.querySelectorAll('main .tile[data-key]').length"
STATE = "document.querySelector('#status').dataset.state"


@pytest.fixture(scope="module")
def usual() -> Showing:
    return Showing(three_nodes())


def pods_shown(tab: Tab) -> list[str]:
    return tab.texts("main .row-pod")


def test_words_filter_by_everything_that_is_written(tab: Tab, page: str) -> None:
    visited(tab, page)
    assert tab.evaluate(TILES) == 20
    tab.press("/")
    tab.type("serving l40")
    tab.wait_for(f"{TILES} === 4", "four tiles")
    assert pods_shown(tab) == ["chat-0", "chat-1", "chat-2", "chat-3"]
    assert tab.text("#shown").startswith("4 of 20 GPUs")
    tab.wait_for("location.hash === '#q=serving+l40'", "the filter stands in the address")
    tab.press("Escape")
    tab.wait_for(f"{TILES} === 20", "all tiles again")
    tab.wait_for("location.hash === ''", "nothing stands in the address")


def test_a_total_filters_by_its_state(tab: Tab, page: str) -> None:
    visited(tab, page)
    assert tab.texts(".total-value")[:7] == ["20", "17.86", "15.86", "2", "0", "2.14", "0"]
    tab.click(".total-free")
    tab.wait_for(f"{TILES} === 3", "two GPUs, and one with an instance that nobody holds")
    assert (
        tab.evaluate("document.querySelector('.total-free').getAttribute('aria-pressed')") == "true"
    )
    tab.evaluate("history.back()")
    tab.wait_for(f"{TILES} === 20", "back to all of them")
    tab.evaluate("history.forward()")
    tab.wait_for(f"{TILES} === 3", "and forward")


def test_a_holder_leads_to_the_pods_own_view(tab: Tab, page: str) -> None:
    visited(tab, page, "#q=rerank")
    tab.click("main .row:nth-child(2) .row-name a")
    tab.wait_for(
        "document.querySelector('.pod-title')?.innerText.includes('rerank')", "the pod's view"
    )
    assert tab.evaluate("location.hash") == "#pod=serving/rerank"
    assert tab.evaluate(TILES) == 1
    assert "0.25 GPUs on 1 node" in tab.text(".facts")
    assert tab.texts(".row-other .row-pod") == ["embed-documents", "ocr-v2"]
    tab.evaluate("history.back()")
    tab.wait_for("!document.querySelector('.pod-title')", "back again")
    assert tab.evaluate("document.querySelector('#q').value") == "rerank"


def test_pods_by_owner_and_namespace_and_nodes(tab: Tab, page: str) -> None:
    visited(tab, page)
    tab.click("#tab-pods")
    tab.wait_for("document.querySelectorAll('.pods tbody tr').length === 14", "a row for each pod")
    assert tab.texts(".pods tbody tr")[0].startswith("llm-pretrain-gpu-a-01 research gpu-a-01 8 ")
    assert tab.evaluate("document.querySelector('main').getBoundingClientRect().top") < 150, (
        "totals fit on one line"
    )
    tab.press("/")
    tab.type("jupyter")
    tab.wait_for("document.querySelectorAll('.pods tbody tr').length === 2", "filtered")
    tab.press("Escape")
    tab.click(".pods .tabs a:nth-child(4)")
    tab.wait_for("document.querySelector('.pods tbody th').innerText === 'research'", "namespaces")
    assert tab.texts(".pods tbody th") == ["research", "serving", "notebooks", "batch"]
    tab.click("#tab-nodes")
    tab.wait_for(
        "document.querySelectorAll('.nodes-table tbody tr').length === 3", "a row for each node"
    )
    tab.click(".nodes-table tbody tr:nth-child(2) a")
    tab.wait_for("document.querySelector('.node-view')", "the node's view")
    assert tab.evaluate("location.hash") == "#view=nodes&node=gpu-a-02"
    assert (tab.evaluate(TILES), tab.count(".node-view tbody tr")) == (8, 9)
    tab.press("Escape")
    tab.wait_for("location.hash === '#view=nodes'", "back to the nodes")


def test_pods_of_the_same_name_in_two_clusters_are_two(tab: Tab, url: str, shown: Showing) -> None:
    shown.picture = picture(
        *(
            node(f"{c}/n", [gpu(0, c, utilization=0.5, holders=[held("ml", "train")])], cluster=c)
            for c in ("east", "west")
        )
    )
    opened(tab, url, "#view=pods&by=namespace")
    rows = "document.querySelectorAll('.pods tbody tr').length"
    assert tab.evaluate(rows) == 2
    tab.choose("cluster", "west")
    tab.wait_for(f"{rows} === 1", "one cluster")
    assert tab.texts(".pods tbody tr")[0].startswith("ml west west/n 1 ")
    went(tab, "#cluster=east")
    tab.click("main .row-name a")
    tab.wait_for(
        "document.querySelector('.pod-title')?.innerText.includes('east')", "the pod's view"
    )
    assert (tab.evaluate("location.hash"), tab.evaluate(TILES)) == ("#pod=ml/train&cluster=east", 1)


def test_new_figures_show_without_a_reload(tab: Tab, url: str, shown: Showing) -> None:
    shown.picture = picture(
        node("n1", [gpu(0, "n1", utilization=0.25, holders=[held("a", "pod-1")])])
    )
    opened(tab, url)
    tab.evaluate("document.querySelector('.row-name a').focus(); window.stayed = true")
    shown.picture = picture(
        node("n1", [gpu(0, "n1", utilization=0.75, holders=[held("a", "pod-1")])])
    )
    tab.wait_for(
        "document.querySelector('.tile-ratio').innerText.startsWith('75')", "the new figure"
    )
    assert tab.evaluate("window.stayed")
    assert tab.evaluate("document.activeElement.className") == tab.evaluate(
        "document.querySelector('.row-name a').className"
    )
    assert tab.evaluate("document.activeElement.closest('.tile') !== null"), "the focus is lost"


def test_a_lost_node_is_old_and_then_gone(tab: Tab, url: str, shown: Showing) -> None:
    opened(tab, url)
    now = three_nodes()
    *others, last = now.nodes
    shown.picture = replace(now, nodes=[*others, replace(last, old=True, age_seconds=75.0)])
    tab.look_again()
    tab.wait_for("document.querySelectorAll('.tile.is-old').length === 4", "old tiles")
    assert tab.texts(".node.is-old .badge-old") == ["old: last seen 1 min ago"]
    assert tab.texts(".total-more")[0] == "4 old"
    assert tab.evaluate("document.querySelector('#status').dataset.health") == "warning"
    assert tab.text("#status-text").startswith("4 old. Live")
    tab.choose("state", "old")
    tab.wait_for(f"{TILES} === 4")
    tab.choose("state", "")
    shown.picture = replace(now, nodes=others)
    tab.look_again()
    tab.wait_for(f"{TILES} === 16", "the node is gone")


def test_a_server_that_goes_away_and_comes_back(tab: Tab, shown: Showing) -> None:
    with shown.served() as client:
        address = client.address
        opened(tab, address.url)
    tab.look_again()
    tab.wait_for(f"{STATE} === 'lost'", "the connection is lost")
    assert tab.text("#status-text").startswith("Connection lost")
    assert tab.evaluate(TILES) == 20, "the last values stay"
    shown.picture = three_nodes(1)
    with shown.served(Address("127.0.0.1", address.port)):
        tab.wait_for(f"{STATE} === 'live'", "it goes on by itself")
        assert tab.evaluate(TILES) == 20


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    '"><script>alert(2)</script>',
    "line\nbreak\ttab 'quotes\" &amp;",
    "\u202egnp.exe",
    "javascript:alert(3)",
    "a/b?c#d=e&pod=x",
]


def test_hostile_names_are_only_text(tab: Tab, url: str, shown: Showing) -> None:
    nodes = []
    for name in HOSTILE:
        holder = held(name.replace("/", "-"), name, name)
        device = gpu(0, name, model=name, utilization=0.5, holders=(holder,))
        nodes.append(node(name, [device], notes=[name]))
    shown.picture = picture(*nodes, notes=HOSTILE)
    opened(tab, url)
    visible = ["".join("\ufffd" if c in "\n\t\u202e" else c for c in name) for name in HOSTILE]
    for selector in ("main .row-pod", "main h2"):
        texts = f"[...document.querySelectorAll('{selector}')].map(found => found.textContent)"
        assert tab.evaluate(texts) == visible
    assert tab.evaluate("document.images.length + document.scripts.length") == 1
    for number, name in enumerate(visible, 1):
        tab.click(f"main .node:nth-child({number}) .row-name a")
        tab.wait_for("document.querySelector('.pod-title')", f"the view of the pod {name}")
        assert tab.evaluate("document.querySelector('.pod-title').lastChild.textContent") == name
        assert tab.evaluate(TILES) == 1
        tab.press("Escape")
        tab.wait_for(f"{TILES} === {len(HOSTILE)}", "all of them again")
    assert tab.errors == []


def test_by_keyboard_alone(tab: Tab, url: str) -> None:
    opened(tab, url)
    focused = "document.activeElement"
    tab.evaluate("document.querySelector('.node-head a').focus()")
    tab.press("Tab")
    assert tab.evaluate(f"{focused}.getAttribute('aria-label')").startswith(
        "GPU 0 of gpu-a-01, H100 80GB HBM3"
    )
    tab.press("ArrowRight")
    assert tab.evaluate(f"{focused}.getAttribute('aria-label')").startswith("GPU 1 of gpu-a-01")
    tab.press("ArrowDown")
    below = tab.evaluate(f"{focused}.getAttribute('aria-label')")
    assert below.startswith("GPU 5 of gpu-a-01")
    tab.press("ArrowUp", "ArrowLeft")
    assert tab.evaluate(f"{focused}.getAttribute('aria-label')").startswith("GPU 0 of gpu-a-01")
    assert tab.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"
    tab.press("Enter")
    tab.wait_for("document.querySelector('main .gpu')?.checkVisibility()", "the GPU's view")
    tab.press("Escape")
    tab.wait_for("!location.hash.includes('gpu=')", "all GPUs again")
    tab.wait_for("document.querySelector('main .tile')?.checkVisibility()", "the tiles")
    tab.evaluate("document.querySelector('main .tile').focus()")
    tab.press("Tab", "Tab")
    assert tab.evaluate(f"{focused}.tagName") == "A"
    tab.press("Enter")
    tab.wait_for("document.querySelector('.pod-title')", "the pod's view")
    tab.press("Escape")
    tab.wait_for("!document.querySelector('.pod-title')", "all GPUs again")
    tab.press("/")
    assert tab.evaluate(f"{focused}.id") == "q"


def test_escape_returns_to_where_one_came_from(tab: Tab, page: str) -> None:
    visited(tab, page, "#q=rerank")
    for view in (
        "#view=cost",
        "#pod=serving/rerank",
        "#gpu=GPU-gpu-a-02-0005-4c5e-9d3f-000000000000&range=6h",
    ):
        went(tab, view)
    went(tab, "#gpu=GPU-gpu-a-02-0005-4c5e-9d3f-000000000000&range=24h")
    for view in ("#pod=serving/rerank", "#view=cost", "#q=rerank"):
        tab.press("Escape")
        tab.wait_for(f"location.hash === '{view}'", view)
        tab.evaluate(DRAWN)


def test_the_documentation_lists_everything_that_a_link_can_select(tab: Tab, page: str) -> None:
    visited(tab, page)
    keys, states = tab.evaluate(
        "import('/page/criteria.js').then(all => [Object.keys(all.readHash('#')), "
        "all.STATES.map(([name]) => name)])"
    )
    text = (ROOT / "docs/page.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \| (.*) \|$", text.partition("## Links")[2], re.MULTILINE)
    documented = {name: values for names, values in rows for name in re.findall("`(.+?)`", names)}
    assert set(documented) - {"at"} >= set(keys)
    assert set(re.findall("`(.+?)`", documented["state"])) == set(states) - {""}
    views = set(re.findall("`(.+?)`", documented["view"])) - {"node=NAME"}
    tabs = tab.evaluate("[...document.querySelectorAll('#views a')].map(a => a.href)")
    assert views == {view for link in tabs for view in re.findall(r"view=(\w+)", link)}


def test_the_title_of_the_tab_names_the_view(tab: Tab, page: str) -> None:
    titles = []
    for link in ("", "#view=pods", "#pod=serving/chat-0", f"#gpu={GPU}", "#view=nodes&node=n"):
        visited(tab, page, link)
        titles.append(tab.evaluate("document.title"))
    assert [title.rpartition(") ")[2].split(" · ")[0] for title in titles] == [
        "Cluster, 3 nodes",
        "Pods",
        "serving/chat-0",
        "GPU 5 of gpu-a-01",
        "n",
    ]
    assert all(title.endswith("Cluster, 3 nodes · podgpu") for title in titles)


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("#view=pots", "view=pots is not one of pods, nodes, cost, savings, queue, events"),
        ("#state=lost&sort=broken", "state=lost is not one of held, "),
        ("#view=events&by=owner", "by=owner is not one of problems, pods, idle"),
        ("#view=cost&by=label:team&range=90d", "range=90d is not one of 1h, "),
        ("#namespace=serving", '"namespace" is not known'),
        ("#view=waste", ""),
        ("#view=cost&by=label:team&range=month&from=1794800000&to=1794900000", ""),
        ("#at=1794800000", ""),
    ],
)
def test_a_wrong_link_says_so(tab: Tab, page: str, link: str, message: str) -> None:
    visited(tab, page, link)
    told = tab.text("#wrong")
    assert (message in told) if message else not told
    visited(tab, page)
    assert not tab.text("#wrong")


def test_a_gpu_that_no_node_lists(tab: Tab, page: str) -> None:
    visited(tab, page, "#gpu=GPU-0")
    assert "No node lists this GPU." in tab.text("main")
    visited(tab, page, f"#gpu={GPU}")
    assert "No node lists" not in tab.text("main")
    order = "[...document.querySelectorAll('.gpu h3')].filter(h => h.checkVisibility())"
    assert tab.evaluate(f"{order}[0].innerText") == "Holders", "who uses it comes first"


@pytest.mark.parametrize(
    ("width", "columns"), [(390, 1), (900, 2), (1024, 4), (1440, 4), (2560, 8)]
)
def test_the_gpus_of_a_node_fill_their_rows(tab: Tab, page: str, width: int, columns: int) -> None:
    tab.look(width)
    visited(tab, page)
    tops = tab.evaluate(
        "[...document.querySelector('.tiles').children].map(t => t.getBoundingClientRect().top)"
    )
    assert tops.count(tops[0]) == columns
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_state_of_a_node_has_a_colour(tab: Tab, url: str, shown: Showing) -> None:
    broken = ConditionView(condition="lost", says="it fell off the bus", do="")
    shown.picture = picture(
        node("n1", [gpu(0, "n1")]),
        node("n2", [gpu(0, "n2", conditions=[broken])]),
        node("n3", [gpu(0, "n3")], old=True, age_seconds=90.0),
        node("n4", [gpu(0, "n4")], old=True, gone=True, age_seconds=900.0),
    )
    opened(tab, url, "#view=nodes")
    states = "[...document.querySelectorAll('tbody tr')].map(row => row.children[1].className)"
    assert [name.split()[-1] for name in tab.evaluate(states)] == [
        "is-short",
        "bad",
        "wasted",
        "bad",
    ]


def test_keys_are_shown(tab: Tab, page: str) -> None:
    visited(tab, page, "#pod=serving/rerank")
    tab.press("?")
    tab.wait_for("document.querySelector('#help').open")
    tab.press("Escape")
    tab.wait_for("!document.querySelector('#help').open")
    assert tab.evaluate("location.hash") == "#pod=serving/rerank", "Escape closes only the help"


def test_light_and_dark(tab: Tab, url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    tab.look(theme="dark")
    opened(tab, url)
    dark = tab.evaluate(ground)
    tab.look(theme="light")
    light = tab.evaluate(ground)
    assert (light, dark) == ("rgb(244, 246, 248)", "rgb(14, 19, 25)")
    tab.click("#theme")
    tab.click("#theme")
    assert (tab.text("#theme"), tab.evaluate(ground)) == ("Theme: dark", dark)
    opened(tab, url)
    assert tab.evaluate(ground) == dark, "the theme is stored"
    tab.evaluate("localStorage.clear()")
