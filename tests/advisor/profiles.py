"""A small profile with every part, and others to simulate."""

from collections.abc import Sequence
from typing import get_args

from thinwire.advisor.profile import (
    Cluster,
    CollectiveFit,
    Computation,
    KernelOperation,
    Kernels,
    KernelSpeed,
    LinkClass,
    Overhead,
    Pair,
    Profile,
    TimedParameter,
)


def small_profile() -> Profile:
    """Two hosts of two ranks, two parameters."""
    fit = CollectiveFit(
        operation="all_reduce", alpha_s=1e-3, beta=1e8, residual=0.02, points=((1e3, 1e-3), (1e6, 1e-2))
    )
    return Profile(
        cluster=Cluster(
            hosts=2,
            ranks_per_host=2,
            between=LinkClass(alpha_s=50e-6, beta=1.25e9, residual=0.01),
            inside=LinkClass(alpha_s=5e-6, beta=1e10),
            collectives=(fit,),
            exceptions=(Pair(source=0, target=1, alpha_s=50e-6, beta=1e8),),
            interface="eth0",
        ),
        computation=Computation(
            forward_s=0.1,
            backward_s=0.2,
            optimizer_s=0.01,
            parameters=(
                TimedParameter(name="in.weight", shape=(512, 300), ready_s=0.2),
                TimedParameter(name="out.weight", shape=(10, 512), ready_s=0.05, dtype="bfloat16"),
            ),
            busy_cores=1.0,
        ),
        kernels=Kernels(
            cores=8,
            ranks_per_machine=2,
            speeds=(KernelSpeed(recipe="int8", operation="encode", threads=1, s_per_nbyte=2e-10, partition_s=1e-6),),
        ),
        overhead=Overhead(message_s=1e-4, round_s=4e-5, bucket_s=1e-5, copy_s_per_nbyte=1e-10),
        model="a small model",
        assumptions=("links inside a host are taken to be ten times as fast",),
    )


def kernels(seconds_per_nbyte: float, *, cores: int = 8, ranks_per_machine: int = 1) -> Kernels:
    """Kernels that all take as long."""
    recipes = ("identity", "bf16", "fp16", "int8", "int4", "onebit", "topk:0.01", "powersgd:4", "global:8", "globalexp")
    return Kernels(
        cores=cores,
        ranks_per_machine=ranks_per_machine,
        speeds=tuple(
            KernelSpeed(recipe=recipe, operation=operation, threads=1, s_per_nbyte=seconds_per_nbyte)
            for recipe in recipes
            for operation in get_args(KernelOperation)
        ),
    )


def profile_of(
    shapes: Sequence[tuple[int, ...]],
    *,
    hosts: int = 4,
    ranks_per_host: int = 1,
    alpha_s: float = 1e-4,
    beta: float = 1e8,
    forward_s: float = 0.1,
    backward_s: float = 0.2,
    busy_cores: float = 0.0,
    kernel_s_per_nbyte: float = 0.0,
    cores: int = 8,
) -> Profile:
    """Layers of these shapes, ready at equal distances, the last registered first; a network of equal links."""
    each = backward_s / len(shapes)
    return Profile(
        cluster=Cluster(
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            between=LinkClass(alpha_s=alpha_s, beta=beta),
            inside=LinkClass(alpha_s=1e-6, beta=1e11) if ranks_per_host > 1 else None,
        ),
        computation=Computation(
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=0.01,
            busy_cores=busy_cores,
            parameters=tuple(
                TimedParameter(name=f"layer{i}.weight", shape=shape, ready_s=backward_s - i * each)
                for i, shape in enumerate(shapes)
            ),
        ),
        kernels=kernels(kernel_s_per_nbyte, cores=cores),
    )
