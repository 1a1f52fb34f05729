"""One Chromium for all tests of the page; each gets it clean, and fails when anything went wrong inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import MISSING, Tab, browser, chromium
from tests.browser.pictures import Showing


@pytest.fixture(scope="session")
def chrome() -> Iterator[Tab]:
    if chromium() is None:
        pytest.skip(MISSING)
    with browser() as tab:
        yield tab


@pytest.fixture
def tab(chrome: Tab) -> Iterator[Tab]:
    chrome.look()
    chrome.errors.clear()
    yield chrome
    chrome.open("about:blank")
    assert chrome.errors == []


@pytest.fixture
def url(shown: Showing) -> Iterator[str]:
    """Where what a file shows (its own fixture `shown`) is served."""
    with shown.served() as client:
        yield client.address.url
