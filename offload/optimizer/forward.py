"""Steps beside the next forward: ``optimizer.step()`` queues its chunks on a stream beside compute, and returns.

A program has many ways to read a parameter, so the parameter itself tells. Until it is read for the first time, its
class is one whose ``__torch_function__`` PyTorch calls in place of any of its functions, whoever calls them. There
compute waits for the parameter's chunk, and the parameter gets its class back. So does its gradient, which steps read.

Code in C++ that asks no function of PyTorch gets an error in place of the memory of an unread parameter or gradient;
PyTorch built for the CPU alone cannot refuse the access, and there such code reads NaN. Where another tensor has the
memory, and where code is compiled, ``step()`` itself lets compute wait, and a replay of a CUDA graph waits for all.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.base.torch_private import (
    address_of,
    before_unseen_reads,
    leave_to_interpreter,
    owners_of,
    refuse_access,
    tree_leaves,
    without_torch_function,
)
from offload.device.backend import Event
from offload.device.cuda import CaptureError
from offload.optimizer.chunks import ChunkStepper, StepWait
from offload.optimizer.proof import OWN

_tensor: Any = torch.Tensor
REFUSED = (
    "a parameter and its gradient must be given to PyTorch's functions, which wait for the step that "
    "overlap_forward=True runs beside the next forward, but other code asks for the memory of one; call synchronize() "
    "of the streamed optimizer's handle first."
)
_SET_GRADIENT = _tensor.grad.__set__
READ_NO_NUMBER = {  # zero_grad() and clipping read some of these, layers and what counts memory read others
    *(_tensor.size, _tensor.dim, _tensor.numel, _tensor.is_floating_point),
    *(
        getattr(_tensor, name).__get__
        for name in ("grad", "requires_grad", "is_leaf", "device", "dtype", "layout", "shape", "nbytes", "_version")
    ),
}


def untold(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a function of PyTorch's returns if the classes of its arguments are not asked."""
    with without_torch_function():
        found = function(*args, **kwargs or {})
    return found  # noqa: RET504  inside of the block, an interrupt would leave it without its end


class Unread:
    """A tensor that a step beside the program uses."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READ_NO_NUMBER or function == _SET_GRADIENT:
            return untold(function, args, kwargs)
        join_steps([one for one in tree_leaves((args, kwargs)) if isinstance(one, Unread)] or None)
        return function(*args, **kwargs or {})


class UnreadParameter(Unread, nn.Parameter):
    """A parameter."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """One that is made of the class of another, by copy.deepcopy for example, is an ordinary one."""
        return nn.Parameter(*args, **kwargs)


class UnreadGradient(Unread, torch.Tensor):
    """A gradient."""


class _Step(NamedTuple):
    """What a step uses beside the program, until ``event``."""

    parameter: Any
    gradient: Any
    data: tuple[torch.Tensor, torch.Tensor]  # of both
    event: Event


class ForwardSteps:
    """Steps parameters of ``stepper`` beside what the program does next."""

    def __init__(self, stepper: ChunkStepper) -> None:
        self._stepper = stepper
        self._stream = stepper.backend.new_stream("optimizer")
        self._compute: object = None  # the stream that called step()
        self._unread: dict[Any, _Step] = {}  # of each parameter and each gradient
        self._changing = threading.RLock()  # a thread that logs weights reads one while the program leaves it
        self._reads: list[torch.Tensor] = []  # parameters, in the order in which they were read
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        this = weakref.ref(self)  # the parameters may outlive the optimizer, and must not keep it
        self._hook = lambda _: None if (steps := this()) is None else steps.join()
        leave_to_interpreter()
        _all.add(self)

    def close(self) -> None:
        """Let compute wait for all steps, and take the hooks off."""
        self.join()
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():
            self.close()

    def join(self, tensors: Iterable[Any] | None = None) -> None:
        """Let compute wait for the steps of these parameters or gradients, or of all."""
        for one in list(self._unread) if tensors is None else tensors:
            with self._changing:
                if (step := self._unread.get(one)) is None:
                    continue
                self._await(step)
                if tensors is not None:
                    self._reads.append(step.parameter)

    def _await(self, step: _Step) -> None:
        backend = self._stepper.backend
        if backend.capturing:
            raise CaptureError(
                "the steps of all parameters must be over before a CUDA graph is captured, but with "
                "overlap_forward=True they may still run; call synchronize() of the handle first."
            )
        try:
            if backend.compute_stream_id() == self._compute:
                backend.wait(backend.compute_stream(), step.event, StepWait.NEXT_FORWARD)
            else:  # a third stream that waits for this one must not miss the step
                backend.wait_on_host(step.event, StepWait.NEXT_FORWARD)
        except Exception:
            self._stepper.last_copy, self._stepper.torn = None, "a copy of state has failed"
            for other in list(self._unread.values()):  # the program is told once, and may load a checkpoint
                self._restore(other)
            raise
        self._restore(step)

    def _restore(self, step: _Step) -> None:
        """Let parameter and gradient be what they were. An interrupt leaves what is not done yet to the next call."""
        pair = step.parameter, step.gradient
        for one, own, data in zip(pair, (nn.Parameter, torch.Tensor), step.data, strict=True):
            if type(one) is not own:
                with without_torch_function():
                    one.data = data
                one.__class__ = own
        for one in pair:
            self._unread.pop(one, None)

    def step(self, left: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Queue the step of these parameters, none of which is unread now: first of those that are awaited at once."""
        stepper, backend = self._stepper, self._stepper.backend
        compute, self._compute = backend.compute_stream(), backend.compute_stream_id()
        order = {parameter: number for number, parameter in enumerate(self._reads)}  # as the last forward needed them
        self._reads.clear()
        alone = {parameter for _, parameter in left if _is_alone(parameter)} if self._sees_all() else set()
        for parameter in alone.difference(self._hooks):  # autograd, in C++, adds to gradients
            self._hooks[parameter] = parameter.register_hook(self._hook)
        left = sorted(left, key=lambda pair: (pair[1] in alone, order.get(pair[1], len(order))))
        complete, awaited = compute.record_event(), None
        try:
            with torch.no_grad(), backend.running_on(self._stream):
                backend.wait(backend.compute_stream(), complete, StepWait.GRADIENT)
                stepper.step(left)
                stepped = backend.compute_stream().record_event()
            # Who looks at the state waits for its copies, and so for the step of what is not copied.
            backend.wait(stepper.d2h_stream, stepped, StepWait.STEPPED)
            stepper.last_copy = stepper.d2h_stream.record_event()
            for _, parameter in left:
                if not (parameter in alone and self._leave(parameter)):
                    awaited = stepper.store.of(parameter).stepped
        except BaseException:
            awaited = self._stream.record_event()  # nothing of a step that was cut off runs beside the program
            raise
        finally:
            if awaited is not None:
                backend.wait(compute, awaited, StepWait.NEXT_FORWARD)
        stepper.counters["forward_parameters"] += len(self._unread) // 2

    def _leave(self, parameter: torch.Tensor) -> bool:
        """Leave it to readers of a parameter to wait for its step, unless its gradient is another parameter's, too."""
        gradient, event = parameter.grad, self._stepper.store.of(parameter).stepped
        if event is None or type(gradient) is not torch.Tensor:
            return False
        step = _Step(parameter, gradient, (parameter.data, gradient.data), event)
        with self._changing:
            self._unread[parameter] = self._unread[gradient] = step
            step.parameter.__class__, step.gradient.__class__ = UnreadParameter, UnreadGradient
            for one, data in zip((parameter, gradient), step.data, strict=True):
                with without_torch_function():
                    one.data = _nothing(data.dtype, data.device).expand(data.shape)
        return True

    def _sees_all(self) -> bool:
        """Whether nothing reads parameters unseen, and the step reads no tensor that the program may change."""
        options = [vars(self._stepper.optimizer), *self._stepper.optimizer.param_groups]
        found = [value for one in options for key, value in one.items() if key not in OWN | {"params"}]
        return before_unseen_reads(_join_all) and not any(isinstance(one, torch.Tensor) for one in tree_leaves(found))


@cache
@torch.inference_mode(mode=False)
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What parameters and gradients of a kind have for numbers while they are unread."""
    nothing = torch.full((), torch.nan, dtype=dtype, device=device)
    if refuse_access is not None:
        refuse_access(address_of(nothing.untyped_storage()), REFUSED)
    return nothing


def _is_alone(parameter: torch.Tensor) -> bool:
    """Whether no other tensor has the memory of a parameter or of its gradient."""
    if type(parameter) is not nn.Parameter or not parameter.requires_grad or parameter.grad is None:
        return False
    return all(owners_of(one.untyped_storage()) == 1 for one in (parameter, parameter.grad))


_all: weakref.WeakSet[ForwardSteps] = weakref.WeakSet()


def join_steps(tensors: Iterable[Any] | None = None) -> None:
    """Let compute wait for the steps of these tensors, or of all tensors."""
    for steps in list(_all):
        steps.join(tensors)


def _join_all(*_: object) -> None:
    join_steps()
