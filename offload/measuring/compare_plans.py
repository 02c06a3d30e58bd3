"""Compare plans that choose among regions, whole layers or checkpoints by the time that microbatches take.

A plan's prediction counts the seconds of the device, of the link and of the host as they were measured once. A host
that is busy for a moment takes longer, and one that waits for the device now and then less long. So the plan with the
shortest prediction is followed first, and then all that may be faster take short turns, until the fastest is found.
Every plan fits the budget.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from offload.base.checks import format_s
from offload.device.backend import Backend, Event
from offload.measuring.sizes import SIMILAR
from offload.planning.plan import Plan
from offload.planning.search import Among

_logger = logging.getLogger(__name__)

UNMEASURED = 2, 1
"""So many microbatches of a plan are not measured as it is followed for the first time, where host memory is pinned and
second runs are proven; and so many whenever its turn comes again."""

MEASURED = 2
"""So many are then, before another plan's turn comes: what slows the host for a while slows all of them."""

TURNS = 4, 12
"""So many turns each plan has that may be the fastest, and so many if its microbatches differ."""

STEADY = 0.05  # microbatches do not differ if half of them take the same but for this part

DOUBT = 0.5
"""A plan counts as fast if it was measured to be slower than the fastest by no more than this part of the error. Of
such plans that one is followed which costs the host the least: checkpoints first, which PyTorch has as well."""

HOPE = 0.8  # of the seconds that it took at least, those that a plan may take in its next turn

OPTIMISM = 0.75
"""Of its prediction, the seconds that a plan may take that was not measured, if the host has so much to do; or this
part of how long another one took of its own prediction."""


class ComparePlans:
    """What microbatches take by plans of different kinds, beside what was predicted."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ratios: defaultdict[Among, list[float]] = defaultdict(list)
        """By how much longer than predicted each measured microbatch of each kind of plan was."""
        self._plans: Mapping[Among, Plan] = {}
        self._kind = Among.REGIONS
        self._left = 0  # how many microbatches of this plan are still to come before the first that is measured
        self._begin: tuple[float, Event] | None = None
        self._marks: list[tuple[float, Event, Event]] = []
        """Of each measured microbatch, how many times as many elements the plans are for, its begin and its end; of the
        one that runs, the first two are in ``_begin``."""
        self._corrected: tuple[Plan | None, float, Plan | None] = None, 1.0, None
        """A plan, by how much longer it was measured to take, and what it is with that."""
        self._elements = 0.0  # that the plans are for

    @property
    def measures(self) -> bool:
        return bool(self._plans) and not self._is_known(self._kind)

    def best(self, plans: Mapping[Among, Plan], elements: float) -> Plan:
        """The plan with the shortest step, of plans for inputs of so many elements, or one that may be. It is next."""
        self._plans, self._elements = plans, elements
        kinds = [kind for kind in reversed(Among) if kind in plans]  # of equals the first costs the host the least
        least_s = min(map(self._took_s, kinds))
        hopes_s = {kind: self._may_take_s(kind) for kind in kinds if not self._is_known(kind)}
        open_kinds = [kind for kind, hope_s in hopes_s.items() if hope_s < least_s]
        if open_kinds:
            self._kind = min(open_kinds, key=lambda kind: (len(self._ratios[kind]), hopes_s[kind]))
        else:
            fastest = min(kinds, key=self._took_s)
            self._kind = next(kind for kind in kinds if kind is fastest or self._may_be_as_fast(kind, fastest))
        self._left, self._begin, self._marks = UNMEASURED[bool(self._ratios[self._kind])], None, []
        return plans[self._kind]

    def as_measured(self, plan: Plan | None) -> Plan | None:
        """The plan that is followed, with seconds corrected by what microbatches have taken so far."""
        ratios = self._ratios[self._kind] or [*chain(*self._ratios.values())]
        if plan is None or not ratios:
            return plan
        slower = statistics.median(ratios)
        if self._corrected[0] is not plan or self._corrected[1] != slower:
            slowed = replace(plan, profile=plan.profile.slowed(slower), link=plan.link.faster(1 / slower))
            self._corrected = plan, slower, slowed
        return self._corrected[2]

    def begin_microbatch(self, elements: int, *, ready: bool) -> Plan | None:
        """A microbatch begins, and is ``ready`` if nothing is proven or measured in it: the plan to change to."""
        self._begin = None
        other = self._decide() if self.measures and len(self._marks) == MEASURED else None
        if self.measures and ready and elements >= SIMILAR * self._elements:
            self._left -= 1
            if self._left < 0:
                self._begin = self._elements / elements, self._backend.mark()
        return other

    def end_backward(self, *, ran_all: bool) -> None:
        """A backward ends, of a microbatch that ``ran_all`` layers, and alone: another one says nothing of a plan."""
        if ran_all and self._begin is not None:
            self._marks.append((*self._begin, self._backend.mark()))
        self._begin = None

    def _is_known(self, kind: Among) -> bool:
        """Whether plans of this kind have had their turns."""
        ratios, (least, most) = self._ratios[kind], TURNS
        if len(ratios) < least * MEASURED:
            return False
        low, _, high = statistics.quantiles(ratios, n=4)
        return high - low <= STEADY * low or len(ratios) >= most * MEASURED

    def _took_s(self, kind: Among) -> float:
        """The seconds of a plan by what was measured so far, if anything was.

        It is compared turn by turn with the plan that has had the most: their turns of the same number follow each
        other, and a host that is slow for some seconds slows both. Of how these differ, the middle half counts: a plan
        that is short or long now and then is neither.
        """
        turns, others = self._turns(kind), max(map(self._turns, self._ratios), key=len)
        if not turns:
            return math.inf
        differ = sorted(math.log(one / other) for one, other in zip(turns, others, strict=False))
        middle = differ[len(differ) // 4 : len(differ) - len(differ) // 4]
        return _layers_s(self._plans[kind]) * statistics.median(others) * math.exp(statistics.mean(middle))

    def _may_be_as_fast(self, kind: Among, fastest: Among) -> bool:
        """Whether the turns leave open which of a plan and the fastest is faster."""
        pairs = [*zip(self._turns(kind), self._turns(fastest), strict=False)]
        if len(pairs) < TURNS[0]:
            return False  # it lost its first turns by far
        differ = [math.log(one / other) for one, other in pairs]
        least = math.exp(statistics.median(differ) - DOUBT * error_of_median(differ))
        return _layers_s(self._plans[kind]) * least <= _layers_s(self._plans[fastest])

    def _turns(self, kind: Among) -> list[float]:
        """By how much longer than predicted the microbatches of each turn of a plan were."""
        ratios = self._ratios[kind]
        return [statistics.mean(ratios[begin : begin + MEASURED]) for begin in range(0, len(ratios), MEASURED)]

    def _may_take_s(self, kind: Among) -> float:
        """The seconds that a plan may take at least."""
        plan, ratios = self._plans[kind], self._ratios[kind]
        if len(ratios) > MEASURED:  # one turn may have come at a bad moment
            return _layers_s(plan) * HOPE * min(ratios)
        # Only the host can be faster than it was measured: what the device computes takes what it took.
        least_s = max(_layers_s(plan) * OPTIMISM, _layers_s(plan) - plan.host_s)
        return least_s * min([1.0, *chain(*self._ratios.values())])

    def _decide(self) -> Plan | None:
        """Another plan, if that is expected to take less than this one was measured to take."""
        now = self._kind
        predicted_s = _layers_s(self._plans[now])
        seconds = self._backend.seconds((begin, end) for _, begin, end in self._marks)
        scaled = [scale * one_s for (scale, *_), one_s in zip(self._marks, seconds, strict=True)]
        self._ratios[now] += [one_s / predicted_s if predicted_s > 0 else 1.0 for one_s in scaled]
        seconds_each = format_s(min(scaled)), format_s(predicted_s)
        _logger.info("a microbatch takes %s, predicted %s, by a plan among %s", *seconds_each, now.name.lower())
        best = self.best(self._plans, self._elements)
        return best if self._kind is not now else None


def _layers_s(plan: Plan) -> float:
    """The predicted seconds from the first layer's forward to the end of its backward."""
    return plan.step_s - plan.profile.other_s


def error_of_median(values: Sequence[float]) -> float:
    """The standard error of the median of values, by their quartiles, as for a normal distribution."""
    low, _, high = statistics.quantiles(values, n=4)
    return math.sqrt(math.pi / 2) * (high - low) / 1.349 / math.sqrt(len(values))
