"""A whole training step of Llama-8B's shape on one GPU: AdamW, a long sequence, and the memory of checkpointing.

    python -m benchmarks.llama_8b --out results/llama_8b.json

First Hugging Face's own checkpointing, then ``memory_budget=`` with what that has needed.
"""

import argparse
from functools import partial

import torch

import offload
from benchmarks.comparison import Comparison
from benchmarks.instruments import GIB
from benchmarks.models import Training
from benchmarks.report import Record, asked, table


def main() -> None:
    """Measure both, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Train Llama-8B's shape with the memory that checkpointing needs.")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--host", default="80GiB", help="the most host memory")
    arguments, device = asked(parser, "results/llama_8b.json")
    tokens = 256 if arguments.small else arguments.tokens
    model = Training(device, tokens, small=arguments.small)
    with model.checkpointing():
        model.step()  # which makes the optimizer's state
    held_bytes = torch.accelerator.memory_allocated() if device.type != "cpu" else 0
    comparison = Comparison(model, device, settle=1, times=3, gradients=False)  # each step changes the weights
    budget = comparison.add({"what": "checkpointing of Hugging Face"}, model.checkpointing)["peak_bytes"]
    options = {"min_bytes": 1 if arguments.small else "2MiB", "max_host_bytes": arguments.host}
    planned = partial(offload.offload_layers, model.layers, memory_budget=budget, **options)
    comparison.add({"what": "memory_budget= its peak", "budget_bytes": budget}, planned)
    rows = [row | {"tokens_per_s": tokens / row["step_s"]} for row in comparison.finished(turns=1)]
    record = Record(arguments, device, tokens=tokens, held_bytes=held_bytes)
    record.add(*rows, instead_of=["what"])
    columns = {
        "": "what",
        "s": "step_s",
        "x checkpointing": "ratio",
        "GiB": ("peak_bytes", GIB),
        "tokens/s": "tokens_per_s",
    }
    print(f"{held_bytes / GIB:.1f} GiB are held between steps", table(rows, columns), sep="\n")


if __name__ == "__main__":
    main()
