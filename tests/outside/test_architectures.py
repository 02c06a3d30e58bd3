"""One architecture of each kind; ``python -m tests.outside architectures`` runs all."""

import pytest

from .architectures import CHOSEN, architectures
from .workers import run_cases

pytestmark = pytest.mark.slow


def test_one_of_each_kind() -> None:
    assert len(CHOSEN) >= 12
    names = architectures()
    cases = [(name, names[name]) for name in CHOSEN]
    reports = {name: report for (name, _), report in run_cases("architectures.check", cases, limit_s=120)}
    wrong = {
        name: {key: report[key] for key in ("different", "unrepeatable", "skipped", "lost") if report.get(key)}
        for name, report in reports.items()
    }
    assert not {name: found for name, found in wrong.items() if found}
    assert all(report["offloaded_bytes"] > 0 for report in reports.values())
    assert all(report["recomputed"] > 0 for report in reports.values())
