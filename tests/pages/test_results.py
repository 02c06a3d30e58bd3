"""Measured figures in the pages and the pictures are those of the committed records."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import activation_results
import drawing
import figures
import graph_results
import suite_picture
import suite_results

import results
from benchmarks.verdicts import with_ratios

GIB = 1 << 30


def row(k, step_s, peak_gib, *, workload="decoder", bit_identical=True):
    return {
        "workload": workload,
        "family": "offload" if k else "nothing",
        "k": k,
        "step_s": step_s,
        "peak_bytes": int(peak_gib * GIB),
        "copied_bytes": k * GIB,
        "link_s": k * 0.05,
        "bit_identical": bit_identical,
    }


RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "link": {"d2h_bytes_per_s": 50e9, "h2d_bytes_per_s": 51e9, "duplex_bytes_per_s": 90e9},
}
RECORD = {
    "hardware": {"gpu": "A GPU"},
    "versions": {"torch": "2.11.0+cu130"},
    "runs": {"decoder": RUN},
    "rows": [row(18, 0.9, 3.0), row(0, 0.4, 20.0), row(5, 0.398, 15.0), row(10, 0.5, 10.0)],
}


def cells_of(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]


# The pages.


@pytest.mark.slow
def test_committed_blocks_and_pictures_are_up_to_date():
    assert not results.changes(), "run python tools/pages/results.py and commit the result"


@pytest.mark.parametrize("path", drawing.at_both_widths(results.PICTURES), ids=lambda path: path.stem)
def test_pictures_are_small_transparent_and_without_a_date(path):
    text = (results.ROOT / path).read_text("utf-8")
    assert len(text) < 80_000
    assert "<dc:date>" not in text
    background = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', text)
    assert background is None or background[1] == "fill: none"


def test_narrow_drawings_can_be_read_on_a_phone():
    """358 pixels are what a phone of 390 has for them."""
    wide = [*results.PICTURES, *(Path("docs/_static/figures") / f"{name}.svg" for name in figures.FIGURES)]
    for path in map(drawing.narrow_path, wide):
        text = (results.ROOT / path).read_text("utf-8")
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])
        sizes = [float(size) for size in re.findall(r"font(?:-size)?:[^;\"]*?([\d.]+)px", text)]
        assert min(sizes) * 358 / width >= 9, path


def test_the_readme_names_the_narrow_drawing():
    picture = results.BLOCKS["picture", "budgets"](results.ROOT / "README.md")
    assert 'srcset="docs/_static/results/budgets_narrow.svg"' in picture
    assert '<img alt="Step time against activation peak.' in picture
    assert results.BLOCKS["picture", "budgets"](results.ROOT / "index.md").startswith("![Step time")


def test_every_block_is_in_a_page_and_the_other_way_round():
    text = "".join(page.read_text("utf-8") for page in results.pages())
    assert set(re.findall(r"<!-- (table|picture): (\w+) -->", text)) == set(results.BLOCKS)


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of a record that is not committed."""
    monkeypatch.setattr(activation_results, "read_record", lambda: RECORD)
    monkeypatch.setattr(results, "BLOCKS", activation_results.BLOCKS)
    monkeypatch.setattr(results, "PICTURES", activation_results.PICTURES)


def test_only_what_is_between_the_comments_is_replaced(blocks):
    page = results.ROOT / "README.md"
    lines = results.filled("a\n<!-- table: link -->\nold\n<!-- /table -->\nz\n", page).splitlines()
    assert lines[:2] == ["a", "<!-- table: link -->"]
    assert lines[-2:] == ["<!-- /table -->", "z"]
    assert "old" not in lines
    assert any("50.0 GB/s" in line for line in lines)


def test_filling_twice_changes_nothing(blocks):
    page = results.ROOT / "docs" / "how_it_works.md"
    text = "<!-- table: activations -->\n<!-- /table -->\n<!-- picture: tradeoff -->\n<!-- /picture -->\n"
    once = results.filled(text, page)
    assert results.filled(once, page) == once
    assert "](_static/results/tradeoff.svg)" in once


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: nothing -->\n<!-- /table -->",
        "<!-- table: activations -->\n",
        "<!-- table: activations -->\n<!-- /picture -->",
    ],
)
def test_refuses_blocks_that_it_would_not_fill(blocks, text):
    with pytest.raises(ValueError, match="blocks must be closed, and be among 'table: activations'"):
        results.filled(text, results.ROOT / "README.md")


def test_two_modules_must_not_have_the_same_block(monkeypatch):
    monkeypatch.setattr(suite_results, "BLOCKS", {("table", "link"): str})
    with pytest.raises(ValueError, match=r"suite_results.BLOCKS must not repeat .* got \[\('table', 'link'\)\]"):
        results.merged("BLOCKS")


@pytest.mark.slow
def test_check_names_what_is_out_of_date(blocks, tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text("<!-- table: link -->\n<!-- /table -->\n", "utf-8")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results.py", "--check"])
    pictures = r"docs/_static/results/tradeoff\.svg, docs/_static/results/tradeoff_narrow\.svg"
    with pytest.raises(SystemExit, match=rf"^out of date: README\.md, {pictures}; run"):
        results.main()
    monkeypatch.setattr(sys, "argv", ["results.py"])
    results.main()
    assert cells_of(page.read_text("utf-8"))[-1][:2] == ["A GPU", "50.0 GB/s"]
    assert not results.changes()


# The decoder and the LayerNorm-MLP, k by k.


def test_the_table_says_what_was_measured():
    table = activation_results.activations_table(RECORD)
    assert table.startswith("A GPU, link 50 and 51 GB/s (to the host and back), torch 2.11.0, 2026-01-02")
    assert cells_of(table)[2:] == [
        ["0", "400", "", "20.00", "", "", ""],
        ["5", "398", "−0.5%", "15.00", "25%", "5.00", "250"],
        ["10", "500", "+25.0%", "10.00", "50%", "10.00", "500"],
        ["18", "900", "+125.0%", "3.00", "85%", "18.00", "900"],
    ]


def test_only_this_library_s_rows_count():
    others = [{**row(18, 0.1, 1.0), "family": family} for family in ("te", "offload_checkpoint")]
    record = {**RECORD, "rows": RECORD["rows"] + others}
    assert [row["step_s"] for row in activation_results.rows_of(record, "decoder")] == [0.4, 0.398, 0.5, 0.9]


def test_free_is_within_three_percent_and_without_a_gap():
    assert activation_results.free_layers(activation_results.rows_of(RECORD, "decoder")) == 5
    assert activation_results.free_layers([row(0, 1.0, 1), row(1, 1.1, 1), row(2, 1.0, 1)]) == 0


def test_refuses_changed_gradients_and_a_missing_workload():
    record = copy.deepcopy(RECORD)
    record["rows"].append(row(12, 0.6, 8.0, bit_identical=False))
    with pytest.raises(ValueError, match=r"gradients differ .* at k = \[12\]"):
        activation_results.rows_of(record, "decoder")
    with pytest.raises(ValueError, match="must have the workload 'LayerNorm-MLP' with k = 0"):
        activation_results.rows_of(record, "LayerNorm-MLP")


def test_draws_every_point_and_the_free_region(tmp_path):
    path = tmp_path / "tradeoff.svg"
    drawing.save(lambda: activation_results.draw(RECORD), path)
    said = {text for text, _, _ in drawing.texts(path)}
    assert {"k = 0", "5", "10", "k = 18", "at most 3% longer", "measured step", "copies alone"} <= said


# The suite.


def suite_row(family, step_s, peak_gib, *, workload="decoder", k=None, copied_gib=0.0, bit_identical=True):
    return {
        "workload": workload,
        "family": family,
        "contender": family if k is None else f"{family} {k}",
        "k": k,
        "times_s": [step_s - 0.005, step_s, step_s + 0.005],
        "peak_bytes": int(peak_gib * GIB),
        "copied_bytes": copied_gib * GIB,
        "pinned_bytes": 2 * copied_gib * GIB,
        "first_s": 1.25,
        "bit_identical": bit_identical,
    }


SUITE_ROWS = [
    suite_row("nothing", 0.4, 20, k=0),
    suite_row("checkpoint", 0.5, 3),
    suite_row("save_on_cpu", 1.6, 2.5, copied_gib=20, bit_identical=False),
    {"workload": "decoder", "family": "trl", "contender": "TRL", "k": None, "error": "trl is not installed"},
    suite_row("offload", 0.4, 15, k=5, copied_gib=5),
    suite_row("offload", 0.9, 3, k=18, copied_gib=20),
    suite_row("offload_checkpoint", 0.5, 2, k=18, copied_gib=1),
    suite_row("nothing", 5.0, 100, k=0, workload="long sequence"),
    suite_row("offload", 5.1, 40, k=4, workload="long sequence"),
    {"workload": "LayerNorm-MLP", "family": "nothing", "contender": "nothing", "k": 0, "error": "it broke"},
]
SUITE = {
    **RECORD,
    "versions": {"torch": "2.11.0+cu130", "transformers": "5.17.0", "trl": None},
    "small": False,
    "rows": with_ratios(SUITE_ROWS, dict.fromkeys(("decoder", "long sequence", "LayerNorm-MLP"), RUN["link"])),
    "runs": {"decoder": {**RUN, "seconds": 100.0}, "long sequence": {"seconds": 80.0, "tokens": 131072, "layers": 6}},
    "verdicts": [
        {"claim": "one", "measured": "1.02", "holds": True},
        {"claim": "two", "measured": "1.20", "holds": False},
        {"claim": "three", "measured": "not measured", "holds": None},
    ],
    "host_cost": [
        {
            "operation_s": 10e-6,
            "hooks_s": 1e-6,
            "alias_s": 1.5e-6,
            "stays_s": 2.04e-6,
            "stays_later_s": 0.0,
            "bare_calls_s": 30e-6,
            "alone_s": alone_s,
        }
        for alone_s in (70e-6, 42e-6, 50e-6)
    ],
    "small_copies": [
        {
            "sizes": [
                {
                    "size_bytes": 1 << 16,
                    "out_bytes_per_s": out_bytes_per_s,
                    "back_bytes_per_s": 51e8,
                    "out_of_link": 0.1,
                    "back_of_link": 0.1,
                }
            ]
        }
        for out_bytes_per_s in (5e9, 4e9, 7e9)
    ],
}


def test_a_workload_s_table_has_every_contender():
    table = suite_results.workload_table(SUITE, "decoder")
    assert cells_of(table)[2:] == [
        ["nothing 0", "400 ± 5", "1.00 ×", "20.00", "0.00", "", "0.00", "1.2", "equal"],
        ["checkpoint", "500 ± 5", "1.25 ×", "3.00", "0.00", "", "0.00", "1.2", "equal"],
        ["save_on_cpu", "1,600 ± 5", "4.00 ×", "2.50", "20.00", "1.88 ×", "40.00", "1.2", "differ"],
        ["offload 5", "400 ± 5", "1.00 ×", "15.00", "5.00", "1.00 ×", "10.00", "1.2", "equal"],
        ["offload 18", "900 ± 5", "2.25 ×", "3.00", "20.00", "1.06 ×", "40.00", "1.2", "equal"],
        ["offload_checkpoint 18", "500 ± 5", "1.25 ×", "2.00", "1.00", "1.00 ×", "2.00", "1.2", "equal"],
    ]
    assert table.endswith("Not measured: TRL (trl is not installed).\n")


def test_who_fails_has_a_row_that_says_so():
    failed = [
        {"workload": "decoder", "family": "te", "contender": f"TE, k = {k}", "k": k, "error": "ValueError: a [view]"}
        for k in (5, 18)
    ]
    table = suite_results.workload_table({**SUITE, "rows": [*SUITE["rows"], *failed]}, "decoder")
    assert cells_of(table)[-2:] == [[f"TE, k = {k}", "fails", *[""] * 7] for k in (5, 18)]
    assert "\nFails: TE, k = 5; TE, k = 18, with `ValueError: a [view]`.\n\nNot measured: TRL" in table


def test_which_transformer_engine_was_measured_is_said():
    assert suite_results.te_text(SUITE) == ""
    runs = {**SUITE["runs"]}
    runs["decoder"] = {**runs["decoder"], "transformer_engine": {"commit": "0123456789abcdef", "licence": "Apache-2.0"}}
    record = {**SUITE, "runs": runs}
    assert suite_results.te_text(record) == "Here: decoder, with the file of commit `0123456789` (Apache-2.0).\n"
    runs["LayerNorm-MLP"] = {"transformer_engine": {"commit": "another", "licence": "Apache-2.0"}}
    with pytest.raises(ValueError, match=r"must be of one commit in suite\.json, got .*another"):
        suite_results.te_text(record)


def test_claims_are_shown_whether_they_hold_or_not():
    assert [cells[2] for cells in cells_of(suite_results.verdicts_table(SUITE))[2:]] == ["yes", "**no**", ""]


def test_what_it_was_measured_on_is_said():
    assert suite_results.setting_text(SUITE) == (
        "A GPU, link 50 and 51 GB/s (to the host and back), torch 2.11.0, transformers 5.17.0, 2026-01-02; 3 minutes.\n"
    )
    assert suite_results.long_text(SUITE) == "Here: 131,072 tokens, 5 layers.\n"


def test_what_a_tensor_costs_is_shown():
    rows = [cells[1:] for cells in cells_of(suite_results.host_cost_table(SUITE))]
    assert rows[0] == ["median of 3 runs", "from", "to"]
    assert [median for median, _, _ in rows[2:]] == ["10.0", "1.0", "1.5", "0.0", "2.0", "30.0", "50.0"]
    assert rows[8] == ["50.0", "42.0", "70.0"]
    assert cells_of(suite_results.small_copies_table(SUITE))[2:] == [["64 KiB", "5.0", "10%", "5.1", "10%"]]


def test_every_contender_is_in_the_picture_of_a_workload(tmp_path):
    path = tmp_path / "suite.svg"
    drawing.save(lambda: suite_picture.draw(SUITE), path)
    said = {text for text, _, _ in drawing.texts(path)}
    labels = {suite_picture.LOOKS[row["family"]].label for row in SUITE_ROWS if "error" not in row}
    assert labels | {"decoder", "long sequence", "18", "k = 5", "4 ×"} <= said
    assert not {"TRL", "LayerNorm-MLP"} & said
    alt = suite_picture.curves_picture(SUITE, results.ROOT / "docs" / "benchmarks.md")
    assert "decoder: 400 ms at 20.0 GiB to 500 ms at 2.0 GiB; long sequence: 5,000 ms" in alt
    assert alt.endswith("](_static/results/suite.svg)\n")


def test_without_a_record_there_are_no_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(suite_results, "RECORD", tmp_path / "suite.json")
    assert {text(results.ROOT / "docs" / "benchmarks.md") for text in suite_results.BLOCKS.values()} == {""}


def test_a_record_of_small_sizes_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({**SUITE, "small": True}), "utf-8")
    monkeypatch.setattr(suite_results, "RECORD", path)
    with pytest.raises(ValueError, match=r"suite\.json must be of full size"):
        suite_results.BLOCKS["table", "suite_decoder"](results.ROOT / "README.md")


def test_graphs_are_said_to_be_what_they_were_measured_to_be():
    rows = [
        {"workload": "decoder", "k": k, "mode": "graph", "step_s": 0.4 + k / 1000, "peak_bytes": (9 - k) * GIB}
        for k in (0, 5)
    ]
    summary = {"graph_offload_to_graph": 1.0125, "graph_saved_bytes": 5 * GIB, "eager_saved_bytes": 4 * GIB}
    said = graph_results.graphs_table(
        {
            **RECORD,
            **RUN,
            "rows": rows,
            "summary": {"decoder": summary, "launch_bound": {"graph_speedup_offloaded": 7.66}},
        }
    )
    assert cells_of(said)[2:] == [
        ["decoder", "0", "graph", "400.00", "9.00"],
        ["decoder", "5", "graph", "405.00", "4.00"],
    ]
    assert "1.012 times as long" in said
    assert "saves 5.00 GiB; eager mode saves 4.00 GiB" in said
    assert "7.7 times as fast" in said


def test_graphs_are_drawn_a_bar_each(tmp_path):
    rows = [
        {"workload": name, "k": k, "mode": mode, "step_s": 0.4 + k / 100}
        for name in ("decoder", "launch-bound")
        for mode in ("eager", "graph")
        for k in (0, 5)
    ]
    path = tmp_path / "graphs.svg"
    drawing.save(lambda: graph_results.draw({"rows": rows}), path)
    said = [text.strip() for text, _, _ in drawing.texts(path)]
    for text in ("eager, kept", "graph, 5 offloaded", "decoder", "launch-bound"):
        assert said.count(text) == (1 if "," not in text else 2)
    assert said.count("450.0") == 4
    alt = graph_results.graphs_picture({"rows": rows}, results.ROOT / "docs" / "howto" / "cuda_graphs.md")
    assert "launch-bound, graph, 5 offloaded: 450.0 ms" in alt
    assert alt.endswith("](../_static/results/graphs.svg)\n")


def test_every_family_looks_different():
    looks = [(look.line, look.hollow) for look in suite_picture.LOOKS.values()]
    assert len(set(looks)) == len(looks)


def test_the_readme_begins_like_the_start_page():
    """The same in the same order; the start page has cards beside it."""
    end = "so you can learn, test and\ndebug on a laptop."
    readme, start = ((results.ROOT / name).read_text("utf-8").partition(end)[0] for name in ("README.md", "index.md"))
    start = re.sub(r"::::\{grid\}.*?\n::::\n\n", "", start, flags=re.DOTALL)
    without_pictures = [results.BLOCK.sub(r"\1\4", text) for text in (readme, start)]
    assert without_pictures[0] == without_pictures[1]
