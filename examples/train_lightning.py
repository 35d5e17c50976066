"""Train a small classifier on scikit-learn's digits with Lightning, its gradients compressed by thinwire.

    python examples/train_lightning.py            # two processes on this machine
    python examples/train_lightning.py topk:0.01

DDPStrategy's `ddp_comm_hook` is registered on GPUs only, and dropped without a word on CPUs. A callback attaches to the
DistributedDataParallel model that the strategy has made. The class marked `thinwire` is all that is added.
"""

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire

EPOCHS, BATCH, HELD_OUT = 10, 64, 297


class Compress(L.Callback):  # thinwire
    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.link = thinwire.attach(trainer.strategy.model, self.recipe)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            stats = self.link.stats()
            print(f"{self.recipe}: {stats['steps']} exchanges, each of {stats['wire_nbytes']:,.0f} bytes sent")
            print(f"where the gradients have {stats['raw_nbytes']:,.0f}")
        self.link.close()


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch, index):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(recipe: str) -> None:
    L.seed_everything(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    shuffled = torch.randperm(len(x))
    test, train = shuffled[:HELD_OUT], shuffled[HELD_OUT:]
    model = Digits()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", bucket_cap_mb=1),
        max_epochs=EPOCHS,
        callbacks=[Compress(recipe)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=Path.cwd(),
    )
    trainer.fit(model, DataLoader(TensorDataset(x[train], y[train]), batch_size=BATCH, shuffle=True))
    if trainer.is_global_zero:
        with torch.no_grad():
            accuracy = (model.layers(x[test]).argmax(dim=1) == y[test]).float().mean()
        print(f"accuracy {accuracy:.3f} on {HELD_OUT} held-out digits")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "int4")
