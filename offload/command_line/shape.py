"""The sizes of a model of Llama's type, from Hugging Face's ``config.json`` or from numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload.base.checks import check_int

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

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
    """The sizes of a model. Of ``heads`` are as many ``kv_heads``, and ``head_dim`` is what is left, unless given.

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
