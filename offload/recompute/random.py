"""Generators of random numbers, and their states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def drawn_again(states: Mapping[torch.Generator, torch.Tensor]) -> Iterator[None]:
    """The generators draw what they drew from these states on; afterwards each goes on from where it is now."""
    present = {generator: generator.get_state() for generator in states}
    try:
        for generator, state in states.items():
            generator.set_state(state)
        yield
    finally:
        for generator, state in present.items():
            generator.set_state(state)


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
    every = [torch.default_generator, *generators]
    every += [default_generator(device) for device in devices if device.type == "cuda"]
    return {generator: generator.get_state() for generator in dict.fromkeys(every)}
