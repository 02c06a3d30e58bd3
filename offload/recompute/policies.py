"""The policy of each region of a layer, keep, offload or recompute, as a user or a plan says it by the regions' names.

A region is the output of one operation within a layer. Its name is the module that ran the operation, and the
operation. Only a saved tensor can be kept. Where an output that autograd does not save is to be kept, the first saved
tensor that is computed from it is kept in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from fnmatch import fnmatchcase

SOURCE = "input"
"""The name of what a layer was given."""
UNSEEN = "compiled forward"
"""The name of what was computed where no operation was seen, as in compiled code: it is recomputed as one."""


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
    """Patterns of regions' names, each with what is to happen to them.

    Raises:
        TypeError: ``policies`` is no mapping of texts.
        ValueError: It names no policy there is.
    """
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


def policy_of(name: str, patterns: Mapping[str, Policy]) -> Policy:
    """What the first pattern that matches a region's name, or its part after the module, says; else it is kept."""
    return next((policy for pattern, policy in patterns.items() if matches(name, pattern)), KEEP)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of a region's name, or of its part after the module."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(": ")[2], pattern)
