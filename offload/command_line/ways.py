"""Four ways to train a model on one device, the simplest first, and what each comes to."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from offload.base.checks import format_bytes
from offload.command_line.shape import Shape
from offload.planning.link import Link
from offload.planning.plan import Plan, plan
from offload.planning.profile import Profile

MUCH = 1.005
"""Whole layers are simpler than regions, so they may take so much longer."""

LAYERS = "model.model.layers"
"""Where Hugging Face's models of this type have them."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        name: For people.
        write: The call that does it.
        misfit: Why it does not fit; empty if it does.
        step_s: Predicted seconds of a step's layers and loss.
        peak_bytes: On the device beside what is fixed.
        host_bytes: On the host.
    """

    name: str
    write: str
    misfit: str = ""
    step_s: float | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True)
class Needs:
    """What a model needs beside activations.

    Args:
        shape: Its sizes.
        parameter_bytes: For each weight, its gradient and optimizer state.
        loss_bytes: For the loss.
    """

    shape: Shape
    parameter_bytes: int
    loss_bytes: int

    @property
    def layer_parameters(self) -> int:
        """Of all layers."""
        return self.shape.layers * self.shape.layer_parameters

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layer_parameters + self.shape.outside_parameters

    @property
    def fixed_bytes(self) -> int:
        """On the device, with all of the model there."""
        return self.parameters * self.parameter_bytes + self.loss_bytes


def ways(
    profile: Profile, needs: Needs, usable: int, link: Link, host: int | None
) -> Iterator[tuple[Way, Plan | None]]:
    """The ways, each with its plan if it fits, on a device and a host that have so many bytes."""
    left = usable - needs.fixed_bytes
    kept = plan(profile, sys.maxsize, link)
    misfit = "" if kept.peak_bytes <= left else f"activations take {format_bytes(kept.peak_bytes)}"
    yield Way("keep all", "offload nothing", misfit, kept.step_s, kept.peak_bytes, 0), kept
    whole = replace(profile, layers=tuple(replace(layer, regions=()) for layer in profile.layers))
    way, made = _planned(Way("whole layers", ""), whole, left, link, host)
    yield replace(way, write=f"offload_layers({LAYERS}, num_layers={made.num_layers})" if made else ""), made
    budgeted = _budgeted(left + needs.loss_bytes)
    yield _planned(Way("regions", budgeted), profile, left, link, host)
    # On the device are the weights of two layers, as many gradients, and all that is outside of the layers.
    shape = needs.shape
    layer_bytes = shape.layer_parameters * shape.item_bytes
    left = usable - shape.outside_parameters * needs.parameter_bytes - 4 * layer_bytes - needs.loss_bytes
    on_host = needs.layer_parameters * needs.parameter_bytes
    rest = None if host is None else host - on_host
    write = f'stream_weights({LAYERS}, "cuda")'
    way, made = _planned(Way("streamed weights", write), profile, left, link, rest)
    if made is not None:
        if made.host_bytes or made.recompute_s:
            write += f", then {_budgeted(left + needs.loss_bytes)}"
        d2h_s = (shape.layers * layer_bytes + made.host_bytes) / link.d2h_bytes_per_s
        h2d_s = (2 * (shape.layers - 1) * layer_bytes + made.host_bytes) / link.h2d_bytes_per_s
        way = replace(
            way,
            write=write,
            step_s=max(made.step_s, d2h_s, h2d_s),
            peak_bytes=made.peak_bytes + 4 * layer_bytes,
            host_bytes=made.host_bytes + on_host,
        )
    yield way, made


def choose(found: Iterable[Way]) -> Way | None:
    """The simplest way that fits; regions in place of whole layers where they are faster."""
    fitting = {way.name: way for way in found if not way.misfit}
    whole, regions = fitting.get("whole layers"), fitting.get("regions")
    if whole and regions and "keep all" not in fitting and (whole.step_s or 0) > MUCH * (regions.step_s or 0):
        return regions
    return next(iter(fitting.values()), None)


def _planned(way: Way, profile: Profile, left: int, link: Link, host: int | None) -> tuple[Way, Plan | None]:
    """The way with what its plan comes to, or why there is none."""
    if left < 0:
        return replace(way, write="", misfit=f"{format_bytes(-left)} are missing for what is fixed"), None
    if host is not None and host < 0:
        return replace(way, write="", misfit=f"{format_bytes(-host)} of host memory are missing"), None
    try:
        made = plan(profile, left, link, max_host_bytes=host)
    except ValueError:
        within = "" if host is None else f" and {format_bytes(host)} on the host"
        return replace(way, write="", misfit=f"{format_bytes(left)}{within} are too little for activations"), None
    return replace(way, step_s=made.step_s, peak_bytes=made.peak_bytes, host_bytes=made.host_bytes), made


def _budgeted(left: int) -> str:
    """What a step may add on the device, rounded down."""
    return f'offload_layers({LAYERS}, memory_budget="{max(0, left) * 10 // 2**30 / 10}GiB")'
