"""The callback for Lightning's Trainer."""

import logging

import lightning
import pytest
import torch
from torch import nn

import offload
from offload.base.checks import parse_bytes
from offload.callbacks.lightning import OffloadCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),  # on the number of data loader workers, and GPUs
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 uses what PyTorch 2.13 deprecates
]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, fails_at=None, momentum=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(5))
        self.fails_at, self.momentum = fails_at, momentum
        self.losses, self.logged = [], []

    def training_step(self, batch, number):
        x = batch
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        self.losses.append(loss.item())
        if number == self.fails_at:
            raise OSError("the disk is full")
        return loss

    def validation_step(self, batch, number):
        self.logged.append(dict(self.trainer.logged_metrics))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def fit(module, folder, callbacks, accelerator="cpu", ckpt_path=None, max_epochs=2, **options):
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=max_epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
    return trainer


def assert_offloaded(module, expected, callback, trainer):
    assert module.losses == expected.losses
    assert all(map(torch.equal, module.parameters(), expected.parameters()))
    offloaded_bytes = callback.metrics()["offload/offloaded_bytes"]
    assert trainer.logged_metrics["offload/offloaded_bytes"] == offloaded_bytes > 0
    assert {name.split("/")[0] for name in module.logged[-1]} == {"offload"}
    assert not any(layer._forward_pre_hooks for layer in module.layers)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}])
def test_trains_the_same_and_logs_what_was_offloaded(tmp_path, options):
    expected, module = Module(), Module()
    fit(expected, tmp_path, [], **options)
    callback = OffloadCallback(num_layers=3, min_bytes=1)
    trainer = fit(module, tmp_path, [callback], **options)
    assert_offloaded(module, expected, callback, trainer)


@pytest.mark.parametrize(
    ("budget", "options"), [("1GiB", {}), ("14KiB", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01})]
)
def test_trains_the_same_within_a_budget(tmp_path, budget, options):
    expected, module = (Module(momentum=0.9) for _ in range(2))
    fit(expected, tmp_path, [], **options)
    callback = OffloadCallback(memory_budget=budget, min_bytes=1, overlap_forward=True)
    trainer = fit(module, tmp_path, [callback], **options)
    assert_offloaded(module, expected, callback, trainer)
    plan = callback.handle.plan
    assert plan.memory_budget == parse_bytes(budget)
    assert (plan.chosen.recipe.optimizer == "resident") is (budget == "1GiB")


def test_resumes_in_float32(tmp_path):
    """Lightning loads the checkpoint before training begins, and PyTorch rounds the state to bfloat16 then."""

    class Half(Module):
        def __init__(self):
            super().__init__(momentum=0.9)
            self.to(torch.bfloat16)

        def training_step(self, batch, number):
            return super().training_step(batch.to(torch.bfloat16), number)

    def half(ckpt_path=None, **options):
        callback = OffloadCallback(memory_budget="1GiB", min_bytes=1, state_dtype=torch.float32, master_weights=True)
        return fit(Half(), tmp_path, [callback], ckpt_path=ckpt_path, **options)

    path = tmp_path / "saved.ckpt"
    expected = half()
    half(max_epochs=1).save_checkpoint(path)
    found = half(path)
    assert found.lightning_module.losses == expected.lightning_module.losses[4:]
    assert all(map(torch.equal, found.lightning_module.parameters(), expected.lightning_module.parameters()))
    # A checkpoint that was validated, or from which a training has failed to begin, is none to resume from.
    callback = OffloadCallback(memory_budget="1GiB", min_bytes=1, state_dtype=torch.float32, master_weights=True)
    data = torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=2)
    found.callbacks.append(callback)
    found.validate(Half(), data, ckpt_path=path, verbose=False)
    again = fit(Half(), tmp_path, [callback])
    assert again.lightning_module.losses == expected.lightning_module.losses


def test_refuses_steps_in_backward_with_clipping(tmp_path):
    callback = OffloadCallback(memory_budget="1GiB", step_in_backward=True)
    with pytest.raises(ValueError, match=r"step_in_backward must be False where the trainer clips .* at 0\.01"):
        fit(Module(), tmp_path, [callback], gradient_clip_val=0.01)


def test_refuses_a_budget_for_two_optimizers(tmp_path):
    class Two(Module):
        automatic_optimization = False

        def configure_optimizers(self):
            return [super(Two, self).configure_optimizers() for _ in range(2)]

    with pytest.raises(ValueError, match="memory_budget needs a model with one optimizer, got 2; leave it out"):
        fit(Two(), tmp_path, [OffloadCallback(memory_budget="1GiB")])


class Moving(Module):
    """Moves as to a device where it is not yet: each tensor's memory is replaced."""

    moves = 0

    def to(self, *args, **kwargs):
        self.moves += 1
        return self._apply(torch.clone)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}])
def test_trains_streamed_weights_the_same(tmp_path, options):
    expected, module = Module(), Moving()
    fit(expected, tmp_path, [], **options)
    with offload.stream_weights(module.layers, "cpu") as streamed:
        fit(module, tmp_path, [], **options)
        assert streamed.stats().loads >= 8 * 2 * 4
    assert module.moves
    assert module.losses == expected.losses
    assert all(map(torch.equal, module.parameters(), expected.parameters()))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"num_layers": 3}, {"memory_budget": "auto"}, {"memory_budget": "1GiB"}])
def test_trains_the_same_on_a_gpu(tmp_path, options):
    expected, module = Module(), Module()
    fit(expected, tmp_path, [], "gpu")
    callback = OffloadCallback(min_bytes=1, **options)
    trainer = fit(module, tmp_path, [callback], "gpu")
    assert_offloaded(module, expected, callback, trainer)


@pytest.mark.gpu
def test_trains_streamed_weights_on_a_gpu(tmp_path):
    """SGD with a learning rate of 0.1 rounds in other places on the CPU than on a GPU: the first loss is the same."""
    expected, module = Module(), Module()
    fit(expected, tmp_path, [], "gpu")
    with offload.stream_weights(module.layers, "cuda") as streamed:
        fit(module, tmp_path, [], "gpu")
        assert streamed.stats().loads > 0
        assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert module.losses[0] == expected.losses[0]
    assert torch.allclose(torch.tensor(module.losses), torch.tensor(expected.losses))


def test_removes_when_training_raises(tmp_path):
    module = Module(fails_at=1)
    callback = OffloadCallback(num_layers=3, layers="layers", min_bytes=1)
    with pytest.raises(OSError, match="disk is full"):
        fit(module, tmp_path, [callback])
    assert not any(layer._forward_pre_hooks for layer in module.layers)
    assert callback.handle.stats().offloaded_bytes > 0
