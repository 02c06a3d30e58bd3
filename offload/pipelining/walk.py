"""A pipeline rank's step as the derivation sees it: its points in order, and when each begins.

Compute never waits here; bubbles count as no time. What is placed on the walk are stays: the point before which a
part of an activation set has gone to the host, and the one before which its copy back is queued.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from offload.pipelining.order import Action, number_chunks
from offload.pipelining.stage_profile import StageProfile
from offload.planning.link import Link
from offload.planning.profile import LayerProfile
from offload.planning.simulate import Interlude
from offload.schedule.points import Point, backward, forward


class Stay(NamedTuple):
    """A part's time on the host, as indices into the order of points."""

    release: int
    reload: int


class Walk:
    """A rank's step: what it runs in order, and when each point begins if compute never waits."""

    def __init__(self, actions: tuple[Action, ...], profile: Mapping[int, StageProfile], parts: int) -> None:
        chunks = number_chunks(actions)
        # Layers are the parts of all chunks, numbered in the order of forwards.
        stages = [profile[chunk.stage] for chunk in chunks for _ in range(parts)]
        layers_of = {stage: _parts_as_layers(costs, parts) for stage, costs in profile.items()}
        self.parts = parts
        self.layers = [layer for chunk in chunks for layer in layers_of[chunk.stage]]
        self.nbytes = [
            float(layer.saved_bytes) if stage.tensors else stage.saved_bytes / parts
            for stage, layer in zip(stages, self.layers, strict=True)
        ]
        self.steps: list[Point | Interlude] = []
        """Points, and the backwards for the weights between them."""
        self.order: list[Point] = []
        """The points alone."""
        self.start_s = [0.0]
        """When each point of the order begins, and when the last one has ended."""
        self.forward_at = [0] * len(stages)
        """Layer → index of its forward in the order."""
        self.backward_at = [0] * len(stages)
        """Layer → index of its backward in the order."""
        freed_at = [0] * len(stages)
        held_at: list[tuple[int, float]] = []
        """(Index of a point, bytes beside the sets that are held from there on, or no longer)."""
        for action in actions:
            first = chunks[action.chunk] * parts
            layers = range(first, first + parts)
            if action.kind == "W":
                weight_s = profile[action.stage].weight_s
                self.steps.append(Interlude(repr(action), weight_s))
                self.start_s[-1] += weight_s
            for layer in layers if action.kind == "F" else reversed(layers):
                if action.kind == "F":
                    self.forward_at[layer] = self._add(forward(layer), self.layers[layer].forward_s)
                elif action.kind != "W":
                    self.backward_at[layer] = self._add(backward(layer), self.layers[layer].backward_s)
                freed_at[layer] = len(self.order)  # the chunk's last action overwrites what earlier ones say
            weight_bytes = profile[action.stage].weight_bytes
            if action.kind == "I":
                held_at += [(self.backward_at[layer], weight_bytes / parts) for layer in layers]
            elif action.kind == "W":
                held_at.append((len(self.order), -weight_bytes))
        self._changes_without = [0.0] * len(self.start_s)
        """Point → bytes that come or go before it if nothing moves."""
        for stage, saved, made, freed in zip(stages, self.nbytes, self.forward_at, freed_at, strict=True):
            self._changes_without[made] += saved + stage.kept_bytes / parts
            self._changes_without[freed] -= saved + stage.kept_bytes / parts
        for index, change in held_at:
            self._changes_without[index] += change

    def _add(self, point: Point, duration_s: float) -> int:
        self.order.append(point)
        self.steps.append(point)
        self.start_s.append(self.start_s[-1] + duration_s)
        return len(self.order) - 1

    @property
    def duration_s(self) -> float:
        """Seconds of compute."""
        return self.start_s[-1]

    def choose(
        self, link: Link, lookahead: int | None, is_enough: Callable[[dict[int, Stay]], bool]
    ) -> dict[int, Stay]:
        """The longest-lived parts first, each if there is time for it beside those before, until it is enough."""
        placed: dict[int, Stay] = {}

        def add(parts: list[int]) -> None:
            """All of them at once where that goes and none is too many, else one half after the other."""
            nonlocal placed
            if not parts or is_enough(placed):
                return
            trial = self._place([*placed, *parts], link, lookahead)
            if trial is not None and (len(parts) == 1 or not is_enough(trial)):
                placed = trial
            elif len(parts) > 1:
                middle = len(parts) // 2
                add(parts[:middle])
                add(parts[middle:])

        at = zip(self.forward_at, self.backward_at, strict=True)
        lives = [(self.start_s[made + 1] - self.start_s[needed], layer) for layer, (made, needed) in enumerate(at)]
        add([layer for _, layer in sorted(lives) if self.nbytes[layer]])
        return placed

    def relax(self, placed: Mapping[int, Stay], limit_bytes: float, *, reloads: bool) -> dict[int, Stay]:
        """Let go later and reload earlier, as far as ``limit_bytes`` allow: slack for copies that take longer.

        The order in which copies are queued stays. Without ``reloads``, only the releases move.
        """
        relaxed = dict(placed)
        resident = self.resident_bytes(placed)

        def holds_more(layer: int, index: int) -> bool:
            """Keep the part on the device for one more point, if there is room."""
            if resident[index] + self.nbytes[layer] > limit_bytes:
                return False
            resident[index] += self.nbytes[layer]
            return True

        saved = sorted(relaxed, reverse=True)
        needed = sorted(relaxed, key=self.backward_at.__getitem__)
        moved = True
        while moved:
            moved = False
            latest = len(self.order)
            for layer in saved:
                release, reload = relaxed[layer]
                if release + 1 < reload and release < latest and holds_more(layer, release):
                    release, moved = release + 1, True
                relaxed[layer] = Stay(release, reload)
                latest = release
            earliest = 0
            for layer in needed if reloads else ():
                release, reload = relaxed[layer]
                if release + 1 < reload and earliest < reload and holds_more(layer, reload - 1):
                    reload, moved = reload - 1, True
                relaxed[layer] = Stay(release, reload)
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
        start_s, nbytes, forward_at, backward_at = self.start_s, self.nbytes, self.forward_at, self.backward_at
        release: dict[int, int] = {}
        free_s = 0.0
        for layer in sorted(layers):
            after = forward_at[layer] + 1
            free_s = max(free_s, start_s[after])
            free_s += nbytes[layer] / d2h
            release[layer] = bisect_left(start_s, free_s, after)
        placed = {}
        free_s = self.duration_s
        for layer in sorted(layers, key=backward_at.__getitem__, reverse=True):
            needed, gone = backward_at[layer], release[layer]
            free_s = min(free_s, start_s[needed])
            free_s -= nbytes[layer] / h2d
            if lookahead is None:
                reload = min(bisect_right(start_s, free_s) - 1, needed)
            else:
                reload = max(needed - lookahead * self.parts, gone + 1)
            if not gone < reload <= needed:
                return None
            placed[layer] = Stay(gone, reload)
        return placed


def _parts_as_layers(stage: StageProfile, parts: int) -> list[LayerProfile]:
    """The parts that a chunk's set is cut into, each with its share of the chunk's seconds."""
    return [
        LayerProfile(stage.forward_s / parts, stage.backward_s / parts, sum(part), part if stage.tensors else ())
        for part in stage.cut(parts)
    ]
