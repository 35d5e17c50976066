"""What the kernel tests share: kinds of kernels with their sizes, classes of values, and encoding with guard bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.float_formats import FORMATS, FloatFormat
from thinwire.kernels.jobs import DecodeJob, EncodeJob
from thinwire.kernels.top_k_layout import NATURAL, VALUE_DTYPES, payload_nbytes, top_k_layout
from thinwire.random import Key
from thinwire.wire import align

GUARD = 0xAB
KEY = Key(key=0x0123_4567_89AB_CDEF, step=17, stream=3, offset=0)


@dataclass(frozen=True)
class Kind:
    """One kernel with its settings. `nbytes(n)` is its payload."""

    label: str
    name: str
    nbytes: Callable[[int], int]
    settings: dict[str, Any] = field(default_factory=dict)
    decode_settings: dict[str, Any] = field(default_factory=dict)
    num_kept: Callable[[int], int] | None = None
    shared: Callable[[int], Tensor] | None = None  # what ranks agreed on, for n elements
    on_cuda: bool = True  # has Triton kernels

    @property
    def stochastic(self) -> bool:
        return bool(self.settings.get("stochastic")) or self.name.startswith(("dither", "natural", "ternary", "global"))

    def _with_shared(self, jobs: Sequence[Any], lengths: list[int]) -> Sequence[Any]:
        if self.shared is None:
            return jobs
        return [job._replace(shared=self.shared(n).to(job.out.device)) for job, n in zip(jobs, lengths, strict=True)]

    def _with_k(self, settings: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
        return settings if self.num_kept is None else {**settings, "k": [self.num_kept(n) for n in lengths]}

    def encode(self, kernels: ModuleType, jobs: Sequence[EncodeJob], threads: int = 1) -> list[bool]:
        lengths = [job.x.numel() for job in jobs]
        jobs, settings = self._with_shared(jobs, lengths), self._with_k(self.settings, lengths)
        return getattr(kernels, f"encode_{self.name}")(jobs, **settings, threads=threads)

    def decode(self, kernels: ModuleType, jobs: Sequence[DecodeJob], threads: int = 1) -> None:
        lengths = [job.out.numel() for job in jobs]
        jobs, settings = self._with_shared(jobs, lengths), self._with_k(self.decode_settings, lengths)
        getattr(kernels, f"decode_{self.name}")(jobs, **settings, threads=threads)


def _cast(dtype: torch.dtype) -> Kind:
    settings = {"dtype": dtype}
    return Kind(f"cast-{dtype}".replace("torch.", ""), "cast", lambda n: n * dtype.itemsize, settings, settings)


def codes_nbytes(n: int, bits: int, block: int) -> int:
    """Return the bytes of codes packed by blocks, in limbs of 8, 4, 2 and 1 bits."""

    def packed(m: int) -> int:
        return sum(-(-m * width // 8) for width in (8, 4, 2, 1) if bits & width)

    return n // block * packed(block) + packed(n % block)


def block_quant(bits: int, block: int, stochastic: bool, rotation: int = 0) -> Kind:
    """Return the kind for any block size."""

    def nbytes(n: int) -> int:
        return 4 * -(-n // block) + codes_nbytes(n, bits, block)

    decode_settings = {"bits": bits, "block": block, **({"rotation": rotation} if rotation else {})}
    label = f"int{bits}-{block}-{'stochastic' if stochastic else 'nearest'}{f'-rotation{rotation}' * bool(rotation)}"
    settings = {**decode_settings, "stochastic": stochastic}
    return Kind(label, "block_quant", nbytes, settings, decode_settings)


def block_cast(format: FloatFormat, block: int) -> Kind:
    """Return the kind for any block size."""
    settings = {"format": format, "block": block}

    def nbytes(n: int) -> int:
        return 4 * -(-n // block) + codes_nbytes(n, FORMATS[format].bits, block)

    return Kind(f"{format}-{block}", "block_cast", nbytes, settings, settings)


def dither(bits: int, block: int, natural: bool, l2: bool) -> Kind:
    """Return the kind for any block size; `block` = 0 is the whole partition."""

    def nbytes(n: int) -> int:
        return 4 * -(-n // (block or max(n, 1))) + codes_nbytes(n, bits, block or max(n, 1))

    label = f"{'natural' if natural else 'linear'}{bits}-{block or 'partition'}-{'l2' if l2 else 'max'}"
    settings = {"bits": bits, "block": block, "natural": natural}
    return Kind(label, "dither", nbytes, {**settings, "l2": l2}, settings)


def natural(bits: int) -> Kind:
    """Return the kind of 8 bits, or of 9: a byte and a bit."""
    settings = {"bits": bits}
    return Kind(f"cnat{bits}", "natural", lambda n: codes_nbytes(n, bits, max(n, 1)), settings, settings)


def ternary(block: int, clip: float = 0.0, scales: Sequence[float] = ()) -> Kind:
    """Return the kind for any block size; `block` = 0 is the whole partition, `clip` = 0 is none.

    With `scales`, those in turn are what ranks agreed on for the blocks.
    """

    def nbytes(n: int) -> int:
        width = block or max(n, 1)
        return (0 if scales else 4 * -(-n // width)) + n // width * -(-width // 5) + -(-(n % width) // 5)

    def shared(n: int) -> Tensor:
        num = -(-n // block) if block else 1
        return torch.tensor(scales).repeat(num)[:num]

    label = f"ternary-{block or 'partition'}" + (f"-clip{clip:g}" if clip else "")
    decode_settings: dict[str, Any] = {"block": block}
    if scales:
        label += "-shared-" + "-".join(f"{scale:g}" for scale in scales)
        decode_settings["shared"] = True
    settings = {**decode_settings, "clip": clip}
    agreed = shared if scales else None
    return Kind(label, "ternary", nbytes, settings, decode_settings, on_cuda=not scales, shared=agreed)


def min_max(bits: int, block: int, bagua: bool = False, stochastic: bool = False) -> Kind:
    """Return the kind for any block size; `block` = 0 is the whole partition."""

    def nbytes(n: int) -> int:
        return 8 * -(-n // (block or max(n, 1))) + codes_nbytes(n, bits, block or max(n, 1))

    label = f"min_max{bits}-{block or 'partition'}-{'bagua' if bagua else 'affine'}{'-stochastic' * stochastic}"
    settings = {"bits": bits, "block": block, "bagua": bagua}
    return Kind(label, "min_max", nbytes, {**settings, "stochastic": stochastic}, settings)


def fixed_point(bits: int, block: int) -> Kind:
    """Return the kind for any block size; `block` = 0 is the whole partition."""

    def nbytes(n: int) -> int:
        return 2 * -(-n // (block or max(n, 1))) + codes_nbytes(n, bits, block or max(n, 1))

    settings = {"bits": bits, "block": block}
    return Kind(f"fixed_point{bits}-{block or 'partition'}", "fixed_point", nbytes, settings, settings)


def _top_k(
    dtype: torch.dtype, label: str, num_kept: Callable[[int], int], selection: str = "exact", chunked: bool = False
) -> Kind:
    settings = {"dtype": dtype, "chunked": chunked}
    number = "natural" if dtype is NATURAL else str(dtype)
    name = f"top_k-{number}-{label}".replace("torch.", "")
    name += (f"-{selection}" if selection != "exact" else "") + ("-chunked" if chunked else "")
    return Kind(
        name,
        "top_k",
        lambda n: payload_nbytes(top_k_layout(n, num_kept(n), dtype, chunked)),
        {**settings, "selection": selection},
        settings,
        num_kept,
    )


def _random_k(dtype: torch.dtype, density: float, block: int = 1, period: int = 0, scaled: bool = False) -> Kind:
    decode_settings = {"dtype": dtype, "block": block, "period": period}

    def num_kept(n: int) -> int:
        num_units = -(-n // block)
        return -(-num_units // period) if period else min(num_units, max(1, int(density * num_units)))

    mask = f"1/{period}" if period else f"{density:g}"
    return Kind(
        f"random_k-{dtype}-{mask}-{block}{'-scaled' if scaled else ''}".replace("torch.", ""),
        "random_k",
        lambda n: num_kept(n) * block * dtype.itemsize,
        {**decode_settings, "scaled": scaled},
        decode_settings,
        num_kept,
    )


def _global(kind: str, levels: int, norm: float, squared: bool = False, bits: int = 8) -> Kind:
    settings = {"levels": levels, "squared": squared} | ({"bits": bits} if kind == "linear" else {})
    return Kind(
        f"global_{kind}{bits}-{levels}-{norm:g}{'-squared' if squared else ''}",
        f"global_{kind}",
        lambda n: -(-n * bits // 8),
        settings,
        settings,
        shared=lambda n: torch.tensor([norm]),
    )


def _top_chunks(dtype: torch.dtype, density: float, chunk: int) -> Kind:
    settings = {"dtype": dtype, "chunk": chunk}

    def num_kept(n: int) -> int:
        return min(-(-n // chunk), max(1, int(density * -(-n // chunk))))

    def shared(n: int) -> Tensor:  # many ties
        return torch.arange(-(-n // chunk)).mul(7).remainder(5).float()

    return Kind(
        f"top_chunks-{dtype}-{density:g}-{chunk}".replace("torch.", ""),
        "top_chunks",
        lambda n: num_kept(n) * chunk * dtype.itemsize,
        settings,
        settings,
        num_kept,
        shared=shared,
    )


_KEPT: dict[str, Callable[[int], int]] = {
    "none": lambda n: 0,
    "one": lambda n: min(1, n),
    "percent": lambda n: -(-n // 100),
    "half": lambda n: n // 2,
    "all": lambda n: n,
}


KINDS = [
    *(_cast(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *(
        block_quant(bits, block, stochastic)
        for bits in (8, 4)
        for block in (1, 33, 512, 2000)
        for stochastic in (False, True)
    ),
    *(
        block_quant(bits, block, stochastic)
        for bits in (2, 3, 5, 6, 7)
        for block, stochastic in ((33, False), (512, True))
    ),
    *(
        block_quant(bits, block, stochastic, rotation)
        for bits, block, stochastic, rotation in (
            (8, 512, False, 32),
            (4, 96, False, 32),
            (4, 512, True, 32),
            (2, 2048, False, 128),
            (7, 128, True, 128),
        )
    ),
    *(
        dither(bits, block, natural, l2)
        for bits, block in ((2, 33), (3, 0), (5, 512), (7, 0), (8, 2000))
        for natural in (False, True)
        for l2 in (False, True)
    ),
    natural(8),
    natural(9),
    *(ternary(block, clip) for block in (0, 33, 512, 2000) for clip in (0.0, 2.5)),
    *(ternary(block, scales=(2.0, 0.0, 3.0, 1e-44, 3.4e38)) for block in (33, 512)),
    *(ternary(0, scales=(scale,)) for scale in (0.0, 1e-44, 1e-30, 2.0, 3.4e38)),
    *(min_max(bits, block) for bits, block in ((1, 0), (1, 33), (2, 512), (4, 0), (5, 2000), (8, 512), (8, 1))),
    *(min_max(bits, block, stochastic=True) for bits, block in ((1, 512), (3, 0), (4, 33), (8, 2000))),
    *(min_max(bits, block, bagua=True) for bits, block in ((2, 33), (4, 0), (7, 2000), (8, 512), (8, 0))),
    *(fixed_point(bits, block) for bits, block in ((2, 0), (3, 33), (4, 512), (7, 2000), (8, 512), (8, 0), (8, 1))),
    *(block_cast(format, block) for format in FORMATS for block in (33, 512, 2000)),
    *(
        Kind(f"one_bit-{'rms' if rms else 'l1'}", "one_bit", lambda n: 4 + -(-n // 8), {"rms": rms})
        for rms in (False, True)
    ),
    Kind("sign", "sign", lambda n: -(-n // 8)),
    *(_top_k(dtype, label, num_kept) for dtype in VALUE_DTYPES for label, num_kept in _KEPT.items()),
    *(
        _top_k(dtype, label, _KEPT[label], selection, chunked)
        for dtype, chunked in ((torch.float32, False), (NATURAL, True))
        for label in ("percent", "half", "all")
        for selection in ("exact", "sampled", "bisect")
        if chunked or selection != "exact"
    ),
    _top_k(torch.float16, "percent", _KEPT["percent"], chunked=True),
    *(_random_k(torch.float32, density) for density in (0.0, 0.01, 0.5, 0.8, 1.0)),
    *(_random_k(dtype, 0.1, block) for dtype in (torch.float16, torch.bfloat16) for block in (1, 33)),
    _random_k(torch.float32, 0.3, 7, scaled=True),
    _random_k(torch.float32, 0.1, scaled=True),
    _random_k(torch.float16, 0.0, 1, period=10),
    _random_k(torch.float32, 0.0, 64, period=3),
    *(_global("linear", levels, 4.0) for levels in (1, 31, 127)),
    *(_global("linear", levels, 3.0, bits=4) for levels in (1, 7)),
    *(_global("linear", 42, norm) for norm in (0.0, 1e-44, 1e-30, 3.4e38)),
    _global("linear", 3, 10.0, squared=True, bits=4),
    *(_global("exponential", levels, 3.7) for levels in (111, 124, 127)),
    *(_global("exponential", 125, norm) for norm in (0.0, 1e-44, 1e-30, 3.4e38)),
    _global("exponential", 126, 10.0, squared=True),
    *(_top_chunks(dtype, 0.3, chunk) for dtype in (torch.float16, torch.float32) for chunk in (8, 64, 129)),
    _top_chunks(torch.bfloat16, 1.0, 64),
]

LENGTHS = [0, 1, 2, 7, 8, 9, 127, 128, 129, 511, 512, 513, 1000, 4096, 65535, 65536]


def _normal(n: int) -> Tensor:
    return torch.randn(n)


def _ties(n: int) -> Tensor:
    return torch.randint(-3, 4, (n,)).float()  # halves of a code, and equal magnitudes by the thousand


VALUES: dict[str, Callable[[int], Tensor]] = {
    "normal": _normal,
    "heavy_tailed": lambda n: torch.randn(n) / torch.randn(n).abs().clamp(min=1e-12),
    "zeros": torch.zeros,
    "negative_zeros": lambda n: -torch.zeros(n),
    "signed_zeros_and_few": lambda n: torch.where(torch.rand(n) < 0.01, torch.randn(n), -torch.zeros(n)),
    "denormal": lambda n: torch.randn(n) * 1e-41,
    "smallest": lambda n: torch.randint(-2, 3, (n,)).float() * 2.0**-149,
    "tiny": lambda n: torch.randn(n) * 1e-30,
    "half_denormal": lambda n: torch.randn(n) * 2.0**-20,
    "huge": lambda n: torch.rand(n).sub(0.5).mul(2.0) * torch.finfo(torch.float32).max,
    "largest": lambda n: torch.where(torch.rand(n) < 0.5, 1.0, -1.0) * torch.finfo(torch.float32).max,
    "mixed_scale": lambda n: torch.randn(n) * torch.exp(torch.randn(n) * 8.0),
    "ties": _ties,
    "half_codes": lambda n: torch.cat([torch.full((1,), 127.0), torch.randint(-253, 254, (max(n, 1),)) / 2])[:n],
    "constant": lambda n: torch.full((n,), -0.7),
    "offset": lambda n: 1000 + torch.randn(n) * 1e-3,  # a narrow range far from 0
    "positive": lambda n: torch.rand(n) + 0.5,
}


def bits(x: Tensor) -> Tensor:
    """View floats as integers, so that -0 differs from 0."""
    return x.view(torch.int32)


def misaligned(values: Tensor, shift: int) -> Tensor:
    """Return a copy that starts `shift` elements into its storage."""
    storage = torch.zeros(values.numel() + shift + 3, dtype=values.dtype, device=values.device)
    place = storage[shift : shift + values.numel()]
    place.copy_(values)
    return place


@dataclass
class Encoded:
    finite: bool
    out: Tensor
    residual: Tensor | None
    replaced: Tensor
    accumulated: Tensor


def round_trip(
    kernels: ModuleType,
    kind: Kind,
    x: Tensor,
    residual: Tensor | None,
    scale: float = 1.0,
    key: Key = KEY,
    alpha: float = 0.3,
    shift: int = 0,
    device: str = "cpu",
) -> Encoded:
    """Encode on `device`, then decode twice, with guard bytes around all that is written; return it on the CPU."""
    n, nbytes = x.numel(), align(kind.nbytes(x.numel()))
    buffer = torch.full((nbytes + 4 * shift + 8,), GUARD, dtype=torch.uint8, device=device)
    out = buffer[4 * shift : 4 * shift + nbytes]
    residual = None if residual is None else misaligned(residual.to(device), shift)
    x = misaligned(x.to(device), shift)
    before = x.clone()
    finite = kind.encode(kernels, [EncodeJob(x, out, residual, scale, key)])[0]
    assert torch.equal(bits(x), bits(before)), "x was changed"
    assert bool((buffer[: 4 * shift] == GUARD).all())
    assert bool((buffer[4 * shift + nbytes :] == GUARD).all())
    replaced, accumulated = torch.full((n,), 1.25, device=device), torch.full((n,), 1.25, device=device)
    kind.decode(kernels, [DecodeJob(out, replaced, None, key)])
    kind.decode(kernels, [DecodeJob(out, accumulated, alpha, key)])
    return Encoded(finite, out.cpu(), None if residual is None else residual.cpu(), replaced.cpu(), accumulated.cpu())


def assert_same(got: Encoded, want: Encoded) -> None:
    """Bit for bit, where the message is finite; the flag always."""
    assert got.finite == want.finite
    if not want.finite:
        return  # bytes and residual are unspecified
    assert torch.equal(got.out, want.out)
    assert (got.residual is None) == (want.residual is None)
    if got.residual is not None and want.residual is not None:
        assert torch.equal(bits(got.residual), bits(want.residual))
    assert torch.equal(bits(got.replaced), bits(want.replaced))
    assert torch.equal(bits(got.accumulated), bits(want.accumulated))
