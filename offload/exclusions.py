"""Which saved tensors do not travel, and why.

Parameters stay: the ``Parameter`` itself, a view of one (``weight.t()`` in every ``Linear``), and the copy that
autocast makes of one. So do tensors that the user has marked. Both are remembered by storage, so that
whatever else looks into the same memory is recognised too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.subclasses import inner_tensors


class _Exclusion(NamedTuple):
    # While the weak reference lives, no other storage can have the same address.
    storage: StorageWeakRef
    reason: str


class _Exclusions(dict[int, _Exclusion]):
    """By the storage's address; what has died is dropped whenever the number has doubled."""

    def __init__(self) -> None:
        super().__init__()
        self._prune_at = 1024

    def add(self, storage: torch.UntypedStorage, reason: str) -> None:
        if len(self) >= self._prune_at:
            for key in [key for key, exclusion in self.items() if exclusion.storage.expired()]:
                del self[key]
            self._prune_at = 2 * len(self) + 1024
        self[storage._cdata] = _Exclusion(StorageWeakRef(storage), reason)


_excluded = _Exclusions()

_Cast: Any = vars(torch._C._functions)["ToCopyBackward0"]
"""What autocast does to a parameter."""


def exclude(tensor: torch.Tensor, reason: str) -> None:
    """Remember that the storage of ``tensor`` does not travel."""
    _excluded.add(tensor.untyped_storage(), reason)


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Keep these tensors, and all views of their storages, on the device for as long as they live.

    Args:
        tensors: Tensors that autograd may save; ``None`` is passed over. Of a tensor subclass, the inner tensors
            are marked.

    Raises:
        TypeError: An argument is neither a tensor nor ``None``.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"mark_not_offload takes tensors, got {type(tensor).__name__}")
        for inner in inner_tensors(tensor):
            exclude(inner, "marked")


def reason_to_stay(tensor: torch.Tensor, device: torch.device, min_bytes: int) -> str | None:
    """Why a saved tensor does not travel, or ``None`` if it does.

    ``"subclass"`` means that its inner tensors are to be asked, where it has any.
    """
    if type(tensor) is not torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            _remember_parameter(tensor)
            return "parameter"
        return _held_by_autograd(tensor) or "subclass"
    if tensor.layout is not torch.strided:
        return "layout"
    storage = tensor.untyped_storage()
    exclusion = _excluded.get(storage._cdata)
    if exclusion is not None:
        return exclusion.reason
    if tensor.device != device:
        return "device"
    if storage.nbytes() < min_bytes or not storage.nbytes():
        return "small"
    return _held_by_autograd(tensor)


def _held_by_autograd(tensor: torch.Tensor) -> str | None:
    """What the tensor is or comes from that autograd holds until backward anyway: a parameter, or another leaf."""
    base = tensor._base
    if base is None:
        base = tensor
    node = base.grad_fn
    if node is not None:
        is_parameter = type(node) is _Cast and _is_parameter_of(node.next_functions[0][0])
    else:
        is_parameter = isinstance(base, torch.nn.Parameter)
    if is_parameter or (tensor.requires_grad and not base.requires_grad and _is_inside_parameter(tensor)):
        _remember_parameter(tensor)
        return "parameter"
    return "leaf" if node is None and base.requires_grad else None


def _remember_parameter(tensor: torch.Tensor) -> None:
    for inner in inner_tensors(tensor):
        has_storage = type(inner) in (torch.Tensor, torch.nn.Parameter) and inner.layout is torch.strided
        if has_storage and inner.untyped_storage()._cdata not in _excluded:
            exclude(inner, "parameter")


def _is_parameter_of(node: Any) -> bool:
    """Whether a node is where the gradient of a parameter is added up."""
    return isinstance(getattr(node, "variable", None), torch.nn.Parameter)


def _is_inside_parameter(tensor: torch.Tensor) -> bool:
    """Whether a view whose base needs no gradient looks into a parameter that wraps it: ``weight.to_local()``."""
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    parameter = getattr(node, "variable", None)
    if not isinstance(parameter, torch.nn.Parameter) or type(tensor) is not torch.Tensor:
        return False
    storage = tensor.untyped_storage()._cdata
    return any(inner.untyped_storage()._cdata == storage for inner in inner_tensors(parameter))
