"""Short, seeded trainings that the rungs compare: a model of the user's, its loss, and plain SGD."""

import datetime
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.api import attach
from thinwire.errors import ThinwireError
from thinwire.integrations.ddp import Recipe
from thinwire.integrations.link import Link
from thinwire.integrations.replicas import digests
from thinwire.policy import PlanOptions

Loss = Callable[[nn.Module, int, int], Tensor]  # (model, step, rank) -> a scalar
Factory = Callable[[], "nn.Module | tuple[nn.Module, Loss]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """How the trainings of one selfcheck go.

    Attributes:
        factory: makes the model, and the loss if there is one.
        recipe: what is checked.
        group: whose collectives end after `timeout`.
        steps: of one training, at least 2.
        lr: of SGD without momentum.
        options, ddp: of `attach` and of `DistributedDataParallel`.
    """

    factory: Factory
    recipe: Recipe
    group: dist.ProcessGroup
    timeout: datetime.timedelta
    steps: int = 6
    lr: float = 0.05
    options: PlanOptions | None = None
    ddp: Mapping[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": 1})

    @contextmanager
    def training(self, recipe: Recipe | None, seed: int = 0) -> Iterator["Training"]:
        """Give a fresh model, attached with `recipe` (None: plain DDP). Collective; torch's random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.factory()
            module, loss = made if isinstance(made, tuple) else (made, None)
            if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ThinwireError(
                    f"expected the factory to return an nn.Module, or (nn.Module, loss), got {type(module).__name__}"
                )
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
                raise ThinwireError(
                    "expected a plain nn.Module from the factory, which is put into DistributedDataParallel, got a "
                    "fully_shard model: the ladder does not climb FSDP2 yet; `thinwire bench --wrap fsdp` measures it"
                )
            if loss is None:
                loss = pull(module)
            model = DistributedDataParallel(module, process_group=self.group, **self.ddp)
            link = None
            if recipe is not None:
                link = attach(model, recipe, options=self.options, timeout=self.timeout)
            optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
            yield Training(model, link, optimizer, loss, dist.get_rank(self.group), seed)
            if link is not None:  # not after an error: ranks may be waiting for each other
                link.close()


@dataclass(frozen=True, slots=True)
class Training:
    """One of them, under way."""

    model: DistributedDataParallel
    link: Link | None
    optimizer: torch.optim.Optimizer
    loss: Loss
    rank: int
    seed: int

    @property
    def attached(self) -> Link:
        """The link of a training that has one."""
        assert self.link is not None
        return self.link

    def value(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss of a step, with dropout and the like drawn anew, equally in every training of this seed."""
        torch.manual_seed((self.seed * 1_000_003 + step) * 4_099 + self.rank)
        return self.loss(model, self.seed * 100_000 + step, self.rank)

    def step(self, step: int) -> float:
        """Take one step; return this rank's loss."""
        self.optimizer.zero_grad()
        value = self.value(self.model, step)
        value.backward()
        self.optimizer.step()
        return float(value.detach())

    def run(self, steps: Iterable[int]) -> list[list[str]]:
        """Take steps; return a hash of every gradient and parameter after each."""
        seen: list[list[str]] = []
        for step in steps:
            self.step(step)
            params = list(self.model.module.parameters())
            grads = [torch.empty(0) if param.grad is None else param.grad for param in params]
            seen.append(digests([*grads, *params]))
        return seen

    @property
    def names(self) -> list[str]:
        """What the hashes of `run` are of."""
        names = [name for name, _ in self.model.module.named_parameters()]
        return [*(f"the gradient of {name!r}" for name in names), *(f"{name!r}" for name in names)]


def pull(module: nn.Module) -> Loss:
    """Return a loss for a model of which no inputs are known: its parameters are drawn to random targets.

    With w_0 the initial parameters, their number N, and z_0, z_{t,r} standard normal, shared and by step and rank:

        loss_{t,r} = 1/2 sum_i (w_i - w_{0,i} - z_{0,i} - z_{t,r,i})^2 / N^{1/2}.

    It replaces `module.forward`, so that DDP calls it, and keeps the parameters' names.
    """
    trained = [param for param in module.parameters() if param.requires_grad]
    goals = [param.detach() + torch.randn_like(param) for param in trained]
    scale = max(1, sum(param.numel() for param in trained)) ** 0.5

    def forward(_: nn.Module) -> Tensor:
        sums = [(p - goal - torch.randn_like(p)).abs().square().sum() for p, goal in zip(trained, goals, strict=True)]
        return 0.5 / scale * torch.stack([one.float() for one in sums]).sum()

    module.forward = types.MethodType(forward, module)
    return lambda model, step, rank: model()
