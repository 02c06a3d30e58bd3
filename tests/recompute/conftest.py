"""Fails a test in which layers are not recomputed as planned, or not at all, and the test does not say so."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offload.recompute.layer_policies import LayerPolicies
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


def short_where(monkeypatch: pytest.MonkeyPatch, asked: Callable[[], Callable[[int], bool]]) -> None:
    begin = LayerPolicies.__init__

    def begin_short(self: LayerPolicies, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.is_short = asked()

    monkeypatch.setattr(LayerPolicies, "__init__", begin_short)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that would be broken if a layer ran again while all that it saves is held."""
    short_where(monkeypatch, lambda: lambda _: True)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of which nothing is known until the second forward has ended."""

    def asked() -> Callable[[int], bool]:
        amounts: list[int] = []  # two to learn a layer, and one when the next forward begins
        return lambda nbytes: amounts.append(nbytes) or len(amounts) > 3

    short_where(monkeypatch, asked)


RUNS = pytest.StashKey[list[int]]()


@pytest.fixture
def recomputes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test in which backward runs no layer again says so: it has the fixture ``nothing_recomputed``."""
    runs = request.node.stash[RUNS] = list[int]()  # no frames, which tests see freed
    run = Frame.run
    monkeypatch.setattr(Frame, "run", lambda frame: (runs.append(id(frame)), run(frame))[1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield  # raises if the test fails, or skips itself
    if RUNS in item.stash:
        assert bool(item.stash[RUNS]) is ("nothing_recomputed" not in item.fixturenames)


@pytest.fixture
def nothing_recomputed() -> None:
    """For tests of what is refused, kept or abandoned."""
