"""One Chromium for all tests of the page. A test fails if the page had errors."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.browser.chromium import MISSING, Tab, browser, chromium
from tests.browser.pictures import Showing


@pytest.fixture(scope="session")
def chrome() -> Iterator[Tab]:
    if chromium() is None:
        pytest.skip(MISSING)
    with browser() as tab:
        yield tab


@pytest.fixture
def tab(chrome: Tab, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """Opens an empty page after each test, unless the test uses `page`, which the tests of a file
    share.
    """
    chrome.look()
    yield chrome
    if "page" not in request.fixturenames:
        chrome.open("about:blank")
    chrome.evaluate("0")  # all errors of the page arrive before this response
    errors, chrome.errors[:] = chrome.errors[:], []
    assert errors == []


@pytest.fixture
def shown(usual: Showing) -> Showing:
    """Returns a copy of the file's fixture `usual` that the test may change."""
    return Showing(replace(usual.picture, taken_at=time.time()), usual.records, usual.more)


@pytest.fixture
def url(shown: Showing) -> Iterator[str]:
    """Serves `shown` to one test. Yields the URL."""
    with shown.served() as client:
        yield client.address.url


@pytest.fixture(scope="module")
def page(usual: Showing, chrome: Tab) -> Iterator[str]:
    """Serves the file's fixture `usual` to all tests that only read it, for use with `visited`.
    Loading a page takes Chromium ten times the CPU time of another view.
    """
    with usual.served() as client:
        yield client.address.url
        chrome.open("about:blank")
