"""A model of Llama's kind, counted from the sizes in its ``config.json``: bytes and FLOP of each region of a layer.

Nothing is loaded or run. Bytes are those that ``offload.profile_layers`` measures of Hugging Face's implementation,
which a test compares. Seconds follow from a device's FLOP/s and memory bandwidth.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload.base.checks import check_int
from offload.planning.profile import LayerProfile, Profile
from offload.recompute.costs import RegionProfile

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

LOSS_BYTES = 12
"""Of each logit beside the logit itself: in float32, the logit, its logarithm and the gradient."""

KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
}
"""The names of the sizes in a ``config.json``."""

COUNTED = {"llama": "silu", "mistral": "silu", "qwen2": "silu", "arcee": "gelu"}
"""The model types that are counted, and the activation function of each."""

UNCOUNTED = (
    *("attention_bias", "mlp_bias", "attention_dropout", "use_qk_norm", "sliding_window", "attn_logit_softcapping"),
    *("final_logit_softcapping", "num_local_experts", "num_experts", "n_routed_experts", "is_encoder_decoder"),
    *("text_config", "vision_config", "audio_config", "quantization_config", "auto_map"),
)
"""Fields of a ``config.json`` that add what is not counted, unless they are false, zero or null."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Args:
        kv_heads: As many as ``heads`` if it is 0.
        head_dim: ``hidden / heads`` if it is 0.
        tied: Whether embedding and head are one weight.
        gated: Whether the MLP multiplies the results of two products, or has one product before its activation.
        fused_norms: Whether a norm is one operation, or those of Hugging Face's Llama.
        qkv_bias: Whether the products for queries, keys and values have biases.
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
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in KEYS:
            check_int(name, getattr(self, name), least=int(name in ("layers", "hidden", "intermediate", "heads")))
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)  # the way to fill a frozen dataclass
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of the dtype."""
        return ITEM_BYTES[self.dtype]

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        biases = self.qkv_bias * self.head_dim * (self.heads + 2 * self.kv_heads)
        return attention + biases + (3 if self.gated else 2) * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def outside_parameters(self) -> int:
        """Parameters of embedding, last norm and head."""
        return (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer_parameters + self.outside_parameters


def read_shape(model: Path | None, given: dict[str, Any]) -> Shape:
    """The sizes in a model's ``config.json``, or in the folder that holds it; ``given`` sizes replace them.

    Raises:
        ValueError: There is no such file, it describes a model that cannot be counted, or a size is missing.
    """
    found = {} if model is None else _read_config(model)
    found |= {name: value for name, value in given.items() if value is not None}
    missing = [field.name for field in fields(Shape)[:4] if field.name not in found]
    if missing:
        where = "the command line" if model is None else f"{model} or the command line"
        raise ValueError(f"{', '.join(missing)} must be in {where}; give --{' --'.join(missing)}")
    return Shape(**found)


def _read_config(model: Path) -> dict[str, Any]:
    path = model / "config.json" if model.is_dir() else model
    if not path.is_file():
        raise ValueError(
            f"model must be the path of a config.json or of the folder that holds it, but there is no file {path}; a "
            "model's id on the Hub is not looked up: download its config.json and give the path"
        )
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, as a Hugging Face config.json is: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold the settings of a model, got {type(config).__name__}")
    uncounted = ", ".join(_uncounted(config))
    if uncounted:
        raise ValueError(
            f"{path} cannot be counted: {uncounted}. Counted are dense decoders with model_type {', '.join(COUNTED)}; "
            "measure this model with offload.profile_layers"
        )
    found = {name: config[key] for name, key in KEYS.items() if config.get(key) is not None}
    found["dtype"] = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    found |= {"tied": bool(config.get("tie_word_embeddings")), "qkv_bias": config["model_type"] == "qwen2"}
    return found | {"gated": config["model_type"] != "arcee"}


def _uncounted(config: dict[str, Any]) -> Iterator[str]:
    kind = config.get("model_type")
    if kind not in COUNTED:
        yield f"model_type {kind!r}" if kind else "model_type is missing"
    elif config.get("hidden_act", COUNTED[kind]) != COUNTED[kind]:
        yield f"hidden_act {config['hidden_act']!r}"
    if {*(config.get("layer_types") or ())} - {"full_attention"}:
        yield "layer_types other than full_attention"
    for name in UNCOUNTED:
        if config.get(name) and (name != "sliding_window" or config.get("use_sliding_window", True)):
            yield name if isinstance(config[name], dict) else f"{name} {config[name]!r}"


@dataclass(frozen=True)
class Rates:
    """How fast a device computes and reads its memory, inside of layers."""

    flop_per_s: float
    bytes_per_s: float

    def seconds_of(self, flop: float, nbytes: float) -> float:
        """Seconds of an operation with so many FLOP that reads and writes so many bytes."""
        return max(flop / self.flop_per_s, nbytes / self.bytes_per_s)


def profile_of(shape: Shape, batch: int, tokens: int, rates: Rates, min_bytes: int) -> Profile:
    """The profile of a microbatch of ``batch`` sequences of ``tokens`` tokens each, with causal attention."""
    layer = _Layer(shape, batch, tokens, rates, min_bytes).profile()
    product_s = rates.seconds_of(2 * batch * tokens * shape.hidden * shape.vocab, 0)
    loss_s = 3 * product_s + 2 * loss_bytes(shape, batch, tokens) / rates.bytes_per_s
    return Profile((layer,) * shape.layers, loss_s)


def loss_bytes(shape: Shape, batch: int, tokens: int) -> int:
    """The peak of device memory that the loss takes outside of the layers."""
    return batch * tokens * shape.vocab * (shape.item_bytes + LOSS_BYTES)


class _Layer:
    """The regions of one layer, in the order of its forward; each method adds some and returns the last one's number.

    A region of fewer than ``min_bytes`` is not saved; an input of fewer is not listed.
    """

    def __init__(self, shape: Shape, batch: int, tokens: int, rates: Rates, min_bytes: int) -> None:
        self._shape, self._rates, self._min_bytes = shape, rates, min_bytes
        self._tokens, self._rows = tokens, batch * tokens
        self._casts = shape.item_bytes < 4 and not shape.fused_norms
        self._regions: list[RegionProfile] = []
        self._named: Counter[str] = Counter()

    def profile(self) -> LayerProfile:
        shape, rows, one = self._shape, self._rows, self._shape.item_bytes
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        mm = "addmm" if shape.qkv_bias else "mm"
        entry = self._given(rows * shape.hidden * one, saved=not self._casts)
        cos, sin = (self._given(self._tokens * shape.head_dim * one, saved=True) for _ in range(2))
        x = self._norm("input_layernorm", entry)
        query = self._product(f"self_attn.q_proj: {mm}", x, shape.hidden, wide)
        key = self._product(f"self_attn.k_proj: {mm}", x, shape.hidden, narrow)
        value = self._product(f"self_attn.v_proj: {mm}", x, shape.hidden, narrow, saved=True)
        query, key = self._rotated(query, wide, cos, sin), self._rotated(key, narrow, cos, sin)
        name, reads = "self_attn: scaled_dot_product_attention", [value, query, key]
        attention_flop = 2 * rows * self._tokens * wide  # two products, each of half of all pairs
        x = self._add(name, rows * wide * one, reads, flop=attention_flop)
        attention_s = self._regions[-1].seconds
        self._add(name, rows * shape.heads * 4, reads, another_of=x)
        x = self._product("self_attn.o_proj: mm", x, wide, shape.hidden)
        entry = self._add("add", rows * shape.hidden * one, [entry, x], saved=not self._casts)
        x = self._norm("post_attention_layernorm", entry)
        nbytes = rows * shape.intermediate * one
        first = "mlp.gate_proj: mm" if shape.gated else "mlp.up_proj: mm"
        inside = self._product(first, x, shape.hidden, shape.intermediate, saved=True)
        inside = self._add(f"mlp.act_fn: {'silu' if shape.gated else 'gelu'}", nbytes, [inside])
        if shape.gated:
            up = self._product("mlp.up_proj: mm", x, shape.hidden, shape.intermediate, saved=True)
            self._add("mlp: mul", nbytes, [inside, up])
        # The last product and sum have no region: backward does not need their results.
        down_s = self._rates.seconds_of(2 * rows * shape.intermediate * shape.hidden, nbytes)
        sum_s = self._rates.seconds_of(0, 3 * rows * shape.hidden * one)
        forward_s = math.fsum(region.seconds for region in self._regions) + down_s + sum_s
        # Backward has two products for each; flash attention recomputes its scores, five products for two.
        backward_s = 2 * forward_s + attention_s / 2
        gradients = (3 if shape.gated else 2) * nbytes  # of the MLP, all on the device at once
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

    def _product(self, name: str, x: int, inputs: int, outputs: int, *, saved: bool = False) -> int:
        nbytes = self._rows * outputs * self._shape.item_bytes
        return self._add(name, nbytes, [x], saved=saved, flop=2 * self._rows * inputs * outputs)

    def _norm(self, module: str, x: int | None) -> int:
        """In float32, whatever the model's dtype: one operation, or several whose results stay in memory."""
        full, row = 4 * self._rows * self._shape.hidden, 4 * self._rows
        own = full * self._shape.item_bytes // 4
        if self._shape.fused_norms:
            found = self._add(f"{module}: _fused_rms_norm", own, [x])
            self._add(f"{module}: _fused_rms_norm", row, [x], another_of=found)
            return found
        if self._casts:
            x = self._add(f"{module}: _to_copy", full, [x])
        scale = self._add(f"{module}: pow", full, [x], saved=False)
        for operation in ("mean", "add", "rsqrt"):
            scale = self._add(f"{module}: {operation}", row, [scale], saved=operation == "rsqrt")
        found = self._add(f"{module}: mul", full, [x, scale], saved=not self._casts)
        if self._casts:
            found = self._add(f"{module}: _to_copy", own, [found])
        return self._add(f"{module}: mul", own, [found])

    def _rotated(self, x: int, width: int, cos: int | None, sin: int | None) -> int:
        """With rotary positions: a product with cosines, and one of the exchanged halves with sines."""
        nbytes = self._rows * width * self._shape.item_bytes
        turned = self._add("self_attn: mul", nbytes, [x, cos], saved=False)
        half = self._add("self_attn: neg", nbytes // 2, [x], saved=False)
        other = self._add("self_attn: cat", nbytes, [x, half], saved=False)
        other = self._add("self_attn: mul", nbytes, [other, sin], saved=False)
        return self._add("self_attn: add", nbytes, [turned, other])
