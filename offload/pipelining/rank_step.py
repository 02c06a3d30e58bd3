"""One step of a pipeline rank if compute never waits: its points in order, when each begins, and the bytes held.

Bubbles of the pipeline count as no time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from offload.pipelining.order import Action, number_chunks
from offload.pipelining.stage_profile import StageProfile
from offload.planning.profile import LayerProfile, Link
from offload.planning.simulate import Interlude
from offload.schedule.points import Point, backward, forward


class Absence(NamedTuple):
    """When a part of an activation set is not on the device, as indices into the order of points."""

    release: int
    reload: int


class RankStep:
    """One step of a rank.

    Each chunk's set is cut into ``parts``, which are the layers of an ordinary schedule: part p of the n-th chunk to
    run forward is layer ``n * parts + p``.

    Args:
        actions: What the rank runs, in order.
        profile: Stage → what a chunk of it costs.
        parts: Into how many parts each chunk's set is cut.
    """

    def __init__(self, actions: tuple[Action, ...], profile: Mapping[int, StageProfile], parts: int) -> None:
        self.parts = parts
        self.layers: list[LayerProfile] = []
        """What each layer costs: its share of the chunk's seconds, and its tensors."""
        self.nbytes: list[float] = []
        """The bytes of each layer."""
        self.steps: list[Point | Interlude] = []
        """Points, and the backwards for the weights between them."""
        self.order: list[Point] = []
        """The points alone."""
        self.start_s = [0.0]
        """When each point of the order begins, and when the last one has ended."""
        chunks = number_chunks(actions)
        costs_of = [profile[chunk.stage] for chunk in chunks]
        layers_of = {stage: _as_layers(costs, parts) for stage, costs in profile.items()}
        for chunk, costs in zip(chunks, costs_of, strict=True):
            self.layers += layers_of[chunk.stage]
            if costs.tensors:
                self.nbytes += [float(layer.saved_bytes) for layer in layers_of[chunk.stage]]
            else:
                self.nbytes += [costs.saved_bytes / parts] * parts
        self.forward_at = [0] * len(self.layers)
        """Layer → index of its forward in the order."""
        self.backward_at = [0] * len(self.layers)
        """Layer → index of its backward in the order."""
        weights_at: dict[int, int] = {}
        """Number of a chunk whose backward is split → index of the point after its half for the weights."""
        for action in actions:
            number = chunks[action.chunk]
            layers = range(number * parts, (number + 1) * parts)
            if action.kind == "W":
                weight_s = profile[action.stage].weight_s
                self.steps.append(Interlude(repr(action), weight_s))
                self.start_s[-1] += weight_s
                weights_at[number] = len(self.order)
            elif action.kind == "F":
                for layer in layers:
                    self.forward_at[layer] = self._add(forward(layer), self.layers[layer].forward_s)
            else:
                for layer in reversed(layers):
                    self.backward_at[layer] = self._add(backward(layer), self.layers[layer].backward_s)
        self._changes_without = [0.0] * len(self.start_s)
        """Index of a point → bytes that come or go before it if nothing is offloaded."""
        for layer, nbytes in enumerate(self.nbytes):
            costs = costs_of[layer // parts]
            needed = self.backward_at[layer]
            end = weights_at.get(layer // parts, needed + 1)
            self._hold(self.forward_at[layer], end, nbytes + costs.kept_bytes / parts)
            if layer // parts in weights_at:
                self._hold(needed, end, costs.weight_bytes / parts)

    def _add(self, point: Point, duration_s: float) -> int:
        self.order.append(point)
        self.steps.append(point)
        self.start_s.append(self.start_s[-1] + duration_s)
        return len(self.order) - 1

    def _hold(self, start: int, end: int, nbytes: float) -> None:
        self._changes_without[start] += nbytes
        self._changes_without[end] -= nbytes

    @property
    def duration_s(self) -> float:
        """Seconds of compute."""
        return self.start_s[-1]

    def peak_bytes(self, absent: Mapping[int, Absence]) -> float:
        """The most bytes on the device at once."""
        return max(self.resident_bytes(absent), default=0.0)

    def resident_bytes(self, absent: Mapping[int, Absence]) -> list[float]:
        """The bytes on the device while each point runs, and after the last."""
        changes = self._changes_without.copy()
        for layer, (release, reload) in absent.items():
            changes[release] -= self.nbytes[layer]
            changes[reload] += self.nbytes[layer]
        return list(accumulate(changes))

    def host_bytes(self, offloaded: Iterable[int]) -> float:
        """The most bytes on the host at once, if host memory is held from forward to backward."""
        changes = [0.0] * (len(self.order) + 1)
        for layer in offloaded:
            changes[self.forward_at[layer]] += self.nbytes[layer]
            changes[self.backward_at[layer] + 1] -= self.nbytes[layer]
        return max(accumulate(changes), default=0.0)

    def choose(
        self, link: Link, lookahead: int | None, is_enough: Callable[[dict[int, Absence]], bool]
    ) -> dict[int, Absence]:
        """Offload the longest-lived layers first, each if both copies have time beside those before, until enough.

        Args:
            link: How fast copies are.
            lookahead: Actions between a reload and its backward; as many as the copy needs, if ``None``.
            is_enough: Whether no more layers have to be offloaded.
        """
        at = zip(self.forward_at, self.backward_at, strict=True)
        lives = [(self.start_s[made + 1] - self.start_s[needed], layer) for layer, (made, needed) in enumerate(at)]
        absent: dict[int, Absence] = {}
        # All layers at once where possible, else one half after the other: one at a time is slow for 512 of them.
        groups = [[layer for _, layer in sorted(lives) if self.nbytes[layer]]]
        while groups and not is_enough(absent):
            group = groups.pop()
            trial = self._place([*absent, *group], link, lookahead)
            if trial is not None and (len(group) == 1 or not is_enough(trial)):
                absent = trial
            elif len(group) > 1:
                groups += [group[len(group) // 2 :], group[: len(group) // 2]]
        return absent

    def _place(self, layers: list[int], link: Link, lookahead: int | None) -> dict[int, Absence] | None:
        """When each of ``layers`` is absent; ``None`` if one of them has no time on the host."""
        d2h, h2d = link.rates(d2h=True, h2d=True)
        start_s, nbytes, forward_at, backward_at = self.start_s, self.nbytes, self.forward_at, self.backward_at
        release: dict[int, int] = {}
        free_s = 0.0
        """When the link has copied all before."""
        for layer in sorted(layers):
            after = forward_at[layer] + 1
            free_s = max(free_s, start_s[after])
            free_s += nbytes[layer] / d2h
            release[layer] = bisect_left(start_s, free_s, after)
        absent = {}
        free_s = self.duration_s
        """When the link has to begin with all behind."""
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
            absent[layer] = Absence(gone, reload)
        return absent

    def relax(self, absent: Mapping[int, Absence], limit_bytes: float, *, reloads: bool) -> dict[int, Absence]:
        """Release later and reload earlier, as far as ``limit_bytes`` allow: slack for copies that take longer.

        The order in which copies are queued stays. Without ``reloads``, only releases change.
        """
        relaxed = dict(absent)
        resident = self.resident_bytes(absent)

        def has_room(layer: int, index: int) -> bool:
            """Keep the layer on the device during one more point, if there is room."""
            if resident[index] + self.nbytes[layer] > limit_bytes:
                return False
            resident[index] += self.nbytes[layer]
            return True

        saved = sorted(relaxed, reverse=True)
        needed = sorted(relaxed, key=self.backward_at.__getitem__) if reloads else []
        changed = True
        while changed:
            changed = False
            latest = len(self.order)
            for layer in saved:
                release, reload = relaxed[layer]
                if release + 1 < reload and release < latest and has_room(layer, release):
                    release, changed = release + 1, True
                relaxed[layer] = Absence(release, reload)
                latest = release
            earliest = 0
            for layer in needed:
                release, reload = relaxed[layer]
                if release + 1 < reload and earliest < reload and has_room(layer, reload - 1):
                    reload, changed = reload - 1, True
                relaxed[layer] = Absence(release, reload)
                earliest = reload
        return relaxed


def _as_layers(costs: StageProfile, parts: int) -> list[LayerProfile]:
    return [
        LayerProfile(costs.forward_s / parts, costs.backward_s / parts, sum(part), part if costs.tensors else ())
        for part in costs.cut(parts)
    ]
