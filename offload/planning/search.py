"""The fastest choice within the memory that a limited search finds.

More that stays on the device is never slower. So of the three numbers that make a choice, the last is found by
bisection, and the other two on a coarse grid and then in ever smaller steps from its best points. In the end single
layers change their rungs. The corners, where all is kept, travels or is computed again, are looked at in any case. Of a
small model all choices are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from offload.planning.choices import Choice, Choices

FEW = 2000
"""So many choices are all looked at."""

GRID = 12
"""Into how many parts the grid divides the range of each number."""

STARTS = 2
"""From how many points of the grid the search goes on."""

MOVES = 24
"""How often it goes on from each, or takes smaller steps."""

SWEEPS = 3
"""How often each layer is tried on other rungs."""

SWEPT = 64
"""How many layers have, in all, the choices with which that begins."""

ROUNDING = 1e-8
"""How far a step that never waits may be from the sum of what it computes."""

Place = tuple[int, int]
"""The first two numbers of a choice: how many layers travel, and the position of those."""


class Score(NamedTuple):
    """What a choice comes to; the least is the best."""

    step_s: float
    """Rounded, so that of equally fast ones that is best of which the fewest bytes travel."""
    host_bytes: int
    peak_bytes: int


Found = tuple[Score, Choice]


class Search:
    """A search among the choices.

    Args:
        choices: For a profile and a link.
        most_bytes: That may be on the device.
        most_host_bytes: That may be on the host.
    """

    def __init__(self, choices: Choices, most_bytes: int, most_host_bytes: float = math.inf) -> None:
        self.choices = choices
        self.most_bytes = most_bytes
        self.most_host_bytes = most_host_bytes
        self._known: dict[Place, Found | None] = {}
        """The best choice of each place, if one fits."""

    def best(self) -> Choice | None:
        """The best choice that was found; ``None`` if the least peak does not fit."""
        nothing = self.choices.of(0, 0, self.choices.highest)
        if self._fits(nothing):
            return nothing
        found = [*self._fitting(self._corners())]
        if not found:
            least, choice = self.least_peak()
            if least > self.most_bytes:
                return None
            found = [self._scored(choice)]
        if self.choices.count * math.prod(map(self.choices.rungs_of, range(self.choices.count))) <= FEW:
            found += self._fitting(self._every())
            return min(found, key=_score)[1]
        found += self._on_grid()
        best = min(found, key=_score)
        if best[0].step_s <= self.choices.profile.compute_s * (1 + ROUNDING):
            return best[1]  # nothing is computed again or waited for
        # The best for each number of layers that travel, since single layers on other rungs do not change that.
        fastest = {choice.num_layers: (score, choice) for score, choice in sorted(found, key=_score, reverse=True)}
        starts = sorted(fastest.values(), key=_score)[: max(1, SWEPT // self.choices.count)]
        return min(map(self._swept, starts), key=_score)[1]

    def may_beat(self, step_s: float) -> bool:
        """Whether a step with everything kept computes for less time than a step that was found."""
        return not self._slower(self.choices.of(0, 0, self.choices.highest), step_s)

    def fewest(self) -> Choice | None:
        """The choice with the fewest layers that travel, all that they save; ``None`` if none fits."""
        highest = self.choices.highest
        every = (self.choices.of(num_layers, highest, highest) for num_layers in range(self.choices.most + 1))
        return next((choice for choice in every if self._fits(choice)), None)

    def least_peak(self) -> tuple[int, Choice]:
        """The least peak that is known: that of a corner with single layers on other rungs, and the choice."""
        corners = ((self.choices.peak_bytes(choice), choice) for choice in self._corners() if self._fits_host(choice))
        least, best = min(corners, key=lambda pair: pair[0])
        for number in range(self.choices.count):
            for rung in range(self.choices.rungs_of(number)):
                tried = _on_rung(best, number, rung)
                if self._fits_host(tried) and self.choices.peak_bytes(tried) < least:
                    least, best = self.choices.peak_bytes(tried), tried
        return least, best

    def _every(self) -> Iterator[Choice]:
        rungs = [range(self.choices.rungs_of(number)) for number in range(self.choices.count)]
        return (Choice(*made) for made in product(range(self.choices.most + 1), product(*rungs)))

    def _corners(self) -> Iterator[Choice]:
        ends = sorted({0, self.choices.highest})
        for num_layers in range(self.choices.most + 1):
            for travelling, staying in product(ends if num_layers else ends[:1], ends):
                yield self.choices.of(num_layers, travelling, staying)

    def _fits_host(self, choice: Choice) -> bool:
        return self.choices.host_bytes(choice) <= self.most_host_bytes

    def _fits_device(self, choice: Choice) -> bool:
        return self.choices.peak_bytes(choice) <= self.most_bytes

    def _fits(self, choice: Choice) -> bool:
        return self._fits_host(choice) and self._fits_device(choice)

    def _scored(self, choice: Choice) -> Found:
        choices = self.choices
        step_s = float(f"{choices.step_s(choice):.9g}")
        return Score(step_s, choices.host_bytes(choice), choices.peak_bytes(choice)), choice

    def _slower(self, tried: Choice, step_s: float) -> bool:
        """Whether computing alone takes longer than a step that was found."""
        return self.choices.compute_s(tried) > step_s * (1 + ROUNDING)

    def _fitting(self, tried: Iterable[Choice]) -> Iterator[Found]:
        return (self._scored(choice) for choice in tried if self._fits(choice))

    def _on_grid(self) -> Iterable[Found]:
        """What was found on the grid and on the walks from its best points."""
        steps = (1 + (self.choices.count - 1) // GRID, 1 + self.choices.highest // GRID)
        ranges = (range(0, self.choices.most + 1, steps[0]), range(0, self.choices.highest + 1, steps[1]))
        grid = [(pair, place) for place in product(*ranges) if (pair := self._at(place))]
        for pair, place in sorted(grid, key=lambda entry: entry[0][0])[:STARTS]:
            self._walk(pair, place, steps)
        return filter(None, self._known.values())

    def _at(self, place: Place) -> Found | None:
        """The best choice of a place: of the layers that do not travel, as much is kept as fits."""
        if place not in self._known:
            self._known[place] = self._most_kept(place)
        return self._known[place]

    def _most_kept(self, place: Place) -> Found | None:
        of, fit, misfit = self.choices.of, 0, self.choices.highest
        if not self._fits_host(of(*place, fit)):
            return None
        if self._fits_device(of(*place, misfit)):
            return self._scored(of(*place, misfit))
        if not self._fits_device(of(*place, fit)):
            return None
        while misfit - fit > 1:
            middle = (fit + misfit) // 2
            if self._fits_device(of(*place, middle)):
                fit = middle
            else:
                misfit = middle
        return self._scored(of(*place, fit))

    def _walk(self, best: Found, place: Place, steps: Place) -> None:
        """Go from a place to better ones nearby, until no smaller step finds one."""
        for _ in range(MOVES):
            around = (
                (place[0] + steps[0] * by[0], place[1] + steps[1] * by[1]) for by in product((-1, 0, 1), repeat=2)
            )
            inside = [one for one in around if 0 <= one[0] <= self.choices.most and 0 <= one[1] <= self.choices.highest]
            found = [(pair, one) for one in inside if (pair := self._at(one))]
            pair, there = min(found, key=lambda entry: entry[0][0])
            if pair[0] < best[0]:
                best, place = pair, there
            elif steps == (1, 1):
                break
            else:
                steps = (-(-steps[0] // 2), -(-steps[1] // 2))

    def _swept(self, best: Found) -> Found:
        """With single layers on other rungs, as long as that is better."""
        for _ in range(SWEEPS):
            before = best
            for number in reversed(range(self.choices.count)):
                for rung in range(self.choices.rungs_of(number)):
                    _, choice = best
                    if rung < choice.rungs[number] and number >= choice.num_layers:
                        continue  # what keeps less takes longer, unless less has to travel
                    tried = _on_rung(choice, number, rung)
                    if rung == choice.rungs[number] or self._slower(tried, best[0].step_s):
                        continue
                    if self._fits(tried):
                        best = min(best, self._scored(tried), key=_score)
            if best is before:
                break
        return best


def _score(found: Found) -> Score:
    return found[0]


def _on_rung(choice: Choice, number: int, rung: int) -> Choice:
    """The choice with one layer on another rung."""
    return replace(choice, rungs=(*choice.rungs[:number], rung, *choice.rungs[number + 1 :]))
