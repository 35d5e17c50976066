"""Short, seeded trainings that the rungs compare: a model of the user's, its loss, and plain SGD."""

import datetime
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.api import attach
from thinwire.errors import ThinwireError
from thinwire.integrations.ddp import Recipe
from thinwire.integrations.link import Link
from thinwire.integrations.replicas import digests
from thinwire.plan import PlannedParam
from thinwire.policy import PlanOptions

if TYPE_CHECKING:
    from thinwire.integrations.fsdp import ShardLink
    from thinwire.integrations.fsdp_build import WeightRecipe

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
        weights, options, ddp: of `attach` and of `DistributedDataParallel`.
    """

    factory: Factory
    recipe: Recipe
    group: dist.ProcessGroup
    timeout: datetime.timedelta
    steps: int = 6
    lr: float = 0.05
    weights: "WeightRecipe | None" = None
    options: PlanOptions | None = None
    ddp: Mapping[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": 1})

    @contextmanager
    def training(self, recipe: Recipe | None, seed: int = 0, *, lr: float | None = None) -> Iterator["Training"]:
        """Give a fresh model, attached with `recipe`. Collective; torch's random state is kept.

        Args:
            recipe: None leaves DDP or FSDP2 as they are.
            seed: of parameters and losses.
            lr: in place of the trial's.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.factory()
            module, loss = made if isinstance(made, tuple) else (made, None)
            if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ThinwireError(
                    f"expected the factory to return an nn.Module, or (nn.Module, loss), got {type(module).__name__}"
                )
            sharded = is_sharded(module)
            if self.weights is not None and not sharded:
                raise ThinwireError(
                    f"weights={self.weights!r} is for fully_shard models; expected one from the factory, got a "
                    f"{type(module).__name__}"
                )
            if sharded and loss is None:
                raise ThinwireError(
                    "expected the factory of a fully_shard model to return (model, loss), got a model alone: FSDP2 "
                    "gathers parameters in its forward pass, which the loss must call"
                )
            if loss is None:
                loss = pull(module)
            model = module if sharded else DistributedDataParallel(module, process_group=self.group, **self.ddp)
            link = None
            if recipe is not None:
                weights = None if recipe == "dense" else self.weights
                link = attach(model, recipe, weights=weights, options=self.options, timeout=self.timeout)
            lr = self.lr if lr is None else lr
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            yield Training(model, link, optimizer, loss, dist.get_rank(self.group), seed)
            if link is not None:  # not after an error: ranks may be waiting for each other
                link.close()


@dataclass(frozen=True, slots=True)
class Training:
    """One of them, under way."""

    model: nn.Module  # DDP's, or a fully_shard one
    link: "Link | ShardLink | None"
    optimizer: torch.optim.Optimizer
    loss: Loss
    rank: int
    seed: int

    @property
    def attached(self) -> "Link | ShardLink":
        """The link of a training that has one."""
        assert self.link is not None
        return self.link

    @property
    def module(self) -> nn.Module:
        """The model without DDP around it."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def wrapper(self) -> str:
        """What averages gradients where thinwire does not."""
        return "DDP" if isinstance(self.model, DistributedDataParallel) else "FSDP2"

    @property
    def planned(self) -> tuple[PlannedParam, ...]:
        """How gradients travel."""
        link = self.attached
        return link.plan.params if isinstance(link, Link) else link.plan.gradients.params

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
            params = list(self.module.parameters())
            grads = [torch.empty(0) if param.grad is None else param.grad for param in params]
            seen.append(digests(map(local, [*grads, *params])))
        return seen

    def save(self, file: Any) -> None:
        """Write all that this rank needs to go on."""
        model = {name: local(value) for name, value in self.module.state_dict().items()}
        torch.save((model, self.optimizer.state_dict(), self.attached.state_dict()), file)

    def load(self, file: Any) -> None:
        """Go on from what `save` wrote on the same rank."""
        model, optimizer, link = torch.load(file, weights_only=True)
        state = self.module.state_dict()
        with torch.no_grad():
            for value in self.module.parameters():
                local(value).zero_()  # what is not loaded must show
            for name, value in state.items():
                if is_shard(value):
                    local(value).copy_(model[name])  # the memory is the parameter's own
                    model[name] = value
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.attached.load_state_dict(link)

    @property
    def names(self) -> list[str]:
        """What the hashes of `run` are of."""
        names = [name for name, _ in self.module.named_parameters()]
        return [*(f"the gradient of {name!r}" for name in names), *(f"{name!r}" for name in names)]


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been called on it; importing FSDP2 to ask takes a while."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def is_shard(value: Any) -> bool:
    """Whether it is a DTensor, of which this rank keeps a part."""
    return hasattr(value, "to_local")


def local(tensor: Any) -> Any:
    """Return what this rank keeps of a tensor, in the same memory: its shard, or all."""
    return tensor.to_local() if is_shard(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor, from the shards of all ranks where these keep some. Collective then."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


@contextmanager
def gathered(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Give the weights by name as layers see them: FSDP2 gathers them, compressed where a link does. Collective."""
    sharded: list[Any] = [one for one in module.modules() if is_sharded(one)]
    for one in sharded:
        one.reshard()  # what is still there from a forward pass has older values
    for one in sharded:
        one.unshard()
    # Copies: storage that NumPy has seen cannot be freed, as FSDP2 does it.
    yield {name: param.detach().clone() if sharded else param for name, param in module.named_parameters()}
    for one in sharded:
        one.reshard()


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
