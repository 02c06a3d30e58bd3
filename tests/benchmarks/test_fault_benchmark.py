"""Each fault shows in the counters that the page of troubleshooting names, and the page's maker reads its trace."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")

import fault_results

from benchmarks import faults
from benchmarks.workloads import DecoderBlock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = tmp_path_factory.mktemp("faults") / "faults.json"
        monkeypatch.setattr(sys, "argv", ["faults", "--small", "--out", str(found)])
        faults.main()
        return found


@pytest.fixture(scope="module")
def rows(path):
    return {row["name"]: row for row in json.loads(path.read_text("utf-8"))["faults"]}


def saved(row):
    return row["kept"]["peak_bytes"] - row["found"]["peak_bytes"]


def test_all_are_recorded(path, rows):
    assert list(rows) == [fault.name for fault in faults.FAULTS]
    assert {"hardware", "versions", "commit", "date", "link"} <= json.loads(path.read_text("utf-8")).keys()
    assert {trace.stem for trace in path.with_suffix("").glob("*.json")} == set(rows)
    assert set(fault_results.NAMES) == set(rows) - {"reasons"}


def test_the_healthy_step_has_none_of_them(rows):
    stats = rows["healthy"]["stats"]
    assert set(stats["skipped"]) == {"parameter"}
    assert stats["offloaded_bytes"] == stats["reloaded_bytes"] > 0
    assert (stats["wasted"], stats["late_reloads"], rows["healthy"]["warnings"]) == ({}, 0, [])
    assert saved(rows["healthy"]) > 0


def test_nothing_travels_that_is_small(rows):
    assert rows["all_small"]["stats"]["offloaded_bytes"] == 0
    assert rows["all_small"]["stats"]["skipped"]["small"] > 0
    assert saved(rows["all_small"]) == 0
    assert rows["all_small"]["warnings"][0].startswith("a whole round of 10 layers was run and nothing was offloaded")


def test_what_a_hook_holds_is_not_freed(rows):
    stats = rows["held"]["stats"]
    assert set(stats["wasted"]) == {"Mm"}
    assert 0 < stats["wasted_bytes"] < stats["offloaded_bytes"]
    assert saved(rows["held"]) < saved(rows["healthy"])


def test_half_of_the_host_s_memory_holds_half(rows):
    stats = rows["no_room"]["stats"]
    assert stats["skipped"]["no host memory"] > 0
    assert 0 < stats["offloaded_bytes"] < rows["healthy"]["stats"]["offloaded_bytes"]
    assert "max_host_bytes" in rows["no_room"]["warnings"][0]


def test_a_missing_sync_makes_every_reload_late(rows):
    row = rows["late_reloads"]
    assert row["stats"]["late_reloads"] == faults.SMALL.k * row["steps"]
    assert row["stats"]["reloaded_bytes"] == row["stats"]["offloaded_bytes"] > 0
    assert row["warnings"][0].startswith("the output of each layer must be passed to the sync function")


def test_more_layers_copy_more(rows):
    names = ("too_many", "healthy", "first_step")
    many, healthy, first = (rows[name]["stats"]["offloaded_bytes"] / rows[name]["steps"] for name in names)
    assert many == first
    assert many == pytest.approx(3 * healthy, rel=0.05)  # what lies between two layers travels with one of them


def test_the_peak_elsewhere_is_that_of_the_logits(rows):
    row = rows["elsewhere"]
    assert row["stats"]["offloaded_bytes"] == rows["too_many"]["stats"]["offloaded_bytes"]
    logits_bytes = faults.SMALL.tokens * faults.SMALL.vocabulary * 4
    assert row["found"]["peak_bytes"] > 2 * logits_bytes > rows["too_many"]["found"]["peak_bytes"]


def test_small_tensors_are_many(rows):
    stats = rows["many_small"]["stats"]
    assert stats["offloaded_tensors"] >= faults.SMALL.k * faults.SMALL.operations * rows["many_small"]["steps"]


def test_every_reason_is_counted_once_a_step(rows):
    row = rows["reasons"]
    reasons = {"parameter", "leaf", "small", "device", "marked", "layout", "subclass", "resized", "no host memory"}
    assert row["stats"]["skipped"] == dict.fromkeys(reasons, row["steps"])


def test_the_large_size_is_that_of_the_reference_decoder():
    large = faults.LARGE
    block = DecoderBlock(large.hidden // 64, large.ffn // 64, large.heads // 16)
    assert (large.hidden, large.ffn, large.heads, large.tokens) == (4096, 11008, 32, 2 * 4096)
    assert block.gate.out_features == 172


def test_memory_is_thinned_to_its_highest_samples():
    memory = tuple((index / 1000, index % 7) for index in range(10_000))
    found = faults.thinned(faults.offload.Timeline((), memory, "title"))
    assert 0.9 * faults.MOST_SAMPLES < len(found.memory) <= faults.MOST_SAMPLES
    assert found.peak_bytes == 6
    assert set(found.memory) <= set(memory)
    assert faults.thinned(found) is found


# The pages.


def test_a_trace_is_a_timeline_again(rows, path):
    for name, row in rows.items():
        trace = json.loads((path.with_suffix("") / f"{name}.json").read_text("utf-8"))
        timeline = fault_results.timeline_of(trace)
        assert timeline.title == row["sees"]
        assert timeline.duration_s == pytest.approx(row["recorded"]["duration_s"], rel=1e-4)
        assert timeline.copied_bytes("d2h") == row["recorded"]["d2h_bytes"]
        again = fault_results.timeline_of(timeline.chrome_trace())
        assert [(span.lane, span.kind, span.layer, span.nbytes) for span in again.spans] == [
            (span.lane, span.kind, span.layer, span.nbytes) for span in timeline.spans
        ]
        assert again.peak_bytes == timeline.peak_bytes


def test_a_fault_s_picture_says_what_was_counted(path, monkeypatch):
    record = {**json.loads(path.read_text("utf-8")), "small": False}
    monkeypatch.setattr(fault_results, "RECORD", path)
    page = fault_results.ROOT / "docs" / "howto" / "troubleshooting.md"
    said = fault_results.fault_picture(record, "late_reloads", page)
    assert "](../_static/results/fault_late_reloads.svg)" in said
    assert "`late_reloads` 2" in said
    assert "faults/late_reloads.json>`" in said
    assert "`wasted` Mm" in fault_results.fault_picture(record, "held", page)
    assert "recorded first step" in fault_results.fault_picture(record, "first_step", page)
    assert "'no host memory': 1" in fault_results.reasons_text(record)
    assert fault_results.draw("late_reloads").axes
    with pytest.raises(ValueError, match=r"faults\.json must be of full size"):
        fault_results.read_record()
