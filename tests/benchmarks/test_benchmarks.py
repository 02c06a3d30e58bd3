"""Each benchmark's whole program runs at its small size on the CPU, and all ways that it compares train the same."""

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import NO_GPU, as_torchrun, run_scripts

from benchmarks import long_context, never_slower, optimizer_state, pipeline
from benchmarks.report import environment

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torchao")]

pytest.importorskip("transformers")

ONE_MODEL = "--only diffusion --shares 0.6"
BUDGET = "--tokens 64 --budgets 8"
FEW_STEPS = "--until-settled 4"
LENGTHS = f"--seconds 0 --rows 256:inputs 256:hand 256:plan 64:equal 1GiB:{long_context.LIMITED[0]}"
RUNS: dict[str, tuple[str, str, str]] = {
    "budgets": ("never_slower", ONE_MODEL, "rows"),
    "long context": ("long_context", LENGTHS, "rows"),
    "optimizer state": ("optimizer_state", "", "rows"),
    "suite": ("suite", "--only norm_mlp small_copies", "rows"),
    "weights": ("weight_streaming", "--repeats 1", "rows"),
    "faults": ("faults", "", "faults"),
    "compiled": ("never_slower", f"{ONE_MODEL} --compiled aot_eager", "rows"),
    "varying lengths": ("varying_lengths", "--steps 24", "rows"),
    "recipes": ("recipe", BUDGET, "rows"),
    "recipes by hand": ("recipe", f"{BUDGET} --by-hand", "by_hand"),
    "largest": ("recipe", f"{BUDGET} {FEW_STEPS} --largest --host 4", "largest"),
    "longest": ("recipe", "--budgets 2 --longest --host 4 --seconds 30", "longest"),
}
"""A program, its options, and the part of its record that has a row for each way."""
NIGHTLY = ("faults", "compiled", "varying lengths", "recipes", "recipes by hand", "largest", "longest")


def numbers_of(what: Any, name: str) -> Iterator[Any]:
    """All values of this name in a record."""
    for key, value in what.items() if isinstance(what, dict) else enumerate(what):
        if key == name:
            yield value
        if isinstance(value, dict | list):
            yield from numbers_of(value, name)


def assert_runs(record: dict[str, Any], rows: str) -> None:
    assert record[rows]
    assert not [
        row for row in record[rows] if "error" in row and row.get("family") not in ("te", "trl")
    ]  # not installed
    assert all(value is None or value > 0 for value in numbers_of(record, "step_s"))
    assert all(numbers_of(record, "bit_identical"))
    assert all(numbers_of(record, "same_losses"))
    assert all(record.get("equal", {}).values())


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in RUNS]
)
def test_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, options, rows = RUNS[name]
    module = import_module(f"benchmarks.{program}")  # one of them imports trainers, which takes two seconds
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [module.__name__, "--small", "--out", str(path), *options.split()])
    monkeypatch.setattr("benchmarks.report.resolve_device", lambda _: torch.device("cpu"))
    module.main()
    assert_runs(json.loads(path.read_text("utf-8")), rows)


def test_what_a_time_limit_cuts_short_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the row that was being measured; and what the record had of others."""
    path = tmp_path / "record.json"
    old = {"model": "diffusion", "compiled": False, "what": "budget", "budget_bytes": 1}
    path.write_text(json.dumps(environment(torch.device("cpu")) | {"rows": [old]}), "utf-8")
    measure = never_slower.Budgets._measure

    def cut_short(budgets: never_slower.Budgets, way: Any) -> None:
        if way.row["what"] == "checkpoint all":
            raise KeyboardInterrupt
        measure(budgets, way)

    monkeypatch.setattr(never_slower.Budgets, "_measure", cut_short)
    options = ["--small", "--only", "diffusion", "phi3", "--merge", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", [never_slower.__name__, *options])
    monkeypatch.setattr("benchmarks.report.resolve_device", lambda _: torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        never_slower.main()
    rows = json.loads(path.read_text("utf-8"))["rows"]
    assert rows[0] == old
    assert [(row["model"], row["what"]) for row in rows[1:]] == [("diffusion", "nothing")]
    assert rows[1]["step_s"] > 0


def test_rows_that_are_merged_keep_the_ratio_to_their_own_run() -> None:
    shared = {"tokens": 64, "microbatches": 1, "link_bytes": 0}
    old = shared | {"what": "streamed", "date": "yesterday", "step_s": 3.0, "to_resident": 1.5}
    new = [shared | {"what": what, "date": "today", "step_s": s} for what, s in (("resident", 1.0), ("consumed", 2.0))]
    optimizer_state.finished([old, *new], 1.0)
    assert [one["to_resident"] for one in (old, *new)] == [1.5, 1.0, 2.0]


@pytest.mark.nightly
def test_ranks_of_a_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    root = Path(pipeline.__file__).parent.parent
    command = [str(root / "benchmarks" / "pipeline.py"), "--small", "--repeats", "1", "--out", str(path)]
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | NO_GPU | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for done in run_scripts([command] * 2, path.parent, as_torchrun(environment, 2)):
        assert done.code == 0, done.output
    record = json.loads(path.read_text("utf-8"))
    assert_runs(record, "rows")
    assert {row["rank"] for row in record["rows"] if row.get("offloaded_bytes")} >= {0}
