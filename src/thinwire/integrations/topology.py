"""Which ranks share a node: from a number, the sizes of nodes, a device mesh, or what the launcher says."""

import os
from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import AttachError

Topology = int | Sequence[int] | DeviceMesh | Literal["auto"]


def node_sizes(nodes: Topology, group: dist.ProcessGroup) -> int | tuple[int, ...]:
    """Return ranks per node as `Hierarchical` takes them.

    Args:
        nodes: ranks of every node; the ranks of each, in rank order; a 2-D mesh whose first dimension is between nodes;
            or "auto", the launcher's LOCAL_WORLD_SIZE, for nodes of one size.
        group: the ranks that exchange gradients.

    Raises:
        AttachError: none of these, a mesh of other ranks or in another order, or no LOCAL_WORLD_SIZE.
    """
    ranks = dist.get_process_group_ranks(group)
    if nodes == "auto":
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not local.isdigit() or len(ranks) != dist.get_world_size():
            raise AttachError(
                f"nodes='auto': expected LOCAL_WORLD_SIZE, as torchrun sets it, and a group of all ranks, got "
                f"{local!r} and {len(ranks)} of {dist.get_world_size()} ranks; pass nodes=8 for eight ranks a node, or "
                "the size of each node"
            )
        return int(local)
    if isinstance(nodes, DeviceMesh):
        if nodes.mesh.dim() != 2 or nodes.mesh.flatten().tolist() != ranks:
            raise AttachError(
                f"nodes: expected a mesh of two dimensions, between nodes and within, over the ranks {ranks} of the "
                f"model's group in this order, got {nodes.mesh.tolist()}"
            )
        return int(nodes.mesh.shape[1])
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        return nodes
    if isinstance(nodes, Sequence) and not isinstance(nodes, str) and all(isinstance(size, int) for size in nodes):
        return tuple(nodes)
    raise AttachError(f"nodes: expected ranks per node, the sizes of all nodes, a DeviceMesh or 'auto', got {nodes!r}")
