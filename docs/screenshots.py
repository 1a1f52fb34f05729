"""Takes the screenshots in docs/images with a real Chromium: `python -m docs.screenshots [FOLDER]`.

Some screenshots show `podgpu top` and the page of the demo. The others show the page with generated
data in every combination of scene, view, screen size and theme. With FOLDER, writes all of them
there. Without FOLDER, writes only those in the documentation to docs/images. Check each screenshot
before you commit it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from docs.top_screenshot import top_html
from podgpu.fleet.view import View
from tests.browser.chromium import MISSING, Tab, browser, chromium, opened
from tests.browser.pictures import Showing, large, lived_in_node, three_nodes
from tests.browser.records import troubled, troubled_showing

IMAGES = Path(__file__).parent / "images"
FONT = "Liberation Sans"
"""About as wide as the default font of most systems. Debian's default font is much wider."""
ILL = "GPU-gpu-a-01-0005-4c5e-9d3f-000000000000"
"""UUID of a GPU with an XID."""
DESKTOP, PHONE = (1440, 900), (360, 780)
MOST_HEIGHT = 1500
SHOWN = {"large-desktop-light": "page-8000.png"}
"""Screenshot -> file name in docs/images, for those in the documentation."""


@dataclass(frozen=True)
class Scene:
    name: str
    make: Callable[[int], View]
    seconds: float
    """Seconds before the first screenshot, so that the sparklines have data."""
    views: tuple[tuple[str, str], ...] = (("", ""),)
    """Suffix of the file name, and fragment of the URL."""
    served: Callable[[], Showing] | None = None
    """Creates a server with history, waste and GPU details. If None, only the view is served."""


SCENES = (
    Scene("node", lived_in_node, 50),
    Scene(
        "cluster",
        three_nodes,
        50,
        (("", ""), ("-pod", "#pod=serving/rerank"), ("-pods", "#view=pods")),
    ),
    Scene(
        "broken",
        troubled,
        10,
        (
            ("", ""),
            ("-gpu", f"#gpu={ILL}"),
            ("-pod", "#pod=serving/rerank"),
            ("-pods", "#view=pods"),
            ("-nodes", "#view=nodes"),
            ("-node", "#view=nodes&node=gpu-a-01"),
            ("-cost", "#view=cost"),
            ("-events", "#view=events"),
            ("-map", "#show=map"),
        ),
        troubled_showing,
    ),
    Scene("large", lambda turn: large(turn=turn), 10, (("", ""), ("-idle", "#sort=idle"))),
)


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m docs.screenshots", description=__doc__)
    arguments.add_argument(
        "folder", nargs="?", type=Path, help="write every one of them there instead"
    )
    folder = arguments.parse_args().folder
    if chromium() is None:
        print(MISSING, file=sys.stderr)
        return 1
    (folder or IMAGES).mkdir(parents=True, exist_ok=True)
    with browser(FONT) as tab:
        _draw_top(tab, (folder or IMAGES) / "top.png")
        _draw_demo(tab, folder or IMAGES)
        for scene in SCENES:
            for name in _looks(tab, scene):
                path = folder / f"{name}.png" if folder else IMAGES / SHOWN.get(name, "")
                if folder or name in SHOWN:
                    tab.screenshot(path)
                    print(f"{path}: {path.stat().st_size // 1024} KiB")
    return 0


def _draw_top(tab: Tab, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "top.html"
        page.write_text(top_html(), encoding="utf-8")
        tab.look(*DESKTOP, scale=1.25)
        tab.open(page.as_uri())
        width, height = tab.evaluate("[document.body.offsetWidth, document.body.offsetHeight]")
        tab.look(width, height, scale=1.25)
        tab.screenshot(path)
        print(f"{path}: {path.stat().st_size // 1024} KiB")


DEMO_PORT = 9401
DEMO_SECONDS = 40
"""After this time all faults of the demo are present."""
DEMO_VIEWS = (
    ("page-light", "", "light"),
    ("page-dark", "#state=broken", "dark"),
    ("page-gpu", "#gpu={ill}&range=24h", "light"),
    ("page-cost", "#view=cost&by=label:team", "light"),
    ("page-events", "#view=events", "light"),
)


def _draw_demo(tab: Tab, folder: Path) -> None:
    url = f"http://127.0.0.1:{DEMO_PORT}"
    demo = subprocess.Popen([sys.executable, "-m", "podgpu", "demo"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(DEMO_SECONDS)
        with urlopen(f"{url}/api/v1/view") as answer:
            gpus = json.load(answer)["nodes"][0]["gpus"]
        ill = next(gpu["uuid"] for gpu in gpus if gpu.get("conditions"))
        for name, hash, theme in DEMO_VIEWS:
            tab.look(*DESKTOP, theme=theme)
            opened(tab, url, hash.format(ill=ill))
            tab.evaluate("new Promise(done => setTimeout(done, 1500))")
            height = tab.evaluate("document.documentElement.scrollHeight")
            tab.look(DESKTOP[0], min(height, MOST_HEIGHT), theme=theme)
            tab.evaluate("new Promise(done => setTimeout(done, 500))")
            tab.screenshot(folder / f"{name}.png")
            print(folder / f"{name}.png")
    finally:
        demo.terminate()
        demo.wait()


def _looks(tab: Tab, scene: Scene) -> Iterator[str]:
    """Shows a scene in each view, size and theme. Yields the name of the screenshot."""
    shown = scene.served() if scene.served else Showing(scene.make(0))
    with shown.served() as client:
        tab.look(*DESKTOP)
        tab.open(client.address.url)
        _let_run(tab, scene, shown)
        for view, hash in scene.views:
            for device, size in (("desktop", DESKTOP), ("phone", PHONE)):
                for theme in ("light", "dark"):
                    tab.look(*size, theme=theme, scale=1 if device == "desktop" else 2)
                    tab.evaluate(f"location.hash = '{hash}'; scrollTo(0, 0)")
                    tab.evaluate("new Promise(done => setTimeout(done, 300))")
                    yield f"{scene.name}{view}-{device}-{theme}"


def _let_run(tab: Tab, scene: Scene, shown: Showing) -> None:
    """Serves a new view after each request, like a running server."""
    asked, turn, end = shown.asked, 0, time.monotonic() + scene.seconds
    while time.monotonic() < end:
        tab.evaluate("new Promise(done => setTimeout(done, 100))")
        if shown.asked != asked:
            asked, turn = shown.asked, turn + 1
            shown.picture = scene.make(turn)


if __name__ == "__main__":
    sys.exit(main())
