"""Checkpoints by torch.distributed.checkpoint: every rank's own residuals, and other world sizes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel as DDP
from training import Tower, attached, batch, digest, loss, seeded, train

import thinwire
from thinwire.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns of what is its own


def _save(rank, world_size, recipe, folder, asynchronously):
    model = DDP(seeded(Tower, 20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, recipe) as link:
        train(model, rank, range(3), optimizer=optimizer, width=20)
        state = {"model": model.module, "thinwire": thinwire.Checkpointable(link)}
        if asynchronously:
            group = dist.new_group(backend="gloo")
            pending = dcp.async_save(state, checkpoint_id=folder, process_group=group)
            on = train(model, rank, range(3, 6), optimizer=optimizer, width=20)
            pending.result()
        else:
            dcp.save(state, checkpoint_id=folder)
            on = train(model, rank, range(3, 6), optimizer=optimizer, width=20)
    return on, digest(link.state_dict()["worker"].values())


def _load(rank, world_size, recipe, folder):
    model = DDP(seeded(Tower, 20, 3, seed=9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, recipe) as link:
        dcp.load({"model": model.module, "thinwire": thinwire.Checkpointable(link)}, checkpoint_id=folder)
        return train(model, rank, range(3, 6), optimizer=optimizer, width=20), digest(
            link.state_dict()["worker"].values()
        )


@pytest.mark.parametrize("asynchronously", [False, True], ids=["save", "async"])
@pytest.mark.parametrize("recipe", ["topk:0.1", "onebit@ef21", "topk:0.1@dgc"])
def test_each_rank_gets_its_own_residuals_back(ranks, tmp_path, recipe, asynchronously):
    """And goes on, bit for bit, as if it had not been stopped."""
    saved = ranks(2).run(_save, recipe, str(tmp_path), asynchronously)
    assert ranks(2).run(_load, recipe, str(tmp_path)) == saved
    if "ef21" not in recipe:
        assert saved[0][1] != saved[1][1]  # the ranks' residuals do differ


def _elsewhere(rank, world_size, recipe, folder):
    model = DDP(seeded(Tower, 20, 3, seed=9))
    with attached(model, recipe) as link:
        with pytest.raises(CheckpointException, match=rf"thinwire\.rank{rank}of3"):
            dcp.load({"thinwire": thinwire.Checkpointable(link)}, checkpoint_id=folder)
        states = thinwire.read_states(folder)
        assert [state["rank"] for state in states] == [0, 1]
        link.load_state_dict(thinwire.reshard_state(states, world_size, partition_numel=1024)[rank])
        loss(model, batch(rank, 7, width=20)).backward()
        return link.state.step, sorted(states[0]["worker"]), states[0]["worker"]["layers.0.weight"].norm().item()


def test_other_world_sizes_read_all_ranks_states(ranks, tmp_path):
    ranks(2).run(_save, "topk:0.1", str(tmp_path), False)
    results = ranks(3).run(_elsewhere, "topk:0.1", str(tmp_path))
    assert [step for step, *_ in results] == [4, 4, 4]
    assert "layers.0.weight" in results[0][1]
    assert results[0][2] > 0


def test_a_folder_without_thinwires_state_is_refused(tmp_path):
    dcp.save({"model": {"w": torch.zeros(2)}}, checkpoint_id=str(tmp_path), no_dist=True)
    with pytest.raises(StateError, match="expected the states of all ranks under 'thinwire'"):
        thinwire.read_states(str(tmp_path))
