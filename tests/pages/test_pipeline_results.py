"""A record of pipelines that does not show what the pages say is refused."""

import copy
import json

import pytest

pytest.importorskip("matplotlib")

import pipeline_results

from benchmarks.pipeline_report import BOUND, FREE, HALF

RECORD = json.loads(pipeline_results.RECORDS[0].read_text("utf-8"))


def row_of(record, offload, *, schedule="1F1B", width="4096", rank=0):
    asked = {"schedule": schedule, "width": width, "rank": rank, "offload": offload}
    return next(row for row in record["rows"] if asked.items() <= row.items())


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        ({"offload": FREE, "rank": 1}, {"bit_identical": False}, "rank 1, what is free: gradients must be those"),
        ({"offload": HALF}, {"peak_saved": 0.49}, "half on rank 0: must save half of the peak, got 49%"),
        ({"offload": HALF, "width": "12288"}, {"slowdown": 0.03}, "width 12288.*: must cost hardly any time, got 3.0%"),
        ({"offload": BOUND}, {"steady_to_link": {"alone": 0.7}}, "1F1B, width 4096: must be bound by the link, .*0.7"),
        ({"offload": BOUND}, {"steady_to_link": {"alone": None}}, "1F1B, width 4096: must be bound by the link"),
    ],
)
def test_refuses_a_record_that_does_not_show_what_the_page_says(place, change, message, tmp_path):
    record = copy.deepcopy(RECORD)
    row_of(record, **place).update(change)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), "utf-8")
    with pytest.raises(ValueError, match=message):
        pipeline_results.read_records([path])
