"""What the links of several GPUs of one host reach, for the pages: from the records of pipelines."""

import statistics
from pathlib import Path

from page_text import GB, Row, markdown_table, read, runs_by_gpus, table

DIRECTIONS = {"to the host": "d2h", "to the GPU": "h2d", "both at once, sum": "duplex"}


@table("host_links")
def host_links(_page: Path) -> str:
    """GB/s of one GPU, while the others of the host are idle, and while all copy."""
    rows, lost = [], []
    records = read("pipeline_2"), read("pipeline_4")
    for record in records:
        links, gpu = record["links"], record["hardware"]["gpu"]
        for when in ("alone", "all at once"):
            who = f"{len(links)} × {gpu}, {'one copies' if when == 'alone' else 'all copy'}"
            speeds = {name: _median(links, when, key) for name, key in DIRECTIONS.items()}
            if when == "all at once":
                both = [statistics.median(link[one]["duplex_bytes_per_s"] for link in links) for one in ("alone", when)]
                lost.append(f"each of {len(links)} loses {1 - both[1] / both[0]:.0%} of its bandwidth")
            rows.append({"GB/s of each GPU that copies": who} | speeds)
    said = f"Medians over the GPUs; {runs_by_gpus(records)}. If all GPUs copy both ways, {', and '.join(lost)}."
    return f"{markdown_table(rows, left=1)}\n\n{said}\n"


def _median(links: list[Row], when: str, key: str) -> str:
    return f"{statistics.median(link[when][f'{key}_bytes_per_s'] for link in links) / GB:.0f}"
