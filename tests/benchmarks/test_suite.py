"""The benchmark suite runs on the CPU at a small size."""

import json
import sys

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from benchmarks import contenders, suite
from benchmarks.cases import cases
from benchmarks.comparison import Comparison
from benchmarks.verdicts import GIB, OWN

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TE_FILE = """
import transformer_engine.pytorch as te
import transformer_engine.pytorch.cpu_offload_v1 as before
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from .quantized_tensor import QuantizedTensor, prepare_for_saving, restore_from_saved

import offload


def get_cpu_offload_context(**arguments):
    assert not TEDebugState.debug_enabled
    assert te.cpu_offload_v1 is before
    tensors, objects = prepare_for_saving(1, 2)
    assert restore_from_saved(objects, tensors) == [1, 2]
    assert not isinstance(tensors, QuantizedTensor)
    return offload.get_cpu_offload_context(**arguments, min_bytes=1)
"""


@pytest.fixture
def te_file(tmp_path):
    """Stands for Transformer Engine's file: it imports what that imports, and is this library."""
    path = tmp_path / "cpu_offload.py"
    path.write_text(TE_FILE, "utf-8")
    path.with_suffix(".txt").write_text("commit: 123abc\nlicence: ours\n", "utf-8")
    return path


def run_suite(monkeypatch, path, *arguments):
    monkeypatch.setattr(sys, "argv", ["suite", "--small", "--out", str(path), *arguments])
    suite.main()
    return json.loads(path.read_text("utf-8"))


def mlp_rows(**changes):
    rows: list = []
    Comparison(cases(small=True)["norm_mlp"], CPU, **{"min_bytes": 1, "host_bytes": GIB, **changes}).run(rows, list)
    return {row["contender"]: row for row in rows}


def test_a_part_is_measured_and_merged_into_the_record(te_file, monkeypatch, tmp_path):
    path = tmp_path / "suite.json"
    other = {"workload": "decoder", "family": "trl", "contender": "TRL", "k": None, "error": "kept"}
    monkeypatch.setattr(suite, "environment", lambda _: {"date": "", "commit": "", "hardware": 1, "versions": {}})
    monkeypatch.setattr(suite, "PACKAGES", ())
    path.write_text(json.dumps({"hardware": 1, "versions": {}, "small": True, "runs": {}, "rows": [other]}), "utf-8")
    arguments = ["--only", "norm_mlp", "small_copies", "--transformer-engine", str(te_file)]
    record = run_suite(monkeypatch, path, "--merge", *arguments)
    assert record["rows"][0] == other
    here = {row["contender"]: row for row in record["rows"][1:]}
    case = cases(small=True)["norm_mlp"]
    assert list(here) == [way.label for way in contenders.ways(case, min_bytes=1)]
    for row in here.values():
        if row["family"] in OWN:
            assert row["bit_identical"]
            assert row["copied_bytes"]
            assert row["ratio_to_limit"] >= 1
        assert "error" in row or {"step_s", "spread_s", "first_s", "peak_bytes", "pinned_bytes"} <= row.keys()
        assert "error" not in row or row["family"] == "trl"
    assert here["Transformer Engine, k = 1"]["peak_bytes"] == here["this library, k = 1"]["peak_bytes"]
    assert here["this library, k = 2"]["peak_bytes"] < here["this library, k = 1"]["peak_bytes"]
    run = record["runs"]["LayerNorm-MLP"]
    assert (run["transformer_engine"]["commit"], len(run["transformer_engine"]["sha256"])) == ("123abc", 64)
    assert [row["count"] for row in record["small_copies"][0]["sizes"]] == [64, 32]
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    with pytest.raises(ValueError, match="must have this run's hardware, 2, got 1; give another --out"):
        suite.Record(path, {"hardware": 2}, {}, merge=True)
    te_file.with_suffix(".txt").write_text("commit: 123abc\n", "utf-8")
    with pytest.raises(ValueError, match=r"cpu_offload\.txt must name commit and licence, got no licence; add a line"):
        run_suite(monkeypatch, path, *arguments)


def test_a_changed_gradient_is_seen(monkeypatch):
    class Rounds(save_on_cpu):
        def __init__(self, **_):
            super().__init__()
            pack = self.pack_hook
            self.pack_hook = lambda tensor: pack(tensor.bfloat16().to(tensor.dtype))

    monkeypatch.setattr(contenders, "save_on_cpu", Rounds)
    rows = mlp_rows()
    assert not rows["save_on_cpu"]["bit_identical"]
    assert rows["this library, k = 2"]["bit_identical"]
