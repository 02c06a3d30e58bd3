"""Parameters that have made their step in a backward that still runs: an error for a recomputation that reads one.

Autograd compares the version of what it has saved. A recomputation that reads a parameter's numbers and saves none, as
by its ``detach()``, would go on with those after the step. So the parameter's class tells, as it does for steps beside
the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from offload.base.torch_private import this_backward
from offload.optimizer.forward import READ_NO_NUMBER, untold


class SteppedParameter(nn.Parameter):
    """A parameter until the end of the backward in which it was stepped."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """One that is made of the class of another, by copy.deepcopy for example, is an ordinary one."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Hooks, and steps, run without grad mode; other threads run in no backward.
        if torch.is_grad_enabled() and this_backward() != -1 and function not in READ_NO_NUMBER:
            raise RuntimeError(
                "a parameter must get one gradient in each step if in_backward=True, and no recomputation must read it "
                f"after its step, but one gives it to {function}; leave what reads it out of checkpoints, or leave "
                "in_backward (in prepare: step_in_backward) out. Other parameters have made this step: load a "
                "checkpoint."
            )
        return untold(function, args, kwargs)


def tell_reads(parameters: Iterable[Any]) -> None:
    """From here on, a recomputation that reads one of these raises, unless it is of a class of the program's."""
    for one in parameters:
        if type(one) is nn.Parameter:
            one.__class__ = SteppedParameter


def allow_reads(parameters: Iterable[Any]) -> None:
    """The backward is over that has stepped them."""
    stepped: list[Any] = [one for one in parameters if type(one) is SteppedParameter]
    for one in stepped:
        one.__class__ = nn.Parameter
