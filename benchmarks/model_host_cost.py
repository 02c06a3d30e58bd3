"""What recomputing by region costs the host on tiny Hugging Face models, beside Hugging Face's own checkpointing.

    python -m benchmarks.model_host_cost [--models vit gpt2 llama] [--turns 60] [--out FILE.json]

Layers of width 64 leave the host next to nothing to compute, so the ratios are those of a model that is host-bound.
Time is the CPU time of this thread, which other processes hardly change. The ways take turns, and the least of all
turns counts.
"""

import argparse
import math
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import offload
from benchmarks import report
from benchmarks.instruments import synchronize

LAYERS, WIDTH = 8, 64
STEPS = 10
"""Steps of one way in a row: another model that ran before leaves the processor's caches cold."""
PLAIN, CHECKPOINT = "plain", "checkpoint"
REGIONS = "products and attention kept"
POLICIES = {
    REGIONS: {"*dot_product*": "keep", "*mm*": "keep", "*": "recompute"},
    "everything recomputed": {"*": "recompute"},
    "everything kept": {"*": "keep"},
}


class Tiny(NamedTuple):
    """A model, its layers, and what its forward is given."""

    model: Any
    layers: Any
    inputs: dict[str, torch.Tensor]


def tiny(name: str, device: torch.device) -> Tiny:
    """A model of one architecture, in training mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": 128}
    sizes |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 8, "n_inner": None, "n_positions": 64}
    sizes |= {"num_key_value_heads": 2} if name == "llama" else {}
    config = transformers.AutoConfig.for_model(name, use_cache=False, **sizes)
    model: Any = transformers.AutoModel.from_config(config).train().to(device)
    inputs = {"input_ids": torch.randint(128, (1, 16), device=device)}
    if name == "vit":
        inputs = {"pixel_values": torch.randn(1, 3, 32, 32, device=device)}
    layers = model.h if name == "gpt2" else model.layers if hasattr(model, "layers") else model.encoder.layer
    return Tiny(model, list(layers), inputs)


class Chain:
    """The layers of a model one after the other, with the arguments that the model gives to the first.

    The CPU time of each layer's forward is taken by itself: the shorter an interval, the more rarely another process
    interrupts it.
    """

    def __init__(self, tiny: Tiny, device: torch.device) -> None:
        self._layers = tiny.layers
        self._device = device
        self._clock = time.thread_time if device.type == "cpu" else time.process_time
        self.forwards_s = [math.inf] * len(tiny.layers)
        self.backward_s = math.inf
        """On a GPU another thread runs backward."""
        hook = tiny.layers[0].register_forward_pre_hook(self._note, with_kwargs=True)
        tiny.model(**tiny.inputs)
        hook.remove()

    def _note(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._x, self._args, self._kwargs = args[0].detach().requires_grad_(), args[1:], kwargs

    def step(self, *, counts: bool) -> None:
        """One forward and backward, which ``counts`` or warms up."""
        synchronize(self._device)
        x, clock = self._x, self._clock
        for number, layer in enumerate(self._layers):
            begin = clock()
            x = layer(x, *self._args, **self._kwargs)
            took_s = clock() - begin
            x = x[0] if isinstance(x, tuple) else x
            if counts:
                self.forwards_s[number] = min(self.forwards_s[number], took_s)
        loss = x.sum()
        begin = clock()
        loss.backward()
        if counts:
            self.backward_s = min(self.backward_s, clock() - begin)
        synchronize(self._device)


def host_cost_of_model(name: str, device: torch.device, turns: int) -> dict[str, Any]:
    """Host seconds of a forward and of a step for each way, the least of many turns, and ratios."""
    ways: dict[str, Tiny] = {way: tiny(name, device) for way in (PLAIN, CHECKPOINT, *POLICIES)}
    ways[CHECKPOINT].model.gradient_checkpointing_enable({"use_reentrant": False})
    chains = {way: Chain(one, device) for way, one in ways.items()}
    with ExitStack() as stack:
        for way, policies in POLICIES.items():
            stack.enter_context(
                offload.offload_layers(ways[way].layers, 0, policies=policies, min_bytes=0, device=device)
            )
        for turn in range(turns + 1):
            for chain in chains.values():
                for step in range(STEPS):
                    chain.step(counts=turn > 0 and step > 0)
        saved = _saved_tensors(ways[PLAIN])
    found = {way: (sum(chain.forwards_s), chain.backward_s) for way, chain in chains.items()}
    plain_s, checkpoint_s = found[PLAIN][0], sum(found[CHECKPOINT])
    rows = {
        way: {
            "forward_s": forward_s,
            "step_s": forward_s + backward_s,
            "forward_of_plain": forward_s / plain_s,
            "step_of_checkpoint": (forward_s + backward_s) / checkpoint_s,
            "forward_s_per_saved": (forward_s - plain_s) / saved,
            "forward_s_per_layer": (forward_s - plain_s) / LAYERS,
        }
        for way, (forward_s, backward_s) in found.items()
    }
    return {"model": name, "saved_tensors": saved, "ways": rows}


def _saved_tensors(tiny: Tiny) -> int:
    """How many tensors autograd saves in a forward."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        tiny.model(**tiny.inputs)
    return len(saved)


def show(found: dict[str, Any]) -> None:
    """One row for each way."""
    print(f"{found['model']}, {found['saved_tensors'] / LAYERS:.0f} saved tensors a layer")
    rows = [
        {
            "way": way,
            "forward ms": 1e3 * row["forward_s"],
            "of plain": row["forward_of_plain"],
            "step ms": 1e3 * row["step_s"],
            "of checkpointing": row["step_of_checkpoint"],
            "µs a layer": 1e6 * row["forward_s_per_layer"],
            "µs a tensor": 1e6 * row["forward_s_per_saved"],
        }
        for way, row in found["ways"].items()
    ]
    print(report.table(rows))


def main() -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description="Host cost of recomputing by region on tiny models.")
    parser.add_argument("--models", nargs="+", choices=("vit", "gpt2", "llama"), default=("vit", "gpt2", "llama"))
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = [host_cost_of_model(name, torch.device(asked.device), asked.turns) for name in asked.models]
    for one in found:
        show(one)
    if asked.out:
        report.write(asked.out, {"models": found})


if __name__ == "__main__":
    main()
