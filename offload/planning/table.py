"""A plan's table: for each kind of layer, what happens to its regions where it travels and where it stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from offload.base.checks import format_bytes, format_s
from offload.planning.ladder import kinds_of
from offload.planning.passes import LayerPolicy
from offload.planning.profile import LayerProfile, Profile
from offload.recompute.costs import Treated


def region_table(profile: Profile, policies: Sequence[LayerPolicy | None], travelling: Iterable[int]) -> Iterator[str]:
    """The lines of the table.

    Args:
        profile: What the layers cost.
        policies: Of each layer; ``None`` if it is one region.
        travelling: The layers that travel.
    """
    away = set(travelling)
    for numbers in kinds_of(profile):
        layer = profile.layers[numbers[0]]
        names = [region.name for region in layer.regions] or ["whole layer"]
        width = max(map(len, [*names, "region"]))
        groups = {
            "travelling": [number for number in numbers if number in away],
            "staying": [number for number in numbers if number not in away],
        }
        heads = [f"{name} {ranges(group)}" for name, group in groups.items() if group]
        columns = [
            [
                _happens([(profile.layers[number], policies[number], number in away) for number in group], row)
                for row in range(len(names))
            ]
            for group in groups.values()
            if group
        ]
        widths = [max(map(len, [head, *column])) for head, column in zip(heads, columns, strict=True)]
        costs = [(one.nbytes, one.seconds) for one in layer.regions] or [(layer.saved_bytes, layer.forward_s)]
        rows = [("region", "size", "compute", *heads)]
        rows += [
            (name, format_bytes(nbytes), format_s(seconds) if seconds else "-", *what)
            for name, (nbytes, seconds), *what in zip(names, costs, *columns, strict=True)
        ]
        for name, size, compute, *what in rows:
            if set(what) == {"-"}:
                continue  # what autograd does not save, and nobody else wants
            cells = "  ".join(text.ljust(wide) for text, wide in zip(what, widths, strict=True))
            yield f"{name:<{width}}{size:>12}{compute:>10}  {cells}".rstrip()


def ranges(numbers: Iterable[int]) -> str:
    """``ranges([0, 1, 2, 5])`` is ``"0-2, 5"``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _happens(layers: Sequence[tuple[LayerProfile, LayerPolicy | None, bool]], row: int) -> str:
    """What happens to one region in these layers; how often, if not the same in all."""
    counts = Counter(_what(layer, policy, row, travels=travels) for layer, policy, travels in layers)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{what} {count}" for what, count in counts.most_common())


def _what(layer: LayerProfile, policy: LayerPolicy | None, row: int, *, travels: bool) -> str:
    if policy is None:
        return ("offload" if travels else "keep") if not layer.regions or layer.regions[row].saved else "-"
    if layer.regions[row].from_before and policy.group[0]:
        return "recompute"
    treated = Treated(layer.regions, policy.kept)
    if row in treated.held:
        return "offload" if travels and row in policy.travelling else "keep"
    return "recompute" if row in treated.recomputed else "-"
