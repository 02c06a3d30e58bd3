"""One device and the means to make its ordering bugs visible: late work, slow copies, poisoned memory."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.device.backend import Backend, Wait
from offload.device.select import get_backend
from offload.host.pool import HostPool, get_host_pool

CYCLES_PER_S = 2e9  # of torch.cuda._sleep; GPUs run at somewhat less, so it sleeps somewhat longer


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def streams_of(backend: Backend) -> tuple[Any, ...]:
    """All streams that copy."""
    return *backend.copy_streams, backend.weight_stream, *backend.state_streams


@contextmanager
def late_copies(delay_s: float) -> Iterator[None]:
    """Copies of the CPU come late, and device memory that was let go holds garbage: a missing wait shows."""
    backend = get_backend("cpu")
    for stream in streams_of(backend):
        stream.delay_s = delay_s
    backend.poison = True
    yield
    backend.poison = False
    for stream in streams_of(backend):
        stream.delay_s = 0.0


class _LateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, write: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.write = write
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        late = torch.zeros_like(gradient)
        ctx.write(late)
        return late, None


class LateOptimizer(torch.optim.Optimizer):
    """If it is ``late``, compute writes the weights only after a while, and with sevens."""

    def __init__(self, lab: "Lab", weights: Iterable[torch.Tensor], delay_s: float) -> None:
        super().__init__(weights, {})
        self.late, self.write = False, lambda weight: lab.write_late(weight, 7.0, delay_s)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"] if self.late else ():
            self.write(weight)


class Lab:
    """The device that a test runs on; whatever is set here is undone after the test.

    Args:
        backend: The device's backend, with a host pool that no other test has used.
        monkeypatch: What undoes the changes.
    """

    def __init__(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = backend
        self.device = backend.device
        self.d2h_stream, self.h2d_stream = backend.copy_streams
        self.weight_stream, (self.state_d2h_stream, self.state_stream) = backend.weight_stream, backend.state_streams
        self._monkeypatch = monkeypatch
        self._on_cpu = backend.device.type == "cpu"
        self._copies = {name: getattr(backend, name) for name in ("copy", "memcpy") if hasattr(backend, name)}

    @property
    def pool(self) -> HostPool:
        """The pool that contexts made by this test use."""
        return get_host_pool(self.backend)

    def adverse(self) -> None:
        """Slow the copies down and poison what is freed: a missing wait gives wrong numbers."""
        self.backend.poison = True
        self.slow(d2h_s=0.0005, h2d_s=0.0005)
        self.poison_new()

    def slow(self, *, d2h_s: float = 0.0, h2d_s: float = 0.0) -> None:
        """Let each copy of a direction begin that many seconds later."""
        d2h_streams = self.d2h_stream, self.state_d2h_stream
        delays = [(one, d2h_s if one in d2h_streams else h2d_s) for one in streams_of(self.backend)]
        if self._on_cpu:
            for stream, delay_s in delays:
                stream.delay_s = delay_s
            return

        def slowed(copy: Callable[..., None]) -> Callable[..., None]:
            def slow_copy(stream: Any, *what: Any) -> None:
                for slow_stream, delay_s in delays:
                    if stream is slow_stream and delay_s:
                        self.delay(stream, delay_s)
                copy(stream, *what)

            return slow_copy

        for name, copy in self._copies.items():
            self._monkeypatch.setattr(self.backend, name, slowed(copy) if d2h_s or h2d_s else copy)

    def write_late(self, tensor: torch.Tensor, value: float, delay_s: float = 0.05) -> None:
        """Let the compute stream fill ``tensor`` only after a while, behind the work queued so far."""
        tensor = tensor.data  # with a version of its own: to autograd, the values have been there all along
        if self._on_cpu:

            def fill() -> None:
                time.sleep(delay_s)
                tensor.fill_(value)

            self.backend.compute_stream().submit(fill)
        else:
            torch.cuda._sleep(int(delay_s * CYCLES_PER_S))
            tensor.fill_(value)

    def late_gradient(self, weight: torch.Tensor, value: float, delay_s: float) -> torch.Tensor:
        """The weight, whose gradient compute fills with ``value`` only after a while."""
        late: torch.Tensor = _LateGradient.apply(weight, lambda gradient: self.write_late(gradient, value, delay_s))
        return late

    def hold(self, stream: Any, seconds: float = 0.5) -> Callable[[], None]:
        """Stop ``stream`` until the function that this returns is called; on CUDA, for ``seconds``."""
        if self._on_cpu:
            gate = threading.Event()
            stream.submit(gate.wait)
            return gate.set
        with stream:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))
        return lambda: None

    def delay(self, stream: Any, seconds: float) -> None:
        """Let ``stream`` sleep before what is queued on it next."""
        if self._on_cpu:
            stream.submit(lambda: time.sleep(seconds))
            return
        with stream:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def drop(self, dropped: Enum) -> None:
        """Let the library forget one kind of wait, of a stream or of the host."""
        wait, wait_on_host = self.backend.wait, self.backend.wait_on_host

        def forgetful(stream: Any, event: Any, why: Enum) -> None:
            if why is not dropped:
                wait(stream, event, why)

        def forgetful_host(event: Any, why: Enum) -> None:
            if why is not dropped:
                wait_on_host(event, why)

        self._monkeypatch.setattr(self.backend, "wait", forgetful)
        self._monkeypatch.setattr(self.backend, "wait_on_host", forgetful_host)

    def count_waits(self) -> list[Wait]:
        """The waits that the library makes from now on."""
        made: list[Wait] = []
        wait = self.backend.wait

        def counting(stream: Any, event: Any, why: Wait) -> None:
            made.append(why)
            wait(stream, event, why)

        self._monkeypatch.setattr(self.backend, "wait", counting)
        return made

    def record_streams(self) -> list[Any]:
        """The stream of each copy from now on."""
        made: list[Any] = []

        def recording(copy: Callable[..., None]) -> Callable[..., None]:
            return lambda stream, *what: (made.append(stream), copy(stream, *what))[1]

        for name, copy in self._copies.items():
            self._monkeypatch.setattr(self.backend, name, recording(copy))
        return made

    def record_host_waits(self) -> list[object]:
        """Why the host waits from now on, in order; a test may add events of its own."""
        made: list[object] = []
        wait_on_host = self.backend.wait_on_host

        def recording(event: Any, why: Enum) -> None:
            made.append(why)
            wait_on_host(event, why)

        self._monkeypatch.setattr(self.backend, "wait_on_host", recording)
        return made

    def poison_new(self) -> None:
        """Fill the memory that reloads land in with 0xFF: it never holds the right bytes by chance."""
        empty = self.backend.empty
        self._monkeypatch.setattr(self.backend, "empty", lambda nbytes: empty(nbytes).fill_(0xFF))

    def fill_new_late(self, delay_s: float) -> None:
        """Let compute fill the memory that reloads land in, as PyTorch does under deterministic algorithms."""
        empty = self.backend.empty

        def filled(nbytes: int) -> torch.Tensor:
            memory = empty(nbytes)
            self.write_late(memory, 0xFF, delay_s)
            return memory

        self._monkeypatch.setattr(self.backend, "empty", filled)

    def recycle(self, memory: torch.Tensor) -> None:
        """Let the next reload land in ``memory``, uint8, as if the allocator had handed it out again."""
        empty = self.backend.empty
        left = [memory]
        self._monkeypatch.setattr(self.backend, "empty", lambda nbytes: left.pop() if left else empty(nbytes))

    def settle(self, stream: Any, patience_s: float = 0.3) -> None:
        """Let ``stream`` do what it can: until it is done, or for a while if something holds it up."""
        reached = stream.record_event()
        end = time.monotonic() + patience_s
        while not reached.query() and time.monotonic() < end:
            time.sleep(0.001)

    def finish_compute(self) -> None:
        """Wait until what compute has to do is done; copies may still run."""
        self.backend.compute_stream().record_event().synchronize()

    def drain(self) -> None:
        """Wait until all work queued so far is done."""
        if self._on_cpu:
            for stream in (self.backend.compute_stream(), *streams_of(self.backend)):
                stream.synchronize()
        else:
            torch.accelerator.synchronize(self.device)
