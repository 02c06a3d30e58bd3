"""The search for the longest sequence that trains: lengths are planned, and the longest with a plan is trained on."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.longest_training import Search
from offload.activations.stats import OffloadStats

GRAIN = 4
REFUSED = "memory_budget = 1 MiB cannot be met: 90% of the tokens would fit, or with 9 GiB of host memory. Give more."


@dataclass
class Training:
    """Stands for the model: a token takes a byte on the device; more than ``most`` tokens are refused."""

    most: int
    fails_from: int = 1 << 30  # a step of so many tokens runs out of memory
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grain: int = GRAIN
    optimizer: Any = field(default_factory=lambda: SimpleNamespace(zero_grad=lambda: None))
    steps: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)

    def step(self, tokens: int) -> float:
        self.steps.append(tokens)
        if tokens >= self.fails_from:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return float(torch.ones(tokens, dtype=torch.uint8)[0])

    def refusal(self, tokens: int) -> str | None:
        self.planned.append(tokens)
        return REFUSED if tokens > self.most else None

    def left_out_s(self, tokens: int) -> float:
        return 1000.0 * tokens


class Prepared:
    """Stands for the handle of a training with 1,000 bytes for activations."""

    plan = SimpleNamespace(fits=True)
    activations: Any = plan

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def device_bytes(self) -> int:
        return 1000

    def host_bytes(self) -> int:
        return 1000

    def stats(self) -> dict[str, OffloadStats]:
        return {"activations": OffloadStats()}


def rows_of(training: Training, seconds: float = 60.0) -> list[dict[str, Any]]:
    return list(Search(training, Prepared, seconds).rows())


def test_trains_on_the_longest_with_a_plan_and_on_no_other_long_one() -> None:
    training = Training(most=905)
    first, row = rows_of(training)
    assert (row["longest_tokens"], row["shortest_failed_tokens"]) == (904, 908)
    assert training.steps[-2:] == [904, 904]
    assert max(training.steps[:-2]) < 0.9 * 904
    assert (row["said"], row["binds"]) == (REFUSED, "device and host")
    assert len(first["times_s"]) == 1
    assert len(row["times_s"]) == 2
    assert 904_000 < row["step_s"] < 904_060
    assert row["whole"] is False


def test_trains_once_if_the_time_is_over() -> None:
    [row] = rows_of(Training(most=905), seconds=0.0)
    assert row["longest_tokens"] == 904


def test_tries_shorter_ones_after_a_step_that_ran_out_of_memory() -> None:
    training = Training(most=905, fails_from=890)
    *_, row = rows_of(training)
    assert (row["longest_tokens"], row["shortest_failed_tokens"]) == (884, 904)
    assert row["said"] == "OutOfMemoryError: CUDA out of memory"
    assert row["binds"] == "device"


def test_names_the_shortest_that_has_no_plan_also_after_a_step_that_ran_out_of_memory() -> None:
    class Sobered(Training):
        def step(self, tokens: int) -> float:
            if tokens >= self.fails_from:
                self.most = 800  # of another handle
            return super().step(tokens)

    *_, row = rows_of(Sobered(most=905, fails_from=890))
    assert (row["longest_tokens"], row["shortest_failed_tokens"]) == (800, 804)
    assert (row["said"], row["binds"]) == (REFUSED, "device and host")


def test_an_error_of_a_short_step_is_raised() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        rows_of(Training(most=905, fails_from=9))


def test_a_length_that_would_be_measured_before_it_has_a_plan_is_not_trained_on() -> None:
    training = Training(most=905)
    prepared = Prepared()
    prepared.activations = None  # as while a length is measured, which was given up instead
    *_, row = Search(training, lambda: prepared, 60.0).rows()
    assert row["longest_tokens"] == max(training.steps) < 905
    assert row["said"] == "may be too much, and would be measured"


def test_no_longer_one_is_known_where_all_have_a_plan() -> None:
    row = rows_of(Training(most=1 << 20))[-1]
    assert row["shortest_failed_tokens"] is None
    assert row["longest_tokens"] > 1000
