"""The two workloads that learn."""

from collections.abc import Iterator

import pytest
import torch

from thinwire.bench.settings import OPTIMIZERS
from thinwire.bench.workloads.digits import DigitsWorkload
from thinwire.bench.workloads.gpt import CONTEXT, Gpt, GptWorkload, standard_library_text


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the benchmark's ranks run; on a busy machine many threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(workload: DigitsWorkload | GptWorkload, steps: int) -> torch.nn.Module:
    model = workload.model(seed=0)
    optimizer = workload.optimizer(model.parameters())
    workload.start(seed=0)
    for _ in range(steps):
        optimizer.zero_grad()
        workload.loss(model).backward()
        optimizer.step()
    return model


def test_digits_learns():
    workload = DigitsWorkload(0, 1)
    loss, correct, answers = workload.evaluate(train(workload, 45))
    assert answers == 360
    assert correct / answers > 0.7
    assert loss / answers < 1.0


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizer_learns_the_digits_and_says_its_rate(name: str):
    workload = DigitsWorkload(0, 1)
    workload.optimizer_name = name
    workload.learning_rate = 0.5 * workload.learning_rates[name]
    assert workload.describe_optimizer().endswith(f"learning rate {workload.learning_rate:g}")
    loss, _, answers = workload.evaluate(train(workload, 45))
    assert loss / answers < 2.0  # ln 10 = 2.3 is the loss of not knowing


def test_ranks_share_out_the_held_out_data():
    whole = DigitsWorkload(0, 1)
    model = whole.model(seed=0)
    parts = [DigitsWorkload(rank, 3).evaluate(model) for rank in range(3)]
    loss, correct, answers = whole.evaluate(model)
    assert sum(part[2] for part in parts) == answers
    assert sum(part[1] for part in parts) == correct
    assert abs(sum(part[0] for part in parts) - loss) < 1e-2


def test_gpt_has_about_five_million_parameters_and_never_looks_ahead():
    model = Gpt().eval()
    assert 4.5e6 < sum(p.numel() for p in model.parameters()) < 5.5e6
    tokens = torch.randint(256, (1, CONTEXT))
    changed = tokens.clone()
    changed[0, 100:] = (changed[0, 100:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :100], after[0, :100])
    assert not torch.allclose(before[0, 100:], after[0, 100:])


def test_gpt_reads_the_standard_library_and_holds_out_five_percent():
    text = standard_library_text()
    assert b"class OrderedDict" in text
    workload = GptWorkload(1, 4)
    assert len(workload.train) + len(workload.held_out) == len(text)
    assert len(workload.held_out) == len(text) // 20
    assert len(workload.windows) == 16
    assert int(workload.windows.max()) + CONTEXT + 1 <= len(workload.held_out)


def test_batches_are_the_same_for_every_method_and_differ_between_ranks():
    first, second = GptWorkload(0, 2), GptWorkload(1, 2)
    model = first.model(seed=0)
    losses = []
    for workload in (first, first, second):
        workload.start(seed=3)
        losses.append(workload.loss(model).item())
    assert losses[0] == losses[1] != losses[2]
