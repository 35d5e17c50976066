"""Training through real servers: the bits of `TwoShot`, and an error for everybody when anybody dies."""

import contextlib
import functools
import logging
import math
import os
import signal
import threading
import time

import pytest
import torch
from serving import servers
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Ledger, Tower, attached, batch, digest, gradients, loss, seeded, stop_here, train

import thinwire
from thinwire.errors import AttachError, PlanError, RankLostError, ServerError, StateError
from thinwire.lab.ports import reserve_port
from thinwire.server.channel import Channel
from thinwire.server.client import ServerDriver, Servers
from thinwire.server.protocol import Kind

RECIPES = [
    "int8",
    "int8:stochastic",
    "topk:0.05",
    "onebit",
    "topk:0.1+int4",
    "topk:0.05@dgc:0.9",
    "linear:5",
    "natural:3@nag",
]
LIMIT_S = 12.0


def _quick(addresses, **kwargs):
    return Servers(addresses=tuple(addresses), heartbeat_s=0.2, heartbeat_timeout_s=3.0, **kwargs)


# --- the same numbers -----------------------------------------------------------------------------------------------


def _both_ways(rank, world_size, addresses, recipes):
    found = {}
    for recipe in recipes:
        digests = []
        for where in (None, addresses):
            torch.manual_seed(0)
            model = DDP(seeded(Tower), bucket_cap_mb=0.01)
            momentum = 0.0 if "@" in recipe else 0.9
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
            with attached(model, recipe, servers=where) as link:
                first = train(model, rank, range(3), optimizer=optimizer)
                link.stats(reset=True)
                digests.append((first, train(model, rank, [3], optimizer=optimizer)))
                assert link.planned_nbytes() == round(link.stats()["wire_nbytes"])
        found[recipe] = digests
    return found


@pytest.mark.parametrize(
    ("world_size", "num_servers"),
    [(3, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 1), (2, 3)))],
)
def test_training_through_servers_is_two_shot_to_the_bit(ranks, world_size, num_servers):
    with servers(world_size, num_servers) as started:
        addresses = [server.address for server in started]
        results = ranks(world_size).run(_both_ways, addresses, RECIPES, timeout=100)
        assert [server.output() for server in started] == [""] * num_servers
    assert results == [results[0]] * world_size
    for recipe, (plain, served) in results[0].items():
        assert plain == served, recipe


def _clan(rank, world_size, addresses):
    """Train by CLAN without servers, with them, and by settings that name the exchange through them."""
    exchange = thinwire.PushPull(up=thinwire.OneBit(), down=thinwire.OneBit(), feedback=thinwire.ErrorFeedback())
    digests = []
    for recipe, where in (("onebit", None), ("onebit", addresses), (exchange, addresses)):
        model = DDP(seeded(Tower), bucket_cap_mb=0.01)
        optimizer = thinwire.optim.LANS(model.parameters(), lr=0.01)
        link = thinwire.clan(model, recipe, optimizer=optimizer, options=ALL, servers=where)
        digests.append(train(model, rank, range(4), optimizer=optimizer))
        link.close()
    return digests


def test_clan_through_servers_is_clan_between_ranks_to_the_bit(ranks):
    with servers(2, 2) as started:
        results = ranks(2).run(_clan, [server.address for server in started])
    assert results == [[results[0][0]] * 3] * 2


class _Mixed(nn.Module):
    """Parameters of a dtype that no compressor takes travel by all-reduce beside the others."""

    def __init__(self):
        super().__init__()
        self.tower, self.exact = Tower(), nn.Linear(48, 48, dtype=torch.float64)

    def forward(self, x):
        return self.exact(self.tower(x).double()).float()


def _mixed_and_scaled(rank, world_size, addresses):
    digests = []
    for where in (None, addresses):
        model = DDP(seeded(_Mixed), bucket_cap_mb=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with attached(model, "topk:0.05", servers=where, scaler=scaler) as link:
            seen = []
            for step in range(6):
                optimizer.zero_grad()
                x = batch(rank, step)
                if step == 2 and rank == world_size - 1:
                    x[0, 0] = float("inf")
                scaler.scale(loss(model, x)).backward()
                seen += gradients(model)
                scaler.step(optimizer)
                scaler.update()
            assert link.skipped_steps == 1
        digests.append(digest([*(g.nan_to_num() for g in seen), *model.parameters()]))
    return digests


def test_other_dtypes_and_a_skipped_step(ranks):
    with servers(2, 2) as started:
        for plain, served in ranks(2).run(_mixed_and_scaled, [server.address for server in started]):
            assert plain == served


def _uncompressed(rank, world_size, addresses):
    """Dense phases of a schedule go through owners without servers, too; `dense` alone is DDP's all-reduce there."""
    schedule = "dense until 2 then topk:0.05 until 4 then int8"
    found = []
    for recipe, served in ((schedule, schedule), ("identity", "dense"), ("fp16", "dense:fp16")):
        digests = []
        for where, one in ((None, recipe), (addresses, served)):
            model = DDP(seeded(Tower), bucket_cap_mb=0.01)
            with attached(model, one, servers=where):
                digests.append(train(model, rank, range(6)))
        found.append(digests)
    return found


def test_dense_steps_through_servers_sum_in_the_order_of_ranks(ranks):
    with servers(3) as started:
        results = ranks(3).run(_uncompressed, [server.address for server in started])
    assert results == [results[0]] * 3
    assert all(plain == served for plain, served in results[0])


def _resumed(rank, world_size, addresses, recipe):
    """Train six steps; and again three, then three more from the state, through more servers."""
    ends = []
    for pieces in ([range(6)], [range(3), range(3, 6)]):
        module, state = seeded(Tower), None
        for steps, where in zip(pieces, (addresses[:1], addresses[1:]), strict=False):
            model = DDP(module, bucket_cap_mb=0.01)
            with attached(model, recipe, servers=where) as link:
                if state is not None:
                    with pytest.raises(StateError, match="that servers keep residuals of, got 'another' in one"):
                        link.load_state_dict({**state, "owner": {**state["owner"], "another": torch.zeros(1)}})
                    link.load_state_dict(state)
                    again = link.state_dict()
                    for slot in ("worker", "owner"):
                        assert all(torch.equal(again[slot][name], t) for name, t in state[slot].items())
                train(model, rank, steps, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
                state = link.state_dict()
        ends.append(digest(module.parameters()))
        owed = sum(float(t.abs().sum()) for t in state["owner"].values())
        assert (owed > 0) == ("stochastic" not in recipe)
    return ends


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks):
    with servers(2, 1) as one, servers(2, 2) as two:
        addresses = [server.address for server in (*one, *two)]
        for recipe in ("topk:0.05", "int8:stochastic@nag:0.5"):
            for whole, resumed in ranks(2).run(_resumed, addresses, recipe):
                assert whole == resumed


def _overflown(rank, world_size, addresses, bad):
    """Train four steps, and again in two pieces; in one step a part of a mean is too large for its dtype."""
    ends = []
    for pieces in ([range(4)], [range(bad + 1), range(bad + 1, 4)]):
        module, state = seeded(Tower), None
        for steps in pieces:
            model = DDP(module, bucket_cap_mb=0.01)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with attached(model, "int8+fp16@ef", servers=addresses, on_nonfinite="warn") as link:
                if state is not None:
                    link.load_state_dict(state)
                for step in steps:
                    before = link.state_dict()
                    optimizer.zero_grad()
                    spike = 1e6 * module.layers[1].weight[0, 0] if step == bad else 0.0
                    (loss(model, batch(rank, step)) + spike).backward()
                    if step != bad:
                        optimizer.step()
                        continue
                    assert not all(bool(g.isfinite().all()) for g in gradients(model))
                    if len(pieces) == 1:
                        continue  # DDP makes other buckets after the first step
                    names = [name for name in before["owner"] if name.startswith("layers.1.weight")]
                    after = link.state_dict()
                    for slot in ("worker", "owner"):
                        assert all(torch.equal(after[slot][name], before[slot][name]) for name in names)
                state = link.state_dict()
        ends.append(digest([*module.parameters(), *state["worker"].values(), *state["owner"].values()]))
        assert sum(float(t.abs().sum()) for t in state["owner"].values()) > 0
    return ends


def test_a_mean_that_came_to_nothing_counts_at_no_server(ranks):
    """Others of the same message were fine at another server, before buckets change and before a state is saved."""
    with servers(2, 2) as started:
        for bad in (0, 1):
            for whole, resumed in ranks(2).run(_overflown, [server.address for server in started], bad):
                assert whole == resumed


def _gone_when_asked(rank, world_size, addresses):
    def gone(messages, step):
        raise ServerError("gone")

    model = DDP(seeded(Tower))
    with attached(model, "int8+fp16@ef", servers=addresses, on_nonfinite="warn") as link:
        link._served.take_back = gone
        with pytest.raises(RuntimeError, match="ServerError: gone"):  # as torch hands on what a hook raises
            (loss(model, batch(rank, 0)) + 1e6 * model.module.layers[1].weight[0, 0]).backward()
        return str(link.error)


def test_a_server_that_is_gone_when_it_should_take_back_ends_the_run(ranks):
    with servers(1) as started:
        assert ranks(1).run(_gone_when_asked, [started[0].address]) == ["gone"]


def _closed(rank, world_size, recipe, addresses):
    model = DDP(seeded(Tower))
    with attached(model, recipe, servers=addresses) as link:
        train(model, rank, range(2))
        return link, link.state_dict()


def _saved_too_late(rank, world_size, addresses):
    link, _ = _closed(rank, world_size, "topk:0.05", addresses)
    with pytest.raises(ServerError, match=r"the link is closed: .*call state_dict\(\) and .* before close\(\)"):
        link.state_dict()
    for recipe, where in (("int8:stochastic", addresses), ("topk:0.05", None)):  # servers owe nothing
        link, state = _closed(rank, world_size, recipe, where)
        assert link.state_dict().keys() == state.keys()


def test_what_servers_owe_cannot_be_asked_for_once_the_link_is_closed(ranks):
    with servers(1, 2) as started:
        ranks(1).run(_saved_too_late, [server.address for server in started])


def _conserved(rank, world_size, addresses, method, recipe):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    optimizer = thinwire.optim.LANS(model.parameters(), lr=0.01)
    link = getattr(thinwire, method)(model, recipe, servers=addresses, options=ALL)
    ledger = Ledger(model, link)
    for step in range(4):
        ledger.expect(loss(model.module, batch(rank, step)))
        optimizer.zero_grad()
        loss(model, batch(rank, step)).backward()
        ledger.got()
        optimizer.step()
    error = ledger.error()
    link.close()
    return error


@pytest.mark.parametrize(
    ("method", "recipe", "world_size"),
    [
        ("clan", "onebit", 3),
        *(
            pytest.param(method, recipe, world_size, marks=pytest.mark.slow)
            for method, recipe in (("attach", "topk:0.05"), ("attach", "onebit"), ("clan", "topk"))
            for world_size in (1, 2, 3, 4, 5)
        ),
    ],
)
def test_what_is_delivered_and_owed_is_what_was_given(ranks, method, recipe, world_size):
    """Algorithm 4 of the CLAN paper with real servers, uneven partitions."""
    with servers(world_size, 2) as started:
        addresses = [server.address for server in started]
        for error in ranks(world_size).run(_conserved, addresses, method, recipe):
            assert error < 1e-5


# --- a worker that is late ------------------------------------------------------------------------------------------

LATE = range(2, 5)  # steps; after the first of all DDP makes its buckets anew, which takes all ranks


def _take_late(rank, folder, how, patch):
    """Have rank 1 take the means of a step only once rank 0 has pushed in the next; return where to note the step.

    If it `reads` late they wait in the sockets; if it `asks` late the servers have to keep them.
    """
    now, send, take_all = [0], Channel.send, Channel._take_all

    def is_late():
        return now[0] in LATE and not os.path.exists(f"{folder}/{now[0] + 1}")

    def send_and_note(channel, server, kind, **what):
        send(channel, server, kind, **what)
        if kind == Kind.PUSH:
            open(f"{folder}/{now[0]}", "w").close()

    def send_and_ask_late(channel, server, kind, **what):
        if kind != Kind.PUSH:
            return send(channel, server, kind, **what)
        send(channel, server, kind, **{**what, "flags": 0})
        ask = functools.partial(send, channel, server, Kind.PULL, content=what["content"], round_=what["round_"])
        return threading.Thread(target=_once, args=(is_late, ask)).start()

    def take_late(channel, server, socket):
        if is_late():
            time.sleep(0.005)  # the thread goes on: pushes have to leave
        else:
            take_all(channel, server, socket)

    if rank == 0:
        patch.setattr(Channel, "send", send_and_note)
    elif rank == 1 and how == "asks":
        patch.setattr(Channel, "send", send_and_ask_late)
    elif rank == 1:
        patch.setattr(Channel, "_take_all", take_late)
    return now


def _once(is_late, ask):
    while is_late():
        time.sleep(0.005)
    ask()


def _with_a_late_one(rank, world_size, addresses, folder, how):
    digests = []
    for where in (None, addresses):
        model, seen = DDP(seeded(Tower), bucket_cap_mb=0.01), []
        with pytest.MonkeyPatch.context() as patch, attached(model, "topk:0.05", servers=where) as link:
            now = _take_late(rank, folder, how, patch)
            for step in range(LATE.stop + 1):
                now[0] = step
                model.zero_grad()
                loss(model, batch(rank, step)).backward()
                seen += gradients(model)
            assert where is None or not link._driver.refused
        digests.append(digest(seen))
    return digests


@pytest.mark.parametrize("how", ["asks", pytest.param("reads", marks=pytest.mark.slow)])
def test_a_worker_a_round_ahead_changes_nothing_for_a_late_one(ranks, tmp_path, how):
    with servers(2) as (server,):
        results = ranks(2).run(_with_a_late_one, [server.address], str(tmp_path), how, timeout=100)
        assert server.output() == ""  # nothing was refused
    assert results == [[results[0][0]] * 2] * 2
    assert all((tmp_path / str(step + 1)).exists() for step in LATE)


# --- deaths ---------------------------------------------------------------------------------------------------------


def _train_until_it_fails(rank, world_size, addresses, folder, victim, stage, pid=None):
    """Train until this rank is told that a worker, or a server, is lost; rank 0 kills `pid` between two rounds."""
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with attached(model, "topk:0.05", servers=_quick(addresses)) as link:
        for step in range(1000):
            if step == 3 and rank == victim:
                _die_at(stage)
            if step == 3 and pid is not None:
                torch.distributed.barrier()  # all have their means
                if rank == 0:
                    os.kill(pid, signal.SIGKILL)
            started = time.monotonic()
            try:
                loss(model, batch(rank, step)).backward()
            except RuntimeError as error:
                seconds = time.monotonic() - started
                with open(f"{folder}/{rank}", "w") as file:
                    file.write(f"{seconds}\n{type(link.error).__name__}\n{error}")
                os._exit(0)  # what becomes of DDP with a rank lost is not tested here
            time.sleep(0.02)
    raise AssertionError("it never failed")


def _die_at(stage):
    """Kill this process, or let it hang, at the second time it comes to a stage of a round."""
    calls = 0

    def trap(method):
        def trapped(*args):
            nonlocal calls
            calls += 1
            if calls == 2:
                if stage in ("pull", "stopped"):  # its push has left, and it waits for the mean
                    method(*args)
                    time.sleep(0.2)
                if stage == "stopped":
                    stop_here()
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args)

        return trapped

    if stage == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    elif stage == "after":
        ServerDriver._finish = trap(ServerDriver._finish)
    else:
        ServerDriver._push_and_pull = trap(ServerDriver._push_and_pull)


def _stories(folder, survivors):
    """Return what survivors say, who must not have waited for long."""
    stories = {}
    for rank in survivors:
        seconds, kind, message = (folder / str(rank)).read_text().split("\n", 2)
        assert float(seconds) < LIMIT_S
        stories[rank] = (kind, message)
    return stories


@pytest.mark.parametrize(
    "stage",
    [
        "push",
        *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("before", "pull", "after", "stopped")),
    ],
)
def test_a_worker_that_dies_is_named(ranks, tmp_path, stage):
    with servers(3, 2, "--heartbeat-timeout", "3") as started:
        addresses = [server.address for server in started]
        ranks(3).outcomes(_train_until_it_fails, addresses, str(tmp_path), 1, stage, timeout=60, grace=LIMIT_S)
    for kind, message in _stories(tmp_path, (0, 2)).values():
        assert kind == "RankLostError"
        assert "worker 1 said nothing for 3 s" in message


@pytest.mark.parametrize(
    "stage",
    [
        "pushed",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("push", "encode", "encoded", "answered", "between")),
    ],
)
def test_a_server_that_dies_is_an_error_on_all_workers(ranks, tmp_path, stage):
    """Whatever of a round has come to it; `dying_server` says what the stages are."""
    between = stage == "between"
    with servers(2, 2, "--heartbeat-timeout", "3", dying="" if between else stage) as started:
        addresses = [server.address for server in started]
        pid = started[1].process.pid if between else None
        ranks(2).outcomes(_train_until_it_fails, addresses, str(tmp_path), None, stage, pid, timeout=60, grace=LIMIT_S)
        assert started[1].process.wait(5) == -signal.SIGKILL
    stories = _stories(tmp_path, (0, 1))
    assert {kind for kind, _ in stories.values()} <= {"ServerError", "RankLostError"}
    assert any("server 1 at tcp://127.0.0.1" in message for _, message in stories.values())
    # One may hear first that the other gave up, and why.
    assert all("server 1" in message and "said nothing for 3 s" in message for _, message in stories.values())


def _go_on_without(rank, world_size, addresses, folder):
    model, log = DDP(seeded(Tower), bucket_cap_mb=0.01), logging.FileHandler(f"{folder}/log-{rank}")
    logging.getLogger("thinwire").addHandler(log)
    with attached(model, "identity until 4 then int8", servers=_quick(addresses)) as link:
        for step in range(6):
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model.zero_grad()
            loss(model, batch(rank, step)).backward()
        assert link.stats()["num_present"] == 2
    torch.save(gradients(model), f"{folder}/{rank}")
    os._exit(0)


@pytest.mark.slow
def test_those_present_go_on_if_asked(ranks, tmp_path):
    with servers(3, 1, "--heartbeat-timeout", "2", "--on-worker-loss", "continue") as started:
        ranks(3).outcomes(_go_on_without, [started[0].address], str(tmp_path), timeout=60, grace=LIMIT_S + 10)
        assert "worker 1 said nothing for 2 s" in started[0].output()
    for rank in (0, 2):  # once, although more than one step went on without it
        assert (tmp_path / f"log-{rank}").read_text().count("from step 3 on the mean is over 2 of 3 ranks") == 1
    first, second = (torch.load(tmp_path / str(rank)) for rank in (0, 2))
    model, means = seeded(Tower), []
    for rank in (0, 2):
        model.zero_grad()
        loss(model, batch(rank, 5)).backward()
        means.append(gradients(model))
    for ours, theirs, *local in zip(first, second, *means, strict=True):
        assert torch.equal(ours, theirs)
        mean = sum(local) / 2
        assert (ours - mean).abs().max() <= 0.02 * mean.abs().max()


def _one_step_more(rank, world_size, addresses):
    """Rank 1 has no further batch, and closes its link when rank 0 has pushed all that it has, in a new phase."""
    model, present = DDP(seeded(Tower), bucket_cap_mb=0.01), []
    with attached(model, "identity until 3 then int8", servers=_quick(addresses)) as link:
        for step in range(3):
            loss(model, batch(rank, step)).backward()
            present.append(link.stats()["num_present"])
        if rank == 1:
            time.sleep(1.0)
            return "", 0.0, present
        model.zero_grad()
        started, message = time.monotonic(), ""
        try:
            loss(model, batch(rank, 3)).backward()
            present.append(link.stats()["num_present"])
            link.load_state_dict(link.state_dict())
            loss(model, batch(rank, 4)).backward()
        except RuntimeError as error:
            message = f"{type(link.error).__name__}: {error}"
    return message, time.monotonic() - started, present


@pytest.mark.parametrize("on_worker_loss", ["fail", "continue"])
def test_a_worker_that_closes_its_link_while_others_wait_is_named_at_once(ranks, on_worker_loss):
    with servers(2, 2, "--on-worker-loss", on_worker_loss) as started:
        addresses = [server.address for server in started]
        (message, seconds, present), _ = ranks(2).run(_one_step_more, addresses)
        logs = [server.output() for server in started]
    assert seconds < LIMIT_S
    assert all("worker 1 closed its link while others go on" in log for log in logs)
    if on_worker_loss == "fail":
        assert "RankLostError" in message
        assert "worker 1 closed its link while others go on" in message
    else:
        assert present == [2, 2, 2, 1]
        assert "RankLostError: step 4: state was loaded" in message
        assert "servers go on with 1 of 2 ranks" in message


def _needs_all(rank, world_size, addresses):
    for make, every, match in (
        (Tower, 2, "check_replicas_every asks all ranks and would wait for one that is lost"),
        (_Mixed, 0, r"exact\..* is of torch.float64, which .* expected servers with --on-worker-loss fail"),
    ):
        with pytest.raises(AttachError, match=match):
            thinwire.attach(DDP(seeded(make)), "int8", servers=addresses, check_replicas_every=every)


def test_what_takes_all_ranks_is_refused_where_servers_go_on_without_some(ranks):
    with servers(2, 1, "--on-worker-loss", "continue") as started:
        ranks(2).run(_needs_all, [started[0].address])


def _survive(rank, world_size, folder, port):
    """Lose the only server in the fourth step, attach to a new one, and go on with what this worker kept."""
    from serving import start

    address = f"tcp://127.0.0.1:{port}"
    server = start(world_size, bind=address) if rank == 0 else None
    model, link, kept, losses = DDP(seeded(Tower), bucket_cap_mb=0.01), None, {}, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    link = thinwire.attach(model, "topk:0.05", servers=_quick([address]), options=ALL)
    for step in range(6):
        for attempt in range(2):
            kept[attempt] = digest(t for _, t in sorted(link.state_dict()["worker"].items()))
            optimizer.zero_grad()
            value = loss(model, batch(rank, step))
            if (step, attempt) == (3, 0):
                torch.distributed.barrier()  # both have their state
                if server is not None:
                    server.kill()
            try:
                value.backward()
                break
            except RuntimeError:
                assert (step, attempt) == (3, 0)
                assert isinstance(link.error, ServerError | RankLostError)
                state = link.state_dict()
                assert state["step"] == 3
                assert digest(t for _, t in sorted(state["worker"].items())) == kept[0]
                assert sum(float(t.abs().sum()) for t in state["worker"].values()) > 0
                if server is not None:
                    server = start(world_size, bind=address)
                model = DDP(model.module, bucket_cap_mb=0.01)
                link = thinwire.attach(model, "topk:0.05", servers=_quick([address]), options=ALL)
                link.load_state_dict(state)
                assert digest(t for _, t in sorted(link.state_dict()["worker"].items())) == kept[0]
        losses.append(float(value.detach()))
        optimizer.step()
    link.close()
    torch.distributed.barrier()  # the other one may still be pulling
    if server is not None:
        server.kill()
    return digest(model.parameters()), losses


def test_a_server_is_started_again_from_what_workers_kept(ranks, tmp_path):
    port = reserve_port()
    (first, losses), (second, _) = ranks(2).run(_survive, str(tmp_path), port)
    assert first == second
    assert len(losses) == 6
    assert all(math.isfinite(value) for value in losses)


# --- soak -----------------------------------------------------------------------------------------------------------


def _resident_nbytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _soak(rank, world_size, addresses, pids, seconds):
    """Train for so long; return the steps, and what the servers and this worker held at some moments."""
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    steps, held, started = 0, [], time.monotonic()
    with attached(model, "topk:0.05", servers=addresses) as link:
        going = torch.ones(1)
        while going:
            for _ in range(50):
                model.zero_grad()
                loss(model, batch(rank, steps)).backward()
                steps += 1
            held.append([_resident_nbytes(pid) for pid in (*pids, os.getpid())])
            going = torch.tensor(float(time.monotonic() - started < seconds))
            torch.distributed.broadcast(going, 0)
        assert link.error is None
    return steps, held, digest(gradients(model))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_stays_flat(ranks):
    """As long as THINWIRE_SOAK_S says."""
    seconds = float(os.environ.get("THINWIRE_SOAK_S", "60"))
    with servers(2, 2) as started:
        addresses, pids = [server.address for server in started], [server.process.pid for server in started]
        results = ranks(2).run(_soak, addresses, pids, seconds, timeout=seconds + 120)
        assert [server.output() for server in started] == ["", ""]
    steps, _, first = results[0]
    assert all((steps, first) == (other_steps, other) for other_steps, _, other in results)
    for _, held, _ in results:
        middle, last = held[len(held) // 4], held[-1]
        print(f"{steps} steps; resident bytes at a quarter {middle}, at the end {last}")
        assert all(after - before < 8 << 20 for before, after in zip(middle, last, strict=True))


# --- attach ---------------------------------------------------------------------------------------------------------


def _refused(rank, world_size, addresses):
    for where, error, match in (
        (
            _quick(["tcp://127.0.0.1:9"], connect_timeout_s=1.0),
            (ServerError, PlanError),
            "expected a welcome within 1 s",
        ),
        (_quick([*addresses, *addresses[:0]]), (PlanError,), "expected 3 workers and server 0 of 1, got a worker of 2"),
    ):
        model = DDP(seeded(Tower))
        with pytest.raises(error, match=match):
            thinwire.attach(model, "int8", servers=where)
    for recipe in ("powersgd:4", "gather/int8", "global:8"):
        with pytest.raises(PlanError, match="expected a recipe of the two-shot exchange"):
            thinwire.attach(DDP(seeded(Tower, 256)), recipe, servers=addresses)
    with pytest.raises(ServerError, match="expected an address such as"):
        thinwire.attach(DDP(seeded(Tower)), "int8", servers=["10.0.0.1:5555"])
    with pytest.raises(ServerError, match="is another machine"):
        thinwire.attach(DDP(seeded(Tower)), "int8", servers=["tcp://10.0.0.1:5555"])
    return True


def test_what_cannot_be_attached(ranks):
    with servers(3) as started:
        assert ranks(2).run(_refused, [started[0].address]) == [True, True]


# --- keys -----------------------------------------------------------------------------------------------------------


def _train_with_keys(rank, world_size, addresses, keys):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    with attached(model, "int8", servers=addresses, keys=keys):
        return train(model, rank, range(3))


def _without_keys(rank, world_size, address, keys):
    """1,000 connections without a key, or with one that is not known, say hello; none may get an answer."""
    import zmq

    from thinwire.server.protocol import Hello, Kind
    from thinwire.wire import Frame

    context, sockets, monitors = zmq.Context(), [], []
    context.set(zmq.MAX_SOCKETS, 2000)
    hello = Frame(kind=Kind.HELLO, session=1, payload=Hello(0, 1, 0, 1, "p").pack())
    for i in range(1000):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if i % 2:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = keys
        if i % 10 < 2:  # of both kinds
            monitors.append(socket.get_monitor_socket(zmq.EVENT_CONNECTED))
        socket.connect(address)
        with contextlib.suppress(zmq.Again):  # turned away already
            socket.send_multipart([hello.header(), bytes(hello.payload)], flags=zmq.NOBLOCK)
        sockets.append(socket)
    time.sleep(2.0)
    answered = sum(bool(socket.poll(0)) for socket in sockets)
    assert all(monitor.poll(5000) for monitor in monitors)  # it was there
    for socket in (*monitors, *sockets):
        socket.close()
    context.term()
    return answered


def _with_other_keys(rank, world_size, addresses, keys):
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"server 0 at .* turned this worker away: expected keys that it knows"):
        thinwire.attach(DDP(seeded(Tower)), "int8", servers=addresses, keys=keys)
    return time.monotonic() - began


def test_a_worker_whose_keys_are_not_known_is_told_so(ranks, tmp_path):
    from thinwire.server.keys import make_keys

    make_keys(tmp_path / "theirs")
    make_keys(tmp_path / "others")
    mixed = tmp_path / "others/worker"  # knows the server's key; the server knows none of these
    (mixed / "server.public").write_bytes((tmp_path / "theirs/worker/server.public").read_bytes())
    with servers(1, 1, "--keys", str(tmp_path / "theirs/server")) as started:
        (seconds,) = ranks(1).run(_with_other_keys, [started[0].address], str(mixed))
    assert seconds < 20  # it would wait 60 s for a welcome


def test_only_who_has_a_key_gets_anything(ranks, tmp_path):
    from thinwire.server.keys import make_keys

    make_keys(tmp_path)
    assert (tmp_path / "worker/worker.secret").stat().st_mode & 0o077 == 0
    with pytest.raises(ServerError, match="expected no keys there"):
        make_keys(tmp_path)
    with servers(1, 1, "--keys", str(tmp_path / "server")) as started:
        address = started[0].address
        server_key = (tmp_path / "server/server.public").read_bytes().strip()
        assert ranks(1).run(_without_keys, address, server_key) == [0]
        first = ranks(1).run(_train_with_keys, [address], str(tmp_path / "worker"))
        assert "unknown peer" not in started[0].output()  # none of it came through
    with servers(1) as started:
        assert ranks(1).run(_train_with_keys, [started[0].address], None) == first
