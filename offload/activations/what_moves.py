"""What moves: the one decision whether a saved tensor travels, and why it does not.

Parameters stay: the ``Parameter`` itself, a view of one (``weight.t()`` in every ``Linear``), and the copy that
autocast makes of one. So do tensors that the user has marked. Both are remembered by storage, so that
whatever else looks into the same memory is recognised too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.parts import Parts, inner_tensors, parts_of
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

SMALL = "small"
"""Why a storage below ``min_bytes`` stays, in ``stats().skipped``."""

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


class Rules(NamedTuple):
    """What a layer's saved tensors are asked."""

    device: torch.device
    """Tensors elsewhere stay there."""
    min_bytes: int
    """Storages below this size stay."""
    held: frozenset[int] = frozenset()
    """Addresses of storages that a pipeline stage keeps on the device until backward anyway."""


def decide(tensor: torch.Tensor, rules: Rules) -> str | Parts | None:
    """Whether a saved tensor travels: all who want to know ask here.

    Returns:
        ``None`` if it does; the reason why it stays; or the parts of a subclass, each of which is to be asked for
        itself.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return _decide_other(tensor)
    memory = tensor.untyped_storage()
    nbytes = memory.nbytes()
    if nbytes < rules.min_bytes or not nbytes:
        return SMALL
    key = memory._cdata
    exclusion = _excluded.get(key)
    if exclusion is not None:
        return exclusion.reason
    if key in rules.held:
        return "pipeline"
    if tensor.device != rules.device:
        return "device"
    if torch._C._dispatch_keys(tensor).raw_repr() & ~_ORDINARY_KEYS:
        return "layout"
    return _held_by_autograd(tensor)


def travellers(tensor: torch.Tensor, rules: Rules, changes: int = 0) -> Iterator[tuple[torch.Tensor, int]]:
    """What of a tensor travels: itself, or inner tensors of a subclass.

    Each comes with how often wrappers around it were changed in place, which its own version does not tell.
    """
    decision = decide(tensor, rules)
    if decision is None:
        yield tensor, changes
    elif isinstance(decision, Parts):
        for inner in decision.inner:
            yield from travellers(inner, rules, changes + tensor._version)


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """The addresses of all storages that tensors are made of, as :attr:`Rules.held` wants them."""
    return frozenset(
        inner.untyped_storage()._cdata for tensor in tensors for inner in inner_tensors(tensor) if _has_storage(inner)
    )


def _decide_other(tensor: torch.Tensor) -> str | Parts:
    """Whether a tensor that is a subclass, or not strided, travels."""
    if type(tensor) is torch.Tensor:
        return "layout"
    if isinstance(tensor, torch.nn.Parameter):
        _remember_parameter(tensor)
        return "parameter"
    return _held_by_autograd(tensor) or parts_of(tensor) or "subclass"


def _held_by_autograd(tensor: torch.Tensor) -> str | None:
    """What the tensor is or comes from that autograd holds until backward anyway: a parameter, or another leaf."""
    maker = maker_of(tensor)
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
        if _has_storage(inner) and inner.untyped_storage()._cdata not in _excluded:
            exclude(inner, "parameter")


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


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
