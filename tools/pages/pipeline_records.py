"""The records of offloading in pipelines, ``results/pipeline_*.json``, if they show what the page says about them."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from page_text import Row, read

from benchmarks.pipeline_prediction import with_predictions
from benchmarks.pipeline_report import BOUND, HALF, NOTHING

BOUND_SHARE = 0.85
"""From this share of the link's speed in both directions on, a step counts as bound by it."""

HARDLY_LONGER = 0.02
"""What the first rank's half may cost in wide models, as the page says."""


class Measured(NamedTuple):
    """One rank under one way to offload, and the same rank without."""

    gpus: int
    way: Row
    nothing: Row

    @property
    def case(self) -> tuple[Any, Any]:
        """Schedule and width."""
        return self.way["schedule"], self.way["width"]


@cache
def read_records() -> list[Row]:
    """The records, if they show what the page says about them; predictions are made anew.

    Raises:
        ValueError: A gradient differs, the first rank's peak was not halved, that cost time in the widest model,
            or 1F1B was not bound by the link where it was meant to be.
    """
    records = [read("pipeline_2"), read("pipeline_4")]
    for record in records:
        for row in record["rows"]:
            if not row["bit_identical"]:
                raise ValueError(f"{_name(row)}: gradients must be those without offloading, but they differ")
        for found in measured(record, HALF):
            if found.way["peak_saved"] < 0.5:
                raise ValueError(f"{_name(found.way)}: must save half of the peak, got {found.way['peak_saved']:.0%}")
            if found.way["width"] == widest(record) and found.way["slowdown"] > HARDLY_LONGER:
                raise ValueError(f"{_name(found.way)}: must cost hardly any time, got {found.way['slowdown']:.1%}")
        narrow = [found.way for found in measured(record, BOUND) if found.case == ("1F1B", narrowest(record))]
        shares = [row["steady_to_link"]["alone"] or 0.0 for row in narrow]
        if min(shares, default=0.0) < BOUND_SHARE:
            raise ValueError(f"1F1B, width {narrowest(record)}: must be bound by the link, but its shares are {shares}")
    return [with_predictions(record) for record in records]


def measured(record: Row, *ways: str, rank: int | None = 0) -> Iterator[Measured]:
    """What was measured of these ways on that rank; on all of them if it is ``None``."""
    nothing = {_place(row): row for row in record["rows"] if row["offload"] == NOTHING}
    for row in record["rows"]:
        if row["offload"] in ways and rank in (None, row["rank"]):
            yield Measured(record["options"]["ranks"], row, nothing[_place(row)])


def widest(record: Row) -> str:
    """The measured model with the most hidden units."""
    models: dict[str, Row] = record["models"]
    return max(models, key=lambda width: models[width]["hidden"])


def narrowest(record: Row) -> str:
    """The measured model with the fewest."""
    models: dict[str, Row] = record["models"]
    return min(models, key=lambda width: models[width]["hidden"])


def _place(row: Row) -> tuple[Any, ...]:
    return row["schedule"], row["width"], row["rank"]


def _name(row: Row) -> str:
    return f"{row['schedule']}, width {row['width']}, rank {row['rank']}, {row['offload']}"
