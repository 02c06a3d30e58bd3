"""Tables of weight streaming for the pages, from ``results/weight_streaming.json``."""

from functools import cache
from pathlib import Path
from typing import Any

from blocks import Columns, Row, cells, markdown_table, read, row_of, table
from page_text import GB, day_of, gb, ms, torch_of


@cache
def measured() -> Row:
    """The record, if it shows what the pages say about it.

    Raises:
        ValueError: The host was blocked before the end of backward, or FSDP2 did not finish a case.
    """
    record = read("weight_streaming")
    for row in record["rows"]:
        blocking = record[f"blocking_calls_{row['case']}"]
        if blocking:
            raise ValueError(f"{row['case']}: nothing must block host or device, but there were {blocking}")
        if row["fsdp_s"] is None:
            raise ValueError(f"{row['case']}: FSDP2 must have finished, to be compared with")
    return record


def _phases(name: str) -> Any:
    return lambda row: f"{ms(row[f'{name}_forward_s'])} + {ms(row[f'{name}_backward_s'])}"


COLUMNS: Columns = {
    "tokens": ("tokens", ","),
    "compute alone": _phases("compute"),
    "link alone": _phases("link"),
    "limit": ("limit_s", ms),
    "streamed": ("step_s", ms),
    "over the limit": ("ratio_to_limit", lambda ratio: f"{ratio:.3f} ×"),
    "FSDP2": ("fsdp_s", ms),
    "device peak": ("peak_device_bytes", gb),
}


@table("weight_streaming")
def weight_streaming(_page: Path) -> str:
    """Step, limit and FSDP2 for each number of tokens."""
    record = measured()
    told = markdown_table(cells(record["rows"], COLUMNS), answer=("tokens", "streamed", "over the limit", "limit"))
    return (
        f"{record['hardware']['gpu']}, {torch_of(record)}, {day_of(record)}: "
        f"{record['parameters'] / GB:.1f} billion parameters in bfloat16, {gb(record['weight_bytes'])}, on a device "
        f"limited to {gb(record['memory_limit_bytes'])}. Forward + backward, ms.\n\n{told}\n"
    )


@table("weight_seconds")
def weight_seconds(_page: Path) -> str:
    """What comes on top of a step: once, with microbatches, with an optimizer."""
    record = measured()
    few, many = (row_of(record["rows"], case=case) for case in ("few", "many"))
    shown = [
        {"what": what, "tokens": f"{row['tokens']:,}", "s": f"{seconds:.2f}"}
        for what, row, seconds in (
            ("`stream_weights` itself, once", few, record["setup_s"]),
            ("the first step, which allocates the gradients' memory", few, few["first_s"]),
            ("every other step", few, few["step_s"]),
            ("a later microbatch: its gradients are added on the host", few, record["accumulating_s"]),
            ("a step", many, many["step_s"]),
            ("a step and then SGD on the host", many, record["optimizer_after_s"]),
            ("a step with SGD on the device in backward", many, record.get("optimizer_in_backward_s")),
        )
        if seconds is not None
    ]
    return markdown_table(shown, left=1) + "\n"
