"""Which tensors are plain, how they view their storage, and the tensors in nested values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from offload.base.torch_private import address_of, negated

ALIGNMENT_BYTES = 256  # where a tensor may start in flat memory: what CUDA's own allocator guarantees, at least

Geometry = tuple[torch.dtype, "int | torch.SymInt", torch.Size, tuple[int, ...], bool, bool]
"""How a tensor views its storage: dtype, offset, sizes, strides, whether conjugated, whether negated."""


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """How a tensor views its storage."""
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def sides_of(tensor: torch.Tensor) -> torch.Size:
    """The shape of a layer's argument."""
    try:
        return tensor.shape
    except RuntimeError:
        raise TypeError(
            "layers with policies or memory_budget must be given tensors that have a shape, got a nested tensor of "
            "layout torch.strided; make it with layout=torch.jagged, or offload whole layers by num_layers alone."
        ) from None


def look_into(memory: torch.UntypedStorage, geometry: Geometry, empty: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor over ``memory``: ``empty``, which must have the same dtype, or else a new one."""
    dtype, start, size, stride, conj, neg = geometry
    view = torch.empty(0, dtype=dtype, device=memory.device) if empty is None else empty
    view.set_(memory, start, size, stride)
    if conj:
        view = view.conj()
    return negated(view) if neg else view


def whole(memory: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, uint8 of one dimension, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def aligned(nbytes: int, unit: int = ALIGNMENT_BYTES) -> int:
    """``nbytes`` and the gap up to the next multiple of ``unit``: where the next tensor may start."""
    return -(-nbytes // unit) * unit


def own_storage(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, uint8, with a storage of just its bytes: ``torch.save`` of one tensor writes no others."""
    if not len(flat):
        return flat.clone()
    own: torch.Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(flat))  # type: ignore[attr-defined]  # public
    return own


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors among an operation's results or arguments, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    found: list[torch.Tensor] = []
    if isinstance(result, _SEQUENCES):
        for item in result:  # numbers are the most, among arguments
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, _SEQUENCES):
                found += tensors_of(item)
    return found


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # As it is stored: some configurations of Hugging Face raise where one of their fields is asked for.
            with contextlib.suppress(AttributeError):
                yield from tensors_in(object.__getattribute__(value, field.name))


def check_values(name: str, parameter: torch.Tensor) -> None:
    """Raise if a parameter has no values yet, or none that can be trained; ``name`` begins the message."""
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter) or parameter.is_meta:
        raise ValueError(
            f"{name} must have values, got a lazy parameter or a meta tensor; run one forward, or materialise the "
            "model on the CPU, before this call."
        )
    if torch.is_inference_mode_enabled() or parameter.is_inference():
        raise RuntimeError(
            f"{name} must be held outside of torch.inference_mode(), where no tensor that is made can be trained; make "
            "the model, and this call, outside of it."
        )


def plain_memory(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor: of no subclass but ``Parameter``, strided, with memory; ``None`` for others."""
    kind = type(tensor)
    if (kind is not _TENSOR and kind is not _PARAMETER) or tensor.layout is not _STRIDED:
        return None
    try:
        memory = tensor.untyped_storage()  # that of torch.func raises
        has_memory = bool(memory.data_ptr())  # that of a zero tensor has none
    except RuntimeError:  # a wrapper's
        return None
    return memory if has_memory and not (tensor.is_quantized or tensor.is_nested) else None


def plain_address(value: object) -> int:
    """Where the memory of a plain tensor is; 0 for all else."""
    memory = plain_memory(value) if isinstance(value, torch.Tensor) else None
    return 0 if memory is None else address_of(memory)


def plain_version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of a plain ``tensor`` and all its views."""
    counter = tensor.detach()
    counter.data = _without_memory(tensor.dtype, tensor.device)
    return counter


COMPARED_BYTES = 1 << 26
"""So much of two tensors is compared at once: a device makes a truth value for each pair of numbers."""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, on whatever devices they are; the device of ``one`` compares them."""
    if one is other:
        return True
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pieces, longest = 1 + one.nbytes // COMPARED_BYTES, max(range(one.ndim), key=one.size, default=0)
    both = [(one.detach(), other.detach())]
    if one.ndim and pieces > 1:
        both = [*zip(*(each.chunk(pieces, longest) for each in both[0]), strict=True)]
    return all(torch.equal(_bits(here), _bits(there.to(here.device))) for here, there in both)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _without_memory(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Always the same tensor."""
    return torch.empty(0, dtype=dtype, device=device)


_TENSOR, _PARAMETER, _STRIDED, _SEQUENCES = torch.Tensor, torch.nn.Parameter, torch.strided, (list, tuple)
"""Names of this module are found faster, and every tensor of a layer is asked, however small."""
