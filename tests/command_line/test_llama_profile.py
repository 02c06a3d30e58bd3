"""The profile that is counted from a model's sizes has the regions that are measured of the model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import offload
from offload.command_line.llama import Rates, Shape, loss_bytes, profile_of, read_shape

ROOT = Path(__file__).parents[2]
RATES = Rates(1e12, 1e11)
SIZES = {"layers": 3, "hidden": 32, "intermediate": 96, "heads": 4}


def measured(config, dtype, min_bytes, batch, tokens):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).train()
    numbers = torch.randint(64, (batch, tokens))

    def step():
        model(input_ids=numbers, labels=numbers).loss.backward()

    layers = model.model.layers
    profile = offload.profile_layers(layers, step, min_bytes=min_bytes, device="cpu", steps=1, regions=True)
    return model, profile


def plain(name):
    """Without what the CPU calls its implementation of attention."""
    return name.replace("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention")


def assert_alike(counted, found):
    assert len(counted.layers) == len(found.layers) == 3
    for one, other in zip(counted.layers, found.layers, strict=True):
        assert [(each.name, each.nbytes, each.saved, each.recomputable) for each in one.regions] == [
            (plain(each.name), each.nbytes, each.saved, each.recomputable) for each in other.regions
        ]
        for name in ("reads", "another_of"):
            assert [getattr(each, name) for each in one.regions] == [getattr(each, name) for each in other.regions]
        assert one.saved_bytes == other.saved_bytes > 0


GQA = {"num_key_value_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "options", "min_bytes"),
    [
        (transformers.LlamaConfig, "float32", GQA, 1),
        (transformers.LlamaConfig, "float32", {}, 5000),
        (transformers.LlamaConfig, "bfloat16", {"num_key_value_heads": 1, "head_dim": 16}, 1),
        (transformers.LlamaConfig, "bfloat16", GQA, 600),  # tensors that are too small, and inputs
        (transformers.MistralConfig, "bfloat16", {**GQA, "sliding_window": None}, 1),
        (transformers.Qwen2Config, "bfloat16", GQA, 1),  # with biases
        (transformers.ArceeConfig, "float32", {"hidden_act": "gelu"}, 1),  # an MLP without a gate
        (transformers.ArceeConfig, "bfloat16", {"hidden_act": "gelu", "head_dim": 8}, 1),
    ],
)
def test_has_the_regions_that_are_measured(kind, dtype, options, min_bytes, tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3}
    config = kind(**sizes, num_attention_heads=4, use_cache=False, dtype=dtype, **options)
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, {})
    model, found = measured(config, dtype, min_bytes, 2, 16)
    assert_alike(profile_of(shape, 2, 16, RATES, min_bytes), found)
    parameters = [parameter.numel() for parameter in model.model.layers.parameters()]
    assert shape.layers * shape.layer_parameters == sum(parameters)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_comes_near_to_the_recorded_rows_of_an_h200():
    """A decoder whose norms are one operation each, by region and in whole layers, from 20 GiB to 2."""
    record = json.loads((ROOT / "results" / "budget.json").read_text("utf-8"))
    shape = Shape(layers=20, hidden=4096, intermediate=11008, heads=32, fused_norms=True)
    profile = profile_of(shape, 2, 4096, Rates(630e12, 4e12), 1 << 21)
    whole = replace(profile, layers=tuple(replace(layer, regions=()) for layer in profile.layers))
    link = offload.Link(**record["link"])
    rows = [row for row in record["rows"] if row["model"] == "decoder"]
    kept = offload.plan(profile, "1TiB", link)
    assert kept.peak_bytes == pytest.approx(rows[0]["peak_bytes"], rel=0.01)
    assert kept.step_s == pytest.approx(rows[0]["step_s"], rel=0.07)
    budgets = [row for row in rows if "budget_bytes" in row]
    assert len(budgets) == 16
    for row in budgets:
        found = offload.plan(whole if row["what"].startswith("whole") else profile, row["budget_bytes"], link)
        assert found.step_s == pytest.approx(row["step_s"], rel=0.06), row["what"]


def test_seconds_follow_from_the_sizes():
    one = profile_of(Shape(**SIZES), 1, 1 << 12, RATES, 1).layers[0]
    fast = profile_of(Shape(**SIZES), 1, 1 << 12, Rates(2e12, 2e11), 1).layers[0]
    assert fast.forward_s == pytest.approx(one.forward_s / 2)
    attention = next(region for region in one.regions if "attention" in region.name)
    assert attention.seconds == 2 * (1 << 24) * 32 / 1e12
    assert one.backward_s == pytest.approx(2 * one.forward_s + attention.seconds / 2)
    longer = profile_of(Shape(**SIZES), 1, 1 << 13, RATES, 1).layers[0]
    assert next(region for region in longer.regions if "attention" in region.name).seconds == 4 * attention.seconds
    assert longer.saved_bytes == 2 * one.saved_bytes


def test_comes_near_to_what_an_h200_measures():
    """Llama-8B, 65,536 tokens, with all but the layers' inputs computed again: 16.2 s, the optimizer included."""
    shape = Shape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=128256)
    profile = profile_of(shape, 1, 65536, Rates(630e12, 4e12), 1 << 21)
    again_s = sum(layer.forward_s for layer in profile.layers)
    assert profile.compute_s + again_s == pytest.approx(16.2, rel=0.15)
    assert shape.layers * shape.layer_parameters + shape.outside_parameters == 8_030_261_248
    assert loss_bytes(shape, 1, 65536) == 65536 * 128256 * 14


def write(folder, **values):
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 64} | sizes | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_reads_a_config_or_the_folder_that_it_is_in(tmp_path):
    folder = write(tmp_path, torch_dtype="float32", num_key_value_heads=2, tie_word_embeddings=True)
    shape = read_shape(folder, {})
    assert shape == read_shape(folder / "config.json", {}) == Shape(3, 32, 96, 4, 2, 8, 64, "float32", tied=True)
    assert read_shape(folder, {"layers": 5, "heads": None}).layers == 5
    assert shape.outside_parameters == 64 * 32 + 32


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"torch_dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"hidden_size": None}, "^hidden must be in .* or the command line; give --hidden"),
        ({"num_hidden_layers": 0}, "layers must be at least 1, got 0"),
        ({"head_dim": -8}, "head_dim must be at least 0, got -8"),
        (
            {"model_type": None},
            "counted: model_type is missing. Counted are .* with model_type llama, mistral, ",
        ),
        ({"model_type": "qwen3"}, "cannot be counted: model_type 'qwen3'. Counted are"),
        (
            {"hidden_act": "relu2"},
            "counted: hidden_act 'relu2'. .* measure this model with offload.profile_layers",
        ),
        ({"attention_bias": True}, "counted: attention_bias True"),
        ({"num_local_experts": 8}, "counted: num_local_experts 8"),
        ({"sliding_window": 4096}, "counted: sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "counted: layer_types other than full_attention"),
        (
            {"is_encoder_decoder": True, "vision_config": {"depth": 2}},
            "is_encoder_decoder True, vision_config",
        ),
    ],
)
def test_refuses_what_it_cannot_count(config, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        read_shape(write(tmp_path, **config), {})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Gemma2", ["model_type 'gemma2'", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"]),
        ("Qwen3", ["model_type 'qwen3'"]),
        ("Mistral", ["sliding_window"]),
        ("Mixtral", ["model_type 'mixtral'", "num_local_experts"]),
        ("T5", ["model_type 't5'", "is_encoder_decoder"]),
        ("LlavaNext", ["model_type 'llava_next'", "text_config", "vision_config"]),
    ],
)
def test_names_what_it_cannot_count_of_other_models(kind, fields, tmp_path):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be counted") as error:
        read_shape(tmp_path, {})
    assert [field for field in fields if field not in str(error.value)] == []


def test_windows_that_are_not_used_do_not_matter(tmp_path):
    folder = write(tmp_path, model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert read_shape(folder, {}).qkv_bias


def test_names_what_is_missing():
    with pytest.raises(ValueError, match=r"^layers, heads must be in the command line; give --layers --heads$"):
        read_shape(None, {"hidden": 3, "intermediate": 3, "heads": None})
