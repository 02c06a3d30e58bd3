"""The links of several devices of one host, which they share: how fast each copies depends on who else does.

Each link is measured twice: while no other device copies, and while all do. What they reach together is what the host
gives in all, however few of them copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.observe.spans import Lane
from offload.planning.link import Link

Flow = tuple[int, Lane]
"""Copies in one direction between the host and the device of that number."""


@dataclass(frozen=True)
class SharedLink:
    """The links of several devices to their host.

    Args:
        alone: Each device's link while no other device copies.
        together: Each device's link while all copy.

    Raises:
        ValueError: Not as many links together as alone, or none.
    """

    alone: tuple[Link, ...]
    together: tuple[Link, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone", tuple(self.alone))
        object.__setattr__(self, "together", tuple(self.together))
        if not self.alone or len(self.alone) != len(self.together):
            raise ValueError(
                f"alone and together must have a link for each device, got {len(self.alone)} and "
                f"{len(self.together)}; measure both on every device"
            )

    @classmethod
    def private(cls, links: Sequence[Link]) -> SharedLink:
        """Links that share nothing: each is always as fast as alone."""
        return cls(tuple(links), tuple(links))

    def rates(self, flows: frozenset[Flow]) -> dict[Flow, float]:
        """Bytes per second of each flow if exactly these go on.

        All grow in proportion to what they reach alone, until a device's link, or the host, gives no more to some of
        them; the others grow on.
        """
        rates = dict.fromkeys(flows, 0.0)
        growing = set(flows)
        limits = [(group & flows, most) for group, most in self._limits() if group & flows]
        while growing:
            step = min(
                (most - sum(rates[flow] for flow in group)) / sum(self._alone(flow) for flow in group & growing)
                for group, most in limits
                if group & growing
            )
            for flow in growing:
                rates[flow] += max(0.0, step) * self._alone(flow)
            full = [group for group, most in limits if sum(rates[flow] for flow in group) >= most * (1 - 1e-9)]
            growing.difference_update(*full)
        return rates

    def _alone(self, flow: Flow) -> float:
        link = self.alone[flow[0]]
        return link.d2h_bytes_per_s if flow[1] == "d2h" else link.h2d_bytes_per_s

    def _limits(self) -> list[tuple[frozenset[Flow], float]]:
        """Groups of flows, and how many bytes per second each group reaches at most."""
        found: list[tuple[frozenset[Flow], float]] = []
        for number, link in enumerate(self.alone):
            down, up = frozenset[Flow]({(number, "d2h")}), frozenset[Flow]({(number, "h2d")})
            found += [(down, link.d2h_bytes_per_s), (up, link.h2d_bytes_per_s), (down | up, link.duplex_bytes_per_s)]
        every = range(len(self.alone))
        down, up = frozenset[Flow]((n, "d2h") for n in every), frozenset[Flow]((n, "h2d") for n in every)
        found.append((down, sum(link.d2h_bytes_per_s for link in self.together)))
        found.append((up, sum(link.h2d_bytes_per_s for link in self.together)))
        found.append((down | up, sum(link.duplex_bytes_per_s for link in self.together)))
        return found
