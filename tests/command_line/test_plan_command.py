"""``python -m offload plan``: what to do with a model, by its config."""

import json
import warnings

import pytest
import torch
import transformers

import offload
from offload.command_line.count import Rates, Weights, count_model, read_config
from offload.command_line.main import main
from offload.command_line.plan import WayToTrain, choose, ways_to_train

GIB = 1 << 30
SIZES = ["num_hidden_layers=8", "hidden_size=1024", "intermediate_size=4096", "num_attention_heads=8"]
SIZES += ["num_key_value_heads=2", "vocab_size=32000"]
LLAMA = ["llama", *(f"--set={size}" for size in SIZES)]


def asked(capsys, *words, status=0):
    assert main(["plan", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def by_name(answer):
    return {way["name"]: way for way in answer["ways"]}


@pytest.fixture(scope="module")
def model():
    return count_model(read_config("llama", SIZES), 1, 4096, Rates(630e12, 4e12), 2 << 20)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks Hugging Face for it
def test_keeps_all_where_it_fits(capsys, model):
    found = asked(capsys, *LLAMA, "--memory=80GiB")
    assert (found["offload"], found["do"], found["write"], found["ok"]) == ("plan", "keep all", "offload nothing", True)
    assert found["saved_bytes"] == model.profile.saved_bytes
    assert by_name(found)["keep all"]["step_s"] == pytest.approx(model.profile.compute_s)
    assert found["parameters"] == model.parameters == model.in_layers.trained + model.outside.trained
    assert found["fixed_bytes"] == model.parameters * (2 + 2 + 4)
    less = asked(capsys, *LLAMA, "--memory=80GiB", "--fused-loss", "--optimizer-bytes=0", "--lora=4")
    assert less["loss_bytes"] < found["loss_bytes"]
    assert less["fixed_bytes"] < 1.02 * model.parameters * 2


def test_goes_from_way_to_way_as_memory_shrinks(model):
    link, fixed, peak = offload.Link(50e9, 50e9, 100e9), model.parameters * 8, model.profile.saved_bytes
    kept = next(ways_to_train(model, None, 80 * GIB, link, None)).peak_bytes
    chosen = []
    for most in (kept, kept - 0.05 * peak, kept - 0.5 * peak, kept - 0.8 * peak):
        best = choose(ways_to_train(model, None, int(fixed + most), link, None))
        chosen.append(best.name)
        assert best.peak_bytes <= most
    assert chosen[0] == "keep all"
    assert set(chosen[1:]) <= {"whole layers", "regions"}
    assert chosen[-1] == "regions"
    ways = {way.name: way for way in ways_to_train(model, None, fixed + model.profile.loss_bytes, link, None)}
    assert choose(ways.values()).name == "streamed weights"
    assert "are too little for activations and loss" in ways["regions"].misfit
    on_host = model.in_layers.trained * 8
    assert ways["streamed weights"].host_bytes >= on_host
    ways = {way.name: way for way in ways_to_train(model, None, 2 * fixed, link, on_host - (1 << 20))}
    assert ways["streamed weights"].misfit == "1.00 MiB of host memory are missing"


def test_streaming_takes_as_long_as_the_link(model):
    layer_bytes = model.in_layers.nbytes // 8
    usable, slow = model.outside.nbytes * 4 + 4 * layer_bytes + 16 * GIB, offload.Link(1e9, 1e9, 2e9)
    small = model._replace(outside=Weights(0, 0, 0))
    found = {way.name: way for way in ways_to_train(small, 0, usable, slow, None)}
    assert found["streamed weights"].step_s == 2 * 7 * layer_bytes / 1e9
    assert found["streamed weights"].write == 'stream_weights(model.model.layers, "cuda")'


@pytest.mark.slow
def test_a_slower_machine_takes_longer(capsys, model):
    words = [*LLAMA, f"--memory={int((model.parameters * 8 + model.profile.saved_bytes) / 0.92)}B"]
    here, slow = (by_name(asked(capsys, *words, *more)) for more in ([], ["--link=5GB"]))
    assert slow["regions"]["step_s"] > here["regions"]["step_s"]
    assert slow["keep all"]["step_s"] == here["keep all"]["step_s"]
    for option in ("--flops=63e12", "--bandwidth=1e12"):
        assert by_name(asked(capsys, *words, option))["keep all"]["step_s"] > 1.2 * here["keep all"]["step_s"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_offload_layers_meets_the_budget_that_is_printed(share):
    """``memory_budget`` is what a step adds to weights and optimizer state: gradients and loss are in it."""
    sizes = ["num_hidden_layers=6", "hidden_size=64", "intermediate_size=256", "num_attention_heads=4"]
    config = read_config("llama", [*sizes, "num_key_value_heads=4", "vocab_size=512"])
    counted = count_model(config, 2, 2048, Rates(630e12, 4e12), 1 << 12, dtype="float32")
    fixed = counted.parameters * 16
    link = offload.Link(50e9, 50e9, 100e9)
    usable = int(fixed + counted.profile.loss_bytes + share * counted.profile.saved_bytes)
    ways = {way.name: way for way in ways_to_train(counted, None, usable, link, None)}
    budget = ways["regions"].write.partition('memory_budget="')[2].partition('"')[0]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    numbers = torch.randint(512, (2, 2048))

    def step():
        model.zero_grad()
        model(input_ids=numbers, labels=numbers, use_cache=False).loss.backward()

    with (
        warnings.catch_warnings(action="error"),
        offload.offload_layers(model.model.layers, memory_budget=budget, min_bytes=1 << 12) as handle,
    ):
        for _ in range(4):
            step()
        assert handle.state == "following"
        model.zero_grad()
        with offload.memory_meter("cpu") as meter:
            step()
    assert meter.peak_bytes <= 1.02 * (usable - counted.parameters * 12)


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
    read_config("llama", SIZES).save_pretrained(tmp_path)
    kept = asked(capsys, str(tmp_path), "--memory=80GiB")
    memory = int((kept["fixed_bytes"] + kept["loss_bytes"] + 0.3 * kept["saved_bytes"]) / 0.92)
    assert main(["plan", str(tmp_path / "config.json"), f"--memory={memory}B"]) == 0
    text = capsys.readouterr().out
    assert "\ndo                regions: offload_layers(model.model.layers, memory_budget=" in text
    assert "\nself_attn: _scaled_dot_product_flash_attention" in text
    assert "\npeak " in text


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nothing", "offload plan: model must be the path of a Hugging Face config.json"),
        ("vit", "offload plan: model_type 'vit' cannot be counted"),
    ],
)
def test_says_what_is_wrong_with_the_model(model, said, capsys):
    assert main(["plan", model, "--memory=8GiB"]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_without_a_device_memory_must_be_given(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", *LLAMA]) == 2
    assert "give --memory, such as --memory 24GiB" in capsys.readouterr().err


@pytest.mark.gpu
def test_plans_for_the_gpu_that_is_here(capsys):
    found = asked(capsys, *LLAMA)
    assert found["usable_bytes"] == int(0.92 * torch.cuda.get_device_properties().total_memory)
