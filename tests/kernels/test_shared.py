"""Kernels of kinds that agree on a scale: norms, and reducing two encoded blocks to one."""

import importlib
from types import ModuleType

import pytest
import torch
from cases import KEY, VALUES, bits, misaligned

from thinwire.errors import WireError
from thinwire.kernels import reference
from thinwire.kernels.jobs import DecodeBatch, DecodeJob, EncodeBatch, EncodeJob, ReduceJob
from thinwire.random import Key

LENGTHS = [0, 1, 2, 63, 64, 65, 127, 128, 129, 777, 1023, 1024, 1025, 2049, 5000, 65536]
NOTHING = torch.empty(0, dtype=torch.uint8)


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "native":
        return request.getfixturevalue("native")
    return importlib.import_module("thinwire.kernels.reference")


def norms(
    kernels: ModuleType, x: torch.Tensor, residual: torch.Tensor | None = None, block: int = 0, **settings: bool
) -> torch.Tensor:
    shared = torch.full((-(-x.numel() // block) if block else 1,), float("nan"))
    settings = {"l2": False, "squared": False, **settings}
    kernels.shared_norms([EncodeJob(x, NOTHING, residual, 0.3, None, shared)], block=block, **settings)
    return shared


# --- norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 1, 64, 128, 1000, 3000])
@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("squared", [False, True])
def test_norms_are_those_of_the_reference(native: ModuleType, block: int, l2: bool, squared: bool) -> None:
    for n in LENGTHS if block else [1, *LENGTHS]:
        for x, residual in ((torch.randn(n), torch.randn(n)), (misaligned(torch.randn(n), 1), None)):
            settings = {"block": block, "l2": l2, "squared": squared}
            want = norms(reference, x, residual, **settings)
            assert torch.equal(bits(norms(native, x, residual, **settings)), bits(want))
    for values in VALUES.values():
        want = norms(reference, values(1500), None, block, l2=l2, squared=squared)
        assert want.shape == (-(-1500 // block) if block else 1,)
    for values in VALUES.values():
        x = values(1500)
        settings = {"block": block, "l2": l2, "squared": squared}
        assert torch.equal(bits(norms(native, x, None, **settings)), bits(norms(reference, x, None, **settings)))


def test_norms_by_hand(kernels: ModuleType) -> None:
    x = torch.tensor([3.0, -4.0, 0.0, 2.0, -12.0])
    assert norms(kernels, x).tolist() == [12.0]
    assert norms(kernels, x, squared=True).tolist() == [144.0]
    assert norms(kernels, x, l2=True, block=2).tolist() == [5.0, 2.0, 12.0]
    assert norms(kernels, x, l2=True, squared=True, block=2).tolist() == [25.0, 4.0, 144.0]
    assert norms(kernels, x, torch.full((5,), 10.0)).tolist() == [9.0]
    assert norms(kernels, torch.zeros(3), squared=True).tolist() == [0.0]
    assert norms(kernels, torch.tensor([1e-30]), squared=True).tolist() == [2.0**-126]
    assert norms(kernels, torch.tensor([1e30]), squared=True).tolist() == [float("inf")]
    largest = torch.finfo(torch.float32).max
    assert norms(kernels, torch.full((9,), largest), l2=True).tolist() == [largest]
    assert norms(kernels, torch.empty(0)).tolist() == [0.0]
    assert norms(kernels, torch.empty(0), block=4).tolist() == []


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("l2", [False, True])
def test_the_norm_of_what_is_not_finite_is_inf(kernels: ModuleType, bad: float, l2: bool) -> None:
    x = torch.randn(2000)
    x[1500] = bad
    assert norms(kernels, x, l2=l2).tolist() == [float("inf")]
    found = norms(kernels, torch.zeros(2000), x, 64, l2=l2)
    assert found.isinf().tolist() == [i == 1500 // 64 for i in range(32)]


def test_norms_change_nothing_else(native: ModuleType) -> None:
    x, residual = torch.randn(700), torch.randn(700)
    before = x.clone(), residual.clone()
    norms(native, x, residual, l2=True)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


# --- encoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [float("inf"), float("nan"), -1.0])
def test_a_norm_that_is_none_is_flagged(kernels: ModuleType, norm: float) -> None:
    shared, x, out = torch.tensor([norm]), torch.randn(8), torch.zeros(8, dtype=torch.uint8)
    job = EncodeJob(x, out, key=KEY, shared=shared)
    assert kernels.encode_global_linear([job], bits=8, levels=127, squared=False) == [False]
    assert kernels.encode_global_exponential([job], levels=127, squared=False) == [False]
    assert kernels.encode_ternary([job], block=0, clip=0.0, shared=True) == [False]
    two = job._replace(shared=torch.tensor([1.0, norm]))
    assert kernels.encode_ternary([two], block=4, clip=0.0, shared=True) == [False]
    decoded = torch.ones(8)
    kernels.decode_ternary(
        [DecodeJob(torch.full((2,), 121, dtype=torch.uint8), decoded, None, None, two.shared)], block=4, shared=True
    )
    assert decoded.tolist() == [1.0] * 4 + [0.0] * 4


def test_values_beyond_the_norm_are_clamped(kernels: ModuleType) -> None:
    x, out, shared = torch.tensor([5.0, -1e30, 1.0]), torch.zeros(4, dtype=torch.uint8), torch.tensor([1.0])
    kernels.encode_global_linear([EncodeJob(x, out, key=KEY, shared=shared)], bits=8, levels=42, squared=False)
    assert out.view(torch.int8)[:3].tolist() == [42, -42, 42]
    kernels.encode_global_exponential([EncodeJob(x, out, key=KEY, shared=shared)], levels=125, squared=False)
    assert out[:3].tolist() == [125, 128 + 125, 125]
    kernels.encode_ternary([EncodeJob(x, out, key=KEY, shared=shared)], block=0, clip=0.0, shared=True)
    assert out.tolist() == [1 + 2 * 3 + 1 * 9, 0, 0, 0]


def test_every_byte_decodes(native: ModuleType) -> None:
    data, shared = torch.arange(256).to(torch.uint8), torch.tensor([3.3])
    for n, width in ((256, 8), (512, 4), (511, 4)):
        got, want = torch.ones(n), torch.ones(n)
        for kernels, out in ((native, got), (reference, want)):
            kernels.decode_global_linear([DecodeJob(data, out, 0.7, None, shared)], bits=width, levels=7, squared=False)
        assert torch.equal(bits(got), bits(want))
    got, want = torch.ones(256), torch.ones(256)
    for kernels, out in ((native, got), (reference, want)):
        kernels.decode_global_exponential([DecodeJob(data, out, None, None, shared)], levels=120, squared=True)
    assert torch.equal(bits(got), bits(want))


def test_batches_give_the_bytes_of_jobs(native: ModuleType) -> None:
    """A batch keeps where things lie; what lies there is new every step."""
    xs, residual, shared = [torch.randn(300), torch.randn(77)], torch.randn(77), torch.zeros(2)
    keys = [Key(1, stream=2), Key(2, stream=2)]
    batch = EncodeBatch(xs, [None, residual], keys, [0, 300], [300, 80], [shared[:1], shared[1:]])
    for step in range(3):
        buffer = torch.zeros(380, dtype=torch.uint8)
        batch.at(buffer, step=step, residual_scales=[1.0, 0.3 * step])
        jobs = [job._replace(out=torch.zeros_like(job.out), shared=torch.zeros(1)) for job in batch]
        jobs[1] = jobs[1]._replace(residual=residual.clone())
        native.shared_norms(batch, block=0, l2=True, squared=False)
        reference.shared_norms(jobs, block=0, l2=True, squared=False)
        assert shared.tolist() == [float(job.shared) for job in jobs if job.shared is not None]
        native.encode_global_linear(batch, bits=8, levels=63, squared=False)
        reference.encode_global_linear(jobs, bits=8, levels=63, squared=False)
        assert torch.equal(buffer, torch.cat([job.out for job in jobs]))
        assert jobs[1].residual is not None
        assert torch.equal(residual, jobs[1].residual)
        decode = DecodeBatch([torch.zeros(300), torch.zeros(77)], [0, 300], [300, 80], shared=batch.shared)
        decode.at(buffer)
        native.decode_global_linear(decode, bits=8, levels=63, squared=False)
        for out, job in zip(list(decode), jobs, strict=True):
            alone = job._replace(out=torch.zeros(job.x.numel()))
            reference.decode_global_linear(
                [DecodeJob(job.out, alone.out, shared=job.shared)], bits=8, levels=63, squared=False
            )
            assert torch.equal(out.out, alone.out)
        xs[0].mul_(1.7)


def test_what_is_shared_is_checked(native: ModuleType) -> None:
    x, out = torch.randn(8), torch.zeros(8, dtype=torch.uint8)
    for shared in (torch.zeros(2), torch.zeros(1, dtype=torch.float64), torch.zeros(2)[::2][:0]):
        with pytest.raises(ValueError, match=r"shared: expected .* got"):
            native.encode_global_linear([EncodeJob(x, out, key=KEY, shared=shared)], bits=8, levels=127, squared=False)
        with pytest.raises(ValueError, match=r"shared: expected .* got"):
            native.decode_global_exponential([DecodeJob(out, x, shared=shared)], levels=127, squared=False)
        with pytest.raises(ValueError, match=r"shared: expected .* got"):
            native.encode_ternary([EncodeJob(x, out, key=KEY, shared=shared)], block=3, clip=0.0, shared=True)
        with pytest.raises(ValueError, match=r"shared: expected .* got"):
            native.decode_ternary([DecodeJob(out, x, shared=shared)], block=3, shared=True)
    for settings in ({"bits": 5, "levels": 1}, {"bits": 4, "levels": 8}, {"bits": 8, "levels": 0}):
        with pytest.raises(ValueError, match="global linear: expected"):
            native.decode_global_linear([DecodeJob(out, x, shared=torch.ones(1))], squared=False, **settings)
    with pytest.raises(ValueError, match="1 to 127 levels, got 128"):
        native.encode_global_exponential([EncodeJob(x, out, key=KEY, shared=torch.ones(1))], levels=128, squared=False)


# --- reducing -------------------------------------------------------------------------------------------------------


def any_bytes(n: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@pytest.mark.parametrize("kind", ["linear8", "linear4", "exponential"])
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (3, 4)])
def test_reductions_are_those_of_the_reference(native: ModuleType, kind: str, counts: tuple[int, int]) -> None:
    """Any bytes, also those that no encoder writes; nothing around them is touched, whatever the threads."""
    settings = {} if kind == "exponential" else {"bits": int(kind[-1])}
    name = f"reduce_global_{kind.rstrip('84')}"
    for n in (0, 1, 2, 7, 129, 1024, 2047, 5000):
        nbytes = -(-n // 2) if kind == "linear4" else n
        a, b = any_bytes(nbytes, n), any_bytes(nbytes, n + 1)
        for shift, threads in ((0, 1), (1, 2), (3, 3)):
            guarded = torch.full((nbytes + 16,), 0xAB, dtype=torch.uint8)
            got = guarded[8 + shift : 8 + shift + nbytes]
            got.copy_(a)
            want = a.clone()
            key = Key(5, 1, 2, 77)
            getattr(native, name)([ReduceJob(got, b, n, key, counts)], **settings, threads=threads)
            getattr(reference, name)([ReduceJob(want, b, n, key, counts)], **settings)
            assert torch.equal(got, want)
            assert bool((guarded[: 8 + shift] == 0xAB).all())
            assert bool((guarded[8 + shift + nbytes :] == 0xAB).all())


def test_every_pair_of_exponential_codes(native: ModuleType) -> None:
    a = torch.arange(256).repeat_interleave(256).to(torch.uint8)
    b = torch.arange(256).repeat(256).to(torch.uint8)
    got, want = a.clone(), a.clone()
    native.reduce_global_exponential([ReduceJob(got, b, 65536, KEY)])
    reference.reduce_global_exponential([ReduceJob(want, b, 65536, KEY)])
    assert torch.equal(got, want)


def test_sums_of_exponents_by_hand(kernels: ModuleType) -> None:
    pairs = [
        (50, 0, 50),  # zero: the other
        (0, 128 + 9, 128 + 9),
        (128, 7, 7),  # a zero with a sign is zero
        (128, 128, 0),
        (60, 60, 61),  # doubled, exactly
        (128 + 60, 128 + 60, 128 + 61),
        (60, 128 + 60, 0),  # cancelled
        (60, 128 + 59, 59),  # 2 - 1
        (128 + 60, 59, 128 + 59),
        (127, 127, 127),  # no code is left
        (100, 40, 100),  # too far apart
        (128 + 100, 40, 128 + 100),
    ]
    acc, data, want = (torch.tensor([pair[i] for pair in pairs], dtype=torch.uint8) for i in range(3))
    kernels.reduce_global_exponential([ReduceJob(acc, data, len(pairs), KEY)])
    assert acc.tolist() == want.tolist()


def test_means_of_codes_by_hand(kernels: ModuleType) -> None:
    acc = torch.tensor([127, -127, 4, -3, 0, 100], dtype=torch.int8).view(torch.uint8)
    data = torch.tensor([127, -127, 2, -5, 0, -100], dtype=torch.int8).view(torch.uint8)
    kernels.reduce_global_linear([ReduceJob(acc, data, 6, KEY)], bits=8)
    assert acc.view(torch.int8).tolist() == [127, -127, 3, -4, 0, 0]
    acc = torch.tensor([3, 127], dtype=torch.int8).view(torch.uint8)
    data = torch.tensor([-6, 127], dtype=torch.int8).view(torch.uint8)
    kernels.reduce_global_linear([ReduceJob(acc, data, 2, KEY, (2, 1))], bits=8)
    assert acc.view(torch.int8).tolist() == [0, 127]
    # Four bits: 7 and -7 in one byte, -1 alone in the next.
    acc = torch.tensor([7 - 16 * 7, -1], dtype=torch.int8).view(torch.uint8)
    kernels.reduce_global_linear([ReduceJob(acc, acc.clone(), 3, KEY)], bits=4)
    assert acc.view(torch.int8).tolist() == [7 - 16 * 7, -1]


def test_reductions_are_refused_before_memory_is_touched(native: ModuleType) -> None:
    good = torch.zeros(8, dtype=torch.uint8)
    for acc, data in ((good, good[:7]), (good[:7], good)):
        with pytest.raises(WireError, match="at least 8 bytes for 8 elements, got 7"):
            native.reduce_global_exponential([ReduceJob(acc, data, 8, KEY)])
    with pytest.raises(ValueError, match="acc: expected a contiguous"):
        native.reduce_global_linear([ReduceJob(good.view(torch.int8), good, 8, KEY)], bits=8)
    for counts in ((0, 1), (1, 65536)):
        with pytest.raises(ValueError, match="counts: expected"):
            native.reduce_global_linear([ReduceJob(good, good.clone(), 8, KEY, counts)], bits=8)
