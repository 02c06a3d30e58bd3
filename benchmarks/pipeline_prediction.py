"""What is predicted of each rank in a record of ``pipeline.py``: the peak of its activation sets, and its stalls.

A prediction speaks of one rank, with its link to itself. It leaves out the other ranks, bubbles of the pipeline, a link
that several GPUs share, and backward's workspace.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from offload.pipelining import PipelinePlan, StageProfile
from offload.pipelining.order import read_actions
from offload.pipelining.plan import RankStep
from offload.planning.profile import Link
from offload.schedule.schedule import Move, Point, Schedule

NOTHING, HALF = "nothing", "half on rank 0"  # the ways to run a step
MIN_BYTES = 1 << 20
"""Tensors below this size were not offloaded in the records that list no tensors."""


def with_predictions(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with ``predicted_slowdown`` and ``predicted_peak_saved`` in each row that offloads.

    The peak saved is that of the rank's activation sets, as a fraction of the rank's measured peak.
    """
    nothing = {_rank_of(row): row for row in record["rows"] if row["offload"] == NOTHING}
    rows = []
    for row in record["rows"]:
        found = dict(row)
        if row["offload"] != NOTHING:
            plan = plan_of(row, record)
            saved_bytes = plan.peak_bytes_without - plan.peak_bytes
            found["predicted_slowdown"] = plan.slowdown
            found["predicted_peak_saved"] = saved_bytes / nothing[_rank_of(row)]["peak_bytes"]
        rows.append(found)
    return {**record, "rows": rows}


def plan_of(row: Mapping[str, Any], record: Mapping[str, Any]) -> PipelinePlan:
    """The plan that the row's rank followed, on the link that the rank measured while no other rank copied."""
    actions = read_actions(row["actions"])
    profile = profile_of(row, record)
    order = tuple(RankStep(actions, profile, row["parts"]).order)
    chunks = sum(action.kind == "F" for action in actions)
    schedule = Schedule(chunks * row["parts"], read_moves(row["moves"]), order)
    link = Link(**record["links"][row["rank"]]["alone"])
    return PipelinePlan(actions, row["parts"], profile, link, schedule)


def profile_of(row: Mapping[str, Any], record: Mapping[str, Any]) -> dict[int, StageProfile]:
    """The profile of each of the rank's stages. What the record does not list is derived from the model."""
    model = record["models"][row["width"]]
    layers = model["layers"] // len(row["profile"])
    derived = {"tensors": saved_tensors(model, layers), "weight_bytes": handed_over_bytes(model, layers)}
    known = {field.name for field in fields(StageProfile)}
    return {
        int(stage): StageProfile(**derived | {name: value for name, value in costs.items() if name in known})
        for stage, costs in row["profile"].items()
    }


def saved_tensors(model: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Bytes of each tensor that so many decoder blocks save, in order, without the input, which the stage holds."""
    wide, inner, logsumexp = _sizes(model)
    attention = [wide, wide, 3 * wide, wide, logsumexp]  # input, normed, qkv, attention and its log-sum-exp
    mlp = [wide, wide, *[inner] * 4]  # input, normed, gate, its SiLU, up, their product
    return tuple(nbytes for nbytes in ([*attention, *mlp] * layers)[1:] if nbytes >= MIN_BYTES)


def handed_over_bytes(model: Mapping[str, Any], layers: int) -> int:
    """Bytes of the gradients that wait for the weights' half of the backward: of each product's and norm's output."""
    wide, inner, _ = _sizes(model)
    return layers * (7 * wide + 2 * inner)


def _sizes(model: Mapping[str, Any]) -> tuple[int, int, int]:
    rows = model["batch"] * model["tokens"]
    itemsize = getattr(torch, model["dtype"].removeprefix("torch.")).itemsize
    return rows * model["hidden"] * itemsize, rows * model["ffn"] * itemsize, 4 * rows * model["heads"]


def written_moves(schedule: Schedule) -> str:
    """The moves as text: ``0:F25-B11`` is layer 0, released before F25, reloaded from B11."""
    return " ".join(f"{move.layer}:{move.release!r}-{move.reload!r}" for move in schedule.moves)


def read_moves(text: str) -> tuple[Move, ...]:
    """The moves that :func:`written_moves` has written."""
    moves = []
    for word in text.split():
        layer, _, points = word.partition(":")
        release, _, reload = points.partition("-")
        moves.append(Move(int(layer), Point.parse(release), Point.parse(reload)))
    return tuple(moves)


def _rank_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["schedule"], row["width"], row["rank"]
