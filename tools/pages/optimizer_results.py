"""Optimizer state in host memory, for the pages: from ``results/optimizer_state.json``."""

from pathlib import Path

from page_text import gib, markdown_table, measured_on, ms, read, table, torch_of, with_runs


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
        f"{record['hardware']['gpu']}, {torch_of(record)}, {measured_on(rows, record, by_row=True)}. "
        "Llama-8B's shape in bfloat16, fused AdamW with float32 moments, checkpointed. "
        "Parameters of a smaller model are bit-identical."
    )
    assert all(record["equal"].values())
    shown = with_runs(shown, rows, record)
    return f"{said}\n\n{markdown_table(shown, left=2, answer=('against resident', 'peak, GiB'))}\n"
