"""What all contenders take on all workloads, for the pages: from ``results/suite.json``."""

from __future__ import annotations

import re
import statistics
from functools import partial
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING

from blocks import Columns, Row, cells, link_to, markdown_table, picture, read, row_of, table
from drawing import NARROW_INCHES, WIDE_INCHES, draw_bars
from page_text import GIB, day_of, gib, gib1, link_of, ms, percent, torch_of, way_of

from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import format_bytes
from offload.observe.timeline import COLORS, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FREE = 5  # of the decoder's layers, as :mod:`offload` simulates it on PCIe Gen5
PACKAGES = ("transformers", "trl", "transformer-engine")
WORKLOADS = {
    "suite_decoder": "decoder",
    "suite_compiled": "compiled decoder",
    "suite_norm_mlp": "LayerNorm-MLP",
    "suite_llama": "Hugging Face Llama",
    "suite_long": "long sequence",
}
"""Block of the benchmarks' page → workload."""
NOISE = 1.01  # two points of which neither is worse by more than this are taken to be equal
FAMILY_COLORS = {
    "nothing": INK,
    "checkpoint": COLORS["reload"],
    "checkpoint_on_cpu": COLORS["offload"],
    "save_on_cpu": COLORS["offload"],
    "trl": COLORS["backward"],
    "te": COLORS["backward"],
    "offload": COLORS["forward"],
    "offload_checkpoint": COLORS["forward"],
}


def rows_of(workload: str, *families: str) -> list[Row]:
    """All rows of a workload, or those of some families that have a time."""
    rows = [row for row in read("suite")["rows"] if row["workload"] == workload]
    return [row for row in rows if row["family"] in families and "step_s" in row] if families else rows


def workload_table(workload: str, _page: Path) -> str:
    """All contenders on one workload, and why some are missing."""
    rows = rows_of(workload)
    kept_s = next((row["step_s"] for row in rows_of(workload, "nothing")), None)
    fails = [row for row in rows if re.match(r"\w+(Error|Exception): ", row.get("error", ""))]
    errors = [row for row in rows if "error" in row and row not in fails]
    missing = dict.fromkeys(f"{row['contender'].partition(', k =')[0]} ({row['error']})" for row in errors)
    names: dict[str, list[str]] = {}
    for row in fails:
        names.setdefault(shorten(row["error"], 112, placeholder=" …"), []).append(row["contender"])
    said = "".join(f"\nFails: {'; '.join(who)}, with `{error}`.\n" for error, who in names.items())
    said += f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    columns: Columns = {
        "": ("contender", way_of),
        "step, ms": lambda row: (
            f"{ms(row['step_s'])}\u00a0±\u00a0{row['spread_s'] * 500:.0f}" if "step_s" in row else "fails"
        ),
        "against keep all": ("step_s", lambda step_s: f"{step_s / kept_s:.2f} ×" if kept_s else ""),
        "activation peak, GiB": ("peak_bytes", gib),
        "copied each way, GiB": ("copied_bytes", gib),
        "against the limit": lambda row: (
            f"{row['ratio_to_limit']:.2f} ×" if row.get("ratio_to_limit") and row["copied_bytes"] else ""
        ),
        "pinned, GiB": ("pinned_bytes", gib),
        "first step, s": ("first_s", ".1f"),
        "gradients": ("bit_identical", lambda same: "equal" if same else "differ"),
    }
    shown_rows = [{"contender": row["contender"]} if row in fails else row for row in rows if row not in errors]
    shown = cells(shown_rows, columns)
    if all(one["gradients"] != "differ" for one in shown):
        compared = [one for one in shown if one.pop("gradients")]
        everywhere = len(compared) == len(shown) - len(fails)
        said += f"\nGradients are equal in {'all rows' if everywhere else 'the rows of this library'}.\n"
    run = read("suite")["runs"][workload]
    size = f", {run['tokens']:,} tokens, {run['layers'] - 1} layers" if run.get("tokens") else ""
    where = (
        f"{read('suite')['hardware']['gpu']}, {link_of(run['link'])}, {day_of(run)}, commit {run['commit'][:7]}{size}."
    )
    return f"{where}\n\n{markdown_table(shown, left=1, answer=('against keep all', 'activation peak, GiB'))}\n{said}"


for block, of in WORKLOADS.items():
    table(block)(partial(workload_table, of))


@table("free_layers")
def free_layers(page: Path) -> str:
    """How much longer the decoder's step is with its free layers offloaded."""
    [kept], free = rows_of("decoder", "nothing"), row_of(rows_of("decoder"), contender=f"this library, k = {FREE}")
    benchmarks = link_to(Path("docs/benchmarks.md"), page)
    longer = percent(free["step_s"] / kept["step_s"] - 1)
    return f"With {FREE} of 20 layers offloaded, [the decoder's step]({benchmarks}#decoder) takes {longer} longer.\n"


@table("suite_setting")
def setting(_page: Path) -> str:
    """What it was measured on, in how many runs, and where another way is ahead."""
    record = read("suite")
    parts = [f"{name} {record['versions'][name]}" for name in PACKAGES if record["versions"].get(name)]
    days: dict[str, list[str]] = {}
    for name in ("small_copies", *WORKLOADS.values()):
        run = record["runs"][name]
        days.setdefault(f"{day_of(run)} at commit {run['commit'][:7]}", []).append(name.replace("_", " "))
    runs = "; ".join(f"{', '.join(names)} on {day}" for day, names in sorted(days.items()))
    files = {
        f" Transformer Engine's file is that of commit `{te['commit'][:10]}` ({te['licence']})."
        for run in record["runs"].values()
        if (te := run.get("transformer_engine"))
    }
    where = ", ".join([record["hardware"]["gpu"], torch_of(record), *parts])
    return f"{where}. Measured in {len(days)} runs: {runs}.{''.join(files)}\n"


@table("suite_ahead")
def ahead(_page: Path) -> str:
    """Which other ways to offload need less time than this library in the same memory.

    With less memory than this library has anywhere, its row of least memory is compared.
    """
    said = []
    for workload in WORKLOADS.values():
        own = rows_of(workload, "offload", "offload_checkpoint")
        least_bytes = min(row["peak_bytes"] for row in own)
        for row in rows_of(workload, "save_on_cpu", "trl", "te", "checkpoint_on_cpu"):
            most_bytes = NOISE * max(row["peak_bytes"], least_bytes)
            ratio = min(one["step_s"] for one in own if one["peak_bytes"] <= most_bytes) / row["step_s"]
            if ratio > NOISE:
                said.append(f"{row['contender']} on {workload} (this library takes {ratio - 1:.1%} more time)")
    return (
        "In the same memory, no other way to offload is faster than this library by more than 1%"
        f"{', but ' + ' and '.join(said) if said else ''}.\n"
    )


@table("suite_small_copies")
def small_copies(_page: Path) -> str:
    """The bandwidth of tensors of one size, medians over the runs, and what keeps the smallest away from the link's."""
    runs = [run["sizes"] for run in read("suite")["small_copies"]]
    sizes = [{key: statistics.median(row[key] for row in rows) for key in rows[0]} for rows in zip(*runs, strict=True)]
    columns: Columns = {
        "": ("size_bytes", _whole),
        "to the host, GB/s": ("out_bytes_per_s", lambda speed: f"{speed / 1e9:.1f}"),
        "of the link": ("out_of_link", ".0%"),
        "to the GPU, GB/s": ("back_bytes_per_s", lambda speed: f"{speed / 1e9:.1f}"),
        "of the link ": ("back_of_link", ".0%"),
    }
    large = [row for row in sizes if row["size_bytes"] >= DEFAULT_MIN_BYTES]
    shares = [min(row[way] for row in large) for way in ("out_of_link", "back_of_link")]
    smallest = sizes[0]["size_bytes"]
    host_us, link_us = (smallest / row["out_bytes_per_s"] * 1e6 for row in (sizes[0], sizes[-1]))
    return (
        f"{markdown_table(cells(sizes, columns), left=1)}\n\nTensors of {_whole(DEFAULT_MIN_BYTES)} and more "
        f"(`min_bytes` by default) reach at least {shares[0]:.0%} of the link to the host and {shares[1]:.0%} to the "
        f"GPU. Smaller tensors wait for the host: a tensor of {_whole(smallest)} takes {host_us:.0f} µs of the host's "
        f"time, and {link_us:.1f} µs of the link's.\n"
    )


def _whole(nbytes: float) -> str:
    """A power of two of bytes, without decimals."""
    number, unit = format_bytes(int(nbytes)).split()
    return f"{float(number):.0f} {unit}"


@table("pinning")
def pinning(_page: Path) -> str:
    """What pinning takes: how much longer the first step is than the later ones, by what is pinned in it."""
    rows = [row for row in read("suite")["rows"] if row["family"] == "offload" and row.get("pinned_bytes", 0) > 5 * GIB]
    costs = [(row["first_s"] - row["step_s"]) / (row["pinned_bytes"] / GIB) for row in rows]
    return (
        "(pinning-cost)=\n"
        f"The first step pins memory, which takes {min(costs):.2f} to {max(costs):.2f} s per GiB. This is the first "
        f"step less a later one, in the {len(rows)} rows of this library on this page that pin more than 5 GiB.\n"
    )


def _others() -> list[Row]:
    """What is drawn of the Llama's rows: the library with fewest and with most layers."""
    own = {family: rows_of("Hugging Face Llama", family) for family in ("offload", "offload_checkpoint")}
    between = [*own["offload"][1:-1], *own["offload_checkpoint"][:-1]]
    return [row for row in rows_of("Hugging Face Llama", *FAMILY_COLORS) if row not in between]


def said() -> str:
    """The picture in words."""
    rows = (f"{way_of(row['contender'])}: {ms(row['step_s'])} ms, {gib1(row['peak_bytes'])} GiB" for row in _others())
    return f"Bars of step time and activation peak of a Hugging Face Llama. {'; '.join(rows)}."


def draw(*, narrow: bool = False) -> Figure:
    """Step and peak of one model, with other ways to offload and with this library."""
    rows = _others()[::-1]
    names = [fill(way_of(row["contender"]), 24 if narrow else 99) for row in rows]
    colors = [FAMILY_COLORS[row["family"]] for row in rows]
    figure = new_figure((NARROW_INCHES, 6.6) if narrow else (WIDE_INCHES, 3.4))
    panels = figure.subplots(*((2, 1) if narrow else (1, 2)), sharey=not narrow)
    for ax, title, key, unit, digits in zip(
        panels, ("step, ms", "activation peak, GiB"), ("step_s", "peak_bytes"), (1e-3, GIB), (0, 1), strict=True
    ):
        values = [row[key] / unit for row in rows]
        draw_bars(ax, names, values, colors, [f"{value:,.{digits}f}" for value in values], room=1.16)
        ax.set_title(title, color=INK, loc="left", fontsize=10)
    return figure


picture("others", draw, said)
