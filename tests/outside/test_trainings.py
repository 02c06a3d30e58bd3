"""A sample of ``python -m tests.outside trainings``, and what it would see."""

import pytest

from offload.device.select import get_backend
from offload.optimizer.chunks import StepWait
from tests.lab import Lab

from .trainings import check, draw

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(10, 60))]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_trainings(seed: int) -> None:
    wrong = check(seed)
    assert wrong is None or wrong.startswith("refused")


def test_there_is_one_of_each_way() -> None:
    assert {draw(seed)["way"] for seed in range(10)} == {"optimizer", "weights", "prepare"}


def test_a_missing_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    Lab(get_backend("cpu"), monkeypatch).drop(StepWait.LOADED)
    assert any((check(seed) or "").startswith("different") for seed in range(4))
