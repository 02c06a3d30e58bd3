"""What the library asks of autograd: what goes on now, which tensors a value holds, when their backward begins.

Most of it is not in PyTorch's public interface, so that a new version of PyTorch is looked after in one place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._C import _autograd
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_MOST_NODES = 10_000
"""A layer has hundreds."""
_WITHOUT_MEMORY = {TransformType.Jvp, TransformType.Functionalize}


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
            yield from tensors_in(getattr(value, field.name))


def in_backward() -> bool:
    """Whether this thread runs a node of an autograd graph."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether activation checkpointing decides here what is saved; hooks inside of its own would undo it."""
    hooks = _autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__


def is_traced() -> bool:
    """Whether operations are recorded: by ``torch.jit.trace``, ``torch.fx``, ``make_fx`` or ``torch.export``."""
    return torch._C._get_tracing_state() is not None or get_proxy_mode() is not None or is_fx_symbolic_tracing()


def is_transformed() -> bool:
    """Whether tensors are without memory, inside ``torch.func.jvp``, ``jacfwd``, ``linearize`` or ``functionalize``.

    ``torch.vmap`` gives autograd what is under its wrappers. Reverse mode, alone or among others, forbids hooks.
    """
    transforms = get_interpreter_stack()
    if not transforms:
        return False
    kinds = {transform.key() for transform in transforms}
    return bool(kinds & _WITHOUT_MEMORY) and TransformType.Grad not in kinds


why_no_hooks = _autograd._saved_tensors_hooks_get_disabled_error_message
"""PyTorch's own words if it allows no hooks on saved tensors here, as inside ``torch.func.grad``."""
push_hooks = _autograd._push_saved_tensors_default_hooks
"""Let autograd hand what it saves to ``pack``, until :func:`pop_hooks`."""
next_node = _autograd._get_sequence_nr
"""The number of the node that autograd makes next in this thread; those made earlier have lower ones."""

keeps_graph = _autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs was called with ``retain_graph=True``."""


def pop_hooks(pack: Callable[[torch.Tensor], Any]) -> None:
    """Take these hooks off, if they are there, also from below others.

    An interrupt can leave hooks that the layer itself has put above ours: they are not ours to take off.
    """
    above = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(True)) and hooks[0] != pack:
        above.append(hooks)
        _autograd._pop_saved_tensors_default_hooks()
    if hooks:
        _autograd._pop_saved_tensors_default_hooks()
    for left in reversed(above):
        push_hooks(*left)


def leave_modes(kind: type[TorchDispatchMode]) -> None:
    """Leave dispatch modes of a kind, and those inside of them, which only an interrupt can have left there."""
    stack = _get_current_dispatch_mode_stack()
    outermost = next((place for place, mode in enumerate(stack) if isinstance(mode, kind)), len(stack))
    for mode in reversed(stack[outermost:]):
        mode.__exit__(None, None, None)


def before_backward(output: object, first_node: int, begin: Callable[[Any], None]) -> list[Any]:
    """Call ``begin`` whenever backward is about to run a node that made a tensor of ``output``; returns these nodes.

    The node has to be the layer's: from ``first_node`` on, of :func:`next_node`. A tensor that the layer only passes on
    belongs to another one; it may live on from step to step, and would collect a hook in each.
    """
    nodes = {
        tensor.grad_fn: None
        for tensor in tensors_in(output)
        if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= first_node
    }
    for node in nodes:
        node.register_prehook(begin)
    return list(nodes)


def when_backward_ends(call: Callable[[], None]) -> None:
    """Have autograd ``call`` when the backward that runs in this thread is over, unless it fails."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def nodes_from(nodes: Iterable[Any], first_node: int) -> Iterator[Any]:
    """These nodes and all that backward comes to from them: those made from ``first_node`` on, and leaves."""
    waiting, seen = list(nodes), set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node not in seen and node._sequence_nr() >= first_node:  # a leaf's node has the highest number there is
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions if before is not None]
