"""Norms and reductions in Triton give what the reference kernels give. See test_triton_equals_reference.py."""

import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from cases import KEY, VALUES, bits, misaligned

from thinwire.errors import WireError
from thinwire.kernels import reference
from thinwire.kernels.jobs import DecodeJob, EncodeBatch, EncodeJob, ReduceJob
from thinwire.random import Key
from thinwire.wire import align

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = pytest.mark.triton_interpreter if INTERPRETED else pytest.mark.gpu
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 and Triton", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def kernels() -> Iterator[ModuleType]:
    with np.errstate(all="ignore"):  # the interpreter computes in NumPy, which warns of inf and nan
        yield importlib.import_module("thinwire.kernels.triton_backend")


def norms(
    kernels: ModuleType, jobs: list[tuple[torch.Tensor, torch.Tensor | None]], device: str, block: int, **settings: bool
) -> list[torch.Tensor]:
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    counts = [-(-x.numel() // block) if block else 1 for x, _ in jobs]
    shared = [torch.full((count,), float("nan"), device=device) for count in counts]
    moved = [(x.to(device), None if residual is None else residual.to(device)) for x, residual in jobs]
    made = [EncodeJob(x, nothing, r, 0.3, None, place) for (x, r), place in zip(moved, shared, strict=True)]
    kernels.shared_norms(made, block=block, **settings)
    return [place.cpu() for place in shared]


@pytest.mark.parametrize("block", [0, 1, 64, 1000, 3000])
@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("squared", [False, True])
def test_norms_are_those_of_the_reference(kernels: ModuleType, block: int, l2: bool, squared: bool) -> None:
    jobs = [(torch.randn(n), torch.randn(n)) for n in (0, 1, 63, 128, 1025, 2500)]
    jobs += [(misaligned(torch.randn(777), 1), None)] + [(values(300), None) for values in VALUES.values()]
    for bad in (float("inf"), float("nan")):
        x = torch.randn(300)
        x[250] = bad
        jobs += [(x, None), (torch.zeros(300), x)]
    got = norms(kernels, jobs, DEVICE, block, l2=l2, squared=squared)
    want = norms(reference, jobs, "cpu", block, l2=l2, squared=squared)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def test_norms_of_batches(kernels: ModuleType) -> None:
    """A batch keeps where things lie; what lies there is new every step."""
    xs, residual = [torch.randn(300), torch.randn(77)], torch.randn(77)
    for module, device in ((reference, "cpu"), (kernels, DEVICE)):
        shared = torch.zeros(2, device=device)
        moved = [x.to(device, copy=True) for x in xs]
        batch = EncodeBatch(
            moved, [None, residual.to(device)], [Key(1), Key(2)], [0, 300], [300, 80], [shared[:1], shared[1:]]
        )
        found: list[torch.Tensor] = []
        for step in range(2):
            batch.at(torch.zeros(380, dtype=torch.uint8, device=device), step=step, residual_scales=[1.0, 0.3 * step])
            module.shared_norms(batch, block=0, l2=True, squared=False)
            found.append(shared.cpu().clone())
            moved[0].mul_(1.7)
        if module is reference:
            want = found
        else:
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def any_bytes(n: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@pytest.mark.parametrize("kind", ["linear8", "linear4", "exponential"])
@pytest.mark.parametrize("counts", [(1, 1), (3, 4)])
def test_reductions_are_those_of_the_reference(kernels: ModuleType, kind: str, counts: tuple[int, int]) -> None:
    """Any bytes, also those that no encoder writes; nothing around them is touched."""
    settings = {} if kind == "exponential" else {"bits": int(kind[-1])}
    name = f"reduce_global_{kind.rstrip('84')}"
    lengths = (0, 1, 2, 7, 129, 1024, 2047, 5000)
    for offset in (0, 77):
        got: list[ReduceJob] = []
        want: list[ReduceJob] = []
        around: list[torch.Tensor] = []
        for i, n in enumerate(lengths):
            nbytes = -(-n // 2) if kind == "linear4" else n
            a, b, key = any_bytes(nbytes, n), any_bytes(nbytes, n + 1), Key(5, 1, 2, offset)
            guarded = torch.full((nbytes + 16,), 0xAB, dtype=torch.uint8, device=DEVICE)
            acc = guarded[8 + i % 3 : 8 + i % 3 + nbytes]
            acc.copy_(a)
            got.append(ReduceJob(acc, b.to(DEVICE), n, key, counts))
            want.append(ReduceJob(a, b, n, key, counts))
            around.append(guarded)
        getattr(kernels, name)(got, **settings)
        getattr(reference, name)(want, **settings)
        for i, (one, other, guarded) in enumerate(zip(got, want, around, strict=True)):
            assert torch.equal(one.acc.cpu(), other.acc)
            assert bool((guarded[: 8 + i % 3] == 0xAB).all())
            assert bool((guarded[8 + i % 3 + one.acc.numel() :] == 0xAB).all())
    for n in (1024, 2048):  # random numbers by the chunk
        nbytes = n // 2 if kind == "linear4" else n
        a, b = any_bytes(nbytes, 1), any_bytes(nbytes, 2)
        acc = a.to(DEVICE, copy=True)
        getattr(kernels, name)([ReduceJob(acc, b.to(DEVICE), n, KEY, counts)], **settings)
        getattr(reference, name)([ReduceJob(a, b, n, KEY, counts)], **settings)
        assert torch.equal(acc.cpu(), a)
    getattr(kernels, name)([], **settings)


def test_every_pair_of_exponential_codes(kernels: ModuleType) -> None:
    a = torch.arange(256).repeat_interleave(256).to(torch.uint8)
    b = torch.arange(256).repeat(256).to(torch.uint8)
    got, want = a.to(DEVICE, copy=True), a.clone()
    kernels.reduce_global_exponential([ReduceJob(got, b.to(DEVICE), 65536, KEY)])
    reference.reduce_global_exponential([ReduceJob(want, b, 65536, KEY)])
    assert torch.equal(got.cpu(), want)


def test_what_is_shared_is_checked(kernels: ModuleType) -> None:
    x, out = torch.randn(8, device=DEVICE), torch.zeros(8, dtype=torch.uint8, device=DEVICE)
    for shared in (torch.zeros(2, device=DEVICE), torch.zeros(1, dtype=torch.float64, device=DEVICE)):
        with pytest.raises(ValueError, match=r"shared: expected .* got"):
            kernels.encode_global_linear([EncodeJob(x, out, key=KEY, shared=shared)], bits=8, levels=127, squared=False)
        with pytest.raises(ValueError, match=r"shared: expected .* got"):
            kernels.shared_norms([EncodeJob(x, out, shared=shared)], block=0, l2=True, squared=False)
    for norm in (float("inf"), float("nan"), -1.0):
        job = EncodeJob(x, out, key=KEY, shared=torch.tensor([norm], device=DEVICE))
        assert kernels.encode_global_linear([job], bits=8, levels=127, squared=False) == [False]
        assert kernels.encode_global_exponential([job], levels=127, squared=True) == [False]
    with pytest.raises(WireError, match="at least 8 bytes for 8 elements, got 7"):
        kernels.reduce_global_exponential([ReduceJob(out, out[:7], 8, KEY)])


@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_of_any_numbers(kernels: ModuleType, chunk: int) -> None:
    """More than one tile of them; zeros, ties, denormals, and such as no norm is."""
    n = 2500
    num_chunks = -(-n // chunk)
    some = torch.randn(num_chunks)
    numbers = (some.square(), some.round().abs(), some, torch.zeros(num_chunks), some.square() * 1e-42)
    for k, shared in ((k, shared) for shared in numbers for k in (0, 1, num_chunks // 3, num_chunks)):
        x, residual, outs = torch.randn(n), torch.randn(n), list[torch.Tensor]()
        for module, device in ((reference, "cpu"), (kernels, DEVICE)):
            out = torch.full((align(4 * k * chunk),), 7, dtype=torch.uint8, device=device)
            left, decoded, scores = residual.to(device, copy=True), torch.zeros(n, device=device), shared.to(device)
            settings = {"k": [k], "dtype": torch.float32, "chunk": chunk}
            assert module.encode_top_chunks([EncodeJob(x.to(device), out, left, shared=scores)], **settings) == [True]
            module.decode_top_chunks([DecodeJob(out, decoded, shared=scores)], **settings)
            outs += [out.cpu(), bits(left.cpu()), bits(decoded.cpu())]
        assert all(torch.equal(got, want) for got, want in zip(outs[3:], outs[:3], strict=True))
    bad = torch.ones(num_chunks)
    bad[0] = float("inf")
    job = EncodeJob(x.to(DEVICE), torch.zeros(12, dtype=torch.uint8, device=DEVICE), shared=bad.to(DEVICE))
    assert kernels.encode_top_chunks([job], k=[1], dtype=torch.float32, chunk=chunk) == [False]
