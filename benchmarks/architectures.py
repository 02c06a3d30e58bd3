"""Models of real sizes that no plan was tuned for: what ``never_slower`` trains within budgets."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import Model
from benchmarks.workloads import reference_decoder

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def _causal(kind: str, batch: int, tokens: int, *, words: int = 32000, dtype: torch.dtype, **config: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(kind, use_cache=False, vocab_size=words, **config)
    model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa").train()
    ids = torch.randint(1, words, (batch, tokens))
    return model, lambda: model(input_ids=ids, labels=ids).loss


def _vit(small: bool, dtype: torch.dtype) -> Model:
    """ViT-H/14, 96 images."""
    from transformers import ViTConfig, ViTModel

    sizes = SMALL
    if not small:
        sizes = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
    model = ViTModel(ViTConfig(image_size=224, patch_size=56 if small else 14, hidden_dropout_prob=0.0, **sizes))
    model = model.to(dtype).train()
    images = torch.randn(2 if small else 96, 3, 224, 224, dtype=dtype)
    layers = model.layers if hasattr(model, "layers") else model.encoder.layer
    return Model(model, layers, lambda: model(pixel_values=images).last_hidden_state.float().square().mean())


def _gpt2(small: bool, dtype: torch.dtype) -> Model:
    """GPT-2 XL's width, 24 layers, with dropout."""
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4} if small else {"n_embd": 1600, "n_layer": 24, "n_head": 25}
    model, loss = _causal("gpt2", *((2, 32) if small else (12, 1024)), n_positions=1024, dtype=dtype, **sizes)
    return Model(model, model.transformer.h, loss)


def _t5(small: bool, dtype: torch.dtype) -> Model:
    """T5-large's encoder and decoder: eager attention with a bias, and dropout; its forward waits for the device."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 4, "num_heads": 4, "d_kv": 16}
    if not small:
        sizes = {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16, "d_kv": 64}
    names = {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "pad_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=32128, use_cache=False, dropout_rate=0.1, **sizes, **names))
    model = model.to(dtype).train()
    ids = torch.randint(1, 32000, (2, 32) if small else (8, 1024))
    labels = ids[:, :128].contiguous()
    return Model(model, model.encoder.block, lambda: model(input_ids=ids, labels=labels).loss)


def _phi3(small: bool, dtype: torch.dtype) -> Model:
    """Phi-3's width, 20 layers, with dropout behind attention and MLP."""
    sizes = SMALL
    if not small:
        sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 20, "num_attention_heads": 32}
    more = {"num_key_value_heads": sizes["num_attention_heads"], "pad_token_id": 0, "resid_pdrop": 0.1}
    tokens = 32 if small else 8192
    model, loss = _causal("phi3", 1, tokens, dtype=dtype, max_position_embeddings=8192, **sizes, **more)
    return Model(model, model.model.layers, loss)


def _gemma2(small: bool, dtype: torch.dtype) -> Model:
    """Gemma-2 9B's width, 14 layers: soft caps, sliding windows."""
    sizes, heads = SMALL, {"num_key_value_heads": 2, "head_dim": 16}
    if not small:
        sizes = {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 14, "num_attention_heads": 16}
        heads = {"num_key_value_heads": 8, "head_dim": 256}
    model, loss = _causal("gemma2", 1, 32 if small else 8192, dtype=dtype, **sizes, **heads)
    return Model(model, model.model.layers, loss)


def _moe(small: bool, dtype: torch.dtype) -> Model:
    """Qwen3-MoE, 8 layers of 32 experts, of which each token takes 4."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 4}
    wide = {"moe_intermediate_size": 32, "intermediate_size": 128, "head_dim": 16}
    if not small:
        sizes = {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 32, "num_experts": 32}
        wide = {"moe_intermediate_size": 768, "intermediate_size": 6144, "head_dim": 128}
    tokens, more = 32 if small else 8192, {"num_key_value_heads": 4, "num_experts_per_tok": 4}
    model, loss = _causal("qwen3_moe", 1, tokens, dtype=dtype, **sizes, **wide, **more)
    return Model(model, model.model.layers, loss)


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer: attention and MLP, shifted, scaled and gated by the time step."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, tokens, hidden]``; ``condition``: ``[batch, hidden]``."""
        batch, tokens, hidden = x.shape
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        y = F.layer_norm(x, (hidden,)) * (1 + scale) + shift
        q, k, v = self.qkv(y).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, hidden)
        x = x + gate * self.out(y)
        y = F.layer_norm(x, (hidden,)) * (1 + scale_mlp) + shift_mlp
        return x + gate_mlp * self.down(F.gelu(self.up(y), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    """Patches of 16 numbers in, patches out, and blocks in between."""

    def __init__(self, hidden: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, hidden)
        self.blocks = nn.ModuleList(DiffusionBlock(hidden, heads) for _ in range(depth))
        self.head = nn.Linear(hidden, 16)

    def forward(self, patches: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """``patches``: ``[batch, tokens, 16]``; ``condition``: ``[batch, hidden]``."""
        x = self.embed(patches)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(F.layer_norm(x, x.shape[-1:]))


def _diffusion(small: bool, dtype: torch.dtype) -> Model:
    """DiT-XL/2, 28 blocks, 64 images of 256 tokens."""
    model = DiffusionTransformer(*((64, 4, 4) if small else (1152, 16, 28))).to(dtype).train()
    batch, tokens, hidden = (2, 16, 64) if small else (64, 256, 1152)
    patches, condition = torch.randn(batch, tokens, 16, dtype=dtype), torch.randn(batch, hidden, dtype=dtype)
    return Model(model, model.blocks, lambda: model(patches, condition).float().square().mean())


def _convolution(small: bool, dtype: torch.dtype) -> Model:
    """ConvNeXt-L: depthwise convolutions in four stages of layers that differ in size."""
    from transformers import ConvNextConfig, ConvNextModel

    sizes = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1]}
    if not small:
        sizes = {"hidden_sizes": [192, 384, 768, 1536], "depths": [3, 3, 27, 3]}
    model = ConvNextModel(ConvNextConfig(**sizes)).to(dtype).train()
    images = torch.randn(2 if small else 64, 3, 64 if small else 224, 64 if small else 224, dtype=dtype)
    layers = [layer for stage in model.encoder.stages for layer in stage.layers]
    return Model(model, layers, lambda: model(pixel_values=images).last_hidden_state.float().square().mean())


def _decoder(small: bool, _: torch.dtype) -> Model:
    """20 layers of a 7B model, the ones that ``benchmarks.budget`` plans for."""
    workload = reference_decoder(small=small)
    return replace(workload, layers=4 if small else workload.layers).build(torch.get_default_device())


_MAKERS = (_vit, _gpt2, _t5, _phi3, _gemma2, _moe, _diffusion, _convolution, _decoder)
_BUILDERS = {make.__name__.removeprefix("_"): make for make in _MAKERS}
NAMES = tuple(_BUILDERS)


def build(name: str, device: torch.device, *, small: bool) -> Model:
    """One of :data:`NAMES`, on a device: in bfloat16, or ``small`` and in float32."""
    torch.manual_seed(0)
    with torch.device(device):
        return _BUILDERS[name](small, torch.float32 if small else torch.bfloat16)
