"""A plan's table: for each kind of layer, the policy of each region in offloaded layers and in the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from offload.base.checks import format_bytes, format_s
from offload.planning.kinds import layers_of_kinds
from offload.planning.layer_passes import LayerPolicy
from offload.planning.profile import LayerProfile, Profile
from offload.planning.region_costs import region_costs


def region_table(profile: Profile, policies: Sequence[LayerPolicy | None], offloaded: Iterable[int]) -> Iterator[str]:
    """The lines of the table.

    Args:
        profile: What the layers cost.
        policies: Of each layer; ``None`` if everything that it saves is kept, or offloaded.
        offloaded: The layers that are offloaded.
    """
    away = set(offloaded)
    for numbers in layers_of_kinds(profile):
        layer = profile.layers[numbers[0]]
        names = [region.name for region in layer.regions] or ["whole layer"]
        width = max(map(len, [*names, "region"]))
        groups = {
            "offloaded": [number for number in numbers if number in away],
            "resident": [number for number in numbers if number not in away],
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
                continue  # neither saved nor needed for what is recomputed
            cells = "  ".join(text.ljust(wide) for text, wide in zip(what, widths, strict=True))
            yield f"{name:<{width}}{size:>12}{compute:>10}  {cells}".rstrip()


def ranges(numbers: Iterable[int]) -> str:
    """``ranges([0, 1, 2, 5])`` is ``"0-2, 5"``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _happens(layers: Sequence[tuple[LayerProfile, LayerPolicy | None, bool]], row: int) -> str:
    """The policy of one region in these layers; of how many each, if not the same in all."""
    counts = Counter(_what(layer, policy, row, offloads=offloads) for layer, policy, offloads in layers)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{what} {count}" for what, count in counts.most_common())


def _what(layer: LayerProfile, policy: LayerPolicy | None, row: int, *, offloads: bool) -> str:
    if policy is None:
        return ("offload" if offloads else "keep") if not layer.regions or layer.regions[row].saved else "-"
    costs = region_costs(layer.regions, policy.kept)
    if row in costs.kept:
        return "offload" if offloads and row in policy.offloaded else "keep"
    return "recompute" if row in costs.rerun else "-"
