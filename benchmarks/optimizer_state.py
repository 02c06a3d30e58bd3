"""Optimizer state in host memory beside resident state: a whole training step of Llama-8B's shape on one GPU.

    python -m benchmarks.optimizer_state --out results/optimizer_state.json

Fused AdamW with float32 moments, activations checkpointed by Hugging Face, the loss in chunks. The resident rows run
the same arithmetic as the streamed ones, by ``resident_bytes=``. Each streamed row has the least time that the link
allows: the bytes that it copies, at the bandwidth of both directions together. About 60 GiB of host memory are pinned,
once. Beside it, two ways to step on the CPU: the layers' weights streamed, with PyTorch's AdamW on the host, and
torchao's optimizer. Both have moments in bfloat16. What does not start within ``--seconds`` is left out, and says so.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import offload
from benchmarks.instruments import GIB, Row, deterministic, device_peak, give_memory_back, pinned_by_torch
from benchmarks.models import SHAPE, SMALL, Training
from benchmarks.report import Record, asked, table
from offload.device.select import get_backend

STEPS = 3
MICROBATCHES = 4
EQUAL_STEPS = 10
MEDIUM = SHAPE | {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "vocab_size": 4096}
"""Of the model whose parameters are compared on a GPU: large enough for several chunks."""
MOST_PINNED = "100GiB"


def stream(optimizer: torch.optim.Optimizer, **options: Any) -> offload.StreamedOptimizer:
    """With float32 moments."""
    return offload.stream_optimizer(optimizer, state_dtype=torch.float32, max_host_bytes=MOST_PINNED, **options)


WAYS: dict[str, Callable[..., offload.StreamedOptimizer]] = {
    "resident": partial(stream, resident_bytes="1TiB"),
    "streamed": stream,
    "streamed, beside the next forward": partial(stream, overlap_forward=True),
    "streamed in backward": partial(stream, in_backward=True),
    "streamed in backward, beside the next forward": partial(stream, in_backward=True, overlap_forward=True),
    "streamed in backward, beside the next forward, 16 GiB resident": partial(
        stream, in_backward=True, overlap_forward=True, resident_bytes="16GiB"
    ),
    "streamed in backward, gradients consumed": partial(stream, in_backward=True, consume_gradients=True),
}
TORCHAO = "torchao's CPUOffloadOptimizer"
Handle = offload.StreamedOptimizer | offload.StreamedWeights


class Run:
    """The model, and steps of it with one optimizer after the other."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        self.device = device
        self.model = Training(device, 256 if small else 8192, small=small)
        self.parameters = list(self.model.module.parameters())
        self.frees_gradients = False

    def adamw(self) -> torch.optim.Optimizer:
        """A new optimizer without state, and all weights on the device; the optimizer before is gone."""
        self.model.module.to(self.device)
        self.model.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)
        give_memory_back(self.device, pinned=False)  # which the next one takes
        return self.model.optimizer

    def step(self, microbatches: int) -> None:
        """All microbatches of a step, clipped if there are several, and the optimizer's step."""
        for _ in range(microbatches):
            self.model.loss().backward()
        if microbatches > 1:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.model.optimizer.step()
        self.model.optimizer.zero_grad(set_to_none=self.frees_gradients)

    def measure(self, row: Row, handle: Handle | None) -> None:
        """Fill the row with times, the peak of device memory, and what the link carries in a step."""
        self.model.use(row["tokens"])
        several = row["microbatches"] > 1
        with self.model.checkpointing():
            self.step(1)  # the first makes the state and the slots
            peak_bytes = device_peak(self.device)
            before = handle.stats() if handle else None
            # Steps in a row: one may run beside the next.
            backend = get_backend(self.device)
            marks = [backend.mark()]
            for _ in range(2 if several else STEPS):
                self.step(row["microbatches"])
                marks.append(backend.mark())
            row["times_s"] = backend.seconds(pairwise(marks))
        row["step_s"] = statistics.median(row["times_s"])
        row["peak_bytes"] = peak_bytes()
        if handle is None or before is None:
            row["pinned_bytes"] = pinned_by_torch(self.device)
            return
        copied = handle.stats() - before
        row["slot_bytes"] = copied.slot_bytes
        if isinstance(copied, offload.WeightStats):
            row["pinned_bytes"] = copied.weight_bytes + copied.gradient_host_bytes + copied.staging_bytes
            row["link_bytes"] = (copied.loaded_bytes + copied.gradient_bytes) // (len(marks) - 1)
        else:
            row["pinned_bytes"] = copied.host_bytes
            row["link_bytes"] = (copied.loaded_bytes + copied.written_bytes) // copied.steps


def parameters_are_equal(device: torch.device, *, small: bool) -> dict[str, bool]:
    """Whether each way gives the bits of the resident one, after steps of a smaller model."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, attach in WAYS.items():
        torch.manual_seed(0)
        model = Training(device, 128, small=small, shape=SMALL if small else MEDIUM, dtype=torch.bfloat16)
        model.optimizer.param_groups[0]["lr"] = 1e-2  # steps that bfloat16 does not round away
        with deterministic(), attach(model.optimizer, chunk_bytes="64KiB" if small else "16MiB"):
            for _ in range(3 if small else EQUAL_STEPS):
                model.step()
        found[name] = [parameter.detach().clone() for parameter in model.module.parameters()]
    return {
        name: all(map(torch.equal, parameters, found["resident"]))
        for name, parameters in found.items()
        if name != "resident"
    }


def on_cpu(run: Run) -> offload.StreamedWeights:
    """PyTorch's AdamW, on the CPU for the layers' weights, which are streamed; on the device for all others."""
    run.frees_gradients = True  # of the device, while the weights move; then as PyTorch does unless told otherwise
    run.model.optimizer.zero_grad()
    return offload.stream_weights(run.model.layers, run.device)


def torchao(run: Run) -> None:
    """CPUOffloadOptimizer, which steps on the CPU in the parameters' dtype, beside backward."""
    from torchao.optim import CPUOffloadOptimizer

    run.frees_gradients = True  # torchao's knows no other way
    run.model.optimizer = None
    give_memory_back(run.device)
    run.model.optimizer = CPUOffloadOptimizer(run.parameters, torch.optim.AdamW, lr=1e-5, fused=True)


CPU_WAYS: dict[str, Callable[[Run], offload.StreamedWeights | None]] = {
    "layers' weights streamed, stepped on the CPU": on_cpu,
    TORCHAO: torchao,
}


def finished(rows: list[Row], duplex_bytes_per_s: float) -> None:
    """Add to each row what follows from others of its run: the limit of the link, and how the times compare."""

    def same(row: Row) -> tuple[Any, ...]:
        return row["date"], row["tokens"], row["microbatches"]

    timed_rows = [row for row in rows if "step_s" in row]
    resident_s = {same(row): row["step_s"] for row in timed_rows if row["what"] == "resident"}
    for row in timed_rows:
        row.setdefault("link_s", row.get("link_bytes", 0) / duplex_bytes_per_s)  # rows of other runs have it
        if compute_s := resident_s.get(same(row)):
            row["to_resident"] = row["step_s"] / compute_s
            row["to_limit"] = row["step_s"] / max(compute_s, row["link_s"])


COLUMNS = {
    "what": "what",
    "tokens": "tokens",
    "microbatches": "microbatches",
    "ms": ("step_s", 1e-3),
    "x resident": "to_resident",
    "link ms": ("link_s", 1e-3),
    "x max(compute, link)": "to_limit",
    "GiB": ("peak_bytes", GIB),
    "pinned": ("pinned_bytes", GIB),
    "": "skipped",
}


def main() -> None:
    """Measure all rows, print the table, write the record."""
    every_way = [*WAYS, *CPU_WAYS]
    parser = argparse.ArgumentParser(description="Train Llama-8B's shape with the optimizer's state on the host.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 8192])
    parser.add_argument("--seconds", type=float, default=400.0, help="start no row after so long")
    parser.add_argument("--ways", nargs="+", choices=every_way, default=every_way)
    parser.add_argument("--without-accumulation", action="store_true")
    arguments, device = asked(parser, "results/optimizer_state.json")
    begin_s = time.perf_counter()
    small = arguments.small
    lengths = [64] if small else arguments.tokens
    # A limit: the best of some measurements, as others may use the link, too.
    duplex_bytes_per_s = max(offload.measure_link(device).duplex_bytes_per_s for _ in range(2 if small else 5))
    equal = parameters_are_equal(device, small=small)
    print("parameters equal to the resident run's:", equal, flush=True)
    record = Record(arguments, device, duplex_bytes_per_s=duplex_bytes_per_s, equal=equal)
    run = Run(device, small=small)
    skipped: list[Row] = []
    several = [] if arguments.without_accumulation else [(max(lengths), MICROBATCHES)]
    for name in arguments.ways:
        optimizer, handle = run.adamw(), None
        run.frees_gradients = "forward" in name  # to set them to zero would wait for the step that reads them
        missing = name == TORCHAO and (importlib.util.find_spec("torchao") is None or device.type != "cuda")
        pin_s = time.perf_counter()
        if name in WAYS:
            handle = WAYS[name](optimizer, **({"chunk_bytes": "64KiB"} if small else {}))
        elif not missing:
            handle = CPU_WAYS[name](run)
        pin_s = time.perf_counter() - pin_s
        sizes = [(tokens, 1) for tokens in lengths]
        for tokens, microbatches in sizes + (several if name in WAYS and "backward" not in name else []):
            row: Row = {"what": name, "tokens": tokens, "microbatches": microbatches, "clipping": microbatches > 1}
            row["begin_s"] = pin_s
            if time.perf_counter() - begin_s > arguments.seconds:
                row["skipped"] = f"not begun within {arguments.seconds:g} s"
            elif missing:
                row["skipped"] = "needs torchao and a GPU"
            else:
                run.measure(row, handle)
            print(row, flush=True)
            if "skipped" in row:
                skipped.append(row)  # and what the record has of an earlier run remains
                continue
            record.add(row, instead_of=["what", "tokens", "microbatches"])
            finished(record.rows(), duplex_bytes_per_s)
            record.write()
        if isinstance(handle, offload.StreamedWeights):
            handle.remove()
        del optimizer, handle
    print(table([*record.rows(), *skipped], COLUMNS))


if __name__ == "__main__":
    main()
