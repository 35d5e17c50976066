"""Hooks in the ecosystem's own style: `model.register_comm_hook(state, hook)`.

With memory of what was not sent:

    model.register_comm_hook(thinwire.hooks.State(model, "topk:0.01"), thinwire.hooks.compressed_hook)

Without, for kinds that need none, `None` is state enough:

    model.register_comm_hook(None, thinwire.hooks.exponential_dithering_hook)

`None` may also be a process group, or a `State` whose recipe then counts instead of the hook's own.

References:
    Jihao Xin, Marco Canini, Peter Richtarik, Samuel Horvath, "Global-QSGD: Practical Floatless Quantization for
    Distributed Learning with Theoretical Guarantees", 2023: the names of the dithering hooks, and how they are used.
    Differs from the paper's code: they overlap with backward, one norm a partition, and inf and nan arrive as nan.
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


Group = dist.ProcessGroup | State | None


def compressed_hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange a bucket as the state's recipe says."""
    return state.link.hook(None, bucket)


def _run(hook: StatelessHook, state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return compressed_hook(state, bucket) if isinstance(state, State) else hook.run(state, bucket)


_default, _int8, _fp16, _bf16 = (StatelessHook(recipe) for recipe in ("dense", "int8", "fp16", "bf16"))
_standard, _standard_4bit = StatelessHook("global:8"), StatelessHook("global:4:halving")
_exponential, _qsgd = StatelessHook("globalexp"), StatelessHook("qsgd:8")


def default_hook(state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """No compression: DDP's own all-reduce."""
    return _run(_default, state, bucket)


def int8_hook(state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Two-way 8-bit blocks, sums in float32."""
    return _run(_int8, state, bucket)


def fp16_hook(state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """float16 on the wire both ways, sums in float32."""
    return _run(_fp16, state, bucket)


def bf16_hook(state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """bfloat16 on the wire both ways, sums in float32; on gloo too."""
    return _run(_bf16, state, bucket)


def standard_dithering_hook(state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Global-QSGD's standard dithering: 8-bit codes on a scale of all ranks, added up on the wire."""
    return _run(_standard, state, bucket)


def standard_dithering_4bit_hook(state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Global-QSGD's standard dithering in 4 bits: codes are merged in pairs, so that all levels serve any ranks."""
    return _run(_standard_4bit, state, bucket)


def exponential_dithering_hook(state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Global-QSGD's exponential dithering: signs and powers of two of a scale of all ranks, reduced in a tree."""
    return _run(_exponential, state, bucket)


def qsgd_hook(state: Group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """QSGD: 8-bit dithering by the L2 norm of 512 values, two ways, sums in float32."""
    return _run(_qsgd, state, bucket)
