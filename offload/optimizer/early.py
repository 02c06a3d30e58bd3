"""Steps beside backward: a parameter is stepped once its gradient is complete, on a stream beside compute.

Autograd calls a hook when it has added a gradient to ``parameter.grad``. The parameters are collected until they fill a
chunk. Then the chunk's load is queued, and its step on a stream of its own, behind the gradients and the load. So
compute waits for no load. At the end of backward compute waits for the last step.

Layers whose weights are on the host give their gradients by themselves: see :mod:`offload.weights.gradients`.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from offload.base.layer_events import EndOfBackward
from offload.base.torch_private import ddp_parameters, this_backward, when_backward_ends
from offload.device.backend import Event
from offload.optimizer.chunks import NUM_SLOTS, ChunkStepper, StepWait
from offload.optimizer.proof import check_dense, with_groups
from offload.optimizer.set_aside import SetAside
from offload.optimizer.state import WeightHolder, holders_of, local
from offload.optimizer.stepped_gradients import FreedGradient, SteppedGradient, caller, drop_freed
from offload.optimizer.stepped_parameters import allow_reads, tell_reads

_logger = logging.getLogger(__name__)

LEFT_SHARE = 0.25
"""Of the state, what is stepped beside the next forward where backward steps the rest: forward's part of the time of a
step, if that is checkpointed."""

CUT_OFF = "backward was cut off when some parameters had made their step"

Given = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Of a parameter whose weights are on the host: the gradient on the device; what earlier microbatches have left on the
host, to which that is added; and the weights on the device, where they are updated, ``None`` if they have to be loaded.
"""


_steps = weakref.WeakSet["BackwardSteps"]()


def consumed_bytes(device: torch.device) -> int:
    """Gradients on a device that their parameters have no more: steps in backward wait for them, or run."""
    found = (local(one) for each in _steps for one in each.consumed())
    return sum(one.nbytes for one in found if one.device == device)


def is_consumed(parameter: torch.Tensor) -> bool:
    """Whether the backward that runs next steps with this parameter's gradient, and frees it."""
    return any(each.consumes(parameter) for each in _steps)


def first_step_is_next(layers: Iterable[torch.nn.Module]) -> bool:
    """Whether the backward that runs next makes the first step of these layers, which allocates state and slots."""
    first = [each.stepper.reference() for each in _steps if each.enabled and not each.stepper.counters["steps"]]
    parameters = {one for layer in layers for one in layer.parameters()} if first else ()
    there = (optimizer for optimizer in first if optimizer is not None)  # others have no step to make
    return any(one in parameters for optimizer in there for _, one in with_groups(optimizer))


class BackwardSteps:
    """Steps parameters of ``stepper`` in backward, and takes their gradients if ``consume``.

    If ``leave``, some are left to the next forward, so that the link has the whole step for its copies.
    """

    def __init__(self, stepper: ChunkStepper, *, consume: bool, leave: bool = False) -> None:
        self.enabled = True  # False inside no_step()
        self.stepper = stepper
        self._consume, self._leave = consume, leave
        self._aside = SetAside(stepper)
        self._left: set[torch.Tensor] = set()  # parameters that optimizer.step() steps, once their order is known
        self._stream = stepper.backend.new_stream("optimizer")
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        # The parameters may outlive the optimizer, and must not keep it.
        seen = weakref.WeakMethod(self._gradient_is_there)
        self._hook = lambda parameter: None if (call := seen()) is None else call(parameter)
        self._take_off = weakref.finalize(
            self, lambda hooks: [*map(RemovableHandle.remove, hooks.values())], self._hooks
        )
        self._unwrapped = False  # whether the first backward has found no DistributedDataParallel around parameters
        self.groups: dict[torch.Tensor, int] = {}  # of each parameter of the optimizer
        self._options: list[dict[str, Any]] = []  # that this step's parameters are stepped with, of each group
        self._waiting: dict[torch.Tensor, None] = {}  # their gradients are complete, and they fill no chunk yet
        self._room = 0
        # The parameters that this step has stepped: the gradient unless it was consumed, and what versions they had.
        self._seen: dict[torch.Tensor, tuple[torch.Tensor | None, int, int]] = {}
        self._flights: deque[tuple[list[torch.Tensor], Event, bool, int]] = deque()
        """Gradients in use beside compute, the event after which they are not, whether ``parameter.grad`` of the
        program lacks them, and the number of their chunks."""
        self.runs: set[object] = set()
        """Runs of autograd's engine that have given a gradient; with reentrant checkpoints they are nested. And the
        backward of streamed layers, which ends by itself."""
        self._holders = weakref.WeakSet[WeightHolder]()
        _steps.add(self)
        self.watch()

    def watch(self) -> None:
        """Put hooks on the parameters that have none yet."""
        parameters = [parameter for _, parameter in with_groups(self.stepper.optimizer)]
        for holder in holders_of(parameters):
            holder.begin_steps(self, parameters)
            self._holders.add(holder)
        for parameter in parameters:
            if self.stepper.store.of(parameter).on_host:
                continue
            if type(parameter).__name__ == "FlatParameter":
                raise ValueError(
                    "in_backward must be False with FullyShardedDataParallel, which reduces gradients after autograd "
                    "has added them, got True; leave it out, or shard the model with fully_shard."
                )
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._hook)
                self._unwrapped = False

    def forget(self) -> None:
        """A checkpoint was loaded: no parameter has made the next step, and nothing is left of a backward."""
        drop_freed(self._seen)
        self._seen.clear()
        self.runs.clear()
        self._drop()

    def close(self) -> None:
        """Take the hooks off. Parameters that have made the step have no gradient, so that nothing makes it again."""
        for parameter in self._seen:
            parameter.grad = None
        self._take_off()
        self._hooks.clear()
        for holder in list(self._holders):
            holder.end_steps()

    def consumes(self, parameter: torch.Tensor) -> bool:
        return self._consume and self.enabled and parameter in self._hooks and parameter not in self._left

    def consumed(self) -> Iterator[torch.Tensor]:
        """The gradients that are on the device until their steps are over, and that no parameter has."""
        if self._consume:
            waiting = (self.stepper.store.of(one).gradient for one in self._waiting)
            yield from (one for one in waiting if one is not None)
        for gradients, _, owned, _ in self._flights:
            yield from gradients if owned else ()

    def finish(self) -> set[torch.Tensor]:
        """``optimizer.step()`` was called: returns the parameters that have made the step. Raises if it was wrong."""
        seen, self._seen = self._seen, {}
        self.watch()
        if seen and _scaler_steps():
            self._refuse("a GradScaler scales them")
        changed = [
            parameter
            for parameter, (gradient, version, _) in seen.items()
            if not isinstance(parameter.grad, FreedGradient)
            and (gradient is None or parameter.grad is not gradient or gradient._version != version)
        ]
        drop_freed(seen)
        if changed:
            self._refuse(f"that of a parameter of shape {tuple(changed[0].shape)} has been changed since")
        for before, options in zip(self._options, _options_of(self.stepper.optimizer), strict=False):
            others = [each for each in before.items() if each not in options.items()]
            if seen and others:
                self._refuse(f"{others[0][0]} of a group has been changed since")
        for parameter, (*_, own_version) in seen.items():
            if parameter._version != own_version:
                self._refuse(f"a parameter of shape {tuple(parameter.shape)} has been changed since")
        return set(seen)

    def _refuse(self, what: str) -> None:
        self.stepper.torn = f"{what}, after a step in backward"
        raise RuntimeError(
            f"gradients, options and parameters must be final at the end of backward if in_backward=True, but {what}; "
            "leave in_backward out if gradients are clipped or scaled, and make changes after optimizer.step(). "
            "Parameters have made this step without the change: load a checkpoint."
        )

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        """Autograd's hook."""
        store = self.stepper.store
        if not self.enabled or parameter.grad is None:  # autograd calls also where a function has returned no gradient
            return
        if (run := this_backward()) not in self.runs:
            # First: an interrupt leaves no run that nothing ends.
            when_backward_ends(EndOfBackward(partial(self._end_backward, run)))
            self.begin_run(run)
        self._check_first(parameter)
        check_dense(parameter)
        if parameter not in self.groups or parameter in self._left:
            return  # it was taken out of the optimizer; or optimizer.step() steps it
        if self._consume:
            self._check_last(parameter)
            store.of(parameter).gradient, parameter.grad = parameter.grad, None
            if not self._seen and self._aside.take(self.groups[parameter], parameter):
                tell_reads([parameter])
                return  # it is the first: all activations are there
        self._waiting[parameter] = None
        self._room -= local(parameter).numel() * store.bytes_per_element(parameter)
        if self._room <= 0:
            self._step_waiting()

    def _check_first(self, parameter: torch.Tensor) -> None:
        if parameter in self._seen or parameter in self._waiting or parameter is self._aside.parameter:
            raise RuntimeError(
                "a parameter must get one gradient in each step if in_backward=True, but one of shape "
                f"{tuple(parameter.shape)} got another after its step; call optimizer.step() after each backward, and "
                "run all microbatches of a step but the last in handle.no_step()."
            )

    def _check_last(self, parameter: torch.Tensor) -> None:
        ours = self._hooks[parameter]
        for number, hook in reversed((ours.hooks_dict_ref() or {}).items()):
            if number == ours.id:
                return
            if not str(getattr(hook, "__module__", "")).startswith("offload."):  # ours look at no gradient
                raise RuntimeError(
                    "hooks on a parameter must be registered before its gradient is consumed in backward, but one of "
                    f"shape {tuple(parameter.shape)} has a hook that was registered later, and would find no gradient; "
                    "register it before stream_optimizer or prepare."
                )

    def begin_run(self, run: object) -> None:
        """A backward has its first gradient; :meth:`end_run` has to be called at its end."""
        if run in self.runs:
            return
        if not self.runs:
            self.stepper.take_over()
            if not self._unwrapped:  # looking for wrappers takes long
                _refuse_ddp(self._hooks)
                self._unwrapped = True
            self.groups = {parameter: number for number, parameter in with_groups(self.stepper.optimizer)}
            if not self._seen:
                self._options = _options_of(self.stepper.optimizer)
            self._room = self.stepper.chunk_bytes
        self.runs.add(run)

    def step_layer(self, given: Mapping[torch.Tensor, Given], most_flights: int) -> Event | None:
        """Step one layer, and leave at most ``most_flights`` steps beside compute; returns the last copy's event."""
        store = self.stepper.store
        for parameter in given:
            self._check_first(parameter)
        self.stepper.torn = CUT_OFF
        for parameter, found in given.items():
            state = store.of(parameter)
            state.gradient, state.total, state.weights = found
        self._step([*given], owned=True)
        while len(self._flights) > most_flights:
            self._land()
        return self.stepper.last_copy

    def settle(self) -> None:
        """Block until no copy to the host runs, also those of a step that an interrupt has cut off."""
        if self.stepper.torn:  # autograd's own thread may not have freed that backward yet, which counts as running
            self.stepper.backend.synchronize()
        self.stepper.settle()

    def _step_waiting(self) -> None:
        """Step what is waiting, on the stream beside compute."""
        parameters = list(self._waiting)
        self._waiting, self._room = {}, self.stepper.chunk_bytes
        if parameters:
            self._step(parameters, owned=self._consume)
        # Chunks behind the oldest step that take all slots: what comes after them has to wait for it in any case.
        while sum(chunks for *_, chunks in [*self._flights][1:]) >= NUM_SLOTS:
            self._land()

    def _step(self, parameters: list[torch.Tensor], *, owned: bool, ends: bool = False) -> None:
        stepper, backend = self.stepper, self.stepper.backend
        states = [stepper.store.of(parameter) for parameter in parameters]
        found = (state.gradient if owned else state.parameter.grad for state in states)
        gradients = [gradient for gradient in found if gradient is not None]  # all of them
        compute = backend.compute_stream()
        complete = compute.record_event()
        before = stepper.counters["chunks"]
        stepper.torn = CUT_OFF
        with torch.no_grad(), backend.running_on(self._stream):
            backend.wait(backend.compute_stream(), complete, StepWait.GRADIENT)
            between = self._aside.rest if ends else self._aside.between
            own_chunks = stepper.step([(self.groups[one], one) for one in parameters], between)
            stepped = backend.compute_stream().record_event()
        stepper.counters["backward_chunks"] += stepper.counters["chunks"] - before
        for state in states:
            kept = None if owned else state.parameter.grad
            self._seen[state.parameter] = kept, 0 if kept is None else kept._version, state.parameter._version
        tell_reads(state.parameter for state in states if not state.on_host)
        self._flights.append((gradients, stepped, owned, own_chunks))

    def _land(self) -> None:
        """Compute waits for the oldest step beside it: it may use the memory of the gradients from here on."""
        gradients, stepped, owned, _ = self._flights.popleft()
        backend = self.stepper.backend
        if owned or not self._flights:
            backend.wait(backend.compute_stream(), stepped, StepWait.JOINED)
        while gradients:
            gradient = gradients.pop()
            if owned:  # else the program has it in parameter.grad
                backend.discard(gradient)

    def _drop(self) -> None:
        """Forget what backward has left undone, and wait until nothing runs beside compute."""
        allow_reads(self.groups)
        for parameter in self._waiting:
            self.stepper.store.of(parameter).forget_step()
        self._waiting.clear()
        self._aside.forget()
        if self._flights:
            # The program may load a checkpoint next. Whose thread this is, and what its stream is, is not known.
            try:
                self.stepper.backend.wait_on_host(self._flights[-1][1], StepWait.JOINED)
            except RuntimeError:  # the program has the error of its backward, and a finalizer may have called
                _logger.exception("a copy has failed beside a backward that had failed")
            finally:
                self._flights.clear()

    def _end_backward(self, run: object, *, failed: bool) -> None:
        """A run of autograd's engine is over, or autograd frees it."""
        freed = run not in self.runs
        self.end_run(run, failed=failed)
        # A nested run is freed inside of the node that has begun it. The run of that node may have given no gradient.
        if freed and self._seen and (outer := this_backward()) not in (-1, *self.runs):
            self.stepper.torn = CUT_OFF
            self.runs.add(outer)
            when_backward_ends(EndOfBackward(partial(self._end_backward, outer)))

    def end_run(self, run: object, *, failed: bool) -> None:
        """A run is over: at the end of the last, which is the outermost, compute waits for all steps."""
        if run not in self.runs:
            return  # it has given no gradient, or a checkpoint was loaded since
        self.runs.discard(run)
        if failed:
            self._drop()
        elif not self.runs:
            self._step_waiting()
            if (aside := self._aside.parameter) is not None:
                self._step([], owned=True, ends=True)
                self._aside.forget()
                self._seen[aside] = None, 0, aside._version
            while self._flights:
                self._land()
            allow_reads(self.groups)
            self.stepper.torn = ""
            if self._leave and not self._left:
                self._left = self._spread()
            for parameter, (gradient, *_) in self._seen.items():
                if gradient is None and parameter.grad is None:
                    parameter.grad = FreedGradient(parameter)
                elif type(gradient) is torch.Tensor:
                    gradient.__class__ = SteppedGradient

    def _spread(self) -> set[torch.Tensor]:
        """Parameters with a part of what the link carries, spread over the last backward: the link never idles."""
        store, left = self.stepper.store, set()
        all_bytes = left_bytes = 0
        for one in self._seen:
            nbytes = 0 if store.of(one).resident else local(one).numel() * store.bytes_per_element(one)
            all_bytes += nbytes
            if 0 < nbytes <= LEFT_SHARE * all_bytes - left_bytes:
                left_bytes += nbytes
                left.add(one)
        return left


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group; a tensor, which schedulers change in place, by its version."""
    return [
        {
            key: (id(value), value._version, value) if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _scaler_steps() -> bool:
    """Whether a ``GradScaler`` calls ``optimizer.step()``. Its division of the gradients changes no version."""
    frame = caller({torch.amp.GradScaler.step.__code__})
    return frame is not None and frame.f_locals["self"].is_enabled()


def _refuse_ddp(parameters: Iterable[torch.Tensor]) -> None:
    """``DistributedDataParallel`` averages gradients after autograd has added them, and says so to nobody."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    known = set(parameters)
    for one in gc.get_objects():
        if issubclass(type(one), DistributedDataParallel) and known.intersection(ddp_parameters(one)):
            raise RuntimeError(
                "in_backward=True must not be used with DistributedDataParallel, whose ranks average gradients after "
                "backward has added them; leave out in_backward, or shard the model with fully_shard."
            )
