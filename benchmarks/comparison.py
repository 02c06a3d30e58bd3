"""Ways to run a model's step beside each other: what each takes, holds and copies, and whether gradients are equal."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.instruments import Row, Step, attempt, give_memory_back, metered, pinned_by_torch, timed
from benchmarks.models import Model
from offload.measuring.compare_plans import error_of_median

SETTLES, UNCHANGED = 120, 8
"""Steps until plans were compared, at most, and so many with the same plan: not timed, as training has thousands."""

PAIRS = 6
"""So many times at least steps are taken in turns with those of a rival."""

TURN_S = 0.3
"""A turn is one step, or as many short ones as take so long: what slows a host for some seconds slows both then."""

SURE = 0.01
"""More are, until the error of their ratio's median is no more than this part; a busy host makes it five times that."""


@dataclass
class Attached:
    """What a way without a handle of this library's yields."""

    step: Step  # in place of the model's
    peak_bytes: int | None = None  # where it is known already


class Way(NamedTuple):
    """One way to train, and its row of the record."""

    row: Row
    around: Callable[[], AbstractContextManager[Any]]  # in what the model is trained
    turns: bool = True  # whether the way is measured more than once
    model: Model | None = None  # another copy of the model, that the way trains
    rivals: Callable[[Row], Sequence[Row]] | None = None  # rows of ways that the way takes turns with, step by step


class Comparison:
    """The ways to train one model: each is measured by itself, and then they take turns.

    A GPU at its power limit changes its clocks from step to step, by some percent, depending on what ran before.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        *,
        settle: int = 0,  # steps of each way that come before those that are measured
        steps: int = 1,  # in a row, of which each time is the mean
        times: int = 2,  # that are taken in a turn
        least_s: float = 0.0,  # that they take at least: a host that is busy for a moment must not decide
        gradients: bool = True,  # whether the gradients of the ways are compared
    ) -> None:
        self.model, self.device, self.gradients = model, device, gradients
        self.settle, self.steps, self.times, self.least_s = settle, steps, times, least_s
        self.ways: list[Way] = []
        self._expected: dict[bool, list[torch.Tensor]] = {}
        """The gradients of layers that are left alone, and of layers that are compiled."""

    def add(
        self,
        row: Row,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        turns: bool = True,
        **more: Any,
    ) -> Row:
        """Measure a way by itself, unless its row has an error; ``more`` is of a :class:`Way`."""
        self.ways.append(Way(row, around, turns, **more))
        give_memory_back(self.device)
        attempt(row, lambda: self._measure(self.ways[-1]))
        print(row, flush=True)
        return row

    def finished(self, turns: int) -> list[Row]:
        """All rows, after so many turns of each way, the first of which it has had."""
        for turn in range(1, turns):
            for way in filter(lambda way: way.turns, reversed(self.ways) if turn % 2 else self.ways):
                attempt(way.row, lambda way=way: self._turn(way))
        for row in (way.row for way in self.ways if "error" not in way.row):
            row |= {"step_s": statistics.median(row["times_s"]), "spread_s": max(row["times_s"]) - min(row["times_s"])}
            base = next(one.row for one in self.ways if is_compiled(one.row) == is_compiled(row))
            row["ratio"] = row["step_s"] / statistics.median(base.get("times_s", [math.nan]))
        return [way.row for way in self.ways]

    @contextmanager
    def _attached(self, way: Way) -> Iterator[tuple[Any, Step, int]]:
        """The handle, the step, and how many steps were measured and compared by ``memory_budget=``."""
        with way.around() as handle:
            step = getattr(handle, "step", (way.model or self.model).step)
            measuring = 0
            while getattr(handle, "state", "") == "measuring" and measuring < 10:
                step()
                measuring += 1
            if measuring and handle.plan is not None:
                way.row.setdefault("first_predicted_s", handle.plan.step_s)  # before any step of it was timed
            plans: list[Any] = []
            while measuring and len(plans) < SETTLES and plans[-UNCHANGED:].count(handle.plan) < UNCHANGED:
                plans.append(handle.plan)
                step()
            yield handle, step, measuring

    def _measure(self, way: Way) -> None:
        """First times, peak, copies, what is pinned, and whether gradients are those of the first way."""
        row = way.row
        with (
            warnings.catch_warnings(record=True, action="always") as caught,
            self._attached(way) as (handle, step, measuring),
        ):
            row["first_s"] = timed(step, self.device)
            for _ in range(self.settle):
                step()
            stats = getattr(handle, "stats", None)
            before = stats and stats()
            peak_bytes, _ = metered(step, self.device)
            after = stats and stats()
            if self.settle:  # two short steps tell more than one
                peak_bytes = max(peak_bytes, metered(step, self.device)[0])
            row["peak_bytes"] = getattr(handle, "peak_bytes", None) or peak_bytes
            row["pinned_bytes"] = after.pinned_bytes if after else pinned_by_torch(self.device)
            if after:
                row["copied_bytes"] = after.offloaded_bytes - before.offloaded_bytes
            row["times_s"] = self._times_s(step)
            row["step_s"] = statistics.median(row["times_s"])
            if plan := getattr(handle, "plan", None):
                row |= {"predicted_s": plan.step_s, "predicted_peak_bytes": plan.peak_bytes}
                row |= {"recompute_s": plan.recompute_s, "host_bytes": plan.host_bytes, "measuring_steps": measuring}
            rivals = way.rivals(row) if way.rivals is not None else ()
            row |= {"beside": [self._beside(step, one) for one in self.ways if one.row in rivals]} if rivals else {}
            # Last: other kernels may need more memory for once, after which a budget is planned anew.
            row |= self.same_bits(way, step) if self.gradients else {}
        texts = [
            str(one.message).partition("\n")[0] for one in caught if "memory" in str(one) or "offload" in one.filename
        ]
        row |= {"warnings": texts} if texts else {}

    def _turn(self, way: Way) -> None:
        with warnings.catch_warnings(action="ignore"), self._attached(way) as (_, step, _):
            step()
            way.row["times_s"] += self._times_s(step)

    def _beside(self, step: Step, rival: Way) -> Row:
        """A rival's row, and the seconds of steps of both in turns: what slows the host slows both."""
        pairs: list[tuple[float, float]] = []
        ratios: list[float] = []
        with warnings.catch_warnings(action="ignore"), self._attached(rival) as (_, other, _):
            for _ in range(2):  # whatever attached the rival may have had all code compiled again
                other()
                step()
            steps = max(1, min(self.steps, round(TURN_S / rival.row["step_s"])))
            begin, passed_s = time.perf_counter(), 0.0
            while (
                len(pairs) < PAIRS
                or passed_s < 2 * self.least_s
                or (passed_s < 20 * self.least_s and error_of_median(ratios) > SURE)
            ):
                pairs.append((timed(step, self.device, steps), timed(other, self.device, steps)))
                ratios.append(pairs[-1][0] / pairs[-1][1])
                passed_s = time.perf_counter() - begin
        own_s, other_s = map(list, zip(*pairs, strict=True))
        found = {key: value for key, value in rival.row.items() if key in ("what", "layers", "peak_bytes")}
        found |= {"step_s": statistics.median(other_s), "ratio": statistics.median(ratios)}
        return found | {"own_s": own_s, "times_s": other_s}

    def _times_s(self, step: Step) -> list[float]:
        times: list[float] = []
        while len(times) < self.times or self.steps * sum(times) < self.least_s:
            times.append(timed(step, self.device, self.steps))
        return times

    def same_bits(self, way: Way, step: Step) -> Row:
        """Whether gradients are those of layers left alone, or compiled; and how far they are from those at most."""

        def seeded() -> None:
            torch.manual_seed(1)
            step()

        try:
            found = (way.model or self.model).gradients(seeded)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            print(f"no deterministic kernels: {str(error)[:80]}")
            return {"bit_identical": None}
        expected = self._expected.setdefault(is_compiled(way.row), [])
        if not expected:
            expected += [gradient.clone() for gradient in found]
        same = all(map(torch.equal, expected, found))
        distance = sum(float((one - other).float().square().sum()) for one, other in zip(expected, found, strict=True))
        length = sum(float(one.float().square().sum()) for one in expected)
        return {"bit_identical": same, "gradients_apart": math.sqrt(distance / length) if length else 0.0}


def is_compiled(row: Row) -> bool:
    """Whether the layers are compiled, by the row's name."""
    return str(row.get("what", "")).startswith("compiled")
