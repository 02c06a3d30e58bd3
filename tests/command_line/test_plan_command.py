"""``python -m offload plan``: what to do with a model, by its config."""

import json
import os
import re
import runpy
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import offload
from offload.command_line import main as command_line
from offload.command_line.count import Rates, count_model, read_config
from offload.command_line.main import call_for, main, recipes_for

SIZES = ["num_hidden_layers=4", "hidden_size=1024", "intermediate_size=4096", "num_attention_heads=8"]
SIZES += ["num_key_value_heads=2", "vocab_size=32000"]
LLAMA = ["llama", *(f"--set={size}" for size in SIZES)]


COUNTED = {}


@pytest.fixture(autouse=True)
def counted_once(monkeypatch):
    """Each model, whatever it is then planned for: with fake tensors, too, that takes half a second."""

    def count(config, *given, **options):
        key = config.to_json_string(), given, *options.items()
        COUNTED[key] = COUNTED.get(key) or count_model(config, *given, **options)
        return COUNTED[key]

    monkeypatch.setattr(command_line, "count_model", count)


def asked(capsys, *words, status=0):
    assert main(["plan", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_reader_may_see_enough(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main(["plan", *LLAMA, "--memory=80GiB"]) == 0


@pytest.fixture(scope="module")
def model():
    return count_model(read_config("llama", SIZES), 1, 4096, Rates(630e12, 4e12), 2 << 20)


LINK = offload.Link(50e9, 50e9, 100e9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks Hugging Face for it
def test_keeps_all_where_it_fits(capsys, model):
    found = asked(capsys, *LLAMA, "--memory=80GiB")
    assert (found["write"], found["ok"]) == ("offload nothing: all fits", True)
    assert found["saved_bytes"] == model.profile.saved_bytes
    assert found["recipes"][0]["step_s"] == pytest.approx(model.profile.compute_s)
    assert found["recipes"][0]["host_bytes"] == 0
    assert found["parameters"] == model.parameters == model.training.trained_elements
    assert (model.training.weights, model.training.gradients, model.training.state) == (
        2 * model.parameters,
        2 * model.parameters,
        4 * model.parameters,
    )
    less = asked(capsys, *LLAMA, "--memory=80GiB", "--fused-loss", "--optimizer-bytes=0", "--lora=4")
    assert less["loss_bytes"] < found["loss_bytes"]
    assert less["recipes"][0]["device_bytes"] < found["recipes"][0]["device_bytes"] - 5 * model.parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nbytes", "arguments"),
    [(4, ""), (8, ", state_dtype=torch.float32"), (10, ", state_dtype=torch.float32, master_weights=True")],
)
def test_the_call_has_the_state_that_was_asked_for(nbytes, arguments):
    counted = count_model(read_config("llama", SIZES), 1, 4096, Rates(630e12, 4e12), 2 << 20, state=nbytes)
    usable = counted.parameters * 6 + counted.profile.loss_bytes
    made = recipes_for(counted, usable, LINK, None)
    assert call_for(counted, made, usable).partition('B"')[2] == f", step_in_backward=True{arguments})"
    assert ("cpu" in {one.recipe.optimizer for one in made.recipes}) is (not arguments)


@pytest.mark.slow
def test_goes_from_call_to_call_as_memory_shrinks(model):
    fixed, loss, saved = model.parameters * 8, model.profile.loss_bytes, model.profile.saved_bytes
    calls = []
    for usable in (
        fixed + loss + 2 * saved,
        fixed + loss + 0.3 * saved,
        fixed + loss,
        loss + 0.6 * fixed,
        loss,
        loss / 2,
    ):
        made = recipes_for(model, int(usable), LINK, None)
        calls.append(call_for(model, made, int(usable)))
        assert calls[-1] is None or made.chosen.device_bytes <= usable
    assert calls[0] == "offload nothing: all fits"
    assert calls[1].startswith("offload_layers(model.model.layers, memory_budget=")
    assert all(call.startswith("prepare(model, optimizer, memory_budget=") for call in calls[2:4])
    assert calls[-1] is None
    made = recipes_for(model, int(fixed + loss), LINK, 1 << 20)
    assert "of host memory without activations" in made.recipes[-1].reason


@pytest.mark.slow
@pytest.mark.parametrize(("share", "call"), [(0.1, "offload_layers("), (0.03, "prepare(")])
def test_a_training_loop_is_left_as_it_is_where_another_gains_little(model, share, call):
    usable = int(model.parameters * 8 + model.profile.loss_bytes + share * model.profile.saved_bytes)
    made = recipes_for(model, usable, offload.Link(4e11, 4e11, 8e11), None)
    longer = made.recipes[0].step_s / min(one.step_s for one in made.recipes)
    assert 1.02 < longer < 1.1
    assert (longer < 1.05) == (call == "offload_layers(")
    assert call_for(model, made, usable).startswith(call)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "call"), [(0.6, "prepare(model, "), (1, "offload_layers(model.model.layers, ")])
def test_a_limit_of_the_host_is_in_the_call(capsys, model, share, call):
    usable = share * model.parameters * 8 + model.profile.loss_bytes + 0.3 * model.profile.saved_bytes
    words = [*LLAMA, f"--memory={int(usable / 0.92)}B", "--host-memory=2GiB"]
    found = asked(capsys, *words)
    assert found["write"].startswith(call)
    assert ', max_host_bytes="2GiB"' in found["write"]
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.partition("\ndo ")[2].partition("\n\n")[0].splitlines()
    assert " ".join(line.strip() for line in lines) == found["write"]
    assert max(map(len, lines)) < 100  # a terminal and the site show the whole call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "said"), [(0.2, "fits, even without a token: a device of"), (3, "fits: fewer tokens, or a device of")]
)
def test_nothing_fits_says_what_would(capsys, model, share, said):
    assert main(["plan", *LLAMA, f"--memory={int(share * model.parameters)}B"]) == 1
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_slower_machine_takes_longer(capsys, model):
    needed = model.parameters * 8 + model.profile.loss_bytes + 0.2 * model.profile.saved_bytes
    words = [*LLAMA, f"--memory={int(needed / 0.92)}B"]
    here = asked(capsys, *words)["recipes"]
    slow = asked(capsys, *words, "--link=5GB")["recipes"]
    assert all(one["step_s"] > other["step_s"] for one, other in zip(slow, here, strict=True))
    for option in ("--flops=63e12", "--bandwidth=1e12"):
        assert asked(capsys, *words, option)["recipes"][0]["step_s"] > 1.2 * here[0]["step_s"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, pytest.param(0.6, marks=pytest.mark.nightly)])
def test_offload_layers_meets_the_budget_that_is_printed(share):
    """``memory_budget`` is what a step adds to weights and optimizer state: gradients and loss are in it."""
    sizes = ["num_hidden_layers=4", "hidden_size=64", "intermediate_size=256", "num_attention_heads=4"]
    config = read_config("llama", [*sizes, "num_key_value_heads=4", "vocab_size=512", "dtype=float32"])
    counted = count_model(config, 2, 1024, Rates(630e12, 4e12), 1 << 12)
    fixed = counted.parameters * 16
    usable = int(fixed + counted.profile.loss_bytes + share * counted.profile.saved_bytes)
    call = call_for(counted, recipes_for(counted, usable, LINK, 0), usable)  # nothing on the host: weights are resident
    budget = call.partition('memory_budget="')[2].partition('"')[0]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    numbers = torch.randint(512, (2, 1024))

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


@pytest.mark.slow
def test_text_has_the_regions(tmp_path, capsys):
    read_config("llama", SIZES).save_pretrained(tmp_path)
    kept = asked(capsys, str(tmp_path), "--memory=80GiB")
    memory = int((8 * kept["parameters"] + kept["loss_bytes"] + 0.3 * kept["saved_bytes"]) / 0.92)
    assert main(["plan", str(tmp_path / "config.json"), f"--memory={memory}B"]) == 0
    text = capsys.readouterr().out
    assert "\ndo          offload_layers(model.model.layers, memory_budget=" in text
    assert "\nself_attn: _scaled_dot_product_flash_attention" in text
    assert "\npeak " in text


def test_says_what_is_not_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", "llama", "--memory=8GiB"]) == 2
    assert capsys.readouterr().err.startswith("offload plan: import of transformers halted")


def test_without_a_device_memory_must_be_given(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", *LLAMA]) == 2
    assert "give --memory, such as --memory 24GiB" in capsys.readouterr().err


@pytest.mark.gpu
def test_plans_for_the_gpu_that_is_here(capsys):
    found = asked(capsys, *LLAMA)
    assert found["usable_bytes"] == int(0.92 * torch.cuda.get_device_properties().total_memory)


def test_has_a_script_and_a_version(capsys, monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"offload": "offload.command_line.main:main"}
    monkeypatch.setattr(sys, "argv", ["offload", "--version"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("offload", run_name="__main__")
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"offload {project['version']}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--memory 8GiB --set layers=2", "--set must be NAME=VALUE with a"),
        ("--memory 8GiB --lora 0", "--lora must be at least 1, got 0"),
        ("--memory 8GiB --tokens 0", "--tokens must be at least 1, got 0"),
        ("--memory 8GiB --batch -1", "--batch must be at least 1, got -1"),
        ("--memory 8GiB --optimizer-bytes -1", "--optimizer-bytes must be at least 0, got -1"),
        ("--memory 8GiB --bandwidth 0", "bandwidth must be a positive, finite number, got 0.0"),
        ("--memory 8GiB --flops nan", "flops must be a positive, finite number, got nan"),
    ],
)
def test_what_cannot_be_answered_is_one_line(words, said, capsys):
    assert main(["plan", "llama", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"offload plan: {said}")
    assert error.count("\n") == 1


SIZE = "must be a number and a unit, such as '40GiB', got"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--memory 1MibB", f"argument --memory: {SIZE} '1MibB'"),
        ("--memory 80", f"argument --memory: {SIZE} '80'"),
        ("--memory=-5GiB", f"argument --memory: {SIZE} '-5GiB'"),
        ("--memory -5GiB", f"argument --memory: {SIZE} '-5GiB'"),
        ("--memory 8GiB --host-memory 64", f"argument --host-memory: {SIZE} '64'"),
        ("--link 26", f"argument --link: {SIZE} '26'"),
        ("--tokens x", "argument --tokens: invalid int value: 'x'"),
    ],
)
def test_wrong_options_are_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "llama", *words.split()])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


PAGE = Path(__file__).resolve().parents[2] / "docs/reference/command_line.md"


def test_the_page_names_options_that_there_are(capsys):
    """Of the table of plan's."""
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    table = PAGE.read_text("utf-8").partition("| option | says |")[2]
    named = set(re.findall(r"`(--[\w-]+)", table))
    assert named <= known
    assert len(named) > 5
