"""The measured rows that the start page's planner draws beside what it computes."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def planner_rows() -> dict[str, dict[str, Any]]:
    """The GPU and the rows of its record, by the planner's presets."""
    found = {}
    for name, record in (("decoder", "budget"), ("llama_8b", "llama_8b")):
        values = json.loads((ROOT / "results" / f"{record}.json").read_text("utf-8"))
        rows = [row for row in values["rows"] if row.get("model", name) == name and "error" not in row]
        kept = ("what", "peak_bytes", "step_s")
        points = [{key: row[key] for key in kept} for row in rows]
        found[name] = {"gpu": values["hardware"]["gpu"].removeprefix("NVIDIA "), "rows": points}
    return found
