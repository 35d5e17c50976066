"""Train a small model through parameter servers.

    thinwire launch --servers-per-node 2 --nproc-per-node 2 examples/train_with_servers.py

Under Slurm, from a folder that all nodes see:

    sbatch examples/slurm_servers.sbatch examples/train_with_servers.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)), bucket_cap_mb=1)
link = thinwire.attach(model, "topk:0.01", servers="env")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(1 + rank)
for step in range(20):
    x = torch.randn(64, 64)
    loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)

if rank == 0:
    print(f"{link.stats()['wire_nbytes']:,.0f} bytes sent per step and worker, {link.plan.raw_nbytes:,} of gradient")
link.close()
dist.destroy_process_group()
