"""What a suite's rows say: ratios to the physical limit, and which claims hold. Pure arithmetic on the record."""

from collections.abc import Mapping
from typing import Any

from benchmarks.instruments import Row, with_median

OWN = ("offload", "offload_checkpoint")
"""The families of this library."""
OTHERS = ("save_on_cpu", "trl", "te", "checkpoint_on_cpu")
"""The families of other ways to offload."""
BASE = dict.fromkeys(("checkpoint", "checkpoint_on_cpu", "offload_checkpoint"), "checkpoint")
"""Which family's step is the compute that a family cannot do without, if not that of ``nothing``."""

GIB = 1 << 30
NOISE = 1.01
"""Two points of which neither is worse by more than this are taken to be equal."""


def measured(row: Row) -> bool:
    """Whether the row has a time and a peak."""
    return "error" not in row and bool(row.get("times_s"))


def with_ratios(rows: list[Row], links: Mapping[str, Row]) -> list[Row]:
    """The rows with their median, their spread, and their ratio to the limit.

    The limit is the larger of two times: the shortest in the workload for at least the row's compute, and that in which
    the link moves the row's bytes to the host and, after that, back.

    Args:
        rows: What was measured.
        links: Workload → the link as it was measured in the same run.
    """
    rows = [with_median(row) for row in rows]
    return [_with_limit(row, rows, links) for row in rows]


def _with_limit(row: Row, rows: list[Row], links: Mapping[str, Row]) -> Row:
    base = BASE.get(row["family"], "nothing")
    computing_s = [
        other["step_s"]
        for other in rows
        if other["workload"] == row["workload"]
        and measured(other)
        and base in ("nothing", BASE.get(other["family"], other["family"]))
    ]
    if not measured(row) or _find(rows, row["workload"], base) is None or row.get("copied_bytes") is None:
        return row
    link = links[row["workload"]]
    link_s = row["copied_bytes"] * (1 / link["d2h_bytes_per_s"] + 1 / link["h2d_bytes_per_s"])
    limit_s = max(min(computing_s), link_s)
    return {**row, "link_s": link_s, "limit_s": limit_s, "ratio_to_limit": row["step_s"] / limit_s}


def verdicts(rows: list[Row]) -> list[dict[str, Any]]:
    """The suite's claims, what was measured, and whether each holds, by the rows that :func:`with_ratios` gave.

    ``holds`` is ``None`` where a claim was not measured.
    """
    said = [_nobody_below(rows, workload) for workload in dict.fromkeys(row["workload"] for row in rows)]
    said += [
        _near_limit(rows, 1.03),
        _beside_checkpointing(rows, GIB, 1.01),
        _hidden(rows, 1.03),
        _same_gradients(rows),
    ]
    return [{"claim": claim, "measured": found, "holds": holds} for claim, found, holds in said]


Verdict = tuple[str, str, bool | None]


def below_curve(row: Row, own: list[Row]) -> float:
    """The shortest own step with no more memory than ``row``, as a multiple of the row's.

    With less memory than the own curve has anywhere, ``row`` is compared with the curve's end, its least memory.
    """
    end_bytes = min(other["peak_bytes"] for other in own)
    most_bytes = NOISE * max(row["peak_bytes"], end_bytes)
    return min(other["step_s"] for other in own if other["peak_bytes"] <= most_bytes) / row["step_s"]


def _nobody_below(rows: list[Row], workload: str) -> Verdict:
    claim = f"{workload}: no other way to offload needs both less memory and less time than this library"
    here = [row for row in rows if row["workload"] == workload and measured(row)]
    own = [row for row in here if row["family"] in OWN]
    others = [row for row in here if row["family"] in OTHERS]
    if not own or not others:
        return claim, "not measured", None
    said = sorted(((below_curve(row, own), row) for row in others), key=lambda pair: pair[0], reverse=True)
    below = [pair for pair in said if pair[0] > NOISE]
    if below:
        return claim, "; ".join(_against(row, own, ratio) for ratio, row in below), False
    return claim, "; ".join(_against(row, own, ratio) for ratio, row in said), True


def _against(row: Row, own: list[Row], ratio: float) -> str:
    beyond_bytes = min(other["peak_bytes"] for other in own) - row["peak_bytes"]
    if beyond_bytes > (NOISE - 1) * row["peak_bytes"]:
        less = f"needs {beyond_bytes / GIB:.2f} GiB less than this library's least"
        return f"{row['contender']}: {less}, where this library takes {_time(ratio)}"
    return f"{row['contender']}: in the same memory, this library takes {_time(ratio)}"


def _time(ratio: float) -> str:
    """As a share: ``0.96`` is ``4% less time``."""
    return f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'} time"


def _near_limit(rows: list[Row], most: float) -> Verdict:
    claim = f"decoder: with all but two layers offloaded, the step takes at most {most} × the limit"
    row = max(
        (row for row in _of(rows, "decoder", "offload") if "ratio_to_limit" in row), key=lambda r: r["k"], default=None
    )
    if row is None:
        return claim, "not measured", None
    return claim, f"{row['ratio_to_limit']:.3f} at k = {row['k']}", row["ratio_to_limit"] <= most


def _beside_checkpointing(rows: list[Row], least_bytes: int, most: float) -> Verdict:
    claim = (
        "decoder: around checkpointed layers it saves at least "
        f"{least_bytes / GIB:.0f} GiB more than checkpointing, for at most {most - 1:.0%} more time"
    )
    alone, own = _find(rows, "decoder", "checkpoint"), _of(rows, "decoder", "offload_checkpoint")
    if alone is None or not own:
        return claim, "not measured", None

    def holds(row: Row) -> bool:
        less = alone["peak_bytes"] - row["peak_bytes"]
        return bool(less >= least_bytes and row["step_s"] <= most * alone["step_s"])

    best = max(own, key=lambda row: (holds(row), -row["step_s"]))
    less, ratio = alone["peak_bytes"] - best["peak_bytes"], best["step_s"] / alone["step_s"]
    change = f"{abs(ratio - 1):.2%} {'more' if ratio > 1 else 'less'} time"
    return claim, f"{less / GIB:.2f} GiB less for {change}, k = {best['k']}", holds(best)


def _hidden(rows: list[Row], most: float) -> Verdict:
    claim = f"long sequence: every layer but the last offloaded takes at most {most - 1:.0%} longer"
    kept, own = _find(rows, "long sequence", "nothing"), _of(rows, "long sequence", "offload")
    if kept is None or not own:
        return claim, "not measured", None
    ratio = max(own, key=lambda row: row["k"])["step_s"] / kept["step_s"]
    return claim, f"{ratio:.3f} × the time without", ratio <= most


def _same_gradients(rows: list[Row]) -> Verdict:
    claim = "this library changes no bit of a gradient"
    own = [row for row in rows if row["family"] in OWN and ("error" in row or row.get("bit_identical") is not None)]
    if not own:
        return claim, "not measured", None
    wrong = [
        f"{row['contender']} ({row['workload']}): {row.get('error', 'different')}"
        for row in own
        if "error" in row or not row["bit_identical"]
    ]
    return claim, "; ".join(wrong) or f"equal in all {len(own)} rows", not wrong


def _of(rows: list[Row], workload: str, family: str) -> list[Row]:
    return [row for row in rows if row["workload"] == workload and row["family"] == family and measured(row)]


def _find(rows: list[Row], workload: str, family: str) -> Row | None:
    return next(iter(_of(rows, workload, family)), None)
