"""`torch.distributed.checkpoint` (DCP): every rank's state under keys of its own.

Of keys that are equal on several ranks DCP keeps one rank's value, and another rank's for the next key. So keys carry
the rank and the world size:

    rank1of4.worker/layer.weight    a tensor in the shape of its parameter
    rank1of4                        all that is no tensor, as JSON: keys may not depend on what is in a checkpoint
"""

import json
import os
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import StateError
from thinwire.feedback import Slot
from thinwire.integrations.link import Link
from thinwire.state import REPLICAS

if TYPE_CHECKING:  # imported when used: it takes longer than the rest of thinwire
    from torch.distributed.checkpoint import StorageReader

    from thinwire.integrations.fsdp import ShardLink

_COUNTERS = re.compile(r"rank(\d+)of(\d+)")


class Checkpointable:
    """A link as `torch.distributed.checkpoint` saves and loads it: each rank its own residuals.

    For `dcp.save`, `dcp.load` and `dcp.async_save`, and the same world size; `read_states` reads for another one. What
    is saved is a copy, so that training may go on while `async_save` writes; give that a process group of its own,
    since its thread uses collectives beside those of training.

    Args:
        link: what `attach` returned.

    Example:
        ```python
        state = {"model": model.module, "thinwire": thinwire.Checkpointable(link)}
        dcp.save(state, checkpoint_id="checkpoint/100")
        dcp.load(state, checkpoint_id="checkpoint/100")
        ```
    """

    def __init__(self, link: "Link | ShardLink") -> None:
        self._link = link

    def state_dict(self) -> dict[str, Any]:
        """Return `Link.state_dict()` flat, under keys that name this rank.

        Raises:
            StateError: see `Link.state_dict`; or the link has a `replicate_group`.
        """
        state = self._link.state_dict()
        if REPLICAS in state:
            raise StateError(
                "ranks of several replicas keep the same shards, and keys here name a shard: expected one file a rank, "
                "or {f'rank{dist.get_rank()}': link.state_dict()} in what DCP saves"
            )
        prefix = f"rank{state['rank']}of{state['world_size']}"
        tensors = {f"{prefix}.{slot}/{name}": tensor for slot in Slot for name, tensor in state.pop(slot).items()}
        return {prefix: json.dumps(state), **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on the same rank.

        Raises:
            StateError: it does not fit; nothing was changed.
        """
        mine = self._link.state_dict()
        prefix = f"rank{mine['rank']}of{mine['world_size']}"
        if prefix not in state:
            raise StateError(f"expected the state of {prefix}, got {sorted(filter(_COUNTERS.fullmatch, state))}")
        self._link.load_state_dict(_nested(prefix, state))


def read_states(checkpoint: "str | os.PathLike[str] | StorageReader", key: str = "thinwire") -> list[dict[str, Any]]:
    """Read the states of all ranks that saved a checkpoint with `Checkpointable`; for `reshard_state`.

    Every rank may call it by itself: nothing is exchanged. All ranks' residuals are in memory then.

    Args:
        checkpoint: the folder, or a storage reader of `torch.distributed.checkpoint`.
        key: under which the link was saved.

    Returns:
        One state per old rank, in their order.

    Raises:
        StateError: there is no such state, or one of a rank is missing.

    Example:
        ```python
        states = thinwire.read_states("checkpoint/100")
        link.load_state_dict(thinwire.reshard_state(states, world_size)[rank])
        ```
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint if isinstance(checkpoint, dcp.StorageReader) else dcp.FileSystemReader(checkpoint)
    wanted: dict[str, Any] = {}
    for name, item in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(f"{key}.rank"):
            is_tensor = isinstance(item, TensorStorageMetadata)
            wanted[name] = torch.empty(item.size, dtype=item.properties.dtype) if is_tensor else ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist is meant
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    state = {name.removeprefix(f"{key}."): value for name, value in wanted.items()}
    found = sorted((int(match[1]), int(match[2])) for name in state if (match := _COUNTERS.fullmatch(name)))
    if not found or found != [(rank, found[0][1]) for rank in range(found[0][1])]:
        raise StateError(
            f"expected the states of all ranks under {key!r}, saved as {{{key!r}: thinwire.Checkpointable(link)}}, got "
            f"those of (rank, world size) {found}"
        )
    return [_nested(f"rank{rank}of{world_size}", state) for rank, world_size in found]


def _nested(prefix: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one rank from `flat`."""
    slots: dict[str, dict[str, Tensor]] = {str(slot): {} for slot in Slot}
    for key, value in flat.items():
        if key.startswith(f"{prefix}."):
            slot, _, name = key.removeprefix(f"{prefix}.").partition("/")
            slots[slot][name] = value
    return {**json.loads(flat[prefix]), **slots}
