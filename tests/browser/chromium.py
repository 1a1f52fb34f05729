"""Controls a headless Chromium over the DevTools protocol, with aiohttp's websocket client.

The event loop runs only during a call, so no thread and no lock is needed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE = 90.0
MISSING = "no Chromium here (Debian's chromium-headless-shell, or chromium)"
_LARGEST_MESSAGE = 64 * 1024 * 1024
_OPTIONS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ),
    *(
        "--no-first-run",
        "--no-default-browser-check",
        "--disable-background-networking",
        "--disable-extensions",
    ),
    *("--disable-component-update", "--disable-sync", "--mute-audio", "--remote-debugging-port=0"),
    # One renderer process and no separate service processes, which saves a quarter of the CPU time.
    *(
        "--renderer-process-limit=1",
        "--in-process-gpu",
        "--enable-features=NetworkServiceInProcess2",
    ),
    "--disable-features=BackForwardCache,IsolateOrigins,site-per-process,SpareRendererForSitePerProcess",
)
_RECORDS = re.compile(r"/api/v1/(history|range|costs|events|summary|gpus|jobs|queue)\b")
_SERVER_ENDED = re.compile(
    r"net::ERR_(CONNECTION_\w+|EMPTY_RESPONSE|INCOMPLETE_CHUNKED_ENCODING|CONTENT_LENGTH_MISMATCH)"
)
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
"""JavaScript promise that resolves when all changes so far are drawn."""
_KEYS = {
    "Escape": 27,
    "Tab": 9,
    "Enter": 13,
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "Home": 36,
    "End": 35,
}


def chromium() -> str | None:
    """Returns the path of a Chromium. Prefers the headless shell, which needs two thirds of the CPU
    time per page.
    """
    return (
        shutil.which("chromium-headless-shell")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
    )


class BrowserError(AssertionError):
    """The page threw an exception, or a condition was not met in time."""


@dataclass
class Tab:
    """One page. Its errors are stored in `errors`."""

    loop: asyncio.AbstractEventLoop
    socket: aiohttp.ClientWebSocketResponse
    reader: asyncio.Task[None] | None = None
    errors: list[str] = field(default_factory=list)
    """Exceptions, dialogs, violations of the Content-Security-Policy, console errors."""
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _number: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._run(self._call(method, parameters))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'", "the page is loaded")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression. Waits for promises."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {_thrown(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, what: str = "", patience: float = PATIENCE) -> Any:
        deadline = time.monotonic() + patience
        while True:
            with suppress(BrowserError):  # the element does not exist yet
                if (
                    value := self.evaluate(expression)
                ) or value == {}:  # an element is returned as an empty object
                    return value
            if time.monotonic() > deadline:
                seen = f"errors: {self.errors}\n{self.text()[:1500]}"
                raise BrowserError(f"did not come true: {what or expression}\n{seen}")
            self._run(asyncio.sleep(0.05))

    def look_again(self) -> None:
        """Simulates a return to the tab, so that the page updates immediately and not after two
        seconds.
        """
        self.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def text(self, selector: str = "body") -> str:
        return str(
            self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        )

    def texts(self, selector: str) -> list[str]:
        """Uses `textContent` for elements that are off the screen, whose `innerText` is empty."""
        found: list[str] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => "
            "e.checkVisibility())"
            ".map(e => (e.innerText || e.textContent).replace(/\\s+/g, ' ').trim())"
        )
        return found

    def count(self, selector: str) -> int:
        return len(self.texts(selector))

    def click(self, selector: str) -> None:
        """Clicks with the mouse. Scrolls to the element, and waits until it stays in its place and
        nothing covers it: elements off the screen have no layout, and a page that is loading moves
        its elements.
        """
        at = self.wait_for(
            f"(async found => {{found.scrollIntoView({{block: 'center'}}); await {DRAWN};"
            "const {left, top, width, height} = found.getBoundingClientRect();"
            f"await {DRAWN}; const after = found.getBoundingClientRect();"
            "if (after.left !== left || after.top !== top) return null;"
            "const [x, y] = [left + Math.min(width, 40) / 2, top + height / 2];"
            "return found.contains(document.elementFromPoint(x, y)) ? [x, y] : null})"
            f"(document.querySelector({json.dumps(selector)}))",
            f"{selector} can be clicked",
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1
            )

    def press(self, *keys: str) -> None:
        """Presses named keys, such as `Escape`, or types single characters."""
        for key in keys:
            code: dict[str, Any] = (
                {"windowsVirtualKeyCode": _KEYS[key]} if key in _KEYS else {"text": key}
            )
            if key == "Enter":
                code["text"] = "\r"
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **code)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def type(self, text: str) -> None:
        self.press(*text)

    def choose(self, name: str, value: str) -> None:
        """Selects a value in the filter row."""
        self.evaluate(
            f"(() => {{const s = document.querySelector('select[name={name}]'); s.value = "
            f"{json.dumps(value)};"
            "s.dispatchEvent(new Event('input', {bubbles: true}))})()"
        )

    def look(
        self, width: int = 1440, height: int = 900, theme: str = "light", scale: float = 1
    ) -> None:
        """Sets the window size and the system's colour scheme."""
        mobile = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    # Private

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = self.loop.create_future()
        await self.socket.send_json({"id": self._number, "method": method, "params": parameters})
        message = await answer
        if "error" in message:
            raise BrowserError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    async def read(self) -> None:
        async for frame in self.socket:
            message = json.loads(frame.data)
            if "id" in message:
                waiting = self._answers.pop(message["id"])
                if not waiting.done():
                    waiting.set_result(message)
            else:
                await self._note(message["method"], message["params"])

    async def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(_thrown(event["exceptionDetails"]))
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {event['message']}")
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            entry = event["entry"]
            if "404" in entry["text"] and _RECORDS.search(entry.get("url", "")):
                return  # expected without history, or for an unknown GPU; the page shows it
            if _SERVER_ENDED.search(entry["text"]):
                return  # expected when a test's server stops before its page is closed
            self.errors.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}".strip())
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.errors.append(f"console: {event['args']}")
        elif method == "Audits.issueAdded" and "ContentSecurity" in event["issue"]["code"]:
            self.errors.append(f"policy: {event['issue']}")


def _thrown(details: dict[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details.get("text"))


@contextmanager
def browser(font: str = "") -> Iterator[Tab]:
    """Yields a tab of a new Chromium with its own profile. `font` replaces the system font."""
    command = chromium()
    if command is None:
        raise RuntimeError(MISSING)
    with tempfile.TemporaryDirectory(
        prefix="podgpu-chromium-", ignore_cleanup_errors=True
    ) as profile:
        started = [command, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        environment = os.environ | (_fontconfig(Path(profile), font) if font else {})
        process = subprocess.Popen(
            started,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            loop = asyncio.new_event_loop()
            try:
                port = _port(Path(profile), process)
                yield from _tab(loop, port)
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()
        finally:
            _end(process)


def _tab(loop: asyncio.AbstractEventLoop, port: int) -> Iterator[Tab]:
    session = loop.run_until_complete(_session())
    try:
        tab = loop.run_until_complete(_attach(loop, session, port))
        for domain in ("Page", "Runtime", "Log", "Audits"):
            tab.call(f"{domain}.enable")
        yield tab
        assert tab.reader is not None
        tab.reader.cancel()
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(tab.reader)
    finally:
        loop.run_until_complete(session.close())


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


async def _attach(
    loop: asyncio.AbstractEventLoop, session: aiohttp.ClientSession, port: int
) -> Tab:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        pages = [
            target for target in await answer.json(content_type=None) if target["type"] == "page"
        ]
    socket = await session.ws_connect(
        pages[0]["webSocketDebuggerUrl"], max_msg_size=_LARGEST_MESSAGE
    )
    tab = Tab(loop, socket)
    tab.reader = loop.create_task(tab.read())
    return tab


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """Returns the port that Chromium writes into its profile when it listens."""
    file, deadline = profile / "DevToolsActivePort", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        if process.poll() is not None:
            raise RuntimeError(f"chromium ended with {process.returncode} at its start")
        time.sleep(0.05)
    raise RuntimeError("chromium did not say where it listens")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process group, because the helper processes would continue."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _fontconfig(folder: Path, font: str) -> dict[str, str]:
    file = folder / "fonts.conf"
    alike = "".join(
        f'<match target="pattern"><test name="family"><string>{name}</string></test>'
        f'<edit name="family" mode="assign" binding="strong"><string>{font}</string></edit></match>'
        for name in ("system-ui", "sans", "sans-serif", "DejaVu Sans")
    )
    include = '<include ignore_missing="yes">/etc/fonts/fonts.conf</include>'
    file.write_text(f'<?xml version="1.0"?><fontconfig>{alike}{include}</fontconfig>')
    return {"FONTCONFIG_FILE": str(file)}


def opened(tab: Tab, url: str, hash: str = "", state: str = "live") -> None:
    """Loads the page and waits for the state. Opens about:blank first, because a new # alone does
    not reload a page.
    """
    if tab.evaluate("location.href") != "about:blank":
        tab.open("about:blank")
    tab.open(f"{url}/{hash}")
    tab.wait_for(
        f"document.querySelector('#status').dataset.state === '{state}'", f"the page is {state}"
    )


def reloaded(tab: Tab) -> None:
    """Reloads the current page and waits until the new one is live."""
    tab.evaluate("window.before = true, location.reload()")
    tab.wait_for(
        "!window.before && document.querySelector('#status')?.dataset.state === 'live'",
        "the page is live again",
    )


def visited(tab: Tab, url: str, hash: str = "") -> None:
    """Shows a view of a page that several tests share, and loads the page only if necessary. Moves
    the focus and the mouse away, and waits until the view is drawn.
    """
    if tab.evaluate("location.origin") != url:
        opened(tab, url, hash)
    else:
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        tab.evaluate("document.activeElement.blur(), scrollTo(0, 0)")
        went(tab, hash)


def went(tab: Tab, hash: str) -> None:
    """Shows another view of the current page and waits until it is drawn. For the current view it
    sends the event itself, because an equal hash causes none.
    """
    heard = "new Promise(done => addEventListener('hashchange', done, {once: true}))"
    follow = (
        "location.hash === to ? dispatchEvent(new HashChangeEvent('hashchange')) : location.hash "
        "= to"
    )
    tab.evaluate(
        f"(async to => {{const heard = {heard}; {follow}; await heard; await "
        f"{DRAWN}}})({json.dumps(hash)})"
    )
