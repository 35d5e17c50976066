"""Hooks in the ecosystem's own style: `model.register_comm_hook(state, hook)`.

With memory of what was not sent:

    model.register_comm_hook(thinwire.hooks.State(model, "topk:0.01"), thinwire.hooks.compressed_hook)

Without, for kinds that need none, `None` is state enough:

    model.register_comm_hook(None, thinwire.hooks.int8_hook)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.integrations.ddp import Recipe, make_link
from thinwire.integrations.link import Link
from thinwire.integrations.stateless import StatelessHook


class State:
    """State of `compressed_hook`: plans the model on all ranks (collective) and keeps its `link`.

    Takes the arguments of `thinwire.attach` and raises its errors.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, **options: Any) -> None:
        self.link: Link = make_link(model, recipe, **options)


def compressed_hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket as the state's recipe says."""
    return state.link.hook(None, bucket)


_int8, _fp16, _bf16 = StatelessHook("int8"), StatelessHook("fp16"), StatelessHook("bf16")


def int8_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Two-way 8-bit blocks, sums in float32. `state`: a process group, or None for the default one."""
    return _int8.run(state, bucket)


def fp16_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """float16 on the wire both ways, sums in float32. `state`: a process group, or None for the default one."""
    return _fp16.run(state, bucket)


def bf16_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """bfloat16 on the wire both ways, sums in float32. `state`: a process group, or None for the default one."""
    return _bf16.run(state, bucket)
