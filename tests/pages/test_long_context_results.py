"""What the pages say of long sequences is what their record says."""

import json

import pytest

pytest.importorskip("matplotlib")

import drawing
import long_context_results
import matplotlib as mpl
import page_text

GIB = 1 << 30
TIMES = {"peak_bytes": 90 * GIB, "host_bytes": 30 * GIB, "stall_s": 0.25}


def length(tokens, way, step_s):
    return {"way": way, "tokens": tokens, "step_s": step_s, "tokens_per_s": tokens / step_s, **TIMES}


def limited(limit_gib, way, tokens):
    failed = {"lora": None, "checkpointing": tokens + 8192}.get(way, tokens + 4096)
    found = {"way": way, "limit_bytes": limit_gib * GIB, "longest_tokens": tokens, "shortest_failed_tokens": failed}
    found["whole"] = way != "lora"
    return found | ({"tokens_per_s": 2500.0, "step_s": tokens / 2500} if tokens else {})


RECORD = {
    "small": False,
    "date": "2026-01-02T03:04:05+00:00",
    "hardware": {"gpu": "A GPU"},
    "versions": {"torch": "2.11.0+cu130"},
    "rows": [
        length(262144, "plan", 150.0) | {"peak_reserved_bytes": 90 * GIB},
        length(131072, "plan", 40.0) | {"peak_reserved_bytes": 79 * GIB},
        length(131072, "inputs", 50.0),
        {"way": "inputs", "tokens": 393216, "error": "OutOfMemoryError"},
        {"way": "equal", "tokens": 64, "losses": [2.5, 2.25], "gradient_norms": [3.0, 3.5], "gradients_apart": 0.012},
        limited(80, "checkpointing", 65536),
        limited(24, "checkpointing", 0),
        limited(24, "streamed", 131072),
        limited(24, "lora", 139264),
    ],
}


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]


def test_lengths_are_beside_checkpointing():
    found = long_context_results.lengths_table(RECORD)
    assert found.startswith("A GPU, torch 2.11.0, 2026-01-02: ")
    assert cells(found)[2:] == [
        ["131,072", "checkpointing, inputs travel", "50.0", "1.00 ×", "2,621", "90.0", "30.0", "0.2"],
        ["131,072", "as a plan says", "40.0", "0.80 ×", "3,277", "90.0", "30.0", "0.2"],
        ["262,144", "as a plan says", "150.0", "", "1,748", "90.0", "30.0", "0.2"],
    ]


def test_longest_contexts_are_by_memory():
    head, _, *rows = cells(long_context_results.longest_table(RECORD))
    assert head == ["device", "checkpointing", "this library", "weights streamed", "streamed, LoRA"]
    assert rows == [
        [
            "24 GiB",
            "does not fit",
            "does not fit",
            "131,072 (2,500 tokens/s)",
            "at least 139,264 (about 2,500 tokens/s)",
        ],
        [
            "80 GiB",
            "at least 65,536, less than 73,728 (2,500 tokens/s)",
            "at least 131,072 (3,277 tokens/s)",
            "not tried",
            "not tried",
        ],
    ]


def test_a_step_that_was_content_with_less_counts_for_this_library():
    """The longest one of those that were measured without a limit."""
    assert "inputs" not in long_context_results.longest(RECORD)[24 * GIB]
    found = long_context_results.longest(RECORD)[80 * GIB]["inputs"]
    assert found == {"longest_tokens": 131072, "tokens_per_s": 131072 / 40}


def test_says_how_near_it_is():
    said = long_context_results.equal_sentence(RECORD)
    assert "the loss is 2.250000, and 2.500000 for the model as it is" in said
    assert "gradients 3.5 and 3. Each parameter's gradient is within 1.2%" in said


def test_draws_the_longest(tmp_path):
    path = tmp_path / "drawn.svg"
    with mpl.rc_context(drawing.STYLE):
        long_context_results.draw(RECORD).savefig(path, format="svg")
    said = {text.strip() for text, _, _ in drawing.texts(path)}
    assert {
        "24 GiB",
        "80 GiB",
        "≥64",
        "128",
        "≥136",
        "≥128",
        "checkpointing",
        "weights streamed",
        "streamed, LoRA",
    } <= said
    picture = long_context_results.longest_picture(RECORD, page_text.ROOT / "docs" / "howto" / "page.md")
    assert "24 GiB: checkpointing 0, weights streamed 131,072" in picture
    assert picture.endswith("](../_static/results/longest_context.svg)\n")


def test_a_small_record_is_refused(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD | {"small": True}), "utf-8")
    with pytest.raises(ValueError, match="must be of full size"):
        page_text.full_record(path)


def test_blocks_are_there_as_soon_as_there_is_a_record():
    there = long_context_results.RECORD.exists()
    assert bool(long_context_results.BLOCKS) == there
