"""Training with lengths that vary, for the pages: from ``results/varying_lengths.json``, as soon as there is one."""

from pathlib import Path

from page_text import ROOT, gib, markdown_table, measured_on, more, read, table, torch_of

NAMES = {
    "plan by hand": "a plan for the longest batch, by hand",
    "nothing": "nothing offloaded",
    "gradient checkpointing": "checkpointing of every layer",
}


@table("varying_lengths")
def varying_lengths(_page: Path) -> str:
    """What each way to train took, and how well a budget was kept."""
    if not (ROOT / "results" / "varying_lengths.json").exists():
        return ""
    record = read("varying_lengths")
    rows = [row for row in record["rows"] if "error" not in row]
    shown = [
        {
            "way": NAMES.get(row["what"], f"`{row['what']}`"),
            "against the plan by hand": "" if row.get("ratio") is None else more(row["ratio"]),
            "peak, GiB": gib(row["peak_bytes"]),
            "training, s": f"{row['train_s']:,.0f}",
            "steps over the budget": len(row["over_budget"]),
            "measured steps": len(row["measuring"]),
        }
        for row in rows
    ]
    most = max(
        (one["bytes"] for row in rows for one in row["over_budget"] if row["what"] == "memory_budget"), default=0
    )
    over = f" The largest excess over the budget is {most / record['budget_bytes']:.1%}." if most else ""
    same = " Losses are identical in all ways." if all(row["same_losses"] for row in rows) else ""
    return (
        "**Lengths that vary.** Hugging Face's Trainer trains a Llama of 1.5 billion parameters on 64 to 4,096 tokens "
        "(log-normal, padded per batch), and evaluates in between. "
        f"{record['hardware']['gpu']}, {torch_of(record)}, {measured_on(rows, record)}. "
        f"{record['steps']:,} steps within {gib(record['budget_bytes'])} GiB, "
        f"where the longest batch adds {gib(record['most_bytes'])} GiB.{over}{same}"
        f"\n\n{markdown_table(shown, left=1, answer=('against the plan by hand', 'peak, GiB'))}\n"
    )
