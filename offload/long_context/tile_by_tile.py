"""What is long in tokens only, tile by tile: the head with its loss, whose logits are the largest tensors, and MLPs.

Each treats every token by itself. So it runs for some tokens after others, and what it computes in between is of a
tile's size. Nothing changes but the order of sums over tokens: in the loss, and in gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.base.checks import check_int, describe
from offload.base.layer_events import Handle, replace_attribute
from offload.base.torch_private import interpreted, leave_to_interpreter
from offload.recompute.random import RandomState, default_generator


class Undoable(Handle):
    """What :func:`use_chunked_loss` or :func:`tile_mlp` has changed; a context manager that undoes it at its end."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        leave_to_interpreter()
        self._undo = undo

    def remove(self) -> None:
        """Let the modules compute as before. Graphs that exist stay valid. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def use_chunked_loss(model: nn.Module, *, chunk_tokens: int | None = None) -> Undoable:
    """Let a causal language model of Hugging Face compute its loss by :func:`offload.chunked_cross_entropy`.

    Where the model is given ``labels=``, its output has the same ``loss`` and no ``logits``. Without labels nothing
    changes. What a trainer gives beside the labels, such as ``num_items_in_batch``, means what it means without this::

        with offload.use_chunked_loss(model):
            model(input_ids=tokens, labels=tokens).loss.backward()

    Args:
        model: The model, or PEFT's wrapper of one. Embeddings may be tied, and the head may be frozen or have a bias.
        chunk_tokens: As in :func:`offload.chunked_cross_entropy`.

    Returns:
        A handle with ``remove()``, which is also a context manager.

    Raises:
        TypeError: The model is none of these: its head is not an ``nn.Linear``, or its loss is another. One that
            changes its logits before the loss, as by a soft cap, raises it when it is called.
    """
    base: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT's wrapper has it
    head = getattr(base, "get_output_embeddings", lambda: None)()
    loss = getattr(getattr(base, "loss_function", None), "__name__", None)
    if not isinstance(head, nn.Linear) or loss != "ForCausalLMLoss":
        raise TypeError(
            "the model must have an nn.Linear as its head and ForCausalLMLoss as its loss, got "
            f"{type(head).__name__} and {loss}; call chunked_cross_entropy on its hidden states instead"
        )
    chunked = _Loss(head, chunk_tokens)
    undo = [
        replace_attribute(head, "forward", chunked.no_logits),
        replace_attribute(base, "_loss_function", chunked.loss),
        base.register_forward_pre_hook(chunked.begin, with_kwargs=True).remove,
        base.register_forward_hook(chunked.end, always_call=True).remove,
    ]
    return Undoable(undo)


class _Loss:
    """What a model is given. These are methods, and not functions in one, so that a copy of the model has its own."""

    def __init__(self, head: nn.Linear, chunk_tokens: int | None) -> None:
        self._head, self._chunk_tokens, self._logits, self._labelled = head, chunk_tokens, head.forward, False
        self._hidden: Any = None

    def begin(self, _: nn.Module, __: Any, given: dict[str, Any]) -> None:
        self._labelled = given.get("labels") is not None

    def no_logits(self, hidden: Any) -> Any:
        self._hidden = hidden if self._labelled else None
        return hidden if self._labelled else self._logits(hidden)

    def loss(self, logits: Any, labels: Any, *_: Any, **given: Any) -> Tensor:
        if logits is not self._hidden:
            raise TypeError("labels must be given by name, logits as the head makes them; call chunked_cross_entropy")
        ignore_index, shifted = given.get("ignore_index", -100), given.get("shift_labels")
        shifted = F.pad(labels[..., 1:], (0, 1), value=ignore_index) if shifted is None else shifted.view_as(labels)
        options = {"ignore_index": ignore_index, "num_items": given.get("num_items_in_batch"), "bias": self._head.bias}
        return chunked_cross_entropy(logits, self._head.weight, shifted, chunk_tokens=self._chunk_tokens, **options)

    def end(self, _: nn.Module, __: Any, output: Any) -> Any:
        hidden, self._hidden, self._labelled = self._hidden, None, False
        if hidden is None or output is None:  # no labels, or an error
            return output
        if isinstance(output, tuple):
            return tuple(value for value in output if value is not hidden)
        return type(output)(**{key: value for key, value in output.items() if value is not hidden})


@interpreted
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """The cross entropy of ``hidden @ weight.T`` and ``labels``, with logits for ``chunk_tokens`` tokens at a time.

    It is ``F.cross_entropy((hidden @ weight.T).float(), labels)`` up to the order of sums, and nothing waits for the
    device. Forward computes the gradients, too, so that backward needs no logits, and only multiplies. In bfloat16 that
    takes twelve bytes per logit of one chunk for a moment, and six per element for the weight's gradient: it is added
    up in float32, where a sum of many chunks in bfloat16 would lose what the last ones add. A frozen weight takes none.

    Args:
        hidden: What the head is given, of shape ``(…, width)``.
        weight: The head's, of shape ``(vocabulary, width)``.
        labels: Class numbers, of the shape of ``hidden`` without its last dimension.
        bias: The head's, of shape ``(vocabulary,)``.
        chunk_tokens: How many tokens have logits at once. By default 2,048; but where ``liger_kernel`` is installed,
            its fused kernel is called on CUDA, if ``hidden`` requires a gradient: without that it computes none. It is
            faster, sizes its chunks itself, computes the gradient of logits in their own dtype, and waits for the
            device twice.
        ignore_index: The label of tokens that do not count.
        num_items: What the sum over tokens is divided by, as Hugging Face's trainer passes ``num_items_in_batch``: a
            number, or a tensor of one. By default, the number of tokens that count, for their mean.

    Returns:
        A scalar, float32 or more precise. Its graph is differentiable once.

    Raises:
        ValueError: Shapes do not match, or ``chunk_tokens`` is less than 1.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels must have shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}")
    labels, hidden = labels.to(hidden.device).reshape(-1), hidden.reshape(-1, hidden.shape[-1])
    total: Tensor = _sum_of_losses(hidden, weight, bias, labels, chunk_tokens, ignore_index)
    items = (labels != ignore_index).sum() if num_items is None else num_items
    return total / (items.to(total.device, non_blocking=True) if isinstance(items, Tensor) else items)


def _sum_of_losses(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, given: int | None, ignored: int) -> Any:
    check_int("chunk_tokens", tokens := 2048 if given is None else given, least=1)
    if given is None and hidden.is_cuda and hidden.requires_grad and find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused

        options = {"ignore_index": ignored, "reduction": "sum", "accum_dtype": torch.float32}
        return fused(hidden, weight, labels, bias, **options)
    chunks, precise = max(1, -(-len(labels) // tokens)), torch.promote_types(hidden.dtype, torch.float32)
    losses, of_chunk = [], iter(labels.tensor_split(chunks))

    def run(chunk: Tensor) -> Tensor:
        logits = F.linear(chunk, weight, bias).to(precise)
        loss = F.cross_entropy(logits, next(of_chunk), ignore_index=ignored, reduction="sum")
        losses.append(loss.detach())
        return loss

    if not torch.is_grad_enabled():
        return sum(run(chunk) for chunk in hidden.tensor_split(chunks))
    trained = [one for one in (weight, bias) if one is not None and one.requires_grad]
    dtypes = [one.dtype for one in (hidden, *trained)]
    saved = _Node.apply(hidden.new_empty(0, requires_grad=True), None, *_gradients(run, chunks, hidden, None, trained))

    def backward(gradient: Tensor) -> list[Tensor | None]:
        factor = gradient.reshape(1)  # of one dimension, so that it is not rounded to the dtype of what it multiplies
        known = zip(saved.grad_fn.saved_tensors, dtypes, strict=True)
        return [None, *(torch.mul(one, factor, out=torch.empty_like(one, dtype=dtype)) for one, dtype in known)]

    return _Node.apply(sum(losses), backward, saved, hidden, *trained)


def tile_mlp(layers: Iterable[nn.Module], tokens: int = 32768, *, mlp: str = "mlp") -> Undoable:
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
    mlps: list[Any] = [getattr(layer, mlp, None) for layer in layers]
    for number, module in enumerate(mlps):
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"layer {number} must have a module {mlp!r}, got {describe(module)}; give its name as mlp=…"
            )
        if getattr(module.forward, "func", None) is _in_tiles:
            raise ValueError(f"{mlp!r} of layer {number} is tiled already; call remove() on the first handle")
    return Undoable([replace_attribute(one, "forward", partial(_in_tiles, one, one.forward, tokens)) for one in mlps])


def _in_tiles(mlp: nn.Module, whole: Callable[[Tensor], Tensor], tokens: int, x: Tensor) -> Any:
    """What stands in for an MLP's ``forward``: a node, whose inputs are ``x`` and all parameters."""
    tiles = min(-(-x[..., 0].numel() // tokens), x.shape[-2])
    if tiles <= 1:
        return whole(x)
    # Before the MLP runs: a checkpoint stops as soon as it has all that was saved again.
    saved, kind = _Node.apply(x.new_empty(0, requires_grad=True), None, x), x.device.type
    run = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))(whole)
    cpu, device = (RandomState(default_generator(one)) for one in (torch.device("cpu"), x.device))
    with torch.no_grad():
        parts = [whole(tile) for tile in x.tensor_split(tiles, -2)]
    if not isinstance(parts[0], Tensor):
        raise TypeError(f"the MLP must return a tensor to run in tiles, got {describe(parts[0])}; tile others only")

    def backward(gradient: Tensor) -> list[Tensor | None]:
        with cpu, device:
            return [None, *_gradients(run, tiles, saved.grad_fn.saved_tensors[0], gradient, _trained(mlp))]

    return _Node.apply(torch.cat(parts, -2), backward, saved, x, *_trained(mlp))


def _trained(mlp: nn.Module) -> list[nn.Parameter]:
    """Asked for in each forward and in each backward: streamed weights are others then."""
    return [parameter for parameter in mlp.parameters() if parameter.requires_grad]


def _gradients(run: Any, tiles: int, x: Tensor, gradient: Tensor | None, parameters: Sequence[Tensor]) -> list[Any]:
    """Run each tile of ``x`` when the gradients of the one before are there; those for ``x``, and for each parameter.

    The latter are added up in float32 or better, and ``None`` for one that was not used. ``gradient`` is that of all
    outputs together, or ``None`` where each is a scalar that counts as it is.
    """
    sums: list[Any] = [torch.empty_like(x), *(None for _ in parameters)]
    parts = [None] * tiles if gradient is None else gradient.tensor_split(tiles, -2)
    for tile, part, place in zip(x.tensor_split(tiles, -2), parts, sums[0].tensor_split(tiles, -2), strict=True):
        # No other hooks than these: what a tile saves is gone in a moment.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
            leaf = tile.detach().requires_grad_()
            found: Any = torch.autograd.grad(run(leaf), [leaf, *parameters], part, allow_unused=True)
        place.copy_(found[0])
        for index, one in enumerate(found[1:], start=1):
            if one is not None:
                precise = torch.promote_types(one.dtype, torch.float32)
                sums[index] = one.to(precise, copy=True) if sums[index] is None else sums[index].add_(one)
        one = found = None  # gone before the next tile runs
    return sums


class _Node(torch.autograd.Function):
    """``output``, whose backward is a function that is given its gradient.

    Without one it saves the other inputs, for the backward of the node that it is an input of. Autograd comes to it
    right after that, and lets go of them.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, backward: Callable[[Tensor], Any] | None, *inputs: Tensor) -> Tensor:
        ctx.run = backward
        ctx.save_for_backward(*(inputs if backward is None else ()))
        return output.detach()  # and not as it is: that would be a view, which nobody may change in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(ctx.run(gradient) if ctx.run else [None] * (len(ctx.needs_input_grad) - 2))
