"""What a model of Llama's type costs, counted from its sizes: the regions that Hugging Face's implementation has.

Nothing is loaded or run. Bytes are exact; a test compares them with what is measured of a small model. Seconds follow
from how fast a device computes products and reads memory.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload.base.checks import check_int
from offload.planning.profile import LayerProfile, Profile
from offload.recompute.costs import RegionProfile

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

LOSS_BYTES = 12
"""Of each logit beside those of the model's dtype: in float32, their logarithms and the gradient of these."""

KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
}
"""What a ``config.json`` calls the sizes."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What it has if layers choose between experts."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. Unless given, ``kv_heads`` is ``heads``, and ``head_dim`` is ``hidden / heads``.

    Its MLP multiplies what two products give if it is ``gated``, and has one product before the activation function if
    not. A norm is one operation if there are ``fused_norms``, and those that Hugging Face's Llama has if not.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    dtype: str = "bfloat16"
    tied: bool = False
    gated: bool = True
    fused_norms: bool = False

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "intermediate", "heads"):
            check_int(field, getattr(self, field), least=1)
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)  # the way to fill a frozen dataclass
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)

    @property
    def item_bytes(self) -> int:
        """Of one number of the dtype."""
        return ITEM_BYTES[self.dtype]

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, without biases."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.layer_parameters + self.outside_parameters

    @property
    def outside_parameters(self) -> int:
        """Parameters of embedding, last norm and head."""
        return (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden


def read_shape(model: Path | None, given: dict[str, Any]) -> Shape:
    """The sizes that a model's ``config.json`` has, or the folder that it is in; what is ``given`` goes before them.

    Raises:
        ValueError: It is none of a decoder of Llama's type, or a size is missing.
    """
    found: dict[str, Any] = {}
    if model is not None:
        path = model / "config.json" if model.is_dir() else model
        config = json.loads(path.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{path} must hold the settings of a model, got {type(config).__name__}")
        config |= config.get("text_config") or {}  # the decoder of a model that reads more than text
        experts = next((key for key in EXPERTS if (config.get(key) or 0) > 1), None)
        if experts is not None:
            raise ValueError(f"{path} must be of dense layers, got {experts}; measure it with offload.profile_layers")
        found = {name: config[key] for name, key in KEYS.items() if config.get(key) is not None}
        found |= {"dtype": str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")}
        found |= {"tied": bool(config.get("tie_word_embeddings"))}
    found |= {name: value for name, value in given.items() if value is not None}
    missing = [field.name for field in fields(Shape)[:4] if field.name not in found]
    if missing:
        where = "the command line" if model is None else f"{model} or the command line"
        raise ValueError(f"{', '.join(missing)} must be in {where}; give --{' --'.join(missing)}")
    return Shape(**found)


@dataclass(frozen=True)
class Rates:
    """How fast a device is, inside of layers."""

    flop_per_s: float
    bytes_per_s: float

    def seconds_of(self, flop: float, nbytes: float) -> float:
        """Of what computes so much, and reads and writes so much."""
        return max(flop / self.flop_per_s, nbytes / self.bytes_per_s)


def profile_of(shape: Shape, batch: int, tokens: int, rates: Rates, min_bytes: int) -> Profile:
    """The profile of a microbatch of so many sequences, each of so many tokens, with causal attention."""
    layer = _Layer(shape, batch, tokens, rates, min_bytes).profile()
    product_s = rates.seconds_of(2 * batch * tokens * shape.hidden * shape.vocab, 0)
    loss_s = 3 * product_s + 2 * loss_bytes(shape, batch, tokens) / rates.bytes_per_s
    return Profile((layer,) * shape.layers, loss_s)


def loss_bytes(shape: Shape, batch: int, tokens: int) -> int:
    """Device memory that the loss takes at once, outside of the layers."""
    return batch * tokens * shape.vocab * (shape.item_bytes + LOSS_BYTES)


class _Layer:
    """The regions of one layer, in the order of its forward; each method adds some, and returns the last one's number.

    A region of fewer than ``min_bytes`` is not saved; one that the layer was given is not listed then.
    """

    def __init__(self, shape: Shape, batch: int, tokens: int, rates: Rates, min_bytes: int) -> None:
        self._shape = shape
        self._rows = batch * tokens
        self._tokens = tokens
        self._rates = rates
        self._min_bytes = min_bytes
        self._casts = shape.item_bytes < 4 and not shape.fused_norms
        self._regions: list[RegionProfile] = []
        self._named: Counter[str] = Counter()

    def profile(self) -> LayerProfile:
        shape, rows, one = self._shape, self._rows, self._shape.item_bytes
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        entry = self._given(rows * shape.hidden * one, saved=not self._casts)
        cos, sin = (self._given(self._tokens * shape.head_dim * one, saved=True) for _ in range(2))
        x = self._norm("input_layernorm", entry)
        query = self._product("self_attn.q_proj", x, shape.hidden, wide)
        key = self._product("self_attn.k_proj", x, shape.hidden, narrow)
        value = self._product("self_attn.v_proj", x, shape.hidden, narrow, saved=True)
        query, key = self._rotated(query, wide, cos, sin), self._rotated(key, narrow, cos, sin)
        name, reads = "self_attn: scaled_dot_product_attention", [value, query, key]
        attention_flop = 2 * rows * self._tokens * wide  # two products, each of half of all pairs
        x = self._add(name, rows * wide * one, reads, flop=attention_flop)
        attention_s = self._regions[-1].seconds
        self._add(name, rows * shape.heads * 4, reads, another_of=x)
        x = self._product("self_attn.o_proj", x, wide, shape.hidden)
        entry = self._add("add", rows * shape.hidden * one, [entry, x], saved=not self._casts)
        x = self._norm("post_attention_layernorm", entry)
        nbytes = rows * shape.intermediate * one
        first = "mlp.gate_proj" if shape.gated else "mlp.up_proj"
        inside = self._product(first, x, shape.hidden, shape.intermediate, saved=True)
        inside = self._add(f"mlp.act_fn: {'silu' if shape.gated else 'gelu'}", nbytes, [inside])
        if shape.gated:
            up = self._product("mlp.up_proj", x, shape.hidden, shape.intermediate, saved=True)
            self._add("mlp: mul", nbytes, [inside, up])
        # What nobody needs in backward has no region: the last product and sum.
        down_s = self._rates.seconds_of(2 * rows * shape.intermediate * shape.hidden, nbytes)
        sum_s = self._rates.seconds_of(0, 3 * rows * shape.hidden * one)
        forward_s = math.fsum(region.seconds for region in self._regions) + down_s + sum_s
        # Each product has two in backward; flash attention computes its scores again, five products for two.
        backward_s = 2 * forward_s + attention_s / 2
        gradients = (3 if shape.gated else 2) * nbytes  # of what the MLP computes, all there at once
        return LayerProfile.from_regions(self._regions, forward_s, backward_s, workspace_bytes=gradients)

    def _given(self, nbytes: int, *, saved: bool) -> int | None:
        if nbytes < self._min_bytes:
            return None
        self._regions.append(RegionProfile("input", nbytes, 0.0, (), saved, recomputable=False))
        return len(self._regions) - 1

    def _add(
        self,
        name: str,
        nbytes: int,
        reads: Sequence[int | None],
        *,
        saved: bool = True,
        flop: float = 0.0,
        another_of: int | None = None,
    ) -> int:
        self._named[name] += 1
        times = f" #{self._named[name]}" if self._named[name] > 1 else ""
        known = tuple(sorted({read for read in reads if read is not None}))
        seconds = 0.0
        if another_of is None:
            seconds = self._rates.seconds_of(flop, nbytes + sum(self._regions[read].nbytes for read in known))
        saved = saved and nbytes >= self._min_bytes
        self._regions.append(RegionProfile(name + times, nbytes, seconds, known, saved, another_of=another_of))
        return len(self._regions) - 1

    def _product(self, module: str, x: int, inputs: int, outputs: int, *, saved: bool = False) -> int:
        nbytes = self._rows * outputs * self._shape.item_bytes
        return self._add(f"{module}: mm", nbytes, [x], saved=saved, flop=2 * self._rows * inputs * outputs)

    def _norm(self, module: str, x: int | None) -> int:
        """In float32, whatever the model's dtype: one operation, or several whose results stay in memory."""
        full, row = 4 * self._rows * self._shape.hidden, 4 * self._rows
        if self._shape.fused_norms:
            found = self._add(f"{module}: _fused_rms_norm", full * self._shape.item_bytes // 4, [x])
            self._add(f"{module}: _fused_rms_norm", row, [x], another_of=found)
            return found
        if self._casts:
            x = self._add(f"{module}: _to_copy", full, [x])
        scale = self._add(f"{module}: pow", full, [x], saved=False)
        for operation in ("mean", "add", "rsqrt"):
            scale = self._add(f"{module}: {operation}", row, [scale], saved=operation == "rsqrt")
        found = self._add(f"{module}: mul", full, [x, scale], saved=not self._casts)
        if self._casts:
            found = self._add(f"{module}: _to_copy", full * self._shape.item_bytes // 4, [found])
        return self._add(f"{module}: mul", full * self._shape.item_bytes // 4, [found])

    def _rotated(self, x: int, width: int, cos: int | None, sin: int | None) -> int:
        """With rotary positions: a product with cosines, and one of the exchanged halves with sines."""
        nbytes = self._rows * width * self._shape.item_bytes
        turned = self._add("self_attn: mul", nbytes, [x, cos], saved=False)
        half = self._add("self_attn: neg", nbytes // 2, [x], saved=False)
        other = self._add("self_attn: cat", nbytes, [x, half], saved=False)
        other = self._add("self_attn: mul", nbytes, [other, sin], saved=False)
        return self._add("self_attn: add", nbytes, [turned, other])
