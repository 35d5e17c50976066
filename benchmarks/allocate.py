"""Bytes and loss of recipes chosen per parameter beside uniform ones, on the demo's workloads over loopback.

    torchrun --nproc-per-node 2 benchmarks/allocate.py --workload gpt --steps 150 --json allocate.json

Every method starts from the same parameters and sees the same batches. Bytes are those that the driver counted on rank
0, per step: over all steps, and over those after the last choice. Nothing is timed.
"""

import argparse
import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import Allocate
from thinwire.bench.settings import Settings
from thinwire.bench.workloads import make_workload

BITS = ["int2", "int3", "int4", "int6", "int8"]
DENSITIES = ["topk:0.001", "topk:0.003", "topk:0.01", "topk:0.03", "topk:0.1"]
RANKS = ["powersgd:1", "powersgd:2", "powersgd:4", "powersgd:8"]


def methods(every: int, samples: int) -> dict[str, str | Allocate]:
    """Uniform recipes, and choices around them."""
    kwargs = {"every": every, "samples": samples}
    return {
        "dense": "dense",
        "int3": "int3",
        "int4": "int4",
        "Allocate, bits, int4": Allocate(candidates=BITS, default="int4", **kwargs),
        "topk:0.003": "topk:0.003",
        "topk:0.01": "topk:0.01",
        "Allocate, densities, topk:0.01": Allocate(candidates=DENSITIES, default="topk:0.01", **kwargs),
        "powersgd:2": "powersgd:2",
        "powersgd:4": "powersgd:4",
        "Allocate, ranks, powersgd:4": Allocate(candidates=RANKS, default="powersgd:4", **kwargs),
    }


def train(
    name: str, recipe: str | Allocate, workload_name: str, steps: int, every: int, seed: int
) -> dict[str, object]:
    """Train one method and return what came of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workload = make_workload(Settings(workload=workload_name), rank, world_size)
    model = DistributedDataParallel(workload.model(seed), bucket_cap_mb=8)
    optimizer = workload.optimizer(model.parameters())
    assert optimizer is not None
    link = thinwire.attach(model, recipe)
    workload.start(seed)
    nbytes, losses = list[float](), list[float]()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = workload.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        nbytes.append(link.stats(reset=True)["wire_nbytes"])
    model.eval()
    summed = torch.tensor(workload.evaluate(model.module), dtype=torch.float64)
    dist.all_reduce(summed)
    after = nbytes[every * ((steps - 1) // every) :]
    recipes = [param.aggregator.recipe() for param in link.plan.params if not param.reason]
    link.close()
    return {
        "method": name,
        "seed": seed,
        "nbytes_per_step": sum(nbytes) / steps,
        "nbytes_per_step_after_last_choice": sum(after) / len(after),
        "train_loss": sum(losses[-10:]) / 10,
        "val_loss": float(summed[0] / summed[2]),
        "recipes": {recipe: recipes.count(recipe) for recipe in dict.fromkeys(recipes)},
    }


def main() -> None:
    """Train every method for every seed; rank 0 prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt", choices=["gpt", "digits"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    runs = []
    for name, recipe in methods(args.every, args.samples).items():
        for seed in range(args.seeds):
            runs.append(train(name, recipe, args.workload, args.steps, args.every, seed))
            if dist.get_rank() == 0:
                print(json.dumps(runs[-1]), flush=True)
    if args.json and dist.get_rank() == 0:
        with open(args.json, "w") as file:
            json.dump(
                {"schema": 1, "conditions": {**vars(args), "world_size": dist.get_world_size()}, "runs": runs}, file
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
