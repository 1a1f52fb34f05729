"""Tests the files of the page and their headers."""

from __future__ import annotations

import gzip
import html.parser
import re
from pathlib import Path

import pytest

from podgpu import __version__
from podgpu.web import page_routes
from tests.nodes.node import Node
from tests.web.server import Client

FOLDER = Path(page_routes.__file__).parent / "page"
ASSETS = sorted(file.name for file in FOLDER.iterdir() if file.suffix in (".js", ".css"))
PARTS = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)


class Markup(html.parser.HTMLParser):
    """Collects all attributes, and the content of script and style elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.inline: list[str] = []
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            self.inline.append(data)

    def links(self) -> list[str]:
        return [value for _, name, value in self.attributes if name in ("href", "src")]


def test_page_and_files(client: Client) -> None:
    page = client.ask("/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert f"podgpu {__version__}" in page.text
    assert "<!--" not in page.text
    wanted = {link for link in Markup(page.text).links() if link.startswith("page/")}
    assert wanted == {f"page/{name}" for name in ASSETS}, (
        "the page must link all files, so that they load in parallel"
    )
    for name in ASSETS:
        answer = client.ask(f"/page/{name}")
        assert answer.status == 200
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert answer.body == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/api/v1/view", "/api/v1/nothing"])
def test_security_policy(client: Client, path: str) -> None:
    headers = client.ask(path).headers
    assert tuple(headers["Content-Security-Policy"].split("; ")) == PARTS
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-cache"


def test_page_complies_with_the_policy(client: Client) -> None:
    markup = Markup(client.ask("/").text)
    assert markup.inline == []
    assert [a for a in markup.attributes if a[1] == "style" or a[1].startswith("on")] == []
    assert [link for link in markup.links() if re.match(r"(https?:)?//|/", link)] == [], (
        "no absolute links"
    )
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        outside = re.sub(r"http://www\.w3\.org/2000/svg", "", text)
        assert "http://" not in outside
        assert "https://" not in outside


def test_texts_never_become_markup() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function"
    )
    scripts = list(FOLDER.glob("*.js"))
    assert scripts
    for file in scripts:
        assert not forbidden.search(file.read_text(encoding="utf-8")), file.name


def test_links(node: Node, client: Client) -> None:
    node.take_turns()
    links = [
        link
        for link in Markup(client.ask("/").text).links()
        if not link.startswith(("page/", "#", "data:"))
    ]
    assert sorted(set(links)) == ["api/v1/view", "health", "metrics", "ready"]
    assert [client.ask(f"/{link}").status for link in links] == [200] * len(links)


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
def test_not_modified(client: Client, path: str) -> None:
    first = client.ask(path, Accept_Encoding="gzip")
    etag = first.headers["ETag"]
    again = client.ask(path, If_None_Match=etag)
    assert (again.status, again.body) == (304, b"")
    assert again.headers["ETag"] == etag
    assert client.ask(path, If_None_Match='"other"').status == 200
    assert gzip.decompress(first.body) == client.ask(path).body


def test_other_files_are_not_served(client: Client) -> None:
    names = ("../routes.py", "%2e%2e%2froutes.py", "index.html", "nothing.js", "/etc/passwd")
    assert [client.ask(f"/page/{name}").status for name in names] == [404] * len(names)
