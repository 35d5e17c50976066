"""What our optimizers have in common: groups are looked at when they are added, gradients before any is used."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch

from thinwire.algorithms.parameters import check_gradients, check_group


class CheckedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that refuses what it cannot update before it has changed anything."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises `OptimizerError` for settings out of range and for parameters that it cannot update."""
        super().add_param_group(param_group)
        try:
            check_group(self, self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model anew and returns the loss.

        Raises:
            OptimizerError: a sparse gradient; nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_gradients(self)
        self._update_groups()
        return loss

    @abstractmethod
    def _update_groups(self) -> None:
        """Update the parameters of all groups."""
