"""Parameter servers on the hosts of a benchmark: their names, and the bytes of a host."""

import pytest
import torch

from thinwire import PlanOptions
from thinwire.bench.servers import host_nbytes
from thinwire.bench.settings import parse_methods
from thinwire.plan import build_plan


def test_names():
    assert parse_methods("int8,servers:2/topk:0.01") == ("int8", "servers:2/topk:0.01")
    for wrong in ("servers:0/int8", "servers:2/none", "servers/int8"):
        with pytest.raises(ValueError, match="unknown method"):
            parse_methods(wrong)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("per_rank", [1, 2])
def test_a_host_sends_as_much_as_without_servers(world_size, per_rank):
    """2 (n-1)/n of the encoded model, headers aside."""
    options = PlanOptions(num_servers=per_rank * world_size)
    plan = build_plan([("w", torch.zeros(64, 65536))], "int8", world_size, options)
    encoded = sum(p.aggregator.up.nbytes(p.spec) for p in plan.params[0].partitions)
    for rank in range(world_size):
        sent = host_nbytes(plan, rank, per_rank)
        assert sent == pytest.approx(2 * (world_size - 1) / world_size * encoded, rel=0.01)
