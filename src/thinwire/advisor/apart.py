"""Methods whose ranks train apart and exchange now and then: what such an exchange costs, spread over the steps."""

import dataclasses as dc
from collections.abc import Sequence

import numpy as np

from thinwire.advisor.buckets import Bucket
from thinwire.advisor.profile import Overhead, Profile
from thinwire.advisor.simulate import Exchanged, Sized, Step, simulate
from thinwire.advisor.work import work
from thinwire.plan import Plan


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """A method of `thinwire.algorithms` on one model, as its own plan and rhythm say.

    Attributes:
        name: kind, rhythm and recipe.
        plan: how differences travel.
        parts: names that are exchanged together, part by part, each once in `sync_every` steps.
        sync_every: optimizer steps between two exchanges of a part.
        overlap: steps of training that go on during an exchange; 0 waits for it.
        nbytes_per_element: of the copy that all ranks hold, the outer momentum and the differences, on every rank.
    """

    name: str
    plan: Plan
    parts: tuple[tuple[str, ...], ...]
    sync_every: int
    overlap: int
    nbytes_per_element: int


def simulate_apart(apart: Apart, profile: Profile) -> Step:
    """Return the mean step: computing, and of every part's exchange the share that is waited for.

    A part is exchanged as a model of its own, all of which is there at once, beside `overlap` steps of computing. That
    exchanges of two parts may meet, and what forming differences takes, is left out.

    Raises:
        ProfileError: a kind whose speed is not known.
    """
    compute_s = profile.computation.compute_s
    steps = [_exchange(apart, names, profile) for names in apart.parts]
    exposed_s = sum(step.exposed_s for step in steps) / apart.sync_every
    return Step(
        step_s=compute_s + exposed_s,
        compute_s=compute_s,
        exposed_s=exposed_s,
        codec_s=sum(step.codec_s for step in steps) / apart.sync_every,
        wire_s=sum(step.wire_s for step in steps) / apart.sync_every,
        sent_nbytes=np.sum([step.sent_nbytes for step in steps], axis=0) / apart.sync_every,
    )


def _exchange(apart: Apart, names: Sequence[str], profile: Profile) -> Step:
    computation = dc.replace(
        profile.computation,
        forward_s=0.0,
        backward_s=apart.overlap * profile.computation.compute_s,
        optimizer_s=0.0,
        parameters=tuple(dc.replace(p, ready_s=0.0) for p in profile.computation.parameters),
    )
    overhead = Overhead(message_s=profile.overhead.message_s, round_s=profile.overhead.round_s)
    messages = tuple(
        Sized(layout.rounds, tuple(work(layout, profile.kernels))) for layout in apart.plan.messages(names)
    )
    bucket = Bucket(names=tuple(names), ready_s=0.0, nbytes=0)
    alone = dc.replace(profile, computation=computation, overhead=overhead)
    return simulate(Exchanged(apart.plan, (bucket,), (messages,)), alone)
