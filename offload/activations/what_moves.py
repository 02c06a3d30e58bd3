"""What moves: the one decision whether a saved tensor travels, and why it does not.

Parameters stay: the ``Parameter`` itself, a view of one (``weight.t()`` in every ``Linear``), and the copy that
autocast makes of one. So do tensors that the user has marked. Both are remembered by storage, so that
whatever else looks into the same memory is recognised too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.parts import Parts, inner_tensors, parts_of


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

_Tensor, _strided = torch.Tensor, torch.strided
"""As every saved tensor is asked, however small."""
_Cast: Any = vars(torch._C._functions)["ToCopyBackward0"]
"""What autocast does to a parameter."""
_Reshaped: Any = vars(torch._C._functions)["UnsafeViewBackward0"]
"""How a matrix product's result gets its shape; not the operation that users would look for."""


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
    only: Container[int] | None = None
    """If given, storages at other addresses stay, and nobody wants to know for which reason."""


def decide(tensor: torch.Tensor, rules: Rules) -> str | Parts | type:
    """Whether a saved tensor travels: all who want to know ask here.

    Returns:
        The reason why it stays; the parts of a subclass, each of which is to be asked for itself; or, if it travels,
        the type of the autograd node that made its memory, which is that of ``None`` where there is no such node.
        The node itself would hold the tensor.
    """
    if type(tensor) is not _Tensor or tensor.layout is not _strided:
        return _decide_other(tensor)
    memory = tensor.untyped_storage()
    nbytes = memory.nbytes()
    if nbytes < rules.min_bytes or not nbytes:
        return SMALL
    key = memory._cdata
    if rules.only is not None and key not in rules.only:
        return "unknown"
    exclusion = _excluded.get(key)
    if exclusion is not None:
        return exclusion.reason
    if key in rules.held:
        return "pipeline"
    if tensor.device != rules.device:
        return "device"
    if tensor.is_quantized or tensor.is_nested or not _has_memory(memory):
        return "layout"  # although they say that they are strided
    base = tensor._base
    maker = tensor.grad_fn if base is None else base.grad_fn
    if maker is None or type(maker) is _Cast:
        return _held_by_autograd(tensor, maker) or type(maker)
    return type(maker.next_functions[0][0]) if type(maker) is _Reshaped else type(maker)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage with a size has memory: that of a zero tensor or of a wrapper has none."""
    try:
        return bool(storage.data_ptr())
    except RuntimeError:
        return False


def travellers(tensor: torch.Tensor, rules: Rules) -> Iterator[torch.Tensor]:
    """What of a tensor travels: itself, or inner tensors of a subclass."""
    decision = decide(tensor, rules)
    if isinstance(decision, Parts):
        for inner in decision.inner:
            yield from travellers(inner, rules)
    elif isinstance(decision, type):
        yield tensor


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
        return _remember_parameter(tensor)
    maker = tensor.grad_fn if tensor._base is None else tensor._base.grad_fn
    return _held_by_autograd(tensor, maker) or parts_of(tensor) or "subclass"


def _held_by_autograd(tensor: torch.Tensor, maker: Any) -> str | None:
    """What the tensor is or comes from that autograd holds until backward anyway: a parameter, or another leaf.

    Args:
        tensor: The tensor.
        maker: The node that made its memory, if any.
    """
    if maker is not None:
        is_cast = type(maker) is _Cast and _is_parameter_of(maker.next_functions[0][0])
        return _remember_parameter(tensor) if is_cast else None
    base = tensor if tensor._base is None else tensor._base
    needs_none = tensor.requires_grad and not base.requires_grad
    if isinstance(base, torch.nn.Parameter) or (needs_none and _is_inside_parameter(tensor)):
        return _remember_parameter(tensor)
    return "leaf" if base.requires_grad else None


def _remember_parameter(tensor: torch.Tensor) -> str:
    """Whatever else looks into its memory is the parameter's too. Returns the reason for it to stay."""
    for inner in inner_tensors(tensor):
        if _has_storage(inner) and inner.untyped_storage()._cdata not in _excluded:
            exclude(inner, "parameter")
    return "parameter"


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
