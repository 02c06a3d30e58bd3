"""Long sequences on one GPU: Llama-3.1-8B's shape, forward and backward with the gradients of all parameters.

    python -m benchmarks.long_context --rows 131072:inputs 131072:plan
    python -m benchmarks.long_context --rows 16384:equal 24GiB:streamed 24GiB:lora --seconds 200 --merge

A row is a number of tokens, or the device memory to be content with, and a way. The loss is computed in chunks in all
of them. Ways for a number of tokens:

- ``inputs``: Hugging Face's checkpointing inside of this library, so that the layers' inputs are offloaded; MLPs in
  tiles. It is the recipe of Arctic Long Sequence Training.
- ``plan``: regions are kept, offloaded or recomputed by a plan, from a profile of fewer tokens; MLPs in tiles.
- ``hand``: attention's outputs are offloaded with the inputs, in as many layers as the host has room for; no plan.
- ``equal``: loss and gradients of ``hand`` beside those of the model as it is, checkpointed.

Ways for a limit of device memory, each with the longest sequence for which a step passes: ``nothing``,
``checkpointing``, ``hf_offload`` (Hugging Face's offloaded checkpointing), ``inputs``, and with the weights on the host
``streamed`` and ``lora``. How they are found is told in ``benchmarks.longest_context``.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

import offload
from benchmarks.instruments import GIB, Row, device_peak, give_memory_back, limit_memory, pinned_by_torch, timed
from benchmarks.longest_context import Lengths, attention_s, in_blocks, longest_again, search
from benchmarks.models import SHAPE, SMALL, Llama
from benchmarks.report import Record, asked, table

TILE, SMALL_TILE = 32768, 8192  # tokens in a tile of the MLPs, and where the device is limited
PROFILED, SHORT = 32768, 65536
"""Tokens of the steps that are profiled, and of those that prove what is recomputed: more than a tile."""
ONCE = 200_000
"""From so many tokens on, the first step of that length is the one that is measured, after a short one."""
GRAIN = 4096
"""The longest context is found to a multiple of so many tokens; without checkpoints, of 1,024."""
MARGIN = 8 * GIB
"""Of the device's memory, what a plan is not given: the allocator's gaps, and what no profile knows."""
WAYS = ("inputs", "plan", "hand", "equal")
LIMITED = ("nothing", "checkpointing", "hf_offload", "inputs", "streamed", "lora")


class Long(Llama):
    """The model, with sequences of any length."""

    def __init__(self, device: torch.device, *, small: bool, on_host: bool = False, adapters: bool = False) -> None:
        shape = (SMALL if small else SHAPE) | {"max_position_embeddings": 1 << 20}
        dtype = torch.float32 if small else torch.bfloat16
        super().__init__(device, tokens=1, dtype=dtype, has_gradients=not on_host, **shape)
        self.wide_bytes: int = shape["hidden_size"] * dtype.itemsize  # of a token's hidden state
        self.heads: int = shape["num_attention_heads"]
        if adapters:
            import peft

            config = peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
            peft.inject_adapter_in_model(config, self.model)


class Benchmark:
    """The rows of one run."""

    def __init__(
        self,
        device: torch.device,
        record: Row,  # of the run: a profile that is in it is not made again
        *,
        small: bool,
        host: int,  # the most pinned memory, in bytes
        seconds: float,  # after so many, a search for the longest context tries no more
        whole_s: float,  # what was found is tried with whole attention, if that should take no more seconds
    ) -> None:
        self.device, self.small, self.host, self.seconds, self.whole_s = device, small, host, seconds, whole_s
        self.record = record
        self.min_bytes: int | str = 1 if small else "2MiB"

    @cached_property
    def model(self) -> Long:
        """The model with all its weights and gradients on the device."""
        return Long(self.device, small=self.small)

    def row(self, spec: str) -> Row:
        """Measure one."""
        size, _, way = spec.partition(":")
        begin = time.perf_counter()
        row: Row = {"row": spec, "way": way}
        give_memory_back(self.device, pinned=False)
        try:
            if size.endswith("GiB"):
                row |= {"limit_bytes": round(float(size.removesuffix("GiB")) * GIB)}
                self.limited(row)
            elif way == "equal":
                row |= self.equal(int(size))
            else:
                row |= self.step(int(size), way)
        except (torch.OutOfMemoryError, ValueError, offload.HostMemoryError) as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        row["row_s"] = time.perf_counter() - begin
        print(row, flush=True)
        return row

    @contextmanager
    def _trained(self, model: Long, way: str, tile: int, plan: offload.Plan | None = None) -> Iterator[Any]:
        """Train in this way, with MLPs in tiles where this library offloads."""
        options: dict[str, Any] = {"min_bytes": self.min_bytes, "max_host_bytes": self.host}
        on_host = way == "hf_offload"
        with ExitStack() as stack:
            if on_host and self.device.type == "cpu":  # which has no pinned memory
                stack.enter_context(save_on_cpu())
            if way in ("checkpointing", "hf_offload", "inputs"):
                stack.enter_context(model.checkpointing(on_host=on_host and self.device.type != "cpu"))
            if way in ("nothing", "checkpointing", "hf_offload"):
                yield None
                return
            tokens = model.tokens.numel()
            stack.enter_context(offload.tile_mlp(model.layers, max(1, tokens // 4) if self.small else tile))
            if plan is not None:
                options["plan"] = plan
                pinned = plan.host_bytes
            else:
                # A layer's input is offloaded, and by hand attention's output with a sum in float32 per token and head.
                per_layer = tokens * (2 * model.wide_bytes + 4 * model.heads if way == "hand" else model.wide_bytes)
                options["num_layers"] = min(len(model.layers) - 2, self.host // per_layer)
                pinned = options["num_layers"] * per_layer
                kept = {"*dot_product*": "offload"} if way == "hand" else {}
                options |= {} if way == "inputs" else {"policies": kept | {"*": "recompute"}}
            offload.reserve_host_memory(min(pinned, self.host), self.device)  # once, and not piece by piece
            yield stack.enter_context(offload.offload_layers(model.layers, **options))

    # A number of tokens.

    def step(self, tokens: int, way: str) -> Row:
        """Seconds and memory of a step."""
        model = self.model
        row: Row = {"tokens": tokens, "layers": len(model.layers)}
        plan = self._plan(tokens, row) if way == "plan" else None
        model.use(tokens)
        with offload.use_chunked_loss(model.model), self._trained(model, way, TILE, plan) as handle:
            model.use(min(tokens, SHORT))
            model.step()  # which proves what is recomputed
            model.use(tokens)
            if tokens < ONCE:
                row["first_s"] = timed(model.step, self.device)
            before = handle.stats()
            row |= self._measured(model)
            after = handle.stats()
            row |= {"stall_s": after.stall_s - before.stall_s, "pinned_bytes": after.pinned_bytes}
            row["host_bytes"] = after.offloaded_bytes - before.offloaded_bytes
        return row

    def equal(self, tokens: int) -> Row:
        """How far loss and gradients are from those of the model as it is."""
        model = self.model
        model.use(tokens)
        with model.checkpointing():
            plain, expected = self._loss_and_gradients(model)
        with offload.use_chunked_loss(model.model), self._trained(model, "hand", tokens // 4):
            loss, found = self._loss_and_gradients(model)
        norms = [math.sqrt(sum(one.float().norm().item() ** 2 for one in many)) for many in (expected, found)]
        apart = [
            ((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-30)).item()
            for one, other in zip(found, expected, strict=True)
        ]
        return {"tokens": tokens, "losses": [plain, loss], "gradient_norms": norms, "gradients_apart": max(apart)}

    def _loss_and_gradients(self, model: Long) -> tuple[float, list[torch.Tensor]]:
        model.model.zero_grad(set_to_none=True)
        loss = model.loss()
        loss.backward()
        return loss.item(), [one.grad for one in model.model.parameters()]

    def _plan(self, tokens: int, row: Row) -> offload.Plan:
        """A plan for so many tokens, from the profile of fewer, which the record keeps."""
        model = self.model
        profiled = min(tokens, 64 if self.small else PROFILED)
        if "profile" not in self.record:
            model.use(profiled)
            with offload.use_chunked_loss(model.model), offload.tile_mlp(model.layers, profiled // 4):
                profile = offload.profile_layers(
                    model.layers, model.step, min_bytes=self.min_bytes, device=self.device, regions=True
                )
            model.model.zero_grad(set_to_none=False)
            give_memory_back(self.device)
            link = offload.measure_link(self.device)
            self.record |= {"profile": json.loads(profile.to_json()), "profiled": profiled, "link": vars(link)}
        profile = offload.Profile.from_json(json.dumps(self.record["profile"]))
        ratio = tokens / self.record["profiled"]
        # The loss in chunks grows by the hidden states alone, which are in four tensors at once.
        more = max(0, 4 * model.wide_bytes * (tokens - self.record["profiled"]))
        others = {"loss_s": profile.loss_s * ratio, "loss_bytes": profile.loss_bytes + more}
        scaled = profile.with_layers(lambda layer: _longer(layer, ratio), **others)
        budget = scaled.saved_bytes
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            budget = free + cached - MARGIN
        plan = offload.plan(scaled, budget, offload.Link(**self.record["link"]), max_host_bytes=self.host)
        print(plan, flush=True)
        row |= {"budget_bytes": budget, "predicted_s": plan.step_s, "predicted_peak_bytes": plan.peak_bytes}
        row |= {"planned_host_bytes": plan.host_bytes, "recompute_s": plan.recompute_s}
        return plan

    # A limit of device memory.

    def limited(self, row: Row) -> None:
        """The longest context, found by trying."""
        way, limit = row["way"], row["limit_bytes"]
        on_host = way in ("streamed", "lora")
        vars(self).pop("model", None)
        give_memory_back(self.device)
        model = Long(self.device, small=self.small, on_host=on_host, adapters=way == "lora")
        with ExitStack() as stack:
            stack.enter_context(offload.use_chunked_loss(model.model, chunk_tokens=1024))
            if on_host:
                stack.enter_context(offload.stream_weights(model.layers, self.device))
            give_memory_back(self.device)
            limit_memory(self.device, limit)
            stack.callback(limit_memory, self.device, math.inf)
            model.use(GRAIN)
            stack.enter_context(self._trained(model, way, SMALL_TILE))
            lengths = self._lengths(model, way, limit)
            with in_blocks() if self.device.type == "cuda" else nullcontext():
                row |= search(lambda tokens: self._try(model, tokens), lengths, self.seconds)
            if row["longest_tokens"] and self.device.type == "cuda":
                self._in_whole(model, row, lengths)

    def _in_whole(self, model: Long, row: Row, lengths: Lengths) -> None:
        """The step with whole attention: measured, or if that takes too long, made of what is measured."""
        left_out_s = self._left_out_s(model, row["longest_tokens"], passes=1 if row["way"] == "nothing" else 2)
        row["whole"] = row["step_s"] + left_out_s <= self.whole_s
        self._try(model, lengths.first)  # which proves once more what is recomputed
        with nullcontext() if row["whole"] else in_blocks():
            row |= longest_again(lambda tokens: self._try(model, tokens), row, lengths.grain)
        if row["longest_tokens"] and not row["whole"]:
            row |= {"in_blocks_s": row["step_s"], "left_out_s": left_out_s, "step_s": row["step_s"] + left_out_s}
            row["tokens_per_s"] = row["longest_tokens"] / row["step_s"]

    def _left_out_s(self, model: Long, tokens: int, passes: int) -> float:
        """Seconds of whole attention beyond those of blocks, in all layers."""
        give_memory_back(self.device)
        whole = attention_s(SHAPE, tokens, self.device)
        with in_blocks():
            near = attention_s(SHAPE, tokens, self.device)
        give_memory_back(self.device)
        return len(model.layers) * (passes * (whole[0] - near[0]) + whole[1] - near[1])

    def _lengths(self, model: Long, way: str, limit: int) -> Lengths:
        if self.small:
            return Lengths(limit, 16, 16, most=32)
        most = 1 << 20
        if way == "hf_offload":  # each tensor takes a power of two of pinned memory
            most = 1 << int(math.log2(self.host // len(model.layers) // model.wide_bytes))
        return Lengths(limit, 1024, 1024, most) if way == "nothing" else Lengths(limit, 2 * SMALL_TILE, GRAIN, most)

    def _try(self, model: Long, tokens: int) -> Row | None:
        """What a step takes, or ``None`` if there is not enough memory."""
        model.use(tokens)
        give_memory_back(self.device, pinned=False)
        try:
            found = self._measured(model)
        except (torch.OutOfMemoryError, offload.HostMemoryError) as error:
            print(f"  {tokens} tokens: {str(error)[:160]}", flush=True)
            return None
        print(f"  {tokens} tokens in {found['step_s']:.1f} s", flush=True)
        return found

    def _measured(self, model: Long) -> Row:
        """A step's seconds, the most device memory, and what PyTorch has pinned."""
        most_bytes = device_peak(self.device)
        step_s = timed(model.step, self.device)
        found: Row = {"step_s": step_s, "tokens_per_s": model.tokens.numel() / step_s}
        found |= {"peak_bytes": most_bytes(), "pinned_by_torch_bytes": pinned_by_torch(self.device)}
        if self.device.type == "cuda":
            found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return found


def _longer(layer: offload.LayerProfile, ratio: float) -> offload.LayerProfile:
    """The costs of one of Llama's layers with a sequence that is ``ratio`` times as long."""
    regions = []
    for one in layer.regions:
        operation = one.name.rpartition(": ")[2]
        growth = ratio**2 if "attention" in operation else ratio  # its seconds grow with the square of the length
        regions.append(replace(one, nbytes=round(one.nbytes * ratio), seconds=one.seconds * growth))
    before_s, after_s = (math.fsum(one.seconds for one in of) for of in (layer.regions, regions))
    growth = ratio + (after_s - ratio * before_s) / max(layer.forward_s, before_s)
    workspace_bytes = round(layer.workspace_bytes * ratio)
    return offload.LayerProfile.from_regions(
        regions, layer.forward_s * growth, layer.backward_s * growth, workspace_bytes=workspace_bytes
    )


COLUMNS = {
    "row": "row",
    "tokens": "tokens",
    "longest": "longest_tokens",
    "s": "step_s",
    "tokens/s": "tokens_per_s",
    "GiB": ("peak_bytes", GIB),
    "on the host": ("host_bytes", GIB),
    "stall, s": "stall_s",
    "": "error",
}


def spec(text: str) -> str:
    """A row's name, if there is such a row."""
    size, _, way = text.partition(":")
    ways, number = (LIMITED, size.removesuffix("GiB")) if size.endswith("GiB") else (WAYS, size)
    if way not in ways or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"must be TOKENS:({'|'.join(WAYS)}) or …GiB:({'|'.join(LIMITED)}), got {text}")
    return text


def main() -> None:
    """Measure the rows that are asked for, and write each into the record as soon as it is there."""
    parser = argparse.ArgumentParser(description="Measure long sequences on one GPU.")
    parser.add_argument("--rows", nargs="+", type=spec, required=True, metavar="SIZE:WAY")
    parser.add_argument("--host", type=int, default=112, help="the most pinned memory, in GiB")
    parser.add_argument("--seconds", type=float, default=200, help="how long to search for the longest context, a row")
    parser.add_argument("--whole", type=float, default=60, help="how long a step of it with whole attention may take")
    arguments, device = asked(parser, "results/long_context.json")
    record = Record(arguments, device)
    limits = {"host": arguments.host * GIB, "seconds": arguments.seconds, "whole_s": arguments.whole}
    benchmark = Benchmark(device, record.found, small=arguments.small, **limits)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        if device.type == "cuda":  # sequences of other lengths need other blocks
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        for one in arguments.rows:
            record.add(benchmark.row(one), instead_of=["row"])
    print(table(record.rows(), COLUMNS))


if __name__ == "__main__":
    main()
