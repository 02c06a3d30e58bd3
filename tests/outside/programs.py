"""Random programs: layers of random parts, under random policies, plans, budgets and streams of weights.

Every gradient, buffer and generator of each program is compared with plain PyTorch's.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload import Link, offload_layers, plan, profile_layers, stream_weights

from .comparison import compare

WIDTH = 6


class UnseenScale(torch.autograd.Function):
    """A kernel that PyTorch does not see writes the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.numpy()[...] = x.detach().numpy() * 1.5
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, out = ctx.saved_tensors
        return grad * 1.5 + 0.0 * (x + out)


class UnseenInPlace(torch.autograd.Function):
    """A kernel that PyTorch does not see writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[...] *= 0.5
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5


@torch.library.custom_op("offload_programs::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


@torch.library.custom_op("offload_programs::untagged_noise", mutates_args=())
def untagged_noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


for _operation in (noise, untagged_noise):
    _operation.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0] + grad * ctx.saved_tensors[1],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output),
    )


class Part(nn.Module):
    """One kind of computation, with the weights it may need."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.cached = True
        """Whether autocast keeps the casts of weights: streamed weights are cast at each use."""
        self.last: torch.Tensor | None = None
        if kind in ("batch norm", "checkpointed"):
            self.norm = nn.BatchNorm1d(WIDTH)
        if kind == "spectral norm":
            nn.utils.parametrizations.spectral_norm(self.linear)
        if kind == "old spectral norm":
            nn.utils.spectral_norm(self.linear)
        if kind == "frozen":
            self.linear.requires_grad_(False)
        if kind == "experts":
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return PARTS[self.kind](self, x, scale)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x).tanh(), 0.3, self.training)

    def in_place(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = self.linear(x).mul_(scale)
        y[:, :2].add_(1.0)
        return y.view(-1).sigmoid_().view_as(x)

    def views(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        a, b = self.linear(x).chunk(2, -1)
        return torch.cat([(a * b).t().contiguous().t(), b.sin() * scale], -1)

    def moe(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        out = torch.zeros_like(x)
        chosen = self.linear(x)[:, :3].argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, (expert(x[rows]).tanh() * scale).to(out.dtype))
        return out

    def counted(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).exp().clamp(max=3) if self.calls % 3 == 0 else self.linear(x).sin() * scale

    def layer_drop(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x if torch.rand(()) < 0.3 else self.linear(x).tanh() * scale

    def buffered(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x * self.mean.clone()).tanh() * scale

    def replaced(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.mean = self.mean.detach() * 0.9 + x.detach().mean(0) * 0.1
        return (self.linear(x) * self.mean).tanh() * scale

    def attribute(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.last = self.linear(x)
        return self.last.sigmoid() * self.last * scale

    def autocast(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cached):
            return (self.linear(x).tanh() + self.linear(x.cos())).float() * scale

    def attention(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = self.linear(x)[None, None]
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)[0, 0] * scale


PARTS: dict[str, Callable[[Any, torch.Tensor, float], torch.Tensor]] = {
    "linear": lambda part, x, scale: F.gelu(part.linear(x)) * scale,
    "frozen": lambda part, x, scale: F.silu(part.linear(x)) * scale,
    "in place": Part.in_place,
    "views": Part.views,
    "dropout": lambda part, x, scale: part.body(x) * scale,
    "unseen": lambda part, x, scale: UnseenScale.apply(part.linear(x).float()).sin(),
    "unseen in place": lambda part, x, scale: UnseenInPlace.apply(part.linear(x).float() + 1).sin(),
    "noise": lambda part, x, scale: torch.ops.offload_programs.noise(part.linear(x)).sin(),
    "untagged noise": lambda part, x, scale: torch.ops.offload_programs.untagged_noise(part.linear(x)).sin(),
    "batch norm": lambda part, x, scale: part.norm(part.linear(x)).relu(),
    "spectral norm": lambda part, x, scale: part.linear(x).tanh(),
    "old spectral norm": lambda part, x, scale: part.linear(x).tanh(),
    "checkpointed": lambda part, x, scale: checkpoint(part.body, x, use_reentrant=False).sin(),
    "reentrant": lambda part, x, scale: checkpoint(part.body, x, use_reentrant=True).sin(),
    "experts": Part.moe,
    "counted": Part.counted,
    "layer drop": Part.layer_drop,
    "buffered": Part.buffered,
    "replaced": Part.replaced,
    "attribute": Part.attribute,
    "autocast": Part.autocast,
    "attention": Part.attention,
}


class Layer(nn.Module):
    def __init__(self, kinds: list[str], style: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(kind) for kind in kinds)
        self.style = style

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        y = x
        for part in self.parts:
            y = part(y, scale) + (0.1 * other if other is not None else 0.0)
        y = x + y if self.style == "residual" else y
        return (y, x * y.sigmoid()) if self.style == "two" else y


class Model(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, twice: bool, scale: float) -> torch.Tensor:
        first = x = x.cos()
        for layer in self.layers:
            out = layer(x, first if twice else None, scale=scale)
            x = out[0] * out[1] if isinstance(out, tuple) else out
        return x.float()


SEVERAL_USES = {"spectral norm", "old spectral norm", "autocast", "reentrant"}
"""Parts that use their weight several times, or add to its gradient in a backward of their own."""
AROUND = ("plain", "microbatches", "retain", "partial", "grad", "evaluation", "shapes", "error", "scales", "double")
STREAMED_AROUND = ("plain", "microbatches", "evaluation", "shapes", "error", "scales")
LINK = Link(1e9, 1e9, 1.5e9)


def draw(seed: int) -> dict[str, Any]:
    """What program ``seed`` is."""
    rng = random.Random(seed)
    layers = [
        (rng.choices(list(PARTS), k=rng.randint(1, 3)), rng.choice(["plain", "residual", "two"]))
        for _ in range(rng.randint(2, 4))
    ]
    patterns = rng.sample(
        ["*mm*", "*parts.0*", "*tanh*", "*sin*", "*mul*", "*dropout*", "*sigmoid*"], rng.randint(0, 3)
    )
    policies = {pattern: rng.choice(["keep", "offload", "recompute"]) for pattern in patterns}
    policies["*"] = rng.choice(["recompute", "recompute", "offload", "keep"])
    settings: dict[str, Any] = {"min_bytes": rng.choice([0, 1])}
    decided = rng.choices(["policies", "budget", "plan"], [10, 5, 3])[0]
    if decided == "policies":
        settings |= {"policies": policies, "num_layers": rng.randint(0, len(layers) - 1)}
    else:
        settings["memory_budget"] = rng.choice([1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 30])
    if rng.random() < 0.1:
        settings["max_host_bytes"] = rng.choice([0, 1 << 10])
    stream = rng.choice([2, 2, 3]) if rng.random() < 0.25 else 0
    share = rng.random() < 0.15
    # Streamed weights add up per layer first: with three uses in two layers, another order of additions.
    share = share and not (stream and {layers[0][0][0], layers[-1][0][0]} & SEVERAL_USES)
    return {
        "layers": layers,
        "settings": settings,
        "decided": decided,
        "around": rng.choice(STREAMED_AROUND if stream else AROUND),
        "twice": rng.random() < 0.3,
        "share": share,
        "autocast": rng.random() < 0.1,
        "stream": stream,
        "steps": 4 if decided == "policies" else 6,
    }


def make(seed: int, program: dict[str, Any]) -> Model:
    """The model of a program."""
    torch.manual_seed(seed)
    model = Model([Layer(kinds, style) for kinds, style in program["layers"]])
    if program["share"]:
        model.layers[-1].parts[0].linear = model.layers[0].parts[0].linear
    for module in model.modules():
        if isinstance(module, Part):
            module.cached = not program["stream"]
    return model


def planned(seed: int, program: dict[str, Any]) -> dict[str, Any]:
    """The settings of a program, with a plan that is made of another instance of its model."""
    settings = dict(program["settings"])
    if program["decided"] != "plan":
        return settings
    model = make(seed, program)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=program["autocast"]):
            out = model(torch.randn(5, WIDTH, requires_grad=True), program["twice"], 1.0)
        out.square().sum().backward()

    profile = profile_layers(model.layers, step, min_bytes=settings["min_bytes"], device="cpu", steps=1, regions=True)
    host_bytes, budget = settings.pop("max_host_bytes", None), settings.pop("memory_budget")
    return settings | {"plan": plan(profile, budget, LINK, max_host_bytes=host_bytes)}


def results(seed: int, program: dict[str, Any], *, plain: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Run the steps of a program: every gradient, buffer and generator's state."""
    settings = {} if plain else planned(seed, program)
    model = make(seed, program)
    around = program["around"]
    parameters = [one for one in model.parameters() if one.requires_grad]
    with ExitStack() as stack:
        if not plain and program["stream"]:
            stack.enter_context(stream_weights(model.layers, "cpu", num_slots=program["stream"]))
        if not plain:
            stack.enter_context(offload_layers(model.layers, device="cpu", **settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(seed + 1)
        for step in range(program["steps"]):
            rows = 5 + 3 * step % 7 if around == "shapes" else 5
            batches = [
                torch.randn(rows, WIDTH, requires_grad=True) for _ in range(3 if around == "microbatches" else 1)
            ]
            scale = 1.0 + step if around == "scales" else 1.0

            def forward(x: torch.Tensor, scale: float = scale) -> torch.Tensor:
                cached = not program["stream"]
                with torch.autocast("cpu", torch.bfloat16, enabled=program["autocast"], cache_enabled=cached):
                    return model(x, program["twice"], scale)

            if around == "evaluation" and step % 2:
                model.eval()
                with torch.no_grad():
                    forward(batches[0])
                model.train()
            if around == "error" and step == 1:
                broken = model.layers[-1].register_forward_pre_hook(_fail, prepend=True)
                try:
                    forward(batches[0])
                except ZeroDivisionError:
                    broken.remove()
            outputs = [forward(batch) for batch in batches]
            for made in reversed(outputs) if step % 2 else outputs:
                output = made
                if around == "retain":
                    output.square().sum().backward(retain_graph=True)
                if around == "partial":
                    for grad in torch.autograd.grad(output[0].sum(), batches, retain_graph=True, allow_unused=True):
                        yield f"step {step} partial", torch.zeros(()) if grad is None else grad
                if around == "double":
                    (output,) = torch.autograd.grad(output.square().sum(), batches, create_graph=True)
                if around == "grad":
                    for grad in torch.autograd.grad(output.sum(), parameters, allow_unused=True):
                        yield f"step {step} grad", torch.zeros(()) if grad is None else grad
                else:
                    output.square().sum().backward()
            for name, parameter in [*model.named_parameters(), *((f"input {n}", b) for n, b in enumerate(batches))]:
                if parameter.grad is not None:
                    yield f"step {step} {name}", parameter.grad.clone()
            for name, buffer in model.named_buffers():
                yield f"step {step} {name}", buffer.clone()
            yield f"step {step} generator", torch.get_rng_state()
            optimizer.step()
            optimizer.zero_grad()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


REFUSALS = ("the plan must be for these layers", "memory_budget must be at least", "no layer saved at least min_bytes")
"""What the messages of errors begin with that say that there is no such plan."""


def check(seed: int) -> str | None:
    """What goes wrong in program ``seed``, as :func:`compare` tells it; it is refused if there is no such plan."""
    program = draw(seed)
    plain, ours = (partial(results, seed, program, plain=one) for one in (True, False))
    return compare(plain, ours, REFUSALS)
