"""What is counted of a config is what is measured of the model."""

import json

import pytest
import torch
import transformers

import offload
from offload.command_line import count
from offload.command_line.count import Rates, count_model, read_config

RATES = Rates(1e12, 1e11)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(kind, **changes):
    return read_config(kind, [f"{name}={json.dumps(value)}" for name, value in (SIZES | changes).items()])


def measured(config, dtype, min_bytes, batch, tokens):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()
    numbers = torch.randint(64, (batch, tokens))

    def step():
        model(input_ids=numbers, labels=numbers, use_cache=False).loss.backward()

    layers = model.model.layers
    return offload.profile_layers(layers, step, min_bytes=min_bytes, device="cpu", steps=1, regions=True)


def edges_of(layer):
    return {(one.name, tuple(layer.regions[read].name for read in one.reads)) for one in layer.regions}


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "changes", "min_bytes"),
    [
        ("llama", "float32", {}, 1),
        (
            "llama",
            "bfloat16",
            {"num_key_value_heads": 1, "head_dim": 16},
            600,
        ),  # tensors that are too small, and inputs
        ("phi", "bfloat16", {"resid_pdrop": 0.1}, 1),  # with biases, and results that dropout fills in place
        ("qwen3", "bfloat16", {"head_dim": 16}, 1),  # norms of queries and keys
        ("gemma2", "float32", {"head_dim": 8, "sliding_window": 8}, 1),  # windows, soft caps
        ("arcee", "float32", {"hidden_act": "gelu"}, 1),  # an MLP without a gate
    ],
)
def test_regions_are_those_that_are_measured(kind, dtype, changes, min_bytes):
    config = config_of(kind, dtype=dtype, **changes)
    found = measured(config, dtype, min_bytes, 2, 16)
    counted = count_model(config, 2, 16, RATES, min_bytes).profile
    for one, other in zip(counted.layers, found.layers, strict=True):
        assert one.saved_bytes == other.saved_bytes > 0
        saved = [sorted((each.name, each.nbytes) for each in layer.regions if each.saved) for layer in (one, other)]
        assert saved[0] == saved[1]
        assert edges_of(one) == edges_of(other)


@pytest.mark.parametrize("kind", ["t5", "mixtral", "gpt_neox"])
def test_counts_encoders_and_experts(kind):
    changes = ["attention_dropout=0"] * (kind == "gpt_neox")
    changes += [f"num_{'' if kind == 't5' else 'hidden_'}layers=2"]
    counted = count_model(read_config(kind, changes), 1, 128, RATES, 1)
    layers = {"t5": "[*model.encoder.block, *model.decoder.block]", "gpt_neox": "model.gpt_neox.layers"}
    assert counted.layers == layers.get(kind, "model.model.layers")
    assert all(layer.saved_bytes and layer.forward_s and layer.backward_s for layer in counted.profile.layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks Hugging Face for it
def test_only_adapters_are_trained():
    pytest.importorskip("peft")
    config = config_of("llama")
    whole = count_model(config, 1, 64, RATES, 1)
    lora = count_model(config, 1, 64, RATES, 1, lora=4)
    assert lora.layers == "model.base_model.model.model.layers"
    assert lora.training.trained_elements == 3 * 4 * (2 * 64 + 2 * (32 + 16) + 3 * (32 + 96))
    assert lora.training.gradients == sum(lora.training.layer_gradients)
    assert lora.parameters == whole.parameters + lora.training.trained_elements


def test_a_loss_without_whole_logits_takes_less():
    config = config_of("llama", vocab_size=50000)
    whole, fused = (count_model(config, 1, 8192, RATES, 1, fused_loss=fused).profile for fused in (False, True))
    assert 0 < fused.loss_bytes < whole.loss_bytes / 2
    assert fused.saved_bytes == whole.saved_bytes
    assert count_model(config, 1, 4096, RATES, 1).profile.saved_bytes == whole.saved_bytes / 2, "and no weights"


def test_seconds_follow_from_flop_and_bytes():
    config = config_of("llama", hidden_size=512, intermediate_size=2048)
    one, fast = (count_model(config, 1, 4096, rates, 1).profile.layers[0] for rates in (RATES, Rates(2e12, 2e11)))
    assert fast.forward_s == pytest.approx(one.forward_s / 2)
    (attention,) = (each for each in one.regions if "dot_product" in each.name and each.seconds)
    assert attention.seconds == 2 * 4096**2 * 512 / 1e12  # two products, each of half of all scores


@pytest.mark.slow
def test_comes_near_to_what_an_h200_measures():
    """Llama-8B, 65,536 tokens, with all but the layers' inputs computed again: 16.2 s, the optimizer included."""
    changes = ["intermediate_size=14336", "num_key_value_heads=8", "vocab_size=128256"]

    def counted(layers):
        config = read_config("llama", [*changes, f"num_hidden_layers={layers}"])
        found = count_model(config, 1, 65536, Rates(630e12, 4e12), 1 << 21)
        again_s = sum(layer.forward_s for layer in found.profile.layers)
        return torch.tensor([found.profile.compute_s + again_s, found.parameters], dtype=torch.float64)

    few, one_more = counted(2), counted(3)  # each further layer adds the same
    step_s, parameters = (few + 30 * (one_more - few)).tolist()
    assert step_s == pytest.approx(16.2, rel=0.15)
    assert parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gpt2", [], "'gpt2' cannot be counted: attn_pdrop is 0.1, which --set attn_pdrop=0 leaves out; measure this"),
        ("llama", ["num_hidden_layers=1"], "'llama' cannot be counted: it has no list of two layers or more; measure"),
        ("vit", [], "'vit' cannot be counted: Unrecognized configuration class .*ViTConfig.*; measure this model with"),
        ("gemma3", [], "'gemma3' cannot be counted: "),
        ("mamba", ["num_hidden_layers=2"], "'mamba' .* more than 300 operations, .*; measure"),
        ("bert", ["attention_probs_dropout_prob=0"], "'bert' cannot be counted: .* size of the tensor"),
    ],
)
def test_refuses_by_name_what_it_cannot_count(kind, changes, said, monkeypatch):
    monkeypatch.setattr(count, "MOST_OPERATIONS", 300)
    with pytest.raises(ValueError, match=said):
        count_model(read_config(kind, changes), 1, 1024, RATES, 1)


def test_quantized_weights_are_refused(tmp_path):
    values = config_of("llama").to_dict() | {"quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="'llama' cannot be counted: its weights are quantized; measure"):
        count_model(read_config(str(tmp_path)), 1, 16, RATES, 1)


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        ("meta-llama/Llama-3.1-8B", None, "a model's id on the Hub is not looked up: download its config.json"),
        (".", None, "model must be the path of a Hugging Face config.json or of its folder, or a model type such as"),
        ("config.json", "import torch", r"got 'config.json' \(Expecting value"),
        ("config.json", b"\x93\xff", r"got 'config.json' \('utf-8' codec"),
        (".", "[]", "'list' object has no attribute"),
        (".", '{"model_type": "nothing"}', "Unrecognized model identifier: nothing"),
        (".", "{}", "got '.'"),
    ],
)
def test_says_what_is_wrong_with_the_model(model, text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=said):
        read_config(model)


def test_reads_a_config_or_its_folder_and_changes_fields(tmp_path):
    config_of("llama").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert read_config(str(path), ["num_hidden_layers=5", "hidden_act=gelu"]).num_hidden_layers == 5
    with pytest.raises(ValueError, match="--set must be NAME=VALUE with a field of the config, got layers=5"):
        read_config(str(tmp_path), ["layers=5"])
