"""A few random models under random budgets; ``python -m tests.outside budgets`` runs more."""

import pytest

from offload.observe.memory import CpuMemoryPeak

from .budgets import TOLERANCE, check

pytestmark = pytest.mark.slow

HELD, TOO_SMALL = (1, 28), (23,)
"""Seeds of small models."""


@pytest.mark.parametrize("seed", HELD)
def test_the_peak_keeps_to_the_budget(seed: int) -> None:
    report = check(seed)
    assert not report.wrong
    assert not report.messages
    assert 0.5 < report.peak / report.budget <= 1 + TOLERANCE
    assert 0.5 < report.planned / report.budget <= 1 + TOLERANCE


@pytest.mark.parametrize("seed", TOO_SMALL)
def test_a_budget_that_is_too_small_is_said_once(seed: int) -> None:
    report = check(seed)
    assert not report.wrong
    by_budget, by_plan = report.messages
    assert "cannot be met" in by_budget
    assert by_plan.startswith("memory_budget must be at least")


def test_a_broken_budget_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMemoryPeak, "most_bytes", lambda _: 0)
    assert any("without a message" in check(seed).wrong for seed in HELD)
