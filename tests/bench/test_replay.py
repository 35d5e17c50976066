"""Replayed models: fresh heavy-tailed gradients in the real shapes, along a timeline that adds up."""

import time

import pytest
import torch

from thinwire.bench.workloads.replay import GradientSource, ReplayModel, ReplayWorkload
from thinwire.shapes import TIMELINES, deadlines, model_layers

LAYERS = model_layers("resnet50", 8)


def step(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    seen: list[torch.Tensor] = []
    hooks = [p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())) for p in model.parameters()]
    model().backward()
    for hook in hooks:
        hook.remove()
    return seen


def test_gradients_have_the_real_shapes_and_are_fresh_in_each_step():
    model = ReplayModel(LAYERS, GradientSource(LAYERS, rank=0), 0.0, 0.0)
    first, second = step(model), step(model)
    shapes = [shape for layer in reversed(LAYERS) for _, shape in layer.parameters]
    assert sorted(tuple(g.shape) for g in first) == sorted(shapes)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_repeat_after_a_restart_and_differ_between_ranks():
    source, other = GradientSource(LAYERS, rank=0), GradientSource(LAYERS, rank=1)
    drawn = []
    for chosen, rank in ((source, 0), (source, 0), (other, 1)):
        chosen.restart(7, rank)
        drawn.append(torch.cat([g.flatten() for g in chosen.gradients(3, LAYERS[3])]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_gradients_are_heavy_tailed_and_as_large_as_their_layer_is_on_every_rank():
    sources = [GradientSource(LAYERS, rank) for rank in range(2)]
    index = max(range(len(LAYERS)), key=lambda i: LAYERS[i].numel)
    flat = [torch.cat([g.flatten() for g in s.gradients(index, LAYERS[index])]).clone() for s in sources]
    for values in flat:
        assert values.abs().max() > 10 * values.std()  # of normal values this many reach about 4
    assert 1 / 4 < flat[0].std() / flat[1].std() < 4
    deviations = [
        torch.cat([g.flatten() for g in sources[0].gradients(i, layer)]).std().item()
        for i, layer in enumerate(LAYERS)
        if layer.numel > 1000
    ]
    assert max(deviations) > 10 * min(deviations)


def test_deadlines_rise_towards_the_first_layer_and_end_at_the_backward_time():
    due = deadlines(LAYERS, 2.0)
    assert due == sorted(due, reverse=True)
    assert due[0] == pytest.approx(2.0)
    assert due[-1] > 0  # the last layer has work to do before its gradient is ready


def test_a_step_takes_its_timeline():
    model = ReplayModel(LAYERS, GradientSource(LAYERS, rank=0), 0.05, 0.2)
    step(model)
    start = time.perf_counter()
    loss = model()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    assert 0.05 <= middle - start < 0.5
    assert 0.2 <= end - middle < 1.0


def test_replays_name_the_source_of_their_times():
    workload = ReplayWorkload("vgg16", 0, scale=8)
    assert workload.facts()["emulated_compute_source"] == TIMELINES["vgg16"].source
    assert 0 < workload.compute_s < TIMELINES["vgg16"].compute_s / 8  # most FLOPs shrink by the square of the scale
    assert ReplayWorkload("vgg16", 0, scale=8, compute_s=1.5).compute_s == 1.5
