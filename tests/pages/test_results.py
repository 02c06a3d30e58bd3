"""Measured figures in the pages, the pictures and the figures are those of the committed records and of the library."""

import ast
import re
import sys

import pytest

pytest.importorskip("matplotlib")

import drawing
import page_text
import recipe_results
import varying_results

import results
from benchmarks.recipe import MOST_PINNED

DRAWINGS = drawing.at_both_widths(results.PICTURES)
NIGHTLY = pytest.mark.nightly
SCHEDULE = page_text.ROOT / "docs/_static/figures/schedule_2_of_5.svg"
LINKS = SCHEDULE.with_stem("links")


@pytest.mark.slow
def test_committed_blocks_are_up_to_date():
    assert not results.changed_pages(), "run python tools/pages/results.py and commit the result"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        # The narrow ones are drawn from the same values; the ways to train are dozens of plans.
        pytest.param(path, id=path.stem, marks=NIGHTLY if path not in results.PICTURES or path.stem == "ways" else ())
        for path in DRAWINGS
    ],
)
def test_committed_drawings_are_up_to_date(path):
    assert results.changed_drawing(path) is None, "run python tools/pages/results.py and commit the result"


def test_all_drawings_are_committed_and_no_other():
    folders = {(results.ROOT / path).parent for path in DRAWINGS}
    assert {svg.relative_to(results.ROOT) for folder in folders for svg in folder.glob("*.svg")} == set(DRAWINGS)


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_drawings_are_small_and_transparent(path):
    """That a phone shows their text large enough, the browser's tests find."""
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


def test_every_block_is_in_a_page_and_the_other_way_round():
    text = "".join(page.read_text("utf-8") for page in results.pages())
    assert set(re.findall(r"<!-- (table|picture): (\w+) -->", text)) == set(results.BLOCKS)


def test_refuses_blocks_that_it_would_not_fill():
    begins = "<!-- table: activations -->\n"
    for text in ("<!-- table: nothing -->\n<!-- /table -->", begins, begins + "<!-- /picture -->"):
        with pytest.raises(ValueError, match=r"blocks must be closed, and be among '(table|picture): "):
            results.filled(text, results.ROOT / "README.md")


@pytest.mark.slow
def test_check_names_what_is_out_of_date(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- table: link -->\nold\n<!-- /table -->\nz\n", "utf-8")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    [picture] = [path for path in results.PICTURES if path.stem == "tradeoff"]
    monkeypatch.setattr(results, "PICTURES", {picture: results.PICTURES[picture]})
    monkeypatch.setattr(sys, "argv", ["results.py", "--check"])
    pictures = r"docs/_static/results/tradeoff\.svg, docs/_static/results/tradeoff_narrow\.svg"
    with pytest.raises(SystemExit, match=rf"^out of date: README\.md, {pictures}; run"):
        results.main()
    monkeypatch.setattr(sys, "argv", ["results.py"])
    results.main()
    lines = page.read_text("utf-8").splitlines()
    assert (lines[:2], lines[-2:]) == (["a", "<!-- table: link -->"], ["<!-- /table -->", "z"])
    assert "55.2 GB/s" in lines[4]
    assert not results.changed_pages()


def whole_training(budget_gib, **found):
    return {"tokens": 16384, "budget_bytes": budget_gib << 30, **found}


MADE = {
    "date": "2026-11-24T12:00:00+00:00",
    "commit": "0123456789",
    "hardware": {"gpu": "NVIDIA H200"},
    "versions": {"torch": "2.11.0+cu130"},
    "rows": [
        whole_training(0, step_s=2.0, peak_bytes=98 << 30, pinned_bytes=1),
        whole_training(24, error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        whole_training(
            32,
            step_s=2.1,
            peak_bytes=30 << 30,
            pinned_bytes=70 << 30,
            recipe="weights resident, gradients consumed, optimizer streamed",
            predicted_s=2.058,
            predicted_peak_bytes=round(30.3 * 2**30),
        ),
    ],
}


def test_a_record_of_whole_trainings_is_said_in_a_line_and_a_table():
    line = recipe_results.line_of(MADE)
    assert "16,384 tokens: **98 → 30 GiB** of GPU memory, step **+5.0%** against" in line
    assert "with 70 GiB of host memory. The call chose to free each gradient" in line
    assert "stepped and to hold the optimizer state in host memory. NVIDIA" in line
    text = recipe_results.table_of(MADE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[0:1] == "|"]
    assert "2026-11-24" in text
    assert rows[0][:4] == ["budget", "longer by", "peak, GiB", "step, s"]
    assert rows[2][:5] == ["none", "", "98.0", "2.00", "0.0"]
    assert rows[3][:4] == ["24 GiB", "", "", "out of memory"]
    assert rows[4][:5] == ["32 GiB", "+5.0%", "30.0", "2.10", "70.0"]
    assert rows[4][5:] == ["−2.0%, +1.0%", "gradients consumed, optimizer streamed"]


def test_without_a_record_of_whole_trainings_the_pages_say_so(tmp_path):
    assert recipe_results.record_of(tmp_path / "recipe.json") is None
    assert "No run of the whole on a GPU is recorded yet" in recipe_results.line_of(None)
    failed = MADE | {"rows": MADE["rows"][:2]}
    assert recipe_results.line_of(failed) == recipe_results.line_of(None)
    assert "benchmarks.recipe" in recipe_results.table_of(None)


def test_a_table_of_several_runs_says_when_each_row_was_measured():
    older = MADE["rows"][2] | {"date": "2026-11-23T12:00:00+00:00", "commit": "fedcba9876"}
    text = recipe_results.table_of(MADE | {"rows": [*MADE["rows"][:2], older]})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[0:1] == "|"]
    assert "2 runs (last column), 2026-11-23 and 2026-11-24." in text
    assert [row[-1] for row in rows[2:]] == ["2026-11-24, 0123456", "2026-11-24, 0123456", "2026-11-23, fedcba9"]
    assert "measured |" not in recipe_results.table_of(MADE)


def test_a_record_of_varying_lengths_is_said_in_a_table():
    ways = {"memory_budget": 1.04, "plan by hand": 1.0}
    rows = [
        {"what": what, "ratio": ratio, "train_s": 100 * ratio, "peak_bytes": 8 << 30, "same_losses": True}
        | {"over_budget": [{"step": 3, "tokens": 9, "bytes": 1 << 27}], "measuring": [0, 1]}
        for what, ratio in ways.items()
    ]
    record = MADE | {"steps": 500, "budget_bytes": 8 << 30, "most_bytes": 16 << 30, "rows": rows}
    text = varying_results.told(record)
    assert "500 steps within 8.00 GiB, where the longest batch adds 16.00 GiB. The largest excess" in text
    assert "is 1.6%. Losses are identical in all ways." in text
    assert re.search(r"\| `memory_budget` +\| +\+4.0% \| +8.00 \| +104 \| +1 \| +2 \|", text)
    assert varying_results.told(None) == "No run on a GPU is recorded yet.\n"


def test_the_call_of_the_start_page_is_the_one_that_was_measured():
    code = re.search(r"```python\n(.*?)```", (results.ROOT / "index.md").read_text("utf-8"), re.DOTALL)[1]
    call = ast.parse(code).body[-1].value
    said = {one.arg: ast.unparse(one.value).replace("'", '"') for one in call.keywords}
    assert said.pop("memory_budget") == '"24GiB"'
    assert ", ".join(f"{name}={value}" for name, value in said.items()) == recipe_results.OPTIONS.strip("`")
    assert recipe_results.PINNED == MOST_PINNED


def test_the_readme_begins_like_the_start_page():
    """The same in the same order; only the start page has buttons."""
    readme = (results.ROOT / "README.md").read_text("utf-8").partition("## Install")[0]
    start = (results.ROOT / "index.md").read_text("utf-8").partition("```{toctree}")[0]
    assert re.sub(r"::::\{grid\}.*?\n::::\n\n", "", start, flags=re.DOTALL) == readme
