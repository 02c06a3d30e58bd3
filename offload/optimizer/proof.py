"""Finds out how an optimizer may be split: by trying it on small parameters and comparing every bit.

An optimizer is *elementwise* if stepping each piece of a parameter by itself gives the same bits as stepping the
parameter; then its state is streamed in chunks. If that holds for whole parameters only (Adafactor's factors, Muon's
products), the state is streamed parameter by parameter. An optimizer whose parameters depend on each other (LBFGS,
a learning rate found from all gradients) has other bits then, and is refused.

What steps other tensors is a stand-in: an optimizer of the user's class. The user's own object is never changed.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.base.tensors import tensors_in

Group = dict[str, Any]  # a parameter group: options, and ``params``


OWN = {"param_groups", "state"}  # the attributes, beside hooks, that a stand-in has of its own


def with_groups(optimizer: torch.optim.Optimizer) -> list[tuple[int, torch.Tensor]]:
    """All parameters, each with the number of its group, in the order of their numbers in a ``state_dict``."""
    return [(number, one) for number, group in enumerate(optimizer.param_groups) for one in group["params"]]


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, a function of an optimizer, without the hooks that PyTorch runs around it."""
    found: Callable[..., Any] = inspect.unwrap(
        type(optimizer).step, stop=lambda step: not getattr(step, "hooked", False)
    )
    return found


def stand_in_for(optimizer: torch.optim.Optimizer, groups: list[Group], state: dict[Any, Any]) -> torch.optim.Optimizer:
    """An optimizer of the same class, with the same attributes, that has these groups, this state and no hooks."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    hooks = {name: OrderedDict[int, Any]() for name in vars(optimizer) if name.endswith("hooks")}
    vars(other).update(vars(optimizer) | hooks | {"param_groups": groups, "state": state})
    return other


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One whose step does nothing."""
    return stand_in_for(optimizer, [{**group, "params": []} for group in optimizer.param_groups], defaultdict(dict))


def changes(before: dict[str, Any], after: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """What a step has set: an optimizer may count its steps in its groups, or in its attributes."""
    found = {key: value for key, value in after.items() if key not in own and not key.endswith("hooks")}
    return {key: value for key, value in found.items() if key not in before or before[key] is not value}


TRIAL_STEPS = 8  # some optimizers change their rule after a few: RAdam after five
LARGEST = {1: 8192, 2: 128, 3: 32, 4: 16}
"""The longest dimension of a parameter that is tried, by the number of dimensions: long enough, and of whole blocks,
for optimizers that hold the state of large parameters in 8 bits."""
SPLIT = 64  # elements: kernels of the CPU compute the last few, behind the last whole vector, by other instructions
RATE = 1e-2  # in place of the learning rate, which may still be 0 while a scheduler warms up

Layout = Mapping[str, torch.dtype]  # the state tensors that have the parameter's shape, by name


class Proof(NamedTuple):
    """How an optimizer may be split."""

    elementwise: bool
    layouts: Mapping[torch.Tensor, Layout]  # of each parameter


class _Tried(NamedTuple):
    """One small parameter, and what is done to it."""

    parameters: list[torch.Tensor]  # the parameters of the same kind
    options: dict[str, Any]
    value: torch.Tensor
    gradients: list[torch.Tensor]
    marks: dict[str, Any]  # attributes of the parameter

    def pieces(self) -> list[_Tried]:
        """Two of them, if it is long enough."""
        at = self.value.numel() // 2 // SPLIT * SPLIT
        if not at:
            return [self]
        parts = zip(*(tensor.flatten().tensor_split((at,)) for tensor in (self.value, *self.gradients)), strict=True)
        return [_Tried([], self.options, value, gradients, self.marks) for value, *gradients in parts]


def prove(
    optimizer: torch.optim.Optimizer, state_dtype: torch.dtype | None, device: torch.device | None = None
) -> Proof:
    """Try the class of the optimizer, with its options, on small parameters of the same kinds, on the given device."""
    _refuse_wrappers(optimizer)
    tried = list(_small_parameters(optimizer, state_dtype, device))
    devices = {one.value.device for one in tried if one.value.device.type == "cuda"}
    with (
        torch.no_grad(),  # as the program steps a class without a decorator
        torch.random.fork_rng(list(devices)),
        _nothing_left_behind(optimizer),
    ):
        try:
            together = _step_sets(optimizer, [tried])
        except Exception as error:
            raise _no_proof(optimizer, f"whose step() fails with small parameters ({error})") from error
        for _, state in together:
            for key, value in state.items():
                if type(value) is not torch.Tensor and any(map(is_large, tensors_in(value))):
                    raise _no_proof(optimizer, f"whose {key} is no plain tensor but of type {type(value).__name__}")
        pairs = [(one, state) for one, (_, state) in zip(tried, together, strict=True)]
        elementwise = all(
            of_shape(value, one.value) for one, state in pairs for value in state.values() if is_large(value)
        )
        elementwise = elementwise and not _objection(together, optimizer, [one.pieces() for one in tried])
        if not elementwise and (why := _objection(together, optimizer, [[one] for one in tried])):
            raise _no_proof(optimizer, why)
        try:
            unhooked_step(optimizer)(without_parameters(optimizer))
        except Exception as error:
            raise _no_proof(optimizer, f"whose step() fails without parameters ({error})") from error
    layouts = {
        parameter: {key: value.dtype for key, value in state.items() if of_shape(value, one.value)}
        for one, state in pairs
        for parameter in one.parameters
    }
    return Proof(elementwise, layouts)


def _no_proof(optimizer: torch.optim.Optimizer, why: str) -> TypeError:
    return TypeError(
        f"optimizer must be one that steps each parameter by itself, got {type(optimizer).__name__}, {why}; leave the "
        "optimizer as it is."
    )


def is_large(value: object) -> bool:
    """Whether a value in an optimizer's state is a tensor of more than one number."""
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _refuse_wrappers(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that reaches its parameters by other ways than its groups would step them in the trial."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in vars(optimizer).items():
        if name in OWN:
            continue
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for one in parts if isinstance(parts, list | tuple | set) else [value]:
            if isinstance(one, torch.optim.Optimizer):
                instead = f"give optimizer.{name} if all it does is to call that, as Accelerate's does"
                raise _no_proof(optimizer, f"which has an optimizer in its attribute {name} ({instead})")
            if id(one) in parameters:
                raise _no_proof(optimizer, f"which has parameters in its attribute {name}")


@contextmanager
def _nothing_left_behind(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Stand-ins share lists and dictionaries with the program's optimizer: what a step puts there is no state."""
    containers = {name: one for name, one in vars(optimizer).items() if name not in OWN and not name.endswith("hooks")}
    found = [(name, one) for name, one in containers.items() if isinstance(one, dict | list | set)]
    before = [(name, one, one.copy(), _tensors_held(one)) for name, one in found]
    try:
        yield
    finally:
        grown = [name for name, one, _, tensors in before if _tensors_held(one) > tensors]
        for _, one, held, _ in before:
            one.clear()
            (one.extend if isinstance(one, list) else one.update)(held)
    for name in grown:
        raise _no_proof(optimizer, f"whose step() keeps tensors in its attribute {name} and not in its state")


def _tensors_held(container: Any) -> int:
    """How many tensors are in a list or a set, or among the keys and values of a dictionary."""
    keys = [*container] if isinstance(container, dict | set) else []
    return sum(1 for _ in tensors_in([keys, container]))


def _told(value: object) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


def marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes that the program has given a parameter: a step may look at them."""
    return {**vars(parameter)} if type(parameter) in (torch.Tensor, nn.Parameter) else {}


def of_shape(value: object, parameter: torch.Tensor) -> bool:
    """Whether a value in an optimizer's state is a tensor with a number for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape


def _small_parameters(
    optimizer: torch.optim.Optimizer, state_dtype: torch.dtype | None, device: torch.device | None
) -> Iterable[_Tried]:
    """Two parameters for each kind of options, dtype and number of dimensions, like the largest of the kind."""
    kinds: dict[object, tuple[dict[str, Any], list[torch.Tensor]]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        rate = options.get("lr")
        if rate is not None:
            options["lr"] = torch.full_like(rate, RATE) if isinstance(rate, torch.Tensor) else RATE
        told = repr(sorted((key, repr(value)) for key, value in options.items() if key not in ("lr", "initial_lr")))
        for parameter in group["params"]:
            if parameter.numel() and parameter.ndim:
                marks = tuple((key, _told(value)) for key, value in marks_of(parameter).items())
                kind = told, parameter.dtype, gradient_dtype(parameter), parameter.ndim, marks
                kinds.setdefault(kind, (options, []))[1].append(parameter)
    numbers = torch.Generator().manual_seed(0)
    for options, parameters in kinds.values():
        largest = max(parameters, key=torch.numel)
        size = [min(length, LARGEST.get(largest.ndim, 4)) for length in largest.shape]
        dtype = dtype_of_step(largest, state_dtype)
        for scale in (1.0, 8.0):  # what depends on a norm of several parameters shows
            drawn = [scale * torch.randn(size, generator=numbers, device="cpu") for _ in range(TRIAL_STEPS + 1)]
            value, *gradients = (one.to(device or largest.device, dtype) for one in drawn)
            if dtype is largest.dtype:  # else they are converted as well
                gradients = [one.to(gradient_dtype(largest)) for one in gradients]
            yield _Tried(parameters, options, value, gradients, marks_of(largest))


def check_dense(parameter: torch.Tensor) -> None:
    """Raise if the gradient of a parameter cannot be stepped in chunks."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout is not torch.strided:
        raise TypeError(
            f"gradients must be dense to be stepped in chunks, got one of layout {gradient.layout} of a parameter "
            f"of shape {tuple(parameter.shape)}; build the embedding with sparse=False."
        )


def dtype_of_step(parameter: torch.Tensor, state_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a parameter is stepped in; one without dimensions, whose state is as small, in its own."""
    return state_dtype if state_dtype and parameter.ndim and parameter.is_floating_point() else parameter.dtype


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of ``parameter.grad``."""
    return parameter.grad_dtype or parameter.dtype


_Outcome = tuple[torch.Tensor, dict[str, Any]]


def _step_sets(optimizer: torch.optim.Optimizer, sets: list[list[_Tried]]) -> list[_Outcome]:
    """Step each set of parameters by itself; returns their values and state in order."""
    step = unhooked_step(optimizer)
    results: list[_Outcome] = []
    for tried in sets:
        parameters = [nn.Parameter(one.value.clone()) for one in tried]
        state: dict[Any, Any] = defaultdict(dict)
        groups: dict[int, Group] = {}  # those of one group are in one group: its step may look at all of them
        for one, parameter in zip(tried, parameters, strict=True):
            vars(parameter).update(one.marks)
            groups.setdefault(id(one.options), {**one.options, "params": []})["params"].append(parameter)
        stand_in = stand_in_for(optimizer, list(groups.values()), state)
        for number in range(TRIAL_STEPS):
            for one, parameter in zip(tried, parameters, strict=True):
                if parameter.dtype is not one.gradients[number].dtype:
                    parameter.grad_dtype = one.gradients[number].dtype
                parameter.grad = one.gradients[number].clone()
            step(stand_in)
        results += [(parameter.detach(), state[parameter]) for parameter in parameters]
    return results


def _objection(together: list[_Outcome], optimizer: torch.optim.Optimizer, sets: list[list[_Tried]]) -> str:
    """What is wrong if parameters are stepped in these sets; empty if they get the same bits, and the same state."""
    other = "whose parameters get other bits when they are stepped one by one"
    try:
        found = iter(_step_sets(optimizer, sets))
    except Exception as error:  # noqa: BLE001  Muon, for one, takes no piece
        return f"whose step() fails with fewer parameters ({error})"
    for (value, state), tried in zip(together, sets, strict=True):
        values, states = zip(*(next(found) for _ in tried), strict=True)
        large = {key: one for key, one in state.items() if isinstance(one, torch.Tensor) and one.ndim}
        pairs = [(value, values), *((one, [part.get(key) for part in states]) for key, one in large.items())]
        for whole, parts in pairs:
            if not all(isinstance(one, torch.Tensor) for one in parts):
                return other
            joined = torch.cat([part.flatten() for part in parts])
            if not torch.equal(whole.flatten().nan_to_num(), joined.nan_to_num()):
                return other
    return ""
