"""Train a small classifier on scikit-learn's digits with FSDP2, its gradients, and weights, compressed by thinwire.

    torchrun --nproc-per-node 2 examples/train_fsdp.py            # the default recipe, int4
    torchrun --nproc-per-node 2 examples/train_fsdp.py topk:0.01  # any other
    torchrun --nproc-per-node 2 examples/train_fsdp.py int4 int8  # weights, too, on their way to all ranks

The lines marked `thinwire` are all that differs from a plain FSDP2 script.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

import thinwire  # thinwire

EPOCHS, BATCH, HELD_OUT = 10, 64, 297


def main(recipe: str, weights: str | None) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    shuffled = torch.randperm(len(x))
    test, train = shuffled[:HELD_OUT], shuffled[HELD_OUT:][rank::world_size]

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    link = thinwire.attach(model, recipe, weights=weights)  # thinwire
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    if rank == 0:
        print(link.plan)  # thinwire
    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()

    with torch.no_grad():  # on all ranks: each brings its part of the weights
        accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean()
    if rank == 0:
        stats = link.stats()
        print(
            f"{recipe}: accuracy {accuracy:.3f} on {HELD_OUT} held-out digits; {stats['wire_nbytes']:,.0f} bytes sent"
        )
        print(f"per step where the gradients have {stats['raw_nbytes']:,.0f}")
    link.close()  # thinwire
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "int4", sys.argv[2] if len(sys.argv) > 2 else None)
