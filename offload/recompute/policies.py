"""The policy of each region of a layer, keep, offload or recompute, as a user or a plan says it by the regions' names.

A region is the output of one operation within a layer. Its name is the module that ran the operation, and the
operation. Only a saved tensor can be kept. Where an output that autograd does not save is to be kept, the first saved
tensor that is computed from it is kept in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase

from offload.recompute.costs import LayerPolicy, RegionProfile

SOURCE = "input"  # the name of what a layer was given
UNSEEN = "compiled forward"
"""The name of what was computed where no operation was seen, as in compiled code: it is recomputed as one."""
REST = "data-dependent rest"
"""The name, in a plan, of all that is saved behind the first operation whose result has a size or a way that depends on
data: as the operations behind it may be others each time, all of that is kept, offloaded or recomputed."""


class Policy(Enum):
    """What happens to a region's memory until backward."""

    KEEP = "keep"
    """It is kept on the device."""
    OFFLOAD = "offload"
    """It is offloaded with its layer; where the layer is not offloaded, it is kept."""
    RECOMPUTE = "recompute"
    """It is dropped, and recomputed when backward asks for it."""


KEEP, OFFLOAD, RECOMPUTE = Policy.KEEP, Policy.OFFLOAD, Policy.RECOMPUTE


def parse_policies(policies: Mapping[str, Policy | str]) -> dict[str, Policy]:
    """Patterns of regions' names, each with what is to happen to them."""
    if not isinstance(policies, Mapping) or not all(isinstance(pattern, str) for pattern in policies):
        raise TypeError(
            'policies must map patterns of regions to policies, such as {"*dot_product*": "offload", "*": '
            f'"recompute"}}, got {policies!r}'
        )
    if not policies:
        raise ValueError(
            'policies must hold a pattern, such as {"*": "recompute"}, got none; leave it out to keep all.'
        )
    try:
        return {pattern: Policy(policy) for pattern, policy in policies.items()}
    except ValueError as error:
        known = ", ".join(repr(policy.value) for policy in Policy)
        raise ValueError(f"a policy must be one of {known}, got {policies!r}") from error


class RegionPolicies:
    """The policy of each region of a layer, by the regions' names: that of the first pattern that matches, or a plan's.

    A region that no pattern matches is kept. Learning also measures what each region costs if it ``measures``.
    """

    source: Policy  # what happens to the layer's inputs, which cannot be recomputed

    def __init__(self, patterns: Mapping[str, Policy], *, measures: bool) -> None:
        self.patterns = patterns
        self.measures = measures
        self.resident: list[bool] = []  # of each input among the regions, whether it is kept on the device in any case
        self.follow_patterns()

    def follow_patterns(self) -> None:
        self.numbered: LayerPolicy | None = None  # the plan that is followed in place of patterns
        self._known: dict[str, Policy] = {}
        source = self.of(SOURCE)
        self.source = OFFLOAD if source is RECOMPUTE else source

    def follow(self, numbered: LayerPolicy, regions: Sequence[RegionProfile]) -> None:
        """Follow a plan for these regions by their numbers from now on."""
        self.numbered, self._known, self.source = numbered, {}, KEEP
        self.keep_uncounted(regions)
        for number, cost in enumerate(regions):
            held = OFFLOAD if number in numbered.offloaded else KEEP
            if cost.name == SOURCE:
                self.source = OFFLOAD if held is OFFLOAD else self.source
            else:
                self._known[cost.name] = held if number in numbered.kept and cost.saved else RECOMPUTE
        # Of what the plan does not name, as inputs of another kind may have it: rather slower than planned than in more
        # memory than planned.
        self._unplanned = RECOMPUTE if RECOMPUTE in self._known.values() else KEEP

    def keep_uncounted(self, regions: Iterable[RegionProfile]) -> None:
        """Keep the inputs among these regions that count nothing, as all layers share them, on the device."""
        self.resident = [not one.nbytes for one in regions if one.name == SOURCE]

    def of(self, name: str) -> Policy:
        known = self._known.get(name)
        if known is None:
            found = (policy for pattern, policy in self.patterns.items() if matches(name, pattern))
            known = self._known[name] = next(found, KEEP) if self.numbered is None else self._unplanned
        return known


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of a region's name, or of its part after the module."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(": ")[2], pattern)
