"""The same step with and without offloading, under adverse conditions, compared bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload.device.select import get_backend
from tests.lab import Lab

OFFLOADED, LAYERS = 2, 4
_M_PERTURB = -6  # of glibc's mallopt


@contextlib.contextmanager
def adverse() -> Iterator[None]:
    """Copies on the CPU begin late, memory that the library gives up is poisoned, and no warning is an error."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lab = Lab(get_backend("cpu"), patch)
        lab.adverse()
        try:
            yield
        finally:
            lab.slow()
            lab.backend.poison = False
            lab.drain()


def seed_all(seed: int) -> None:
    """Let each run draw the same random numbers."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks about every kind of device, which takes longer
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)  # what PyTorch's and Hugging Face's code draws from


def fill_new_memory(byte: int) -> None:
    """Let the C library fill what it hands out, where it can: who reads memory that nobody wrote then shows it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_PERTURB, byte)


@dataclass
class Outcome:
    """What one run of a step gave: tensors by what they are, or the error's type."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    error: str = ""
    offloaded_bytes: int = 0

    def differences(self, other: Outcome) -> set[str]:
        """Names of the tensors that ``other`` has not the same; or, in words, what else is not."""
        if self.error or other.error:
            alike = self.error.partition(":")[0] == other.error.partition(":")[0]
            return set() if alike else {f"{self.error or 'no error'} / {other.error or 'no error'}"}
        if self.tensors.keys() != other.tensors.keys():
            return {f"{sorted(self.tensors)} / {sorted(other.tensors)}"}
        return {name for name, found in self.tensors.items() if not same(found, other.tensors[name])}


def outcome_of(step: Callable[[], dict[str, torch.Tensor | None]]) -> Outcome:
    """Run ``step`` with the same random numbers at each call."""
    seed_all(0)
    try:
        return Outcome(step())
    except Exception as error:  # noqa: BLE001  # whatever PyTorch raises without offloading, it has to raise with it
        return Outcome(error=f"{type(error).__name__}: {str(error)[:300]}")


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit, NaN to NaN."""
    if one is None or other is None:
        return one is other
    if one.is_nested and other.is_nested:
        return one.size(0) == other.size(0) and all(map(same, one.unbind(), other.unbind()))
    if one.is_complex() and other.is_complex() and one.layout == other.layout == torch.strided:
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def compare(
    plain: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    ours: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    refusals: tuple[str, ...],
) -> str | None:
    """What goes wrong in a program that gives named numbers, in plain PyTorch and with the library.

    ``None`` if nothing does; ``"skipped: ..."`` if plain PyTorch fails, and ``"refused: ..."`` if the library raises a
    ``ValueError`` that begins with one of the ``refusals``.
    """
    try:
        wanted = list(plain())
    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported
        return f"skipped: {error}"
    try:
        found = list(ours())
    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported
        refused = isinstance(error, ValueError) and str(error).startswith(refusals)
        return f"{'refused' if refused else type(error).__name__}: {error}"
    if [name for name, _ in wanted] != [name for name, _ in found]:
        return "other numbers are there"
    pairs = zip(wanted, found, strict=True)
    return next((f"different: {name}" for (name, one), (_, other) in pairs if not same(one, other)), None)


class Layer(nn.Module):
    """A function as a module, so that hooks can go around it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class _Watch(TorchDispatchMode):
    """Does nothing; but some functions of PyTorch take other kernels wherever a dispatch mode is active."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


def _watched(layer: nn.Module, inputs: Any) -> Any:
    with _Watch():
        return layer(*inputs)


WITHOUT = {"context": "none", "hooks": "none", "regions": "watched"}
"""What each way of offloading is compared with."""


@contextlib.contextmanager
def entry(way: str, layers: Sequence[nn.Module]) -> Iterator[tuple[Callable[[nn.Module, Any], Any], Any]]:
    """How a layer is called: as it is, watched, in the context, with hooks, or with everything computed again.

    Also what has the counters.
    """
    options: Any = {"min_bytes": 0, "device": "cpu"}
    if way == "none":
        yield lambda layer, inputs: layer(*inputs), None
    elif way == "watched":
        yield _watched, None
    elif way == "regions":
        with offload.offload_layers(layers, OFFLOADED, policies={"*": "recompute"}, **options) as handle:
            yield lambda layer, inputs: layer(*inputs), handle
    elif way == "context":
        context, sync = offload.get_cpu_offload_context(True, OFFLOADED, len(layers), **options)

        def call(layer: nn.Module, inputs: Any) -> Any:
            with context:
                output = layer(*inputs)
            return sync(output)

        yield call, context
    else:
        with offload.offload_layers(layers, OFFLOADED, **options) as handle:
            yield lambda layer, inputs: layer(*inputs), handle
