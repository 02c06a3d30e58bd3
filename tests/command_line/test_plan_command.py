"""``python -m offload plan``: what to do with a model, by its sizes."""

import json

import pytest
import torch

import offload
from offload.command_line.llama import Rates, Shape, profile_of
from offload.command_line.main import main
from offload.command_line.plan import WayToTrain, choose, ways_to_train

GIB = 1 << 30
LINK = offload.Link(50e9, 50e9, 100e9)
SHAPE = Shape(layers=8, hidden=1024, intermediate=4096, heads=8, kv_heads=2, vocab=32000)
SIZES = ["--layers=8", "--hidden=1024", "--intermediate=4096", "--heads=8", "--kv-heads=2", "--vocab=32000"]


def asked(capsys, *words, status=0):
    assert main(["plan", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def by_name(answer):
    return {way["name"]: way for way in answer["ways"]}


def test_keeps_all_where_it_fits(capsys):
    found = asked(capsys, *SIZES, "--memory=80GiB")
    assert (found["offload"], found["do"], found["write"], found["ok"]) == ("plan", "keep all", "offload nothing", True)
    profile = profile_of(SHAPE, 1, 4096, Rates(630e12, 4e12), 2 << 20)
    assert found["saved_bytes"] == profile.saved_bytes
    kept = by_name(found)["keep all"]
    assert kept["step_s"] == pytest.approx(profile.compute_s)
    assert kept["peak_bytes"] == offload.plan(profile, 80 * GIB, LINK).peak_bytes
    parameters = 8 * SHAPE.layer_parameters + SHAPE.outside_parameters
    assert found["parameters"] == parameters
    assert found["fixed_bytes"] == parameters * (2 + 2 + 4) + 4096 * 32000 * 14


@pytest.mark.slow
def test_goes_from_way_to_way_as_memory_shrinks(capsys):
    kept = asked(capsys, *SIZES, "--memory=80GiB")
    peak = by_name(kept)["keep all"]["peak_bytes"]
    chosen = []
    for share in (1.0, 0.95, 0.5, 0.3):
        memory = int((kept["fixed_bytes"] + share * peak) / 0.92) + 2
        found = asked(capsys, *SIZES, f"--memory={memory}B")
        chosen.append(found["do"])
        way = by_name(found)[found["do"]]
        assert way["peak_bytes"] <= share * peak + 2
        assert (way["host_bytes"] > 0) is (share < 1)
    assert chosen[0] == "keep all"
    assert set(chosen[1:]) <= {"whole layers", "regions"}
    assert chosen[-1] == "regions"

    memory = int(kept["fixed_bytes"] / 0.92)
    found = asked(capsys, *SIZES, f"--memory={memory}B")
    assert found["do"] == "streamed weights"
    assert found["write"].startswith('stream_weights(model.model.layers, "cuda")')
    assert by_name(found)["regions"]["misfit"].endswith("too little for activations")

    found = asked(capsys, *SIZES, "--memory=1GiB", status=1)
    assert (found["do"], found["write"], found["ok"]) == (None, None, False)
    assert all(way["misfit"] for way in found["ways"])


def test_host_memory_is_a_limit(capsys):
    kept = asked(capsys, *SIZES, "--memory=80GiB")
    memory = int(kept["fixed_bytes"] / 0.92)
    streamed = by_name(asked(capsys, *SIZES, f"--memory={memory}B"))["streamed weights"]
    assert not streamed["misfit"]
    on_host = 8 * SHAPE.layer_parameters * 8
    assert streamed["host_bytes"] >= on_host
    found = asked(capsys, *SIZES, f"--memory={memory}B", f"--host-memory={on_host - (1 << 20)}B", status=1)
    assert by_name(found)["streamed weights"]["misfit"] == "1.00 MiB of host memory are missing"


def test_the_loss_can_do_without_logits_and_the_optimizer_without_state(capsys):
    whole = asked(capsys, *SIZES, "--memory=80GiB")
    found = asked(capsys, *SIZES, "--memory=80GiB", "--fused-loss", "--optimizer-bytes=0")
    assert whole["fixed_bytes"] - found["fixed_bytes"] == 4096 * 32000 * 14 + 4 * found["parameters"]


@pytest.mark.slow
def test_a_slower_link_and_device_take_longer(capsys):
    kept = asked(capsys, *SIZES, "--memory=80GiB")
    memory = f"--memory={int((kept['fixed_bytes'] + 0.3 * by_name(kept)['keep all']['peak_bytes']) / 0.92)}B"
    here = by_name(asked(capsys, *SIZES, memory))
    slow = by_name(asked(capsys, *SIZES, memory, "--link=5GB"))
    assert slow["regions"]["step_s"] > here["regions"]["step_s"]
    assert slow["keep all"]["step_s"] == here["keep all"]["step_s"]
    assert (
        by_name(asked(capsys, *SIZES, memory, "--flops=63e12"))["keep all"]["step_s"] > 5 * here["keep all"]["step_s"]
    )


def test_the_layer_can_be_another(capsys):
    usual = asked(capsys, *SIZES, "--memory=80GiB")
    for option, parameters in (("--no-gate", 8 * 1024 * 4096), ("--fused-norms", 0)):
        found = asked(capsys, *SIZES, "--memory=80GiB", option)
        assert found["saved_bytes"] < usual["saved_bytes"]
        assert usual["parameters"] - found["parameters"] == parameters
        assert by_name(found)["keep all"]["step_s"] < by_name(usual)["keep all"]["step_s"]
    slow = asked(capsys, *SIZES, "--memory=80GiB", "--bandwidth=1e12")
    assert slow["bytes_per_s"] == 1e12
    assert by_name(slow)["keep all"]["step_s"] > by_name(usual)["keep all"]["step_s"]


def test_streaming_takes_as_long_as_the_link():
    usable = SHAPE.outside_parameters * 8 + 4 * SHAPE.layer_parameters * 2 + 8 * GIB
    slow = offload.Link(1e9, 1e9, 2e9)
    profile = profile_of(SHAPE, 1, 1024, Rates(630e12, 4e12), 1)
    found = {way.name: way for way in ways_to_train(profile, SHAPE, 8, 0, usable, slow, None)}
    assert found["streamed weights"].step_s == 2 * 7 * SHAPE.layer_parameters * 2 / 1e9
    assert found["streamed weights"].write == 'stream_weights(model.model.layers, "cuda")'


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ({"keep all": 1.0, "whole layers": 1.0, "regions": 1.0}, "keep all"),
        ({"whole layers": 1.0, "regions": 1.0, "streamed weights": 0.5}, "whole layers"),
        ({"whole layers": 1.2, "regions": 1.0}, "regions"),
        ({"regions": 1.0, "streamed weights": 0.5}, "regions"),
        ({"streamed weights": 2.0}, "streamed weights"),
    ],
)
def test_chooses_the_simplest(steps, chosen):
    others = [WayToTrain("keep all", "", "too large")] if "keep all" not in steps else []
    assert choose([*others, *(WayToTrain(name, "", step_s=step_s) for name, step_s in steps.items())]).name == chosen
    assert choose(others) is None


def test_text_has_the_regions(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = asked(capsys, str(tmp_path), "--memory=80GiB")
    assert kept["shape"] == asked(capsys, *SIZES, "--memory=80GiB")["shape"]
    memory = int((kept["fixed_bytes"] + 0.3 * by_name(kept)["keep all"]["peak_bytes"]) / 0.92)
    assert main(["plan", str(tmp_path / "config.json"), f"--memory={memory}B"]) == 0
    text = capsys.readouterr().out
    assert "\ndo                regions: offload_layers(model.model.layers, memory_budget=" in text
    assert "\nself_attn: scaled_dot_product_attention " in text
    assert "\npeak " in text


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        (None, None, "layers, hidden, intermediate, heads must be in the command line; give --layers --hidden"),
        ("meta-llama/Llama-3.1-8B", None, "no file meta-llama/Llama-3.1-8B; a model's id on the Hub is not looked up"),
        (".", None, "no file config.json"),
        ("config.json", "import torch", "config.json must be JSON, as a Hugging Face config.json is: Expecting value"),
        ("config.json", b"\x93\xff", "config.json must be JSON, as a Hugging Face config.json is: "),
        (".", "[]", "config.json must hold the settings of a model, got list"),
        (".", '{"model_type": "gemma2"}', "config.json cannot be counted: model_type 'gemma2'"),
        (".", '{"model_type": "llama", "num_hidden_layers": "8"}', "must be in . or the command line; give --hidden"),
    ],
)
def test_says_what_is_wrong_with_the_model(model, text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["plan", *([model] if model else []), "--memory=8GiB"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("offload plan: ")
    assert said in error
    assert error.count("\n") == 1


def test_without_a_device_memory_must_be_given(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", *SIZES]) == 2
    assert "give --memory, such as --memory 24GiB" in capsys.readouterr().err


@pytest.mark.gpu
def test_plans_for_the_gpu_that_is_here(capsys):
    found = asked(capsys, *SIZES)
    assert found["usable_bytes"] == int(0.92 * torch.cuda.get_device_properties().total_memory)
