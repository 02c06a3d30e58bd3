"""A sample of operations and modules, another one in each run; ``python -m tests.outside operations`` runs all."""

import os

import pytest

from offload.device.backend import Wait
from offload.device.select import get_backend
from tests.lab import Lab

from .operations import check, draw
from .workers import run_cases

pytestmark = pytest.mark.slow


def test_a_sample_of_operations_and_modules() -> None:
    seed = int(os.environ["OUTSIDE_SEED"])
    wrong = {}
    moved = 0
    for case, report in run_cases("operations.check", draw(seed), limit_s=120):
        moved += report.get("moved", 0)
        found = report.get("different") or report.get("lost")
        if found:
            wrong[case] = found
    assert not wrong, f"to see it again, set OUTSIDE_SEED={seed}"
    assert moved > 0


def test_another_seed_is_another_sample() -> None:
    assert list(draw(1)) == list(draw(1)) != list(draw(2))


def test_a_missing_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    Lab(get_backend("cpu"), monkeypatch).drop(Wait.RELOADED)
    assert check("operation", "sin", "float32").different
