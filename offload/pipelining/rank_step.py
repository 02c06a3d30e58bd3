"""One step of a pipeline rank: its costs, its points in order, when each begins if compute never waits, its memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from offload.base.checks import check_number
from offload.pipelining.order import Action, number_chunks
from offload.planning.profile import LayerProfile, Link
from offload.planning.simulate import Interlude
from offload.schedule.points import Point, backward, forward

Absent = dict[int, tuple[int, int]]  # offloaded part → indices of the points of its release and its reload


@dataclass(frozen=True)
class StageProfile:
    """What one chunk of a stage costs. By default, a backward takes two forwards.

    Args:
        forward_s: Compute seconds of its forward.
        backward_s: Compute seconds of its backward, or of the half for the inputs.
        weight_s: Compute seconds of the half for the weights, where the schedule splits the backward.
        saved_bytes: Bytes of its activation set that may be offloaded.
        tensors: The bytes of each tensor of the set in the order of saving; any size if left out.
        weight_bytes: Bytes beside the set that the half for the inputs leaves for the half for the weights.
        kept_bytes: Bytes beside the set that are kept until backward.
        layers: How many of the tensors each layer saves, if each layer is a part; else parts are equal shares.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_s: float = 0.0
    saved_bytes: int = 1
    tensors: tuple[int, ...] = ()
    weight_bytes: int = 0
    kept_bytes: int = 0
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        vars(self).update(tensors=tuple(self.tensors), layers=tuple(self.layers))
        for name, value in vars(self).items():
            for one in value if isinstance(value, tuple) else (value,):
                check_number(name, one)
        if self.tensors and sum(self.tensors) != self.saved_bytes:
            raise ValueError(f"tensors must add up to saved_bytes = {self.saved_bytes}, got {sum(self.tensors)}")

    def cut(self, parts: int) -> list[LayerProfile]:
        """Cut the set into parts: layers, or about equal sizes, where a part ends with the tensor that fills it."""
        found: list[list[int]] = [[] for _ in range(parts)]
        so_far = accumulate(self.tensors, initial=0)
        filled = [min(nbytes * parts // (self.saved_bytes or 1), parts - 1) for nbytes in so_far]
        own = [part for part, count in enumerate(self.layers) for _ in range(count)]
        for nbytes, part in zip(self.tensors, own or filled, strict=False):
            found[part].append(nbytes)
        sizes = [sum(part) for part in found] if self.tensors else _shares(self.saved_bytes, parts)
        seconds = self.forward_s / parts, self.backward_s / parts
        return [LayerProfile(*seconds, nbytes, tuple(part)) for nbytes, part in zip(sizes, found, strict=True)]


def _shares(nbytes: int, parts: int) -> list[int]:
    return [end - start for start, end in pairwise(nbytes * part // parts for part in range(parts + 1))]


class RankStep:
    """One step of a rank, whose chunks' sets are cut into ``parts``, the layers of an ordinary schedule.

    Part p of the n-th chunk to run forward is layer ``n * parts + p``. Bubbles of the pipeline count as no time.
    """

    def __init__(self, actions: tuple[Action, ...], profile: Mapping[int, StageProfile], parts: int) -> None:
        chunks = number_chunks(actions)
        cut = {stage: costs.cut(parts) for stage, costs in profile.items()}
        self.layers = [layer for chunk in chunks for layer in cut[chunk.stage]]
        self.nbytes = [layer.saved_bytes for layer in self.layers]
        self.steps: list[Point | Interlude] = []  # points, and the backwards for the weights between them
        self.order: list[Point] = []  # the points alone
        self.start_s = [0.0]  # when each point of the order begins, and when the last one has ended
        self.forward_at = [0] * len(self.layers)  # layer → index of its forward in the order
        self.backward_at = [0] * len(self.layers)
        weights_at: dict[int, int] = {}  # number of a chunk → index of the point after its half for weights
        for action in actions:
            number = chunks[action.chunk]
            if action.kind == "W":
                weight_s = profile[action.stage].weight_s
                self.steps.append(Interlude(repr(action), weight_s))
                self.start_s[-1] += weight_s
                weights_at[number] = len(self.order)
                continue
            runs_forward = action.kind == "F"
            for layer in range(number * parts, (number + 1) * parts)[:: 1 if runs_forward else -1]:
                costs = self.layers[layer]
                (self.forward_at if runs_forward else self.backward_at)[layer] = len(self.order)
                self.order.append(forward(layer) if runs_forward else backward(layer))
                self.steps.append(self.order[-1])
                self.start_s.append(self.start_s[-1] + (costs.forward_s if runs_forward else costs.backward_s))
        self._changes = [0] * len(self.start_s)  # of the bytes before each point if nothing is offloaded
        for chunk, number in chunks.items():
            beside = profile[chunk.stage]
            kept, waiting = _shares(beside.kept_bytes, parts), _shares(beside.weight_bytes, parts)
            for part, layer in enumerate(range(number * parts, (number + 1) * parts)):
                end = weights_at.get(number, self.backward_at[layer] + 1)
                held, waits = self.nbytes[layer] + kept[part], waiting[part] if number in weights_at else 0
                self._changes[self.forward_at[layer]] += held
                self._changes[self.backward_at[layer]] += waits
                self._changes[end] -= held + waits

    def peak_bytes(self, absent: Absent) -> int:
        return max(self._resident_bytes(absent))

    def _resident_bytes(self, absent: Absent) -> list[int]:
        changes = self._changes.copy()
        for layer, (release, reload) in absent.items():
            changes[release] -= self.nbytes[layer]
            changes[reload] += self.nbytes[layer]
        return list(accumulate(changes))

    def host_bytes(self, offloaded: Iterable[int]) -> int:
        """The most bytes on the host at once, if host memory is held from forward to backward."""
        changes = [0] * len(self.start_s)
        for layer in offloaded:
            changes[self.forward_at[layer]] += self.nbytes[layer]
            changes[self.backward_at[layer] + 1] -= self.nbytes[layer]
        return max(accumulate(changes))

    def choose(self, link: Link, is_enough: Callable[[Absent], bool]) -> Absent:
        """Offload the longest-lived layers first, each if both copies have time beside those before, until enough."""
        at = zip(self.forward_at, self.backward_at, strict=True)
        lives = [(self.start_s[made + 1] - self.start_s[needed], layer) for layer, (made, needed) in enumerate(at)]
        absent: Absent = {}
        # All layers at once where possible, else one half after the other: one at a time is slow for 512 of them.
        groups = [[layer for _, layer in sorted(lives) if self.nbytes[layer]]]
        while groups and not is_enough(absent):
            group = groups.pop()
            trial = self._place([*absent, *group], link)
            if trial is not None and (len(group) == 1 or not is_enough(trial)):
                absent = trial
            elif len(group) > 1:
                groups += [group[len(group) // 2 :], group[: len(group) // 2]]
        return absent

    def _place(self, layers: list[int], link: Link) -> Absent | None:
        """When each of ``layers`` is absent; ``None`` if one of them has no time on the host."""
        d2h, h2d = link.rates(d2h=True, h2d=True)
        release: dict[int, int] = {}
        free_s = 0.0  # when the link has copied all before
        for layer in sorted(layers):
            after = self.forward_at[layer] + 1
            free_s = max(free_s, self.start_s[after]) + self.nbytes[layer] / d2h
            release[layer] = bisect_left(self.start_s, free_s, after)
        absent = {}
        free_s = self.start_s[-1]  # when the link has to begin with all behind
        for layer in sorted(layers, key=self.backward_at.__getitem__, reverse=True):
            needed, gone = self.backward_at[layer], release[layer]
            free_s = min(free_s, self.start_s[needed]) - self.nbytes[layer] / h2d
            reload = min(bisect_right(self.start_s, free_s) - 1, needed)
            if not gone < reload <= needed:
                return None
            absent[layer] = gone, reload
        return absent

    def relax(self, absent: Absent, limit_bytes: float) -> Absent:
        """Release later and reload earlier, in the same order, as ``limit_bytes`` allow: slack for slower copies."""
        relaxed = dict(absent)
        resident = self._resident_bytes(absent)

        def hold(layer: int, index: int) -> bool:
            """Keep the layer on the device during one more point, if there is memory and it stays absent."""
            release, reload = relaxed[layer]
            fits = release + 1 < reload and resident[index] + self.nbytes[layer] <= limit_bytes
            resident[index] += self.nbytes[layer] * fits
            return fits

        before: Absent = {}
        while relaxed != before:
            before, latest, earliest = dict(relaxed), len(self.order), 0
            for layer in sorted(relaxed, reverse=True):
                release, reload = relaxed[layer]
                latest = release + (release < latest and hold(layer, release))
                relaxed[layer] = latest, reload
            for layer in sorted(relaxed, key=self.backward_at.__getitem__):
                release, reload = relaxed[layer]
                earliest = reload - (earliest < reload and hold(layer, reload - 1))
                relaxed[layer] = release, earliest
        return relaxed
