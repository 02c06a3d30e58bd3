"""The rows of ``results/suite.json`` by workload, and the colours of the contenders' families."""

from page_text import Row, read

from offload.observe.plot import COLORS, INK

WORKLOADS = {
    "suite_decoder": "decoder",
    "suite_compiled": "compiled decoder",
    "suite_norm_mlp": "LayerNorm-MLP",
    "suite_llama": "Hugging Face Llama",
    "suite_long": "long sequence",
}
"""Block of the benchmarks' page → workload."""

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


def points_of(workload: str) -> list[Row]:
    """What was measured of a workload, contender by contender."""
    return [row for row in read("suite")["rows"] if row["workload"] == workload and "step_s" in row]
