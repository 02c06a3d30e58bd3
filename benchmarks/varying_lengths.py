"""Fine-tuning with lengths that vary: steps that measure, peaks beside the budget, and time beside a plan by hand.

    python -m benchmarks.varying_lengths
    python -m benchmarks.varying_lengths --steps 500
    python -m benchmarks.varying_lengths --layers 7 --only memory_budget

Hugging Face's Trainer trains a Llama on sequences whose lengths follow a log-normal distribution, padded per batch,
with evaluations in between. The budget is a share of what the longest batch adds when everything is kept. Every way
trains a model of its own on the same batches. The plan by hand has its first half before the run of the budget and its
second half after that run, so that a change of the GPU's clocks concerns both alike. cuDNN's attention is off: it takes
tenths of a second to prepare for each length that it has not seen, so that whichever way comes first would pay for all
others. On the CPU the peak of every step is counted in Python, so that seconds say little there.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import transformers

import offload
from benchmarks.instruments import GIB, Row, attempt, give_memory_back, metered, synchronize
from benchmarks.models import checkpointing_method, llama
from benchmarks.report import Record, asked, table
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.base.checks import format_bytes
from offload.observe.memory import MemoryMeter

STEPS = 2000
LAYERS, SMALL_LAYERS = 14, 6
BY_HAND, BUDGET, NOTHING, CHECKPOINTING = "plan by hand", "memory_budget", "nothing", "gradient checkpointing"
SHARE = 0.5  # of what the longest batch adds with everything kept
MEDIAN, SIGMA = 1 / 16, 1.0
"""Of the log-normal distribution of lengths; the median is a part of the longest length."""
SIZES = {"longest": 4096, "shortest": 64, "words": 32000}
SMALL = {"longest": 256, "shortest": 4, "words": 128}
BATCH = 2  # sequences
EVALUATIONS, EVALUATED = 4, 4  # how often the model is evaluated, and on how many batches
TRIES = 6
"""Plans by hand, each for less memory than the one before, until a step keeps to the budget."""
PROFILED = 5  # steps whose median is the profile of the plan by hand

Batch = dict[str, torch.Tensor]


def batches(count: int, *, longest: int, shortest: int, words: int, seed: int = 0) -> list[Batch]:
    """Sequences of random tokens, padded on the right to the longest of their batch; one has the longest length."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(count, BATCH).log_normal_(math.log(MEDIAN * longest), SIGMA, generator=generator)
    lengths = drawn.round().long().clamp(shortest, longest)
    lengths[count // 2, 0] = longest
    found = []
    for row in lengths:
        mask = (torch.arange(int(row.max())) < row[:, None]).long()
        ids = torch.randint(1, words, mask.shape, generator=generator) * mask
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def build(device: torch.device, layers: int, *, small: bool) -> Any:
    """The width of Llama-3.2-3B, which has 28 layers, in bfloat16; or a small one in float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4}
    if not small:
        sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24}
    sizes["num_hidden_layers"] = layers
    inputs = SMALL if small else SIZES
    sizes |= {"num_key_value_heads": 2 if small else 8, "max_position_embeddings": inputs["longest"]}
    dtype = torch.float32 if small else torch.bfloat16
    return llama(device, dtype, **sizes, vocab_size=inputs["words"], tie_word_embeddings=True)


@contextmanager
def step_peak(device: torch.device) -> Iterator[MemoryMeter]:
    """A meter that waits for no accelerator, and sees a peak also where the library has the allocator forget it."""
    if device.type == "cpu":
        with offload.memory_meter(device) as meter:
            yield meter
        return
    forget, meter = torch.accelerator.reset_peak_memory_stats, MemoryMeter()
    start_bytes = torch.accelerator.memory_allocated(device)

    def note(*_: object) -> None:
        meter.peak_bytes = max(meter.peak_bytes, torch.accelerator.max_memory_allocated(device) - start_bytes)
        forget(device)

    forget(device)
    with patch.object(torch.accelerator, "reset_peak_memory_stats", note):
        yield meter
    note()


class Run(transformers.Trainer):
    """A training that takes a batch for each step in their order, and notes the peak and the loss of each step.

    The model is evaluated on other batches each time after ``every`` steps.
    """

    def __init__(self, model: Any, data: Sequence[Batch], evaluated: Sequence[Batch], every: int) -> None:
        self.peaks_bytes: list[int] = []
        self.states: list[str] = []
        self.losses: list[torch.Tensor] = []
        self.handle: Any = None  # of offloading, whose state is noted
        self._data, self._evaluated = data, evaluated
        self._folder = TemporaryDirectory()
        arguments = transformers.TrainingArguments(
            self._folder.name,
            max_steps=len(data),
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            eval_strategy="steps",
            eval_steps=every,
            logging_steps=every,
            logging_nan_inf_filter=False,  # looking at each loss would wait for the device
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            use_cpu=model.device.type == "cpu",
        )
        super().__init__(model, arguments, train_dataset=data, eval_dataset=evaluated)

    def get_train_dataloader(self) -> Any:
        """In order, one batch at a time."""
        return self.accelerator.prepare(torch.utils.data.DataLoader(self._data, batch_size=None))

    def get_eval_dataloader(self, *_: Any) -> Any:
        """The same."""
        return self.accelerator.prepare(torch.utils.data.DataLoader(self._evaluated, batch_size=None))

    def training_step(self, *given: Any, **options: Any) -> Any:
        """Forward and backward of one batch."""
        with step_peak(self.model.device) as meter:
            loss = super().training_step(*given, **options)
        self.peaks_bytes.append(meter.peak_bytes)
        self.losses.append(loss)
        self.states.append(getattr(self.handle, "state", ""))
        return loss

    def run(self) -> float:
        """Train: the seconds from an idle device to an idle device."""
        synchronize(self.model.device)
        begin = time.perf_counter()
        self.train()
        synchronize(self.model.device)
        self._folder.cleanup()
        return time.perf_counter() - begin


class Case:
    """The ways to train within a share of what the longest batch adds, and their rows."""

    def __init__(self, device: torch.device, steps: int, *, layers: int, small: bool, share: float) -> None:
        self.device, self.small, self.share = device, small, share
        self.build = partial(build, device, layers, small=small)
        self.parameters = 0
        self.batches = batches(steps, **(SMALL if small else SIZES))
        self.evaluated = batches(EVALUATED, **(SMALL if small else SIZES), seed=1)
        self.longest = max(self.batches, key=lambda batch: batch["input_ids"].shape[1])
        self.min_bytes = 1 if small else DEFAULT_MIN_BYTES
        self.budget_bytes = self.most_bytes = 0
        self.plan: offload.Plan | None = None
        self._losses: list[torch.Tensor] = []

    def measure(self, ways: Sequence[str], record: Record) -> list[Row]:
        """The rows of these ways, and of the plan by hand; the record has each as soon as it is there."""
        half = len(self.batches) // 2
        arounds: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
            BUDGET: partial(self._offloaded, memory_budget=self.budget_bytes),
            NOTHING: nullcontext,
            CHECKPOINTING: lambda model: nullcontext(checkpointing_method(model, "enable")()),
        }
        by_hand: Row = {"what": BY_HAND}
        rows = [by_hand, *({"what": what} for what in arounds if what in ways)]
        follow = partial(self._offloaded, plan=self.plan)
        runs = [(by_hand, self.batches[:half], follow)]
        runs += [(row, self.batches, arounds[row["what"]]) for row in rows[1:]]
        runs.insert(2, (by_hand, self.batches[half:], follow))
        for row, data, around in runs:
            self._train(row, data, around)
            row["steps"] = row.get("steps", 0) + len(data)
            done = [one for one in rows if "steps" in one]
            for one in done:
                if "error" not in one and "error" not in by_hand:
                    one["ratio"] = one["train_s"] / one["steps"] / (by_hand["train_s"] / by_hand["steps"])
            record.add(*done, instead_of=["what"])
        return rows

    def prepare(self) -> None:
        """The budget, and a plan for the longest batch that keeps to it, as a user makes it."""
        model = self.build()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        batch = {name: tensor.to(self.device) for name, tensor in self.longest.items()}

        def step() -> None:
            model(**batch).loss.backward()
            model.zero_grad()

        step()
        self.most_bytes, _ = metered(step, self.device)
        self.budget_bytes = left = round(self.share * self.most_bytes)
        options = {"min_bytes": self.min_bytes, "device": self.device, "steps": 1 if self.small else PROFILED}
        profile = offload.profile_layers(model.model.layers, step, regions=True, **options)
        link = offload.measure_link(self.device)
        for _ in range(TRIES):
            self.plan = offload.plan(profile, left, link)
            with warnings.catch_warnings(action="ignore"), self._offloaded(model, plan=self.plan):
                for _ in range(3):
                    step()
                peak_bytes, _ = metered(step, self.device)
            amounts = map(format_bytes, (left, peak_bytes, self.budget_bytes))
            print("plan by hand for {}: peak {}, budget {}".format(*amounts), flush=True)
            if peak_bytes <= self.budget_bytes:
                break
            left -= peak_bytes - self.budget_bytes

    def _offloaded(self, model: Any, **options: Any) -> AbstractContextManager[Any]:
        return offload.offload_layers(model.model.layers, min_bytes=self.min_bytes, **options)

    def _train(self, row: Row, data: Sequence[Batch], around: Callable[[Any], AbstractContextManager[Any]]) -> None:
        """Train a new model, and add what its steps took to the row."""
        give_memory_back(self.device)
        attempt(row, lambda: self._trained(row, data, around))
        print(row, flush=True)

    def _trained(self, row: Row, data: Sequence[Batch], around: Callable[[Any], AbstractContextManager[Any]]) -> None:
        model = self.build()
        run = Run(model, data, self.evaluated, max(1, len(self.batches) // EVALUATIONS))
        with around(model) as run.handle:
            row["train_s"] = row.get("train_s", 0.0) + run.run()
        row["peak_bytes"] = max(row.get("peak_bytes", 0), *run.peaks_bytes)
        first = 0 if data[0] is self.batches[0] else len(self.batches) - len(data)
        over = [
            {"step": number + first, "tokens": batch["input_ids"].numel(), "bytes": peak_bytes - self.budget_bytes}
            for number, (batch, peak_bytes) in enumerate(zip(data, run.peaks_bytes, strict=True))
            if peak_bytes > self.budget_bytes
        ]
        row["over_budget"] = row.get("over_budget", []) + over
        row["measuring"] = [number for number, state in enumerate(run.states) if state == "measuring"]
        if first == 0:  # a run of the second half begins with other weights
            self._losses = self._losses or run.losses
            row["same_losses"] = all(map(torch.equal, self._losses, run.losses))


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Train within a memory budget with lengths that vary.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--layers", type=int, help=f"of the model: {LAYERS}, and {SMALL_LAYERS} with --small")
    others = [BUDGET, NOTHING, CHECKPOINTING]
    parser.add_argument("--only", nargs="+", choices=others, default=others, help="beside the plan by hand")
    arguments, device = asked(parser, "results/varying_lengths.json")
    transformers.utils.logging.set_verbosity_error()
    torch.backends.cuda.enable_cudnn_sdp(False)
    layers = arguments.layers or (SMALL_LAYERS if arguments.small else LAYERS)
    case = Case(device, arguments.steps, layers=layers, small=arguments.small, share=arguments.share)
    case.prepare()
    facts = {"steps": arguments.steps, "share": arguments.share, "layers": layers, "parameters": case.parameters}
    record = Record(arguments, device, **facts, budget_bytes=case.budget_bytes, most_bytes=case.most_bytes)
    rows = case.measure(arguments.only, record)
    for row in rows:
        over = [one["bytes"] for one in row.get("over_budget", ())]
        row |= {"over": len(over), "most_over_bytes": max(over, default=0), "measured": len(row.get("measuring", ()))}
    columns = {
        "": "what",
        "s": "train_s",
        "x plan by hand": "ratio",
        "GiB": ("peak_bytes", GIB),
        "measured steps": "measured",
        "steps over the budget": "over",
        "by at most": ("most_over_bytes", GIB),
        "same losses": "same_losses",
        "note": "error",
    }
    print(f"budget {format_bytes(case.budget_bytes)} of {format_bytes(case.most_bytes)}")
    print(table(rows, columns))


if __name__ == "__main__":
    main()
