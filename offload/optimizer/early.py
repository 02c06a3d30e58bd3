"""Steps beside backward: a parameter is stepped once its gradient is complete, on a stream beside compute.

Autograd calls a hook when it has added a gradient to ``parameter.grad``. The parameters are collected until they fill a
chunk. Then the chunk's load is queued, and its step on a stream of its own, behind the gradients and the load. So
compute waits for no load. At the end of backward compute waits for the last step.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from offload.base.torch_private import ddp_parameters, this_backward, when_backward_ends
from offload.device.backend import Event
from offload.optimizer.chunks import NUM_SLOTS, ChunkStepper, StepWait
from offload.optimizer.stand_in import with_groups
from offload.optimizer.state import local


class _Seen(NamedTuple):
    """A gradient that a parameter was stepped with, and its version then."""

    gradient: torch.Tensor
    version: int


class BackwardSteps:
    """Steps parameters of ``stepper`` in backward, and takes their gradients if ``consume``."""

    def __init__(self, stepper: ChunkStepper, *, consume: bool) -> None:
        self.enabled = True  # False inside no_step()
        self._stepper = stepper
        self._consume = consume
        self._stream = stepper.backend.new_stream("optimizer")
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        # The parameters may outlive the optimizer, and must not keep it.
        seen = weakref.WeakMethod(self._gradient_is_there)
        self._hook = lambda parameter: None if (call := seen()) is None else call(parameter)
        self._take_off = weakref.finalize(self, _remove_all, self._hooks)
        self._unwrapped = False
        """Whether the first backward has found no ``DistributedDataParallel`` around the parameters."""
        self._groups: dict[torch.Tensor, int] = {}
        self._waiting: dict[torch.Tensor, None] = {}
        """Parameters whose gradients are complete, and that fill no chunk yet."""
        self._room = 0
        self._seen: dict[torch.Tensor, _Seen | None] = {}
        """The parameters that this step has stepped; ``None`` where the gradient was consumed."""
        self._flights: deque[tuple[list[torch.Tensor], Event]] = deque()
        """Gradients in use beside compute, and the event after which they are not."""
        self._runs: set[int] = set()
        """Runs of autograd's engine that have given a gradient; with reentrant checkpoints they are nested."""
        self.watch()

    def watch(self) -> None:
        """Put hooks on the parameters that have none yet."""
        for _, parameter in with_groups(self._stepper.optimizer):
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
        self._seen.clear()
        self._runs.clear()
        self._drop()

    def close(self) -> None:
        """Take the hooks off."""
        self._take_off()

    def finish(self) -> set[torch.Tensor]:
        """``optimizer.step()`` was called: returns the parameters that have made the step. Raises if it was wrong."""
        seen, self._seen = self._seen, {}
        self.watch()
        if seen and _scaler_steps():
            self._refuse("a GradScaler scales them")
        for parameter, one in seen.items():
            now = parameter.grad
            if now is not None and (one is None or now is not one.gradient or now._version != one.version):
                self._refuse(f"that of a parameter of shape {tuple(parameter.shape)} has been changed since")
        return set(seen)

    def _refuse(self, what: str) -> None:
        self._stepper.torn = f"{what}, after a step in backward"
        raise RuntimeError(
            f"gradients must be final at the end of backward if in_backward=True, but {what}; leave in_backward out if "
            "gradients are clipped or scaled. Parameters have made this step with other gradients: load a checkpoint."
        )

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        """Autograd's hook."""
        store = self._stepper.store
        if not self.enabled:
            return
        if not self._runs:
            self._begin()
        if (run := this_backward()) not in self._runs:
            when_backward_ends(_Run(self, run))
            self._runs.add(run)  # last: an interrupt leaves no run that nothing ends
        if parameter in self._seen or parameter in self._waiting:
            raise RuntimeError(
                "a parameter must get one gradient in each step if in_backward=True, but one of shape "
                f"{tuple(parameter.shape)} got another after its step; call optimizer.step() after each backward, and "
                "run all microbatches of a step but the last in handle.no_step()."
            )
        if parameter not in self._groups:
            return  # it was taken out of the optimizer
        if self._consume:
            store.of(parameter).gradient, parameter.grad = parameter.grad, None
        self._waiting[parameter] = None
        self._room -= local(parameter).numel() * store.bytes_per_element(parameter)
        if self._room <= 0:
            self._step_waiting()

    def _begin(self) -> None:
        """The first gradient of a backward."""
        self._stepper.check_whole()
        if not self._unwrapped:  # looking for wrappers takes long
            _refuse_ddp(self._hooks)
            self._unwrapped = True
        self._groups = {parameter: number for number, parameter in with_groups(self._stepper.optimizer)}
        self._room = self._stepper.chunk_bytes

    def _step_waiting(self) -> None:
        """Step what is waiting, on the stream beside compute."""
        stepper, backend, parameters = self._stepper, self._stepper.backend, list(self._waiting)
        self._waiting, self._room = {}, stepper.chunk_bytes
        if not parameters:
            return
        states = [stepper.store.of(parameter) for parameter in parameters]
        found = [state.gradient if self._consume else state.parameter.grad for state in states]
        gradients = [gradient for gradient in found if gradient is not None]  # all of them
        compute = backend.compute_stream()
        complete = compute.record_event()
        before = stepper.counters["chunks"]
        stepper.torn = "backward was cut off when some parameters had made their step"
        with torch.no_grad(), backend.running_on(self._stream):
            backend.wait(backend.compute_stream(), complete, StepWait.GRADIENT)
            stepper.step([(self._groups[parameter], parameter) for parameter in parameters])
            stepped = backend.compute_stream().record_event()
        stepper.counters["backward_chunks"] += stepper.counters["chunks"] - before
        for state, gradient in zip(states, gradients, strict=True):
            self._seen[state.parameter] = None if self._consume else _Seen(gradient, gradient._version)
        self._flights.append((gradients, stepped))
        while len(self._flights) > NUM_SLOTS:
            self._land()

    def _land(self) -> None:
        """Compute waits for the oldest step beside it: it may use the memory of the gradients from here on."""
        gradients, stepped = self._flights.popleft()
        backend = self._stepper.backend
        if self._consume or not self._flights:
            backend.wait(backend.compute_stream(), stepped, StepWait.JOINED)
        while gradients:
            gradient = gradients.pop()
            if self._consume:  # else the program has it in parameter.grad
                backend.discard(gradient)

    def _drop(self) -> None:
        """Forget what backward has left undone, and wait until nothing runs beside compute."""
        for parameter in self._waiting:
            self._stepper.store.of(parameter).gradient = None
        self._waiting.clear()
        if self._flights:
            # The program may load a checkpoint next. Whose thread this is, and what its stream is, is not known.
            self._stepper.backend.wait_on_host(self._flights[-1][1], StepWait.JOINED)
            self._flights.clear()

    def end_run(self, run: int, *, failed: bool) -> None:
        """A run of autograd's engine is over: at the end of the outermost, compute waits for all steps."""
        self._runs.discard(run)
        if failed:
            self._drop()
        elif not self._runs:
            self._step_waiting()
            while self._flights:
                self._land()
            self._stepper.torn = ""


def _remove_all(hooks: dict[torch.Tensor, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


class _Run:
    """One run of autograd's engine, which owns this object: called at its end, and gone without a call if it failed."""

    def __init__(self, steps: BackwardSteps, number: int) -> None:
        self._steps: BackwardSteps | None = steps
        self._number = number

    def __call__(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.end_run(self._number, failed=False)

    def __del__(self) -> None:
        if self._steps is not None and not sys.is_finalizing():
            self._steps.end_run(self._number, failed=True)


def _scaler_steps() -> bool:
    """Whether a ``GradScaler`` calls ``optimizer.step()``. Its division of the gradients changes no version."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__ and frame.f_locals["self"].is_enabled():
            return True
        frame = frame.f_back
    return False


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
