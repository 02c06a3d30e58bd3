"""What all contenders take on all workloads, for the pages: from ``results/suite.json``."""

import os
import re
import statistics
from functools import partial
from pathlib import Path

from page_text import ROOT, Row, day_of, gib, link_of, markdown_table, ms, percent, read, table, torch_of

from benchmarks.verdicts import verdicts
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import format_bytes

FREE = 5
"""Of the decoder's layers, as :mod:`offload` simulates it on PCIe Gen5."""
PACKAGES = ("transformers", "trl", "transformer-engine")
WORKLOADS = {
    "suite_decoder": "decoder",
    "suite_compiled": "compiled decoder",
    "suite_norm_mlp": "LayerNorm-MLP",
    "suite_llama": "Hugging Face Llama",
    "suite_long": "long sequence",
}
"""Block of the benchmarks' page → workload."""


def workload_table(workload: str, _page: Path) -> str:
    """All contenders on one workload, and why some are missing."""
    rows = [row for row in read("suite")["rows"] if row["workload"] == workload]
    kept = next((row for row in rows if row["family"] == "nothing" and "step_s" in row), None)
    fails = [row for row in rows if re.match(r"\w+(Error|Exception): ", row.get("error", ""))]
    errors = [
        (row["contender"].partition(", k =")[0], row["error"]) for row in rows if "error" in row and row not in fails
    ]
    missing = dict.fromkeys(f"{way} ({error})" for way, error in errors)
    names: dict[str, list[str]] = {}
    for row in fails:
        names.setdefault(row["error"], []).append(row["contender"])
    said = "".join(f"\nFails: {'; '.join(who)}, with `{_short(error)}`.\n" for error, who in names.items())
    said += f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    shown = [_shown(row, kept) for row in rows if row in fails or "error" not in row]
    if all(one["gradients"] in {"", "equal"} for one in shown):
        compared = [one for one in shown if one.pop("gradients")]
        everywhere = len(compared) == sum(one["step, ms"] != "fails" for one in shown)
        said += f"\nGradients are equal in {'all rows' if everywhere else 'the rows of this library'}.\n"
    run = read("suite")["runs"][workload]
    where = f"{read('suite')['hardware']['gpu']}, {link_of(run['link'])}, {day_of(run)}, commit {run['commit'][:7]}."
    return f"{where}\n\n{markdown_table(shown, left=1, answer=('against nothing', 'activation peak, GiB'))}\n{said}"


def _short(error: str) -> str:
    """The first part of a long message."""
    return error if len(error) < 120 else f"{error[:110].rpartition(' ')[0]} …"


def _shown(row: Row, kept: Row | None) -> Row:
    ratio, copied, fails = row.get("ratio_to_limit"), row.get("copied_bytes"), "error" in row
    same = {True: "equal", False: "differ", None: ""}[row.get("bit_identical")]
    return {
        "": row["contender"],
        "step, ms": "fails" if fails else f"{ms(row['step_s'])}\u00a0±\u00a0{row['spread_s'] * 500:.0f}",
        "against nothing": f"{row['step_s'] / kept['step_s']:.2f} ×" if kept and not fails else "",
        "activation peak, GiB": "" if fails else gib(row["peak_bytes"]),
        "copied each way, GiB": "" if fails or copied is None else gib(copied),
        "against the limit": f"{ratio:.2f} ×" if ratio and copied else "",
        "pinned, GiB": "" if fails else gib(row["pinned_bytes"]),
        "first step, s": "" if fails else f"{row['first_s']:.1f}",
        "gradients": "" if fails else same,
    }


@table("free_layers")
def free_layers(page: Path) -> str:
    """How much longer the decoder's step is with its free layers offloaded."""
    rows = [row for row in read("suite")["rows"] if row["workload"] == "decoder"]
    [kept] = [row for row in rows if row["family"] == "nothing"]
    [free] = [row for row in rows if row["contender"] == f"this library, k = {FREE}"]
    benchmarks = Path(os.path.relpath(ROOT / "docs/benchmarks.md", page.parent)).as_posix()
    longer = percent(free["step_s"] / kept["step_s"] - 1)
    return f"With {FREE} of 20 layers offloaded, [the decoder's step]({benchmarks}#decoder) takes {longer} longer.\n"


for block, workload in WORKLOADS.items():
    table(block)(partial(workload_table, workload))


@table("suite_setting")
def setting(_page: Path) -> str:
    """What it was measured on, and in how many runs."""
    record = read("suite")
    packages = [f"{name} {record['versions'][name]}" for name in PACKAGES if record["versions"].get(name)]
    runs: dict[tuple[str, str], list[str]] = {}
    for name, run in record["runs"].items():
        runs.setdefault((day_of(run), run["commit"][:7]), []).append(name.replace("_", " "))
    parts = "; ".join(
        f"{', '.join(names)} on {day} at commit {commit}" for (day, commit), names in sorted(runs.items())
    )
    where = ", ".join([record["hardware"]["gpu"], torch_of(record), *packages])
    return f"{where}. Measured in {len(runs)} runs: {parts}.\n"


@table("suite_te")
def transformer_engine(_page: Path) -> str:
    """Which of Transformer Engine's code was measured, and where."""
    runs = read("suite")["runs"]
    names = [name for name in WORKLOADS.values() if "transformer_engine" in runs.get(name, {})]
    [(commit, licence)] = {
        (runs[name]["transformer_engine"]["commit"], runs[name]["transformer_engine"]["licence"]) for name in names
    }
    return f"It was measured on {' and '.join(names)}, with the file of commit `{commit[:10]}` ({licence}).\n"


@table("suite_long_length")
def long_length(_page: Path) -> str:
    """How long the long sequence is."""
    run = read("suite")["runs"]["long sequence"]
    return f"The sequence has {run['tokens']:,} tokens, and the model {run['layers'] - 1} layers.\n"


@table("suite_verdicts")
def claims(_page: Path) -> str:
    """Which of the claims hold in this record."""
    words = {True: "yes", False: "**no**", None: ""}
    found = verdicts(read("suite")["rows"])
    rows = [
        {"claim": said["claim"], "holds": words[said["holds"]], "measured": _listed(said["measured"])} for said in found
    ]
    failed = [f"{said['claim']} ({said['measured']})" for said in found if said["holds"] is False]
    number = f"{len(found) - len(failed)} of {len(found)} claims hold."
    fails = f" This one does not: {failed[0]}." if len(failed) == 1 else ""
    return f"{number}{fails}\n\n{markdown_table(rows, left=3)}\n"


def _listed(text: str) -> str:
    parts = text.split("; ")
    return text if len(parts) == 1 else "<br>".join(f"• {part}" for part in parts)


@table("suite_host_cost")
def host_cost(_page: Path) -> str:
    """The host's time for a saved tensor."""
    runs = read("suite")["host_cost"]
    what = {
        "operation": "an elementwise operation, forward and backward",
        "hooks": "PyTorch's hooks for saved tensors, doing nothing",
        "stays_later": "the library, for a tensor of a resident layer after the first resident one",
        "stays": "the library and the hooks, for a tensor that an offloaded layer keeps",
        "alone": "the library and the hooks, for an offloaded tensor of 4 MiB",
    }
    costs = {name: statistics.median(run[f"{name}_s"] for run in runs) for name in what}
    rows = [{"": text, "host time, µs": f"{costs[name] * 1e6:.1f}"} for name, text in what.items()]
    return markdown_table(rows, left=1) + "\n"


@table("suite_small_copies")
def small_copies(_page: Path) -> str:
    """The bandwidth of tensors of one size, medians over the runs, and what keeps the smallest away from the link's."""
    runs = [run["sizes"] for run in read("suite")["small_copies"]]
    sizes = [{key: statistics.median(row[key] for row in rows) for key in rows[0]} for rows in zip(*runs, strict=True)]
    rows = [
        {
            "": _whole(row["size_bytes"]),
            "to the host, GB/s": f"{row['out_bytes_per_s'] / 1e9:.1f}",
            "of the link": f"{row['out_of_link']:.0%}",
            "to the GPU, GB/s": f"{row['back_bytes_per_s'] / 1e9:.1f}",
            "of the link ": f"{row['back_of_link']:.0%}",
        }
        for row in sizes
    ]
    large = [row for row in sizes if row["size_bytes"] >= DEFAULT_MIN_BYTES]
    shares = [min(row[way] for row in large) for way in ("out_of_link", "back_of_link")]
    smallest = sizes[0]["size_bytes"]
    host_us, link_us = (smallest / row["out_bytes_per_s"] * 1e6 for row in (sizes[0], sizes[-1]))
    return (
        f"{markdown_table(rows, left=1)}\n\nTensors of {_whole(DEFAULT_MIN_BYTES)} and more (`min_bytes` by default) "
        f"reach at least {shares[0]:.0%} of the link to the host and {shares[1]:.0%} to the GPU. Smaller tensors wait "
        f"for the host: a tensor of {_whole(smallest)} takes {host_us:.0f} µs of the host's time, "
        f"and {link_us:.1f} µs of the link's.\n"
    )


def _whole(nbytes: float) -> str:
    """A power of two of bytes, without decimals."""
    number, unit = format_bytes(int(nbytes)).split()
    return f"{float(number):.0f} {unit}"


@table("pinning")
def pinning(_page: Path) -> str:
    """What pinning takes: how much longer the first step is than the later ones, by what is pinned in it."""
    rows = [row for row in read("suite")["rows"] if row["family"] == "offload" and row.get("pinned_bytes", 0) > 5 << 30]
    costs = [(row["first_s"] - row["step_s"]) / (row["pinned_bytes"] / (1 << 30)) for row in rows]
    return (
        f"The first step pins memory, which takes {min(costs):.2f} to {max(costs):.2f} s per GiB. This is the first "
        f"step less a later one, in the {len(rows)} rows of this library on this page that pin more than 5 GiB.\n"
    )
