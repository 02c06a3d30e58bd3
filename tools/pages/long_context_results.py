"""Tables of long sequences, and a picture of the longest, from ``results/long_context.json`` and ``recipe.json``."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from blocks import Columns, Row, cells, markdown_table, measured_on, picture, read, row_of, table, with_runs
from drawing import NARROW_INCHES, draw_bars, label_axes
from page_text import GIB, gib1, torch_of

from offload.observe.timeline import COLORS, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = {
    "inputs": "checkpointing, inputs offloaded",
    "hand": "attention's outputs offloaded, too",
    "plan": "this library's plan",
}
LIMITED = {
    "nothing": ("keep all", INK),
    "checkpointing": ("checkpointing", COLORS["forward"]),
    "hf_offload": ("Hugging Face's offloaded checkpoints", COLORS["backward"]),
    "inputs": ("this library", COLORS["offload"]),
    "streamed": ("weights streamed", COLORS["reload"]),
    "adamw": ("weights and AdamW streamed", "#56b4e9"),
    "lora": ("streamed, LoRA", COLORS["recompute"]),
}
"""Way → its name and its colour."""
ON_HOST = ("streamed", "adamw", "lora")  # ways with the weights there
GRAIN = 4096  # lengths that are tried are multiples of so many tokens, or of fewer
HELD = 2 * 2 * 8_030_261_248  # bytes of the shape's weights and gradients


def _lengths() -> list[Row]:
    rows = read("long_context")["rows"]
    found = [row for row in rows if row["way"] in LENGTHS and "step_s" in row and "limit_bytes" not in row]
    return sorted(found, key=lambda row: (row["tokens"], list(LENGTHS).index(row["way"])))


@table("long_context")
def lengths_table(_page: Path) -> str:
    """Step, memory and speed at each length, in each way that was measured."""
    rows = _lengths()
    base_s = {row["tokens"]: row["step_s"] for row in rows if row["way"] == "inputs"}
    columns: Columns = {
        "tokens": ("tokens", ","),
        "way": ("way", lambda way: LENGTHS[way]),
        "step, s": ("step_s", ".1f"),
        "against checkpointing": lambda row: (
            f"{row['step_s'] / base_s[row['tokens']]:.2f} ×" if row["tokens"] in base_s else ""
        ),
        "tokens/s": ("tokens_per_s", ",.0f"),
        "device, GiB": ("peak_bytes", gib1),
        "on the host, GiB": ("host_bytes", gib1),
    }
    shown = with_runs(cells(rows, columns), rows, read("long_context"))
    most = max(row["stall_s"] / row["step_s"] for row in rows)
    stall = (
        f"Compute waits for copies for at most {most:.1%} of a step." if most >= 0.0005 else "No copy is waited for."
    )
    told = markdown_table(shown, left=2, answer=("against checkpointing",))
    return f"{_where(rows, by_row=True)} {stall}\n\n{told}\n"


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
    whole = [row for row in _lengths() if "peak_reserved_bytes" in row]
    for nbytes, ways in found.items():
        within = [row for row in whole if row["peak_reserved_bytes"] <= nbytes]
        if "inputs" not in ways and within:
            row = max(within, key=lambda row: (row["tokens"], row["tokens_per_s"]))
            ways["inputs"] = {**row, "longest_tokens": row["tokens"]}
    for row in _with_adamw():
        found.setdefault(row["budget_bytes"], {})["adamw"] = row
    return {nbytes: {way: ways[way] for way in LIMITED if way in ways} for nbytes, ways in sorted(found.items())}


def _with_adamw() -> list[Row]:
    """The rows of whole trainings, if they were measured: on the same GPU, or they would not belong into the table."""
    here, there = read("long_context"), read("recipe")
    rows = [row for row in there.get("longest", ()) if "longest_tokens" in row]
    where = [(one["hardware"]["gpu"], one["versions"]["torch"]) for one in (here, there)]
    assert not rows or where[0] == where[1], where
    return rows


@table("longest_context")
def longest_table(_page: Path) -> str:
    """The longest context by device memory."""

    def cell(nbytes: int, way: str) -> str:
        row = rows[nbytes].get(way)
        if row is None:
            return "does not fit" if nbytes < HELD and way not in ON_HOST else "not tried"
        tokens = row.get("longest_tokens", 0)
        longest = f"{tokens:,}"
        if _is_open(row):
            failed = row.get("shortest_failed_tokens")
            longest = f"at least {longest}" + (f", less than {failed:,}" if failed else "")
        about = "" if row.get("whole", True) else "about "
        how = f"; {LENGTHS[row['way']]}" if way == "inputs" else ""  # the library's is of several ways
        return f"{longest} ({about}{row['tokens_per_s']:,.0f} tokens/s{how})" if tokens else "does not fit"

    rows = longest()
    ways = {way: name for way, (name, _) in LIMITED.items() if any(way in row for row in rows.values())}
    shown = [
        {"device": f"{nbytes / GIB:.0f} GiB"} | {name: cell(nbytes, way) for way, name in ways.items()}
        for nbytes in rows
    ]
    told = markdown_table(shown, left=1, answer=[ways[way] for way in ("inputs", "streamed", "adamw") if way in ways])
    said = _where([row for ways in rows.values() for row in ways.values()])
    if "adamw" in ways:
        said += " With AdamW: whole steps by `prepare`, the longest with a plan (`benchmarks.recipe --longest`)."
    return f"{said}\n\n{told}\n"


@table("lora_longest")
def lora_longest(_page: Path) -> str:
    """The longest sequence with LoRA on a small device."""
    record = read("long_context")
    row = row_of(record["rows"], row="24GiB:lora")
    return (
        f"{record['hardware']['gpu']} limited to {row['limit_bytes'] / GIB:.0f} GiB, Llama-3.1-8B's shape, LoRA: "
        f"{row['longest_tokens']:,} tokens at {row['tokens_per_s']:,.0f} tokens/s, with at most 100 GiB of pinned host "
        f"memory ({measured_on([row], record)}).\n"
    )


def longest_said() -> str:
    """The picture in words."""
    said = []
    for nbytes, ways in longest().items():
        some = ", ".join(f"{LIMITED[way][0]} {row.get('longest_tokens', 0):,}" for way, row in ways.items())
        said.append(f"{nbytes / GIB:.0f} GiB: {some}")
    return f"Bars of the longest context in tokens, by device memory. {'; '.join(said)}."


def draw_longest(*, narrow: bool = False) -> Figure:
    """A bar for each way to train, below the size of the device."""
    names, lengths, colors, said, sizes = [], [], [], [], []
    for nbytes, ways in longest().items():
        sizes.append(len(names))
        bars = [(f"{nbytes / GIB:.0f} GiB", INK, 0, "")]  # no bar: the title of those below
        for way, row in ways.items():
            length = row.get("longest_tokens", 0) / 1024
            bars.append((*LIMITED[way], length, f"{'≥' if length and _is_open(row) else ''}{length:.0f}"))
        for name, color, length, text in bars:
            names.append(fill(name, 24) if narrow else name)
            colors.append(color)
            lengths.append(length)
            said.append(text)
    figure = new_figure((NARROW_INCHES if narrow else 8.0, 0.8 + (0.32 if narrow else 0.24) * len(names)))
    ax = figure.subplots()
    draw_bars(ax, names, lengths, colors, said, room=1.2)
    for place in sizes:
        ax.get_yticklabels()[place].set_fontweight("bold")
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    label_axes(ax, "longest context, K tokens")
    return figure


def _is_open(row: Row) -> bool:
    """Whether the search has ended, for its time, before the next length failed."""
    failed = row.get("shortest_failed_tokens")
    return failed is None or failed - row["longest_tokens"] > GRAIN


def _where(rows: list[Row], *, by_row: bool = False) -> str:
    record = read("long_context")
    return (
        f"{record['hardware']['gpu']}, {torch_of(record)}; Llama-3.1-8B's shape in bfloat16, random weights, forward "
        f"and backward; {measured_on(rows, record, by_row=by_row)}."
    )


picture("longest_context", draw_longest, longest_said)
