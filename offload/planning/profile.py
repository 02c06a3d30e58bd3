"""What each layer costs: seconds forward and backward, bytes saved in between.

Pure data: :func:`offload.planning.measure.profile_layers` takes it from a model as it is, and it can be
written by hand, to ask what another model or machine would do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from offload.base.checks import format_bytes, format_s

UNLISTED_PIECES = 8
"""Into how many equal tensors the bytes of a layer are divided that does not list them."""


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs.

    Args:
        forward_s: Compute seconds of its forward.
        backward_s: Compute seconds of its backward.
        saved_bytes: Size of its activation set, as far as it can travel.
        tensors: The bytes of each tensor of the set in the order of saving; equal pieces if left out.
        workspace_bytes: What else is on the device while the layer runs forward or backward:
            temporary tensors, gradients.

    Raises:
        ValueError: A value is negative or not finite, or the tensors do not add up to ``saved_bytes``.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    tensors: tuple[int, ...] = ()
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "saved_bytes", "workspace_bytes"):
            _check_not_negative(name, getattr(self, name))
        for nbytes in self.tensors:
            _check_not_negative("each of tensors", nbytes)
        if self.tensors and sum(self.tensors) != self.saved_bytes:
            raise ValueError(
                f"tensors must add up to saved_bytes = {self.saved_bytes}, got {self.tensors} with sum "
                f"{sum(self.tensors)}; give one of the two"
            )

    def pieces(self) -> tuple[int, ...]:
        """The bytes of each tensor in the order of saving; stand-ins of equal size if they are not listed."""
        if self.tensors or not self.saved_bytes:
            return self.tensors
        edges = [self.saved_bytes * index // UNLISTED_PIECES for index in range(UNLISTED_PIECES + 1)]
        return tuple(end - start for start, end in pairwise(edges))


@dataclass(frozen=True)
class Profile:
    """What the layers of one microbatch cost.

    Args:
        layers: One :class:`LayerProfile` per layer, in call order.
        loss_s: Compute seconds between the last layer's forward and its backward: head and loss.
        other_s: Compute seconds of the rest of the step: embedding, optimizer.
    """

    layers: tuple[LayerProfile, ...]
    loss_s: float = 0.0
    other_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        _check_not_negative("loss_s", self.loss_s)
        _check_not_negative("other_s", self.other_s)

    @property
    def saved_bytes(self) -> int:
        """Size of all activation sets together."""
        return sum(layer.saved_bytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of a step that never waits."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers) + self.loss_s + self.other_s

    def __str__(self) -> str:
        lines = [f"{'layer':>5}{'forward':>11}{'backward':>11}{'saved':>12}{'tensors':>9}"]
        for index, layer in enumerate(self.layers):
            times = f"{format_s(layer.forward_s):>11}{format_s(layer.backward_s):>11}"
            saved = f"{format_bytes(layer.saved_bytes):>12}{len(layer.tensors) or '-':>9}"
            lines.append(f"{index:>5}{times}{saved}")
        lines.append(f"step {format_s(self.compute_s)}, saved {format_bytes(self.saved_bytes)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StageProfile:
    """What one chunk of a stage costs.

    The defaults stand for stages of which only the order is known: a backward takes two forwards, and the copies of a
    set one forward in each direction.

    Args:
        forward_s: Compute seconds of its forward.
        backward_s: Compute seconds of its backward, or of the half for the inputs.
        weight_s: Compute seconds of the half for the weights, where the schedule splits the backward.
        saved_bytes: Size of its activation set, as far as it can travel.

    Raises:
        ValueError: A value is negative or not finite.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_s: float = 0.0
    saved_bytes: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_not_negative(name, value)


def _check_not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, at least 0, got {value!r}")
