"""One step as events: gradients become ready, are encoded, travel, are decoded, and get in each other's way.

Rounds and bytes are those of the aggregators' own layouts. What is simulated is what the overlapped driver does with
them (`thinwire.comm.process_group`): messages in order, at most `depth` under way, threads that encode and decode,
lanes that each do one round at a time. Hosts have one interface, full duplex, which all their ranks share: many ranks
that send to one owner wait for its interface, not for their own. Processor cores are shared with the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from thinwire.advisor.buckets import Bucket, ddp_buckets
from thinwire.advisor.host import Backward, Cores
from thinwire.advisor.links import Links
from thinwire.advisor.occupancy import Numbers, Occupancy
from thinwire.advisor.profile import Cluster, Profile
from thinwire.advisor.traffic import Traffic, traffic
from thinwire.advisor.work import work
from thinwire.comm.process_group import SERVED_DEPTH
from thinwire.comm.rounds import Round
from thinwire.errors import ProfileError
from thinwire.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Driving:
    """How exchanges are driven.

    Attributes:
        lane_sets: round r of an exchange takes a lane of set r modulo this.
        lanes: in each set.
        depth: exchanges under way at once.
        overlap: whether exchanges begin while backward still runs; else all of them after it.
        python: whether thinwire's driver runs them, whose messages and rounds cost what the profile says; collectives
            of a backend do not.
    """

    lane_sets: int = 2
    lanes: int = 2
    depth: int = 6
    overlap: bool = True
    python: bool = True


THINWIRE = Driving()
"""`OverlappedDriver` as `attach` makes it."""
SERVED = Driving(lanes=SERVED_DEPTH, depth=SERVED_DEPTH)
"""`ServerDriver`: no exchange waits for a lane that another has."""
ONE_STREAM = Driving(lane_sets=1, lanes=1, python=False)
"""One collective after the other, in order, as backends run DDP's own."""
AFTER_BACKWARD = Driving(lane_sets=1, lanes=1, overlap=False, python=False)
"""As research code runs compression, which else competes with backward for the same accelerator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stragglers:
    """Ranks compute 1 + X times as long, in each step anew: X is exponential with mean `mean`.

    Drawn from Philox keyed by `seed`, with the step as counter: the same step of the same seed is the same everywhere.
    """

    mean: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.mean < np.inf:
            raise ProfileError(f"stragglers: expected a mean of 0 or more, got {self.mean!r}")

    def factors(self, num_ranks: int, step: int) -> Numbers:
        """Return (num_ranks,) factors of at least 1."""
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, step]))
        return 1.0 + self.mean * generator.exponential(size=num_ranks)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A plan's messages for one model and its buckets: sizes and work, whatever the network. Made once, run often.

    Attributes:
        plan: what each parameter gets.
        buckets: as DDP hands them over.
        messages: per bucket, the rounds of each of its messages, and core-seconds of kernels around them.
    """

    plan: Plan
    buckets: tuple[Bucket, ...]
    messages: tuple[tuple["Sized", ...], ...]

    @staticmethod
    def of(plan: Plan, profile: Profile, *, bucket_cap_nbytes: float | None = None) -> "Exchanged":
        """Cut a model's gradients into buckets, and those into the plan's messages.

        Args:
            plan: for the parameters and the number of ranks of the profile.
            profile: when gradients are ready, and how fast kernels are.
            bucket_cap_nbytes: `bucket_cap_mb` in bytes; None is DDP's default.

        Raises:
            ProfileError: a plan for other parameters or another number of ranks; a kind whose speed is not known.
        """
        cluster = profile.cluster
        if plan.world_size != cluster.world_size:
            raise ProfileError(f"expected a plan for {cluster.world_size} ranks, got one for {plan.world_size}")
        profile.check_model({param.info.name: param.info.shape for param in plan.params})
        buckets = ddp_buckets(profile.computation, bucket_cap_nbytes)
        messages = tuple(
            tuple(Sized(layout.rounds, tuple(work(layout, profile.kernels))) for layout in plan.messages(bucket.names))
            for bucket in buckets
        )
        return Exchanged(plan, tuple(buckets), messages)


@dataclass(frozen=True, slots=True)
class Sized:
    """One message.

    Attributes:
        rounds: with exact sizes.
        work: (num_ranks,) core-seconds before each round, and after the last.
    """

    rounds: tuple[Round, ...]
    work: tuple[Numbers, ...]
    _traffic: dict[tuple[int, int], list[Traffic]] = field(default_factory=lambda: {}, compare=False, repr=False)

    def traffic(self, cluster: Cluster) -> list[Traffic]:
        """Return the bytes of every round on every link."""
        key = cluster.hosts, cluster.ranks_per_host
        if key not in self._traffic:
            self._traffic[key] = [traffic(r, *key) for r in self.rounds]
        return self._traffic[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one simulated step took.

    Attributes:
        step_s: forward, backward with what is exchanged, and optimizer, until the last rank is done.
        compute_s: of the slowest rank, had it nothing to exchange.
        exposed_s: what exchanging adds: step_s - compute_s.
        codec_s: core-seconds that kernels take on the busiest rank.
        wire_s: seconds for which the busiest interface sends or receives.
        sent_nbytes: (num_ranks,) payload bytes that leave each rank.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    codec_s: float
    wire_s: float
    sent_nbytes: Numbers


def simulate(
    exchanged: Exchanged,
    profile: Profile,
    *,
    driving: Driving = THINWIRE,
    stragglers: Stragglers | None = None,
    step: int = 0,
) -> Step:
    """Simulate one step.

    What is earlier in the program goes first: a message's bytes and kernels before those of the next, wherever both
    could go on. Work of a later message fills what time is left. A round of blocks is over on a host when all have left
    their senders and its own interface has taken in its share; a ring when all of it has passed everywhere.

    Where the profile has a `CollectiveFit`, that is what a round alone takes; else links' alpha and beta: a round of
    blocks costs one alpha, since all are under way at once, and a ring as many as it has hops.

    Args:
        exchanged: of a plan and the same model.
        profile: cluster, computation and kernels; only the cluster's links and the times may differ from those that
            `exchanged` was made with.
        driving: how exchanges are driven.
        stragglers: slow ranks, drawn per step.
        step: of which they are drawn.

    Returns:
        The same for the same arguments, on any machine.

    Raises:
        ProfileError: the profile has other hosts than the plan has ranks.
    """
    if exchanged.plan.world_size != profile.cluster.world_size:
        raise ProfileError(
            f"expected a profile of {exchanged.plan.world_size} ranks, got one of {profile.cluster.world_size}"
        )
    return _Run(exchanged, profile, driving, stragglers, step).step()


class _Run:
    """One step under way. Times are vectors: of ranks, or of hosts for interfaces."""

    def __init__(
        self,
        exchanged: Exchanged,
        profile: Profile,
        driving: Driving,
        stragglers: Stragglers | None,
        step: int,
    ) -> None:
        self.exchanged, self.driving = exchanged, driving
        self.cluster, self.computation, self.overhead = profile.cluster, profile.computation, profile.overhead
        self.links = Links(profile.cluster)
        num_ranks = self.cluster.world_size
        factors = np.ones(num_ranks) if stragglers is None else stragglers.factors(num_ranks, step)
        alike = stragglers is None and not self.cluster.exceptions
        self.hosts = self._different_hosts() if alike else np.arange(self.cluster.hosts)
        each = self.cluster.ranks_per_host
        self.ranks = (self.hosts[:, None] * each + np.arange(each)).ravel()
        self.slow = factors[self.ranks]
        self.cores = Cores.of(profile)
        self.backward = Backward(self.computation, self.slow, self.cores)
        self.thread = Occupancy(len(self.ranks))
        self.out, self.into = Occupancy(len(self.hosts)), Occupancy(len(self.hosts))
        self.out_inside, self.into_inside = Occupancy(len(self.ranks)), Occupancy(len(self.ranks))
        self.lanes = np.zeros((driving.lane_sets, driving.lanes, len(self.ranks)))

    def _messages(self) -> Iterator[Sized]:
        return (message for bucket in self.exchanged.messages for message in bucket)

    def _different_hosts(self) -> NDArray[np.int64]:
        """Return one of every kind of host, where ranks differ by what they own alone.

        Hosts of one kind have equal sums of all that concerns them, by weights that are drawn: one addition a number.
        """
        hosts = self.cluster.hosts
        generator = np.random.Generator(np.random.Philox(key=0))
        kinds = np.zeros((hosts, 2))

        def note(numbers: Numbers) -> None:
            weights = generator.random((numbers.size // hosts, 2))
            kinds[...] += (numbers.reshape(hosts, -1, 1) * weights).sum(axis=1)

        for message in self._messages():
            for t in message.traffic(self.cluster):
                for numbers in (t.out, t.into, t.out_inside, t.into_inside):
                    note(numbers)
            for seconds in message.work:
                note(1e9 * seconds)
        _, first = np.unique(kinds, axis=0, return_index=True)
        return np.sort(first)

    def step(self) -> Step:
        """Run all messages in order."""
        computation, num_ranks = self.computation, len(self.ranks)
        sent = np.zeros(self.cluster.world_size)
        codec_s = np.zeros(num_ranks)
        under_way = np.zeros((self.driving.depth, num_ranks))  # when each exchange of the last few is done
        arrived: list[Numbers] = []  # when each bucket's messages are all done
        number = 0
        for bucket, messages in zip(self.exchanged.buckets, self.exchanged.messages, strict=True):
            ready = self.backward.reached(bucket.ready_s if self.driving.overlap else computation.backward_s)
            ready = self.backward.interrupt(ready, self._bucket_s(bucket))
            arrived.append(ready)
            for message in messages:
                place = under_way.argmin(axis=0)  # the next begins when one ends
                begin = np.maximum(ready, under_way[place, np.arange(num_ranks)])
                for occupancy in (self.thread, self.out, self.into, self.out_inside, self.into_inside):
                    occupancy.forget(float(begin.min()))
                done = self._exchange(message, begin, number)
                under_way[place, np.arange(num_ranks)] = done
                arrived[-1] = np.maximum(arrived[-1], done)
                sent += sum(t.sent for t in message.traffic(self.cluster))
                codec_s += sum(seconds[self.ranks] for seconds in message.work)
                number += 1
        back = self.backward.reached(computation.backward_s)
        for bucket, done in zip(self.exchanged.buckets, arrived, strict=True):  # DDP waits for one after the other
            back = np.maximum(back, done) + self._copy_s(bucket)
        end = float((back + computation.optimizer_s * self.slow).max())
        compute_s = float((computation.compute_s * self.slow).max())
        return Step(
            step_s=end,
            compute_s=compute_s,
            exposed_s=end - compute_s,
            codec_s=float(codec_s.max()),
            wire_s=float(max(self.out.busy_s.max(), self.into.busy_s.max())),
            sent_nbytes=sent,
        )

    def _exchange(self, message: Sized, begin: Numbers, number: int) -> Numbers:
        """Run one message; return when each rank has its mean."""
        time, overhead = begin, self.overhead
        for position, seconds in enumerate(message.work):
            if self.driving.python:
                seconds = seconds + (overhead.round_s if position else overhead.message_s)
            time = self._run_kernels(time, seconds[self.ranks])
            if position < len(message.rounds):
                lane = self.lanes[position % self.driving.lane_sets, number % self.driving.lanes]
                time = self._travel(message, position, np.maximum(time, lane))
                lane[:] = time
        return time

    def _copy_s(self, bucket: Bucket) -> float:
        """Seconds for which DDP copies into a bucket, and as many back: in the thread that runs backward."""
        return self.overhead.copy_s_per_nbyte * bucket.nbytes / 2 / self.cores.alone

    def _bucket_s(self, bucket: Bucket) -> float:
        return self.overhead.bucket_s / self.cores.alone + self._copy_s(bucket)

    def _run_kernels(self, time: Numbers, core_s: Numbers) -> Numbers:
        """Encode or decode in the one thread for it, which shares the cores with backward."""
        if not core_s.any():
            return time
        seconds = self.backward.beside(self.thread.free_from(time), core_s)
        return self.thread.take(time, seconds)

    def _travel(self, message: Sized, position: int, start: Numbers) -> Numbers:
        """Send the bytes of one round; return when each rank has what is for it."""
        t = message.traffic(self.cluster)[position]
        if t.in_step:
            start = np.full_like(start, start.max())
        cost = self.links.cost(message.rounds[position], t)
        each = self.cluster.ranks_per_host
        begin = start.reshape(-1, each).max(axis=1)  # a host's ranks go together
        left = self.out.take(begin, cost.out_s[self.hosts])
        come = self.into.take(begin, cost.into_s[self.hosts])
        done = np.repeat(np.maximum(come, left.max()), each)
        if each > 1:
            left = self.out_inside.take(start, cost.out_inside_s[self.ranks])
            come = self.into_inside.take(start, cost.into_inside_s[self.ranks])
            done = np.maximum(done, np.maximum(come, left.max()))
        done = done + cost.alpha_s
        if cost.core_s.any():  # system calls and copies
            seconds = self.backward.beside(start, cost.core_s[self.ranks])
            done = np.maximum(done, self.thread.take(start, seconds) if self.cores.one else start + seconds)
        return done
