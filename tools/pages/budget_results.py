"""The tables of memory budgets, from ``results/budget.json`` and ``results/llama_8b.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from page_text import ROOT
from tabulate import tabulate

RESULTS = ROOT / "results"
GIB = 1 << 30

Row = dict[str, Any]


def _record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def _where(record: dict[str, Any], date: str) -> str:
    return f"{record['hardware']['gpu']}, torch {record['versions']['torch'].partition('+')[0]}, {date[:10]}."


def _tabulated(rows: list[Row]) -> str:
    return tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)


def _budgets(model: str, page: Path) -> str:
    record = _record("budget")
    rows = [row for row in record["rows"] if row["model"] == model and "error" not in row]
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
    same = " Gradients are bit-identical in every row." if all(row["bit_identical"] for row in rows) else ""
    note = record.get("notes", {}).get(model)
    noted = "" if note is None else f" This run: {note}."
    return f"{_where(record, rows[0]['date'])}{same}{noted}\n\n{_tabulated(shown)}\n"


def _percent(row: Row, predicted: str, measured: str) -> str:
    return f"{100 * (row[predicted] / row[measured] - 1):+.1f}%" if predicted in row else ""


def _llama_8b(page: Path) -> str:
    record = _record("llama_8b")
    first = record["rows"][0]
    shown = [
        {
            "": row["what"],
            "step, s": f"{row['step_s']:.2f}",
            "against checkpointing": f"{row['step_s'] / first['step_s']:.2f}",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "peak with weights and optimizer, GiB": f"{(record['held_bytes'] + row['peak_bytes']) / GIB:.1f}",
            "on the host, GiB": f"{row['pinned_bytes'] / GIB:.0f}" if "pinned_bytes" in row else "",
        }
        for row in record["rows"]
    ]
    return f"{_where(record, record['date'])} {record['tokens']:,} tokens.\n\n{_tabulated(shown)}\n"


def _host_cost(page: Path) -> str:
    record = _record("budget")
    cost = record["host_cost"]
    shown = [
        {"": name} | {f"{way}, µs": f"{1e6 * found[f'{way}_s']:.1f}" for way in ("forward", "backward")}
        for name, found in cost.items()
        if isinstance(found, dict)
    ]
    where = _where(record, cost["date"])
    return f"{where} Of the host's time, per operation of a layer of tiny tensors.\n\n{_tabulated(shown)}\n"


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {
    ("table", "budgets"): partial(_budgets, "decoder"),
    ("table", "budgets_llama"): partial(_budgets, "llama"),
    ("table", "llama_8b"): _llama_8b,
    ("table", "budget_host_cost"): _host_cost,
}
PICTURES: dict[Path, Any] = {}
