"""What each layer costs and how fast the link is: what a plan is made from. Pure data.

:func:`offload.profile_layers` and :func:`offload.measure_link` measure a model and a machine. Profiles and links can
also be written by hand, to ask what another model or machine would do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

from offload.base.checks import check_number, check_type, describe, format_bytes, format_s
from offload.recompute.costs import RegionProfile

UNLISTED_PIECES = 8  # into how many equal tensors the bytes of a layer are divided that does not list them
VERSION = 1
"""Of a profile's text. A later version of the library may write texts of a higher version, which are refused."""


@dataclass(frozen=True)
class Link:
    """Bandwidth between device and host memory, which is full duplex: both directions at once move more than one.

    A ``ValueError`` refuses bandwidths that are not positive and finite, or of both directions together that are less
    than a millionth of one alone.
    """

    d2h_bytes_per_s: float  #: Device to host, alone.
    h2d_bytes_per_s: float  #: Host to device, alone.
    duplex_bytes_per_s: float  #: Sum of both directions while both are busy.
    device: str = ""  #: What was measured, for people.

    def __post_init__(self) -> None:
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s"):
            check_number(name, getattr(self, name), positive=True, unit="bytes per second")
        slower = min(self.d2h_bytes_per_s, self.h2d_bytes_per_s)
        if self.duplex_bytes_per_s < slower / 1e6:  # a factor; measured ones can be far below one alone
            raise ValueError(
                "duplex_bytes_per_s must be the bytes per second of both directions together, got "
                f"{self.duplex_bytes_per_s:g} for a link of {slower:g} alone; if unknown, write {2 * slower:g}."
            )

    def faster(self, factor: float) -> Self:
        """A link that moves so many times as much in a second."""
        d2h, h2d, both = self.d2h_bytes_per_s, self.h2d_bytes_per_s, self.duplex_bytes_per_s
        return replace(
            self, d2h_bytes_per_s=factor * d2h, h2d_bytes_per_s=factor * h2d, duplex_bytes_per_s=factor * both
        )

    def rates(self, *, d2h: bool, h2d: bool) -> tuple[float, float]:
        """Bytes per second of the d2h and the h2d stream, of which the given ones are busy."""
        # Both share the duplex bandwidth in the proportion of what each reaches alone; neither is faster than alone.
        if not (d2h and h2d):
            return (self.d2h_bytes_per_s * d2h, self.h2d_bytes_per_s * h2d)
        share = min(1.0, self.duplex_bytes_per_s / (self.d2h_bytes_per_s + self.h2d_bytes_per_s))
        return (self.d2h_bytes_per_s * share, self.h2d_bytes_per_s * share)

    def __str__(self) -> str:
        rates = (self.d2h_bytes_per_s, self.h2d_bytes_per_s, self.duplex_bytes_per_s)
        d2h, h2d, duplex = (f"{rate / 1e9:.1f}" for rate in rates)
        return f"{self.device or 'link'}: d2h {d2h}, h2d {h2d}, both {duplex} GB/s"


class HostSeconds(NamedTuple):
    """What a layer costs the host, which queues the layer's kernels; zeros where it is far ahead of the device."""

    kept_s: float = 0.0  #: Of forward and backward if everything is kept.
    policy_s: float = 0.0  #: What offloading or recomputing adds to forward.
    second_run_s: float = 0.0  #: What recomputing adds to backward.
    copies_s: float = 0.0  #: What offloading alone adds to both, beside that.


NO_HOST = HostSeconds()


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs.

    The regions are the results of the layer's operations, and its inputs, in the order of forward; the layer is one
    region if they are left out. The saved regions are its activation set, and its tensors.

    Raises:
        TypeError: A value is no number, or ``tensors`` is no sequence.
        ValueError: A value is negative or not finite, the tensors or the saved regions do not add up to
            ``saved_bytes``, or a region reads one that is not before it.
    """

    forward_s: float  #: Compute seconds of its forward.
    backward_s: float  #: Compute seconds of its backward.
    saved_bytes: int  #: Size of the layer's activation set, as far as it can be offloaded.
    tensors: tuple[int, ...] = ()  #: The bytes of each tensor of the set in the order of saving, or equal pieces.
    workspace_bytes: int = 0  #: What else is on the device in its backward: temporary tensors, gradients.
    regions: tuple[RegionProfile, ...] = field(default=(), kw_only=True)
    forward_workspace_bytes: int | None = field(default=None, kw_only=True)  #: In forward; as in backward if left out.
    freed_sooner_bytes: int = field(default=0, kw_only=True)  #: So much less if the whole layer is recomputed.
    after_second_run_bytes: int = field(default=0, kw_only=True)
    """So much of ``workspace_bytes`` is on the device only once the layer has run again."""
    small_bytes: int = field(default=0, kw_only=True)  #: Saved beside that, kept unless the whole layer is recomputed.
    host: HostSeconds = field(default=NO_HOST, kw_only=True)

    def __post_init__(self) -> None:
        own = vars(self)  # __dict__ is the way to fill a frozen dataclass
        if self.forward_workspace_bytes is None:
            own["forward_workspace_bytes"] = self.workspace_bytes
        for name, value in own.items():
            if name not in ("tensors", "regions", "host"):
                check_number(name, value)
        for name, seconds in zip(HostSeconds._fields, self.host, strict=True):
            check_number(f"host.{name}", seconds)
        self._check_regions()
        if not isinstance(self.tensors, list | tuple):
            raise TypeError(f"tensors must hold the bytes of each tensor, such as (4096, 4096), got {self.tensors!r}")
        saved = tuple(region.nbytes for region in self.regions if region.saved)
        own["tensors"] = saved if self.regions else tuple(self.tensors)  # costs of a layer are cached by its profile
        for nbytes in self.tensors:
            check_number("each of tensors", nbytes)
        if (self.tensors or self.regions) and sum(self.tensors) != self.saved_bytes:
            raise ValueError(
                f"tensors must add up to saved_bytes = {self.saved_bytes}, got {self.tensors} with sum "
                f"{sum(self.tensors)}; give one of the two, or make the profile with LayerProfile.from_regions"
            )

    @classmethod
    def from_regions(
        cls, regions: Iterable[RegionProfile], forward_s: float, backward_s: float, **others: Any
    ) -> LayerProfile:
        """The profile of a layer whose regions are known: what it saves is what they save. ``others`` are fields."""
        regions = tuple(regions)
        saved_bytes = sum(region.nbytes for region in regions if region.saved)
        return cls(forward_s, backward_s, saved_bytes, regions=regions, **others)

    def _check_regions(self) -> None:
        for number, region in enumerate(self.regions):
            check_number("seconds of a region", region.seconds)
            check_number("nbytes of a region", region.nbytes)
            first, other, reads = region.another_of, region.only_with, region.reads
            if all(one is None or 0 <= one < number for one in (first, other, *reads)):
                continue  # without the texts
            for named, must in (
                ((first,), f"be another result of an operation whose first is before it, got another_of = {first}"),
                ((other,), f"be kept with a region before it, got only_with = {other}"),
                (reads, f"read regions before it, got {reads}"),
            ):
                if not all(one is None or 0 <= one < number for one in named):
                    text = f"region {number}, {region.name!r}, must {must}; list the regions in the order of forward."
                    raise ValueError(text)

    def known_regions(self) -> tuple[RegionProfile, ...]:
        """The regions; where they are not listed, one for each tensor, of equal seconds, that is never recomputed."""
        # So the n-th of m tensors is saved after the fraction n/m of forward, used in the mirrored part of backward.
        if self.regions:
            return self.regions
        edges = [self.saved_bytes * index // UNLISTED_PIECES for index in range(UNLISTED_PIECES + 1)]
        sizes = self.tensors or [end - start for start, end in pairwise(edges)]
        return tuple(RegionProfile("tensor", nbytes, 0.0, recomputable=False) for nbytes in sizes)


@dataclass(frozen=True)
class Profile:
    """What the layers of one microbatch cost."""

    layers: tuple[LayerProfile, ...]  #: One :class:`LayerProfile` per layer, in call order.
    loss_s: float = 0.0  #: Compute seconds between the last layer's forward and its backward: head and loss.
    other_s: float = 0.0  #: Compute seconds of the rest of the step: embedding, optimizer.
    loss_bytes: int = 0  #: The most that is on the device in ``loss_s`` beside the activation sets.
    calls: tuple[int, ...] = ()  #: The layers' numbers as forward calls them, if not each once in order.

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
        calls = tuple(self.calls) if isinstance(self.calls, Iterable) else (self.calls,)
        vars(self).update(layers=layers, calls=calls)
        if {*self.order} != {*range(len(layers))}:
            raise ValueError(
                f"calls must name each of the layers 0 to {len(layers) - 1}, got {calls}; leave it out where each is "
                "called once in order."
            )
        for name in ("loss_s", "other_s", "loss_bytes"):
            check_number(name, getattr(self, name))

    def with_layers(self, change: Callable[[LayerProfile], LayerProfile], **others: Any) -> Self:
        """The same profile with each layer changed, and with ``others`` among the profile's own fields."""
        return replace(self, layers=tuple(map(change, self.layers)), **others)

    @property
    def order(self) -> Sequence[int]:
        """The layers' numbers as forward calls them."""
        return self.calls or range(len(self.layers))

    @property
    def saved_bytes(self) -> int:
        """Size of all activation sets together."""
        return sum(self.layers[number].saved_bytes for number in self.order)

    @property
    def compute_s(self) -> float:
        """Seconds of a step that never waits."""
        called = (self.layers[number] for number in self.order)
        return math.fsum(layer.forward_s + layer.backward_s for layer in called) + self.loss_s + self.other_s

    def beside(self, nbytes: int) -> Self:
        """The profile of the same step with as much more on the device all the time."""

        def more(one: LayerProfile) -> LayerProfile:
            forward_bytes = (one.forward_workspace_bytes or 0) + nbytes
            return replace(one, workspace_bytes=one.workspace_bytes + nbytes, forward_workspace_bytes=forward_bytes)

        return self.with_layers(more, loss_bytes=self.loss_bytes + nbytes)

    def slowed(self, factor: float) -> Self:
        """The profile of layers and a loss that take the device and the host so many times as long."""

        def slower(one: LayerProfile) -> LayerProfile:
            regions = tuple(replace(region, seconds=factor * region.seconds) for region in one.regions)
            host, seconds = HostSeconds(*(factor * each for each in one.host)), (one.forward_s, one.backward_s)
            forward_s, backward_s = (factor * each for each in seconds)
            return replace(one, forward_s=forward_s, backward_s=backward_s, regions=regions, host=host)

        return self.with_layers(slower, loss_s=factor * self.loss_s)

    def to_json(self) -> str:
        """The profile as text, for :meth:`from_json`."""
        return json.dumps({"offload": "profile", "version": VERSION} | asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The profile of which :meth:`to_json` made a text; a ``ValueError`` for any other text."""
        needed = f"text must be a profile of version {VERSION} as its to_json() makes it, got {text[:40]!r}"
        try:
            values = json.loads(text)
            kind, version = values.pop("offload"), values.pop("version")
            if (kind, version) != ("profile", VERSION):
                raise ValueError(f"it is a {kind} of version {version}; save it again")
            layers = []
            for layer in values.pop("layers"):
                regions = tuple(RegionProfile(**one | {"reads": tuple(one["reads"])}) for one in layer["regions"])
                layers.append(LayerProfile(**layer | {"regions": regions, "host": HostSeconds(*layer.get("host", ()))}))
            return cls(tuple(layers), **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{needed}: {error}") from error

    def __str__(self) -> str:
        lines = [f"{'layer':>5}{'forward':>11}{'backward':>11}{'saved':>12}{'tensors':>9}"]
        for index, layer in enumerate(self.layers):
            times = f"{format_s(layer.forward_s):>11}{format_s(layer.backward_s):>11}"
            saved = f"{format_bytes(layer.saved_bytes):>12}{len(layer.tensors) or '-':>9}"
            lines.append(f"{index:>5}{times}{saved}")
        lines.append(f"step {format_s(self.compute_s)}, saved {format_bytes(self.saved_bytes)}")
        return "\n".join(lines)


def check_profile(profile: object) -> None:
    """Raise a ``TypeError`` for what is no profile."""
    check_type("profile", profile, Profile, "a Profile, such as profile_layers(layers, step) gives")


def check_link(link: object) -> None:
    """Raise a ``TypeError`` for what is no link."""
    check_type("link", link, Link, "a Link, such as measure_link() gives or Link(55e9, 55e9, 100e9) says")
