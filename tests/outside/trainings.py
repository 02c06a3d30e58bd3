"""Random trainings whose optimizer, weights, or whole recipe the library holds, beside the same in plain PyTorch.

Each step may do what programs do between steps: read and write parameters and state, clip, accumulate, load
checkpoints, fail, leave layers out, evaluate. Copies begin late, and memory that is given up is poisoned.
"""

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload

from .comparison import adverse, compare

WIDTH, WORDS = 32, 64
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW, all at once": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2, centered=True),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
}
BETWEEN = (
    "evaluate", "read", "scale", "write", "rate", "save", "load", "resume", "remove", "fail", "fail_in_backward",
    "fewer", "state", "freeze", "copy",
)  # fmt: skip
ONLY_AT_STEP = ("clip", "skip", "scale gradients", "closure", "inf")
"""What reads or drops gradients between backward and the step, which must not be stepped in backward then."""

REFUSALS = ("memory_budget must hold",)
"""What the messages of errors begin with that say that no recipe fits."""


class Block(nn.Module):
    """A layer with a residual connection, whose parameters are of several sizes."""

    def __init__(self, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return made


class Model(nn.Module):
    """Words, layers, and a head, which may have the words' weights; and a parameter that gets no gradient."""

    def __init__(self, inner: list[int], dropout: float, *, tied: bool, unused: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(one, dropout) for one in inner)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.unused = nn.Parameter(torch.randn(WIDTH)) if unused else None
        if tied:
            self.head.weight = self.words.weight
        self.left_out: int | None = None
        self.checkpoints = self.fails = False

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        if self.fails:
            x.register_hook(raising)
        for number, layer in enumerate(self.layers):
            if number != self.left_out:
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints and self.training else layer(x)
        loss: torch.Tensor = nn.functional.cross_entropy(self.head(x).float(), words)
        return loss


def raising(*_: object) -> None:
    """A hook that fails."""
    raise ZeroDivisionError


def draw(seed: int) -> dict[str, Any]:
    """What training ``seed`` is."""
    rng = random.Random(seed)
    way = rng.choices(["optimizer", "weights", "prepare"], [5, 4, 3])[0]
    in_backward = rng.random() < 0.5
    steps, microbatches = rng.randint(4, 8), rng.choice([1, 1, 1, 2, 3])
    kinds = BETWEEN if in_backward else BETWEEN + ONLY_AT_STEP
    layers = rng.randint(2, 5)
    streaming = {"chunk_bytes": rng.choice([1 << 11, 1 << 13, 1 << 15]), "in_backward": in_backward}
    streaming["consume_gradients"] = in_backward and rng.random() < 0.5
    streaming["overlap_forward"] = way != "weights" and rng.random() < 0.3
    streaming["resident_bytes"] = rng.choice([0, 0, 1 << 14, 1 << 30])
    return {
        "way": way,
        "inner": [rng.choice([16, 48, 96]) for _ in range(layers)],
        "dropout": rng.choice([0.0, 0.1]),
        "tied": rng.random() < 0.2,
        "unused": rng.random() < 0.2,
        "checkpoints": rng.random() < 0.2,
        "dtype": rng.choice([torch.float32, torch.float32, torch.bfloat16]),
        "optimizer": rng.choice(list(OPTIMIZERS)),
        "groups": rng.random() < 0.3,
        "streaming": streaming,
        "streamed": sorted(rng.sample(range(layers), rng.randint(1, layers)))
        if rng.random() < 0.3
        else [*range(layers)],
        "budget": rng.choice([1.5, 2.5, 4.0, 8.0, 30.0]),
        "activations": rng.choice([None, None, 1, 1 << 14, 1 << 20]),
        "microbatches": microbatches,
        "lengths": rng.choice([(6,), (6, 12), (3, 20, 60)]),
        "autocast": rng.random() < 0.15,
        "scaler": not in_backward and rng.random() < 0.3,
        "optimizers": 2 if way != "weights" and rng.random() < 0.25 else 1,
        # Freed gradients are None, not zeros: parameters without a new one are not stepped.
        "to_none": rng.random() < 0.8 or (in_backward and (way != "optimizer" or streaming["consume_gradients"])),
        "steps": [rng.sample(kinds, rng.choice([0, 0, 1, 1, 2])) for _ in range(steps)],
    }


class Training:
    """A training, in plain PyTorch or with the library; what it does, it does alike in both."""

    def __init__(self, seed: int, program: dict[str, Any], *, plain: bool) -> None:
        torch.manual_seed(seed)
        self.program, self.plain, self.numbers = program, plain, random.Random(seed)
        self.model = Model(program["inner"], program["dropout"], tied=program["tied"], unused=program["unused"])
        self.model.to(program["dtype"])
        self.model.checkpoints = program["checkpoints"]
        self.stack, self.handles = ExitStack(), list[Any]()
        self.scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=2, enabled=program["scaler"])
        if program["way"] == "weights" and not plain:
            some = [self.model.layers[number] for number in program["streamed"]]
            self.stack.enter_context(offload.stream_weights(some, "cpu"))
        self.optimizers = self._new_optimizers()
        self.handles = self._new_handles()
        if program["activations"] and program["way"] != "prepare" and not plain:
            layers, how = self.model.layers, program["activations"]
            options = {"num_layers": how} if how == 1 else {"memory_budget": how}
            self.stack.enter_context(offload.offload_layers(layers, device="cpu", min_bytes=0, **options))
        self.saved = self._checkpoint()

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        make, parameters = OPTIMIZERS[self.program["optimizer"]], [*self.model.parameters()]
        half = len(parameters) // 2
        if self.program["optimizers"] == 2:
            return [make(parameters[:half]), torch.optim.SGD(parameters[half:], lr=0.1, momentum=0.5)]
        if not self.program["groups"]:
            return [make(parameters)]
        groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 1e-3, "weight_decay": 0.1}]
        return [make(groups)]

    def _new_handles(self) -> list[Any]:
        if self.plain:
            return []
        if self.program["way"] != "prepare":
            return [offload.stream_optimizer(one, **self.program["streaming"]) for one in self.optimizers]
        asked = self.program["streaming"]
        weights = sum(one.nbytes for one in self.model.parameters())
        options = {"step_in_backward": asked["in_backward"], "overlap_forward": asked["overlap_forward"]}
        options |= {"layers": "layers", "device": "cpu", "min_bytes": 0, "in_pieces": False}
        return [offload.prepare(self.model, self.optimizers, int(self.program["budget"] * weights), **options)]

    def _checkpoint(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), [one.state_dict() for one in self.optimizers]))

    def _remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def _zero_grad(self, *, to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none=to_none)

    def _loss(self, length: int) -> torch.Tensor:
        cached = self.program["way"] == "optimizer"  # weights that are loaded are others in each use
        with torch.autocast("cpu", torch.bfloat16, enabled=self.program["autocast"], cache_enabled=cached):
            loss: torch.Tensor = self.model(torch.randint(WORDS, (length,)))
        return loss

    def parameter(self) -> torch.Tensor:
        """Some parameter that is trained, the same one in both runs."""
        return self.numbers.choice([*self.model.parameters()])

    def step(self, what: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """A step, with what it has about it; gives losses and other numbers on the way."""
        model, program = self.model, self.program
        for one in (one for one in what if one in BETWEEN):
            yield from getattr(self, one)()
        for number in range(program["microbatches"]):
            with ExitStack() as quiet:
                if program["streaming"]["in_backward"] and number < program["microbatches"] - 1:
                    for one in self.handles:
                        quiet.enter_context(one.no_step())
                loss = self._loss(self.numbers.choice(program["lengths"]))
                loss = loss * float("inf") if "inf" in what else loss
                self.scaler.scale(loss / program["microbatches"]).backward()
            yield "loss", loss.detach().clone()
        if "clip" in what:
            for one in self.optimizers:
                self.scaler.unscale_(one)
            yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1).clone()
        if "scale gradients" in what:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        if "closure" in what and not program["scaler"]:
            yield "closed", self.optimizers[0].step(self._again).detach().clone()
        for one in () if "skip" in what else self.optimizers:
            self.scaler.step(one)
        if "skip" not in what:
            self.scaler.update()
        self._zero_grad(to_none=program["to_none"])
        model.left_out = None
        if "freeze" in what:
            for parameter in model.parameters():
                parameter.requires_grad_()
        if not self.handles:  # they were removed for this step
            self.handles = self._new_handles()

    def _again(self) -> torch.Tensor:
        self._zero_grad()
        loss = self._loss(6)
        loss.backward()
        return loss

    def evaluate(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.model.eval()
        with torch.no_grad():
            yield "evaluated", self.model(torch.arange(WORDS))
        self.model.train()

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "read", self.parameter().detach().clone()

    def scale(self) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            self.parameter().mul_(0.5)
        yield from ()

    def write(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Where autograd does not see it."""
        self.parameter().data.add_(0.01)
        yield from ()

    def rate(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.numbers.choice(self.optimizers[0].param_groups)["lr"] *= 0.5
        yield from ()

    def save(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.saved = self._checkpoint()
        yield from ()

    def load(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.model.load_state_dict(self.saved[0])
        for one, state in zip(self.optimizers, copy.deepcopy(self.saved[1]), strict=True):
            one.load_state_dict(state)
        yield from ()

    def resume(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Other optimizers go on with the state of these."""
        states = [copy.deepcopy(one.state_dict()) for one in self.optimizers]
        self._remove()
        self.optimizers = self._new_optimizers()
        self.handles = self._new_handles()
        for one, state in zip(self.optimizers, states, strict=True):
            one.load_state_dict(state)
        yield from ()

    def remove(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This step is the program's own."""
        self._remove()
        yield from ()

    def fail(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A forward of which the last layer fails."""
        hook = self.model.layers[-1].register_forward_pre_hook(raising)
        with hook, contextlib.suppress(ZeroDivisionError):  # the layer may be left out
            self.model(torch.arange(6))
        yield from ()

    def fail_in_backward(self) -> Iterator[tuple[str, torch.Tensor]]:
        """At its end, when other parameters may have been stepped: a checkpoint is loaded."""
        self.model.fails = True
        with contextlib.suppress(ZeroDivisionError):
            self.model(torch.arange(6)).backward()
        self.model.fails = False
        self._zero_grad()
        yield from self.load()

    def copy(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the whole model."""
        yield from copy.deepcopy(self.model).state_dict().items()

    def fewer(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of a layer get no gradient."""
        self.model.left_out = self.numbers.randrange(len(self.model.layers))
        yield from ()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read, and change, state."""
        parameter = self.parameter()
        found = next((one.state[parameter] for one in self.optimizers if parameter in one.state), {})
        for key, value in sorted(found.items()):
            if isinstance(value, torch.Tensor) and value.ndim:
                yield key, value.clone()
                with torch.no_grad():
                    value.mul_(0.5)

    def freeze(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A parameter is not trained in this step."""
        self.parameter().requires_grad_(False)
        yield from ()


def results(seed: int, program: dict[str, Any], *, plain: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Train: losses, parameters after each step, the state at the end, and the generator's."""
    training = Training(seed, program, plain=plain)
    with training.stack:
        torch.manual_seed(seed + 1)
        for number, what in enumerate(program["steps"]):
            for name, value in training.step(what):
                yield f"step {number} {name}", value
            if number % 3 == 2:
                for name, one in training.model.named_parameters():
                    yield f"step {number} {name}", one.detach().clone()
        yield "generator", torch.get_rng_state()
        for optimizer in training.optimizers:
            for key, entry in sorted(optimizer.state_dict()["state"].items()):
                for name, value in sorted(entry.items()):
                    if value is not None:
                        yield f"state {key} {name}", torch.as_tensor(value).clone()
        training._remove()
    for name, one in training.model.named_parameters():
        yield f"at the end {name}", one.detach().clone()


def check(seed: int) -> str | None:
    """What goes wrong in training ``seed``, as :func:`compare` tells it; it is refused if no recipe fits."""
    program = draw(seed)

    def ours() -> list[tuple[str, torch.Tensor]]:
        with adverse():
            return list(results(seed, program, plain=False))

    return compare(functools.partial(results, seed, program, plain=True), ours, REFUSALS)
