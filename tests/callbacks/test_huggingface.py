"""The callback for Hugging Face's Trainer."""

from contextlib import nullcontext

import pytest
import safetensors.torch
import torch
import transformers
from llama import LAYERS, llama
from torch import nn

import offload
from offload.base.checks import parse_bytes
from offload.callbacks.base import find_layers

pytestmark = pytest.mark.slow

transformers.utils.logging.set_verbosity_error()


def OffloadCallback(*given, **options):  # noqa: N802  # the class, imported where tests run: that takes two seconds
    from offload.callbacks import huggingface

    return huggingface.OffloadCallback(*given, **options)


def make_trainer(folder, callbacks, fails=False, model=None, **options):
    model = llama(transformers, torch.device("cpu")) if model is None else model
    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    class Trainer(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if fails and self.state.global_step == 1:
                raise OSError("the disk is full")
            return loss

    defaults = {"max_steps": 3, "save_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **defaults | options,
    )
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)


def trained(folder, *callbacks, **options):
    trainer = make_trainer(folder, [*callbacks], **options)
    trainer.train()
    return trainer


def has_hooks(model):
    return any(layer._forward_pre_hooks for layer in model.model.layers)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def losses(trainer):
    return logged(trainer, "loss")


def assert_same(trainer, expected):
    assert losses(trainer) == losses(expected)
    assert all(map(torch.equal, trainer.model.parameters(), expected.model.parameters()))


MIXED = {"gradient_accumulation_steps": 2, "bf16": True}


@pytest.mark.parametrize("options", [{}, MIXED])
def test_trains_the_same_and_logs_what_was_offloaded(tmp_path, options):
    callback = OffloadCallback(num_layers=3, min_bytes=1)
    assert callback.metrics() == {}
    trainer = trained(tmp_path, callback, **options)
    assert_same(trainer, trained(tmp_path, **options))
    offloaded = logged(trainer, "offload/offloaded_bytes")
    assert 0 < offloaded[0] < offloaded[1] < offloaded[2] == callback.handle.stats().offloaded_bytes
    assert not has_hooks(trainer.model)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("budget", "options"),
    [("1GiB", {**MIXED, "max_grad_norm": 0.01}), ("1GiB", {"optim": "sgd"}), ("900KiB", {}), ("900KiB", MIXED)],
)
def test_trains_the_same_within_a_budget(tmp_path, budget, options):
    """Clipping, accumulation, mixed precision and a scheduler; the recipe changes in between."""
    callback = OffloadCallback(memory_budget=budget, max_host_bytes="1GiB", min_bytes=1, overlap_forward=True)
    trainer = trained(tmp_path, callback, max_steps=6, **options)
    assert_same(trainer, trained(tmp_path, max_steps=6, **options))
    plan = callback.handle.plan
    assert callback.handle.state == "removed"
    assert plan.chosen.recipe.optimizer == ("resident" if budget == "1GiB" else "streamed")
    assert (plan.memory_budget, plan.max_host_bytes) == (parse_bytes(budget), 1 << 30)
    assert logged(trainer, "offload/offloaded_bytes")[-1] == callback.handle.stats()["activations"].offloaded_bytes
    assert not has_hooks(trainer.model)


def test_steps_in_backward_exclude_the_clipping_that_is_the_default(tmp_path):
    """Clipping would find no gradients, and do nothing."""
    callback = OffloadCallback(memory_budget="900KiB", min_bytes=1, step_in_backward=True)
    with pytest.raises(ValueError, match=r"step_in_backward must be False where the trainer clips .* at 1\.0; leave"):
        trained(tmp_path, callback)
    trainer = trained(tmp_path, callback, max_steps=4, max_grad_norm=0)
    assert_same(trainer, trained(tmp_path, max_steps=4, max_grad_norm=0))
    # A loop of the program's own behind a training that has failed may clip, and is told.
    with callback:
        with pytest.raises(OSError, match="the disk is full"):
            trained(tmp_path, callback, fails=True, max_steps=4, max_grad_norm=0, model=trainer.model)
        with pytest.raises(RuntimeError, match="stepped with and freed"):
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)


def test_auto_asks_the_device_which_the_cpu_is_not(tmp_path):
    with pytest.raises(ValueError, match="on the CPU, give bytes"):
        trained(tmp_path, OffloadCallback(memory_budget="auto"))


def moving_llama():
    """A Llama that moves as to a device where it is not yet: each tensor's memory is replaced."""
    model = llama(transformers, torch.device("cpu"))

    class Moving(type(model)):
        moves = 0

        def to(self, *args, **kwargs):
            Moving.moves += 1
            return self._apply(torch.clone)

    model.__class__ = Moving
    return model


@pytest.mark.parametrize(
    "options", [{**MIXED, "max_grad_norm": 0.01}, {"activation_checkpointing": True, "optim": "sgd"}]
)
def test_trains_streamed_weights_the_same(tmp_path, options):
    """Trainer moves the model twice, clips gradients, evaluates, saves."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2} | options
    expected = trained(tmp_path / "expected", **options)
    model = moving_llama()
    with offload.stream_weights(model.model.layers, "cpu") as streamed:
        trainer = trained(tmp_path / "streamed", model=model, **options)
        assert streamed.stats().loads >= 3 * 2 * (LAYERS - 1)
    assert model.moves >= 2
    assert_same(trainer, expected)
    for name in ("eval_loss", "grad_norm"):
        assert logged(trainer, name) == logged(expected, name)
        assert len(logged(trainer, name)) == 3
    saved, wanted = (
        safetensors.torch.load_file(tmp_path / name / "checkpoint-2/model.safetensors")
        for name in ("streamed", "expected")
    )
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)


def test_resumes_with_streamed_weights(tmp_path):
    expected = trained(tmp_path, save_strategy="steps", save_steps=2)
    model = moving_llama()
    with offload.stream_weights(model.model.layers, "cpu") as streamed:
        trainer = make_trainer(tmp_path, [], model=model)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert streamed.stats().loads > 0
    assert_same(trainer, expected)


def test_resumes_in_float32(tmp_path):
    """Trainer loads the checkpoint before training begins, and PyTorch rounds the state to bfloat16 then."""

    def train(**resumed):
        model = llama(transformers, torch.device("cpu")).to(torch.bfloat16)
        options = {"state_dtype": torch.float32, "master_weights": True, "min_bytes": 1}
        callback = OffloadCallback(memory_budget="1MiB", max_host_bytes="1GiB", **options)
        trainer = make_trainer(tmp_path, [callback], model=model, max_steps=4, save_strategy="steps", save_steps=2)
        trainer.train(**resumed)
        return trainer

    expected = train()
    assert_same(train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")), expected)


@pytest.mark.parametrize("options", [{"num_layers": 3}, {"memory_budget": "1MiB"}])
def test_offloads_activations_beside_streamed_weights(tmp_path, options):
    model = moving_llama()
    callback = OffloadCallback(min_bytes=1, **options)
    with offload.stream_weights(model.model.layers, "cpu") as streamed:
        trainer = trained(tmp_path, callback, model=model, max_steps=6)
        assert streamed.stats().loads > 0
    assert_same(trainer, trained(tmp_path, max_steps=6))
    if "memory_budget" in options:
        assert {one.recipe.weights for one in callback.handle.plan.recipes} == {"streamed"}
    assert callback.metrics()["offload/offloaded_bytes"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"num_layers": 3}, {"memory_budget": "auto"}, {"memory_budget": "1GiB"}])
def test_trains_the_same_on_a_gpu(tmp_path, options):
    callback = OffloadCallback(min_bytes=1, **options)
    trainer = trained(tmp_path, callback, max_steps=6, use_cpu=False)
    assert_same(trainer, trained(tmp_path, max_steps=6, use_cpu=False))
    assert callback.metrics()["offload/offloaded_bytes"] > 0


@pytest.mark.gpu
def test_trains_streamed_weights_on_a_gpu(tmp_path):
    """Optimizers round in other places on the CPU than on a GPU; SGD with a power of two does not."""
    exact = {"optim": "sgd", "learning_rate": 2.0**-6, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    expected = trained(tmp_path, use_cpu=False, **exact)
    for options in (exact, {}):  # the default is AdamW, with gradients clipped at 1
        model = llama(transformers, torch.device("cpu"))
        with offload.stream_weights(model.model.layers, "cuda") as streamed:
            trainer = trained(tmp_path, model=model, use_cpu=False, **options)
            assert streamed.stats().loads > 0
            assert {parameter.device.type for parameter in model.model.layers.parameters()} == {"cpu"}
            assert model.model.embed_tokens.weight.device.type == "cuda"
        assert losses(trainer)[0] == losses(expected)[0]
        assert all(torch.tensor(losses(trainer)).isfinite())
        if options:
            assert losses(trainer) == losses(expected)


def test_reporters_behind_it_get_what_moved_and_evaluation_does_not(tmp_path):
    class Recorder(transformers.TrainerCallback):
        def on_log(self, args, state, control, *, logs, **_):
            self.logs = dict(logs)

    recorder = Recorder()
    trainer = make_trainer(tmp_path, [OffloadCallback(num_layers=1, min_bytes=1), recorder], eval_strategy="epoch")
    trainer.args.max_steps = 1
    trainer.train()
    assert "train_loss" in recorder.logs
    assert not [name for name in trainer.evaluate() if name.startswith("offload/")]
    assert all("offload/stall_s" in entry for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("block", [False, True])
def test_trains_again_after_an_error(tmp_path, block):
    callback = OffloadCallback(num_layers=3, min_bytes=1)
    trainer = make_trainer(tmp_path, [callback], fails=True)
    with pytest.raises(OSError, match="disk is full"), callback if block else nullcontext():
        trainer.train()
    assert has_hooks(trainer.model) is not block  # Trainer has told nobody

    trainer.__class__ = transformers.Trainer
    trainer.train()
    assert callback.handle.stats().offloaded_bytes > 0
    assert not has_hooks(trainer.model)


def test_refuses_data_parallelism_in_threads(tmp_path):
    callback = OffloadCallback()
    trainer = make_trainer(tmp_path, [])
    trainer.args._n_gpu = 2
    with pytest.raises(RuntimeError, match="one process per GPU, got 2 GPUs in one; start the script with torchrun"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


USUAL = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**USUAL),
        transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=32),
        transformers.BertConfig(**USUAL, is_decoder=True),
        transformers.MixtralConfig(**USUAL, num_key_value_heads=2, num_local_experts=2),
    ],
    ids=lambda config: type(config).__name__,
)
def test_finds_the_layers_of_usual_models(config):
    model = transformers.AutoModelForCausalLM.from_config(config)
    layers = list(find_layers(model, None))
    assert len(layers) == 3
    assert len({type(layer) for layer in layers}) == 1
    assert [layer for layer in model.modules() if type(layer) is type(layers[0])] == layers


def test_a_name_is_found_inside_of_what_wraps_the_model():
    model = llama(transformers, torch.device("cpu"))
    wrapped = nn.Sequential(nn.Sequential(model))
    assert find_layers(wrapped, "model.layers") is model.model.layers
    assert find_layers(wrapped, "layers") is model.model.layers
    assert len(list(find_layers(model, lambda model: model.model.layers[1:]))) == LAYERS - 1


def test_says_what_the_model_has():
    two = nn.ModuleDict({name: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for name in ("encoder", "decoder")})
    with pytest.raises(ValueError, match=r"^layers must be the name .*; ModuleDict has 'encoder', 'decoder'\.$"):
        find_layers(two, None)
    with pytest.raises(ValueError, match=r"got 'coder'; ModuleDict has 'encoder', 'decoder'\.$"):
        find_layers(two, "coder")
    with pytest.raises(ValueError, match=r"; Linear has no list of modules\.$"):
        find_layers(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match=r"has '0'; if its own parts are the layers, pass layers=\[\*model\]\.$"):
        find_layers(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_layers": -3}, "num_layers must be at least 0, got -3"),
        ({"nun_layers": 3}, "unexpected keyword argument 'nun_layers'"),
        (
            {"num_layers": "40GiB"},
            "num_layers must be an int, got '40GiB'; for device memory, write memory_budget='40G",
        ),
        ({"memory_budget": "40"}, "memory_budget must be a number and a unit, such as '40GiB', got '40'"),
        ({"memory_budget": "1GiB", "max_host_bytes": "lots"}, "max_host_bytes must be a number and a unit"),
        ({"memory_budget": "1GiB", "num_layers": 2}, "memory_budget excludes num_layers"),
        ({"state_dtype": torch.float32}, "unexpected keyword argument 'state_dtype'"),
    ],
)
def test_refuses_wrong_arguments_before_training(options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        OffloadCallback(**options)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_a_model_compiled_as_a_whole_rounds_as_with_graph_breaks_at_its_layers(tmp_path):
    """Where nothing breaks the graph, Inductor fuses operations across layers, which rounds otherwise."""
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )

    def weights(begin):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        begin(model.transformer.h)
        trained(tmp_path, model=model, max_steps=1, torch_compile=True)
        return list(model.parameters())

    def break_graphs(layers):
        for layer in layers:
            layer.register_forward_pre_hook(torch._dynamo.disable(lambda *_: None))
            layer.register_forward_hook(torch._dynamo.disable(lambda *_: None))

    handles = []
    found = weights(lambda layers: handles.append(offload.offload_layers(layers, 1, min_bytes=0, device="cpu")))
    assert handles[0].stats().reloaded_bytes > 0
    assert all(map(torch.equal, weights(break_graphs), found))
