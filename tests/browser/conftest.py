"""One Chromium for all tests of the page; each gets it clean, and fails when anything went wrong inside."""

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
    """Opens an empty page after each test, unless the test uses the fixture `page`, which the tests of a file share."""
    chrome.look()
    yield chrome
    if "page" not in request.fixturenames:
        chrome.open("about:blank")
    chrome.evaluate("0")  # errors of the page arrive before this answer
    errors, chrome.errors[:] = chrome.errors[:], []
    assert errors == []


@pytest.fixture
def shown(usual: Showing) -> Showing:
    """What a file usually shows (its own fixture `usual`), for a test that may change it."""
    return Showing(replace(usual.picture, taken_at=time.time()), usual.records, usual.more)


@pytest.fixture
def url(shown: Showing) -> Iterator[str]:
    """Where `shown` is served to one test."""
    with shown.served() as client:
        yield client.address.url


@pytest.fixture(scope="module")
def page(usual: Showing, chrome: Tab) -> Iterator[str]:
    """Where what a file usually shows (its own fixture `usual`) is served to all tests that only look at it: they go
    there with `visited`. To load a page takes Chromium ten times the work of showing another view of it."""
    with usual.served() as client:
        yield client.address.url
        chrome.open("about:blank")
