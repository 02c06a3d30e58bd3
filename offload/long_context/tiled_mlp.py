"""A layer's MLP over one tile of tokens after the other: what it computes in between is of a tile's size.

An MLP sees each token by itself, so nothing changes but the order of sums over tokens, in gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from offload.base.autograd import keeps_graph
from offload.base.checks import check_int
from offload.base.layer_events import Handle, replace_attribute
from offload.recompute.random import RandomState, default_generator


class TiledMLPs(Handle):
    """MLPs that run in tiles; made by :func:`tile_mlp`, undone by :meth:`remove` or at the end of the block."""

    def __init__(self, mlps: list[nn.Module], tokens: int) -> None:
        self._undo = [replace_attribute(mlp, "forward", _Tiled(mlp, mlp.forward, tokens)) for mlp in mlps]

    def remove(self) -> None:
        """Let the MLPs run whole again. Graphs that exist stay valid. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def tile_mlp(layers: Iterable[nn.Module], tokens: int = 32768, *, mlp: str = "mlp") -> TiledMLPs:
    """Run each layer's MLP over tiles of at most ``tokens`` tokens, in forward and once more in backward.

    Forward saves the MLP's input alone. Backward computes a tile and its gradients, and then the next one, so that no
    intermediate tensor is longer than a tile. That costs the MLP's forward once more; where the layer is checkpointed
    and the MLP comes last, it costs nothing, because recomputation stops at the MLP's input.

    Outputs and gradients of inputs have the same bits as without tiles where the kernels of matrix products round alike
    for both sizes. Gradients of parameters are sums over tiles, made in float32 or better, and round in another order.
    At most ``tokens`` tokens run as if there were no tiles.

    Args:
        layers: The layers, as :func:`offload.offload_layers` and :func:`offload.stream_weights` take them.
        tokens: Tokens in a tile, counted over the whole batch.
        mlp: The name of the MLP in each layer. It must take one tensor of shape ``(batch, tokens, width)`` or
            ``(tokens, width)`` and return another, and treat each token by itself.

    Returns:
        A handle with ``remove()``, which is also a context manager.

    Raises:
        ValueError: A layer has no such MLP, or it is tiled already.
    """
    check_int("tokens", tokens, least=1)
    found = []
    for number, layer in enumerate(layers):
        module = getattr(layer, mlp, None)
        if not isinstance(module, nn.Module):
            raise ValueError(f"layers must have a module {mlp!r}, got {type(layer).__name__} at {number}; give mlp=…")
        if isinstance(vars(module).get("forward"), _Tiled):
            raise ValueError(f"{mlp!r} of layer {number} is tiled already; call remove() on the first handle")
        found.append(module)
    return TiledMLPs(found, tokens)


class _Tiled:
    """Stands in for an MLP's ``forward``."""

    def __init__(self, mlp: nn.Module, whole: Callable[[Tensor], Tensor], tokens: int) -> None:
        self._mlp = mlp
        self._whole = whole
        self._tokens = tokens

    def __call__(self, x: Tensor) -> Tensor:
        tiles = min(-(-x[..., 0].numel() // self._tokens), x.shape[-2])
        if tiles <= 1:
            return self._whole(x)
        saved = _Saved.apply(x.new_empty(0, requires_grad=True), x)
        # The parameters are those of now: streamed weights are others in each forward.
        output: Tensor = _InTiles.apply(self._mlp, self._whole, tiles, [saved], x, *_trained(self._mlp))
        return output


def _trained(mlp: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in mlp.parameters() if parameter.requires_grad]


class _Saved(torch.autograd.Function):
    """Saves the MLP's input before the MLP runs: a checkpoint stops as soon as it has all that was saved again."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return empty.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


class _InTiles(torch.autograd.Function):
    """The MLP. Parameters are among its inputs, so that autograd is given one gradient of each."""

    @staticmethod
    def forward(
        ctx: Any,
        mlp: nn.Module,
        whole: Callable[[Tensor], Tensor],
        tiles: int,
        saved: list[Tensor],
        x: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        kind = x.device.type
        ctx.mlp, ctx.whole, ctx.tiles, ctx.saved = mlp, whole, tiles, saved[0]
        ctx.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.random = [RandomState(default_generator(device)) for device in {x.device, torch.device("cpu")}]
        first, *others = x.tensor_split(tiles, dim=-2)
        begin = whole(first)
        if not isinstance(begin, Tensor):
            raise TypeError(
                f"the MLP must return a tensor to run in tiles, got {type(begin).__name__}; tile others only"
            )
        output = begin.new_empty(*x.shape[:-1], begin.shape[-1])
        parts = output.tensor_split(tiles, dim=-2)
        parts[0].copy_(begin)
        del begin
        for tile, part in zip(others, parts[1:], strict=True):
            part.copy_(whole(tile))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved.grad_fn.saved_tensors
        if not keeps_graph():
            ctx.saved = None
        wants_x = ctx.needs_input_grad[4]
        x_grad = torch.empty_like(x) if wants_x else None
        parameters = _trained(ctx.mlp)
        sums: list[Tensor | None] = [None] * len(parameters)
        split = (x, gradient, x if x_grad is None else x_grad)
        tiles, parts, places = (tensor.tensor_split(ctx.tiles, dim=-2) for tensor in split)
        with ExitStack() as stack:
            for state in ctx.random:
                stack.enter_context(state)
            for of_graph, part, place in zip(tiles, parts, places, strict=True):
                tile = of_graph.detach().requires_grad_(wants_x)
                with torch.enable_grad(), ctx.autocast:
                    output = ctx.whole(tile)
                wanted = [tile, *parameters] if wants_x else parameters
                found = list(torch.autograd.grad(output, wanted, part, allow_unused=True))
                del output  # before the next tile computes
                if wants_x:
                    place.copy_(found.pop(0))
                for index, one in enumerate(found):
                    if one is not None:
                        total = sums[index]
                        precise = torch.promote_types(one.dtype, torch.float32)
                        sums[index] = one.to(precise, copy=True) if total is None else total.add_(one)
        given = (None if total is None else total.to(p.dtype) for total, p in zip(sums, parameters, strict=True))
        return None, None, None, None, x_grad, *given
