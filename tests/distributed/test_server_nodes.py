"""Nodes of several ranks before real servers: the bits of `Hierarchical`, bytes, restarts, deaths at every stage."""

import os
import re
import signal
import time

import pytest
import torch
from serving import servers
from torch.nn.parallel import DistributedDataParallel as DDP
from training import ALL, Tower, attached, batch, digest, gradients, loss, seeded, stop_here, train

import thinwire
from thinwire import PlanOptions
from thinwire.aggregators import Message
from thinwire.errors import AttachError, PlanError, RankLostError, RecipeError
from thinwire.server.client import ServerDriver, Servers
from thinwire.server.node import NodeLanes

QUICK = ["hier/topk:0.05", "hier/identity until 1 then hier/int8:stochastic"]
MORE = ["hier/int8", "hier/onebit", "hier/linear:5"]
LIMIT_S = 12.0


def _both_ways(rank, world_size, addresses, nodes, recipes):
    found = {}
    for recipe in recipes:
        digests = []
        for where in (None, addresses):
            torch.manual_seed(0)
            model = DDP(seeded(Tower), bucket_cap_mb=0.01)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            with attached(model, recipe, nodes=nodes, servers=where) as link:
                first = train(model, rank, range(3), optimizer=optimizer)
                link.stats(reset=True)
                digests.append((first, train(model, rank, [3], optimizer=optimizer)))
                assert link.planned_nbytes() == round(link.stats()["wire_nbytes"])
                assert link.codec_seconds() > 0
        found[recipe] = digests
    return found


@pytest.mark.parametrize(
    ("nodes", "transport", "recipes"),
    [
        ((2, 1), "mesh", QUICK),
        pytest.param((2, 1), "mesh", MORE, marks=pytest.mark.slow),
        pytest.param((1, 3), "mesh", QUICK, marks=pytest.mark.slow),
        pytest.param((2, 2), "gloo", QUICK, marks=pytest.mark.slow),
    ],
)
def test_training_through_servers_is_hierarchical_to_the_bit(ranks, nodes, transport, recipes):
    world_size = sum(nodes)
    with servers(world_size, 2) as started:
        addresses = [server.address for server in started]
        results = ranks(world_size).run(_over, transport, addresses, nodes, recipes, timeout=100)
        assert [server.output() for server in started] == ["", ""]
    assert results == [results[0]] * world_size
    for recipe, (plain, served) in results[0].items():
        assert plain == served, recipe


def _over(rank, world_size, transport, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THINWIRE_TRANSPORT", transport)
        return _both_ways(rank, world_size, *args)


def _memory(rank, world_size, addresses):
    found = []
    for recipe, nodes in (("onebit", None), ("hier/int4", 2)):
        model = DDP(seeded(Tower, 64, 24))
        options = PlanOptions(min_nbytes=0, partition_numel=1024, message_nbytes=16384)
        with attached(model, recipe, options=options, nodes=nodes, servers=addresses) as link:
            for step in range(3):
                loss(model, batch(rank, step, width=64)).backward()
            stats, plan = link.stats(), link.plan
            found.append((stats["residual_nbytes"], plan.residual_nbytes(rank), stats["work_nbytes"]))
            found[-1] += (plan.work_nbytes(rank), plan.worker_nbytes, str(plan))
    return found


def test_memory_is_what_the_plan_states(ranks):
    """Copies of all residuals are kept until the step is over, so that it can be undone if servers are lost."""
    with servers(2, 1) as (server,):
        for found in ranks(2).run(_memory, [server.address]):
            for kept, claimed, work, most, copies, said in found:
                assert kept == claimed == copies
                assert copies < work <= 1.05 * most
                assert "with copies of all residuals during a step" in said


def _resumed_and_scaled(rank, world_size, addresses):
    """Train six steps, of which one is skipped; and again, through other servers from the fourth on."""
    ends = []
    for pieces in ([range(6)], [range(3), range(3, 6)]):
        module, state, scale = seeded(Tower), None, None
        for steps, where in zip(pieces, (addresses[:1], addresses[1:]), strict=False):
            model = DDP(module, bucket_cap_mb=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            if scale is not None:
                scaler.load_state_dict(scale)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with attached(model, "hier:fp16/topk:0.05", nodes=(2, 1), servers=where, scaler=scaler) as link:
                if state is not None:
                    link.load_state_dict(state)
                for step in steps:
                    optimizer.zero_grad()
                    x = batch(rank, step)
                    if step == 1 and rank == 1:
                        x[0, 0] = float("inf")
                    scaler.scale(loss(model, x)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                assert link.skipped_steps == (1 in steps)
                state, scale = link.state_dict(), scaler.state_dict()
        ends.append(digest(module.parameters()))
    assert state is not None
    owed = [sum(float(t.abs().sum()) for t in state[slot].values()) for slot in ("worker", "owner")]
    assert min(owed) > 0  # also at rank 1, of what it rounds for its leader
    return ends


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks):
    with servers(3, 1) as one, servers(3, 2) as two:
        addresses = [server.address for server in (*one, *two)]
        results = ranks(3).run(_resumed_and_scaled, addresses)
    assert results == [[results[0][0]] * 2] * 3


# --- deaths ---------------------------------------------------------------------------------------------------------


def _train_until_it_fails(rank, world_size, addresses, nodes, folder, victim, stage):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    where = Servers(addresses=tuple(addresses), heartbeat_s=0.2, heartbeat_timeout_s=3.0)
    with attached(model, "hier/topk:0.05", nodes=nodes, servers=where) as link:
        for step in range(1000):
            if step == 3 and rank == victim:
                _die_at(stage)
            started = time.monotonic()
            try:
                loss(model, batch(rank, step)).backward()
            except RuntimeError as error:
                with open(f"{folder}/{rank}", "w") as file:
                    file.write(f"{time.monotonic() - started}\n{type(link.error).__name__}\n{error}")
                os._exit(0)  # what becomes of DDP with a rank lost is not tested here
            time.sleep(0.02)
    raise AssertionError("it never failed")


def _die_at(stage):
    """Kill this process, let it hang or raise, at the second time it comes to a stage of a round."""
    calls = 0

    def trap(kind, name, wanted=lambda *_: True):
        method = getattr(kind, name)

        def trapped(*args):
            nonlocal calls
            calls += wanted(*args)
            if calls == 2 and stage == "raised":
                raise MemoryError("of this rank")
            if calls == 2:
                if stage == "pull":  # its push has left, and it waits for the mean
                    method(*args)
                    time.sleep(0.2)
                if stage == "stopped":
                    stop_here()
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args)

        setattr(kind, name, trapped)

    match stage:
        case "before":
            os.kill(os.getpid(), signal.SIGKILL)
        case "gather" | "spread":
            trap(NodeLanes, "perform", lambda node, _, lane: lane is node.lane(0 if stage == "gather" else 3))
        case "push" | "pull":
            trap(ServerDriver, "_push_and_pull")
        case "after":
            trap(ServerDriver, "_finish")
        case "stopped":
            trap(ServerDriver, "_advance")
        case "raised":
            trap(Message, "encode")


def _stories(folder, survivors):
    """Return what survivors say, who must not have waited for long."""
    stories = []
    for rank in survivors:
        seconds, kind, message = (folder / str(rank)).read_text().split("\n", 2)
        assert float(seconds) < LIMIT_S
        stories.append((kind, message))
    return stories


# Rank 0 leads ranks 0 to 2, and rank 3 stands alone.
_STAGES = {
    1: ("before", "gather", "spread", "after", "stopped", "raised"),
    0: ("before", "gather", "push", "pull", "spread", "after", "stopped", "raised"),
    3: ("push", "pull"),
}
_QUICK = ((0, "pull"),)


@pytest.mark.parametrize(
    ("victim", "stage"),
    [
        pytest.param(victim, stage, marks=() if (victim, stage) in _QUICK else pytest.mark.slow)
        for victim, stages in _STAGES.items()
        for stage in stages
    ],
)
def test_a_rank_that_dies_is_named_on_all(ranks, tmp_path, victim, stage):
    with servers(4, 2, "--heartbeat-timeout", "3") as started:
        addresses = [server.address for server in started]
        arguments = (addresses, (3, 1), str(tmp_path), victim, stage)
        ranks(4).outcomes(_train_until_it_fails, *arguments, timeout=60, grace=LIMIT_S)
    others = [rank for rank in range(4) if rank != victim]
    for kind, message in _stories(tmp_path, others):
        assert kind == "RankLostError"
        assert re.search(rf"(rank|worker) {victim}\b", message), message
        assert ("MemoryError: of this rank" in message) == (stage == "raised"), message


def _go_on_without(rank, world_size, addresses, folder, victim):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    where = Servers(addresses=tuple(addresses), heartbeat_s=0.2, heartbeat_timeout_s=3.0)
    link = thinwire.attach(model, "hier/int8", nodes=(2, 1), servers=where, options=ALL)
    for step in range(8):
        if step == 3 and rank == victim:
            stop_here()
        model.zero_grad()
        try:
            loss(model, batch(rank, step)).backward()
        except RuntimeError as error:
            assert isinstance(link.error, RankLostError)
            assert victim < 2
            with open(f"{folder}/{rank}", "w") as file:
                file.write(str(error))
            os._exit(0)
    torch.save(gradients(model), f"{folder}/{rank}")
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_is_lost_as_a_whole_and_others_go_on_if_asked(ranks, tmp_path, victim):
    """The rank that is left of it is told, also where its leader hangs with its connections open."""
    with servers(3, 1, "--heartbeat-timeout", "2", "--on-worker-loss", "continue") as started:
        arguments = ([started[0].address], str(tmp_path), victim)
        ranks(3).outcomes(_go_on_without, *arguments, timeout=60, grace=LIMIT_S + 10)
    assert re.search(rf"(rank|worker) {victim}\b", (tmp_path / str(1 - victim)).read_text())
    delivered = torch.load(tmp_path / "2")
    model = seeded(Tower)
    loss(model, batch(2, 7)).backward()
    for ours, local in zip(delivered, gradients(model), strict=True):
        assert (ours - local).abs().max() <= 0.02 * local.abs().max()


# --- attach ---------------------------------------------------------------------------------------------------------


def _refused(rank, world_size, addresses):
    for recipe, nodes, match in (
        ("hier/int8", None, "which ranks share a node; pass attach"),
        ("int8", 2, "a recipe that knows of nodes"),
        ("hier/int8", (2, 2), r"add up to the 3 ranks, got \(2, 2\)"),
    ):
        with pytest.raises((AttachError, PlanError, RecipeError), match=match):
            thinwire.attach(DDP(seeded(Tower)), recipe, nodes=nodes, servers=addresses, options=ALL)
    settings = thinwire.NodePushPull(up=thinwire.Identity(), down=thinwire.Identity(), node_sizes=(2, 1))
    with pytest.raises(AttachError, match="its exchange needs parameter servers"):
        thinwire.attach(DDP(seeded(Tower)), settings, options=ALL)
    return True


def test_what_cannot_be_attached(ranks):
    with servers(3) as started:
        assert ranks(3).run(_refused, [started[0].address]) == [True] * 3
