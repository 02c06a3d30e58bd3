"""The layers that users give, and their events: one set of module hooks per layer, for the whole library.

A layer's forward begins; the forward returns, raises, or is cut off by an interrupt; backward may run the forward once
more to recompute what was not saved. Each part of the library has a :class:`LayerListener` on each layer. A listener
learns from the layer's output when backward begins: see :func:`offload.base.torch_private.before_backward`.

PyTorch's module hooks leave two things to this file:

- After ``KeyboardInterrupt`` PyTorch calls no hooks. So a forward may begin although the forward before, of this layer
  or another, has not ended. Listeners tidy up then, or when the user asks for something.
- Hugging Face models of transformers 5.17 and before checkpoint the layer's whole call. The hooks run inside of that
  checkpoint, which has saved the layer's inputs by then. Such a layer begins and ends around its checkpoint function.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.base.attributes import unchanged, with_attribute
from offload.base.torch_private import (
    RUNS_COMPILED,
    forget_compiled,
    forward_hooks,
    in_backward,
    interpreted,
    leave_to_interpreter,
    next_node,
    state_dict_hooks,
)


class Turn(IntEnum):
    """The order in which the listeners on a layer learn that a forward begins; they learn of its end in reverse.

    Weights are loaded before anything else happens. Compiled layers are tried before hooks see what autograd saves.
    Measuring comes last, so that it measures the layer and not the others.
    """

    WEIGHTS = 0
    COMPILING = 1
    ACTIVATIONS = 2
    MEASURING = 3


class LayerCall:
    """One run of a layer's forward, which begins now, with the module in training mode or not."""

    __slots__ = (
        "error_around",
        "first_node",
        "from_compiled",
        "in_checkpoint",
        "listeners",
        "offloads",
        "recomputes",
        "told",
        "training",
    )

    def __init__(self, listeners: Sequence[LayerListener], *, training: bool, in_checkpoint: bool = False) -> None:
        self.training = training
        self.recomputes = in_backward()  # whether backward runs the forward, to recompute what was not saved
        self.first_node = next_node()  # the number of the first node that autograd makes in it
        self.in_checkpoint = in_checkpoint  # whether a checkpoint of the layer's whole call tells, and hooks do not
        self.from_compiled = in_compiled_call()
        self.listeners = listeners
        self.offloads = False  # whether the context of offloaded activations was entered
        self.told = 0  # so many of them know of the beginning, and so have to know of the end
        self.error_around: BaseException | None = sys.exception()  # handled by the program around: none of the layer's


def in_compiled_call() -> bool:
    """Whether code that ``torch.compile`` has made, or leaves to the interpreter, has called what runs here."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_qualname.startswith(RUNS_COMPILED):
            return True
    return False


class LayerEndsError(Exception):
    """The forward has ended: no hook that is called behind ours is a part of it."""


class _Silence(threading.local):
    on: bool | nn.Module = False


_silence = _Silence()


def without_listeners(until_end_of: nn.Module | None = None) -> AbstractContextManager[None]:
    """Run a layer without telling its listeners, who would take the run for the layer's next forward.

    Raises:
        LayerEndsError: In the block, where the end of the forward of ``until_end_of`` would be told.
    """
    if until_end_of is not None and (events := _events_of(until_end_of)) is not None:
        events.rest(until_end_of, None)  # it may have no hooks, as it is kept since
    return with_attribute(_silence, "on", value=True if until_end_of is None else until_end_of)


class Handle(ABC):
    """What the program holds of a part of the library that was put on layers; a context manager that undoes it."""

    @abstractmethod
    def remove(self) -> None:
        """Undo it all. A second call does nothing."""

    def check_in_use(self) -> None:
        """Raise if the handle says that it was removed."""
        if getattr(self, "state", "") == "removed":
            raise RuntimeError("the handle must be in use, but it was removed; make another one.")

    def __enter__(self) -> Self:
        self.check_in_use()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class EndOfBackward:
    """For ``when_backward_ends``: calls ``end`` also for a backward that fails, when autograd frees this object."""

    def __init__(self, end: Callable[..., None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end(failed=False)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._end(failed=True)


class LayerListener:
    """What a part of the library does at the events of one layer: here, nothing."""

    turn: Turn
    rests_by: object = None  # who may say, for all listeners with the same here, that none needs to know of a forward
    handle: Handle | None = None  # what the user calls ``remove()`` on
    device: torch.device | None = None  # where the layer computes, if the listener moves the layer's weights there

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        """The forward begins; the one before may have been cut off without an end."""

    def end_forward(self, call: LayerCall, *, failed: bool) -> None:
        """The forward has returned, or ``failed``; also called where :meth:`begin_forward` itself has raised."""

    def forward_returned(self, call: LayerCall, output: object) -> None:
        """The forward has not failed, and every listener knows: the output can be marked, in turn."""

    def before_access(self) -> None:
        """``state_dict`` is about to read the layer's parameters, or ``load_state_dict`` to change them."""


class ForwardBegins(LayerListener):
    """Tells of the beginning of a forward, before anything else happens in the layer or in its ``turn``."""

    def __init__(self, tell: Callable[[LayerCall, Any], None], turn: Turn = Turn.WEIGHTS) -> None:
        self._tell = tell
        self.turn = turn

    def begin_forward(self, call: LayerCall, inputs: object) -> None:
        self._tell(call, inputs)


class Attachment(Handle):
    """Listeners on layers, one on each, until :meth:`remove` or the end of the block."""

    def __init__(
        self, layers: Sequence[nn.Module], listeners: Sequence[LayerListener], handle: Handle | None = None
    ) -> None:
        leave_to_interpreter()
        # A layer holds its listeners, and a listener the ``handle`` that it belongs to. So references here are weak.
        here = weakref.ref(self)
        self._attached = [
            (weakref.ref(layer, partial(_layer_is_gone, here)), weakref.ref(one))
            for layer, one in zip(layers, listeners, strict=True)
        ]
        for layer, listener in zip(layers, listeners, strict=True):
            listener.handle = handle
            events = _events_of(layer) or _LayerEvents(layer)
            events.tell([*events.listeners, listener])

    def remove(self) -> None:
        attached, self._attached = self._attached, []
        for layer, listener in ((found(), told()) for found, told in attached):
            if layer is not None and listener is not None and (events := _events_of(layer)) is not None:
                events.drop(layer, listener)

    def rest(self, numbers: Collection[int]) -> int:
        """Take the hooks of forward off these layers, unless others listen there, and have them on all other layers.

        PyTorch alone takes 20 µs to call the hooks of a layer that does nothing in them. Returns how many have none.
        """
        resting = 0
        for number, (found, told) in enumerate(self._attached):
            layer, listener = found(), told()
            if layer is not None and listener is not None and (events := _events_of(layer)) is not None:
                resting += events.rest(layer, listener.rests_by if number in numbers else None)
        return resting

    @property
    def modules(self) -> list[nn.Module]:
        """The layers that there are."""
        return [layer for found, _ in self._attached if (layer := found()) is not None]

    def let_go(self) -> None:
        """The last of the layers is gone: hold nobody in circles, who would wait for Python's collector."""

    def __bool__(self) -> bool:
        return bool(self._attached)


def _layer_is_gone(here: weakref.ref[Attachment], _: object, ends: Callable[[], bool] = sys.is_finalizing) -> None:
    if (attachment := here()) is None or ends():
        return  # at the interpreter's end, names of this module may be gone
    if attachment.modules:
        attachment.rest([])  # it may have been the one that told of all
    else:
        attachment.let_go()


def listeners_on(layer: nn.Module, kind: type[LayerListener]) -> list[LayerListener]:
    """The listeners of this kind on the layer."""
    events = _events_of(layer)
    return [] if events is None else [listener for listener in events.listeners if isinstance(listener, kind)]


def compute_device(layers: Iterable[nn.Module]) -> torch.device | None:
    """Where these layers compute, if their weights are streamed there; ``None`` if the weights tell."""
    devices = (listener.device for layer in layers for listener in listeners_on(layer, LayerListener))
    return next((device for device in devices if device is not None), None)


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module; by name, as importing FSDP takes time."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


class _LayerEvents:
    """The listeners of one layer, and the hooks that tell them. The layer holds it, and it does not hold the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.listeners: list[LayerListener] = []
        # The forward that runs now, or the one that an interrupt has cut off: by thread, and whether in backward.
        self._running: dict[tuple[int, bool], LayerCall] = {}
        self._from_compiled = False  # code that was compiled around the layer without hooks would never call them
        self._rested = False  # whether there were no hooks of forward for a while
        self._hooks: list[RemovableHandle] = [
            layer.register_state_dict_pre_hook(_Hook(self, self._before_access)),
            layer.register_load_state_dict_pre_hook(_Hook(self, self._before_access)),
        ]
        self._on_forward: list[RemovableHandle] = []
        # No circle: the hooks lead to second runs, which hold the layer's dictionary, and that holds the hooks.
        self._gone = weakref.ref(layer, partial(_remove_all, (self._hooks, self._on_forward)))
        _wrap_checkpoint(layer, self)
        forget_compiled()

    def tell(self, listeners: Iterable[LayerListener]) -> None:
        """Tell these from now on, in the order of :class:`Turn`."""
        self.listeners = sorted(listeners, key=lambda listener: listener.turn)
        if (layer := self._gone()) is not None:
            self.rest(layer, None)

    def rest(self, layer: nn.Module, by: object) -> bool:
        """Have no hooks of forward, if all listeners rest by this one, and else have them; returns whether.

        Only where there are no others: those that come meanwhile are behind ours again, and so no part of the layer.
        """
        rests = by is not None and not self._from_compiled and all(one.rests_by is by for one in self.listeners)
        rests = rests and sum(map(len, forward_hooks(layer))) == len(self._on_forward)
        if rests:
            _remove_all([self._on_forward])
            self._rested = True
        elif not self._on_forward:
            # Inside of the hooks of ``fully_shard``: the layer begins with its weights gathered, and ends with them.
            inside = is_sharded(layer)
            begins, ends = _Hook(self, self._before_forward), _Hook(self, self._after_forward, ends=True)
            self._on_forward += [
                layer.register_forward_pre_hook(begins, with_kwargs=True, prepend=not inside),
                layer.register_forward_hook(ends, always_call=True, prepend=inside or self._rested),
            ]
        return rests

    def drop(self, layer: nn.Module, listener: LayerListener) -> None:
        """Tell this listener nothing more; the hooks are removed with the last listener."""
        self.tell(other for other in self.listeners if other is not listener)
        if not self.listeners:
            _remove_all([self._hooks, self._on_forward])
            function = vars(layer).get(_CHECKPOINT)
            if isinstance(function, _Checkpoint):
                setattr(layer, _CHECKPOINT, function.function)
            forget_compiled()

    def begin(self, inputs: object, *, training: bool, in_checkpoint: bool = False) -> None:
        call = LayerCall(self.listeners, training=training, in_checkpoint=in_checkpoint)
        self._from_compiled = self._from_compiled or call.from_compiled
        self._running[threading.get_ident(), call.recomputes] = call
        for listener in call.listeners:
            call.told += 1  # first: also one that fails half-way is told of the end
            listener.begin_forward(call, inputs)

    def end(self, output: object, *, training: bool, in_checkpoint: bool = False) -> None:
        key = threading.get_ident(), in_backward()
        call = self._running.get(key)
        if call is None:
            # A hook of the program's has raised before ours was called, or the layer has called itself.
            call = LayerCall(self.listeners, training=training)
            call.error_around = None
            call.offloads = not call.recomputes  # perhaps: to leave what was not entered does nothing
            call.told = len(self.listeners)
        elif call.in_checkpoint and not in_checkpoint:
            return
        else:
            del self._running[key]
        failed = sys.exception() is not call.error_around
        _tell_end(call, failed=failed)
        if not failed:
            for listener in call.listeners:
                listener.forward_returned(call, output)

    def _before_forward(self, module: nn.Module, args: object, kwargs: object) -> None:
        if _CHECKPOINT in vars(module):
            _wrap_checkpoint(module, self)  # the program may have turned checkpointing on since
        call = self.running if self._running else None
        if call is None or not call.in_checkpoint:
            self.begin((args, kwargs), training=module.training)

    def _after_forward(self, module: nn.Module, _: object, output: object) -> None:
        self.end(output, training=module.training)

    def _before_access(self, *_: object) -> None:
        for listener in self.listeners:
            listener.before_access()

    @property
    def running(self) -> LayerCall | None:
        """This thread's forward that has not ended: the recomputation if backward runs, and else the ordinary one."""
        return self._running.get((threading.get_ident(), in_backward()))


def _remove_all(hooks: Iterable[list[RemovableHandle]], _: object = None) -> None:
    """Remove hooks of a layer. Names of this module may be gone by then, at the interpreter's end."""
    for handles in hooks:
        while handles:
            handles.pop().remove()


def _tell_end(call: LayerCall, *, failed: bool) -> None:
    """Tell the last listener first, and each, even if one raises; an exit stack takes ten times as long."""
    try:
        while call.told:
            call.told -= 1
            call.listeners[call.told].end_forward(call, failed=failed)
    finally:
        if call.told:
            _tell_end(call, failed=failed)


class _Hook:
    """A module hook that calls ``tell``, and copies and pickles with its module as one that does nothing."""

    def __init__(
        self, events: _LayerEvents | None = None, tell: Callable[..., None] = lambda *_: None, *, ends: bool = False
    ) -> None:
        self.events = events
        self._tell = tell
        self._ends = ends

    @interpreted
    def __call__(self, *args: object) -> None:
        if not _silence.on:
            self._tell(*args)
        elif self._ends and args[0] is _silence.on and args[-1] is not None:  # else forward has raised
            raise LayerEndsError

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Hook, ())


def _events_of(layer: nn.Module) -> _LayerEvents | None:
    hooks = state_dict_hooks(layer).values()
    return next((hook.events for hook in hooks if isinstance(hook, _Hook) and hook.events is not None), None)


class _Checkpoint:
    """A Hugging Face layer's checkpoint function; where it is called around the layer, it tells of begin and end."""

    def __init__(self, function: Callable[..., object], events: _LayerEvents) -> None:
        self.function = function
        self.events = events

    def __call__(self, *args: object, **kwargs: object) -> object:
        call = self.events.running
        if _silence.on:
            with without_listeners():  # a layer that ends in here does so before the checkpoint saves its inputs
                return self.function(*args, **kwargs)
        if (call is not None and not call.in_checkpoint) or in_backward():
            # The layer's forward calls it, inside of the hooks, as in newer models.
            return self.function(*args, **kwargs)
        output = None
        try:  # before the first event, so that an interrupt at any place ends what has begun
            # The first argument calls the layer, and has its keywords.
            keywords = args[0].keywords if args and isinstance(args[0], partial) else {}
            self.events.begin((args[1:], keywords | kwargs), training=True, in_checkpoint=True)
            output = self.function(*args, **kwargs)
        finally:
            self.events.end(output, training=True, in_checkpoint=True)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return (unchanged, (self.function,))


_CHECKPOINT = "_gradient_checkpointing_func"


def _wrap_checkpoint(module: nn.Module, events: _LayerEvents) -> None:
    """Let the layer's checkpoint function tell, if it has one now."""
    function = vars(module).get(_CHECKPOINT)
    if function is not None and not isinstance(function, _Checkpoint):
        setattr(module, _CHECKPOINT, _Checkpoint(function, events))
