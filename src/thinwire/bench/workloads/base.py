"""What the worker asks of a workload."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from thinwire.optim import LAMB, LANS, NAG

MOMENTUM = 0.9  # of sgd and nag
NAG_DECAY = 1e-4  # weight decay that CLAN's image models are trained with


class Workload(ABC):
    """A model, its data and its optimizer, as one rank sees them."""

    gradient_as_bucket_view = False
    """Whether DDP may hand out its buckets as gradients (saves a copy of the model)."""

    learning_rates: Mapping[str, float] = {}
    """Of each optimizer it may be trained with; empty where the model does not learn."""

    optimizer_name = "adamw"

    learning_rate: float | None = None
    """Instead of that of the optimizer's name."""

    init_sync = True
    """Whether DDP should copy rank 0's parameters to the others at the start."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A fresh model, the same on every rank for one seed."""

    def parts(self, model: nn.Module) -> Iterable[nn.Module]:
        """The layers that FSDP2 shards each by itself."""
        return ()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """A fresh optimizer, with defaults but for what `describe_optimizer` says; None where nothing learns."""
        if not self.learning_rates:
            return None
        match self.optimizer_name:
            case "sgd":
                return torch.optim.SGD(parameters, lr=self._rate, momentum=MOMENTUM)
            case "nag":
                return NAG(parameters, lr=self._rate, momentum=MOMENTUM, weight_decay=NAG_DECAY)
            case "lans":
                return LANS(parameters, lr=self._rate, normalize_grad=False)
            case "lamb":
                return LAMB(parameters, lr=self._rate)
            case _:
                return torch.optim.AdamW(parameters, lr=self._rate)

    def describe_optimizer(self) -> str:
        """Name and settings, for the results' conditions."""
        names = {
            "adamw": "AdamW",
            "sgd": f"SGD, momentum {MOMENTUM}",
            "nag": f"NAG, momentum {MOMENTUM}, weight decay {NAG_DECAY:g}",
            "lans": "LANS, gradients not normalised",
            "lamb": "LAMB",
        }
        return f"{names[self.optimizer_name]}, learning rate {self._rate:g}"

    @property
    def _rate(self) -> float:
        return self.learning_rates[self.optimizer_name] if self.learning_rate is None else self.learning_rate

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
