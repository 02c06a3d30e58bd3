"""Optimizer state in host memory beside resident state: a whole training step of Llama-8B's shape on one GPU.

    python -m benchmarks.optimizer_state --out results/optimizer_state.json

Fused AdamW with float32 moments, activations checkpointed by Hugging Face, the loss in chunks. The resident rows run
the same arithmetic as the streamed ones, by ``resident_bytes=``. Each streamed row has the least time that the link
allows: the bytes that it copies, at the bandwidth of both directions together. About 60 GiB of host memory are pinned,
once. What does not start within ``--seconds`` is left out, and says so.
"""

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import offload
from benchmarks.instruments import Row, deterministic, give_memory_back, peak_bytes, pinned_by_torch, reset_peak, timed
from benchmarks.llama_8b import GIB, SHAPE, SMALL, Training
from benchmarks.report import asked, environment, table, write

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
    "streamed in backward": partial(stream, in_backward=True),
    "streamed in backward, 16 GiB resident": partial(stream, in_backward=True, resident_bytes="16GiB"),
    "streamed in backward, gradients consumed": partial(stream, in_backward=True, consume_gradients=True),
}
NO_CLIPPING = [name for name in WAYS if "backward" in name]


class Run:
    """The model, and steps of it with one optimizer after the other."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        self.device = device
        self.small = small
        self.model = Training(device, 256 if small else 8192, small=small)
        self.parameters = list(self.model.module.parameters())

    def use(self, tokens: int) -> None:
        """Train on one sequence of this length from now on."""
        shape = SMALL if self.small else SHAPE
        self.model._tokens = torch.randint(shape["vocab_size"], (1, tokens), device=self.device)
        self.model._chunk = max(16, tokens // 32)

    def adamw(self) -> torch.optim.Optimizer:
        """A new optimizer without state; the one before is gone."""
        self.model.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)
        give_memory_back_to_device(self.device)
        return self.model.optimizer

    def step(self, microbatches: int) -> None:
        """All microbatches of a step, clipped if there are several, and the optimizer's step."""
        for _ in range(microbatches):
            self.model.loss().backward()
        if microbatches > 1:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.model.optimizer.step()
        self.model.optimizer.zero_grad(set_to_none=False)

    def measure(self, row: Row, handle: offload.StreamedOptimizer | None) -> None:
        """Fill the row with times, the peak of device memory, and what the link carries in a step."""
        self.use(row["tokens"])
        several = row["microbatches"] > 1
        with self.model.checkpointing():
            self.step(1)  # the first makes the state and the slots
            reset_peak(self.device)
            before = handle.stats() if handle else None
            row["times_s"] = [
                timed(lambda: self.step(row["microbatches"]), self.device) for _ in range(2 if several else STEPS)
            ]
        row["step_s"] = statistics.median(row["times_s"])
        row["peak_bytes"] = peak_bytes(self.device)
        row["pinned_bytes"] = pinned_by_torch(self.device) if handle is None else handle.stats().host_bytes
        if handle is not None and before is not None:
            copied = handle.stats() - before
            row["link_bytes"] = (copied.loaded_bytes + copied.written_bytes) // copied.steps
            row["slot_bytes"] = copied.slot_bytes


def give_memory_back_to_device(device: torch.device) -> None:
    """Free what the last optimizer held on the device; pinned memory remains in the pool."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def parameters_are_equal(device: torch.device, *, small: bool) -> dict[str, bool]:
    """Whether each way gives the bits of the resident one, after steps of a smaller model."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, attach in WAYS.items():
        torch.manual_seed(0)
        model = EqualModel(device, small=small)
        with deterministic(), attach(model.optimizer, chunk_bytes="64KiB" if small else "16MiB"):
            for _ in range(EQUAL_STEPS):
                model.step()
        found[name] = [parameter.detach().clone() for parameter in model.module.parameters()]
    return {
        name: all(map(torch.equal, parameters, found["resident"]))
        for name, parameters in found.items()
        if name != "resident"
    }


class EqualModel(Training):
    """A model of bfloat16 that takes milliseconds."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        super().__init__(device, 128, small=small, shape=SMALL if small else MEDIUM, dtype=torch.bfloat16)
        self.optimizer.param_groups[0]["lr"] = 1e-2  # steps that bfloat16 does not round away


def torchao_row(run: Run, row: Row) -> None:
    """The optimizer of torchao, which steps on the CPU in the parameters' dtype, beside backward."""
    if importlib.util.find_spec("torchao") is None or run.device.type != "cuda":
        row["skipped"] = "needs torchao and a GPU"
        return
    from torchao.optim import CPUOffloadOptimizer

    run.model.optimizer = CPUOffloadOptimizer(run.parameters, torch.optim.AdamW, lr=1e-5, fused=True)
    run.measure(row, None)


def main() -> None:
    """Measure all rows, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Train Llama-8B's shape with the optimizer's state on the host.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 8192])
    parser.add_argument("--seconds", type=float, default=400.0, help="start no row after so long")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--without-accumulation", action="store_true")
    parser.add_argument("--without-torchao", action="store_true")
    arguments, device = asked(parser, "results/optimizer_state.json")
    begin_s = time.perf_counter()
    small = arguments.small
    chunks = {"chunk_bytes": "64KiB"} if small else {}
    if small:
        arguments.tokens = [64]
    link = offload.measure_link(device)
    record: dict[str, Any] = environment(device) | {"small": small, "duplex_bytes_per_s": link.duplex_bytes_per_s}
    record["equal"] = parameters_are_equal(device, small=small)
    print("parameters equal to the resident run's:", record["equal"], flush=True)
    run = Run(device, small=small)
    rows: list[Row] = []
    record["rows"] = rows

    def begin(what: str, tokens: int, microbatches: int) -> Row | None:
        row = {"what": what, "tokens": tokens, "microbatches": microbatches, "clipping": microbatches > 1}
        rows.append(row)
        if time.perf_counter() - begin_s > arguments.seconds:
            row["skipped"] = f"not begun within {arguments.seconds:g} s"
            return None
        return row

    sizes = [(tokens, 1) for tokens in arguments.tokens]
    several = [] if arguments.without_accumulation else [(max(arguments.tokens), MICROBATCHES)]
    for name in arguments.ways:
        optimizer = run.adamw()
        pin_s = time.perf_counter()
        handle = WAYS[name](optimizer, **chunks)
        pin_s = time.perf_counter() - pin_s
        for tokens, microbatches in sizes + (several if name not in NO_CLIPPING else []):
            row = begin(name, tokens, microbatches)
            if row is not None:
                row["begin_s"] = pin_s
                run.measure(row, handle)
                print(row, flush=True)
                write(arguments.out, finished(record))
        del optimizer, handle
    if not arguments.without_torchao:
        run.model.optimizer = None
        give_memory_back(device)
        row = begin("torchao's CPUOffloadOptimizer", arguments.tokens[0], 1)
        if row is not None:
            torchao_row(run, row)
    record["seconds"] = time.perf_counter() - begin_s
    write(arguments.out, finished(record))
    print(table([shown(row) for row in record["rows"]]))


def finished(record: dict[str, Any]) -> dict[str, Any]:
    """Add to each row what follows from others: the limit of the link, and how the times compare."""
    resident = {
        (row["tokens"], row["microbatches"]): row["step_s"]
        for row in record["rows"]
        if row["what"] == "resident" and "step_s" in row
    }
    for row in record["rows"]:
        compute_s = resident.get((row["tokens"], row["microbatches"]))
        if "step_s" not in row:
            continue
        row["link_s"] = row.get("link_bytes", 0) / record["duplex_bytes_per_s"]
        if compute_s is not None:
            row["to_resident"] = row["step_s"] / compute_s
            row["to_limit"] = row["step_s"] / max(compute_s, row["link_s"])
    return record


def shown(row: Row) -> Row:
    """A row of the printed table."""
    said = {"what": row["what"], "tokens": row["tokens"], "microbatches": row["microbatches"]}
    if "step_s" not in row:
        return said | {"note": row.get("skipped", "")}
    return said | {
        "ms": row["step_s"] * 1e3,
        "x resident": row.get("to_resident"),
        "link ms": row["link_s"] * 1e3,
        "x max(compute, link)": row.get("to_limit"),
        "peak GiB": row["peak_bytes"] / GIB,
        "pinned GiB": row["pinned_bytes"] / GIB,
    }


if __name__ == "__main__":
    main()
