"""A whole training step of Llama-8B's shape on one GPU: AdamW, a long sequence, and the memory of checkpointing.

    python -m benchmarks.llama_8b --out results/llama_8b.json

First Hugging Face's own checkpointing, then ``memory_budget=`` with what that has needed. The loss is computed in
chunks in both, since the logits of so many tokens would not fit beside the optimizer.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import offload
from benchmarks.instruments import Row, give_memory_back, metered
from benchmarks.models import Llama
from benchmarks.report import asked, environment, table, write

GIB = 1 << 30
STEPS = 3
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


class Training(Llama):
    """The model with its optimizer."""

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        *,
        small: bool,
        shape: dict[str, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = dtype or (torch.float32 if small else torch.bfloat16)
        super().__init__(device, tokens=tokens, dtype=dtype, **(shape or (SMALL if small else SHAPE)))
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._chunk = max(16, tokens // 32)

    def loss(self) -> torch.Tensor:
        hidden = self._model.model(input_ids=self._tokens).last_hidden_state[0, :-1]
        labels = self._tokens[0, 1:]
        pairs = zip(hidden.split(self._chunk), labels.split(self._chunk), strict=True)
        losses = [checkpoint(self._chunk_loss, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(losses).sum() / len(labels)

    def _chunk_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._model.lm_head(hidden).float(), labels, reduction="sum")

    def step(self) -> None:
        super().step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # gradients stay where they are, so that a step allocates none


def measure(model: Training, device: torch.device, row: Row) -> Row:
    """Steps as they are now."""
    steps = [metered(model.step, device) for _ in range(STEPS)]
    row["times_s"] = [step_s for _, step_s in steps]
    row["step_s"] = statistics.median(row["times_s"])
    row["peak_bytes"] = max(peak_bytes for peak_bytes, _ in steps)
    row["tokens_per_s"] = model._tokens.numel() / row["step_s"]
    print(row, flush=True)
    return row


def main() -> None:
    """Measure both, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Train Llama-8B's shape with the memory that checkpointing needs.")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--host", default="80GiB", help="the most host memory")
    arguments, device = asked(parser, "results/llama_8b.json")
    tokens = 256 if arguments.small else arguments.tokens
    min_bytes = 1 if arguments.small else "2MiB"
    model = Training(device, tokens, small=arguments.small)
    rows: list[Row] = []
    with model.checkpointing():
        model.step()  # which makes the optimizer's state
        held_bytes = torch.accelerator.memory_allocated() if device.type != "cpu" else 0
        checkpointing = measure(model, device, {"what": "checkpointing of Hugging Face"})
        rows.append(checkpointing)
    give_memory_back(device)
    budget = checkpointing["peak_bytes"]
    row: Row = {"what": "memory_budget= its peak", "budget_bytes": budget}
    host = arguments.host if not arguments.small else None
    with offload.offload_layers(model.layers, memory_budget=budget, min_bytes=min_bytes, max_host_bytes=host) as handle:
        row["learning"] = [metered(model.step, device) for _ in range(2)]
        for _ in range(2):  # the first pins what host memory the plan needs, and may have to be corrected
            model.step()
        rows.append(measure(model, device, row))
        plan, stats = handle.plan, handle.stats()
        print(plan)
        row |= {
            "predicted_s": plan.step_s,
            "predicted_peak_bytes": plan.peak_bytes,
            "host_bytes": plan.host_bytes,
            "pinned_bytes": stats.pinned_bytes,
            "recompute_s": plan.recompute_s,
        }
    record = environment(device) | {"tokens": tokens, "held_bytes": held_bytes, "small": arguments.small, "rows": rows}
    write(arguments.out, record)
    shown = [
        {
            "what": one["what"],
            "s": one["step_s"],
            "x checkpointing": one["step_s"] / checkpointing["step_s"],
            "peak above weights and states, GiB": one["peak_bytes"] / GIB,
            "all, GiB": (held_bytes + one["peak_bytes"]) / GIB,
            "tokens/s": one["tokens_per_s"],
        }
        for one in rows
    ]
    print(table(shown))


if __name__ == "__main__":
    main()
