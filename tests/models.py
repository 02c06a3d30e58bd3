"""Small models, and the steps that tests run on them with and without offloading."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload import OffloadStats, get_cpu_offload_context

WIDTH = 32
HEADS = 4
BATCH = 2
TOKENS = 8


class DecoderBlock(nn.Module):
    """The reference decoder block in small: permuted views of one fused qkv, fused attention, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, h))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GptBlock(nn.Module):
    """LayerNorm, attention spelt out, GELU and dropout; each operation has a second derivative."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(dropout))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, h = x.shape
        q, k, v = (p.view(b, t, HEADS, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = ((q @ k.transpose(2, 3)) / (h // HEADS) ** 0.5).masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.out((self.dropout(weights) @ v).transpose(1, 2).reshape(b, t, h))
        return x + self.mlp(self.norm2(x))


class ConvBlock(nn.Module):
    """Channels-last convolutions with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.norm = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout2d(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.conv2(F.silu(self.norm(self.conv1(x)))))


class MlpBlock(nn.Module):
    """Little for a compiler to do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Turned(nn.Module):
    """Multiplies what it computes by a table that several layers may be given, as sines of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down((self.up(x) * table).tanh())
        return y


class Composed(nn.Module):
    """A layer of these modules, parameters and others, which is one function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def encoder_layer() -> nn.Module:
    """PyTorch's own transformer layer."""
    return nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward=64, dropout=0.1, batch_first=True)


class Recurrent(nn.Module):
    """An RNN that returns its output alone."""

    def __init__(self, cell: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.cell(x)[0]
        return output


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "decoder": DecoderBlock,
    "gpt": GptBlock,
    "conv": ConvBlock,
    "encoder": encoder_layer,
}


def build(
    block: str | Callable[[], nn.Module], model_layers: int, device: torch.device
) -> tuple[nn.ModuleList, torch.Tensor]:
    """Layers and an input that requires a gradient, the same at each call."""
    torch.manual_seed(0)
    make = (BLOCKS | {"mlp": MlpBlock})[block] if isinstance(block, str) else block
    layers = nn.ModuleList(make() for _ in range(model_layers))
    if block == "conv":
        layers.to(memory_format=torch.channels_last)
        x = torch.randn(BATCH, 8, 6, 6).to(memory_format=torch.channels_last)
    else:
        x = torch.randn(BATCH, TOKENS, WIDTH)
    return layers.to(device), x.to(device).requires_grad_()


def compiled_in_place(layer: nn.Module) -> nn.Module:
    layer.compile(backend="aot_eager")
    return layer


def compiled_wrapped(layer: nn.Module) -> nn.Module:
    return torch.compile(layer, backend="aot_eager")


@dataclass
class Offloading:
    """What the function under test returns; the default does nothing."""

    context: Any = field(default_factory=contextlib.nullcontext)
    sync: Callable[[Any], Any] = lambda output: output

    @property
    def stats(self) -> OffloadStats:
        return self.context.stats()

    @property
    def copied_bytes(self) -> tuple[int, int]:
        """To the host and back so far."""
        return (0, 0) if self is NOTHING else (self.stats.offloaded_bytes, self.stats.reloaded_bytes)

    def layer(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """One layer's forward, as a user writes it."""
        with self.context:
            output = layer(*inputs)
        return self.sync(output)

    def forward(self, layers: Iterable[Callable[[Any], Any]], x: Any) -> Any:
        """All layers in turn."""
        for layer in layers:
            x = self.layer(layer, x)
        return x


NOTHING = Offloading()


def offloading(num_layers: int, model_layers: int, device: torch.device, **options: Any) -> Offloading:
    """A context for tests: small tensors are offloaded, too, and k = N-1 is not worth a warning."""
    options = {"min_bytes": 0, "device": device, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="num_layers = model_layers - 1")
        return Offloading(*get_cpu_offload_context(True, num_layers, model_layers, **options))


def through(layers: Iterable[Callable[[Any], Any]], x: Any) -> Any:
    """What layers make of ``x``, one after the other."""
    for layer in layers:
        x = layer(x)
    return x


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def leaves_of(layers: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [*inputs, *layers.parameters()]


def gradients(leaves: Sequence[torch.Tensor], step: Callable[[], object], seed: int = 1) -> list[torch.Tensor]:
    """The gradients that ``step`` leaves behind, with the same dropout at each call."""
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(seed)
    step()
    return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


def step_gradients(
    layers: nn.ModuleList, x: torch.Tensor, offloaded: Offloading = NOTHING, *, moves: bool = True
) -> list[torch.Tensor]:
    """The gradients of one ordinary step, with respect to the input and the parameters.

    What is ``offloaded`` must have been copied to the host and back meanwhile, if something ``moves``, and else not.
    """
    before = offloaded.copied_bytes
    found = gradients(leaves_of(layers, x), lambda: loss_of(offloaded.forward(layers, x)).backward())
    assert_moved(before, offloaded, moves=moves)
    return found


def assert_moved(before: tuple[int, int], offloaded: Offloading, *, moves: bool = True) -> None:
    """Whether bytes were copied in both directions since ``before``, or in none."""
    counted = [now > then for now, then in zip(offloaded.copied_bytes, before, strict=True)]
    assert offloaded is NOTHING or counted == [moves, moves], f"copied to the host and back: {counted}"


def assert_same(expected: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    """Bit for bit: no tolerance; ``None`` where there is no gradient."""
    assert len(expected) == len(found)

    def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        return one is other if one is None or other is None else one.dtype == other.dtype and torch.equal(one, other)

    different = [number for number, pair in enumerate(zip(expected, found, strict=True)) if not same(*pair)]
    assert not different, f"tensors {different} of {len(expected)} differ"
    assert any(tensor is not None and tensor.any() for tensor in expected), "nothing was computed"


class Seen(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **kwargs or {})


class Save(torch.autograd.Function):
    """Passes ``x`` through and saves other tensors; backward hands them to ``receive``, then passes the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, receive: Callable[[tuple[torch.Tensor, ...]], object], *saved: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        ctx.receive = receive
        ctx.count = len(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.receive(ctx.saved_tensors)
        return (gradient, None, *[None] * ctx.count)


def save(x: torch.Tensor, receive: Callable[[tuple[torch.Tensor, ...]], object], *saved: torch.Tensor) -> torch.Tensor:
    """Save tensors for backward without computing anything with them."""
    return Save.apply(x, receive, *saved)


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("stop")


class Stop(nn.Module):
    """Backward fails here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stopping: torch.Tensor = _Stop.apply(x)
        return stopping


class _SavesDetached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.detach().t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, transposed = ctx.saved_tensors
        return gradient @ transposed.t(), gradient.t() @ x


class Product(nn.Module):
    """A product that saves its weight as a tensor of its own, as some checkpointing does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _SavesDetached.apply(x, self.weight)
        return result
