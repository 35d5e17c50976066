"""The same tensor through other libraries' codecs and through thinwire's nearest equivalents.

Peers are measured where they import; what does not is named with the reason. Set them up in an environment of their
own, beside thinwire:  pip install torchao fbgemm-gpu-cpu hivemind

Peers allocate what they return, as their interfaces have it; thinwire writes into buffers that are kept, as it does in
training. Times are the best of `--repeats`, taken in turns. `error` is |decoded - x|^2 / |x|^2.

    python benchmarks/peers.py --threads 1 --json peers.json
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.kernels import PARTITION_NUMEL, Blocks, best_s, torch_threads
from thinwire.bench.results import machine
from thinwire.recipes import parse_recipe

ROW = 512  # values that share a scale, in thinwire's block quantisers and wherever a peer can be told


@dataclass(frozen=True)
class Codec:
    """One way there and back."""

    library: str
    name: str
    encode: Callable[[], Any]
    decode: Callable[[Any], Tensor]
    nbytes: Callable[[Any], int]


def thinwire_codecs(x: Tensor, threads: int) -> Iterator[Codec]:
    for recipe in ("fp16", "int8", "int4"):
        yield _thinwire(recipe, x, threads)


def _thinwire(recipe: str, x: Tensor, threads: int) -> Codec:
    blocks = Blocks(parse_recipe(recipe).up, x, PARTITION_NUMEL, threads)
    runs = blocks.runs()

    def decode(_: Any) -> Tensor:
        runs["decode"]()
        return blocks.out

    return Codec("thinwire", f"`{recipe}`", runs["encode"], decode, lambda _: blocks.data.numel())


def torch_codecs(x: Tensor, _: int) -> Iterator[Codec]:
    yield Codec("torch", "`x.to(float16)`", lambda: x.to(torch.float16), lambda y: y.to(torch.float32), _tensor_nbytes)


def fbgemm_codecs(x: Tensor, _: int) -> Iterator[Codec]:
    import fbgemm_gpu  # noqa: F401  # pyright: ignore[reportMissingImports]

    rows, ops = x.view(-1, ROW), torch.ops.fbgemm
    yield Codec(
        "fbgemm_gpu",
        f"`FloatToFused8BitRowwiseQuantized`, rows of {ROW}",
        lambda: ops.FloatToFused8BitRowwiseQuantized(rows),
        ops.Fused8BitRowwiseQuantizedToFloat,
        _tensor_nbytes,
    )
    yield Codec(
        "fbgemm_gpu",
        f"`FloatToFusedNBitRowwiseQuantizedSBHalf`, 4 bits, rows of {ROW}",
        lambda: ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4),
        lambda y: ops.FusedNBitRowwiseQuantizedSBHalfToFloat(y, 4),
        _tensor_nbytes,
    )


def torchao_codecs(x: Tensor, _: int) -> Iterator[Codec]:
    from torchao.quantization import quant_primitives as ao  # pyright: ignore[reportMissingImports]

    rows, block = x.view(-1, ROW), (1, ROW)

    def encode(limit: int) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            limits = {"quant_min": -limit, "quant_max": limit}
            scale, zero = ao.choose_qparams_affine(rows, ao.MappingType.SYMMETRIC, block, torch.int8, **limits)
            return ao.quantize_affine(rows, block, scale, zero, torch.int8, **limits), scale, zero

        return run

    def decode(limit: int) -> Callable[[tuple[Tensor, ...]], Tensor]:
        return lambda y: ao.dequantize_affine(
            y[0], block, y[1], y[2], torch.int8, quant_min=-limit, quant_max=limit, output_dtype=torch.float32
        )

    def nbytes(y: tuple[Tensor, ...]) -> int:
        return _tensor_nbytes(y[0]) + _tensor_nbytes(y[1])  # symmetric: the zero points are zero

    yield Codec("torchao", f"`quantize_affine`, int8, blocks of {ROW}", encode(127), decode(127), nbytes)
    yield Codec(
        "torchao", f"`quantize_affine`, 4 bits in int8 (not packed), blocks of {ROW}", encode(7), decode(7), nbytes
    )


def hivemind_codecs(x: Tensor, _: int) -> Iterator[Codec]:
    import hivemind.compression as hc  # pyright: ignore[reportMissingImports]

    info = hc.CompressionInfo.from_tensor(x)
    for name in ("Float16Compression", "Uniform8BitQuantization", "BlockwiseQuantization"):
        codec = getattr(hc, name)()
        yield Codec(
            "hivemind",
            f"`{name}`",
            lambda codec=codec: codec.compress(x, info),
            codec.extract,
            lambda y: len(y.SerializeToString()),
        )


def _tensor_nbytes(y: Tensor) -> int:
    return y.numel() * y.element_size()


SOURCES: dict[str, Callable[[Tensor, int], Iterator[Codec]]] = {
    "thinwire": thinwire_codecs,
    "torch": torch_codecs,
    "fbgemm-gpu-cpu": fbgemm_codecs,
    "torchao": torchao_codecs,
    "hivemind": hivemind_codecs,
}


def measure(codec: Codec, x: Tensor, threads: int, repeats: int) -> dict[str, Any]:
    encoded: list[Any] = []
    decoded: list[Tensor] = []

    def encode() -> None:
        encoded[:] = [codec.encode()]

    def decode() -> None:
        decoded[:] = [codec.decode(encoded[0])]

    best = best_s({"encode": encode, "decode": decode}, repeats)
    error = float((decoded[0].reshape(-1).double() - x).square().sum() / x.double().square().sum())
    nbytes = 4 * x.numel()
    return {
        "library": codec.library,
        "codec": codec.name,
        "threads": threads,
        "encode_gb_per_s": nbytes / best["encode"] / 1e9,
        "decode_gb_per_s": nbytes / best["decode"] / 1e9,
        "bytes_per_element": codec.nbytes(encoded[0]) / x.numel(),
        "error": error,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="of torch and of thinwire's kernels")
    parser.add_argument("--mebibytes", type=int, default=64, help="float32 in the tensor")
    parser.add_argument("--repeats", type=int, default=5, help="timings; the best counts")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; '-' for standard output")
    args = parser.parse_args()
    x = torch.randn(args.mebibytes << 18, generator=torch.Generator().manual_seed(0)) * 1e-2
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    versions: dict[str, str] = {}
    print("| library | codec | encode GB/s | decode GB/s | bytes a value | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    with torch_threads(args.threads):
        for package, codecs in SOURCES.items():
            found = codecs(x, args.threads)
            try:
                for codec in found:
                    try:
                        rows.append(measure(codec, x, args.threads, args.repeats))
                    except Exception as error:  # a codec of a peer may fail in any way
                        failed[f"{codec.library} {codec.name}"] = f"{type(error).__name__}: {error}"
                        continue
                    row = rows[-1]
                    print(
                        f"| {row['library']} | {row['codec']} | {row['encode_gb_per_s']:.2f} | "
                        f"{row['decode_gb_per_s']:.2f} | {row['bytes_per_element']:.3f} | {row['error']:.1e} |",
                        flush=True,
                    )
                if package != "thinwire":
                    versions[package] = importlib.metadata.version(package)
            except ImportError as error:
                failed[package] = str(error)
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    conditions = {**machine(), "threads": args.threads, "nbytes": 4 * x.numel(), "versions": versions}
    print(conditions)
    if args.json:
        text = json.dumps({"schema": 1, "conditions": conditions, "rows": rows, "failed": failed}, indent=1)
        print(text) if args.json == "-" else Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
