"""What the derivation says of widths that were not measured, from the costs of the widest that was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.pipeline_models import MODELS
from benchmarks.pipeline_prediction import shared_link
from benchmarks.pipeline_report import GIB, HALF, NOTHING
from benchmarks.report import table
from offload.pipelining import PipelinePlan, SharedLink, StageProfile, plan_pipeline, simulate_pipeline


def predictions(record: Mapping[str, Any]) -> str:
    """What the derivation says of all widths, as a table."""
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
    """Of each schedule and width: how much of the first rank's sets' peak is free, what more of it costs.

    A width's costs are scaled from those of the widest model measured, by operations and by saved elements, and its
    compute is stretched as that model's is. Asked for are half of the first rank's sets, and as few of them as in
    that model's measured step, which makes room for workspace as well; the other ranks offload what is free.
    """
    for name in dict.fromkeys(row["schedule"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["schedule"] == name]
        widest = max((row["width"] for row in rows), key=lambda width: record["models"][width]["hidden"])
        nothing, *_ = (row for row in rows if (row["width"], row["offload"]) == (widest, NOTHING))
        ranks = [row for row in rows if (row["width"], row["offload"]) == (widest, HALF)]
        base = record["models"][widest]
        aimed_share = ranks[0]["predicted_peak_bytes"] / ranks[0]["predicted_peak_bytes_without"]
        links = shared_link(record)
        stretch = nothing["step_s"] / simulate_pipeline(_plans(ranks, links, 1.0, 1.0), links).step_s_without
        for width, model in MODELS.items():
            planned = partial(_plans, ranks, links, model.operations / base["operations"], model.saved / base["saved"])
            first, *others = planned()
            half, aimed = (
                _slowdown([*planned(round(share * first.peak_bytes_without)), *others], links, stretch)
                for share in (0.5, aimed_share)
            )
            costs = first.profile.values()
            yield {
                "schedule": name,
                "width": width,
                "compute_s": sum(stage.forward_s + stage.backward_s + stage.weight_s for stage in costs),
                "chunk_bytes": sum(stage.saved_bytes for stage in costs),
                "sets_bytes": first.peak_bytes_without,
                "free_saved": 1 - first.peak_bytes / first.peak_bytes_without,
                "half_slowdown": half,
                "aimed_share": aimed_share,
                "aimed_slowdown": aimed,
            }


def _plans(
    ranks: Sequence[Mapping[str, Any]], links: SharedLink, operations: float, saved: float, budget: int | None = None
) -> list[PipelinePlan]:
    """What each rank offloads for nothing; with a budget, what the first one does to meet it."""
    return [
        plan_pipeline(
            row["actions"],
            scaled(row["profile"], operations, saved),
            link,
            parts=row["parts"],
            memory_budget=budget,
        )
        for row, link in zip(ranks if budget is None else ranks[:1], links.together, strict=budget is None)
    ]


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


def _slowdown(plans: Sequence[PipelinePlan], links: SharedLink, stretch: float) -> float:
    stretched = [
        replace(plan, profile={stage: costs.stretched(stretch) for stage, costs in plan.profile.items()})
        for plan in plans
    ]
    return max(0.0, simulate_pipeline(stretched, links).slowdown)
