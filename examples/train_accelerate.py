"""Train a small classifier on scikit-learn's digits with Accelerate, its gradients compressed by thinwire.

    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py
    torchrun --nproc-per-node 2 examples/train_accelerate.py topk:0.01

Accelerate's own `ddp_comm_hook` setting knows PyTorch's hooks only. thinwire attaches to what `prepare` returns, which
is a DistributedDataParallel model. The lines marked `thinwire` are all that is added.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire  # thinwire

EPOCHS, BATCH, HELD_OUT = 10, 64, 297


def main(recipe: str) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
    torch.manual_seed(0)

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    shuffled = torch.randperm(len(x))
    test, train = shuffled[:HELD_OUT], shuffled[HELD_OUT:]

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    link = thinwire.attach(model, recipe)  # thinwire

    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()

    if accelerator.is_main_process:
        with torch.no_grad():
            accuracy = (accelerator.unwrap_model(model)(x[test]).argmax(dim=1) == y[test]).float().mean()
        stats = link.stats()
        print(f"{recipe}: accuracy {accuracy:.3f} on {HELD_OUT} held-out digits after {stats['steps']} exchanges;")
        print(f"{stats['wire_nbytes']:,.0f} bytes sent per step where the gradients have {stats['raw_nbytes']:,.0f}")
    link.close()  # thinwire
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "int4")
