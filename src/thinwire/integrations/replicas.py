"""Whether all ranks hold the same parameters, to the bit."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.process_group import all_gather_text
from thinwire.errors import ReplicaError


@dataclass(frozen=True, slots=True)
class Difference:
    """Where replicas part.

    Attributes:
        name: the first parameter, in order of registration, that is not the same on all ranks.
        ranks: ranks by what they hold of it: those that agree together, most first.
        num: how many parameters differ.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    num: int

    def __str__(self) -> str:
        most, *others = (", ".join(map(str, ranks)) for ranks in self.ranks)
        more = f", and {self.num - 1} more parameters" if self.num > 1 else ""
        holders = "; ".join(f"rank {ranks} another" for ranks in others)
        return f"{self.name!r} (rank {most} has one value; {holders}){more}"


class ReplicaCheck:
    """Compares the parameters of all ranks by their hashes.

    One SHA-256 over all bits of all parameters, and one small all-gather of it. Where it differs a second one fetches
    every parameter's, to say which.

    Args:
        params: by name, in order of registration; those of all ranks must have the same names.
        group: a group whose tensors live on the CPU.
    """

    def __init__(self, params: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._params, self._group = params, group

    def difference(self, *, takes_part: bool = True) -> Difference | None:
        """Return where replicas part, or None. Collective.

        Args:
            takes_part: whether this rank's parameters are compared; False gathers with the others all the same.
        """
        ours = digests(self._params.values()) if takes_part else []
        whole = hashlib.sha256("".join(ours).encode()).hexdigest() if takes_part else ""
        if len(set(all_gather_text(whole, self._group)) - {""}) <= 1:
            return None
        texts = all_gather_text("\n".join(ours), self._group)
        everyone = {rank: text.split("\n") for rank, text in enumerate(texts) if text}
        return first_difference(list(self._params), everyone)

    def raise_if_different(self, step: int, *, takes_part: bool = True) -> None:
        """Raise on all ranks unless all that take part hold the same. Collective.

        Raises:
            ReplicaError: names the ranks and the first parameter.
        """
        if (difference := self.difference(takes_part=takes_part)) is not None:
            raise ReplicaError(
                f"before step {step} ranks hold different parameters: expected the same bits everywhere, got "
                f"{difference}. Something changed weights on some ranks only (a load, a seed, an optimizer step that "
                "not all ranks took): look there, and go on from the last good checkpoint"
            )


def first_difference(names: Sequence[str], digests: Mapping[int, Sequence[str]]) -> Difference | None:
    """Return where ranks part, from the digests of each, in the order of `names`."""
    columns = list(zip(*digests.values(), strict=True))
    differing = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if not differing:
        return None
    by_digest: dict[str, list[int]] = {}
    for rank, digest in zip(digests, columns[differing[0]], strict=True):
        by_digest.setdefault(digest, []).append(rank)
    ranks = sorted(map(tuple, by_digest.values()), key=lambda those: (-len(those), those))
    return Difference(names[differing[0]], tuple(ranks), len(differing))


def digests(tensors: Iterable[Tensor]) -> list[str]:
    """Return a hash of all bits of each tensor, whatever its strides."""
    return [_digest(tensor) for tensor in tensors]


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)  # a view, but for tensors in another order of memory
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()
