"""Generators of random numbers, and their states."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch


class RandomState(AbstractContextManager[None]):
    """The state of a generator as it is now; while entered, the generator has it again."""

    __slots__ = ("_generator", "_present", "_state")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._state = generator.get_state()

    def __enter__(self) -> None:
        self._present = self._generator.get_state()
        self._generator.set_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(self._present)


def default_generator(device: torch.device) -> torch.Generator:
    """What operations on a device draw from, unless they are given another."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generators: tuple[torch.Generator, ...] = module.default_generators
    return generators[module.current_device() if device.index is None else device.index]


def states_of(
    generators: Iterable[torch.Generator], devices: Iterable[torch.device]
) -> dict[torch.Generator, torch.Tensor]:
    """The states of generators and of the default ones of devices."""
    every = {torch.default_generator, *generators}
    every |= {default_generator(device) for device in set(devices) if device.type in ("cpu", "cuda")}
    return {generator: generator.get_state() for generator in every}
