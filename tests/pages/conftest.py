"""The browser that reads the pages."""

import shutil
from collections.abc import Iterator
from contextlib import suppress

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A headless one of the machine; where there is none, what needs it is skipped.

    One for each file: while it is there, no other test of the process can run an event loop.
    """
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs a browser, looked for {', '.join(NAMES)}")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # As root, as in a container, Chromium starts only without its sandbox; it reads nothing but these pages.
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        with suppress(sync_api.Error):
            found.close()
