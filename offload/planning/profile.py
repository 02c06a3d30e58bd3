"""What each layer costs: seconds forward and backward, bytes saved in between.

Pure data: :func:`offload.measuring.profile_layers.profile_layers` takes it from a model as it is, and it can be
written by hand, to ask what another model or machine would do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self

from offload.base.checks import check_number, check_type, describe, format_bytes, format_s
from offload.planning.as_json import Stored
from offload.recompute.costs import RegionProfile

UNLISTED_PIECES = 8
"""Into how many equal tensors the bytes of a layer are divided that does not list them."""

HOST_BOUND = 1.1
"""A recorded forward of more than so many times its seconds waits for the host; by less, steps differ anyway."""


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
        regions: What its operations make, in the order of forward; the layer is one region if left out. The saved
            ones are its activation set, and the list of tensors.
        recorded_s: Seconds of its forward while its operations are recorded, as those of a layer with policies by
            region are: more than ``forward_s`` where the device waits for the host; the same if left out.

    Raises:
        ValueError: A value is negative or not finite, the tensors or the saved regions do not add up to
            ``saved_bytes``, or a region reads one that is not before it.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    tensors: tuple[int, ...] = ()
    workspace_bytes: int = 0
    regions: tuple[RegionProfile, ...] = field(default=(), kw_only=True)
    recorded_s: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "saved_bytes", "workspace_bytes", "recorded_s"):
            check_number(name, getattr(self, name))
        object.__setattr__(self, "recorded_s", max(self.forward_s, self.recorded_s))
        if self.regions:
            self._check_regions()
        for nbytes in self.tensors:
            check_number("each of tensors", nbytes)
        if self.tensors and sum(self.tensors) != self.saved_bytes:
            raise ValueError(
                f"tensors must add up to saved_bytes = {self.saved_bytes}, got {self.tensors} with sum "
                f"{sum(self.tensors)}; give one of the two"
            )

    @classmethod
    def from_regions(
        cls,
        regions: Iterable[RegionProfile],
        forward_s: float,
        backward_s: float,
        *,
        workspace_bytes: int = 0,
        recorded_s: float = 0.0,
    ) -> LayerProfile:
        """The profile of a layer whose regions are known: what it saves is what they save."""
        regions = tuple(regions)
        saved_bytes = sum(region.nbytes for region in regions if region.saved)
        return cls(
            forward_s,
            backward_s,
            saved_bytes,
            workspace_bytes=workspace_bytes,
            regions=regions,
            recorded_s=recorded_s,
        )

    def _check_regions(self) -> None:
        for number, region in enumerate(self.regions):
            check_number("seconds of a region", region.seconds)
            check_number("nbytes of a region", region.nbytes)
            if region.another_of is not None and not 0 <= region.another_of < number:
                raise ValueError(
                    f"region {number}, {region.name!r}, must be another result of an operation whose first is before "
                    f"it, got another_of = {region.another_of}; list the regions in the order of forward."
                )
            if not all(0 <= read < number for read in region.reads):
                raise ValueError(
                    f"region {number}, {region.name!r}, must read regions before it, got {region.reads}; list the "
                    "regions in the order of forward."
                )
        saved = tuple(region.nbytes for region in self.regions if region.saved)
        if sum(saved) != self.saved_bytes:
            raise ValueError(
                f"the saved regions must add up to saved_bytes = {self.saved_bytes}, got {sum(saved)}; make the "
                "profile with LayerProfile.from_regions"
            )
        object.__setattr__(self, "tensors", saved)  # the way to fill a frozen dataclass

    @cached_property
    def kind(self) -> tuple[RegionProfile, ...]:
        """The regions without their seconds, which layers of one kind have in common."""
        return tuple(replace(region, seconds=0.0) for region in self.regions)

    def as_one_region(self) -> LayerProfile:
        """The layer as it is planned where all that it saves is treated alike."""
        return replace(self, regions=(), recorded_s=0.0)

    def scaled(self, ratio: float) -> LayerProfile:
        """The layer with ``ratio`` times the tokens; see :meth:`Profile.scaled`."""
        regions = tuple(
            replace(one, nbytes=round(one.nbytes * ratio), seconds=one.seconds * _growth(one.name, ratio))
            for one in self.regions
        )
        # What is not in the regions, as it is computed again by the layer itself, grows with the tokens.
        before_s, after_s = (sum(region.seconds for region in of) for of in (self.regions, regions))
        whole_s = max(self.forward_s, before_s)
        growth = ratio + (after_s - ratio * before_s) / whole_s if whole_s else ratio
        tensors = () if regions else tuple(round(nbytes * ratio) for nbytes in self.tensors)
        kept = tuple(region.nbytes for region in regions if region.saved) or tensors
        return LayerProfile(
            self.forward_s * growth,
            self.backward_s * growth,
            sum(kept) if kept else round(self.saved_bytes * ratio),
            tensors,
            round(self.workspace_bytes * ratio),
            regions=regions,
            # If the device waits for the host, tokens do not change that.
            recorded_s=self.recorded_s * (1.0 if self.recorded_s > HOST_BOUND * self.forward_s else growth),
        )

    def pieces(self) -> tuple[int, ...]:
        """The bytes of each tensor in the order of saving; stand-ins of equal size if they are not listed."""
        if self.tensors or not self.saved_bytes:
            return self.tensors
        edges = [self.saved_bytes * index // UNLISTED_PIECES for index in range(UNLISTED_PIECES + 1)]
        return tuple(end - start for start, end in pairwise(edges))


@dataclass(frozen=True)
class Profile(Stored):
    """What the layers of one microbatch cost.

    Args:
        layers: One :class:`LayerProfile` per layer, in call order.
        loss_s: Compute seconds between the last layer's forward and its backward: head and loss.
        other_s: Compute seconds of the rest of the step: embedding, optimizer.
        loss_bytes: The most that is on the device in ``loss_s`` beside the activation sets.
    """

    _kind: ClassVar = "profile"
    layers: tuple[LayerProfile, ...]
    loss_s: float = 0.0
    other_s: float = 0.0
    loss_bytes: int = 0

    def __post_init__(self) -> None:
        layers = tuple(self.layers) if isinstance(self.layers, Iterable) else (self.layers,)
        for layer in layers:
            if not isinstance(layer, LayerProfile):
                raise TypeError(
                    f"layers must hold a LayerProfile for each layer, got {describe(layer)}; profile_layers(layers, "
                    "step) measures a model's."
                )
        if not layers:
            raise ValueError("layers must hold at least one LayerProfile, got none; profile the layers to offload.")
        object.__setattr__(self, "layers", layers)
        for name in ("loss_s", "other_s", "loss_bytes"):
            check_number(name, getattr(self, name))

    @property
    def saved_bytes(self) -> int:
        """Size of all activation sets together."""
        return sum(layer.saved_bytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of a step that never waits."""
        return math.fsum(layer.forward_s + layer.backward_s for layer in self.layers) + self.loss_s + self.other_s

    def scaled(self, tokens_ratio: float) -> Profile:
        """What the same model costs with another number of tokens, as far as that can be told.

        Bytes and seconds grow with the tokens, and those of a region that has ``attention`` in its name with their
        square: all tokens are taken to be one sequence. A layer's backward grows as its forward does. ``other_s``
        stays, since it is the optimizer's in the main, and so does ``recorded_s`` where it is more than a tenth above
        ``forward_s``: the device waits for the host then. With a profile of many tokens, nothing tells what recording a
        few takes the host.

        Raises:
            ValueError: ``tokens_ratio`` is not a positive, finite number.
        """
        check_number("tokens_ratio", tokens_ratio, positive=True)
        layers = tuple(layer.scaled(tokens_ratio) for layer in self.layers)
        return Profile(layers, self.loss_s * tokens_ratio, self.other_s, round(self.loss_bytes * tokens_ratio))

    def _values(self) -> dict[str, Any]:
        values = asdict(self)
        for region in (region for layer in values["layers"] for region in layer["regions"]):
            if not region["from_before"]:
                del region["from_before"]  # so that the texts of profiles without it are as they were
        return values

    @classmethod
    def _from_values(cls, values: dict[str, Any]) -> Self:
        layers = []
        for layer in values["layers"]:
            regions = tuple(RegionProfile(**one | {"reads": tuple(one["reads"])}) for one in layer["regions"])
            layers.append(LayerProfile(**layer | {"tensors": tuple(layer["tensors"]), "regions": regions}))
        return cls(tuple(layers), values["loss_s"], values["other_s"], values.get("loss_bytes", 0))

    def __str__(self) -> str:
        lines = [f"{'layer':>5}{'forward':>11}{'backward':>11}{'saved':>12}{'tensors':>9}"]
        for index, layer in enumerate(self.layers):
            times = f"{format_s(layer.forward_s):>11}{format_s(layer.backward_s):>11}"
            saved = f"{format_bytes(layer.saved_bytes):>12}{len(layer.tensors) or '-':>9}"
            lines.append(f"{index:>5}{times}{saved}")
        lines.append(f"step {format_s(self.compute_s)}, saved {format_bytes(self.saved_bytes)}")
        return "\n".join(lines)


def _growth(name: str, ratio: float) -> float:
    """How many times the seconds a region takes with so many times the tokens."""
    operation = name.rpartition(": ")[2]  # not the module, which may be one after attention
    return ratio**2 if "attention" in operation.lower() else ratio


def check_profile(profile: object) -> None:
    """Raise a ``TypeError`` for what is no profile."""
    check_type("profile", profile, Profile, "a Profile, such as profile_layers(layers, step) gives")
