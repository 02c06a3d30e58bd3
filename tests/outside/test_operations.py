"""Samples of what ``python -m tests.outside`` runs: operations and modules, architectures, programs, budgets."""

import os

import pytest
import torch

from offload.device.backend import Wait
from offload.device.select import get_backend
from offload.observe.memory import CpuMemoryPeak
from offload.recompute.run_again import Frame
from tests.lab import Lab

from .architectures import CHOSEN, architectures
from .architectures import check as check_architecture
from .budgets import TOLERANCE
from .budgets import check as check_budget
from .operations import CRASHING, check, draw
from .programs import check as check_program
from .workers import run_cases

pytestmark = pytest.mark.slow


def test_a_sample_of_operations_and_modules() -> None:
    seed = int(os.environ["OUTSIDE_SEED"])
    wrong = {}
    moved = 0
    for case, report in run_cases("operations.check", draw(seed), limit_s=120):  # one may crash its process
        moved += report.get("moved", 0)
        if found := report.get("different") or report.get("lost"):
            wrong[case] = found
    assert not wrong, f"to see it again, set OUTSIDE_SEED={seed}"
    assert moved > 0


def test_another_seed_is_another_sample() -> None:
    assert list(draw(1)) == list(draw(1)) != list(draw(2))
    assert all(case[:2] != CRASHING for seed in range(40) for case in draw(seed))


def test_a_missing_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    Lab(get_backend("cpu"), monkeypatch).drop(Wait.RELOADED)
    assert check("operation", "sin", "float32").different


def test_there_are_enough_kinds() -> None:
    assert len(CHOSEN) >= 12


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", CHOSEN)
def test_one_of_each_kind(name: str) -> None:
    report = check_architecture(name, architectures()[name])
    assert not report.different
    assert not report.unrepeatable
    assert not report.skipped
    assert report.offloaded_bytes > 0
    assert report.recomputed > 0


HELD, TOO_SMALL, SAID = (3, 4), (23,), ((5025, 3), (6006, 3), (7041, 3), (8000, 1))
AT_ONCE = ((20000, 3), (20014, 3), (20038, 3), (30006, 2), (30007, 2), (30021, 2))
"""Seeds of small models."""


@pytest.mark.parametrize("seed", HELD)
def test_the_peak_keeps_to_the_budget(seed: int) -> None:
    report = check_budget(seed)
    assert not report.wrong
    assert not report.messages
    assert 0.5 < report.peak / report.budget <= 1 + TOLERANCE
    assert 0.5 < report.planned / report.budget <= 1 + TOLERANCE


@pytest.mark.drawn(3)
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize(("seed", "microbatches"), SAID)
def test_the_peak_keeps_to_the_budget_or_that_is_said(seed: int, microbatches: int, varying: bool) -> None:
    assert not check_budget(seed, microbatches, varying=varying).wrong


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("seed", "microbatches"), AT_ONCE)
def test_what_several_microbatches_need_at_once_is_said_if_it_breaks_the_budget(seed: int, microbatches: int) -> None:
    """In the first step that has more of them than there were, too, where nobody has counted what the others hold."""
    assert not check_budget(seed, microbatches, in_flight=True).wrong


@pytest.mark.parametrize("seed", TOO_SMALL)
def test_a_budget_that_is_too_small_is_said_once(seed: int) -> None:
    report = check_budget(seed)
    assert not report.wrong
    by_budget, by_plan = report.messages
    assert "cannot be met" in by_budget
    assert by_plan.startswith("memory_budget must be at least")


def test_a_broken_budget_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMemoryPeak, "most_bytes", lambda _: 0)
    assert any("without a message" in check_budget(seed).wrong for seed in HELD)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", range(0, 20, 10))
@pytest.mark.filterwarnings("ignore")
def test_random_programs(first: int) -> None:
    found = {seed: check_program(seed) for seed in range(first, first + 10)}
    assert not {seed: wrong for seed, wrong in found.items() if wrong and not wrong.startswith("skipped")}
    assert sum(wrong is None for wrong in found.values()) >= 5


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", [70088, 70194])
@pytest.mark.filterwarnings("ignore")
def test_fewer_tensors_behind_what_depends_on_data(seed: int) -> None:
    """The forward in which a layer is proven takes fewer experts than the one that was learned."""
    assert check_program(seed) is None


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_recomputed_value_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Frame.run

    def run(frame: Frame) -> dict[int, torch.Tensor]:
        return {number: tensor + 1 for number, tensor in right(frame).items()}

    monkeypatch.setattr(Frame, "run", run)
    found = [check_program(seed) for seed in range(10)]
    assert any(wrong is not None and wrong.startswith("different") for wrong in found)
