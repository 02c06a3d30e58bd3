import json
import os
import sys
from pathlib import Path

import pytest
from scripts import NO_GPU, as_torchrun, run_scripts

from benchmarks import pipeline
from benchmarks.pipeline_report import BOUND, FREE, HALF, NOTHING

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
