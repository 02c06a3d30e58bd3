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
from typing import Any

import torch
import transformers

import offload
from benchmarks import report
from benchmarks.instruments import Row, synchronize

LAYERS, WIDTH = 8, 64
STEPS = 10
"""Steps of one way in a row: another model that ran before leaves the processor's caches cold."""
PLAIN, CHECKPOINT = "plain", "checkpoint"
POLICIES = {
    "products and attention kept": {"*dot_product*": "keep", "*mm*": "keep", "*": "recompute"},
    "everything recomputed": {"*": "recompute"},
    "everything kept": {"*": "keep"},
}


class Tiny:
    """A model of one architecture in training mode: its layers, and the arguments that the model gives to the first.

    The CPU time of each layer's forward is taken by itself: the shorter an interval, the more rarely another process
    interrupts it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": 128}
        sizes |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 8, "n_inner": None, "n_positions": 64}
        sizes |= {"num_key_value_heads": 2} if name == "llama" else {}
        config = transformers.AutoConfig.for_model(name, use_cache=False, **sizes)
        self.model: Any = transformers.AutoModel.from_config(config).train().to(device)
        inputs = {"input_ids": torch.randint(128, (1, 16), device=device)}
        if name == "vit":
            inputs = {"pixel_values": torch.randn(1, 3, 32, 32, device=device)}
        model = self.model
        self.layers = list(
            model.h if name == "gpt2" else model.layers if hasattr(model, "layers") else model.encoder.layer
        )
        self._device = device
        self._clock = time.thread_time if device.type == "cpu" else time.process_time
        self.forwards_s = [math.inf] * len(self.layers)
        self.backward_s = math.inf  # on a GPU another thread runs backward
        hook = self.layers[0].register_forward_pre_hook(self._note, with_kwargs=True)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            model(**inputs)
        self.saved_tensors = len(saved)
        hook.remove()

    def _note(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._x, self._args, self._kwargs = args[0].detach().requires_grad_(), args[1:], kwargs

    def step(self, *, counts: bool) -> None:
        """One forward and backward, which ``counts`` or warms up."""
        synchronize(self._device)
        x, clock = self._x, self._clock
        for number, layer in enumerate(self.layers):
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


def host_cost_of_model(name: str, device: torch.device, turns: int) -> list[Row]:
    """Host seconds of a forward and of a step for each way, the least of many turns, and ratios."""
    ways = {way: Tiny(name, device) for way in (PLAIN, CHECKPOINT, *POLICIES)}
    ways[CHECKPOINT].model.gradient_checkpointing_enable({"use_reentrant": False})
    with ExitStack() as stack:
        for way, policies in POLICIES.items():
            offloading = offload.offload_layers(ways[way].layers, 0, policies=policies, min_bytes=0, device=device)
            stack.enter_context(offloading)
        for turn in range(turns + 1):
            for tiny in ways.values():
                for step in range(STEPS):
                    tiny.step(counts=turn > 0 and step > 0)
    found = {way: (sum(tiny.forwards_s), tiny.backward_s) for way, tiny in ways.items()}
    plain_s, checkpoint_s = found[PLAIN][0], sum(found[CHECKPOINT])
    return [
        {
            "model": name,
            "way": way,
            "forward_s": forward_s,
            "step_s": forward_s + backward_s,
            "forward_of_plain": forward_s / plain_s,
            "step_of_checkpoint": (forward_s + backward_s) / checkpoint_s,
            "forward_s_per_saved": (forward_s - plain_s) / ways[PLAIN].saved_tensors,
            "forward_s_per_layer": (forward_s - plain_s) / LAYERS,
        }
        for way, (forward_s, backward_s) in found.items()
    ]


COLUMNS = {
    "model": "model",
    "way": "way",
    "forward ms": ("forward_s", 1e-3),
    "of plain": "forward_of_plain",
    "step ms": ("step_s", 1e-3),
    "of checkpointing": "step_of_checkpoint",
    "µs a layer": ("forward_s_per_layer", 1e-6),
    "µs a tensor": ("forward_s_per_saved", 1e-6),
}


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
    rows = [row for name in asked.models for row in host_cost_of_model(name, torch.device(asked.device), asked.turns)]
    print(report.table(rows, COLUMNS))
    if asked.out:
        report.write(asked.out, {"rows": rows})


if __name__ == "__main__":
    main()
