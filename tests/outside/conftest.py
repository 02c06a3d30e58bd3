"""Says with which seed the samples of this run were drawn."""

from __future__ import annotations

import os

import pytest

SEED = int(os.environ.get("OUTSIDE_SEED") or int.from_bytes(os.urandom(3)))


@pytest.fixture
def seed() -> int:
    """What samples are drawn with: another one in each run, unless ``OUTSIDE_SEED`` is set."""
    return SEED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"tests/outside drew its samples with OUTSIDE_SEED={SEED}")
