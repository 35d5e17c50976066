"""What the distributed tests share: small models, data, training loops, and the ledger of what is owed."""

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import Link, PlanOptions

# Everything is compressed, small as the models are, and parameters are cut into several partitions.
ALL = PlanOptions(min_nbytes=0, compress_1d=True, partition_numel=1024)


class Tower(nn.Module):
    """Linear layers that run in the reverse of the order they are registered in, so that DDP rebuilds its buckets."""

    def __init__(self, width: int = 48, depth: int = 5, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def seeded(make: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """Make a model with the same weights on every rank."""
    torch.manual_seed(seed)
    return make(*args, **kwargs)


def batch(rank: int, step: int, *, rows: int = 8, width: int = 48) -> Tensor:
    """Return the input of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator)


@contextmanager
def attached(model: nn.Module, recipe: Any, **kwargs: Any) -> Iterator[Link]:
    """Attach, and close in the end unless the block raised."""
    kwargs.setdefault("options", ALL)
    link = thinwire.attach(model, recipe, **kwargs)
    yield link
    link.close()


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of all bits."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
        hasher.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"-")
    return hasher.hexdigest()


def gradients(model: nn.Module) -> list[Tensor]:
    """Return copies of all gradients there are."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(
    model: nn.Module,
    rank: int,
    steps: Iterable[int],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    width: int = 48,
) -> str:
    """Train; return a hash of every step's gradients and of the parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Tensor] = []
    for step in steps:
        optimizer.zero_grad()
        loss(model, batch(rank, step, width=width)).backward()
        seen += gradients(model)
        optimizer.step()
    return digest([*seen, *model.parameters()])


def loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return a loss with gradients of very different sizes."""
    return (model(x) - x.roll(1, dims=1)).square().sum() / x.shape[0]


class Ledger:
    """Sums what was due (the true mean gradients) and what was delivered; the difference must be what is owed.

    `due` is computed from the bare module by `torch.autograd.grad`, which triggers none of DDP's hooks.
    """

    def __init__(self, model: DistributedDataParallel, link: Link) -> None:
        self._link = link
        self._params = dict(model.module.named_parameters())
        self._due = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self._params.items()}
        self._delivered = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self._params.items()}
        self._before: dict[str, Tensor] = {}

    def expect(self, value: Tensor, *, where: Callable[[str], bool] = lambda name: True) -> None:
        """Count the gradients of a loss, from the bare module, as due; `where` names those that DDP will deliver."""
        trained = {name: p for name, p in self._params.items() if p.requires_grad}
        grads = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        for (name, _), grad in zip(trained.items(), grads, strict=True):
            if grad is not None and where(name):
                self._due[name] += grad.double().cpu()

    def got(self, scale: float = 1.0) -> None:
        """Count what is in `.grad` now, divided by `scale`, as delivered."""
        for name, param in self._params.items():
            if param.grad is not None:
                self._delivered[name] += param.grad.double().cpu() / scale

    def error(self) -> float:
        """Return the largest |due - delivered - owed| over the largest due, over all parameters. Collective."""
        state = self._link.state_dict()
        world_size = dist.get_world_size()
        worst, largest = 0.0, 1e-12
        for name, due in self._due.items():
            owed = torch.zeros_like(due)
            for kind, share in (("worker", 1 / world_size), ("owner", 1.0)):
                if name in state[kind]:
                    owed += state[kind][name].double().cpu() * share / state["loss_scale"]
            mean = due / world_size
            dist.all_reduce(owed)
            dist.all_reduce(mean)
            largest = max(largest, float(mean.abs().max()) if mean.numel() else 0.0)
            gap = (mean - self._delivered[name] - owed).abs()
            worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
        return worst / largest


def stop_here() -> None:
    """Stop this process for good. The signal may reach another of its threads first; this one gets no further."""
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()
