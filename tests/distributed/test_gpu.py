"""Training on a GPU, several ranks on one: run by `make test-gpu` where there is one.

What must be the same to the bit as on the CPU is given as gradients, not computed: torch's own sums differ there.
"""

import contextlib
import dataclasses

import pytest
import torch
from serving import servers
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded

import thinwire
from thinwire.errors import NonFiniteError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),  # kernels are compiled when first used
]

SAME_BYTES = [
    *("int8", "int8:stochastic", "int4", "int4:rotation=32", "e4m3", "linear:5", "natural:3", "qsgd:8", "cnat:8"),
    *("topk:0.05", "topk:0.05:sampled", "topk:0.05~int8", "onebit", "gather/onebit", "gather/topk:0.05", "terngrad"),
    *("randomk:0.1", "sum/randomk:0.25:fp32", "topkc:0.1", "global:8", "global:4:halving", "globalexp", "sign"),
    *("fp16", "bf16", "dense", "dense:fp16", "hier/int8", "topk:0.05@dgc", "topk:0.05@ef21", "int4@ef21"),
]
OWN_PRODUCTS = ["lowrank:2", "powersgd:2", "powersgd:2:alternating"]
CYCLES = 20_000_000  # about 10 ms of a GPU


class Slow(torch.autograd.Function):
    """Has the GPU busy in the backward pass, so that hooks are called long before gradients are there."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if g.is_cuda:
            torch.cuda._sleep(CYCLES)
        return g


class Given(nn.Module):
    """Parameters whose gradients are the numbers that `forward` gets, exactly."""

    SHAPES = ((48, 40), (40,), (3000,), (7, 5, 3), (), (64, 64))

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in self.SHAPES)

    def forward(self, wanted):
        return sum((Slow.apply(p) * g).sum() for p, g in zip(self.all, wanted, strict=True))


def given(rank, step, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in Given.SHAPES]


def kept(link):
    state = link.state_dict()
    return digest([t for s in sorted(thinwire.feedback.Slot) for _, t in sorted(state[s].items())])


def given_steps(rank, recipe, device, *, steps=range(4), dtype=torch.float32, cap=0.01, state=None, **options):
    """Return what was delivered, what is owed, and the state."""
    model = DDP(Given(dtype).to(device), bucket_cap_mb=cap)
    seen = []
    with attached(model, recipe, nodes=1 if recipe.startswith("hier") else None, **options) as link:
        if state is not None:
            link.load_state_dict(state)
        for step in steps:
            model.zero_grad()
            model(given(rank, step, dtype, device)).backward()
            seen += gradients(model)  # copied by the stream that backward ran on, without waiting
        return digest(seen), kept(link), link.state_dict()


def _as_on_cpu(rank, world_size, recipe, dtype):
    cpu, cuda = (given_steps(rank, recipe, device, dtype=dtype) for device in ("cpu", "cuda"))
    return cpu[:2] == cuda[:2], cuda[0]


@pytest.mark.parametrize("recipe", SAME_BYTES)
def test_the_bits_are_those_of_the_cpu(ranks, recipe):
    results = ranks(3).run(_as_on_cpu, recipe, torch.float32, timeout=240)  # a number whose reciprocal is rounded
    assert [same for same, _ in results] == [True] * 3
    assert len({bits for _, bits in results}) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["int4", "topk:0.05", "sum/randomk:0.25:fp32"])
def test_parameters_of_16_bits(ranks, recipe, dtype):
    results = ranks(2).run(_as_on_cpu, recipe, dtype, timeout=240)
    assert [same for same, _ in results] == [True, True]


def _through_servers(rank, world_size, recipe, addresses):
    cpu, cuda = (given_steps(rank, recipe, device, servers=addresses) for device in ("cpu", "cuda"))
    return cpu[:2] == cuda[:2], cuda[0]


@pytest.mark.parametrize("recipe", ["int8:stochastic", "topk:0.05", "topk:0.05@dgc", "hier/int8"])
def test_the_bits_through_servers_are_those_of_the_cpu(ranks, recipe):
    with servers(3, 2) as started:
        addresses = [server.address for server in started]
        results = ranks(3).run(_through_servers, recipe, addresses, timeout=240)
    assert [same for same, _ in results] == [True] * 3
    assert len({bits for _, bits in results}) == 1


def _conserved(rank, world_size, recipe):
    model = DDP(seeded(Tower).cuda(), bucket_cap_mb=0.01)
    with attached(model, recipe) as link:
        ledger = Ledger(model, link)
        for step in range(4):
            x = batch(rank, step).cuda()
            ledger.expect(loss(model.module, x))
            model.zero_grad()
            loss(model, x).backward()
            ledger.got()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.05 * param.grad
        return ledger.error(), digest(model.parameters())


@pytest.mark.parametrize(
    "recipe", ["int4", "topk:0.05", "onebit", "gather/topk:0.05", "sum/randomk:0.25:fp32", *OWN_PRODUCTS]
)
def test_nothing_is_lost_and_replicas_are_identical(ranks, recipe):
    results = ranks(4).run(_conserved, recipe, timeout=240)
    assert max(error for error, _ in results) < 1e-5
    assert len({bits for _, bits in results}) == 1


def _skip(rank, world_size, recipe):
    model, scaler = DDP(seeded(Tower).cuda(), bucket_cap_mb=0.01), torch.amp.GradScaler("cuda", init_scale=2.0**8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, bits = [], []
    with attached(model, recipe, scaler=scaler) as link:
        for step in range(4):
            optimizer.zero_grad()
            x = batch(rank, step).cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                value = loss(model, x).float()
            if step == 2:
                before = kept(link), digest(model.parameters())
                value = value * (float("inf") if rank == 1 else 1.0)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 2:
                assert (kept(link), digest(model.parameters())) == before
            scales.append(scaler.get_scale())
            bits.append(digest(model.parameters()))
        return scales, bits, link.skipped_steps


@pytest.mark.parametrize("recipe", ["int8", "int4", "topk:0.05", "powersgd:2"])
def test_a_grad_scaler_skips_everywhere_and_nothing_changes(ranks, recipe):
    results = ranks(2).run(_skip, recipe, timeout=240)
    for scales, bits, skipped in results:
        assert scales == [256.0, 256.0, 128.0, 128.0]
        assert skipped == 1
        assert bits == results[0][1]
        assert bits[2] == bits[1] != bits[3]


def _not_finite(rank, world_size):
    model = DDP(Given().cuda(), bucket_cap_mb=0.01)
    with attached(model, "int4") as link:
        model(given(rank, 0, device="cuda")).backward()
        before = link.state_dict()["worker"]["all.2"]
        wanted = given(rank, 1, device="cuda")
        if rank == 1:
            wanted[2][5] = float("nan")
        with pytest.raises(RuntimeError, match=r"all.2.* on rank 1 holds inf or nan"):
            model(wanted).backward()
        assert isinstance(link.error, NonFiniteError)
        return torch.equal(link.state_dict()["worker"]["all.2"], before)


def test_without_a_scaler_the_parameter_is_named(ranks):
    assert ranks(2).run(_not_finite, timeout=240) == [True, True]


def _resumed(rank, world_size, recipe, folder):
    whole = given_steps(rank, recipe, "cuda", steps=range(6))
    _, _, state = given_steps(rank, recipe, "cuda", steps=range(3))
    torch.save(state, f"{folder}/{rank}.pt")
    state = torch.load(f"{folder}/{rank}.pt", weights_only=True, map_location="cpu")
    rest = given_steps(rank, recipe, "cuda", steps=range(3, 6), state=state, cap=1)
    on_cpu = given_steps(rank, recipe, "cpu", steps=range(3, 6), state=state)
    return rest[1] == whole[1], on_cpu[1] == whole[1]


@pytest.mark.parametrize("recipe", ["int8:stochastic", "int4", "topk:0.05"])
def test_resume_is_bit_for_bit_also_on_the_cpu(ranks, recipe, tmp_path):
    assert ranks(2).run(_resumed, recipe, str(tmp_path), timeout=240) == [(True, True)] * 2


def _does_not_wait(rank, world_size):
    """The hook returns while the GPU still computes what came before it; from the second step on, as norms are rare."""
    model, busy = DDP(Given().cuda(), bucket_cap_mb=0.01), []
    state = thinwire.hooks.State(model, "int4", options=ALL)

    def hook(state, bucket):
        future = thinwire.hooks.compressed_hook(state, bucket)
        busy.append(not torch.cuda.current_stream().query())
        return future

    model.register_comm_hook(state, hook)
    for step in range(2):
        busy.clear()
        model.zero_grad()
        model(given(rank, step, device="cuda")).backward()
    state.link.close()
    return busy


def test_the_hook_does_not_wait_for_the_gpu(ranks):
    for busy in ranks(2).run(_does_not_wait, timeout=240):
        assert busy
        assert all(busy)


def _raises(rank, world_size):
    model = DDP(Given().cuda(), bucket_cap_mb=0.01)
    link = thinwire.attach(model, "int4", options=ALL)
    model(given(rank, 0, device="cuda")).backward()
    fetch = link._staging.fetch

    def failing(data):
        if rank == 1:
            raise OSError("the copy failed")
        return fetch(data)

    link._staging.fetch = failing
    with pytest.raises(RuntimeError):
        model(given(rank, 1, device="cuda")).backward()
    error = repr(link.error)
    link.close()
    torch.cuda.synchronize()
    return error


def test_an_error_on_one_rank_ends_backward_on_all(ranks):
    first, second = ranks(2).run(_raises, timeout=240)
    assert "RankLostError" in first
    assert "the copy failed" in second


def _memory(rank, world_size):
    model = DDP(seeded(Tower, 256, 4).cuda(), bucket_cap_mb=0.5)
    options = dataclasses.replace(ALL, message_nbytes=1 << 18)
    with attached(model, "int4", options=options) as link:
        found = []
        for step in range(30):
            model.zero_grad()
            loss(model, batch(rank, step, width=256).cuda()).backward()
            found.append({k: link.stats()[k] for k in ("work_nbytes", "pinned_nbytes", "residual_nbytes")})
        return found, link.plan.residual_nbytes(rank), link.plan.raw_nbytes, 6 * link.plan.buffers_nbytes(rank)


def test_memory_is_what_the_plan_says_and_does_not_grow(ranks):
    for found, residual_nbytes, raw_nbytes, under_way_nbytes in ranks(2).run(_memory, timeout=240):
        assert found[-1] == found[15]
        assert found[-1]["residual_nbytes"] == residual_nbytes
        assert 0 < found[-1]["pinned_nbytes"] <= 2 * under_way_nbytes  # in powers of two
        assert 0 < found[-1]["work_nbytes"] < 4 * raw_nbytes  # copies to undo messages under way, too, in powers of two


def _hooks(rank, world_size, name):
    found = []
    for device in ("cpu", "cuda"):
        model = DDP(Given().to(device), bucket_cap_mb=0.01)
        model.register_comm_hook(None, getattr(thinwire.hooks, name))
        seen = []
        for step in range(2):
            model.zero_grad()
            model(given(rank, step, device=device)).backward()
            seen += gradients(model)
        found.append(digest(seen))
    return found[0] == found[1]


@pytest.mark.parametrize("name", ["fp16_hook", "int8_hook", "default_hook"])
def test_hooks_without_state(ranks, name):
    assert ranks(2).run(_hooks, name, timeout=240) == [True, True]


def _several_passes(rank, world_size):
    model = DDP(seeded(Tower).cuda(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    with attached(model, "topk:0.05") as link:
        ledger = Ledger(model, link)
        for window in range(3):
            model.zero_grad()
            for micro in range(2):
                x = batch(rank, 2 * window + micro).cuda()
                ledger.expect(loss(model.module, x))
                with model.no_sync() if micro == 0 else contextlib.nullcontext():
                    loss(model, x).backward()
            ledger.got()
        return ledger.error(), link.codec_seconds()


def test_accumulation_and_views_of_buckets(ranks):
    for error, codec_s in ranks(2).run(_several_passes, timeout=240):
        assert error < 1e-5
        assert codec_s > 0
