"""The longest sequences that AdamW trains on within memory budgets: lengths are planned, and few are run.

    python -m benchmarks.recipe --longest --budgets 24 48 80 140

To start a process, to build the model and to pin 100 GiB of host memory takes a minute, and a long step nearly as much.
So one process has all budgets in turn, and most lengths are never run:

1. Short sequences are measured, as ``prepare`` does it in the first steps, and one nearly as long as seems to fit.
2. Longer ones are planned only. Before the first layer computes, ``prepare`` says whether the budget cannot be met.
3. The longest sequence with a plan is trained on. PyTorch limits the process to the budget, so that a step that needs
   more fails; then shorter ones are tried.

Weights are streamed, the loss is in chunks, MLPs in tiles. Each token attends to those of its own block: the same
kernels and memory, and seconds that do not grow with the square of the length. What blocks leave out is measured for
one layer, of fewer tokens, and added for all.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

import offload
from benchmarks.instruments import Row, device_peak, give_memory_back, timed
from benchmarks.longest_context import attention_s, in_blocks
from benchmarks.models import SHAPE, SMALL, Llama
from offload.base.checks import format_bytes

GRAIN = 4096
"""Tokens of which lengths are multiples, and of a tile of the MLPs: of one tile, an MLP would save all."""
SMALL_GRAIN, SMALL_LAYERS = 32, 8
ATTENDED = 16  # grains of tokens in the layer whose whole attention is timed
SHARE = 0.8  # of the tokens that seem to fit, those that are planned first
MOST = 6.0
"""By this factor, lengths that are planned may be longer than the longest that was measured: less than the planner's
own ``MUCH_LARGER``, from which on it measures again."""
FEWER = 0.98  # of the tokens of a step that has failed, those that are tried next
STEPS = 2  # with the longest sequence


class _PlannedError(Exception):
    """The forward has a plan, and goes no further."""


class LongTraining:
    """Llama-8B's shape in bfloat16 with AdamW, and sequences of any length."""

    def __init__(self, device: torch.device, *, small: bool) -> None:
        shape = SMALL | {"num_hidden_layers": SMALL_LAYERS} if small else SHAPE
        self.device, self.grain = device, SMALL_GRAIN if small else GRAIN
        self._whole_s, self._blocks_s = self._attention_s(shape)
        shape = shape | {"max_position_embeddings": 1 << 20}
        self.llama = Llama(device, tokens=1, dtype=torch.bfloat16, has_gradients=False, **shape)
        self.optimizer = torch.optim.AdamW(self.llama.module.parameters(), lr=1e-5, fused=True)
        self._only_plans = False
        self.llama.layers[0].self_attn.register_forward_pre_hook(self._give_up)

    @contextmanager
    def long(self) -> Iterator[offload.StreamedWeights]:
        """Inside, a step needs as little memory as can be beside what a plan decides."""
        with ExitStack() as stack:
            stack.enter_context(offload.use_chunked_loss(self.llama.module, chunk_tokens=self.grain // 4))
            stack.enter_context(offload.tile_mlp(self.llama.layers, self.grain))
            stack.enter_context(in_blocks())
            yield stack.enter_context(offload.stream_weights(self.llama.layers, self.device))

    def step(self, tokens: int) -> float:
        """Train on one sequence; the loss."""
        self.llama.use(tokens)
        loss = self.llama.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not math.isfinite(found := loss.item()):
            raise ValueError(f"the loss of {tokens} tokens must be finite, got {found}")
        return found

    def refusal(self, tokens: int) -> str | None:
        """What ``prepare`` says of a sequence that cannot fit; ``None`` if it has a plan. Nothing is computed."""
        self.llama.use(tokens)
        self._only_plans = True
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*cannot be met")
                self.llama.loss()
        except _PlannedError:
            return None
        except UserWarning as said:
            return str(said)
        finally:
            self._only_plans = False
        raise RuntimeError(f"a forward of {tokens} tokens must be planned, but no layer ran")

    def left_out_s(self, tokens: int) -> float:
        """Seconds of whole attention beyond those of blocks, in all layers, with two forwards."""
        longer = tokens / (ATTENDED * self.grain)
        return len(self.llama.layers) * max(0.0, longer**2 * self._whole_s - longer * self._blocks_s)

    def _attention_s(self, shape: dict[str, int]) -> tuple[float, float]:
        whole = attention_s(shape, ATTENDED * self.grain, self.device)
        with in_blocks():
            near = attention_s(shape, ATTENDED * self.grain, self.device)
        return 2 * whole[0] + whole[1], 2 * near[0] + near[1]

    def _give_up(self, *_: object) -> None:
        if self._only_plans:
            raise _PlannedError


class Search:
    """The longest sequence within one budget, for which ``prepare`` makes a new handle."""

    prepared: offload.PreparedTraining  # the one that is in use

    def __init__(self, training: LongTraining, prepare: Callable[[], offload.PreparedTraining], seconds: float) -> None:
        self.training, self.prepare = training, prepare
        self.device, self.grain = training.device, training.grain
        self.end = time.perf_counter() + seconds
        self.tried: list[tuple[int, str]] = []  # lengths, and what came of each
        self.short = 2 * self.grain

    def rows(self) -> Iterator[Row]:
        """Find it, and train on it: a row after each step, of which the last one counts."""
        failed: int | None = None
        while failed is None or failed > self.grain:
            with self.prepare() as self.prepared:
                longest, refused = self._longest_planned(failed)
                failed = failed if refused is None else refused
                found = None
                for found in self._train(longest):
                    if found is not None:
                        yield found | self._failed(failed)
            if found is not None:
                return
            failed = longest  # backward may have stepped some parameters: a new handle goes on with them
        yield {"longest_tokens": 0} | self._failed(failed)

    def _longest_planned(self, failed: int | None) -> tuple[int, int | None]:
        """The longest sequence with a plan, of those that are shorter than one that failed, and the next longer one."""
        measured, promised = self._measure()
        most = self._whole(MOST * measured)
        if failed is not None:
            most = min(most, failed - self.grain, self._whole(FEWER * failed))
        longest, refused = min(most, max(measured, self._whole(SHARE * promised))), most + self.grain
        self._plan(longest)
        self.training.step(self.short)  # at its end, the recipe for the planned length is put in place
        while longest + self.grain < refused:
            tokens = self._whole((longest + refused) / 2)
            longest, refused = (tokens, refused) if self._plan(tokens) else (longest, tokens)
        self.training.step(self.short)  # as above
        return longest, refused if refused <= most else None

    def _measure(self) -> tuple[int, float]:
        """Measure short sequences; the longest of these, and how many tokens seem to fit."""
        short, longer = self.short, 3 * self.grain
        self._fitting(short)
        self._fitting(longer)  # what grows with the length is known from here on
        measured = max(2 * longer, self._whole(self._fitting(longer) / 3))
        measured = max(measured, self._whole(SHARE * self._fitting(measured)))  # near the longest, as plans are then
        return measured, self._fitting(measured)

    def _fitting(self, tokens: int) -> float:
        """Measure a step: how many tokens fit if all that it needs grows with them, which is less than what does."""
        give_memory_back(self.device, pinned=False)
        before, reserved_bytes = self.prepared.stats()["activations"], _reserved_bytes(self.device)
        with offload.memory_meter(self.device) if self.device.type == "cpu" else nullcontext() as meter:
            took_s = timed(lambda: self.training.step(tokens), self.device)
        # An accelerator's peak is reset for each layer that is measured. What the allocator took, it still has.
        peak_bytes = _reserved_bytes(self.device) - reserved_bytes if meter is None else meter.peak_bytes
        self._note(tokens, f"measured in {took_s:.1f} s, in {format_bytes(peak_bytes)}")
        sent_bytes = (self.prepared.stats()["activations"] - before).offloaded_bytes
        device, host = self.prepared.device_bytes(), self.prepared.host_bytes()
        host_left = math.inf if host is None else host
        # What is offloaded is kept on the device where the host has no room for it.
        return tokens * min(device / max(1, peak_bytes), (device + host_left) / max(1, peak_bytes + sent_bytes))

    def _plan(self, tokens: int) -> bool:
        said = self.training.refusal(tokens)
        if said is None and self.prepared.activations is None:
            said = "may be too much, and would be measured"
            self.training.step(self.short)  # is measured instead
        said = said or ("" if self.prepared.plan.fits else "no recipe fits")
        self._note(tokens, said or "planned")
        return not said

    def _train(self, tokens: int) -> Iterator[Row | None]:
        """Steps with the longest sequence; ``None`` behind them if one has failed."""
        times_s: list[float] = []
        losses: list[float] = []
        give_memory_back(self.device, pinned=False)
        while len(times_s) < STEPS and (not times_s or time.perf_counter() + times_s[-1] < self.end):
            peak_bytes = device_peak(self.device)
            try:
                times_s.append(timed(lambda: losses.append(self.training.step(tokens)), self.device))
            except (torch.OutOfMemoryError, offload.HostMemoryError) as error:
                self._note(tokens, f"{type(error).__name__}: {error}")
                self.training.optimizer.zero_grad()
                yield None
                return
            self._note(tokens, f"trained in {times_s[-1]:.1f} s")
            step_s = times_s[-1] + self.training.left_out_s(tokens)
            row: Row = {
                "longest_tokens": tokens,
                "times_s": [*times_s],
                "losses": [*losses],
                "in_blocks_s": times_s[-1],
            }
            row |= {"step_s": step_s, "whole": False, "tokens_per_s": tokens / step_s, "peak_bytes": peak_bytes()}
            if self.device.type == "cuda":
                row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
            yield row

    def _failed(self, tokens: int | None) -> Row:
        """What is known of the shortest that failed, and which memory more of would do."""
        said = "" if tokens is None else dict(self.tried).get(tokens, "")
        binds = "device and host" if "of host memory. Give more" in said else "device"
        return {"shortest_failed_tokens": tokens, "said": said, "binds": binds, "tried": [*self.tried]}

    def _note(self, tokens: int, came_of_it: str) -> None:
        self.tried.append((tokens, came_of_it))
        print(f"{tokens:,} tokens: {came_of_it}", file=sys.stderr, flush=True)

    def _whole(self, tokens: float) -> int:
        return int(tokens) // self.grain * self.grain


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
