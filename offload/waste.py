"""Copies that freed nothing, because something else kept the device memory alive: which, and a warning."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from offload.caller import warn_caller
from offload.units import format_bytes

WORTH_A_WARNING = 0.1
"""Of the bytes that a round copied."""
ROUNDS_WATCHED = 16
"""Rounds whose copies may still be released while later ones run."""
NAMED = 3
"""Operations in the warning."""

_Reshaped: Any = vars(torch._C._functions)["UnsafeViewBackward0"]
"""How a matrix product's result gets its shape; not the operation that users would look for."""


Origin = tuple[type | None, bool]
"""Where a saved tensor's memory comes from, as far as autograd tells: the type of the node whose operation made it, if
any, and whether it was there before the round began. The node itself would hold the tensor."""


def maker_of(tensor: torch.Tensor) -> Any:
    """The autograd node whose operation made the memory of ``tensor``, if any."""
    base = tensor._base
    return tensor.grad_fn if base is None else base.grad_fn


def origin_of(maker: Any, first_node: int | None) -> Origin:
    """Where the memory that ``maker`` made comes from; ``first_node`` is the first node of its round, if known."""
    if maker is None:
        return None, first_node is not None
    kind = type(maker)
    if kind is _Reshaped:
        kind = type(maker.next_functions[0][0])
    return kind, first_node is not None and maker._sequence_nr() < first_node


def operation_name(maker: type | None) -> str:
    """``"Addmm"`` for ``AddmmBackward0``; ``"leaf"`` for what autograd has seen no operation make, such as inputs."""
    if maker is None:
        return "leaf"
    return maker.__name__.rstrip("0123456789").removesuffix("Backward")


def next_node() -> int:
    """The number of the node that autograd makes next on this thread; earlier nodes have smaller ones."""
    return _get_sequence_nr()


class RoundCopies:
    """What one round of layers has copied to the host, and what of it freed nothing.

    Of the latter, only what is a surprise: not what the program gave to the first layer, and not what a layer that
    stays on the device saved as well.
    """

    def __init__(self) -> None:
        self.offloaded_bytes = 0
        self.wasted: Counter[str] = Counter()

    @property
    def wasteful(self) -> bool:
        """Whether too much of it freed nothing."""
        return self.wasted.total() > WORTH_A_WARNING * self.offloaded_bytes


class Waste:
    """The copies that freed nothing, and whether the user has been told."""

    def __init__(self) -> None:
        self.wasted: Counter[str] = Counter()
        self._rounds: deque[RoundCopies] = deque(maxlen=ROUNDS_WATCHED)
        self._warned = False

    def begin_round(self, copies: RoundCopies) -> None:
        """A round begins, so the earlier ones have queued all that they copy: warn, once, if one was wasteful."""
        wasteful = next((earlier for earlier in self._rounds if earlier.wasteful), None)
        if wasteful is not None:
            self._rounds.clear()
            self._warned = True
            _warn(wasteful)
        if not self._warned:
            self._rounds.append(copies)

    def add(self, copies: RoundCopies, nbytes: int, maker: type | None, *, surprising: bool) -> None:
        """Bytes that were copied in vain, in the round that ``copies`` counts."""
        name = operation_name(maker)
        self.wasted[name] += nbytes
        if surprising:
            copies.wasted[name] += nbytes


def _warn(copies: RoundCopies) -> None:
    named = [f"{name} ({format_bytes(nbytes)})" for name, nbytes in copies.wasted.most_common(NAMED)]
    more = ", ..." if len(copies.wasted) > NAMED else ""
    warn_caller(
        f"{format_bytes(copies.wasted.total())} of the {format_bytes(copies.offloaded_bytes)} that a round of layers "
        "copied to the host freed no device memory, because something else holds the tensors, by the operation that "
        f"made them: {', '.join(named)}{more}. Drop them before the layer is released (outputs collected in a list "
        "or by a hook, tensors stored on a module, a variable that wants `del`), or pass what must stay to "
        "mark_not_offload; see stats().wasted."
    )
