"""Train a LightningModule with Lightning's Trainer, with the activations of most layers offloaded.

python docs/examples/lightning_trainer.py
"""

import tempfile
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from offload.callbacks.lightning import OffloadCallback

LAYERS, OFFLOADED = 8, 6

# Lightning 2.6 uses what PyTorch 2.13 deprecates, and has advice on data loaders.
warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
warnings.filterwarnings("ignore", category=UserWarning, module="lightning")

hidden, tokens = (1024, 2048) if torch.cuda.is_available() else (128, 128)
data = torch.randn(8, tokens, hidden, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """The feed-forward half of a decoder layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x):
        """``x`` and what the block adds to it."""
        return x + self.body(x)


class Model(LightningModule):
    """Predicts its input; remembers its losses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.losses = []

    def training_step(self, batch):
        """The loss of one batch."""
        x = batch
        for layer in self.layers:
            x = layer(x)
        loss = (x - batch).square().mean()
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """AdamW on all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(callbacks):
    """The model after two epochs, and what was logged last."""
    torch.manual_seed(0)
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=2,
            devices=1,
            callbacks=callbacks,
            default_root_dir=folder,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(data, batch_size=2))
    return model, trainer.logged_metrics


expected, _ = train([])
callback = OffloadCallback(num_layers=OFFLOADED, min_bytes="128KiB")  # leave min_bytes out for layers of usual size
found, logged = train([callback])

assert found.losses == expected.losses
assert all(map(torch.equal, found.parameters(), expected.parameters()))
assert logged["offload/offloaded_bytes"] > 0
print(f"\n{len(found.losses)} losses are equal, bit for bit; the last one is {found.losses[-1]:.6f}\n")
print(callback.handle.stats())
