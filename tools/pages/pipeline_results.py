"""Tables of offloading in pipelines for the pages, all from ``results/pipeline_*.json``."""

from pathlib import Path
from typing import Any

from page_text import GB, Row, gib, markdown_table, ms, percent, runs_by_gpus, table, torch_of
from pipeline_records import Measured, measured, read_records

from benchmarks.pipeline_report import BOUND, FREE, HALF

NO_BREAK = "\u00a0"


@table("pipeline_job")
def job_table(_page: Path) -> str:
    """What the job needs: the peak of the rank that holds most, without and while the first rank saves half."""
    rows, same, records = [], 0, read_records()
    for record in records:
        cases: dict[tuple[Any, Any], list[Measured]] = {}
        for found in measured(record, HALF, rank=None):
            cases.setdefault(found.case, []).append(found)
        for ranks in cases.values():
            before = max(ranks, key=lambda found: found.nothing["peak_bytes"])
            after = max(ranks, key=lambda found: found.way["peak_bytes"])
            less = 1 - after.way["peak_bytes"] / before.nothing["peak_bytes"]
            same += less < HARDLY_LESS
            rows.append(
                {
                    **_case(before),
                    "largest peak of all ranks, GiB": _change(
                        gib(before.nothing["peak_bytes"], 1), gib(after.way["peak_bytes"], 1)
                    ),
                    "less": percent(less),
                    "which rank": _change(str(before.way["rank"]), str(after.way["rank"])),
                    "first rank's peak less": percent(next(f.way["peak_saved"] for f in ranks if f.way["rank"] == 0)),
                    "longer": percent(next(f.way["slowdown"] for f in ranks if f.way["rank"] == 0)),
                }
            )
    said = (
        f"In {same} of {len(rows)} cases the job needs as much memory as before, because another rank is the largest."
    )
    return f"{_where(records)}\n\n{markdown_table(rows, left=3, answer=('less', 'longer'))}\n\n{said}\n"


HARDLY_LESS = 0.01
"""A job that needs less by no more than this needs as much as before."""


@table("pipeline_half")
def half_table(_page: Path) -> str:
    """The first rank's half: step and peak without and with, beside the prediction."""
    records = read_records()
    shown = [
        {
            **_case(found),
            "step, ms": _change(ms(found.nothing["step_s"]), ms(found.way["step_s"])),
            **_costs(found),
        }
        for record in records
        for found in sorted(measured(record, HALF), key=lambda found: -record["models"][found.way["width"]]["hidden"])
    ]
    rows = [row for record in records for row in record["rows"]]
    same = (
        "Gradients are bit-identical to those without offloading on every rank, in all rows here."
        if all(row["bit_identical"] for row in rows)
        else "Gradients differ from those without offloading."
    )
    return f"{_setting(records)}\n\n{markdown_table(shown, left=3, answer=('longer', 'less'))}\n\n{same}\n"


@table("pipeline_ways")
def ways_table(_page: Path) -> str:
    """What is free, and more than the link can carry."""
    records = read_records()
    shown = [
        {
            **_case(found),
            "offload": found.way["offload"],
            **_costs(found),
        }
        for record in records
        for found in measured(record, FREE, BOUND)
    ]
    return f"{markdown_table(shown, left=4, answer=('longer', 'less'))}\n\n{_errors(records)}\n"


@table("pipeline_links")
def links_table(_page: Path) -> str:
    """Each rank's link while no other rank copies, and while all do."""
    shown = [
        {
            "GPUs": record["options"]["ranks"],
            "rank": rank,
            **{
                f"{title}, {what}": f"{links[what][f'{name}_bytes_per_s'] / GB:.0f}"
                for what in ("alone", "all at once")
                for title, name in (("to the host", "d2h"), ("to the GPU", "h2d"), ("both", "duplex"))
            },
        }
        for record in read_records()
        for rank, links in enumerate(record["links"])
    ]
    return "GB/s; both: the sum while copies go in both directions.\n\n" + markdown_table(shown) + "\n"


def _where(records: list[Row]) -> str:
    return f"{records[0]['hardware']['gpu']}, {torch_of(records[0])}, {runs_by_gpus(records)}."


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


def _errors(records: list[Row]) -> str:
    """How far the first rank's predictions were off, on both sides."""
    all_found = [found for record in records for found in measured(record, HALF, FREE, BOUND)]
    most = 100 * max(map(_caution, all_found))
    late = 100 * max(-_caution(found) for found in all_found)
    large = 100 * max(found.way["predicted_peak_saved"] - found.way["peak_saved"] for found in all_found)
    return (
        f"In this table and the one above, steps are predicted up to {most:.1f} points too long and {late:.1f} too "
        f"short, and peaks fell by up to {large:.1f} points less than predicted."
    )


def _caution(found: Measured) -> float:
    """Predicted slowdown minus measured slowdown, as fractions of the step without offloading."""
    more: float = found.way["predicted_slowdown"] - found.way["slowdown"]
    return more


def _costs(found: Measured) -> Row:
    """How much longer the step and how much less the peak is, beside the prediction."""
    return {
        "longer": percent(found.way["slowdown"]),
        "longer, predicted": percent(found.way["predicted_slowdown"]),
        "peak, GiB": _change(gib(found.nothing["peak_bytes"], 1), gib(found.way["peak_bytes"], 1)),
        "less": percent(found.way["peak_saved"]),
        "less, predicted": percent(found.way["predicted_peak_saved"]),
    }


def _case(found: Measured) -> Row:
    return {"GPUs": found.gpus, "schedule": found.way["schedule"], "width": found.way["width"]}


def _change(before: str, after: str) -> str:
    return f"{before}{NO_BREAK}→{NO_BREAK}{after}"
