"""What is predicted of the recorded ranks, beside what was measured."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import pipeline_prediction
from benchmarks.pipeline_prediction import NOTHING, plan_of, with_predictions, written_moves
from offload.pipelining import StageProfile

RESULTS = Path(pipeline_prediction.__file__).parent.parent / "results"
pytestmark = pytest.mark.slow

PROFILE = {field.name for field in fields(StageProfile)}
RECORDS = [json.loads((RESULTS / f"pipeline_{gpus}.json").read_text("utf-8")) for gpus in (2, 4)]

MORE_POINTS, LESS_POINTS = 45.0, 1.5
"""How far the first rank's predicted slowdown may be above and below the measured one, in % of the step."""

PEAK_LESS_POINTS, PEAK_MORE_POINTS = 9.0, 3.0
"""How far less and how far more the peak may be predicted to fall than it fell, in % of the peak without offloading."""


@pytest.fixture(scope="module", params=RECORDS, ids=lambda record: f"{record['options']['ranks']} GPUs")
def rows(request):
    record = request.param
    gpus = record["options"]["ranks"]
    found = {}
    for row in with_predictions(record)["rows"]:
        if row["offload"] != NOTHING:
            found[gpus, row["schedule"], row["width"], row["rank"], row["offload"]] = row
    return found


def test_a_first_rank_alone_waits_at_least_as_long_as_measured(rows):
    more = {place: 100 * (row["predicted_slowdown"] - row["slowdown"]) for place, row in rows.items() if place[3] == 0}
    assert {place: points for place, points in more.items() if not -LESS_POINTS <= points <= MORE_POINTS} == {}
    free = [row["predicted_slowdown"] for place, row in rows.items() if place[4] == "what is free"]
    assert free == [0.0] * len(free)


def test_peaks_fall_as_far_as_predicted(rows):
    off = {place: 100 * (row["predicted_peak_saved"] - row["peak_saved"]) for place, row in rows.items()}
    assert {place: points for place, points in off.items() if not -PEAK_LESS_POINTS <= points <= PEAK_MORE_POINTS} == {}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record['options']['ranks']} GPUs")
def test_the_plans_are_those_that_were_measured(record):
    for row in record["rows"]:
        if row["offload"] != NOTHING:
            plan = plan_of(row, record)
            assert written_moves(plan.schedule) == row["moves"]
            measured = {
                int(stage): StageProfile(**{name: value for name, value in costs.items() if name in PROFILE})
                for stage, costs in row["profile"].items()
            }
            assert replace(plan, profile=measured).offloaded_bytes == row["offloaded_bytes"]
