"""Compile what every Triton kernel is launched with, for a chip that need not be there.

The interpreter runs the same text as Python, where a variable may change its type in a loop; the compiler says no.
"""

from typing import Any

import cases
import torch
import triton
from cases import KEY, Kind
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire.kernels import triton_backend
from thinwire.kernels.jobs import DecodeJob, EncodeJob, ReduceJob, VoteJob
from thinwire.kernels.triton_launch import Table
from thinwire.wire import align

H200 = GPUTarget("cuda", 90, 32)
LABELS = {
    *(
        "cast-float16",
        "cast-bfloat16",
        "int8-512-stochastic",
        "int4-33-nearest",
        "int3-512-stochastic",
        "int7-33-nearest",
    ),
    *("linear5-512-l2", "linear7-partition-max", "natural7-partition-l2", "natural8-2000-max", "one_bit-rms"),
    *("e4m3-512", "e5m2-33", "e3m0-512", "sign"),
    *("top_k-float32-percent", "top_k-bfloat16-half", "top_k-natural-half-bisect-chunked"),
    *("top_k-float32-half-sampled", "random_k-float32-0.3-7-scaled", "random_k-float16-1/10-1"),
    *(
        "top_chunks-float16-0.3-64",
        "global_linear8-127-4",
        "global_linear4-3-10-squared",
        "global_exponential8-126-10-squared",
    ),
    *("fixed_point7-2000", "fixed_point8-512"),
    *("min_max3-partition-affine-stochastic", "min_max8-512-affine", "min_max7-2000-bagua"),
    *(
        "cnat8",
        "cnat9",
        "int8-512-nearest-rotation32",
        "int7-128-stochastic-rotation128",
        "ternary-512",
        "ternary-partition-clip2.5",
    ),
}
TYPES = {
    **{torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint16: "*u16", torch.uint8: "*u8"},
    **{torch.float64: "*fp64", torch.float32: "*fp32"},
}


def type_of(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


class Compiler:
    """Takes the place of launching."""

    def __init__(self) -> None:
        self.seen: set[object] = set()

    def launch(self, kernel: Any, num_tiles: int, *arguments: Any, **constants: Any) -> None:
        num_warps = constants.pop("num_warps", 4)
        given = [torch.zeros(1, dtype=torch.int64)] * 2 + [num_tiles, *arguments]  # the flags, the table
        names: list[str] = kernel.arg_names
        types = dict(zip(names, map(type_of, given), strict=False)) | dict.fromkeys(constants, "constexpr")
        variant = (kernel.fn.__module__, kernel.fn.__name__, *sorted(constants.items()))
        if variant in self.seen:
            return
        self.seen.add(variant)
        source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()})
        options = {"num_warps": num_warps, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=H200, options=options)
        assert "fma.rn.f" not in compiled.asm["ptx"], f"{variant}: a product and a sum are one rounding"


def compile_kind(kind: Kind, n: int) -> None:
    x, out = torch.zeros(n), torch.zeros(align(kind.nbytes(n)), dtype=torch.uint8)
    kind.encode(triton_backend, [EncodeJob(x, out, torch.zeros(n), 1.0, KEY)])
    kind.decode(triton_backend, [DecodeJob(out, x, alpha, KEY) for alpha in (None, 0.5)])


def compile_shared(n: int) -> None:
    """Compile what kinds that agree on a scale need beside encoding and decoding."""
    x, out = torch.zeros(n), torch.zeros(n, dtype=torch.uint8)
    for settings in ({"block": 0, "l2": True, "squared": False}, {"block": 64, "l2": False, "squared": True}):
        shared = torch.zeros(-(-n // (settings["block"] or n)))
        triton_backend.shared_norms([EncodeJob(x, out, shared=shared)], **settings)
    reductions = [ReduceJob(out, out, n, KEY)]
    triton_backend.reduce_global_exponential(reductions)
    for bits in (8, 4):
        triton_backend.reduce_global_linear(reductions, bits=bits)


def main() -> None:
    compiler = Compiler()
    Table.launch = lambda self, kernel, num_tiles, *arguments, **constants: compiler.launch(
        kernel, num_tiles, *arguments, **constants
    )
    Table.flags = lambda self: [0] * self.num_jobs
    kinds = [kind for kind in cases.KINDS if kind.label in LABELS]
    assert len(kinds) == len(LABELS)
    for kind in kinds:
        compile_kind(kind, 2**21 if kind.name == "one_bit" else 4096)  # three levels of the tree of sums
    compile_shared(4096)
    for key in (None, KEY):
        rows = [torch.zeros(64, dtype=torch.uint8)] * 3
        triton_backend.majority_vote([VoteJob(rows, torch.zeros(64, dtype=torch.uint8), 512, key)])
    print(len(compiler.seen), "variants")


if __name__ == "__main__":
    main()
