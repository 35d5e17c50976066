"""Training programs as people write them: compiled, checkpointed, clipped, with two losses, with uneven inputs."""

import copy
import functools
import inspect
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded, train

import thinwire
from thinwire import hooks
from thinwire.errors import AttachError, LostGradientError

# --- compiled, checkpointed -------------------------------------------------------------------------------------------


def _wrapped(how):
    """Return a DDP model and what is called for a forward pass."""
    inner = seeded(Tower, 300, 4)
    if how == "checkpointed inside":
        inner.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in inner.layers)
    if how == "compiled inside":
        inner = torch.compile(inner, backend="aot_eager")
    model = DDP(inner, bucket_cap_mb=1)  # DDPOptimizer takes no less
    call = torch.compile(model, backend="aot_eager") if how.startswith("compiled outside") else model
    if how == "checkpointed":
        call = functools.partial(checkpoint, model, use_reentrant=False)
    return model, call


def _same_program(rank, world_size, how, recipe):
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = how != "compiled outside, without DDPOptimizer"
    model, call = _wrapped(how)
    link = thinwire.attach(call if isinstance(call, nn.Module) else model, recipe, options=ALL)
    seen = []
    try:
        for step in range(3):
            model.zero_grad()
            loss(call, batch(rank, step, width=300)).backward()
            seen += gradients(model)
        saved = sorted(link.state_dict()["worker"])
        return digest(seen), link.state.step, [param.info.name for param in link.plan.params], saved
    finally:
        torch._dynamo.config.optimize_ddp = True
        link.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "how",
    [
        "compiled inside",
        "compiled outside",
        "compiled outside, without DDPOptimizer",
        "checkpointed",
        "checkpointed inside",
    ],
)
def test_compiled_and_checkpointed_models_exchange_as_plain_ones(ranks, how):
    """The hook is called in every step, and plan and state have the names that they have otherwise."""
    plain = ranks(2).run(_same_program, "plain", "topk:0.1")
    wrapped = ranks(2).run(_same_program, how, "topk:0.1", timeout=150)
    assert plain[0][1] == 3
    for ours, theirs in zip(wrapped, plain, strict=True):
        assert ours[1:] == theirs[1:]
        if "checkpointed" in how:  # compilers may reorder sums
            assert ours[0] == theirs[0]
    assert wrapped[0][0] == wrapped[1][0]


def _python_reducer(rank, world_size):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        with pytest.raises(AttachError, match="python_reducer"):
            thinwire.attach(DDP(seeded(Tower, 16, 2)), "int8")
    finally:
        torch._dynamo.config.optimize_ddp = True


def test_the_python_reducer_is_refused(ranks):
    ranks(2).run(_python_reducer)


# --- several losses and optimizers ------------------------------------------------------------------------------------


def _two_backwards(rank, world_size, recipe):
    """A critic in two backward passes before one step, as a GAN's, and one graph walked twice."""
    model = DDP(seeded(Tower, 24, 3), bucket_cap_mb=0.002)
    with attached(model, recipe) as link:
        ledger = Ledger(model, link)
        for step in range(4):
            model.zero_grad()
            for part in (2 * step, 2 * step + 1):
                x = batch(rank, part, width=24)
                ledger.expect(loss(model.module, x))
                before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
                value = loss(model, x)
                value.backward(retain_graph=step == 3)
                for name, mean in zip(ledger._params, before, strict=True):
                    ledger._due[name] += mean.double()  # DDP reduces what has accumulated
                ledger.got()
        return ledger.error(), link.state.step, digest(gradients(model))


@pytest.mark.parametrize("recipe", ["topk:0.1", "onebit"])
def test_two_backward_passes_before_a_step_are_two_exchanges(ranks, recipe):
    results = ranks(2).run(_two_backwards, recipe)
    for error, step, bits in results:
        assert error < 5e-6
        assert step == 8
        assert bits == results[0][2]


def _gan(rank, world_size):
    maker, critic = DDP(seeded(Tower, 24, 2)), DDP(seeded(Tower, 24, 3, seed=1))
    makers, critics = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, critic))
    with attached(maker, "topk:0.1", optimizer=makers) as first, attached(critic, "int4", optimizer=critics) as second:
        for step in range(4):
            x = batch(rank, step, width=24)
            critics.zero_grad()
            loss(critic, x).backward()
            (-0.1 * loss(critic, maker(x).detach())).backward()
            critics.step()
            makers.zero_grad()
            loss(lambda y: critic(maker(y)), x).backward()  # reaches both models; both exchange
            makers.step()
        return digest([*maker.parameters(), *critic.parameters()]), first.state.step, second.state.step


def test_two_optimizers_and_a_backward_through_both_models(ranks):
    results = ranks(2).run(_gan)
    assert results[0] == results[1]
    assert results[0][1:] == (4, 12)


# --- gradients that are dropped, clipped, or always zero --------------------------------------------------------------


def _zero_grad(rank, world_size, to_none, view):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with attached(model, "topk:0.05") as link:
        for step in range(5):
            optimizer.zero_grad(set_to_none=to_none)
            loss(model, batch(rank, step)).backward()
            seen += gradients(model)
            for param in model.parameters():  # nothing that is kept may lie in memory that users write to
                param.grad.mul_(1.0)
            optimizer.step()
            for param in model.parameters():
                param.grad.fill_(7.0)
        return digest([*seen, *model.parameters(), *link.state.worker.values()])


def test_either_kind_of_zero_grad_gives_the_same_bits(ranks):
    results = [ranks(2).run(_zero_grad, to_none, view) for to_none in (True, False) for view in (True, False)]
    assert all(result == results[0] for result in results)


def _clipped(rank, world_size, max_norm):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    norms = []
    with attached(model, "topk:0.05") as link:
        ledger = Ledger(model, link)
        for step in range(4):
            x = batch(rank, step)
            ledger.expect(loss(model.module, x))
            model.zero_grad()
            loss(model, x).backward()
            ledger.got()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        largest = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        return norms, largest, ledger.error(), digest(gradients(model))


def test_clipping_is_of_the_delivered_mean_and_alike_on_all_ranks(ranks):
    results = ranks(2).run(_clipped, 1.0)
    for norms, largest, error, bits in results:
        assert min(norms) > 1.0
        assert largest == pytest.approx(1.0, rel=1e-4)
        assert error < 2e-6  # what was clipped away does not come back as residual
        assert (norms, bits) == (results[0][0], results[0][3])


class ZeroRows(nn.Module):
    """An embedding of which most rows are never looked up, and a layer with inputs that are always zero."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 24)
        self.head = nn.Linear(24, 24)

    def forward(self, x):
        rows = (x[:, :4].abs() * 3).long().clamp(max=7)
        mask = torch.cat([torch.ones(12), torch.zeros(12)])
        return self.head(self.embed(rows).mean(dim=1) * mask) + x


def _zero_rows(rank, world_size, recipe):
    model = DDP(seeded(ZeroRows))
    with attached(model, recipe) as link:
        for step in range(6):
            model.zero_grad()
            loss(model, batch(rank, step, width=24)).backward()
        state = link.state_dict()
        never = [model.module.embed.weight.grad[8:], model.module.head.weight.grad[:, 12:]]
        owed = [state[k]["embed.weight"][8:] for k in ("worker", "owner") if "embed.weight" in state[k]]
        finite = all(bool(t.isfinite().all()) for t in [*gradients(model), *state["worker"].values()])
        return [bool(t.any()) for t in never], any(bool(t.any()) for t in owed), finite, digest(gradients(model))


@pytest.mark.parametrize("recipe", ["int8", "int4", "topk:0.05", "gather/topk:0.05", "lowrank:2", "powersgd:2"])
def test_rows_that_are_always_zero_stay_zero(ranks, recipe):
    results = ranks(2).run(_zero_rows, recipe)
    for moved, owed, finite, bits in results:
        assert finite
        assert bits == results[0][3]
        if "int" in recipe or "topk" in recipe:
            assert moved == [False, False]
            assert not owed


def _vanishing(rank, world_size, recipe, factor):
    model = DDP(seeded(Tower, 24, 2))
    with attached(model, recipe) as link:
        value = factor * loss(model, batch(rank, 0, width=24))
        try:
            value.backward()
        except RuntimeError as error:
            return type(link.error).__name__, str(error)
        return None, ""


@pytest.mark.parametrize("recipe", ["fp16", "dense:fp16"])
def test_gradients_that_come_back_as_zeros_are_an_error(ranks, recipe):
    for kind, message in ranks(2).run(_vanishing, recipe, 1e-12):
        assert kind == LostGradientError.__name__
        assert "rank 0:" in message
        assert "rank 1:" in message
    assert ranks(2).run(_vanishing, recipe, 1.0) == [(None, "")] * 2


@pytest.mark.parametrize("recipe", ["int8", "topk:0.1", "bf16", "dense"])
def test_small_gradients_and_none_at_all_are_not(ranks, recipe):
    assert ranks(2).run(_vanishing, recipe, 1e-12) == [(None, "")] * 2
    assert ranks(2).run(_vanishing, recipe, 0.0) == [(None, "")] * 2


# --- uneven inputs ----------------------------------------------------------------------------------------------------


def _uneven(rank, world_size, recipe):
    """Rank 1 has three batches more; rank 0 keeps it company with zeros, which come on top of what it owes."""
    models = [DDP(seeded(Tower, 24, 3), bucket_cap_mb=0.002) for _ in range(2)]
    start = [p.detach().clone() for p in models[0].parameters()]
    with attached(models[0], recipe) as link:
        for model in models:
            with model.join():
                for step in range(3 + 3 * rank):
                    model.zero_grad()
                    loss(model, batch(rank, step, width=24)).backward()
                    with torch.no_grad():
                        for param in model.parameters():
                            param -= 0.05 * param.grad
        steps = link.state.step
    ours, plain = ([p.detach() for p in model.parameters()] for model in models)
    gap = max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))
    return digest(ours), steps, gap / max(float((b - s).abs().max()) for b, s in zip(plain, start, strict=True))


@pytest.mark.parametrize("recipe", ["dense", "int8", "int4", "topk:0.3", "onebit"])
def test_uneven_inputs_end_with_equal_replicas(ranks, recipe):
    results = ranks(2).run(_uneven, recipe)
    for bits, steps, near in results:
        assert bits == results[0][0]
        assert steps == 6  # a rank without inputs takes part in every exchange
        assert near < {"dense": 1e-6, "int8": 0.02}.get(recipe, 0.5)


def _drained(rank, world_size):
    """What a joined rank owes drains into the steps that the others go on with."""
    model = DDP(seeded(Tower, 24, 2))
    norms = []
    with attached(model, "topk:0.2") as link:

        def measured(*_):
            norms.append(sum(float(r.norm()) ** 2 for r in link.state.worker.values()) ** 0.5)

        with model.join():
            for step in range(2 + 10 * rank):
                model.zero_grad()
                loss(model, batch(rank, step, width=24)).backward()
                if rank == 0:
                    measured()
        measured()
    return norms


def test_what_a_joined_rank_owes_drains(ranks):
    drained, _ = ranks(2).run(_drained)
    assert drained[1] > 0
    assert drained[-1] < 0.05 * drained[1]


# --- batch normalisation and what DDP sends besides -------------------------------------------------------------------


def _buffers(rank, world_size):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 24))
    results = []
    for recipe in ("int8", None):
        model = DDP(copy.deepcopy(inner))
        if recipe is None:
            for step in range(3):
                model(batch(rank, step, width=24)).square().mean().backward()
        else:
            with attached(model, recipe) as link:
                for step in range(3):
                    model(batch(rank, step, width=24)).square().mean().backward()
                left_over = link.stats()["left_over"]
        results.append(digest(b.float() for b in model.buffers()))
    return results, left_over


def test_buffers_of_batch_normalisation_are_ddps_own_and_reported(ranks):
    for (ours, plain), left_over in ranks(2).run(_buffers):
        assert ours == plain
        assert left_over == {"buffers": 4 * 24 + 4 * 24 + 8}


def _said_at_attach(rank, world_size, size, **options):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    log = logging.getLogger("thinwire")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        model = DDP(nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size)), **options)
        with attached(model, "int8") as link:
            return [line for line in lines if "besides" in line[1]], link.stats()["left_over"]
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)


def _said(rank, world_size):
    newer = "forward_sync_buffers" in inspect.signature(DDP.__init__).parameters
    no_buffers = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
    return [
        _said_at_attach(rank, world_size, 8),
        _said_at_attach(rank, world_size, 256, find_unused_parameters=True),
        _said_at_attach(rank, world_size, 8, **no_buffers),
    ]


def test_left_over_traffic_is_said_once_and_louder_where_it_weighs(ranks):
    first, second = ranks(2).run(_said)
    (((level, line),), left), (((quiet, also),), both), (nothing, none) = first
    assert (level, quiet) == ("WARNING", "INFO")
    assert "72 bytes for buffers" in line
    assert "_buffers=False" in line
    assert "16 bytes for unused parameters" in also
    assert left == {"buffers": 72}
    assert both == {"buffers": 2056, "unused parameters": 16}
    assert (nothing, none) == ([], {})
    assert [lines for lines, _ in second] == [[], [], []]


def _rest(rank, world_size):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    try:
        for patterns in ({"layers.0.*": "int8"}, {"layers.0.*": "int8", "*": "dense"}):
            with attached(DDP(seeded(Tower, 24, 2)), patterns):
                pass
        return [line for line in lines if "no pattern" in line]
    finally:
        logging.getLogger("thinwire").removeHandler(handler)


def test_what_no_pattern_matches_is_said_once(ranks):
    (line,), others = ranks(2).run(_rest)
    assert "no pattern matches layers.1.weight and 1 more parameters, 2400 bytes in all" in line
    assert others == []


# --- styles of hooks, groups of one -----------------------------------------------------------------------------------


def _styles(rank, world_size):
    bits = []
    for style in ("attach", "bound method", "state and hook", "wrapper"):
        model = DDP(seeded(Tower), bucket_cap_mb=0.01)
        if style == "attach":
            link = thinwire.attach(model, "topk:0.05", options=ALL)
        else:
            state = hooks.State(model, "topk:0.05", options=ALL)
            link = state.link
            if style == "bound method":
                model.register_comm_hook(None, link.hook)
            elif style == "state and hook":
                model.register_comm_hook(state, hooks.compressed_hook)
            else:  # as Lightning and people's own code wrap hooks

                def hook(state: hooks.State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
                    return hooks.compressed_hook(state, bucket)

                model.register_comm_hook(state, hook)
        bits.append(train(model, rank, range(3)))
        link.close()
    return bits


def test_hooks_may_be_registered_in_every_style_that_torch_accepts(ranks):
    for bits in ranks(2).run(_styles):
        assert bits == [bits[0]] * 4


def _alone(rank, world_size):
    """Every rank trains by itself, over a group of one."""
    own = [dist.new_group([r]) for r in range(world_size)][rank]
    model = DDP(seeded(Tower, 24, 3), process_group=own)
    plain = copy.deepcopy(model.module)
    with attached(model, "int8") as link:
        ledger = [(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
        x = batch(rank, 0, width=24)
        loss(model, x).backward()
        loss(plain, x).backward()
        near = max(float((p.grad - q.grad).abs().max() / q.grad.abs().max()) for p, q in ledger)
        return near, link.stats()["wire_nbytes"], link.plan.world_size


def test_a_group_of_one_in_a_world_of_two(ranks):
    for near, wire_nbytes, world_size in ranks(2).run(_alone):
        assert near < 0.02
        assert wire_nbytes == 0
        assert world_size == 1


class Waves(nn.Module):
    """The same numbers, as complex or as a real view."""

    def __init__(self, real):
        super().__init__()
        value = torch.randn(32, 32, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        self.real = real
        self.wave = nn.Parameter(torch.view_as_real(value).clone() if real else value)

    def forward(self, x):
        wave = torch.view_as_complex(self.wave) if self.real else self.wave
        return (x.to(torch.complex64) @ wave).abs().square().mean()


def _complex(rank, world_size):
    grads = []
    for real in (False, True):
        model = DDP(Waves(real))
        plain = DDP(Waves(real))
        with attached(model, "int8"):
            for each in (model, plain):
                each(batch(rank, 0, width=32)).backward()
        grads.append(
            [
                torch.view_as_real(p.grad.resolve_conj()) if p.is_complex() else p.grad
                for p in (model.module.wave, plain.module.wave)
            ]
        )
    (exact, plain), (near, same) = grads
    return torch.equal(exact, plain), float((near - same).abs().max() / same.abs().max()), bool(plain[..., 1].any())


def test_complex_parameters_and_their_real_view(ranks):
    for exact, near, has_imaginary_part in ranks(2).run(_complex):
        assert exact
        assert 0 < near < 0.02
        assert has_imaginary_part


# --- shapes and strides -----------------------------------------------------------------------------------------------


class Strides(nn.Module):
    """Convolutions of which torch is unsure how they lie in memory, and a transposed matrix."""

    def __init__(self):
        super().__init__()
        self.point, self.depth = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=8)
        self.turned = nn.Parameter(torch.randn(24, 8).t())
        self.to(memory_format=torch.channels_last)

    def forward(self, image):
        x = self.depth(torch.tanh(self.point(image))).mean(dim=(2, 3))
        return (x @ self.turned).square().sum()


def _strides(rank, world_size, recipe, view):
    model = DDP(seeded(Strides), gradient_as_bucket_view=view)
    with attached(model, recipe) as link:
        ledger = Ledger(model, link)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            image = torch.randn(2, 4, 8, 8, generator=generator).to(memory_format=torch.channels_last)
            ledger.expect(model.module(image))
            model.zero_grad()
            model(image).backward()
            ledger.got()
        return ledger.error(), digest(gradients(model))


@pytest.mark.filterwarnings("ignore:Grad strides")
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("recipe", ["int4", "topk:0.1:fp32", "lowrank:1", "powersgd:1"])
def test_layouts_of_which_torch_is_unsure(ranks, recipe, view):
    results = ranks(2).run(_strides, recipe, view)
    assert max(error for error, _ in results) < 5e-6
    assert results[0][1] == results[1][1]


class Scalar(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return (x.mean() * self.gain).sum()


def _scalar(rank, world_size, shape, options):
    model = DDP(Scalar(shape))
    with attached(model, "topk:0.5", options=options):
        model(torch.full((4,), float(rank + 1))).backward()
    return model.module.gain.grad.tolist()


@pytest.mark.parametrize("options", [None, ALL], ids=["thresholds", "all"])
def test_a_model_of_a_single_number(ranks, options):
    assert ranks(2).run(_scalar, (), options) == [1.5, 1.5]
    assert ranks(2).run(_scalar, (1, 1), options) == [[[1.5]], [[1.5]]]


class Skips(nn.Module):
    """A model that uses a layer in its first step only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.first(x) if self.calls > 1 else self.second(self.first(x))


def _ddps_own_errors(rank, world_size):
    said = []
    for recipe in ("topk:0.1", None):
        model = DDP(Skips())
        link = None if recipe is None else thinwire.attach(model, recipe, options=ALL)
        for step in range(2):
            model(batch(rank, step, width=8)).square().mean().backward()
        with pytest.raises(RuntimeError) as raised:
            model(batch(rank, 2, width=8))
        said.append(str(raised.value).split("Since")[0].split("(1)")[0])
        if link is not None:
            link.close()
    return said


def test_models_that_fail_with_ddp_fail_alike(ranks):
    for ours, plain in ranks(2).run(_ddps_own_errors):
        assert ours == plain
        assert "finished reduction" in ours
