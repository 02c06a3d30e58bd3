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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "head_dim", "min_bytes"),
    [
        ("float32", 2, 8, 1),
        ("float32", 4, 8, 1),
        ("bfloat16", 2, 8, 1),
        ("bfloat16", 1, 16, 1),
        ("bfloat16", 2, 8, 600),  # tensors that are too small, and inputs
        ("float32", 2, 8, 5000),
    ],
)
def test_has_the_regions_that_are_measured(dtype, kv_heads, head_dim, min_bytes, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        use_cache=False,
        dtype=dtype,
    )
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, {})
    model, found = measured(config, dtype, min_bytes, 2, 16)
    assert_alike(profile_of(shape, 2, 16, RATES, min_bytes), found)
    parameters = [parameter.numel() for parameter in model.model.layers.parameters()]
    assert shape.layers * shape.layer_parameters == sum(parameters)
    assert shape.outside_parameters == sum(parameter.numel() for parameter in model.parameters()) - sum(parameters)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_mlp_without_a_gate(dtype, tmp_path):
    config = transformers.ArceeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=8,
        hidden_act="gelu",
        use_cache=False,
        dtype=dtype,
    )
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, {"gated": False})
    model, found = measured(config, dtype, 1, 2, 16)
    assert_alike(profile_of(shape, 2, 16, RATES, 1), found)
    assert shape.layers * shape.layer_parameters == sum(each.numel() for each in model.model.layers.parameters())


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
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 64,
    } | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_reads_a_config_or_the_folder_that_it_is_in(tmp_path):
    folder = write(tmp_path, torch_dtype="float32", num_key_value_heads=2, tie_word_embeddings=True)
    shape = read_shape(folder, {})
    assert shape == read_shape(folder / "config.json", {}) == Shape(3, 32, 96, 4, 2, 8, 64, "float32", tied=True)
    assert read_shape(folder, {"layers": 5, "heads": None}).layers == 5
    assert shape.outside_parameters == 64 * 32 + 32


def test_knows_the_decoder_of_a_larger_model(tmp_path):
    config = {
        "text_config": {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8, "num_attention_heads": 2}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path, {}) == Shape(2, 8, 8, 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_local_experts": 8}, "must be of dense layers, got num_local_experts; measure it with"),
        ({"torch_dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"hidden_size": None}, "^hidden must be in .* or the command line; give --hidden"),
        ({"num_hidden_layers": 0}, "layers must be at least 1, got 0"),
    ],
)
def test_refuses_what_it_cannot_count(config, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        read_shape(write(tmp_path, **config), {})


def test_names_what_is_missing():
    with pytest.raises(ValueError, match=r"^layers, heads must be in the command line; give --layers --heads$"):
        read_shape(None, {"hidden": 3, "intermediate": 3, "heads": None})
