"""Optimizer state in host memory, and whole trainings within budgets, for the pages."""

from __future__ import annotations

from pathlib import Path

from page_text import Row, day_of, gib, markdown_table, measured_on, ms, read, table, torch_of


@table("optimizer_state")
def optimizer_state_table(_page: Path) -> str:
    """A step with the state on the device and on the host, by length."""
    record = read("optimizer_state")
    rows = [row for row in record["rows"] if "step_s" in row]
    shown = [
        {
            "optimizer state": row["what"],
            "tokens": f"{row['tokens']:,}",
            "step, ms": ms(row["step_s"]),
            "against resident": f"{row['to_resident']:.3f}",
            "link alone, ms": ms(row["link_s"]) if row["link_s"] else "",
            "peak, GiB": gib(row["peak_bytes"], 1),
            "pinned, GiB": gib(row["pinned_bytes"], 1),
        }
        for row in rows
    ]
    said = (
        f"{record['hardware']['gpu']}, {torch_of(record)}, {measured_on(rows, record)}. Llama-8B's shape in bfloat16, "
        "fused AdamW with float32 moments, checkpointed. Parameters of a smaller model are bit-identical."
    )
    assert all(record["equal"].values())
    return f"{said}\n\n{markdown_table(shown, left=1)}\n"


@table("recipe")
def recipe_table(_page: Path) -> str:
    """Whole trainings within budgets."""
    record = read("recipe")
    rows: list[Row] = [row for row in record["rows"] if "error" not in row]
    beside = {row["tokens"]: row["step_s"] for row in rows if not row["budget_bytes"]}
    shown = [
        {
            "budget, GiB": gib(row["budget_bytes"], 0) if row["budget_bytes"] else "none: all on the device",
            "tokens": f"{row['tokens']:,}",
            "recipe": row.get("recipe", "checkpointing by Hugging Face"),
            "step, s": f"{row['step_s']:.2f}",
            "against all on the device": f"{row['step_s'] / beside[row['tokens']]:.2f}",
            "peak, GiB": gib(row["peak_bytes"], 1),
        }
        for row in rows
    ]
    said = (
        f"{record['hardware']['gpu']}, {torch_of(record)}, {day_of(record)}. A full fine-tune of Llama-8B's shape in "
        "bfloat16 with float32 moments of AdamW, each budget in a process of its own that PyTorch keeps to the budget, "
        "with at most 100 GiB of pinned host memory."
    )
    return f"{said}\n\n{markdown_table(shown, left=1)}\n"
