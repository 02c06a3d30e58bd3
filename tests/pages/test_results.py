"""Measured figures in the pages, the pictures and the figures are those of the committed records and of the library."""

import ast
import re

import pytest

pytest.importorskip("matplotlib")

import drawing
import long_context_results
import recipe_results
from blocks import read as results_of

import results
from benchmarks.recipe import MOST_PINNED

DRAWINGS = drawing.at_both_widths(results.PICTURES)
SCHEDULE = results.ROOT / "docs/_static/figures/schedule_2_of_5.svg"
LINKS = SCHEDULE.with_stem("links")


@pytest.mark.slow
def test_committed_blocks_are_up_to_date():
    assert not results.changed_pages(), "run python tools/pages/results.py and commit the result"


@pytest.mark.drawn(5)
@pytest.mark.slow
@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_committed_drawings_are_up_to_date(path):
    assert results.changed_drawing(path) is None, "run python tools/pages/results.py and commit the result"


def test_all_drawings_are_committed_and_no_other():
    folders = {(results.ROOT / path).parent for path in DRAWINGS}
    assert {svg.relative_to(results.ROOT) for folder in folders for svg in folder.glob("*.svg")} == set(DRAWINGS)


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_drawings_are_small_and_transparent(path):
    text = (results.ROOT / path).read_text("utf-8")
    assert len(text) < 80_000
    assert "<dc:date>" not in text
    background = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', text)
    assert background is None or background[1] == "fill: none"


@pytest.mark.parametrize(
    ("svg", "before", "after"),
    [
        (SCHEDULE, ">F0</text>", ">F9</text>"),
        (SCHEDULE, ">compute</text>", "></text>"),
        (SCHEDULE, r"rotate\(-0 [\d.]+( [\d.]+\)\">B3<)", r"rotate(-0 1\1"),
        (SCHEDULE.with_stem("schedule_2_of_5_narrow"), ">2 of 5 layers", ">3 of 5 layers"),  # the title is not rotated
        (LINKS, r"(<use [^>]* y=)\"[\d.]+\"", r'\1"1"'),  # of a curve without texts: its markers say what was measured
    ],
)
def test_a_change_of_a_drawing_is_seen(tmp_path, svg, before, after):
    changed = tmp_path / "changed.svg"
    text, count = re.subn(before, after, svg.read_text("utf-8"), count=1)
    assert count
    changed.write_text(text, "utf-8")
    assert drawing.is_up_to_date(svg, svg)
    assert not drawing.is_up_to_date(svg, changed)


def test_the_longest_sequences_with_adamw_are_beside_those_without(monkeypatch):
    found = {"budget_bytes": 48 << 30, "longest_tokens": 98304, "shortest_failed_tokens": 102400, "whole": False}
    found |= {"step_s": 40.0, "tokens_per_s": 2457.6, "commit": "0123456789", "date": "2026-11-27T07:00:00+00:00"}
    lines = {}
    for rows in ([], [found, {"budget_bytes": 24 << 30, "error": "see the log"}]):
        records = {"long_context": results_of("long_context"), "recipe": results_of("recipe") | {"longest": rows}}
        monkeypatch.setattr(long_context_results, "read", records.__getitem__)
        lines[len(rows)] = long_context_results.longest_table(results.ROOT / "index.md").splitlines()
        assert ("AdamW" in long_context_results.longest_said()) is bool(rows)
        assert long_context_results.draw_longest().axes
    without, among = lines.values()
    assert "AdamW" not in "".join(without)
    assert "With AdamW: whole steps by `prepare`" in among[0]
    cells = [
        dict(zip(*([cell.strip() for cell in one.split("|")] for one in (among[2], row)), strict=True))
        for row in among[4:]
    ]
    assert {row["device"]: row["weights and AdamW streamed"] for row in cells} == {
        **{f"{size} GiB": "not tried" for size in (16, 24, 80, 140)},
        "48 GiB": "98,304 (about 2,458 tokens/s)",
    }


def test_every_block_is_in_a_page_and_the_other_way_round():
    text = "".join(page.read_text("utf-8") for page in results.pages())
    assert set(re.findall(r"<!-- (table|picture): (\w+) -->", text)) == set(results.BLOCKS)


def test_refuses_blocks_that_it_would_not_fill():
    begins = "<!-- table: activations -->\n"
    for text in ("<!-- table: nothing -->\n<!-- /table -->", begins, begins + "<!-- /picture -->"):
        with pytest.raises(ValueError, match=r"blocks must be closed, and be among '(table|picture): "):
            results.filled(text, results.ROOT / "README.md")


def test_the_start_page_begins_with_one_line_for_the_budget_that_was_measured():
    code = re.search(r"```python\n(.*?)```", (results.ROOT / "index.md").read_text("utf-8"), re.DOTALL)[1]
    [statement] = ast.parse(code).body
    assert len(code.splitlines()) == 1
    [budget] = [ast.literal_eval(one.value) for one in statement.value.keywords if one.arg == "memory_budget"]
    row, _ = recipe_results.best_of(results_of("recipe")["rows"])
    assert budget == f"{row['budget_bytes'] >> 30}GiB"
    assert recipe_results.PINNED == MOST_PINNED


def test_the_readme_begins_like_the_start_page():
    readme = (results.ROOT / "README.md").read_text("utf-8").partition("## Install")[0]
    start = (results.ROOT / "index.md").read_text("utf-8").partition("```{toctree}")[0]
    assert re.sub(r"::::\{grid\}.*?\n::::\n\n", "", start, flags=re.DOTALL) == readme
