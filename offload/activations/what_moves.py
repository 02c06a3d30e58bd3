"""Which saved tensors do not travel, and why.

Parameters stay: the ``Parameter`` itself, a view of one (``weight.t()`` in every ``Linear``), and the copy that
autocast makes of one. So do tensors that the user has marked. Both are remembered by storage, so that
whatever else looks into the same memory is recognised too.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.subclasses import inner_tensors
from offload.activations.waste import maker_of


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

_KEYS = torch._C.DispatchKey.__members__
_DENSE: int = torch._C.DispatchKeySet(_KEYS["Dense"]).raw_repr()
_ORDINARY_KEYS = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(key).raw_repr()
        for name, key in _KEYS.items()
        if name in ("Conjugate", "Negative", "ADInplaceOrView", "AutogradFunctionality") or name.startswith("Autocast")
    ),
    _DENSE | (_DENSE - 1),  # the bits below are those of the devices
)
"""The dispatch keys of tensors that are what their storage holds. Quantized and nested tensors are more than that, and
zero tensors and wrappers such as functional tensors have a storage with a size and no memory. All of them say that they
are strided, and only their keys tell."""

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
    if not is_plain(tensor):
        return reason_of_other(tensor)
    memory = tensor.untyped_storage()
    if memory.nbytes() < max(1, min_bytes):
        return "small"
    return reason_of_memory(tensor, memory._cdata, device) or held_by_autograd(tensor, maker_of(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass and strided, and so has one storage."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def reason_of_other(tensor: torch.Tensor) -> str:
    """Why a tensor that is not plain does not travel by itself."""
    if type(tensor) is torch.Tensor:
        return "layout"
    if isinstance(tensor, torch.nn.Parameter):
        _remember_parameter(tensor)
        return "parameter"
    return held_by_autograd(tensor, maker_of(tensor)) or "subclass"


def reason_of_memory(tensor: torch.Tensor, key: int, device: torch.device) -> str | None:
    """Why a tensor that is not too small does not travel, as far as its storage tells, whose address is ``key``."""
    exclusion = _excluded.get(key)
    if exclusion is not None:
        return exclusion.reason
    if tensor.device != device:
        return "device"
    return "layout" if torch._C._dispatch_keys(tensor).raw_repr() & ~_ORDINARY_KEYS else None


def held_by_autograd(tensor: torch.Tensor, maker: Any) -> str | None:
    """What the tensor is or comes from that autograd holds until backward anyway: a parameter, or another leaf.

    Args:
        tensor: A saved tensor.
        maker: Its :func:`~offload.activations.waste.maker_of`.
    """
    if maker is not None:
        if type(maker) is not _Cast or not _is_parameter_of(maker.next_functions[0][0]):
            return None
        _remember_parameter(tensor)
        return "parameter"
    base = tensor if tensor._base is None else tensor._base
    needs_none = tensor.requires_grad and not base.requires_grad
    if isinstance(base, torch.nn.Parameter) or (needs_none and _is_inside_parameter(tensor)):
        _remember_parameter(tensor)
        return "parameter"
    return "leaf" if base.requires_grad else None


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
