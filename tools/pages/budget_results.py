"""The table of memory budgets, from ``results/budget.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_text import ROOT
from tabulate import tabulate

RECORD = ROOT / "results" / "budget.json"
GIB = 1 << 30


def _table(page: Path) -> str:
    record: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))
    rows = [row for row in record["rows"] if row["model"] == "decoder" and "error" not in row]
    shown = [
        {
            "": row["what"],
            "step, ms": f"{1e3 * row['step_s']:.0f}",
            "against nothing": f"{100 * (row['ratio'] - 1):+.1f}%",
            "predicted": _percent(row, "predicted_s", "step_s"),
            "peak, GiB": f"{row['peak_bytes'] / GIB:.2f}",
            "predicted peak": _percent(row, "predicted_peak_bytes", "peak_bytes"),
        }
        for row in rows
    ]
    where = f"{record['hardware']['gpu']}, torch {record['versions']['torch'].partition('+')[0]}, {record['date'][:10]}"
    same = "Gradients are bit-identical in every row." if all(row["bit_identical"] for row in rows) else ""
    return f"{where}. {same}\n\n{tabulate(shown, headers='keys', tablefmt='pipe', disable_numparse=True)}\n"


def _percent(row: dict[str, Any], predicted: str, measured: str) -> str:
    return f"{100 * (row[predicted] / row[measured] - 1):+.1f}%" if predicted in row else ""


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {("table", "budgets"): _table}
PICTURES: dict[Path, Any] = {}
