"""Clipping of gradients before they are sent, each by the norm over its whole parameter."""

from collections.abc import Sequence

import torch

from thinwire.aggregators import Block, Message
from thinwire.kernels.reference_steps import tree_sum


def clipped_blocks(messages: Sequence[Message]) -> list[tuple[Block, float]]:
    """Return the blocks of clipped parameters with the largest norm of each parameter.

    In the order of the parameter, whatever the order of messages: how it is cut must not show in the sum.
    """
    clipped: list[tuple[Block, float]] = []
    for message in messages:
        for block in message.blocks:
            feedback = block.partition.aggregator.feedback
            largest = None if feedback is None else feedback.largest_norm(message.layout.world_size)
            if largest is not None:
                clipped.append((block, largest))
    return sorted(clipped, key=lambda one: (one[0].partition.name, one[0].partition.offset))


def set_clipping(clipped: Sequence[tuple[Block, float]], loss_scale: float) -> None:
    """Set the factors that clip gradients, each by the norm over its whole parameter."""
    squares: dict[str, float] = {}
    for block, _ in clipped:
        square = float(tree_sum(block.value.to(torch.float64).square()))
        squares[block.partition.name] = squares.get(block.partition.name, 0.0) + square
    for block, largest in clipped:
        norm = squares[block.partition.name] ** 0.5 / loss_scale
        block.gradient_scale = 1.0 if norm <= largest else largest / norm  # nan where the norm is
