"""What the bytes of a push and of a pull are, read from the text in which workers describe it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from thinwire.aggregators import MessageLayout, Partition, TwoShot
from thinwire.aggregators.push_pull import num_rates, server_work
from thinwire.aggregators.push_pull_header import pull_header_nbytes, push_header_nbytes
from thinwire.comm.nodes import Nodes, sizes_for
from thinwire.errors import WireError
from thinwire.recipes import parse_compressor, parse_feedback
from thinwire.spec import COMPRESSIBLE_DTYPES

MAX_TEXT_NBYTES = 1 << 24
MAX_NUMEL = 1 << 31  # of a partition
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in COMPRESSIBLE_DTYPES}
_FIELDS = ("name", "place", "key", "dtype", "offset", "numel", "shape", "up", "down", "feedback")


@dataclass(frozen=True, slots=True)
class Content:
    """One server's block of a message.

    Attributes:
        layout: its partitions, and where their bytes begin in a push (`up`) and in a pull (`down`).
        num_names: parameters of the whole message, which headers have bits for.
        stands_for: of every worker that pushes, how many ranks its sum is over.
        places: per partition, which of these bits is its parameter's.
        num_rates: learning rates in a push's header.
        push_nbytes: of a push, header included.
        pull_nbytes: of a pull.
    """

    layout: MessageLayout
    num_names: int
    stands_for: Mapping[int, int]
    places: tuple[int, ...]
    num_rates: int
    push_nbytes: int
    pull_nbytes: int

    @property
    def places_in_model(self) -> frozenset[tuple[str, int]]:
        """Parameter and first element of every partition."""
        return frozenset((p.name, p.offset) for p in self.layout.partitions)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of its gradients in fp32, which is what a server allocates for them."""
        return 4 * sum(p.numel for p in self.layout.partitions)

    @property
    def work(self) -> int:
        """Estimated work of a round."""
        return sum(server_work(partition) for partition in self.layout.partitions)


def parse_content(text: str, world_size: int) -> Content:
    """Return what the text describes, for so many workers.

    Raises:
        WireError: it is not what `thinwire.aggregators.push_pull.describe` writes.
    """
    if len(text) > MAX_TEXT_NBYTES:
        raise WireError(f"content: expected at most {MAX_TEXT_NBYTES} bytes, got {len(text)}")
    try:
        described = json.loads(text)
        num_names, rows = described["num_names"], described["partitions"]
        if described["world_size"] != world_size:
            raise ValueError(f"expected {world_size} workers, got {described['world_size']}")
        if type(num_names) is not int or not 0 < num_names <= 1 << 20 or not isinstance(rows, list) or not rows:
            raise ValueError(f"expected names and partitions, got {num_names!r} and {type(rows).__name__}")
        pairs = [_partition(row, num_names) for row in cast(list[Any], rows)]
        partitions, places = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        if len({(p.name, p.offset) for p in partitions}) < len(partitions):
            raise ValueError("expected every partition once")
        stands_for = _stands_for(described["nodes"], world_size)
        rates, header = num_rates(partitions), pull_header_nbytes(num_names, world_size)
        up_nbytes = [p.aggregator.up.nbytes(p.spec) for p in partitions]
        down_nbytes = [p.aggregator.down.nbytes(p.spec) for p in partitions]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"content: {error}") from None
    up, push_nbytes = _starts(up_nbytes, push_header_nbytes(num_names, rates, world_size))
    down, pull_nbytes = _starts(down_nbytes, header)
    layout = MessageLayout(
        partitions=partitions,
        world_size=world_size,
        rounds=(),
        names=tuple(dict.fromkeys(p.name for p in partitions)),
        header_nbytes=header,
        up=up,
        down=down,
    )
    return Content(layout, num_names, stands_for, places, rates, push_nbytes, pull_nbytes)


def _stands_for(sizes: Any, world_size: int) -> dict[int, int]:
    """Return of how many ranks every worker that pushes has the sum: of its node, whose first it is, or itself."""
    if sizes is None:
        return dict.fromkeys(range(world_size), 1)
    if not isinstance(sizes, list) or not all(type(size) is int for size in cast(list[Any], sizes)):
        raise ValueError(f"expected sizes of nodes or null, got {sizes!r:.80}")
    if (found := sizes_for(cast(list[int], sizes), world_size)) is None:
        raise ValueError(f"expected sizes of nodes that add up to {world_size}, got {sizes!r:.80}")
    nodes = Nodes.sized(found)
    return dict(zip(nodes.firsts, nodes.sizes, strict=True))


def _partition(row: Any, num_names: int) -> tuple[Partition, int]:
    if not isinstance(row, dict) or set(cast(dict[Any, Any], row)) != set(_FIELDS):
        raise ValueError(f"expected a partition with {', '.join(_FIELDS)}, got {row!r:.200}")
    name, place, key, dtype, offset, numel, shape, up, down, feedback = (cast(Any, row)[field] for field in _FIELDS)
    limits = {
        "place": (place, num_names),
        "key": (key, 1 << 64),
        "offset": (offset, 1 << 48),
        "numel": (numel, MAX_NUMEL),
    }
    for what, (value, limit) in limits.items():
        if type(value) is not int or not 0 <= value < limit:
            raise ValueError(f"expected a {what} from 0 to {limit - 1}, got {value!r:.80}")
    texts = (name, dtype, up, down, *(() if feedback is None else (feedback,)))
    if not all(isinstance(text, str) for text in texts) or dtype not in _DTYPES:
        raise ValueError(f"expected a name, recipes and one of {', '.join(_DTYPES)}, got {dtype!r:.80}")
    sizes = None
    if shape is not None:
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in cast(list[Any], shape)):
            raise ValueError(f"expected a shape or null, got {shape!r:.80}")
        sizes = tuple(cast(list[int], shape))
        if math.prod(sizes) != numel:  # exact: products in 64 bits may come out as anything
            raise ValueError(f"{name}: expected a shape of {numel} elements, got {sizes}")
    aggregator = TwoShot(
        up=parse_compressor(up),
        down=parse_compressor(down),
        feedback=None if feedback is None else parse_feedback(feedback),
    )
    partition = Partition(
        name=name,
        dtype=_DTYPES[dtype],
        offset=offset,
        numel=numel,
        owner=0,
        aggregator=aggregator,
        key=key,
        shape=sizes,
    )
    return partition, place


def _starts(sizes: list[int], header: int) -> tuple[tuple[int, ...], int]:
    starts = list[int]()
    for size in sizes:
        starts.append(header)
        header += size
    return tuple(starts), header
