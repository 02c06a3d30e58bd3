"""A record of weight streaming that does not show what the pages say is refused."""

import copy
import json

import pytest

pytest.importorskip("matplotlib")

import weight_results

RECORD = json.loads(weight_results.RECORD.read_text("utf-8"))


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
