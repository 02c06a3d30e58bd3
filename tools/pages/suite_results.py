"""What all contenders take on all workloads, for the pages: from ``results/suite.json``, once there is one.

``results.py`` writes it into the pages.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from drawing import Maker
from page_text import ROOT, day_of, full_record, gib, machine, markdown_table, ms
from suite_picture import PICTURE, WORKLOADS, Row, curves_picture, draw

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import format_bytes

RECORD = ROOT / "results/suite.json"


def read_record() -> Row:
    """The record."""
    return full_record(RECORD)


def workload_table(record: Row, workload: str) -> str:
    """All contenders on one workload, and why some are missing."""
    rows = [row for row in record["rows"] if row["workload"] == workload]
    if not rows:
        return "Not measured yet.\n"
    kept = next((row for row in rows if row["family"] == "nothing" and "step_s" in row), None)
    fails = [row for row in rows if _fails(row)]
    missing = [f"{row['contender']} ({row['error']})" for row in rows if "error" in row and row not in fails]
    said = "".join(f"\nFails: {names}, with `{error}`.\n" for error, names in _by_error(fails).items())
    said += f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    shown = [
        _shown(row, kept) if "error" not in row else _failed(row) for row in rows if row in fails or "error" not in row
    ]
    return markdown_table(shown, left=1) + "\n" + said


def _fails(row: Row) -> bool:
    """Whether the contender was run, and raised something."""
    return re.match(r"\w+(Error|Exception): ", row.get("error", "")) is not None


def _by_error(rows: list[Row]) -> dict[str, str]:
    """Error → who raised it."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["error"], []).append(row["contender"])
    return {error: "; ".join(who) for error, who in names.items()}


def _failed(row: Row) -> Row:
    return {"": row["contender"], "step, ms": "fails"} | dict.fromkeys(_COLUMNS[2:], "")


_COLUMNS = (
    "",
    "step, ms",
    "against nothing",
    "activation peak, GiB",
    "copied each way, GiB",
    "against the limit",
    "pinned, GiB",
    "first step, s",
    "gradients",
)


def _shown(row: Row, kept: Row | None) -> Row:
    ratio, copied, same = row.get("ratio_to_limit"), row.get("copied_bytes"), row.get("bit_identical")
    cells = (
        row["contender"],
        f"{ms(row['step_s'])} ± {row['spread_s'] * 500:.0f}",
        f"{row['step_s'] / kept['step_s']:.2f} ×" if kept else "",
        gib(row["peak_bytes"]),
        "" if copied is None else gib(copied),
        f"{ratio:.2f} ×" if ratio and copied else "",
        gib(row["pinned_bytes"]),
        f"{row['first_s']:.1f}",
        {True: "equal", False: "differ", None: ""}[same],
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def run_of(record: Row) -> Row:
    """When, with what and over which link the reference decoder was measured."""
    run: Row = record["runs"]["decoder"]
    return run


def setting_text(record: Row) -> str:
    """What it was measured on."""
    run = run_of(record)
    packages = [f"{name} {version}" for name, version in record["versions"].items() if version and name in _PACKAGES]
    minutes = sum(run.get("seconds", 0) for run in record["runs"].values()) / 60
    return f"{machine(record, run['link'], *packages, day_of(run))}; {minutes:.0f} minutes.\n"


_PACKAGES = ("transformers", "trl", "transformer-engine")


def te_text(record: Row) -> str:
    """Which of Transformer Engine's code was measured, and where."""
    files = {name: run["transformer_engine"] for name, run in record["runs"].items() if "transformer_engine" in run}
    names = [name for name in WORKLOADS.values() if name in files]
    if not names:
        return ""
    said = {(files[name]["commit"], files[name]["licence"]) for name in names}
    if len(said) > 1:
        raise ValueError(
            f"Transformer Engine must be of one commit in {RECORD.name}, got {sorted(said)}; measure again"
        )
    ((commit, licence),) = said
    return f"Here: {', '.join(names)}, with the file of commit `{commit[:10]}` ({licence}).\n"


def long_text(record: Row) -> str:
    """How long the long sequence is."""
    run = record["runs"].get("long sequence", {})
    if not run.get("tokens"):
        return ""
    return f"Here: {run['tokens']:,} tokens, {run['layers'] - 1} layers.\n"


def verdicts_table(record: Row) -> str:
    """Which of the claims hold in this record."""
    words = {True: "yes", False: "**no**", None: ""}
    return (
        markdown_table(
            [
                {"claim": _plain(said["claim"]), "measured": _plain(said["measured"]), "holds": words[said["holds"]]}
                for said in record["verdicts"]
            ],
            left=3,
        )
        + "\n"
    )


_PLAIN = (
    (r"has a point below this library's curve", "needs both less memory and less time than this library"),
    (
        r"(.*?): within its memory, this library takes ([\d.]+) of its time",
        r"\1: in no more memory, this library takes \2 × its time",
    ),
    (
        r"(.*?) needs ([\d.]+ GiB) less than the curve's end, which takes ([\d.]+) of its time",
        r"\1: reaches \2 less than this library, whose least memory takes \3 × its time",
    ),
    (r"takes at most ([\d.]+) of the limit", r"takes at most \1 × the limit"),
    (r"([\d.]+) of the time without", r"\1 × the time without"),
)


def _plain(text: str) -> str:
    """A record's words for a claim, for those who have not read the suite."""
    parts = text.split("; ")
    for pattern, words in _PLAIN:
        parts = [re.sub(pattern, words, part) for part in parts]
    return parts[0] if len(parts) == 1 else "<br>".join(f"• {part}" for part in parts)


def host_cost_table(record: Row) -> str:
    """The host's time for a saved tensor."""
    runs = record.get("host_cost", [])
    what = {
        "operation": "an elementwise operation, forward and backward",
        "hooks": "PyTorch's hooks for saved tensors, doing nothing",
        "alias": "hooks that only hold an alias and its version, and notice a change in place",
        "stays_later": "the library, for a tensor in a layer after the first that stays",
        "stays": "the library, for a tensor that stays in a layer that is offloaded, and the hooks",
        "bare_calls": "hooks that only make the calls of a trip, for a tensor of 4 MiB",
        "alone": "the library, for a tensor of 4 MiB that travels, and the hooks",
    }
    rows = [{"host time, µs": text, **_costs(runs, f"{name}_s")} for name, text in what.items() if runs]
    return markdown_table(rows, left=1) + "\n" if rows else ""


def _costs(runs: list[Row], name: str) -> dict[str, str]:
    costs = [run[name] * 1e6 for run in runs]
    return {
        f"median of {len(runs)} runs": f"{statistics.median(costs):.1f}",
        "from": f"{min(costs):.1f}",
        "to": f"{max(costs):.1f}",
    }


def small_copies_table(record: Row) -> str:
    """The bandwidth of tensors of one size, medians over the runs."""
    runs = [run["sizes"] for run in record.get("small_copies", [])]
    if not runs:
        return ""
    sizes = [_median_of_runs(rows) for rows in zip(*runs, strict=True)]
    rows = [
        {
            "": _whole(row["size_bytes"]),
            "to the host, GB/s": f"{row['out_bytes_per_s'] / 1e9:.1f}",
            "of the link": f"{row['out_of_link']:.0%}",
            "back, GB/s": f"{row['back_bytes_per_s'] / 1e9:.1f}",
            "of the link ": f"{row['back_of_link']:.0%}",
        }
        for row in sizes
    ]
    return markdown_table(rows, left=1) + "\n" + _small_share(sizes)


def _whole(nbytes: float) -> str:
    """A power of two of bytes, without decimals."""
    number, unit = format_bytes(int(nbytes)).split()
    return f"{float(number):.0f} {unit}"


def _median_of_runs(rows: tuple[Row, ...]) -> Row:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _small_share(rows: list[Row]) -> str:
    """How much of the link those reach that travel by default, and what keeps the smallest away from it."""
    large, smallest = rows[-1], rows[0]
    travel = [row for row in rows if row["size_bytes"] >= DEFAULT_MIN_BYTES]
    if not travel:
        return ""
    shares = [min(row[way] for row in travel) for way in ("out_of_link", "back_of_link")]
    host_us, link_us = (smallest["size_bytes"] / row["out_bytes_per_s"] * 1e6 for row in (smallest, large))
    least, tiny = _whole(DEFAULT_MIN_BYTES), _whole(smallest["size_bytes"])
    return (
        f"\nFrom {least} on, which is what `min_bytes` lets through by default, they reach {shares[0]:.0%} and "
        f"{shares[1]:.0%} of the link at least. Smaller ones wait for the host: each one of {tiny} takes it "
        f"{host_us:.0f} µs, and the link {link_us:.1f}.\n"
    )


def _if_measured(text: Callable[..., str], *arguments: Any) -> str:
    """Nothing, as long as there is no record."""
    return text(read_record(), *arguments) if RECORD.exists() else ""


BLOCKS: dict[tuple[str, str], Callable[[Path], str]] = {
    ("table", "suite_setting"): lambda _: _if_measured(setting_text),
    ("table", "suite_verdicts"): lambda _: _if_measured(verdicts_table),
    ("picture", "suite"): lambda page: _if_measured(curves_picture, page),
    ("table", "suite_te"): lambda _: _if_measured(te_text),
    ("table", "suite_long_length"): lambda _: _if_measured(long_text),
    **{
        ("table", block): partial(lambda workload, _: _if_measured(workload_table, workload), workload)
        for block, workload in WORKLOADS.items()
    },
    ("table", "suite_host_cost"): lambda _: _if_measured(host_cost_table),
    ("table", "suite_small_copies"): lambda _: _if_measured(small_copies_table),
}
"""A block's kind and name → its text, for a page at this path."""

PICTURES: dict[Path, Maker] = {PICTURE: lambda *, narrow: draw(read_record(), narrow=narrow)} if RECORD.exists() else {}
"""Path in the repository → what draws it."""
