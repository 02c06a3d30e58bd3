"""Decide whether a saved tensor is offloaded, and name the reason if it is not.

Parameters are kept: the ``Parameter`` itself, a view of one (``weight.t()`` in every ``Linear``), and the copy that
autocast makes of one. So are tensors that the user has marked. Both are remembered by storage, so that every other view
of the same memory is recognised; parameters of layers from the start, as a layer may save only ``weight.detach()``.

Traceable wrapper subclasses (with ``__tensor_flatten__``) are offloaded by their inner tensors, each at its own size.
Quantized tensors of Transformer Engine are kept, as their new object would lack what is no tensor; its layers hand
autograd the tensors inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from offload.base.torch_private import CAST_NODE, RESHAPED_NODE

Rebuild = Callable[[list[torch.Tensor]], torch.Tensor]
"""It must not hold the tensors that were taken out of the object: they are to be freed meanwhile."""


class Parts(NamedTuple):
    """The tensors that a subclass is made of, and what makes the subclass of them again."""

    inner: list[torch.Tensor]
    rebuild: Rebuild


_excluded: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()  # why storages are kept

SMALL = "small"  # why a storage below `min_bytes` is kept, in `stats().skipped`

_Tensor, _strided = torch.Tensor, torch.strided  # found faster, and every saved tensor is asked, however small


def exclude(tensor: torch.Tensor, reason: str) -> str:
    """Remember, and return, why the storages that ``tensor`` is made of are kept, whatever looks into them."""
    for storage in _storages_in(tensor):
        _excluded.setdefault(storage, reason)
    return reason


def exclude_parameters(modules: Iterable[torch.nn.Module]) -> None:
    """Remember the storages of all parameters that ``modules`` have now."""
    for module in modules:
        for parameter in module.parameters():
            if not torch.nn.parameter.is_lazy(parameter):
                exclude(parameter, "parameter")


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Keep these tensors, and all views of their storages, on the device for as long as they live.

    Args:
        tensors: Tensors that autograd may save; ``None`` is passed over. Of a subclass, the inner tensors are marked.
    """
    for tensor in given_tensors("mark_not_offload", tensors):
        exclude(tensor, "marked")


def given_tensors(call: str, given: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors that a user's ``call`` is given, ``None`` passed over; a ``TypeError`` for anything else."""
    for tensor in given:
        if isinstance(tensor, torch.Tensor):
            yield tensor
        elif tensor is not None:
            raise TypeError(f"{call} takes tensors, got {type(tensor).__name__}")


class Rules(NamedTuple):
    """Which saved tensors of a layer may be offloaded."""

    device: torch.device  # tensors elsewhere are left alone
    min_bytes: int  # storages below this size are kept


def decide(tensor: torch.Tensor, rules: Rules) -> str | Parts | type:
    """Whether a saved tensor is offloaded.

    Returns:
        The reason why it is kept; the parts of a subclass, each to be decided for itself; or, if it is offloaded, the
        type of the autograd node that made its memory, or of ``None``: the node itself would hold the tensor.
    """
    if type(tensor) is not _Tensor or tensor.layout is not _strided:
        return _decide_other(tensor)
    memory = tensor.untyped_storage()
    nbytes = memory.nbytes()
    if nbytes < rules.min_bytes or not nbytes:
        return SMALL
    exclusion = _excluded.get(memory)
    if exclusion is not None:
        return exclusion
    if tensor.device != rules.device:
        return "device"
    if tensor.is_quantized or tensor.is_nested:
        return "layout"  # although it says that it is strided
    try:
        if not memory.data_ptr():
            return "layout"  # a zero tensor
    except RuntimeError:  # a wrapper's
        return "layout"
    base = tensor._base
    maker = tensor.grad_fn if base is None else base.grad_fn
    if maker is None or type(maker) is CAST_NODE:
        return _held_by_autograd(tensor, maker) or type(maker)
    return type(maker.next_functions[0][0]) if type(maker) is RESHAPED_NODE else type(maker)


def offloaded_parts(tensor: torch.Tensor, rules: Rules) -> Iterator[torch.Tensor]:
    """What of a tensor is offloaded: the tensor, or inner tensors of a subclass."""
    decision = decide(tensor, rules)
    if isinstance(decision, Parts):
        for inner in decision.inner:
            yield from offloaded_parts(inner, rules)
    elif isinstance(decision, type):
        yield tensor


def _decide_other(tensor: torch.Tensor) -> str | Parts:
    """Whether a tensor is offloaded that is a subclass, or not strided."""
    if type(tensor) is torch.Tensor:
        return "layout"
    if isinstance(tensor, torch.nn.Parameter):
        plain = type(tensor) is torch.nn.Parameter and tensor.layout is _strided
        known = plain and tensor.untyped_storage() in _excluded
        return "parameter" if known else exclude(tensor, "parameter")
    maker = tensor.grad_fn if tensor._base is None else tensor._base.grad_fn
    return _held_by_autograd(tensor, maker) or parts_of(tensor) or "subclass"


def _held_by_autograd(tensor: torch.Tensor, maker: Any) -> str | None:
    """``"parameter"`` or ``"leaf"`` if the tensor is, or comes from, a leaf that autograd holds until backward."""
    if maker is not None:
        is_cast = type(maker) is CAST_NODE and _parameter_of(maker.next_functions[0][0]) is not None
        return exclude(tensor, "parameter") if is_cast else None
    base = tensor if tensor._base is None else tensor._base
    needs_none = tensor.requires_grad and not base.requires_grad
    if isinstance(base, torch.nn.Parameter) or (needs_none and _is_inside_parameter(tensor)):
        return exclude(tensor, "parameter")
    return "leaf" if base.requires_grad else None


def _parameter_of(node: Any) -> torch.nn.Parameter | None:
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, torch.nn.Parameter) else None


def _is_inside_parameter(tensor: torch.Tensor) -> bool:
    """Whether a view whose base needs no gradient looks into a parameter that wraps it: ``weight.to_local()``."""
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    parameter = _parameter_of(node)
    if parameter is None or type(tensor) is not torch.Tensor:
        return False
    return tensor.untyped_storage() in _storages_in(parameter)


def parts_of(tensor: torch.Tensor) -> Parts | None:
    """The tensors that a subclass is made of, subclasses themselves perhaps; ``None`` if it does not tell."""
    subclass: Any = tensor
    if hasattr(subclass, "trigger_wait"):
        # The result of a collective that may still run: whoever copies it has to wait for it as compute does.
        return Parts([subclass.trigger_wait()], list.pop)
    if hasattr(subclass, "__tensor_flatten__") and not hasattr(subclass, "prepare_for_saving"):
        return _flattened(subclass)
    return None


def _storages_in(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that a tensor is made of in the end: its own, unless it is a wrapper."""
    parts = None if type(tensor) in (torch.Tensor, torch.nn.Parameter) else parts_of(tensor)
    if parts is not None:
        for inner in parts.inner:
            yield from _storages_in(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def _flattened(tensor: Any) -> Parts:
    names, context = tensor.__tensor_flatten__()
    stays = {name: getattr(tensor, name) for name in names}  # a DTensor names its mesh too, which is no tensor
    # A jagged tensor names its values first. Its ragged size is known by the very object that holds its offsets.
    moves = names[:1] if tensor.layout is torch.jagged else names
    inner = {name: stays.pop(name) for name in moves if isinstance(stays[name], torch.Tensor)}
    kind, taken, size, stride = type(tensor), list(inner), tensor.size(), tensor.stride()

    def rebuild(tensors: list[torch.Tensor]) -> torch.Tensor:
        attributes = stays | dict(zip(taken, tensors, strict=True))
        rebuilt: torch.Tensor = kind.__tensor_unflatten__(attributes, context, size, stride)
        return rebuilt

    return Parts(list(inner.values()), rebuild)
