"""What a pipeline benchmark's record says: the measured steps as a table, and what follows for other widths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.pipeline_models import MODELS
from benchmarks.report import table
from offload.pipelining import PipelinePlan, StageProfile, plan_pipeline
from offload.planning.link import Link

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


def predictions(record: Mapping[str, Any]) -> str:
    """What the derivation says of all widths on the first rank's link, as a table."""
    shown = [
        {
            "schedule": row["schedule"],
            "width": row["width"],
            "sets GiB": row["sets_bytes"] / GIB,
            "free: less %": 100 * row["free_saved"],
            "half of the sets: longer %": 100 * row["half_slowdown"],
            "as in the measured step, sets %": 100 * row["aimed_share"],
            "longer %": 100 * row["aimed_slowdown"],
        }
        for row in prediction_rows(record)
    ]
    return table(shown)


def prediction_rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each schedule and width, on the first rank: how much of the sets' peak is free, what more of it costs.

    A width's costs are scaled from those of the widest model measured, by operations and by saved elements; the
    share of bubbles in the step is taken to be the same. Asked for are half of the sets, and as few of them as in
    that model's measured step, which makes room for workspace as well.
    """
    link = Link(**record["links"][0]["all at once"])
    for name in dict.fromkeys(row["schedule"] for row in record["rows"]):
        first = [row for row in record["rows"] if (row["schedule"], row["rank"]) == (name, 0)]
        widest = max((row["width"] for row in first), key=lambda width: record["models"][width]["hidden"])
        nothing, measured = (
            next(row for row in first if (row["width"], row["offload"]) == (widest, way)) for way in (NOTHING, HALF)
        )
        base = record["models"][widest]
        busy_s = plan_pipeline(measured["actions"], scaled(measured["profile"], 1, 1), link).step_s_without
        aimed_share = measured["predicted_peak_bytes"] / measured["predicted_peak_bytes_without"]
        for width, model in MODELS.items():
            profile = scaled(measured["profile"], model.operations / base["operations"], model.saved / base["saved"])
            plan = partial(plan_pipeline, measured["actions"], profile, link, parts=measured["parts"])
            free = plan()
            sets_bytes = free.peak_bytes_without
            step_s = nothing["step_s"] / busy_s * free.step_s_without
            half, aimed = (
                predicted_slowdown(plan(memory_budget=round(share * sets_bytes)), step_s)
                for share in (0.5, aimed_share)
            )
            yield {
                "schedule": name,
                "width": width,
                "compute_s": sum(costs.forward_s + costs.backward_s + costs.weight_s for costs in profile.values()),
                "chunk_bytes": sum(costs.saved_bytes for costs in profile.values()),
                "sets_bytes": sets_bytes,
                "free_saved": 1 - free.peak_bytes / sets_bytes,
                "half_slowdown": half,
                "aimed_share": aimed_share,
                "aimed_slowdown": aimed,
            }


def scaled(profile: Mapping[str, Mapping[str, float]], operations: float, saved: float) -> dict[int, StageProfile]:
    """A recorded profile, for so many times the operations and the saved bytes."""
    return {
        int(stage): StageProfile(
            operations * costs["forward_s"],
            operations * costs["backward_s"],
            operations * costs["weight_s"],
            round(saved * costs["saved_bytes"]),
        )
        for stage, costs in profile.items()
    }


def predicted_slowdown(plan: PipelinePlan, step_s: float) -> float:
    """How much longer than ``step_s`` the rank is busy, waits for copies and all; bubbles hide the rest."""
    return max(0.0, (plan.step_s_without + plan.stall_s) / step_s - 1)
