"""Hugging Face's architectures, tiny and with random weights, with module hooks around their layers.

Models are found through the library's own tables, and built from configurations with small numbers in them; nothing is
downloaded. What cannot be built in this way is counted, with the reason.
"""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import offload

from .comparison import Outcome, adverse, fill_new_memory, outcome_of

MOST_PARAMETERS = 10_000_000
LAYERS = 4
CHOSEN = {
    "llama": "decoder",
    "bert": "encoder",
    "t5": "encoder and decoder",
    "mixtral": "mixture of experts",
    "deepseek_v3": "latent attention and experts",
    "mamba2": "state space",
    "jamba": "hybrid of attention, state space and experts",
    "rwkv": "recurrent",
    "vit": "vision",
    "convnext": "convolutions",
    "wav2vec2": "speech",
    "clip": "vision and text",
}
"""One of each kind, of which some run with the other tests each time."""

OPERATIONS = (
    "mm", "addmm", "bmm", "*attention*", "mul", "silu", "gelu", "add*", "*norm*", "*softmax", "*dropout", "*copy*",
    "convolution", "index*", "*",
)  # fmt: skip
"""Kinds of operations that are treated alike."""
TREATED = ("keep", "offload", "recompute", "recompute")

# What configurations call the sizes that matter here.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth"), LAYERS
    ),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks", "num_hidden_layers_decoder"), LAYERS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "emb_dim"), 64),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "text_embed_dim", "projection_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size", "d_inner"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group", "topk_group"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 128),
    "vocab_size": 256,
    "head_dim": 16,
    "d_kv": 16,
    "image_size": 32,
    "patch_size": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "state_size": 8,
    "mamba_d_state": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Where small numbers have to agree with each other."""


@dataclass
class Report:
    """What became of one architecture."""

    kind: str = ""
    """The class of the layers that offload."""
    inputs: str = ""
    runs: int = 0
    offloaded_bytes: int = 0
    recomputed: int = 0
    """Regions that were, of the first layer under random policies."""
    different: list[str] = field(default_factory=list)
    unrepeatable: list[str] = field(default_factory=list)
    skipped: str = ""


def architectures() -> dict[str, str]:
    """The class of each type of model that Hugging Face knows: the one without a head, else the first with one."""
    from transformers.models.auto import configuration_auto, modeling_auto

    names: dict[str, str] = {}
    known = configuration_auto.CONFIG_MAPPING_NAMES
    tables = [table for table in vars(modeling_auto) if table.startswith("MODEL_") and table.endswith("NAMES")]
    for table in sorted(tables, key=lambda name: (name != "MODEL_MAPPING_NAMES", name)):
        for kind, classes in getattr(modeling_auto, table).items():
            if kind in known:
                names.setdefault(kind, classes if isinstance(classes, str) else classes[0])
    return dict(sorted(names.items()))


def small_config(kind: type[Any]) -> dict[str, Any]:
    """Arguments for a configuration: small numbers where its defaults are numbers, nested as it is."""
    made = kind()
    small: dict[str, Any] = {}
    for name, value in _SMALL.items():
        default = getattr(made, name, None)
        if isinstance(default, int) and (default > value or default == -1 or "layer" in name):
            small[name] = value
    for name in ("hidden_sizes", "embed_dims", "decoder_hidden_sizes", "neck_hidden_sizes", "conv_dim"):
        sizes = getattr(made, name, None)
        if isinstance(sizes, list | tuple) and all(isinstance(size, int) for size in sizes):
            small[name] = [max(size // 4, 8) // 8 * 8 for size in sizes]
    for name, inner in getattr(kind, "sub_configs", {}).items():
        if isinstance(inner, type) and hasattr(made, name) and inner.__name__ != "AutoConfig":
            small[name] = small_config(inner)
        elif getattr(made, name, None) is not None:
            small[name] = {"model_type": getattr(made, name).model_type, **small_config(type(getattr(made, name)))}
    return small


def build(model_type: str, name: str) -> nn.Module:
    """A tiny model with random weights."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**small_config(config_class) | _SPECIAL.get(model_type, {}))
    kind = getattr(transformers, name)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in kind(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters} parameters are too many")
    torch.manual_seed(0)
    model: nn.Module = kind(config)
    return model.train()


def layers_of(model: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """The longest list of layers of one class that all run once; where none is, of several classes."""
    calls: Counter[nn.Module] = Counter()
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    lists = [found for found in lists if len(found) > 2]
    layers = set(itertools.chain.from_iterable(lists))
    hooks = [layer.register_forward_pre_hook(lambda layer, _: calls.update([layer])) for layer in layers]
    run()
    for hook in hooks:
        hook.remove()
    lists = [found for found in lists if all(calls[layer] == 1 for layer in found)]
    if not lists:
        raise ValueError("it has no list of more than two layers that run once")
    return max(lists, key=lambda found: (len({type(layer) for layer in found}) == 1, len(found)))


def possible_inputs(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the model may want, until one of it suits."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (2, 16), generator=generator)

    def look(name: str, default: int) -> int:
        for part in (config, *(getattr(config, inner, None) for inner in ("vision_config", "backbone_config"))):
            value = getattr(part, name, None)
            if value is not None:
                return value[0] if isinstance(value, list | tuple) else value
        return default

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    side, channels = look("image_size", 32), look("num_channels", 3)
    if isinstance(side, dict):
        side = side.get("height", 32)
    pixels = rand(2, channels, side, side)
    mels, frames = look("num_mel_bins", 80), 2 * look("max_source_positions", 64)
    text = {"input_ids": ids}
    main = getattr(model, "main_input_name", "input_ids")
    known: dict[str, list[dict[str, Any]]] = {
        "input_ids": [text, text | {"decoder_input_ids": ids}, text | {"pixel_values": pixels}],
        "pixel_values": [
            {"pixel_values": pixels},
            text | {"pixel_values": pixels},
            {"pixel_values": rand(2, channels, 64, 64)},
            {"pixel_values": rand(2, channels, 224, 224)},
            {"pixel_values": pixels, "decoder_input_ids": ids},
        ],
        "input_values": [
            {"input_values": rand(2, 4000)},
            {"input_values": rand(2, 1, 4000)},
            {"input_values": rand(2, look("max_length", 64), mels)},
            {"input_values": rand(2, 4000), "decoder_input_ids": ids},
        ],
        "input_features": [
            {"input_features": rand(2, mels, frames), "decoder_input_ids": ids},
            {"input_features": rand(2, mels, frames)},
            {"input_features": rand(2, 64, mels)},
            {"input_features": rand(2, 64, look("feature_projection_input_dim", 160)), "decoder_input_ids": ids},
            {"input_features": rand(2, 64, look("input_dim", 80)), "decoder_input_ids": ids},
        ],
        "pixel_values_videos": [{"pixel_values_videos": rand(1, 4, 3, side, side)}],
        "inputs": [{"inputs": ids}, {"inputs": rand(2, 16, look("d_model", 64))}],
    }
    known["pixel_values"] += [
        {"pixel_values": rand(1, look("num_frames", 4), 3, side, side)},
        text | {"bbox": torch.zeros(2, 16, 4, dtype=torch.long)},
    ]
    for name in sorted(known, key=lambda name: name != main):
        for inputs in known[name]:
            yield " and ".join(inputs), inputs


def check(model_type: str, name: str) -> Report:
    """Train one architecture for a step in all ways."""
    try:
        with adverse():
            model = build(model_type, name)
            errors = []
            for what, candidate in possible_inputs(model):
                run = functools.partial(outcome_of, functools.partial(step, model, candidate))
                error = run().error
                if not error:
                    what_suits = what
                    break
                errors.append(error)
            else:
                return Report(skipped=f"no inputs found: {errors[0]}")
            layers = layers_of(model, run)
    except Exception as error:  # noqa: BLE001  # a configuration that does not like small numbers
        return Report(skipped=f"{type(error).__name__}: {str(error)[:300]}")
    report = Report(type(layers[0]).__name__, what_suits)
    with adverse():
        _compare(run, layers, "", report)
        _compare_regions(run, layers, random.Random(model_type), report)
        if _checkpoint_layers(model):
            _compare(run, layers, "checkpointing ", report)
    if not report.offloaded_bytes and not report.different:
        report.skipped = "nothing was offloaded"
    return report


def _compare_regions(run: Callable[[], Outcome], layers: list[nn.Module], draw: random.Random, report: Report) -> None:
    """Everything computed again, then each kind of operation treated at random; a first step proves, others follow."""
    expected = run()
    changing = expected.differences(run())
    drawn = {kind: draw.choice(TREATED) for kind in OPERATIONS}
    for policies in ({"*": "recompute"}, drawn):
        options = {"policies": policies}
        with offload.offload_layers(layers, len(layers) - 2, min_bytes=1, **options) as handle:
            for number in range(3):
                different = expected.differences(run()) - changing
                if different:
                    names = ", ".join(sorted(different))
                    report.different.append(f"regions, step {number}, {options}: {names}"[:300])
            report.recomputed = list(handle.regions(0).values()).count("recompute")
        report.runs += 1


def _checkpoint_layers(model: Any) -> bool:
    if not model.supports_gradient_checkpointing:
        return False
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError:  # of a part of a model, which says that it can what only the whole model can
        return False
    return True


def _compare(run: Callable[[], Outcome], layers: list[nn.Module], how: str, report: Report) -> None:
    expected = run()

    def changes(byte: int) -> set[str]:
        fill_new_memory(byte)
        differences = expected.differences(run())
        fill_new_memory(0)
        return differences

    changing = changes(0xFF)
    for num_layers in sorted({1, len(layers) - 2}):
        with offload.offload_layers(layers, num_layers, min_bytes=1) as handle:
            found = run()
            report.offloaded_bytes += handle.stats().offloaded_bytes
        report.runs += 1
        different = expected.differences(found)
        if different - changing:
            changing |= changes(0x5A)
        if different - changing:
            names = ", ".join(sorted(different - changing))
            report.different.append(f"{how}{num_layers} of {len(layers)} layers: {names}"[:300])
    if changing:
        report.unrepeatable.append(f"{how}{', '.join(sorted(changing))}"[:300])


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Forward and backward over all outputs that are numbers."""
    model.zero_grad()
    output = model(**inputs)
    outputs = [item for item in tree_leaves(dict(output)) if isinstance(item, torch.Tensor) and item.requires_grad]
    found: dict[str, torch.Tensor | None] = {f"output {i}": item.detach().clone() for i, item in enumerate(outputs)}
    loss = torch.stack([(item.float() * torch.randn_like(item.float())).sum() for item in outputs]).sum()
    del output, outputs
    loss.backward()
    return found | {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
