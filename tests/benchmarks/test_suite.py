"""The benchmark suite runs on the CPU at a small size, and its claims follow from its rows."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from benchmarks import contenders, suite
from benchmarks.cases import cases
from benchmarks.comparison import Comparison
from benchmarks.instruments import HostCopies
from benchmarks.report import write
from benchmarks.verdicts import GIB, OTHERS, OWN, verdicts, with_ratios

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
RECORD = json.loads((Path(suite.__file__).parents[1] / "results" / "suite.json").read_text("utf-8"))

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


def test_a_write_that_is_cut_off_leaves_the_last_record(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write(path, {"rows": [1]})
    monkeypatch.setattr(Path, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(path, {"rows": [1, 2]})
    assert json.loads(path.read_text("utf-8")) == {"rows": [1]}


def test_a_failure_within_a_layer_is_a_row_and_the_others_go_on(monkeypatch):
    class Fails:
        def __enter__(self):
            self.hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: 1 / 0, lambda _: 1 / 0)
            self.hooks.__enter__()
            return self

        def __exit__(self, *_):
            self.hooks.__exit__()

    for path in ("transformer_engine", "transformer_engine.pytorch"):
        module = ModuleType(path)
        module.__spec__ = ModuleSpec(path, None)
        module.get_cpu_offload_context = lambda **_: (Fails(), None)
        monkeypatch.setitem(sys.modules, path, module)
    rows = mlp_rows(host_bytes=1)
    assert rows["Transformer Engine, k = 1"]["error"] == "ZeroDivisionError: division by zero"
    assert rows["save_on_cpu"]["error"].startswith("would pin ")
    assert rows["checkpoint under save_on_cpu"]["bit_identical"]


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


@pytest.mark.gpu
def test_copies_to_the_host_are_counted():
    x = torch.ones(256, device="cuda", requires_grad=True)
    with HostCopies() as copies, save_on_cpu(pin_memory=True):
        y = torch.exp(x)
        (y * y).sum().backward()
    assert copies.nbytes == 3 * 1024


# Claims.


def row(family, step_s, peak_gib, *, workload="decoder", k=None, copied_gib=0.0, bit_identical=True):
    return {
        "workload": workload,
        "family": family,
        "contender": family if k is None else f"{family} {k}",
        "k": k,
        "times_s": [step_s, step_s, step_s],
        "peak_bytes": int(peak_gib * GIB),
        "copied_bytes": copied_gib * GIB,
        "bit_identical": bit_identical,
    }


GOOD = [
    row("nothing", 1.0, 20, k=0),
    row("checkpoint", 1.25, 3),
    row("checkpoint_on_cpu", 1.4, 1.9),
    row("offload", 1.0, 15, k=5, copied_gib=0.3),
    row("offload", 3.05, 3, k=18, copied_gib=1.0),
    row("offload_checkpoint", 1.26, 1.9, k=18),
    row("nothing", 5.0, 100, k=0, workload="long sequence"),
    row("offload", 5.1, 40, k=4, workload="long sequence"),
]
LINK = {"d2h_bytes_per_s": 1.0 * GIB, "h2d_bytes_per_s": 0.5 * GIB}


def said(rows):
    found = with_ratios(rows, {"decoder": LINK, "long sequence": LINK})
    return {verdict["claim"]: verdict for verdict in verdicts(found)}


def test_the_limit_is_compute_or_link():
    """A GPU at its power limit may be faster while some layers are offloaded than with nothing moved."""
    faster = row("offload", 0.98, 17, k=2, copied_gib=0.1)
    rows = {row["contender"]: row for row in with_ratios([*GOOD[:6], faster], {"decoder": LINK})}
    assert rows["offload 5"]["limit_s"] == 0.98  # 0.3 GiB take 0.9 s there and back
    assert rows["offload 18"]["limit_s"] == 3.0
    assert rows["offload 18"]["ratio_to_limit"] == 3.05 / 3.0
    assert rows["offload_checkpoint 18"]["limit_s"] == 1.25  # recomputing is part of its compute


@pytest.mark.parametrize("family", OTHERS)
def test_a_contender_below_the_curve_is_reported(family):
    assert [verdict["holds"] for verdict in said(GOOD).values()] == [True, None, True, True, True, True]
    verdict = next(iter(said([*GOOD, row(family, 1.2, 10)]).values()))
    assert verdict["holds"] is False
    assert verdict["measured"] == f"not so: {family}: in no more memory, this library takes 1.05 × its time"


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        (row("offload", 3.1, 3, k=18, copied_gib=1.0), "at most 1.03 × the limit"),
        (row("offload_checkpoint", 1.27, 1.9, k=18), "at least 1 GiB more than checkpointing"),
        (row("offload_checkpoint", 1.25, 2.1, k=18), "at least 1 GiB more than checkpointing"),
        (row("offload", 5.2, 40, k=4, workload="long sequence"), "every layer but the last"),
        (row("offload", 1.0, 15, k=5, copied_gib=0.3, bit_identical=False), "changes no bit"),
        ({**row("offload", 1.0, 15, k=5), "error": "it broke"}, "changes no bit"),
    ],
)
def test_a_violation_is_reported(changed, claim):
    names = ("workload", "contender")
    rows = [changed if all(old[name] == changed[name] for name in names) else old for old in GOOD]
    [verdict] = [verdict for text, verdict in said(rows).items() if claim in text]
    assert verdict["holds"] is False


def test_the_recorded_rows_have_their_ratios():
    rows = with_ratios(RECORD["rows"], {name: run["link"] for name, run in RECORD["runs"].items()})
    for now, before in zip(rows, RECORD["rows"], strict=True):
        for name in {"step_s", "limit_s", "ratio_to_limit"} & before.keys():
            assert now[name] == pytest.approx(before[name], rel=1e-4)
