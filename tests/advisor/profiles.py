"""A small profile with every part."""

from thinwire.advisor.profile import (
    Cluster,
    CollectiveFit,
    Computation,
    Kernels,
    KernelSpeed,
    LinkClass,
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
        model="a small model",
        assumptions=("links inside a host are taken to be ten times as fast",),
    )
