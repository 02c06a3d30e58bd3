"""Streamed optimizer state on two ranks: sharded parameters and replicated ones, to the last bit."""

from typing import Any

import pytest
import sharded_worker
import torch
from models import assert_same
from ranks import ranks_of
from sharded_worker import CASES, STEPS
from training import build

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


ranks = ranks_of(sharded_worker)


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_the_resident_optimizer(case: str, ranks: Found) -> None:
    for rank in ranks:
        expected, found, stats = rank[case]
        assert_same(expected, found)
        assert stats.steps == STEPS
        assert stats.host_bytes > 0
        assert (stats.backward_chunks == stats.chunks) == ("in backward" in case)
        assert (stats.resident_bytes > 0) == ("resident" in case)
        assert stats.forward_parameters == (6 * STEPS if "next forward" in case else 0)


def test_each_rank_holds_its_own_part(ranks: Found) -> None:
    for rank in ranks:
        *_, one = rank["FSDP2"]
        *_, all_of_it = rank["DDP"]
        assert one.host_bytes <= all_of_it.host_bytes / 2 + 1024


def test_steps_in_backward_are_refused_where_gradients_are_averaged_afterwards(ranks: Found) -> None:
    for rank in ranks:
        assert rank["in_backward_of_ddp"].startswith(
            "in_backward=True must not be used with DistributedDataParallel, whose ranks average gradients after"
        )


def test_sharded_gradients_are_not_clipped_after_steps_in_backward(ranks: Found) -> None:
    for rank in ranks:
        assert "gradients must be final then, but aten." in rank["clipped_after_steps"]


def test_sharded_checkpoints(ranks: Found) -> None:
    for rank in ranks:
        found = rank["checkpointed"]
        assert found["kinds"] == [("DTensor", "cpu"), ("Tensor", "cpu")]
        assert_same(found[False], found[True])


def test_whole_recipes(ranks: Found) -> None:
    for rank in ranks:
        for number, (expected, found, recipe, weights, state_bytes) in enumerate(rank["prepared"]):
            assert_same(expected, found)
            assert recipe.optimizer == ("streamed" if number % 2 else "resident")
            assert {*weights} == {"resident"}
            elements = sum(one.numel() for one in build(torch.device("cpu")).parameters())
            assert state_bytes == 8 * elements // (2 if number < 2 else 1)


def test_a_recipe_that_steps_in_backward(ranks: Found) -> None:
    for rank in ranks:
        expected, found, recipe, stats = rank["prepared_in_backward"]
        assert_same(expected, found)
        assert recipe.gradients == "consumed"
        assert stats.backward_chunks > 0


def test_remove_shards_the_state_again(ranks: Found) -> None:
    for rank in ranks:
        found = rank["removed"]
        assert found["kinds"] == {"DTensor"}
        assert_same(found["expected"], found["found"])


def test_gradients_that_are_sums_over_ranks(ranks: Found) -> None:
    for rank in ranks:
        later, found, expected, said = rank["sums_left"]
        assert_same(expected, found)
        torch.testing.assert_close(found, later)  # where PyTorch itself takes the sums
        assert len(said) == 1
