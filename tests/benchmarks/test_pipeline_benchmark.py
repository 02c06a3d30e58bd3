import json
import os
import sys
from pathlib import Path

import pytest
from scripts import NO_GPU, as_torchrun, run_scripts

from benchmarks import pipeline
from benchmarks.pipeline_case import steady_bytes_per_s
from benchmarks.pipeline_report import BOUND, FREE, HALF, NOTHING
from offload.observe.spans import Span
from offload.observe.timeline import Timeline
from offload.pipelining import plan_pipeline
from offload.pipelining.order import one_f_one_b_order
from offload.pipelining.rank_step import StageProfile
from offload.planning.profile import Link

pytestmark = pytest.mark.slow

ROOT = Path(pipeline.__file__).parent.parent
WAYS = [NOTHING, HALF, FREE, BOUND]


@pytest.fixture(scope="module")
def record_path(tmp_path_factory):
    """The record of a run of two processes on the CPU."""
    path = tmp_path_factory.mktemp("pipeline") / "record.json"
    command = [str(ROOT / "benchmarks" / "pipeline.py"), "--small", "--repeats", "1", "--out", str(path)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | NO_GPU | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for done in run_scripts([command] * 2, path.parent, as_torchrun(environment, 2)):
        assert done.code == 0, done.output
    return path


def test_all_ways_on_all_ranks_give_the_same_gradients(record_path):
    record = json.loads(record_path.read_text("utf-8"))
    assert record["options"]["ranks"] == 2
    assert [set(links) for links in record["links"]] == [{"alone", "all at once"}] * 2
    cases = [(row["schedule"], row["rank"], row["offload"]) for row in record["rows"]]
    assert cases == [(name, rank, way) for name in ("1F1B", "ZBV") for rank in (0, 1) for way in WAYS]
    assert all(row["bit_identical"] for row in record["rows"])
    # Both V-schedule's stages and 1F1B's first one have sets that live long enough.
    assert all(row["offloaded_bytes"] > 0 for row in record["rows"] if row["rank"] == 0 and "actions" in row)


def test_the_first_ranks_peak_shrinks_and_its_steady_state_is_recorded(record_path, monkeypatch, capsys):
    rows = json.loads(record_path.read_text("utf-8"))["rows"]
    halves = [row for row in rows if row["rank"] == 0 and row["offload"] == HALF]
    # A part is as large as a tensor here, so that the half is missed by some of them.
    assert [row["peak_saved"] > 0.4 for row in halves] == [True, True]
    for row in rows:
        if row["offload"] != NOTHING:
            assert (row["steady_bytes_per_s"] is not None) == (row["rank"] == 0)
            assert set(row["steady_to_link"]) == {"alone", "all at once"}
    monkeypatch.setattr(sys, "argv", ["pipeline", "--show", str(record_path)])
    pipeline.main()
    assert capsys.readouterr().out.count(HALF) == 4


def test_steady_state_is_from_the_first_backward_to_the_last_forward():
    timeline = Timeline(
        (
            Span("compute", "forward", 0.0, 1.0),
            Span("compute", "backward", 1.0, 3.0),
            Span("compute", "forward", 3.0, 4.0),
            Span("compute", "backward", 4.0, 6.0),
            Span("d2h", "offload", 0.5, 1.5, nbytes=100),
            Span("d2h", "offload", 2.0, 3.0, nbytes=100),
            Span("h2d", "reload", 3.5, 4.5, nbytes=60),
        )
    )
    assert steady_bytes_per_s(timeline) == pytest.approx((50 + 100 + 30) / 3.0)
    assert steady_bytes_per_s(Timeline((Span("compute", "backward", 0.0, 1.0),))) == 0.0


@pytest.mark.parametrize(("rank", "expected"), [(0, 350), (1, 400)])
def test_the_budget_is_what_the_target_leaves_beside_workspace(monkeypatch, rank, expected):
    monkeypatch.setattr(pipeline.dist, "get_rank", lambda: rank)
    order = one_f_one_b_order(rank, 2, 8)
    free = plan_pipeline(order, {rank: StageProfile(saved_bytes=400)}, Link(1.0, 1.0, 2.0))
    without = free.peak_bytes_without
    assert (without, free.peak_bytes) == [(800, 800), (400, 400)][rank]
    nothing = pipeline.Way(NOTHING, peak_bytes=without + 50)
    assert pipeline.budget_bytes(400, nothing, free) == expected
