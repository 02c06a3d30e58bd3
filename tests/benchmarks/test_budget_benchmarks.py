"""The benchmarks of budgets run at their small size, and write records that the pages can show."""

from pathlib import Path

import pytest
from small_run import record_of

from benchmarks import never_slower, recipe, varying_lengths

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")


def test_budgets_next_to_checkpointing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(never_slower, tmp_path / "record.json", "--only", "diffusion", "--turns", "1", "--shares", "0.6")
    rows = record["rows"]
    assert {row["what"] for row in rows} >= {"nothing", "checkpoint all", "selective", "budget"}
    assert all("error" not in row and row["bit_identical"] for row in rows)
    assert all(row["measuring_steps"] in (2, 3) for row in rows if row["what"] == "budget")
    assert "x best other" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_budget_with_lengths_that_vary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(varying_lengths, tmp_path / "record.json", "--steps", "24")
    by_hand, budget, nothing, checkpointing = record["rows"]
    assert all(row["same_losses"] and row["peak_bytes"] > 0 for row in record["rows"])
    assert by_hand["over_budget"] == budget["over_budget"] == checkpointing["over_budget"] == []
    assert [one["tokens"] for one in nothing["over_budget"]] == [512]  # only the longest batch needs so much
    assert 0 < len(budget["measuring"]) <= 5
    assert not any("cannot be met" in said for _, said in budget["messages"])
    assert "x plan by hand" in capsys.readouterr().out


@pytest.mark.nightly
def test_budgets_of_compiled_layers(tmp_path: Path) -> None:
    record = record_of(
        never_slower,
        tmp_path / "record.json",
        "--only",
        "diffusion",
        "--turns",
        "1",
        "--shares",
        "0.6",
        "--compiled",
        "aot_eager",
    )
    rows = [row for row in record["rows"] if row["what"].startswith("compiled")]
    ways = {"nothing", "checkpoint all", "checkpoint some", "selective", "budget"}
    assert {row["what"].removeprefix("compiled ") for row in rows} == ways
    assert all("error" not in row and row["bit_identical"] for row in rows)
    budgets = [row for row in rows if row["what"] == "compiled budget"]
    assert len(budgets) == 2
    assert all(row["measuring_steps"] in (2, 3) for row in budgets)


@pytest.mark.nightly
def test_recipes_within_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resident, row = record_of(recipe, tmp_path / "record.json", "--tokens", "64", "--budgets", "8")["rows"]
    assert resident["budget_bytes"] == 0
    assert row["recipe"].startswith("weights resident")
    assert row["step_s"] > 0
    assert "chosen" in capsys.readouterr().out


@pytest.mark.nightly
def test_recipes_put_together_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(
        recipe, tmp_path / "record.json", "--tokens", "64", "--budgets", "8", "--by-hand", "--until-settled", "4"
    )
    rows = record["by_hand"]
    assert len({row["recipe"] for row in rows}) == len(rows) == 5
    assert all(row["step_s"] > 0 for row in rows)
    assert "weights streamed" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_largest_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It fills the device's budget and the host's, with a part of the state on either side."""
    sizes = ["--tokens", "64", "--budgets", "8", "--host", "4", "--until-settled", "4"]
    [row] = record_of(recipe, tmp_path / "record.json", "--largest", *sizes)["largest"]
    assert row["tried"][str(row["layers"])] == "trains"
    assert row["limit_parameters"] == 12 * 2**20 // 10
    assert row["of_limit"] > 0.75
    assert all(row["state_bytes"])
    assert sum(row["state_bytes"]) == 8 * row["parameters"]
    assert "of the limit" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_longest_sequence_with_an_optimizer(tmp_path: Path) -> None:
    sizes = ["--budgets", "3", "--host", "8", "--until-settled", "4", "--seconds", "30"]
    [row] = record_of(recipe, tmp_path / "record.json", "--longest", *sizes)["longest"]
    assert row["longest_tokens"] >= 64
    assert row["tried"]
    assert row["step_s"] > 0
