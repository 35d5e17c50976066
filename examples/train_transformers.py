"""Train a small classifier on scikit-learn's digits with Hugging Face's Trainer, its gradients compressed by thinwire.

    torchrun --nproc-per-node 2 examples/train_transformers.py
    torchrun --nproc-per-node 2 examples/train_transformers.py topk:0.01

The Trainer wraps the model itself, when training begins; a callback attaches then. The class marked `thinwire` is all
that is added.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import thinwire

EPOCHS, BATCH, HELD_OUT = 10, 64, 297


class Compress(TrainerCallback):  # thinwire
    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def on_train_begin(self, args, state, control, **kwargs):
        self.link = thinwire.attach(self.trainer.model_wrapped, self.recipe)

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            stats = self.link.stats()
            print(f"{self.recipe}: {stats['steps']} exchanges, each of {stats['wire_nbytes']:,.0f} bytes sent")
            print(f"where the gradients have {stats['raw_nbytes']:,.0f}")
        self.link.close()


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, inputs, labels):
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(rows):
    inputs, labels = zip(*rows, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def main(recipe: str) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    shuffled = torch.randperm(len(x))
    test, train = shuffled[:HELD_OUT], shuffled[HELD_OUT:]
    model = Digits()
    arguments = TrainingArguments(
        output_dir="digits",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_bucket_cap_mb=1,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    compress = Compress(recipe)
    trainer = Trainer(
        model, arguments, train_dataset=TensorDataset(x[train], y[train]), data_collator=collate, callbacks=[compress]
    )
    compress.trainer = trainer
    trainer.train()
    if trainer.is_world_process_zero():
        with torch.no_grad():
            accuracy = (model.layers(x[test]).argmax(dim=1) == y[test]).float().mean()
        print(f"accuracy {accuracy:.3f} on {HELD_OUT} held-out digits")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "int4")
