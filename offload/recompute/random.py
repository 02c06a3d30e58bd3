"""Random numbers that are drawn again: the state of the generator before an operation that draws."""

from __future__ import annotations

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

    @property
    def moved(self) -> bool:
        """Whether somebody has drawn since."""
        return not torch.equal(self._state, self._generator.get_state())

    def restore(self) -> None:
        """Give the generator the state again."""
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
