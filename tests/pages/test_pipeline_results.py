"""What the pages say of pipelines is what the records say."""

import copy
import json

import pytest

pytest.importorskip("matplotlib")

import drawing
import matplotlib as mpl
import page_text
import pipeline_picture
import pipeline_results

from benchmarks.pipeline_report import BOUND, FREE, HALF, NOTHING

pytestmark = pytest.mark.slow

GIB = 1 << 30
RECORDS = [json.loads(path.read_text("utf-8")) for path in pipeline_results.RECORDS]


def cells(table):
    lines = table.replace(pipeline_results.NO_BREAK, " ").splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]


def row_of(record, offload, *, schedule="1F1B", width="4096", rank=0):
    asked = {"schedule": schedule, "width": width, "rank": rank, "offload": offload}
    return next(row for row in record["rows"] if asked.items() <= row.items())


@pytest.fixture
def record():
    """The record of two GPUs, to be changed."""
    return copy.deepcopy(RECORDS[0])


@pytest.fixture
def changed(record):
    """The same with round figures where 1F1B trains the narrow model."""
    row_of(record, NOTHING).update(step_s=1.0, peak_bytes=10 * GIB)
    said = {"step_s": 1.5, "peak_bytes": 4 * GIB, "slowdown": 0.5, "peak_saved": 0.6}
    row_of(record, HALF).update(**said, predicted_slowdown=0.7, predicted_peak_saved=0.65)
    said = {"peak_bytes": 9 * GIB, "slowdown": -0.0123, "peak_saved": 0.1}
    row_of(record, FREE).update(**said, predicted_slowdown=0.0, predicted_peak_saved=0.12)
    said = {"slowdown": 0.2, "steady_bytes_per_s": 90e9, "steady_to_link": {"alone": 0.9, "all at once": 1.25}}
    row_of(record, BOUND).update(**said, predicted_slowdown=1.1)
    return record


def test_says_what_was_measured_and_what_was_predicted(changed):
    case = ["2", "1F1B", "4096"]
    table = pipeline_results.half_table([changed])
    said = ["1,000 → 1,500", "50.0%", "70.0%", "10.0 → 4.0", "60.0%", "65.0%"]
    assert [*case, *said] in cells(table)
    zbv = row_of(changed, HALF, schedule="ZBV")
    less, longer = (f"{100 * zbv[name]:.1f}%" for name in ("peak_saved", "slowdown"))
    assert f"Width 4096: the first rank's peak is {less} to 60.0% lower, the step {longer} to 50.0% longer." in table
    table = pipeline_results.ways_table([changed])
    assert [*case, FREE, "−1.2%", "0.0%", "10.0 → 9.0", "10.0%", "12.0%"] in cells(table)
    assert "on 2 GPUs 110.0% where 20.0% was measured (1F1B, width 4096, bound by the link)" in table
    found = cells(pipeline_results.bound_table([changed]))
    assert [*case, "20.0%", "90.0", "0.90", "yes", "1.25"] in found
    assert [row[-2] for row in found if row[1] == "ZBV"] == ["no"]


def test_says_that_gradients_differ_on_any_rank(changed):
    assert "Gradients are bit-identical" in pipeline_results.half_table([changed])
    row_of(changed, HALF, rank=1)["bit_identical"] = False
    assert "Gradients differ" in pipeline_results.half_table([changed])


def test_links_are_those_of_each_rank(record):
    record["links"][1] = {
        "alone": {"d2h_bytes_per_s": 51e9, "h2d_bytes_per_s": 52e9, "duplex_bytes_per_s": 93e9},
        "all at once": {"d2h_bytes_per_s": 24e9, "h2d_bytes_per_s": 25e9, "duplex_bytes_per_s": 46e9},
    }
    assert cells(pipeline_results.links_table([record]))[3] == ["2", "1", "51", "52", "93", "24", "25", "46"]


def test_names_the_largest_peak_of_all_ranks(record):
    row_of(record, NOTHING, width="12288")["peak_bytes"] = 50 * GIB
    row_of(record, HALF, width="12288")["peak_bytes"] = 2 * GIB
    row_of(record, HALF, width="12288", rank=1)["peak_bytes"] = 30 * GIB
    assert "1F1B on 2 GPUs 50.0 → 30.0" in pipeline_results.ranks_table([record])


def test_says_what_the_job_needs(record):
    row_of(record, NOTHING, width="12288")["peak_bytes"] = 50 * GIB
    row_of(record, NOTHING, width="12288", rank=1)["peak_bytes"] = 40 * GIB
    row_of(record, HALF, width="12288").update(peak_bytes=20 * GIB, peak_saved=0.6)
    row_of(record, HALF, width="12288", rank=1)["peak_bytes"] = 30 * GIB
    found = {tuple(row[:3]): row[3:7] for row in cells(pipeline_results.job_table([record]))}
    assert found["2", "1F1B", "12288"] == ["50.0 → 30.0", "40.0%", "0 → 1", "60.0%"]


def test_counts_the_jobs_that_need_as_much_as_before(record):
    needs = [row for row in cells(pipeline_results.job_table([record]))[2:] if len(row) > 4]
    same = sum(float(row[4].rstrip("%").replace("−", "-")) < 1 for row in needs)
    assert f"In {same} of {len(needs)} cases the largest peak stays" in pipeline_results.job_table([record])


def test_draws_every_case_and_says_it(changed, tmp_path):
    path = tmp_path / "drawn.svg"
    with mpl.rc_context(drawing.STYLE):
        pipeline_picture.draw([changed]).savefig(path, format="svg")
    said = {text.strip() for text, _, _ in drawing.texts(path)}
    titles = {f"{name}, width {width}" for name in ("1F1B", "ZBV") for width in ("4096", "12288")}
    assert titles | {HALF, FREE, BOUND, "predicted", "without", "2 GPUs: peak of rank 0, GiB"} <= said
    picture = pipeline_picture.picture([changed], page_text.ROOT / "docs" / "howto" / "page.md")
    assert "2 GPUs, 1F1B, width 4096: peak 60.0% less, step 50.0% longer" in picture
    assert picture.endswith("](../_static/results/pipeline.svg)\n")


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
def test_refuses_a_record_that_does_not_show_what_the_page_says(place, change, message, record, tmp_path):
    row_of(record, **place).update(change)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), "utf-8")
    with pytest.raises(ValueError, match=message):
        pipeline_results.read_records([path])
