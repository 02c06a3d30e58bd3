"""Policies under data parallelism: two ranks train the same bits with them and without."""

from typing import Any

import data_parallel_policies as worker
import pytest
from ranks import ranks_of

pytestmark = pytest.mark.slow


ranks = ranks_of(worker)


@pytest.mark.parametrize(("kind", "name"), worker.CASES)
def test_gradients_and_weights_are_the_same(kind: str, name: str, ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert found[kind, name]["different"] == []
        assert found[kind, name]["stats"].offloaded_bytes > 0
        assert found[kind, name]["stats"].late_reloads == 0


@pytest.mark.parametrize(("kind", "budget"), worker.BUDGETS)
def test_a_budget_gives_the_same_gradients(kind: str, budget: str, ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert found[kind, budget]["different"] == []
        moved = found[kind, budget]["recompute_s"] > 0 or found[kind, budget]["layers"] > 0
        assert moved is (budget != "1GiB")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_whose_lengths_vary_measure_and_plan_each_for_itself(kind: str, ranks: list[dict[Any, Any]]) -> None:
    """No rank waits for a collective that another one, which follows a plan, does not run."""
    for found in ranks:
        assert found[kind, "varying"]["different"] == []
        assert found[kind, "varying"]["states"].count("measuring") <= 5
        assert found[kind, "varying"]["states"][-1] == "following"
    assert ranks[0][kind, "varying"]["states"] != ranks[1][kind, "varying"]["states"]
    assert any(found[kind, "varying"]["moved"] for found in ranks)


@pytest.mark.parametrize(("kind", "name"), [case for case in worker.CASES if case[0] in ("fsdp", "kept", "mixed")])
def test_products_of_gathered_weights_are_regions_as_others(kind: str, name: str, ranks: list[dict[Any, Any]]) -> None:
    """A layer ends before its weights go, so what is computed from them can be proven; gathering is not recorded."""
    for found in ranks:
        assert found[kind, name]["regions"] == found["ddp", name]["regions"]
        assert found["ddp", "recompute"]["regions"]["up: addmm"] == "recompute"


def test_compiled_layers_of_gathered_weights_are_recomputed(ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert found["compiled", "products offloaded"]["regions"]["compiled forward"] == "recompute"


@pytest.mark.parametrize("kind", ["fsdp", "compiled"])
def test_gathered_weights_are_not_held(kind: str, ranks: list[dict[Any, Any]]) -> None:
    """Those of all layers would be several times what a step needs."""
    for found in ranks:
        without, treated = found[kind, None, "peak bytes"], found[kind, "recompute", "peak bytes"]
        assert treated[-1] <= 1.02 * without[-1]
