"""A pipeline rank's step as the derivation sees it: its points in order, and when each begins.

Compute never waits here; bubbles count as no time. What is placed on the walk are stays: the point before which a
part of an activation set has gone to the host, and the one before which its copy back is queued.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from offload.planning.link import Link
from offload.planning.pipeline_order import Action, Chunk
from offload.planning.profile import LayerProfile, StageProfile
from offload.schedule.points import Point, backward, forward


class Stay(NamedTuple):
    """A part's time on the host, as indices into the order of points."""

    release: int
    reload: int


class Walk:
    """A rank's step: its points in order, and when each begins if compute never waits."""

    def __init__(self, actions: tuple[Action, ...], profile: Mapping[int, StageProfile], parts: int) -> None:
        chunks = number_chunks(actions)
        self.parts = parts
        self.duration_s = 0.0
        self.order: list[Point] = []
        self.start_s: list[float] = []
        """When each point of the order begins."""
        # Layers are the parts of all chunks, numbered in the order of forwards.
        stages = [profile[chunk.stage] for chunk in chunks for _ in range(parts)]
        self.nbytes = [stage.saved_bytes / parts for stage in stages]
        self.forward_at = [0] * len(stages)
        """Layer → index of its forward in the order."""
        self.backward_at = [0] * len(stages)
        """Layer → index of its backward in the order."""
        self.simulated_order: list[Point] = []
        """The order with each backward for the weights as a layer of its own, which saves nothing."""
        self.simulated_costs = [
            LayerProfile(stage.forward_s / parts, stage.backward_s / parts, round(stage.saved_bytes / parts))
            for stage in stages
        ]
        freed_at = [0] * len(stages)
        for action in actions:
            stage = profile[action.stage]
            first = chunks[action.chunk] * parts
            layers = range(first, first + parts)
            if action.kind == "F":
                for layer in layers:
                    self.forward_at[layer] = self._add(forward(layer), stage.forward_s / parts)
            elif action.kind == "W":
                self._add_weights(stage.weight_s)
                for layer in layers:
                    freed_at[layer] = len(self.order)
            else:
                for layer in reversed(layers):
                    self.backward_at[layer] = self._add(backward(layer), stage.backward_s / parts)
                    freed_at[layer] = len(self.order)
        starts_s = [*self.start_s, self.duration_s]
        self._saved_s = [starts_s[index + 1] for index in self.forward_at]
        """Layer → when its forward ends."""
        self._backward_s = [starts_s[index] for index in self.backward_at]
        """Layer → when its backward begins."""
        self._changes_without = [0.0] * len(starts_s)
        """Point → bytes that come or go before it if nothing moves."""
        for nbytes, made, freed in zip(self.nbytes, self.forward_at, freed_at, strict=True):
            self._changes_without[made] += nbytes
            self._changes_without[freed] -= nbytes

    def _add(self, point: Point, duration_s: float) -> int:
        self.order.append(point)
        self.simulated_order.append(point)
        self.start_s.append(self.duration_s)
        self.duration_s += duration_s
        return len(self.order) - 1

    def _add_weights(self, duration_s: float) -> None:
        self.duration_s += duration_s
        if duration_s:
            layer = len(self.simulated_costs)
            self.simulated_order += [forward(layer), backward(layer)]
            self.simulated_costs.append(LayerProfile(duration_s, 0.0, 0))

    def choose(
        self,
        link: Link,
        lookahead: int | None,
        is_enough: Callable[[dict[int, Stay]], bool],
    ) -> dict[int, Stay]:
        """The longest-lived parts first, each if there is time for it beside those before, until it is enough.

        They are tried in blocks: if many fit, none of them needs a look of its own.
        """
        placed: dict[int, Stay] = {}
        candidates = sorted(
            (layer for layer, nbytes in enumerate(self.nbytes) if nbytes),
            key=lambda layer: (self._saved_s[layer] - self._backward_s[layer], layer),
        )
        block = len(candidates)
        done = is_enough(placed)
        while candidates and not done:
            trial = self._place([*placed, *candidates[:block]], link, lookahead)
            reached = trial is not None and is_enough(trial)
            if block > 1 and (trial is None or reached):
                block //= 2
                continue
            if trial is not None:
                placed, done = trial, reached
            candidates = candidates[block:]
            block = max(1, min(2 * block, len(candidates)))
        return placed

    def relax(self, placed: Mapping[int, Stay], limit_bytes: float, *, reloads: bool) -> dict[int, Stay]:
        """Let go later and reload earlier, as far as ``limit_bytes`` allow: slack for copies that take longer.

        The order in which copies are queued stays. Without ``reloads``, only the releases move.
        """
        relaxed = dict(placed)
        resident = self.resident_bytes(placed)
        saved = sorted(relaxed, reverse=True)
        needed = sorted(relaxed, key=self.backward_at.__getitem__)
        moved = True
        while moved:
            moved = False
            latest = len(self.order)
            for layer in saved:
                release, reload = relaxed[layer]
                room = resident[release] + self.nbytes[layer] <= limit_bytes
                if room and release + 1 < reload and release + 1 <= latest:
                    resident[release] += self.nbytes[layer]
                    release += 1
                    relaxed[layer] = Stay(release, reload)
                    moved = True
                latest = release
            earliest = 0
            for layer in needed if reloads else ():
                release, reload = relaxed[layer]
                room = resident[reload - 1] + self.nbytes[layer] <= limit_bytes
                if room and release < reload - 1 and earliest <= reload - 1:
                    reload -= 1
                    resident[reload] += self.nbytes[layer]
                    relaxed[layer] = Stay(release, reload)
                    moved = True
                earliest = reload
        return relaxed

    def peak_bytes(self, placed: Mapping[int, Stay]) -> float:
        """The most bytes on the device at once."""
        return max(self.resident_bytes(placed), default=0.0)

    def resident_bytes(self, placed: Mapping[int, Stay]) -> list[float]:
        """The bytes on the device while each point runs, and after the last."""
        changes = self._changes_without.copy()
        for layer, (release, reload) in placed.items():
            changes[release] -= self.nbytes[layer]
            changes[reload] += self.nbytes[layer]
        return list(accumulate(changes))

    def host_bytes(self, placed: Iterable[int]) -> float:
        """The most bytes on the host at once, if host memory is held from forward to backward."""
        changes = [0.0] * (len(self.order) + 1)
        for layer in placed:
            changes[self.forward_at[layer]] += self.nbytes[layer]
            changes[self.backward_at[layer] + 1] -= self.nbytes[layer]
        return max(accumulate(changes), default=0.0)

    def _place(self, layers: list[int], link: Link, lookahead: int | None) -> dict[int, Stay] | None:
        """When each of ``layers`` goes and comes back; ``None`` if one of them would not get to the host at all."""
        d2h, h2d = link.rates(d2h=True, h2d=True)
        start_s, nbytes = self.start_s, self.nbytes
        release: dict[int, int] = {}
        free_s = 0.0
        for layer in sorted(layers):
            free_s = max(free_s, self._saved_s[layer]) + nbytes[layer] / d2h
            release[layer] = max(bisect_left(start_s, free_s), self.forward_at[layer] + 1)
        placed = {}
        free_s = self.duration_s
        for layer in sorted(layers, key=self.backward_at.__getitem__, reverse=True):
            needed = self.backward_at[layer]
            free_s = min(free_s, start_s[needed]) - nbytes[layer] / h2d
            if lookahead is None:
                reload = min(bisect_right(start_s, free_s) - 1, needed)
            else:
                reload = max(needed - lookahead * self.parts, release[layer] + 1)
            if not release[layer] < reload <= needed:
                return None
            placed[layer] = Stay(release[layer], reload)
        return placed


def number_chunks(actions: Iterable[Action]) -> dict[Chunk, int]:
    """Each chunk's number in the order of forwards."""
    forwards = [action.chunk for action in actions if action.kind == "F"]
    return {chunk: number for number, chunk in enumerate(forwards)}
