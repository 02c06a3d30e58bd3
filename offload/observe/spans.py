"""Spans: the parts of a timeline, each one stream busy with one thing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

Lane = Literal["compute", "d2h", "h2d"]
Kind = Literal["forward", "backward", "recompute", "other", "stall", "late", "offload", "reload"]
LANES: tuple[Lane, ...] = get_args(Lane)
COPY_LANES: tuple[Lane, ...] = ("d2h", "h2d")
WAITING: tuple[Kind, ...] = ("stall", "late")


@dataclass(frozen=True)
class Span:
    """One stream busy with one thing, or waiting (kinds ``"stall"`` and ``"late"``).

    Args:
        lane: ``"compute"``, ``"d2h"`` or ``"h2d"``.
        kind: ``"forward"``, ``"backward"``, ``"recompute"``, ``"other"``, ``"stall"`` (waits for copies) or ``"late"``
            (waits for the host, which has not queued more) on the compute stream, ``"offload"`` or ``"reload"`` on the
            copy streams.
        start_s: Seconds since the timeline's start.
        end_s: Not before ``start_s``.
        label: A few words for people.
        layer: Number of its layer; for a stall, of the layer whose copies compute waits for.
        nbytes: Bytes copied.
    """

    lane: Lane
    kind: Kind
    start_s: float
    end_s: float
    label: str = ""
    layer: int | None = None
    nbytes: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


def merged(spans: Iterable[Span], gap_s: Callable[[Span], float]) -> Iterator[Span]:
    """Spans of one stream, by start; neighbours of one kind and layer are one if the pause is at most ``gap_s``."""
    last: Span | None = None
    for span in spans:
        if last and (last.kind, last.layer) == (span.kind, span.layer) and span.start_s - last.end_s <= gap_s(span):
            last = replace(last, end_s=max(last.end_s, span.end_s), nbytes=last.nbytes + span.nbytes)
            continue
        if last:
            yield last
        last = span
    if last:
        yield last


def covered_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one span runs, of spans sorted by start."""
    seconds, until_s = 0.0, -math.inf
    for span in spans:
        seconds += max(0.0, span.end_s - max(span.start_s, until_s))
        until_s = max(until_s, span.end_s)
    return seconds
