"""What the worker asks of a workload."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import nn

MOMENTUM = 0.9  # of sgd


class Workload(ABC):
    """A model, its data and its optimizer, as one rank sees them."""

    gradient_as_bucket_view = False
    """Whether DDP may hand out its buckets as gradients (saves a copy of the model)."""

    learning_rates: Mapping[str, float] = {}
    """Of each optimizer it may be trained with; empty where the model does not learn."""

    optimizer_name = "adamw"

    init_sync = True
    """Whether DDP should copy rank 0's parameters to the others at the start."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A fresh model, the same on every rank for one seed."""

    def parts(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers that FSDP2 shards each by itself."""
        return ()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """A fresh optimizer, with torch's defaults but for learning rate and momentum; None where nothing learns."""
        if not self.learning_rates:
            return None
        lr = self.learning_rates[self.optimizer_name]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)
        return torch.optim.AdamW(parameters, lr=lr)

    def describe_optimizer(self) -> str:
        """Name and settings, for the results' conditions."""
        name = f"SGD, momentum {MOMENTUM}" if self.optimizer_name == "sgd" else "AdamW"
        return f"{name}, learning rate {self.learning_rates[self.optimizer_name]:g}"

    @abstractmethod
    def start(self, seed: int) -> None:
        """Go back to the first batch of ``seed``: every method sees the same batches in the same order."""

    @abstractmethod
    def loss(self, model: nn.Module) -> torch.Tensor:
        """Forward pass on this rank's next batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> tuple[float, float, int] | None:
        """Summed loss, correct answers and answers on this rank's part of the held-out data; None if nothing learns."""

    @abstractmethod
    def facts(self) -> Mapping[str, object]:
        """What a reader of the results must know about the data and the model; goes into the JSON's conditions."""
