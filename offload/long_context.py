"""Compute the parts of a model whose memory grows with the sequence in pieces: the loss of its head, and its MLPs.

Both compute token by token, so some tokens can be computed at a time: results differ in the order of sums over tokens
(the loss, gradients of parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from offload.base.attributes import replace_attribute
from offload.base.checks import check_int, check_type, describe
from offload.base.find_layers import as_modules
from offload.base.layer_events import Handle
from offload.base.torch_private import interpreted, leave_to_interpreter
from offload.recompute.state import Settings, drawn_again, states_of


class Undoable(Handle):
    """The handle of :func:`use_chunked_loss` or :func:`tile_mlp`; as a context manager it is removed at the end."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        leave_to_interpreter()
        self._undo = undo

    def remove(self) -> None:
        """Let the modules compute as before. Existing graphs remain valid. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def use_chunked_loss(model: nn.Module, *, chunk_tokens: int | None = None) -> Undoable:
    """Let a causal language model of Hugging Face compute its loss by :func:`offload.chunked_cross_entropy`.

    If the model is given ``labels=``, its output has the same ``loss`` and no ``logits``; without labels nothing
    changes. Other arguments of the loss, such as the trainer's ``num_items_in_batch``, keep their meaning::

        with offload.use_chunked_loss(model):
            model(input_ids=tokens, labels=tokens).loss.backward()

    Args:
        model: The model, or PEFT's wrapper of one. Embeddings may be tied, and the head may be frozen or have a bias.
        chunk_tokens: As in :func:`offload.chunked_cross_entropy`.

    Raises:
        TypeError: The model's head is not an ``nn.Linear``, or its loss is not ``ForCausalLMLoss``; or, when it is
            called, it changes its logits before the loss, for example by a soft cap.
    """
    return chunk_loss(model, chunk_tokens)


def chunk_loss(model: nn.Module, chunk_tokens: int | None, *, evaluates: bool = True) -> Undoable:
    """The same; for ``evaluates=False`` in training alone, from a forward with labels on that has begun."""
    base: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT's wrapper has it
    head = getattr(base, "get_output_embeddings", lambda: None)()
    plain = getattr(base, "loss_function", None)
    loss = getattr(plain, "__name__", None)
    if not isinstance(head, nn.Linear) or loss != "ForCausalLMLoss":
        raise TypeError(
            "the model must have an nn.Linear as its head and ForCausalLMLoss as its loss, got "
            f"{type(head).__name__} and {loss}; call chunked_cross_entropy on its hidden states instead"
        )
    chunked = _ModelLoss(head, chunk_tokens, None if evaluates else plain)
    undo = [
        replace_attribute(head, "forward", chunked.no_logits),
        replace_attribute(base, "_loss_function", chunked.loss),
        base.register_forward_pre_hook(chunked.begin, with_kwargs=True).remove,
        # Before the hook of fully_shard, which would warn of the hidden states.
        base.register_forward_hook(chunked.end, always_call=True, prepend=True).remove,
    ]
    return Undoable(undo)


class _ModelLoss:
    """What replaces the head and the loss of a model; methods, not closures, so that a copy has its own."""

    def __init__(self, head: nn.Linear, chunk_tokens: int | None, plain: Any) -> None:
        self._head, self._chunk_tokens, self._logits = head, chunk_tokens, head.forward
        self._plain, self._evaluates = plain, False  # the loss of evaluation, if that is another one
        self._labelled = plain is not None
        self._hidden: Any = None

    def begin(self, model: nn.Module, _: Any, given: dict[str, Any]) -> None:
        self._evaluates = self._plain is not None and not (model.training and torch.is_grad_enabled())
        self._labelled = given.get("labels") is not None and not self._evaluates

    def no_logits(self, hidden: Any) -> Any:
        self._hidden = hidden if self._labelled else None
        return hidden if self._labelled else self._logits(hidden)

    def loss(self, logits: Any, labels: Any, *more: Any, **given: Any) -> Any:
        if self._evaluates:
            return self._plain(logits, labels, *more, **given)
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

    The result is ``F.cross_entropy((hidden @ weight.T).float(), labels)`` up to the order of sums, float32 or more
    precise; ``create_graph=True`` is refused. The host never waits for the device. Forward computes the gradients as
    well, so backward only multiplies. In bfloat16 forward takes twelve bytes per logit of one chunk, and six bytes per
    element for the gradient of a weight that is not frozen, which is summed in float32.

    Args:
        hidden: The input of the head, of shape ``(…, width)``.
        weight: The weight of the head, of shape ``(vocabulary, width)``.
        labels: Class numbers, of the shape of ``hidden`` without its last dimension.
        bias: The bias of the head, of shape ``(vocabulary,)``.
        chunk_tokens: How many tokens have logits at once; 2,048 by default.
        ignore_index: The label of tokens that do not count.
        num_items: The divisor of the sum over tokens, as Hugging Face's trainer passes ``num_items_in_batch``; by
            default the number of tokens that count, which gives their mean.
    """
    for name, given in (("hidden", hidden), ("weight", weight), ("labels", labels)):
        check_type(name, given, torch.Tensor, "a tensor")
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[1:]:
        got = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"hidden must have shape (…, width) and weight (vocabulary, width), got {got}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels must have shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}")
    check_int("chunk_tokens", tokens := 2048 if chunk_tokens is None else chunk_tokens, least=1)
    labels, hidden = labels.to(hidden.device).reshape(-1), hidden.reshape(-1, hidden.shape[-1])
    chunks, precise = max(1, -(-len(labels) // tokens)), torch.promote_types(hidden.dtype, torch.float32)

    def loss_of(chunk: Tensor, weight: Tensor, bias: Any, labels: Tensor) -> Tensor:
        logits = F.linear(chunk, weight, bias).to(precise)
        return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")

    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (hidden, weight, bias)):
        total: Tensor = _ChunkedLoss.apply(hidden, weight, bias, labels.tensor_split(chunks), loss_of)
    else:
        pairs = zip(hidden.tensor_split(chunks), labels.tensor_split(chunks), strict=True)
        total = sum((loss_of(chunk, weight, bias, part) for chunk, part in pairs), hidden.new_zeros((), dtype=precise))
    items = (labels != ignore_index).sum() if num_items is None else num_items
    return total / (items.to(total.device, non_blocking=True) if isinstance(items, Tensor) else items)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of ``loss_of(chunk, weight, bias, labels)`` over chunks. Forward computes and saves the gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Any, labels: Sequence[Tensor], loss_of: Any) -> Tensor:
        leaves = [_leaf(one) if one is not None and one.requires_grad else one for one in (weight, bias)]
        losses: list[Tensor] = []

        def run(chunk: Tensor) -> Tensor:
            loss: Tensor = loss_of(chunk, *leaves, labels[len(losses)])
            losses.append(loss.detach())
            return loss

        trained = [one for one in leaves if one is not None and one.requires_grad]
        x_needed, *others = ctx.needs_input_grad[:3]
        of_hidden, *of_others = _gradients(run, hidden, [None] * len(labels), trained, x_needed=x_needed)
        rest = iter(of_others)
        if torch.is_autocast_enabled(hidden.device.type):
            torch.clear_autocast_cache()  # of the leaves' casts, which nobody else will use
        ctx.save_for_backward(of_hidden, *(next(rest) if needed else None for needed in others))
        ctx.dtypes = [None if one is None else one.dtype for one in (hidden, weight, bias)]
        return sum(losses[1:], losses[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _check_first_gradient("a loss in chunks")
        factor = gradient.reshape(1)  # with one dimension: a scalar would be rounded to the dtype of the other factor
        known = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        made = (
            one if one is None else torch.mul(one, factor, out=torch.empty_like(one, dtype=to)) for one, to in known
        )
        return (*made, None, None)


def tile_mlp(layers: Iterable[nn.Module], tokens: int = 32768, *, mlp: str = "mlp") -> Undoable:
    """Run each layer's MLP over tiles of at most ``tokens`` tokens, in forward and again in backward.

    Forward saves the MLP's input alone. Backward recomputes one tile and its gradients, then the next tile, so no
    intermediate tensor is longer than a tile. That costs the MLP's forward once more; nothing if the layer is
    checkpointed and the MLP comes last, because the layer's recomputation stops at the MLP's input.

    Outputs and gradients of inputs have the same bits as without tiles if the kernels of matrix products round alike
    for both sizes. Gradients of parameters are sums over tiles, made in float32 or better, and round in another order.
    A parameter's hooks run once, on the sum. Hooks on the MLP's submodules run for each tile, in forward and in
    backward. Backward uses the parameters, flags and random numbers of forward, or raises an error that names what has
    changed.

    Args:
        layers: The layers, as :func:`offload.offload_layers` and :func:`offload.stream_weights` take them.
        tokens: Tokens in a tile, counted over the whole batch.
        mlp: The name of the MLP in each layer. The MLP must take one tensor of shape ``(batch, tokens, width)`` or
            ``(tokens, width)`` and return another, compute each token by itself, compute with its own parameters alone,
            and change none of its attributes and buffers. Only its output may have a gradient: the loss must not use a
            router's logits, for example. An MLP that cannot run in tiles raises a ``TypeError`` when it is called.
    """
    check_int("tokens", tokens, least=1)
    mlps: list[Any] = [getattr(layer, mlp, None) for layer in as_modules(layers)]
    for number, module in enumerate(mlps):
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"layer {number} must have a module {mlp!r}, got {describe(module)}; give its name as mlp=…"
            )
        if is_tiled(module):
            raise ValueError(f"{mlp!r} of layer {number} is tiled already; call remove() on the first handle")
    undo = []
    for number, one in enumerate(mlps):
        label = f"{mlp!r} of layer {number} ({type(one).__name__})"
        undo.append(replace_attribute(one, "forward", partial(_in_tiles, label, one, one.forward, tokens)))
    return Undoable(undo)


def is_tiled(mlp: Any) -> bool:
    """Whether :func:`tile_mlp` runs this MLP."""
    return getattr(getattr(mlp, "forward", None), "func", None) is _in_tiles


@interpreted
def _in_tiles(label: str, mlp: nn.Module, whole: Callable[[Tensor], Tensor], tokens: int, *given: Any) -> Any:
    """The ``forward`` of a tiled MLP: ``whole`` for one tile after another."""
    if len(given) != 1 or not isinstance(given[0], Tensor):
        raise _refusal(label, f"be called with one tensor, got {', '.join(map(describe, given))}")
    x: Tensor = given[0]
    tiles = 1 if x.ndim < 2 else min(-(-x.shape[:-1].numel() // tokens), x.shape[-2])
    if tiles <= 1:
        return whole(x)
    parameters: dict[str, Tensor] = dict(mlp.named_parameters())
    # Before the MLP runs: a checkpoint stops its recomputation as soon as all that was saved is there.
    saved: Any = _Save.apply(x.new_empty(0, requires_grad=True), [x, *parameters.values()])
    graph = not torch.is_inference_mode_enabled()  # else nothing has a node
    trained = {get_gradient_edge(one).node: name for name, one in parameters.items() if one.requires_grad and graph}
    ends = {*trained, *([get_gradient_edge(x).node] if x.requires_grad and graph else [])}
    state, settings, generators, x_needed = _state(mlp), Settings.now(x.device), _Generators(x.device), x.requires_grad
    parts, reached = list[Tensor](), set[Any]()
    # A tile's graph saves nothing: if the loss uses another tensor than the output, its backward raises an error.
    with generators, saved_tensors_hooks(lambda _: label, _refuse_gradient):
        for tile in x.tensor_split(tiles, -2):
            part = whole(tile)
            if not isinstance(part, Tensor) or part.shape[:-1] != tile.shape[:-1]:
                got = f"the shape {tuple(part.shape)}" if isinstance(part, Tensor) else describe(part)
                raise _refusal(label, f"return one tensor with its input's tokens {tuple(tile.shape[:-1])}, got {got}")
            reached |= _ends_of(part, ends)
            parts.append(part.detach())
    if others := reached - ends:
        shape = tuple(others.pop().variable.shape)
        raise _refusal(label, f"use its input and parameters alone, got another leaf of autograd, of shape {shape}")
    if changed := _difference(state, _state(mlp)):
        raise _refusal(label, f"leave its attributes and buffers as they are, but its forward changes {changed}")
    if not reached:
        return torch.cat(parts, -2)
    names, used = list(parameters), [name for node, name in trained.items() if node in reached]
    # A subclass, such as a quantized weight, has attributes that a saved tensor lacks.
    special = {name: one for name, one in parameters.items() if type(one) not in (Tensor, nn.Parameter)}

    def backward(gradient: Tensor) -> Any:
        if changed := _difference(state, _state(mlp)):
            raise RuntimeError(f"{changed} of {label} has changed since forward, but its tiles run again in backward")
        x, *values = saved.grad_fn.saved_tensors
        found = dict(zip(names, values, strict=True))
        leaves = {name: _leaf(found[name]) for name in used}
        shown = {f"mlp.{name}": one for name, one in (found | special | leaves).items()}
        pieces = gradient.tensor_split(tiles, -2)
        compute = partial(_gradients, whole, x, pieces, list(leaves.values()), x_needed=x_needed)
        with settings.again(), drawn_again(generators.states):
            gradients = torch.func.functional_call(_Caller(mlp), shown, (compute,))
        for name, one in zip(used, gradients[1:], strict=True):
            if one is None:
                raise _refusal(label, f"use the same parameters in backward as in forward, but {name} got no gradient")
        return gradients

    return _Tiled.apply(torch.cat(parts, -2), backward, saved, x, *(parameters[name] for name in used))


def _refusal(label: str, must: str) -> TypeError:
    return TypeError(f"{label} runs in tiles, so it must {must}; tile others only")


class _Caller(nn.Module):
    """Calls a function; ``functional_call`` gives ``mlp`` other parameters meanwhile."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class _Save(torch.autograd.Function):
    """Saves tensors in a node of their own. Backward comes to it right after the node that reads and so frees them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


class _Tiled(torch.autograd.Function):
    """``output``; ``backward`` returns the gradients of ``inputs``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, backward: Callable[[Tensor], Any], _: Tensor, *inputs: Tensor) -> Tensor:
        ctx.compute = backward
        return output.detach()  # returned as it is, it would be a view, which nobody may change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _check_first_gradient("an MLP in tiles")
        return None, None, None, *ctx.compute(gradient)


class _Generators(TorchFunctionMode):
    """While entered, notes the state of each generator before anything draws from it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.states = states_of((), [device])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.Generator) and value not in self.states:
                self.states[value] = value.get_state()
        return func(*args, **(kwargs or {}))


def _refuse_gradient(label: str) -> Tensor:
    inside = "but the loss uses a tensor from inside of it, such as a router's logits"
    raise RuntimeError(f"{label} runs in tiles, so only its output may have a gradient, {inside}; tile others only")


def _state(mlp: nn.Module) -> dict[str, object]:
    """Attributes and buffers of an MLP, which decide about its forward, each with a name for errors."""
    found: dict[str, object] = {}
    for name, module in mlp.named_modules():
        found |= {f"{name}.{key}".lstrip("."): value for key, value in vars(module).items()}
    found.pop("forward", None)  # the tiles themselves: they may be removed before backward
    for name, buffer in mlp.named_buffers():
        found[name] = buffer
        found[f"{name} (in place)"] = 0 if buffer.is_inference() else buffer._version
    return found


def _difference(before: dict[str, object], now: dict[str, object]) -> str | None:
    """The name of something that is not what it was."""
    for name in before | now:
        one, other = (found.get(name, _Caller) for found in (before, now))
        if one is not other and not (isinstance(one, bool | int | float | str) and one == other):
            return name
    return None


def _check_first_gradient(what: str) -> None:
    """Refuse a graph of gradients: ``once_differentiable`` would refuse it only where the incoming gradient has one."""
    if torch.is_grad_enabled():
        instead = "compute it in one piece; for that, prepare needs a larger memory_budget"
        raise RuntimeError(f"create_graph=True must not be used with {what}, got it in backward; {instead}")


def _leaf(tensor: Tensor) -> nn.Parameter:
    """The same values without the tensor's hooks: those shall run once, on the sum of its gradients."""
    return nn.Parameter(tensor.detach())


def _ends_of(output: Any, ends: set[Any]) -> set[Any]:
    """The nodes at which the graph of ``output`` ends: some of ``ends``, and those of leaves."""
    waiting, seen = {output.grad_fn} - {None}, set[Any]()
    while waiting:
        seen.add(node := waiting.pop())
        if node not in ends:
            waiting |= {before for before, _ in node.next_functions} - seen - {None}
    return {node for node in seen if node in ends or hasattr(node, "variable")}


def _gradients(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    *,
    x_needed: bool,
) -> list[Tensor | None]:
    """The gradients of ``x``, if needed, and of ``parameters``, from one piece of ``x`` after another.

    ``gradients`` are those of the output of ``run`` for each piece, or ``None`` for a scalar that counts as it is.
    Those of parameters are summed in float32 or better; ``None`` for a parameter that was not used.
    """
    whole = torch.zeros_like(x) if x_needed else None
    sums: list[Any] = [None] * len(parameters)
    pieces = len(gradients)
    places = [None] * pieces if whole is None else whole.tensor_split(pieces, -2)
    for piece, gradient, place in zip(x.tensor_split(pieces, -2), gradients, places, strict=True):
        # In place of any hooks around: what a piece saves is freed in a moment.
        with torch.enable_grad(), saved_tensors_hooks(lambda one: (one.detach(), one._version), _unchanged):
            leaf = piece.detach().requires_grad_(x_needed)
            wanted = [*parameters, leaf] if x_needed else parameters
            found: Any = list(torch.autograd.grad(run(leaf), wanted, gradient, allow_unused=True))
        if place is not None and (of_piece := found.pop()) is not None:
            place.copy_(of_piece)
        for index, one in enumerate(found):
            if one is not None:
                precise = torch.promote_types(one.dtype, torch.float32)
                sums[index] = one.to(precise, copy=True) if sums[index] is None else sums[index].add_(one)
        of_piece = one = found = None  # freed before the next piece runs
    return [whole, *sums]


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if tensor._version != version:
        shape = tuple(tensor.shape)
        raise RuntimeError(f"a tensor of shape {shape} was changed in place after it was saved; change a clone instead")
    return tensor
