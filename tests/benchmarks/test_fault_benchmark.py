"""Each fault shows in the counters that the page of troubleshooting names."""

import pytest
from small_run import record_of

from benchmarks import faults

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "faults.json"
    found = {row["name"]: row for row in record_of(faults, path)["faults"]}
    assert {trace.stem for trace in path.with_suffix("").glob("*.json")} == set(found)
    return found


def saved(row):
    return row["kept"]["peak_bytes"] - row["found"]["peak_bytes"]


def test_each_fault_shows_in_its_counters_and_the_healthy_step_has_none(rows):
    stats = rows["healthy"]["stats"]
    assert set(stats["skipped"]) == {"parameter"}
    assert (stats["wasted"], stats["late_reloads"], rows["healthy"]["warnings"]) == ({}, 0, [])
    assert saved(rows["healthy"]) > 0
    healthy = stats["offloaded_bytes"]
    assert healthy == stats["reloaded_bytes"] > 0
    small = rows["all_small"]["stats"]
    assert (small["offloaded_bytes"], saved(rows["all_small"])) == (0, 0)
    assert small["skipped"]["small"] > 0
    held = rows["held"]["stats"]
    assert set(held["wasted"]) == {"Mm"}
    assert 0 < held["wasted_bytes"] < held["offloaded_bytes"]
    assert saved(rows["held"]) < saved(rows["healthy"])
    half = rows["no_room"]["stats"]
    assert half["skipped"]["no host memory"] > 0
    assert 0 < half["offloaded_bytes"] < healthy
    late = rows["late_reloads"]["stats"]
    assert late["late_reloads"] == faults.SMALL.k * rows["late_reloads"]["steps"]
    assert late["reloaded_bytes"] == late["offloaded_bytes"] > 0
    many = rows["too_many"]["stats"]["offloaded_bytes"]
    assert many == rows["first_step"]["stats"]["offloaded_bytes"] == rows["elsewhere"]["stats"]["offloaded_bytes"]
    assert many == pytest.approx(3 * healthy, rel=0.05)  # what lies between two layers is offloaded with one of them
    logits_bytes = faults.SMALL.tokens * faults.SMALL.vocabulary * 4
    assert rows["elsewhere"]["found"]["peak_bytes"] > 2 * logits_bytes > rows["too_many"]["found"]["peak_bytes"]
    chains = rows["many_small"]
    assert chains["stats"]["offloaded_tensors"] >= faults.SMALL.k * faults.SMALL.operations * chains["steps"]


def test_faults_are_warned_of(rows):
    for name, text in (
        ("all_small", "a whole round of 10 layers was run and nothing was offloaded"),
        ("no_room", "max_host_bytes"),
        ("late_reloads", "the output of each layer must be passed to the sync function"),
    ):
        assert text in rows[name]["warnings"][0]
