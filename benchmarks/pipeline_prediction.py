"""What the simulator says of the steps that ``pipeline.py`` recorded: all ranks together, on the links measured.

Everything comes from the record itself. Seconds of compute are stretched so that the step without offloading takes as
long as measured. Where a record is older than what it should hold, the model that it describes says it: the tensors
that a stage saves, and what the two halves of a split backward hand over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.pipeline_report import NOTHING
from offload.pipelining import PipelinePlan, PipelineStep, SharedLink, StageProfile, simulate_pipeline
from offload.pipelining.order import read_actions
from offload.pipelining.walk import Walk
from offload.planning.link import Link
from offload.schedule.points import Move, Point
from offload.schedule.schedule import Schedule

MIN_BYTES = 1 << 20
"""What is smaller stayed on the device in the records that list no tensors."""


def predicted_step(
    record: Mapping[str, Any], case: tuple[str, str], way: str
) -> tuple[PipelineStep, list[PipelinePlan]]:
    """The step of all ranks that is recorded of this case, schedule and width, and the plans they followed."""
    rows = {
        (row["rank"], row["offload"]): row for row in record["rows"] if (row["schedule"], row["width"]) == tuple(case)
    }
    ranks = range(record["options"]["ranks"])
    plans = [plan_of(rows[rank, way], record) for rank in ranks]
    nothing_s: float = rows[0, NOTHING]["step_s"]
    return simulate_pipeline(plans, shared_link(record), step_s_without=nothing_s), plans


def with_predictions(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record, with what is predicted of each row in place of what it says of that.

    All ranks of a step have its slowdown; the peak saved is that of the rank's sets, as a share of its measured peak.
    """
    nothing = {(*_case(row), row["rank"]): row for row in record["rows"] if row["offload"] == NOTHING}
    steps = {
        (case, way): predicted_step(record, case, way)
        for case, way in dict.fromkeys((_case(row), row["offload"]) for row in record["rows"])
        if way != NOTHING
    }
    rows = []
    for row in record["rows"]:
        found = dict(row)
        if row["offload"] != NOTHING:
            step, plans = steps[_case(row), row["offload"]]
            plan = plans[row["rank"]]
            saved_bytes = plan.peak_bytes_without - plan.peak_bytes
            found["predicted_slowdown"] = step.slowdown
            found["predicted_peak_saved"] = saved_bytes / nothing[(*_case(row), row["rank"])]["peak_bytes"]
        rows.append(found)
    return {**record, "rows": rows}


def shared_link(record: Mapping[str, Any]) -> SharedLink:
    """What the ranks measured, alone and all at once."""
    links = record["links"]
    return SharedLink(*(tuple(Link(**link[what]) for link in links) for what in ("alone", "all at once")))


def plan_of(row: Mapping[str, Any], record: Mapping[str, Any]) -> PipelinePlan:
    """The plan that a row's step followed."""
    actions = read_actions(row["actions"])
    profile = profile_of(row, record)
    order = tuple(Walk(actions, profile, row["parts"]).order)
    chunks = sum(action.kind == "F" for action in actions)
    schedule = Schedule(chunks * row["parts"], read_moves(row["moves"]), order)
    link = Link(**record["links"][row["rank"]]["all at once"])
    return PipelinePlan(actions, row["parts"], profile, link, schedule)


def profile_of(row: Mapping[str, Any], record: Mapping[str, Any]) -> dict[int, StageProfile]:
    """What a chunk of each of the rank's stages costs."""
    model = record["models"][row["width"]]
    layers = model["layers"] // len(row["profile"])
    return {
        int(stage): StageProfile(
            **{"tensors": saved_tensors(model, layers), "weight_bytes": handed_over_bytes(model, layers), **costs}
        )
        for stage, costs in row["profile"].items()
    }


def saved_tensors(model: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The bytes of what so many decoder blocks save, in order, but for their input, which the stage holds anyway."""
    wide, inner, logsumexp = _sizes(model)
    attention = [wide, wide, 3 * wide, wide, logsumexp]  # input, normed, qkv, attention and its log-sum-exp
    mlp = [wide, wide, *[inner] * 4]  # input, normed, gate, its SiLU, up, their product
    return tuple(nbytes for nbytes in ([*attention, *mlp] * layers)[1:] if nbytes >= MIN_BYTES)


def handed_over_bytes(model: Mapping[str, Any], layers: int) -> int:
    """The gradients that wait for the half of the backward for the weights: of what each product and norm made."""
    wide, inner, _ = _sizes(model)
    return layers * (7 * wide + 2 * inner)


def _sizes(model: Mapping[str, Any]) -> tuple[int, int, int]:
    rows = model["batch"] * model["tokens"]
    itemsize = getattr(torch, model["dtype"].removeprefix("torch.")).itemsize
    return rows * model["hidden"] * itemsize, rows * model["ffn"] * itemsize, 4 * rows * model["heads"]


def written_moves(schedule: Schedule) -> str:
    """What moves and when, for :func:`read_moves`: ``0:F25-B11`` is layer 0, released before F25, reloaded from B11."""
    return " ".join(f"{move.layer}:{move.release!r}-{move.reload!r}" for move in schedule.moves)


def read_moves(text: str) -> tuple[Move, ...]:
    """What :func:`written_moves` has written."""
    moves = []
    for word in text.split():
        layer, _, points = word.partition(":")
        release, _, reload = points.partition("-")
        moves.append(Move(int(layer), Point.parse(release), Point.parse(reload)))
    return tuple(moves)


def _case(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["schedule"], row["width"]
