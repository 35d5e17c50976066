"""Train a small classifier on scikit-learn's digits with DiLoCo: ranks exchange once in ten steps, compressed.

    torchrun --nproc-per-node 2 examples/train_diloco.py            # the default recipe, int8
    torchrun --nproc-per-node 2 examples/train_diloco.py e3m0       # any other

The lines marked `thinwire` are all that differs from training on one machine.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import thinwire  # thinwire

STEPS, BATCH, HELD_OUT = 200, 64, 297


def main(recipe: str) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    shuffled = torch.randperm(len(x))
    test, train = shuffled[:HELD_OUT], shuffled[HELD_OUT:][rank::world_size]

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = thinwire.DiLoCo(model, optimizer, recipe, sync_every=10)  # thinwire

    for _ in range(STEPS):
        batch = train[torch.randint(len(train), (BATCH,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    outer.sync()  # thinwire

    if rank == 0:
        with torch.no_grad():
            accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean()
        stats = outer.stats()
        sent = stats["wire_nbytes"] * stats["exchanges"] / stats["steps"]
        print(f"{recipe}: accuracy {accuracy:.3f} on {HELD_OUT} held-out digits; {sent:,.0f} bytes sent per step")
    outer.close()  # thinwire
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "int8")
