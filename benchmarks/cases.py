"""The suite's workloads, and which contenders are compared on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

import offload
from benchmarks.models import Llama, Model, Stack
from benchmarks.workloads import Workload, norm_mlp, reference_decoder
from offload.activations.context import DEFAULT_MIN_BYTES
from offload.planning.link import Link

CASES = ("decoder", "long", "compiled", "llama", "norm_mlp")

HIDING_MARGIN = 1.1
"""A layer of the long sequence computes this many times as long as the link needs for what it saves."""
LONG_UNIT = 8192
"""Its length is a multiple of this many tokens,"""
LONG_MOST = 32 * LONG_UNIT
"""and at most this."""
LONG_LAYERS = (3, 5)
"""Its fewest and its most layers."""
LONG_DEVICE_SHARE = 0.75
"""Of the device's memory, for all its activation sets together."""


@dataclass(frozen=True)
class Case:
    """A workload and what is compared on it."""

    name: str
    build: Callable[[torch.device], Model]
    ks: tuple[int, ...]
    """Numbers of layers that this library offloads."""
    checkpoint_ks: tuple[int, ...]
    """Numbers of checkpointed layers whose inputs it offloads."""
    te_ks: tuple[int, ...] = ()
    """Numbers of layers that Transformer Engine offloads."""
    turns_s: float = 0
    """About how long contenders take turns; 0 measures one after the other."""
    compiled: bool = False
    tokens: int | None = None
    """Length of the long sequence, whose steps take seconds."""


def cases(wanted: Collection[str], device: torch.device, link: Link, host_bytes: float) -> Iterator[Case]:
    """The workloads for a GPU that are in ``wanted``, in the order of :data:`CASES`.

    Args:
        wanted: Names out of :data:`CASES`.
        device: Where they will run.
        link: Its link.
        host_bytes: The most host memory to pin.
    """
    decoder, mlp = reference_decoder(), norm_mlp()
    llama = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 16, "num_attention_heads": 32}
    if "decoder" in wanted:
        yield Case("decoder", lambda on: Stack(decoder, on), (2, 5, 10, 14, 18), (18, 19), (5, 18), turns_s=45)
    if "long" in wanted:
        yield long_sequence(device, link, host_bytes)
    if "compiled" in wanted:
        yield Case(
            "compiled decoder",
            lambda on: Stack(decoder, on, compiled="inductor"),
            (5, 10, 18),
            (18, 19),
            (5, 18),
            turns_s=16,
            compiled=True,
        )
    if "llama" in wanted:
        yield Case(
            "Hugging Face Llama",
            lambda on: Llama(on, tokens=4096, dtype=torch.bfloat16, vocab_size=2048, **llama),
            (4, 8, 14),
            (14, 15),
            (4, 14),
            turns_s=15,
        )
    if "norm_mlp" in wanted:
        yield Case("LayerNorm-MLP", lambda on: Stack(mlp, on), (2, 5, 10, 18), (18, 19), (5, 18), turns_s=30)


def small_cases(wanted: Collection[str]) -> Iterator[Case]:
    """The same at sizes for a CPU, to see that everything runs."""
    decoder, mlp = (replace(workload(small=True), layers=4) for workload in (reference_decoder, norm_mlp))
    llama = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
    small = {
        "decoder": Case("decoder", lambda on: Stack(decoder, on), (1, 2), (2, 3), (1, 2), turns_s=1e-9),
        "long": long_case(replace(decoder, shape=(1, 256, 64))),
        "compiled": Case(
            "compiled decoder", lambda on: Stack(decoder, on, compiled="aot_eager"), (2,), (2,), (2,), compiled=True
        ),
        "llama": Case(
            "Hugging Face Llama",
            lambda on: Llama(on, tokens=64, dtype=torch.float32, vocab_size=128, **llama),
            (1,),
            (1, 2),
            (1,),
        ),
        "norm_mlp": Case("LayerNorm-MLP", lambda on: Stack(mlp, on), (1, 2), (2, 3), (1, 2)),
    }
    yield from (small[name] for name in CASES if name in wanted)


def long_case(workload: Workload) -> Case:
    """A long sequence of which every layer but the last is offloaded."""
    k = workload.layers - 1
    return Case(
        "long sequence",
        lambda on: Stack(workload, on, loss_is_a_layer=True),
        (k,),
        (k,),
        (k,),
        tokens=workload.shape[1],
    )


def long_sequence(device: torch.device, link: Link, host_bytes: float) -> Case:
    """Decoder blocks on one sequence so long that computing a layer takes longer than moving what it saves.

    The length follows from the link and from one block, measured at two lengths; the number of layers from the
    memory on both sides.
    """
    one = replace(reference_decoder(), layers=1)
    hidden = one.shape[2]
    points, saved_per_token = [], 0.0
    for tokens in (2 * LONG_UNIT, 4 * LONG_UNIT):
        layers, x = replace(one, shape=(1, tokens, hidden)).build(device)
        forward_s, saved_bytes = _forward(layers, x, device)
        points.append((tokens, forward_s))
        saved_per_token = saved_bytes / tokens
    tokens = min(LONG_MOST, hiding_tokens(points, saved_per_token / link.d2h_bytes_per_s, LONG_UNIT))
    set_bytes = saved_per_token * tokens
    fit_on_host = int(host_bytes / set_bytes) + 1
    fit_on_device = int(LONG_DEVICE_SHARE * torch.cuda.get_device_properties(device).total_memory / set_bytes)
    fewest, most = LONG_LAYERS
    count = max(fewest, min(most, fit_on_host, fit_on_device))
    return long_case(replace(one, layers=count, shape=(1, tokens, hidden)))


def _forward(layers: nn.ModuleList, x: torch.Tensor, device: torch.device) -> tuple[float, int]:
    """Seconds of the one layer's forward, and the bytes that it saves."""
    profile = offload.profile_layers(
        layers, lambda: layers[0](x).sum().backward(), min_bytes=DEFAULT_MIN_BYTES, device=device
    )
    return profile.layers[0].forward_s, profile.layers[0].saved_bytes


def hiding_tokens(points: list[tuple[int, float]], copy_s_per_token: float, unit: int) -> int:
    """The fewest tokens at which a forward takes ``HIDING_MARGIN`` times as long as the copies of what it saves.

    Args:
        points: Tokens and seconds of a layer's forward, at two lengths, the longer one last. The seconds per token
            grow with the length, because of attention; where they do not, a longer sequence hides nothing more.
        copy_s_per_token: Seconds in which the link moves what a token saves.
        unit: The result is a multiple of this.
    """
    (short, short_s), (long, long_s) = points
    growth = (long_s / long - short_s / short) / (long - short)
    if growth <= 0:
        return long
    missing_s = HIDING_MARGIN * copy_s_per_token - long_s / long
    return max(1, math.ceil((long + missing_s / growth) / unit)) * unit
