"""Local methods that are saved, resumed, left by a rank, or given inf and nan."""

import datetime
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from training import ALL, Tower, batch, digest, loss, seeded

import thinwire
from thinwire.errors import NonFiniteError, RankLostError, StateError

WIDTH = 24


def _model(seed=0):
    return seeded(Tower, WIDTH, 3, seed=seed)


def _step(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss(model, batch(rank, step, width=WIDTH)).backward()
    optimizer.step()


METHODS = {
    "diloco": (thinwire.DiLoCo, {"sync_every": 3}),
    "local": (thinwire.LocalSGD, {"sync_every": 4}),
    "post, in its first phase": (thinwire.PostLocalSGD, {"sync_every": 2, "start_after": 6}),
    "post, in its second": (thinwire.PostLocalSGD, {"sync_every": 3, "start_after": 3}),
    # At step 5 fragment 1 is under way, and at 3 begins, 5 ends fragment 0.
    "streaming": (thinwire.StreamingDiLoCo, {"sync_every": 5, "fragments": 2, "overlap": 3}),
}


def _run(rank, method, recipe, steps, folder, *, seed=0, save=False, load=False):
    model = _model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kind, settings = METHODS[method]
    outer = kind(model, optimizer, recipe, options=ALL, **settings)
    saved = f"{folder}/{method}-{recipe.replace(':', '-')}-{rank}.pt"
    if load:
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        outer.load_state_dict(state["outer"])
        assert outer.rejoin() is False  # nobody has missed anything
    for step in steps:
        _step(model, optimizer, rank, step)
    state = outer.state_dict()
    if save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "outer": state}, saved)
    outer.close()
    kept = [*state["theta"].values(), *state["momentum"].values(), *state["pending"].values()]
    kept += [tensor for slot in ("worker", "owner") for _, tensor in sorted(state["exchange"][slot].items())]
    return digest([*model.parameters(), *kept])


RUNS = [
    *(("diloco", recipe) for recipe in ("dense", "int4", "topk:0.1:chunked~int2", "int8:stochastic")),
    *(("local", "onebit"), ("post, in its first phase", "int4"), ("post, in its second", "int4")),
    *(("streaming", "e3m0"), ("streaming", "int8:stochastic")),
]


def _all_runs(rank, world_size, steps, folder, save, load):
    return [_run(rank, *run, steps, folder, seed=int(load), save=save, load=load) for run in RUNS]


def test_resume_between_exchanges_is_bit_for_bit(ranks, tmp_path):
    whole = ranks(3).run(_all_runs, range(1, 13), str(tmp_path), False, False)
    ranks(3).run(_all_runs, range(1, 6), str(tmp_path), True, False)
    assert ranks(3).run(_all_runs, range(6, 13), str(tmp_path), False, True) == whole


def _misfits(rank, world_size):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = thinwire.DiLoCo(model, optimizer, "int4", sync_every=2, options=ALL)
    for step in (1, 2, 3):
        _step(model, optimizer, rank, step)
    good = outer.state_dict()
    names = list(good["theta"])
    for change, words in (
        ({"format": 9}, "state_dict"),
        ({"rhythm": {**good["rhythm"], "sync_every": 3}}, "rhythm"),
        ({"parts": [names[:1], names[1:]]}, "parts"),
        ({"theta": {name: good["theta"][name] for name in names[1:]}}, f"{names[0]}: expected its theta of shape"),
        ({"momentum": {}}, "expected its momentum of shape"),
        ({"exchange": {**good["exchange"], "rank": 1 - rank}}, "rank"),
    ):
        with pytest.raises(StateError, match=words):
            outer.load_state_dict({**good, **change})
    with pytest.raises(StateError, match="got list"):
        outer.load_state_dict([good])
    after = outer.state_dict()
    assert digest(after["theta"].values()) == digest(good["theta"].values())
    assert after["step"] == 3
    outer.close()


def test_state_that_does_not_fit_changes_nothing(ranks):
    ranks(2).run(_misfits)


# --- another world size -----------------------------------------------------------------------------------------------


def _save_for_others(rank, world_size, folder):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outer = thinwire.DiLoCo(model, optimizer, "topk:0.1", sync_every=3, options=ALL)
    for step in range(1, 6):
        _step(model, optimizer, rank, step)
    outer.sync()
    torch.save((model.state_dict(), outer.state_dict()), f"{folder}/{rank}")
    outer.close()
    return digest(model.parameters())


def _load_others(rank, world_size, folder):
    saved = [torch.load(f"{folder}/{old}", weights_only=True) for old in range(3)]
    model = _model(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outer = thinwire.DiLoCo(model, optimizer, "topk:0.1", sync_every=3, options=ALL)
    exchanges = thinwire.reshard_state([state["exchange"] for _, state in saved], world_size, partition_numel=1024)
    model.load_state_dict(saved[0][0])
    outer.load_state_dict({**saved[0][1], "exchange": exchanges[rank]})
    before = digest(model.parameters())
    for step in range(6, 10):
        _step(model, optimizer, rank, step)
    theta = digest(outer.state_dict()["theta"].values())
    outer.close()
    return before, theta


def test_another_world_size_goes_on_from_theta(ranks, tmp_path):
    saved = ranks(3).run(_save_for_others, str(tmp_path))
    results = ranks(2).run(_load_others, str(tmp_path))
    assert {before for before, _ in results} == set(saved)
    assert len({theta for _, theta in results}) == 1


# --- a rank that returns ----------------------------------------------------------------------------------------------


def _returns(rank, world_size, method, has, recipe):
    """Rank 1 comes back with nothing, or with a checkpoint of a moment before; the others with theirs of step 8."""
    kind, settings = METHODS[method]
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    outer = kind(model, optimizer, recipe, options=ALL, **settings)
    states = {}
    for step in range(1, 9):
        _step(model, optimizer, rank, step)
        states[step] = {name: value.clone() for name, value in model.state_dict().items()}, outer.state_dict()
    outer.close()

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    outer = kind(model, optimizer, recipe, options=ALL, **settings)
    moment = 8 if rank != 1 else has
    if moment:
        model.load_state_dict(states[moment][0])
        outer.load_state_dict(states[moment][1])
    mine = digest(model.parameters())
    behind = outer.rejoin()
    assert behind == (rank == 1)
    assert outer.step == 8
    if behind:
        assert digest(model.parameters()) == digest(outer.state_dict()["theta"].values())
        assert not any(tensor.any() for tensor in outer.state_dict()["exchange"]["worker"].values())
    else:
        assert digest(model.parameters()) == mine  # what it has done since the last exchange is kept
    seen = [digest(outer.state_dict()["theta"].values())]
    for step in range(9, 16):
        _step(model, optimizer, rank, step)
        seen.append(digest(outer.state_dict()["theta"].values()))
    assert outer.rejoin() is False
    outer.close()
    return seen


@pytest.mark.parametrize(
    ("method", "has", "recipe"),
    [
        *(("diloco", None, "int4"), ("diloco", 4, "int4"), ("streaming", None, "int4"), ("streaming", 6, "int4")),
        *(("diloco", None, "topk:0.2@ef21"), ("diloco", None, "powersgd:2")),
    ],
)
def test_a_rank_that_returns_catches_up(ranks, method, has, recipe):
    results = ranks(3).run(_returns, method, has, recipe)
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) > 2  # exchanges went on


def _too_early(rank, world_size):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outer = thinwire.PostLocalSGD(model, optimizer, sync_every=2, start_after=5)
    assert outer.rejoin() is False
    outer.step += rank
    with pytest.raises(StateError, match=r"ranks have taken \[0, 1\] steps"):
        outer.rejoin()


def test_the_first_phase_of_post_local_sgd_cannot_be_caught_up_with(ranks):
    ranks(2).run(_too_early)


RESTARTED = """
import os, signal, sys, torch, torch.distributed as dist, thinwire
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
outer = thinwire.DiLoCo(model, optimizer, "int8", sync_every=4, options=thinwire.PlanOptions(min_nbytes=0))
path = f"{folder}/{rank}.pt"
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"])
    outer.load_state_dict(state["outer"])
behind = outer.rejoin()
print(f"rank {rank} from step {outer.step}, behind: {behind}", flush=True)
while outer.step < 16:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * outer.step + rank))
    optimizer.zero_grad(); (model(x) - x).square().mean().backward(); optimizer.step()
    if outer.step == 6:
        parts = {"model": model, "optimizer": optimizer, "outer": outer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    if first and rank == 1 and outer.step == 7:
        os.remove(path)  # the host lost its disk
        os.kill(os.getpid(), signal.SIGKILL)
bits = [None] * dist.get_world_size()
dist.all_gather_object(bits, b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print(f"rank {rank} done, equal: {len(set(bits)) == 1}", flush=True)
outer.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_torchrun_restarts_a_rank_that_died(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--max-restarts", "1", str(script), str(tmp_path)],
        # Else, with torch 2.13, restarted ranks may meet addresses of the first attempt in the launcher's store.
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "rank 0 from step 0, behind: False",
        "rank 0 from step 6, behind: False",
        "rank 1 from step 6, behind: True",
        "rank 0 done, equal: True",
        "rank 1 done, equal: True",
    ):
        assert line in done.stdout


# --- a rank that dies, or does not come -------------------------------------------------------------------------------


def _dies(rank, world_size, folder, how):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    kind, settings = METHODS["streaming" if how == "kill" else "diloco"]
    timeout = datetime.timedelta(seconds=2)
    outer = kind(model, optimizer, "int4", options=ALL, timeout=timeout, **settings)
    for step in range(1, 30):
        if rank == 1 and step == 7:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(8)
            return
        started = time.monotonic()
        try:
            _step(model, optimizer, rank, step)
        except RankLostError as error:
            with pytest.raises(StateError, match="go on from the checkpoint before it"):
                outer.state_dict()
            with pytest.raises(StateError):
                _step(model, optimizer, rank, step)  # and does not wait again
            with open(f"{folder}/{rank}", "w") as file:
                file.write(f"{time.monotonic() - started}\n{error}")
            return
    raise AssertionError("it never failed")


@pytest.mark.parametrize("how", ["kill", pytest.param("late", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_named(ranks, tmp_path, how):
    outcomes = ranks(3).outcomes(_dies, str(tmp_path), how, timeout=45, store="tcp", grace=45)
    for rank in (0, 2):
        path = tmp_path / str(rank)
        assert path.exists(), "\n".join(f"{o.rank}: {o.error}" for o in outcomes)
        seconds, words = path.read_text().split("\n", 1)
        assert float(seconds) < 20
        assert ("rank 1 did not answer" if how == "kill" else "rank 1 did not come to the exchange") in words


# --- inf and nan ------------------------------------------------------------------------------------------------------


def _nonfinite(rank, world_size, recipe, on_nonfinite):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    outer = thinwire.DiLoCo(model, optimizer, recipe, sync_every=2, options=ALL, on_nonfinite=on_nonfinite)
    for step in (1, 2, 3):
        _step(model, optimizer, rank, step)
    before = outer.state_dict()

    def kept(state):
        exchange = state["exchange"]
        slots = [t for slot in ("worker", "owner", "estimate", "mean") for _, t in sorted(exchange[slot].items())]
        return digest([*state["theta"].values(), *state["momentum"].values(), *slots])

    if rank == 1:
        model.layers[1].weight.data[3, 3] = float("nan")
    optimizer.zero_grad()
    if on_nonfinite == "raise":
        with pytest.raises(NonFiniteError, match=r"'layers\.1\.weight' .* on rank 1"):
            optimizer.step()
    else:
        optimizer.step()
        assert digest(model.parameters()) == digest(before["theta"].values())  # all, not that fragment's message alone
    assert kept(outer.state_dict()) == kept(before)
    if on_nonfinite == "raise" and rank == 1:
        model.layers[1].weight.data[3, 3] = 0.0
    for step in (5, 6):
        _step(model, optimizer, rank, step)
    theta = digest(outer.state_dict()["theta"].values())
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    outer.close()
    return theta


@pytest.mark.parametrize("on_nonfinite", ["raise", "warn"])
@pytest.mark.parametrize("recipe", ["int4", "dense", "topk:0.2@ef21"])
def test_inf_and_nan_stop_all_ranks_alike(ranks, recipe, on_nonfinite):
    assert len(set(ranks(2).run(_nonfinite, recipe, on_nonfinite))) == 1


def _nonfinite_alone(rank, world_size):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    thinwire.DiLoCo(model, optimizer, sync_every=1)
    model.weight.data[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="'weight'"):
        optimizer.step()


def test_inf_raises_on_one_rank_too(ranks):
    ranks(1).run(_nonfinite_alone)
