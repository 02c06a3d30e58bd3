"""A seeded sample of random programs; ``python -m tests.outside programs`` runs more."""

import pytest
import torch

from offload.recompute.run_again import Frame

from .programs import check

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_random_programs(first: int) -> None:
    found = {seed: check(seed) for seed in range(first, first + 10)}
    assert not {seed: wrong for seed, wrong in found.items() if wrong and not wrong.startswith("skipped")}
    assert sum(wrong is None for wrong in found.values()) >= 5


@pytest.mark.parametrize("seed", [70088, 70194])
def test_fewer_tensors_behind_what_depends_on_data(seed: int) -> None:
    """The forward in which a layer is proven takes fewer experts than the one that was learned."""
    assert check(seed) is None


def test_a_wrong_recomputed_value_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Frame.run

    def run(frame: Frame) -> dict[int, torch.Tensor]:
        return {number: tensor + 1 for number, tensor in right(frame).items()}

    monkeypatch.setattr(Frame, "run", run)
    found = [check(seed) for seed in range(10)]
    assert any(wrong is not None and wrong.startswith("different") for wrong in found)
