"""What a pipeline benchmark's record says: the measured steps as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import table

GIB = 2**30

NOTHING, HALF, FREE, BOUND = "nothing", "half on rank 0", "what is free", "bound by the link"
"""The ways to run a step."""


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table to read: measured beside predicted."""
    shown = []
    for row in rows:
        line = {
            "schedule": row["schedule"],
            "width": row["width"],
            "rank": row["rank"],
            "offload": row["offload"],
            "step ms": row["step_s"] * 1e3,
            "peak GiB": row["peak_bytes"] / GIB,
            "same gradients": row["bit_identical"],
        }
        if "slowdown" in row:
            line |= {
                "peak saved %": row["peak_saved"] * 100,
                "predicted saved %": row["predicted_peak_saved"] * 100,
                "longer %": row["slowdown"] * 100,
                "predicted longer %": row["predicted_slowdown"] * 100,
                "moved %": 100 * row["offloaded_bytes"] / max(1, row["saved_bytes"]),
                "pinned GiB": row["pinned_bytes"] / GIB,
            }
            if row["steady_bytes_per_s"] is not None:
                line["steady GB/s"] = row["steady_bytes_per_s"] / 1e9
                line |= {f"of link, {what}": ratio for what, ratio in row["steady_to_link"].items()}
        shown.append(line)
    return table(shown)
