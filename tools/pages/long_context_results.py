"""Tables of long sequences, and a picture of the longest, from ``results/long_context.json``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drawing import NARROW_INCHES, draw_bars, label_axes
from page_text import GIB, Row, gib, markdown_table, measured_on, picture, read, table, torch_of, with_runs

from offload.observe.plot import COLORS, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = {
    "inputs": "checkpointing, inputs offloaded",
    "recompute": "all recomputed, inputs offloaded",
    "hand": "attention's outputs offloaded, too",
    "plan": "this library's plan",
}
LIMITED = {
    "nothing": "nothing",
    "checkpointing": "checkpointing",
    "hf_offload": "Hugging Face's offloaded checkpoints",
    "inputs": "this library",
    "streamed": "weights streamed",
    "lora": "streamed, LoRA",
}

GRAIN = 4096
"""Lengths that are tried are multiples of so many tokens, or of fewer."""
HELD = 2 * 2 * 8_030_261_248
"""Bytes of the shape's weights and gradients."""
STREAMED = ("streamed", "lora")


def _lengths() -> list[Row]:
    rows = [
        row
        for row in read("long_context")["rows"]
        if row["way"] in LENGTHS and "step_s" in row and "limit_bytes" not in row
    ]
    return sorted(rows, key=lambda row: (row["tokens"], list(LENGTHS).index(row["way"])))


@table("long_context")
def lengths_table(_page: Path) -> str:
    """Step, memory and speed at each length, in each way that was measured."""
    rows = _lengths()
    base = {row["tokens"]: row["step_s"] for row in rows if row["way"] == "inputs"}
    shown = []
    for row in rows:
        there = base.get(row["tokens"])
        shown.append(
            {
                "tokens": f"{row['tokens']:,}",
                "way": LENGTHS[row["way"]],
                "step, s": f"{row['step_s']:.1f}",
                "against checkpointing": "" if there is None else f"{row['step_s'] / there:.2f} ×",
                "tokens/s": f"{row['tokens_per_s']:,.0f}",
                "device, GiB": gib(row["peak_bytes"], 1),
                "on the host, GiB": gib(row["host_bytes"], 1),
            }
        )
    shown = with_runs(shown, rows, read("long_context"))
    most = max(row["stall_s"] / row["step_s"] for row in rows)
    stall = (
        f"Compute waits for copies for at most {most:.1%} of a step." if most >= 0.0005 else "No copy is waited for."
    )
    return (
        f"{_where(rows, by_row=True)} {stall}\n\n{markdown_table(shown, left=2, answer=('against checkpointing',))}\n"
    )


@table("long_context_equal")
def equal_sentence(_page: Path) -> str:
    """How near loss and gradients are to those of the model as it is."""
    row = next(row for row in read("long_context")["rows"] if row["way"] == "equal" and "losses" in row)
    (plain, loss), (norm, other) = row["losses"], row["gradient_norms"]
    return (
        f"At {row['tokens']:,} tokens, the loss is {loss:.6f}, and {plain:.6f} for the unchanged model. The norm of "
        f"all gradients is {other:.6g} and {norm:.6g}. In bfloat16, each parameter's gradient is within "
        f"{100 * row['gradients_apart']:.2g}% of the other.\n"
    )


def longest() -> dict[int, dict[str, Row]]:
    """By device memory and way. Where this library's was not searched for, the longest that was content with less."""
    found: dict[int, dict[str, Row]] = {}
    rows = read("long_context")["rows"]
    for row in sorted((row for row in rows if "limit_bytes" in row), key=lambda row: row["limit_bytes"]):
        found.setdefault(row["limit_bytes"], {})[row["way"]] = row
    whole = [row for row in rows if row["way"] in LENGTHS and "peak_reserved_bytes" in row]
    whole = [row for row in whole if "limit_bytes" not in row]
    for nbytes, ways in found.items():
        within = [row for row in whole if row["peak_reserved_bytes"] <= nbytes]
        if "inputs" not in ways and within:
            row = max(within, key=lambda row: (row["tokens"], row["tokens_per_s"]))
            ways["inputs"] = {**row, "longest_tokens": row["tokens"]}
    return found


@table("longest_context")
def longest_table(_page: Path) -> str:
    """The longest context by device memory."""

    def cell(nbytes: int, way: str) -> str:
        row = rows[nbytes].get(way)
        if row is None:
            return "does not fit" if nbytes < HELD and way not in STREAMED else "not tried"
        tokens = row.get("longest_tokens", 0)
        failed = row.get("shortest_failed_tokens")
        longest = f"{tokens:,}"
        if _is_open(row):
            longest = f"at least {longest}" + (f", less than {failed:,}" if failed else "")
        about = "" if row.get("whole", True) else "about "
        return f"{longest} ({about}{row['tokens_per_s']:,.0f} tokens/s)" if tokens else "does not fit"

    rows = longest()
    ways = [way for way in LIMITED if any(way in row for row in rows.values())]
    where = _where([row for ways in rows.values() for row in ways.values()])
    shown = [
        {"device": f"{nbytes / GIB:.0f} GiB"} | {LIMITED[way]: cell(nbytes, way) for way in ways} for nbytes in rows
    ]
    return f"{where}\n\n{markdown_table(shown, left=1, answer=(LIMITED['inputs'], LIMITED['streamed']))}\n"


@table("lora_longest")
def lora_longest(_page: Path) -> str:
    """The longest sequence with LoRA on a small device."""
    record = read("long_context")
    row = next(row for row in record["rows"] if row["row"] == "24GiB:lora")
    return (
        f"{record['hardware']['gpu']} limited to {row['limit_bytes'] / GIB:.0f} GiB, Llama-3.1-8B's shape, LoRA: "
        f"{row['longest_tokens']:,} tokens at {row['tokens_per_s']:,.0f} tokens/s, with at most 100 GiB of pinned host "
        f"memory ({measured_on([row], record)}).\n"
    )


def longest_said() -> str:
    """The picture in words."""
    said = "; ".join(
        f"{nbytes / GIB:.0f} GiB: "
        + ", ".join(f"{LIMITED[way]} {row[way].get('longest_tokens', 0):,}" for way in LIMITED if way in row)
        for nbytes, row in longest().items()
    )
    return f"Bars of the longest context in tokens, by device memory. {said}."


def draw_longest(*, narrow: bool = False) -> Figure:
    """A bar for each way to train on each size of the device."""
    bars = [(nbytes, way, row[way]) for nbytes, row in longest().items() for way in LIMITED if way in row]
    colors = (INK, COLORS["forward"], COLORS["backward"], COLORS["offload"], COLORS["reload"], COLORS["recompute"])
    color = dict(zip(LIMITED, colors, strict=True))
    figure = new_figure((NARROW_INCHES if narrow else 8.0, 0.8 + 0.24 * len(bars)))
    ax = figure.subplots()
    names = [f"{LIMITED[way]}, {nbytes / GIB:.0f} GiB" for nbytes, way, _ in bars]
    lengths = [found.get("longest_tokens", 0) / 1024 for *_, found in bars]
    draw_bars(ax, names, lengths, [color[way] for _, way, _ in bars], [_thousands(row) for *_, row in bars], room=1.2)
    ax.invert_yaxis()
    label_axes(ax, "longest context, K tokens")
    return figure


def _thousands(row: Row) -> str:
    tokens = row.get("longest_tokens", 0)
    return f"{'≥' if tokens and _is_open(row) else ''}{tokens / 1024:.0f}"


def _is_open(row: Row) -> bool:
    """Whether the search has ended, for its time, before the next length failed."""
    failed = row.get("shortest_failed_tokens")
    return failed is None or failed - row["longest_tokens"] > GRAIN


def _where(rows: list[Row], *, by_row: bool = False) -> str:
    record = read("long_context")
    return (
        f"{record['hardware']['gpu']}, {torch_of(record)}; Llama-3.1-8B's shape in bfloat16, random weights, forward "
        f"and backward. Measured {measured_on(rows, record, by_row=by_row)}.\n"
    ).strip()


picture("longest_context", draw_longest, longest_said)
