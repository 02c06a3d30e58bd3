"""What was written down runs again: for the last time, or for a moment, with the record left as it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.recompute.record import Value

running = threading.RLock()
"""Autograd may ask in several threads for what one call makes."""


def make_meanwhile(value: Value) -> torch.UntypedStorage:
    """The bytes of a value, made for now: the record stays, to be run once more, and what else is made goes."""
    if value.call is None or value.memory is not None or value.held:
        return value.bytes()
    calls = value.call.before()
    last_use = {read: call.number for call in calls for read in call.reads}
    made: dict[Value, torch.UntypedStorage] = {}

    def bytes_of(value: Value) -> torch.UntypedStorage:
        return made[value] if value in made else value.bytes()

    with below_autograd():
        for call in calls:
            results = call.results(bytes_of)
            for one in filter(None, (reference() for reference in call.makes)):
                if one is value or one in last_use:
                    made[one] = results[one.place]
            del results
            for read in call.reads:
                if last_use[read] == call.number:
                    made.pop(read, None)
    return made[value]


def make_again(value: Value) -> torch.UntypedStorage:
    """Memory that holds the value; the calls that lead to it are run, unless they were already."""
    with running:
        if value.memory is None and value.call is not None:
            with below_autograd():
                for call in value.call.before():
                    call.run()
        return value.bytes()


@contextmanager
def below_autograd() -> Iterator[None]:
    """Calls were seen below autograd and autocast, and run there again; some kernels ask whether gradients are on."""
    with torch.enable_grad(), torch._C._ExcludeDispatchKeyGuard(ABOVE):
        yield


ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
for _name, _key in torch._C.DispatchKey.__members__.items():
    if _name.startswith(("Autograd", "Autocast")) and _name != "AutogradFunctionality":
        ABOVE |= torch._C.DispatchKeySet(_key)
