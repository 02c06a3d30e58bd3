"""Random models on the CPU, each under a random budget: the peak keeps to the budget, or one message says why."""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import offload

TOLERANCE = 0.02
"""By what part a peak may be above the budget."""
LINK = offload.Link(1e9, 1e9, 1.5e9)
STEPS = 9
"""Of which the first two are measured, and at most four are corrected."""
AT_ONCE = 0.3
"""So many steps have several microbatches at once if they may: before there is a plan, or long after."""


@dataclass
class Report:
    """What became of one model, in bytes."""

    model: str = ""
    free: int = 0
    """The peak of a step without offloading."""
    budget: int = 0
    peak: int = 0
    """The highest peak of the last three steps under ``memory_budget``."""
    highest: int = 0
    """The highest peak of all steps, of which the first ones are measured."""
    planned: int = 0
    """The highest peak of the last steps under ``plan``; 0 where there is no such plan."""
    messages: list[str] = field(default_factory=list)
    wrong: str = ""


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.mlp(x + F.dropout(self.out(mixed), 0.1, self.training))


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x)).tanh()


KINDS: dict[str, type[Any]] = {"mlp": Mlp, "attention": Attention, "convolution": Convolution, "gated": Gated}


class Model(nn.Module):
    """An embedding, layers and a loss over a vocabulary, as language models have them; perhaps a stem, as others do."""

    def __init__(self, layers: list[nn.Module], width: int, vocabulary: int, stem: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.stem, self.layers = stem, nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def build(seed: int) -> tuple[Model, torch.Tensor, str, float]:
    """A model, its input, what it is in words, and which part of the free peak the budget is."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, count = rng.choice([16, 32, 64, 128]), rng.randint(1, 10)
    rows, length = rng.randint(1, 4), rng.choice([16, 64, 128])
    vocabulary = rng.choice([16, 128, 512])
    kinds = rng.choices(list(KINDS), k=count) if rng.random() < 0.4 else [rng.choice(list(KINDS))] * count
    stem = Mlp(width) if rng.random() < 0.4 else nn.Identity()
    model = Model([KINDS[kind](width) for kind in kinds], width, vocabulary, stem)
    tokens = torch.randint(vocabulary, (rows, length))
    names = f"{type(stem).__name__}, {count} x {'+'.join(sorted(set(kinds)))}"
    words = f"{names}, width {width}, {rows} x {length} tokens of {vocabulary}"
    return model, tokens, words, rng.uniform(0.35, 1.1)


IN_FLIGHT = ("joined", "the newest first", "the oldest first")
"""How backwards come to microbatches that are in flight at once."""


def step(
    model: Model, tokens: torch.Tensor, optimizer: torch.optim.Optimizer, lengths: Sequence[int], in_flight: str = ""
) -> int:
    """A step of training, of a microbatch of each length; returns the most bytes that it needed at once."""
    with offload.memory_meter("cpu") as meter:
        losses: list[torch.Tensor] = []
        for length in lengths:
            losses.append(model(tokens[:, :length]))
            if not in_flight:
                losses.pop().backward()
        if in_flight == "joined":
            torch.stack(losses).sum().backward()
            losses.clear()
        while losses:
            losses.pop(0 if in_flight == "the oldest first" else -1).backward()
    optimizer.step()
    optimizer.zero_grad()
    return meter.peak_bytes


def check(seed: int, microbatches: int = 1, *, varying: bool = False, in_flight: bool = False) -> Report:
    """Train one model under a budget, by ``memory_budget`` and by ``plan``.

    Steps have so many microbatches, all of the same length, or of lengths that vary up to that. If they are to be
    ``in_flight``, some steps have so many at once, and most have one.
    """
    model, tokens, words, share = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    report, rng = Report(words), random.Random(seed)
    longest = [tokens.shape[1]] * (1 if in_flight else microbatches)
    order = rng.choice(IN_FLIGHT) if in_flight else ""

    def lengths() -> list[int]:
        count = microbatches if in_flight and rng.random() < AT_ONCE else 1
        return [rng.randint(4, one) if varying else one for one in longest * count]

    def train(steps: int) -> list[int]:
        drawn = [lengths() for _ in range(steps)]
        peaks = [step(model, tokens, optimizer, each, order) for each in drawn]
        for _ in range(2):  # what the last one has needed is said in the next, or behind a plan's first one
            step(model, tokens, optimizer, [4])
        return peaks

    report.free = max(step(model, tokens, optimizer, longest) for _ in range(2))
    report.budget = budget = int(share * report.free)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with offload.offload_layers(model.layers, memory_budget=budget, min_bytes=1, device="cpu"):
            peaks = train(STEPS)
    report.peak, report.highest = max(peaks[-3:]), max(peaks)
    report.messages = [str(one.message) for one in told if "memory_budget" in str(one.message)]
    if len(report.messages) > 1 and not (varying or in_flight):
        report.wrong = "more than one message"
    elif report.highest > (1 + TOLERANCE) * budget and not report.messages:
        report.wrong = f"memory_budget: {report.highest / budget:.3f} of the budget without a message"
    try:
        profile = offload.profile_layers(
            model.layers,
            lambda: step(model, tokens, optimizer, longest),
            min_bytes=1,
            device="cpu",
            regions=True,
            steps=1,
        )
        plan = offload.plan(profile, budget, LINK)
    except ValueError as error:
        report.messages.append(str(error))
        return report
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with offload.offload_layers(model.layers, plan=plan, min_bytes=1, device="cpu"):
            learning, *peaks = train(4)
    report.planned = max(peaks)
    said = [str(one.message) for one in told if "memory_budget" in str(one.message)]
    report.messages += said
    broken = max(learning, *peaks) > (1 + TOLERANCE) * budget
    if broken != bool(said) and (broken or not in_flight) and not report.wrong:
        report.wrong = f"plan: {report.planned / budget:.3f} of the budget, {plan.peak_bytes / budget:.3f} predicted"
    return report
