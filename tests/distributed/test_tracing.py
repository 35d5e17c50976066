"""Traces of a step: what happened on every thread, in the order in which it must have, and how many bytes went."""

import itertools
import json

import pytest
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile
from training import Tower, attached, batch, loss, seeded, train

import thinwire
from thinwire import ThinwireError, merge_traces
from thinwire.comm import tracing
from thinwire.comm.tracing import span


def _traced(rank, world_size, recipe, folder):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    store = dist.distributed_c10d._get_default_store()
    key = f"test_tracing/{recipe}"
    with attached(model, recipe) as link:
        train(model, rank, range(2))
        link.stats(reset=True)
        if rank == 0:  # the last gradient of a pass; by then all buckets but the last have been handed over
            model.module.layers[-1].weight.register_post_accumulate_grad_hook(lambda _: store.set(key, "1"))
        with thinwire.trace(f"{folder}/{rank}.json"):
            value = loss(model, batch(rank, 2))
            if rank == 1:
                store.wait([key])
            with span("backward"):
                value.backward()
        train(model, rank, [3])  # not traced
        return link.stats()


def _events(path):
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    ranges = [event for event in events if event["ph"] == "X"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in ranges:
        assert event["dur"] >= 0
        event["end"] = event["ts"] + event["dur"]
        event["row"] = rows[event["pid"], event["tid"]]
    return ranges


def _message(event):
    """`bucket 2.0`, whatever is done with it."""
    return " ".join(event["name"].split()[1:3])


@pytest.mark.parametrize("recipe", ["int8", "topk:0.05", "gather/onebit", "global:8", "dense"])
def test_a_trace_shows_every_round_in_order_and_the_bytes_of_the_counters(ranks, tmp_path, recipe):
    stats = ranks(2).run(_traced, recipe, str(tmp_path))
    merge_traces([tmp_path / f"{rank}.json" for rank in range(2)], tmp_path / "all.json")
    everything = _events(tmp_path / "all.json")
    for rank in range(2):
        ranges = [event for event in everything if event["pid"] == rank]
        assert {event["name"] for event in ranges} == {event["name"] for event in _events(tmp_path / f"{rank}.json")}
        transports = [event for event in ranges if event["cat"] == "transport"]
        assert all(event["row"].startswith("lane-") for event in transports)
        # As many, and as many bytes, as each of the two steps that the counters saw.
        assert len(transports) == stats[rank]["num_collectives"]
        assert sum(event["args"]["sent_nbytes"] for event in transports) == stats[rank]["wire_nbytes"]
        (backward,) = (event for event in ranges if event["cat"] == "backward")
        hooks = [event for event in ranges if event["cat"] == "hook"]
        assert len(hooks) > 2
        assert all(backward["ts"] <= hook["ts"] and hook["end"] <= backward["end"] for hook in hooks)
        assert sum(hook["args"]["raw_nbytes"] for hook in hooks) == stats[rank]["raw_nbytes"]
        for message in {_message(event) for event in transports}:
            _check_one(message, [event for event in ranges if _message(event) == message], hooks)
        if rank == 0:  # which cannot have finished its first bucket before rank 1, which waited for later hooks
            assert max(e["end"] for e in transports if _message(e) == "bucket 0.0") > hooks[1]["end"]
    for row in {(event["pid"], event["tid"]) for event in everything}:
        _check_nesting([event for event in everything if (event["pid"], event["tid"]) == row])


def _check_one(message, ranges, hooks):
    """Hook, then encode, transport, decode of round after round, with nothing of it at the same time."""
    transports = [event for event in ranges if event["cat"] == "transport"]
    stretches = [event for event in ranges if event["cat"] == "exchange"]
    assert [event["args"]["round"] for event in transports] == list(range(len(transports)))
    assert [event["args"]["round"] for event in stretches] == list(range(len(transports) + 1))
    alternating = [e for pair in zip(stretches, transports, strict=False) for e in pair] + [stretches[-1]]
    assert all(one["end"] <= other["ts"] for one, other in itertools.pairwise(alternating))
    bucket = message.split()[1].split(".")[0]
    (hook,) = (hook for hook in hooks if hook["name"] == f"hook bucket {bucket}")
    assert hook["ts"] <= stretches[0]["ts"]
    for event in ranges:
        if event["cat"] in ("encode", "decode"):
            assert event["row"].startswith("codec")
            assert any(s["ts"] <= event["ts"] and event["end"] <= s["end"] for s in stretches)
            assert set(event["args"]["parameters"]) >= {event["name"].split()[3]}
    assert all(s["row"].startswith("codec") for s in stretches)
    waits = sorted((event for event in ranges if event["cat"] == "wait"), key=lambda event: event["args"]["round"])
    assert all(wait["end"] <= transport["ts"] for wait, transport in zip(waits, transports, strict=True))


def _check_nesting(ranges):
    """Ranges of one thread lie inside each other or apart."""
    for one, other in itertools.combinations(ranges, 2):
        first, second = sorted((one, other), key=lambda event: (event["ts"], -event["dur"]))
        assert second["ts"] >= first["end"] or second["end"] <= first["end"]


def _profiled(rank, world_size):
    model = DDP(seeded(Tower), bucket_cap_mb=0.01)
    found = []
    with attached(model, "int8"):
        train(model, rank, range(2))
        for every in (True, False):
            config = _ExperimentalConfig(profile_all_threads=every)
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
                train(model, rank, [2])
            events = profiled.events() or []
            found.append({event.name.split()[0]: event.thread for event in events if " bucket " in event.name})
    return found


def test_a_profile_of_all_threads_shows_the_same_ranges(ranks):
    for everything, main in ranks(2).run(_profiled):
        assert set(everything) == {"hook", "wait", "transport", "exchange", "encode", "decode"}
        assert len({everything[kind] for kind in ("hook", "transport", "encode")}) == 3
        assert set(main) == {"hook"}


def test_one_trace_at_a_time_and_only_where_it_can_be_written(tmp_path):
    with thinwire.trace(tmp_path / "one.json"):
        with pytest.raises(ThinwireError, match="records a trace already"), thinwire.trace(tmp_path / "two.json"):
            pass
        with span("encode", "bucket 0.0"):
            pass
    assert not (tmp_path / "two.json").exists()
    assert [event["name"] for event in _events(tmp_path / "one.json")] == ["encode bucket 0.0"]
    with pytest.raises(ThinwireError, match="cannot write the trace"), thinwire.trace(tmp_path / "none" / "x.json"):
        pass
    (tmp_path / "two.json").write_text("{}")
    with pytest.raises(ThinwireError, match=r"two.json: expected a trace"):
        merge_traces([tmp_path / "one.json", tmp_path / "two.json"], tmp_path / "all.json")


def test_a_trace_is_written_after_an_error_and_keeps_so_many_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_RANGES", 2)

    def record():
        with thinwire.trace(tmp_path / "one.json"):
            for i in range(5):
                with span("encode", str(i)):
                    pass
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        record()
    merge_traces([tmp_path / "one.json"], tmp_path / "all.json")
    for name in ("one.json", "all.json"):
        assert json.loads((tmp_path / name).read_text())["otherData"]["num_dropped"] == 3
        assert [event["name"] for event in _events(tmp_path / name)] == ["encode 0", "encode 1"]
