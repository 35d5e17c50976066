"""Post-local SGD: gradients averaged in every step at first, local SGD afterwards."""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from thinwire.algorithms.averager import Averager
from thinwire.algorithms.base import LocalMethod, Optimizers, Settings
from thinwire.algorithms.outer import OuterSGD
from thinwire.algorithms.rhythm import Rhythm
from thinwire.algorithms.tracked import local
from thinwire.comm.process_group import all_gather_text
from thinwire.errors import NonFiniteError, ReplicaError, StateError
from thinwire.integrations.replicas import ReplicaCheck
from thinwire.plan import build_plan
from thinwire.schedule import Phase


class PostLocalSGD(LocalMethod):
    r"""Averages gradients for `start_after` steps, as DDP does, then is `LocalSGD`.

    In the first phase `optimizer.step` begins with an exchange: gradients become their mean over ranks, uncompressed,
    so that models stay equal to the bit. After steps `start_after` + H, `start_after` + 2 H, ... (H = `sync_every`)
    models become their mean. Early steps are large and point in directions of their own; to average only their results
    costs accuracy, which the first phase saves.

    Args:
        model, optimizer, recipe, sync_every: as of `LocalSGD`.
        start_after: steps of the first phase.
        settings: see `LocalMethod`; gradients that are not finite raise in the first phase whatever `on_nonfinite` is.

    Note: gradients are averaged inside `optimizer.step`. What clips them before sees the rank's own; and a GradScaler,
    which may skip a step on one rank only, must not be used in the first phase.

    Raises:
        ReplicaError: in `optimizer.step`, where models differ after the first phase.

    Example:
        ```python
        outer = thinwire.PostLocalSGD(model, optimizer, "int8", sync_every=8, start_after=1000)
        ```

    References:
        Tao Lin, Sebastian U. Stich, Kumar Kshitij Patel, Martin Jaggi, "Don't Use Large Mini-Batches, Use Local SGD",
        2020.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        recipe: Phase = "dense",
        *,
        sync_every: int,
        start_after: int,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(
            model,
            optimizer,
            recipe,
            lambda: (Rhythm(sync_every=sync_every, start_after=start_after), OuterSGD()),
            **settings,
        )
        params = {id(one.get()): one for one in self._found if one.trained}
        shapes = [(one.name, torch.empty(one.local().shape, device="meta")) for one in params.values()]
        plan = build_plan(shapes, "dense", self.world_size, self.plan.options, all_reduce=False)
        # Per optimizer: several may step in turn.
        self._trained: list[dict[str, Tensor]] = []
        for optimizer in self._optimizers:
            members = [param for group in optimizer.param_groups for param in group["params"] if id(param) in params]
            self._trained.append({params[id(param)].name: param for param in members})
        self._gradients = Averager(plan, [list(trained) for trained in self._trained], self._driver)
        for which, optimizer in enumerate(self._optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(functools.partial(self._average, which)))

    @torch.no_grad()
    def _average(self, which: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Turn gradients into their mean over ranks; a hook before the optimizer's step."""
        if self.step >= self.rhythm.start_after or self.world_size == 1:
            return
        self._check_running()
        trained, used = self._trained[which], set[str]()
        for name, param in trained.items():
            if param.grad is None:
                self._gradients.values[name].zero_()
            else:
                used.add(name)
                self._gradients.values[name].copy_(local(param.grad))
        self._gradients.begin(which, used)
        verdict = self._gradients.finish(which)
        if verdict.nonfinite:
            rank, name = verdict.nonfinite[0]
            raise NonFiniteError(
                f"the gradient of {name!r} on rank {rank} (below 0: on several, or in the mean) holds inf or nan in "
                f"step {self.step + 1}: all ranks raise before the optimizer's step. Look at that rank's loss"
            )
        for name, param in trained.items():
            if name not in verdict.unused:  # else no rank has a gradient, and the optimizer leaves it alone
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                local(param.grad).copy_(self._gradients.values[name])

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        super()._stepped(optimizer, args, kwargs)
        if self.step > self.rhythm.start_after:
            return
        for one in self._found:
            if one.trained:  # of buffers each rank has its own
                self._theta[one.name].copy_(one.local())
        if self.step < self.rhythm.start_after:
            return
        params = {one.name: one.local() for one in self._found if one.trained}
        if (difference := ReplicaCheck(params, self._driver.control).difference()) is not None:
            raise ReplicaError(
                f"expected the same parameters on all ranks after {self.step} steps on mean gradients, got "
                f"{difference}: the optimizers have other settings or states, or a rank skipped a step"
            )

    @contextmanager
    def averaged(self) -> Generator[None]:
        """Do as `LocalMethod.averaged`; in the first phase the model is what it is, with this rank's buffers."""
        if self.step <= self.rhythm.start_after:
            yield
            return
        with super().averaged():
            yield

    def _check_running(self) -> None:
        super()._check_running()
        if self._gradients.failed is not None:
            raise StateError("an exchange failed: go on from the checkpoint before it") from self._gradients.failed

    def rejoin(self) -> bool:
        """Do as `LocalMethod.rejoin` in the second phase.

        Raises:
            StateError: ranks have taken different numbers of steps, and none has come to the first mean of models.
        """
        steps = [int(text) for text in all_gather_text(str(self.step), self._driver.control)]
        if len(set(steps)) > 1 and max(steps) < self.rhythm.start_after + self.rhythm.sync_every:
            raise StateError(
                f"ranks have taken {steps} steps, but until the first mean of models, after step "
                f"{self.rhythm.start_after + self.rhythm.sync_every}, no rank can catch up, since all need the same "
                "optimizer state: expected the same checkpoint on all"
            )
        return super().rejoin()
