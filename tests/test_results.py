"""Measured figures in the pages and the picture are those of the committed record."""

import copy
import json
import re
import sys

import pytest

pytest.importorskip("matplotlib")

import figures

import results

COMMITTED = results.ROOT / results.RECORD
needs_record = pytest.mark.skipif(not COMMITTED.exists(), reason="nothing was measured yet")


def row(k, step_s, peak_gib, *, workload="decoder", bit_identical=True):
    return {
        "workload": workload,
        "k": k,
        "step_s": step_s,
        "peak_bytes": int(peak_gib * results.GIB),
        "copied_bytes": k * results.GIB,
        "link_s": k * 0.05,
        "bit_identical": bit_identical,
    }


RECORD = {
    "date": "2026-01-02T03:04:05+00:00",
    "hardware": {"gpu": "A GPU"},
    "versions": {"torch": "2.11.0+cu130"},
    "link": {"d2h_bytes_per_s": 50e9, "h2d_bytes_per_s": 51e9, "duplex_bytes_per_s": 90e9},
    "rows": [row(18, 0.9, 3.0), row(0, 0.4, 20.0), row(5, 0.398, 15.0), row(10, 0.5, 10.0)],
}


@needs_record
def test_committed_blocks_and_picture_are_up_to_date():
    record = json.loads(COMMITTED.read_text("utf-8"))
    assert results.stale(record) == [], "run python tools/results.py and commit the result"


@needs_record
def test_the_picture_is_small_transparent_and_without_a_date():
    text = (results.ROOT / results.PICTURE).read_text("utf-8")
    assert len(text) < 50_000
    assert "<dc:date>" not in text
    background = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', text)
    assert background is None or background[1] == "fill: none"


def test_the_pages_have_blocks():
    text = "".join(page.read_text("utf-8") for page in results.pages())
    assert set(re.findall(r"<!-- (table|picture): (\w+) -->", text)) == set(results.BLOCKS)


def test_the_table_says_what_was_measured():
    page = results.ROOT / "README.md"
    lines = results.filled("a\n<!-- table: activations -->\nold\n<!-- /table -->\nz\n", page, RECORD).splitlines()
    assert lines[:2] == ["a", "<!-- table: activations -->"]
    assert lines[-2:] == ["<!-- /table -->", "z"]
    assert "A GPU, link 50 and 51 GB/s (to the host and back), torch 2.11.0, 2026-01-02" in "".join(lines)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert cells[2:] == [
        ["0", "400", "", "20.00", "", "", ""],
        ["5", "398", "−0.5%", "15.00", "25%", "5.00", "250"],
        ["10", "500", "+25.0%", "10.00", "50%", "10.00", "500"],
        ["18", "900", "+125.0%", "3.00", "85%", "18.00", "900"],
    ]


def test_filling_twice_changes_nothing():
    page = results.ROOT / "docs" / "how_it_works.md"
    text = "<!-- table: activations -->\n<!-- /table -->\n<!-- picture: tradeoff -->\n<!-- /picture -->\n"
    once = results.filled(text, page, RECORD)
    assert results.filled(once, page, RECORD) == once
    assert "](_static/results/tradeoff.svg)" in once


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: nothing -->\n<!-- /table -->",
        "<!-- table: activations -->\n",
        "<!-- table: activations -->\n<!-- /picture -->",
    ],
)
def test_refuses_blocks_that_it_would_not_fill(text):
    with pytest.raises(ValueError, match="blocks must be closed, and be among 'table: activations'"):
        results.filled(text, results.ROOT / "README.md", RECORD)


def test_free_is_within_two_percent_and_without_a_gap():
    assert results.free_layers(results.rows_of(RECORD, "decoder")) == 5
    assert results.free_layers([row(0, 1.0, 1), row(1, 1.1, 1), row(2, 1.0, 1)]) == 0


def test_refuses_changed_gradients_and_a_missing_workload():
    record = copy.deepcopy(RECORD)
    record["rows"].append(row(12, 0.6, 8.0, bit_identical=False))
    with pytest.raises(ValueError, match=r"gradients differ .* at k = \[12\]"):
        results.rows_of(record, "decoder")
    with pytest.raises(ValueError, match="must have the workload 'LayerNorm-MLP' with k = 0"):
        results.rows_of(record, "LayerNorm-MLP")


def test_draws_every_point_and_the_free_region(tmp_path):
    path = tmp_path / "tradeoff.svg"
    results.write_picture(RECORD, path)
    said = {text for text, _, _ in figures.texts(path)}
    assert {"k = 0", "5", "10", "k = 18", "at most 2% longer", "measured step", "copies alone"} <= said


def test_check_names_what_is_out_of_date(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text("<!-- table: link -->\n<!-- /table -->\n", "utf-8")
    record = tmp_path / "record.json"
    record.write_text(json.dumps(RECORD), "utf-8")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results.py", "--check", "--record", str(record)])
    with pytest.raises(SystemExit, match=r"^out of date: README\.md, docs/_static/results/tradeoff\.svg; run"):
        results.main()
    monkeypatch.setattr(sys, "argv", ["results.py", "--record", str(record)])
    results.main()
    assert "| A GPU | 50.0 GB/s" in page.read_text("utf-8")
    assert results.stale(RECORD) == []
