"""Offloading in pipelines, and the links of several GPUs, for the pages: from ``results/pipeline_*.json``."""

import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from blocks import Columns, Row, cells, markdown_table, read, runs_by_gpus, table
from page_text import GB, gib1, ms, percent, torch_of

from benchmarks.pipeline_prediction import HALF, NOTHING, with_predictions

HARDLY_LONGER = 0.02  # what the first rank's half may cost in wide models, as the page says
HARDLY_LESS = 0.01  # a job that needs less by no more than this needs as much as before


class Measured(NamedTuple):
    """One rank while the first rank saves half, and the same rank without."""

    gpus: int
    half: Row
    nothing: Row


@cache
def read_records() -> list[Row]:
    """The records, if they show what the page says about them; predictions are made anew.

    Raises:
        ValueError: A gradient differs, the first rank's peak was not halved, or that cost time in the widest model.
    """
    records = [read("pipeline_2"), read("pipeline_4")]
    for record in records:
        if not all(row["bit_identical"] for row in record["rows"]):
            raise ValueError("gradients must be those without offloading, but they differ")
        for found in (one.half for one in measured(record)):
            if found["peak_saved"] < 0.5:
                raise ValueError(f"{found['schedule']}: must save half of the peak, got {found['peak_saved']:.0%}")
            if found["width"] == _by_width(record)[0] and found["slowdown"] > HARDLY_LONGER:
                raise ValueError(f"{found['schedule']}: must cost hardly any time, got {found['slowdown']:.1%}")
    return [with_predictions(record) for record in records]


def measured(record: Row, rank: int | None = 0) -> Iterator[Measured]:
    """What was measured on that rank while the first saves half; on all ranks if it is ``None``."""

    def place(row: Row) -> tuple[object, ...]:
        return row["schedule"], row["width"], row["rank"]

    nothing = {place(row): row for row in record["rows"] if row["offload"] == NOTHING}
    for row in record["rows"]:
        if row["offload"] == HALF and rank in (None, row["rank"]):
            yield Measured(record["options"]["ranks"], row, nothing[place(row)])


def _by_width(record: Row) -> list[str]:
    """The measured models, the one with the most hidden units first."""
    models: dict[str, Row] = record["models"]
    return sorted(models, key=lambda width: -models[width]["hidden"])


def _change(before: str, after: str) -> str:
    return f"{before}\u00a0→\u00a0{after}"


def _case(found: Measured) -> Row:
    return {"GPUs": found.gpus, "schedule": found.half["schedule"], "width": found.half["width"]}


@table("pipeline_job")
def job_table(_page: Path) -> str:
    """What the job needs: the peak of the rank that holds most, without and while the first rank saves half."""
    shown, same, records = [], 0, read_records()
    for record in records:
        cases: dict[tuple[str, str], list[Measured]] = {}
        for found in measured(record, rank=None):
            cases.setdefault((found.half["schedule"], found.half["width"]), []).append(found)
        for ranks in cases.values():
            before = max(ranks, key=lambda found: found.nothing["peak_bytes"])
            after = max(ranks, key=lambda found: found.half["peak_bytes"])
            first = next(found.half for found in ranks if found.half["rank"] == 0)
            less = 1 - after.half["peak_bytes"] / before.nothing["peak_bytes"]
            same += less < HARDLY_LESS
            peaks = gib1(before.nothing["peak_bytes"]), gib1(after.half["peak_bytes"])
            shown.append(
                {
                    **_case(before),
                    "largest peak of all ranks, GiB": _change(*peaks),
                    "less": percent(less),
                    "which rank": _change(str(before.half["rank"]), str(after.half["rank"])),
                    "first rank's peak less": percent(first["peak_saved"]),
                    "longer": percent(first["slowdown"]),
                }
            )
    where = f"{records[0]['hardware']['gpu']}, {torch_of(records[0])}, {runs_by_gpus(records)}."
    said = (
        f"In {same} of {len(shown)} cases the job needs as much memory as before, because another rank is the largest."
    )
    return f"{where}\n\n{markdown_table(shown, left=3, answer=('less', 'longer'))}\n\n{said}\n"


@table("pipeline_half")
def half_table(_page: Path) -> str:
    """The first rank's half: step and peak without and with, beside the prediction."""
    records = read_records()
    rows = [
        found
        for record in records
        for found in sorted(measured(record), key=lambda found: _by_width(record).index(found.half["width"]))
    ]
    shown = [
        {
            **_case(found),
            "step, ms": _change(ms(found.nothing["step_s"]), ms(found.half["step_s"])),
            "longer": percent(found.half["slowdown"]),
            "longer, predicted": percent(found.half["predicted_slowdown"]),
            "peak, GiB": _change(gib1(found.nothing["peak_bytes"]), gib1(found.half["peak_bytes"])),
            "less": percent(found.half["peak_saved"]),
            "less, predicted": percent(found.half["predicted_peak_saved"]),
        }
        for found in rows
    ]
    longer = [100 * (found.half["predicted_slowdown"] - found.half["slowdown"]) for found in rows]
    large = 100 * max(found.half["predicted_peak_saved"] - found.half["peak_saved"] for found in rows)
    return (
        f"{_setting(records)}\n\n{markdown_table(shown, left=3, answer=('longer', 'less'))}\n\n"
        "Gradients are bit-identical to those without offloading on every rank, in all rows here. Steps are predicted "
        f"up to {max(longer):.1f} points too long and {-min(longer):.1f} too short, and peaks fell by up to "
        f"{large:.1f} points less than predicted.\n"
    )


def _setting(records: list[Row]) -> str:
    first = records[0]
    options = first["options"]
    models = "; ".join(
        f"width {width}: {model['layers']} blocks per rank, inner width {model['ffn']:,}, "
        f"{model['batch']} × {model['tokens']:,} tokens per microbatch"
        for width, model in first["models"].items()
    )
    return (
        f"{first['hardware']['gpu']}, {torch_of(first)}, {runs_by_gpus(records)}: "
        f"decoder blocks in bfloat16 without recomputation, {options['microbatches']} microbatches, median of "
        f"{options['repeats']} steps, which take turns with those without offloading. {models[0].upper()}{models[1:]}."
    )


@table("host_links")
def host_links(_page: Path) -> str:
    """GB/s of one GPU, while the others of the host are idle, and while all copy."""
    rows, lost = [], []
    records = read("pipeline_2"), read("pipeline_4")
    for record in records:
        links, gpu = record["links"], record["hardware"]["gpu"]
        for when, who in (("alone", "one copies"), ("all at once", "all copy")):
            speeds = {
                key: statistics.median(link[when][key] for link in links)
                for key in links[0]["alone"]
                if key.endswith("per_s")
            }
            rows.append({"who": f"{len(links)} × {gpu}, {who}", **speeds})
        alone, together = (row["duplex_bytes_per_s"] for row in rows[-2:])
        lost.append(f"each of {len(links)} loses {1 - together / alone:.0%} of its bandwidth")
    columns: Columns = {"GB/s of each GPU that copies": ("who", "")}
    for title, key in (("to the host", "d2h"), ("to the GPU", "h2d"), ("both at once, sum", "duplex")):
        columns[title] = (f"{key}_bytes_per_s", lambda speed: f"{speed / GB:.0f}")
    said = f"Medians over the GPUs; {runs_by_gpus(records)}. If all GPUs copy both ways, {', and '.join(lost)}."
    return f"{markdown_table(cells(rows, columns), left=1)}\n\n{said}\n"
