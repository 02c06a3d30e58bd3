"""What the pages say of weight streaming is what its record says."""

import copy
import json

import pytest

pytest.importorskip("matplotlib")

import drawing
import matplotlib as mpl
import page_text
import weight_results

RECORD = json.loads(weight_results.RECORD.read_text("utf-8"))


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]


def test_says_what_was_measured():
    record = copy.deepcopy(RECORD)
    row = record["rows"][0]
    row |= {"tokens": 1234, "compute_forward_s": 0.1, "compute_backward_s": 0.2, "link_forward_s": 0.3}
    row |= {"link_backward_s": 0.4, "limit_s": 0.7, "step_s": 0.72, "ratio_to_limit": 1.02857, "fsdp_s": 1.5}
    row |= {"peak_device_bytes": 2.5e9}
    record["stats"] |= {"weight_bytes": 10e9, "gradient_host_bytes": 9e9, "staging_bytes": 1e9}
    record |= {"host_bytes": 20.5e9, "host_ratio": 1.025}
    found = cells(weight_results.weight_streaming_table(record))
    assert found[2] == ["1,234", "100 + 200", "300 + 400", "700", "720", "1.029 ×", "1,500", "2.5 GB"]
    found = cells(weight_results.weight_memory_table(record))
    assert found[2] == ["10.0 GB", "9.0 GB", "1.0 GB", "20.0 GB", "20.5 GB (1.025 ×)"]
    picture = weight_results.weight_streaming_picture(record, page_text.ROOT / "docs" / "howto" / "page.md")
    assert "1,234 tokens: limit 700, streamed 720, FSDP2 1,500 ms" in picture
    assert picture.endswith("](../_static/results/weight_streaming.svg)\n")


def test_says_whether_losses_are_identical():
    record = copy.deepcopy(RECORD)
    one = record["loss_curves"][0]
    record["loss_curves"] = [{**one, "identical": True}, {**one, "identical": False, "largest_difference": 0.0123}]
    assert [row[-1] for row in cells(weight_results.weight_losses_table(record))[2:]] == [
        "identical",
        "differ by up to 0.012",
    ]


@pytest.mark.slow
def test_draws_each_step_and_the_limits(tmp_path):
    path = tmp_path / "drawn.svg"
    record = copy.deepcopy(RECORD)
    record["rows"][0] |= {"tokens": 1234, "forward_s": 0.3, "step_s": 0.72}
    with mpl.rc_context(drawing.STYLE):
        weight_results.draw(record).savefig(path, format="svg")
    said = {text.strip() for text, _, _ in drawing.texts(path)}
    assert {"1,234 tokens: link binds", "720", "compute alone", "link alone", "streamed", "F", "B"} <= said
    assert len(path.read_text("utf-8")) < 50_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record.update(blocking_calls_few={"cudaMalloc": 1}),
            "few: nothing must block .*'cudaMalloc'",
        ),
        (
            lambda record: record["rows"][1].update(fsdp_s=None),
            "many: FSDP2 must have finished",
        ),
        (
            lambda record: record["loss_curves"][0].update(optimizer="X, both stepped on the host", identical=False),
            "X, both stepped on the host: losses must be identical",
        ),
        (
            lambda record: record["loss_curves"][0].update(last=float("nan")),
            "SGD: the loss must fall",
        ),
    ],
)
def test_refuses_a_record_that_does_not_show_what_the_pages_say(change, message, tmp_path):
    record = copy.deepcopy(RECORD)
    change(record)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), "utf-8")
    with pytest.raises(ValueError, match=message):
        weight_results.read_record(path)
