"""What weight streaming is measured with: a stack of decoder blocks, and the time of each phase of its step."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from benchmarks.instruments import synchronize
from benchmarks.workloads import DecoderBlock, loss_of


@dataclass(frozen=True)
class Size:
    """What is measured: a stack of decoder blocks, and inputs for it."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    dtype: torch.dtype
    few: tuple[int, int]
    """Batch and tokens where the link binds; each layer is recomputed."""
    many: tuple[int, int]
    """Batch and tokens where compute binds; each layer is recomputed and most of their inputs are offloaded."""
    offloaded: int
    """How many layers' inputs are offloaded with ``many`` tokens."""

    def build(self, device: torch.device) -> nn.ModuleList:
        """The layers."""
        torch.manual_seed(0)
        with torch.device(device):
            return nn.ModuleList(
                DecoderBlock(self.hidden, self.ffn, self.heads).to(self.dtype) for _ in range(self.layers)
            )

    def inputs(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        """One microbatch, which requires a gradient."""
        return torch.randn(*shape, self.hidden, device=device, dtype=self.dtype).requires_grad_()


LARGE = Size(4096, 11008, 32, 48, torch.bfloat16, (1, 2048), (4, 4096), 40)
SMALL = Size(64, 172, 4, 6, torch.float32, (1, 32), (2, 64), 3)


@dataclass
class Times:
    """Seconds of the parts of a step, a value for each repeat."""

    forward_s: list[float]
    backward_s: list[float]

    @property
    def step_s(self) -> float:
        """Median of the whole step."""
        return statistics.median(map(sum, zip(self.forward_s, self.backward_s, strict=True)))

    def medians(self) -> tuple[float, float]:
        """Of forward and of backward."""
        return statistics.median(self.forward_s), statistics.median(self.backward_s)


class Stack(nn.Module):
    """The layers one after the other, each recomputed, the inputs of the first ``offloaded`` offloaded."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.offload(0)

    def offload(self, offloaded: int, device: torch.device | None = None) -> None:
        """Offload so many layers' inputs from now on."""
        self.context, self.sync = offload.get_cpu_offload_context(
            offloaded > 0, max(offloaded, 1), len(self.layers), min_bytes=1, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            with self.context:
                y = checkpoint(layer, x, use_reentrant=False)
            x = self.sync(y)
        return loss_of(x)


class Step:
    """Forward and backward."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model = model
        self.x = x

    def __call__(self) -> None:
        self.model(self.x).backward()

    def zero_grad(self) -> None:
        """As an optimizer does it."""
        self.model.zero_grad()
        self.x.grad = None

    def measure(self, *, warmup: int, repeats: int) -> Times:
        """Both phases, from an idle device to an idle device; gradients are ``None`` at the start."""
        times = Times([], [])
        for number in range(warmup + repeats):
            self.zero_grad()
            synchronize(self.x.device)
            begin = time.perf_counter()
            loss = self.model(self.x)
            reached = _mark(self.x.device)
            loss.backward()
            synchronize(self.x.device)
            end = time.perf_counter()
            if number >= warmup:
                forward_s = reached(begin)
                times.forward_s.append(forward_s)
                times.backward_s.append(end - begin - forward_s)
        return times


def _mark(device: torch.device) -> Callable[[float], float]:
    """When compute reaches this point of the program: a function from a host time to the seconds since then."""
    if device.type == "cpu":
        now = time.perf_counter()
        return lambda begin: now - begin
    reached, idle = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    reached.record()

    def since(begin: float) -> float:
        idle.record()
        idle.synchronize()
        return time.perf_counter() - begin - reached.elapsed_time(idle) / 1e3

    return since
