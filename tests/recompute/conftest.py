"""Fails a test in which a layer is not recomputed as planned, and the test does not say so."""

import logging
from collections.abc import Iterator

import pytest

LINES = ("is never recomputed", "comes out with other bits", "handing over gave other bits")


@pytest.fixture(autouse=True)
def unplanned(caplog: pytest.LogCaptureFixture) -> Iterator[set[str]]:
    """Which of :data:`LINES` the log has; a test in which that is right adds them."""
    caplog.set_level(logging.INFO, "offload")
    expected: set[str] = set()
    yield expected
    messages = [record.getMessage() for record in caplog.get_records("call")]
    assert {line for line in LINES if any(line in message for message in messages)} == expected, messages
