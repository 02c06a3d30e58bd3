"""The measured rows that the site's planner draws beside what it computes."""

from typing import Any

from page_text import read


def planner_rows() -> dict[str, dict[str, Any]]:
    """The GPU and the rows of its record, by the planner's presets."""
    found = {}
    for name, record in (("decoder", "budget"), ("llama_8b", "llama_8b")):
        values = read(record)
        rows = [row for row in values["rows"] if row.get("model", name) == name and "error" not in row]
        points = [{key: row[key] for key in ("what", "peak_bytes", "step_s")} for row in rows]
        found[name] = {"gpu": values["hardware"]["gpu"].removeprefix("NVIDIA "), "rows": points}
    return found
