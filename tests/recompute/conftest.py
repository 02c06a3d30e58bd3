"""Fails a test in which layers are not recomputed as planned, or not at all, and the test does not say so."""

import logging
from collections.abc import Iterator

import pytest

from offload.recompute.run_again import Frame

LINES = ("is never recomputed", "comes out with other bits", "handing over gave other bits")


@pytest.fixture(autouse=True)
def unplanned(caplog: pytest.LogCaptureFixture) -> Iterator[set[str]]:
    """Which of :data:`LINES` the log has; a test in which that is right adds them."""
    caplog.set_level(logging.INFO, "offload")
    expected: set[str] = set()
    yield expected
    messages = [record.getMessage() for record in caplog.get_records("call")]
    assert {line for line in LINES if any(line in message for message in messages)} == expected, messages


@pytest.fixture
def recomputes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test in which backward runs no layer again says so: it has the fixture ``nothing_recomputed``."""
    runs: list[int] = []  # no frames, which tests see freed
    run = Frame.run
    monkeypatch.setattr(Frame, "run", lambda frame: (runs.append(id(frame)), run(frame))[1])
    yield
    assert bool(runs) is ("nothing_recomputed" not in request.fixturenames)


@pytest.fixture
def nothing_recomputed() -> None:
    """For tests of what is refused, kept or abandoned."""
