"""What if the network were faster, or computing, or the codec, or the batch larger: sweeps over one profile.

After the analyses of Agarwal et al. 2022, "On the Utility of Gradient Compression in Distributed Training Systems".
Four are simulated; two are in closed form, since they ask about compressors that nobody has.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thinwire.advisor.closed_forms import cut, required_ratio, trade_off_s
from thinwire.advisor.collectives import ring_all_reduce_s
from thinwire.advisor.profile import Cluster, LinkClass, Profile
from thinwire.advisor.simulate import ONE_STREAM, THINWIRE, Exchanged, simulate
from thinwire.errors import ProfileError
from thinwire.plan import Plan, build_plan
from thinwire.policy import PlanOptions

BASELINE = "dense:fp16"
WITHIN = 0.1  # of linear scaling
_BUCKET_NBYTES = 25 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a sweep.

    Attributes:
        label: a recipe, or what is varied beside.
        x, y: its points; y is inf where nothing helps.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One question.

    Attributes:
        name: for files and JSON.
        title: the question in words.
        x_name, y_name: what is on the axes, with units.
        curves: the answers.
        note: how it was found, in a sentence.
        marked: where the profile itself lies on the x axis.
    """

    name: str
    title: str
    x_name: str
    y_name: str
    curves: tuple[Curve, ...]
    note: str
    marked: float | None = None

    def crossings(self) -> list[tuple[str, float]]:
        """Return where each curve begins or ceases to lie below that of the 16-bit baseline: (label, x)."""
        base = next((curve for curve in self.curves if curve.label == BASELINE), None)
        found: list[tuple[str, float]] = []
        for curve in self.curves if base is not None else ():
            assert base is not None
            gaps = [mine - theirs for mine, theirs in zip(curve.y, base.y, strict=True)]
            for i in range(1, len(gaps)):
                if curve is not base and gaps[i - 1] * gaps[i] < 0:  # straight between two points of the log scale
                    share = gaps[i - 1] / (gaps[i - 1] - gaps[i])
                    found.append((curve.label, curve.x[i - 1] * (curve.x[i] / curve.x[i - 1]) ** share))
        return found


def sweeps(
    profile: Profile, recipes: Sequence[str], *, on_sweep: Callable[[str], object] = lambda name: None
) -> Iterator[Sweep]:
    """Yield the sweeps, one after another.

    Networks that differ from the profile's are made of equal links: what was measured of its collectives, and of links
    that are not as the others, holds for that one network and is left out.

    Args:
        profile: what is varied.
        recipes: to compare; DDP with 32 and with 16 bits come first.
        on_sweep: called with what comes next.

    Raises:
        ProfileError: fewer than two hosts, or kernels whose speed the profile does not have.
        RecipeError: an unknown recipe, or one that has no room for so many ranks.
    """
    if profile.cluster.hosts < 2:
        raise ProfileError(f"expected at least 2 hosts, between which a network lies, got {profile.cluster.hosts}")
    equal = _with_cluster(profile, collectives=(), exceptions=())
    ask = _Question(equal, tuple(dict.fromkeys(("dense", BASELINE, *recipes))))
    between = equal.cluster.between
    for make in (_bandwidth, _latency, _compute, _workers):
        on_sweep(make.__name__.removeprefix("_"))
        yield make(ask, between)
    on_sweep("closed forms")
    yield _codec(ask, between)
    yield _batch(ask, between)


class _Question:
    """Recipes on one profile, whose messages are laid out once."""

    def __init__(self, profile: Profile, recipes: tuple[str, ...]) -> None:
        self.profile, self.recipes = profile, recipes
        self._made = {recipe: self._lay_out(recipe, profile) for recipe in recipes}

    @staticmethod
    def _lay_out(recipe: str, profile: Profile) -> Exchanged:
        cluster = profile.cluster
        options = PlanOptions(node_sizes=cluster.ranks_per_host)
        plan = build_plan(profile.computation.named_tensors(), recipe, cluster.world_size, options)
        return Exchanged.of(plan, profile)

    def seconds(self, recipe: str, link: LinkClass) -> float:
        """Return a step's seconds over another link."""
        return _step_s(self._made[recipe], _with_cluster(self.profile, between=link))

    def codec_s(self, recipe: str) -> float:
        """Return the core-seconds of a step's kernels."""
        return simulate(self._made[recipe], self.profile).codec_s

    def plan(self, recipe: str) -> Plan:
        """Return what each parameter gets."""
        return self._made[recipe].plan

    def with_hosts(self, recipe: str, hosts: int) -> float:
        """Return a step's seconds on another number of hosts."""
        profile = _with_cluster(self.profile, hosts=hosts)
        return _step_s(self._lay_out(recipe, profile), profile)

    def curves(self, x: Sequence[float], of: Callable[[str, float], float]) -> tuple[Curve, ...]:
        """Return a curve for every recipe."""
        return tuple(Curve(label=r, x=tuple(x), y=tuple(of(r, each) for each in x)) for r in self.recipes)


def _step_s(made: Exchanged, profile: Profile) -> float:
    return simulate(made, profile, driving=ONE_STREAM if made.plan.is_dense else THINWIRE).step_s


def _with_cluster(profile: Profile, **changes: object) -> Profile:
    cluster: Cluster = dataclasses.replace(profile.cluster, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(profile, cluster=cluster)


def _spread(low: float, high: float, num: int) -> list[float]:
    """Return numbers at equal ratios."""
    return [low * (high / low) ** (i / (num - 1)) for i in range(num)]


def _bandwidth(ask: _Question, between: LinkClass) -> Sweep:
    rates = _spread(10e6, 100e9, 25)
    return Sweep(
        name="bandwidth",
        title="A faster or a slower network",
        x_name="bit/s of each host",
        y_name="seconds of a step",
        curves=ask.curves(rates, lambda r, x: ask.seconds(r, dataclasses.replace(between, beta=x / 8))),
        note="Simulated, at the profile's latency.",
        marked=8 * between.beta,
    )


def _latency(ask: _Question, between: LinkClass) -> Sweep:
    return Sweep(
        name="latency",
        title="Hosts farther apart",
        x_name="seconds one way",
        y_name="seconds of a step",
        curves=ask.curves(_spread(1e-5, 0.1, 17), lambda r, x: ask.seconds(r, dataclasses.replace(between, alpha_s=x))),
        note="Simulated, at the profile's rate. A ring waits 2 (p-1) times a bucket, an exchange of blocks twice.",
        marked=between.alpha_s,
    )


def _compute(ask: _Question, between: LinkClass) -> Sweep:
    def seconds(recipe: str, faster: float) -> float:
        # All but the network takes 1/c of the time: as if the network took c times as long, in units of 1/c.
        slower = dataclasses.replace(between, alpha_s=between.alpha_s * faster, beta=between.beta / faster)
        return ask.seconds(recipe, slower) / faster

    return Sweep(
        name="compute",
        title="Faster computation and kernels, the same network",
        x_name="times as fast",
        y_name="seconds of a step",
        curves=ask.curves(_spread(1.0, 16.0, 13), seconds),
        note="Simulated; links inside hosts become faster, too.",
        marked=1.0,
    )


def _workers(ask: _Question, between: LinkClass) -> Sweep:
    most = max(64, 2 * ask.profile.cluster.hosts)
    hosts = [2**i for i in range(1, int(math.log2(most)) + 1)]
    return Sweep(
        name="workers",
        title="More hosts",
        x_name="hosts",
        y_name="seconds of a step",
        curves=ask.curves(hosts, lambda r, x: ask.with_hosts(r, int(x))),
        note="Simulated, at the profile's rate and latency; every rank computes as much as before.",
        marked=float(ask.profile.cluster.hosts),
    )


def _codec(ask: _Question, between: LinkClass) -> Sweep:
    compressed = [recipe for recipe in ask.recipes if not ask.plan(recipe).is_dense]
    chosen = max(compressed, key=lambda recipe: ask.plan(recipe).compression_ratio, default=None)
    faster = _spread(1.0, 32.0, 21)
    computation, hosts = ask.profile.computation, ask.profile.cluster.hosts
    curves: list[Curve] = []
    if chosen is not None:
        plan, codec_s = ask.plan(chosen), ask.codec_s(chosen)
        nbytes = plan.raw_nbytes / plan.compression_ratio

        def comm(nbytes: float) -> float:
            return ring_all_reduce_s(nbytes, hosts, between)

        for larger in (1.0, 2.0, 3.0):
            seconds = [
                computation.forward_s
                + computation.optimizer_s
                + trade_off_s(computation.backward_s, codec_s, nbytes, comm, faster=k, larger=larger)
                for k in faster
            ]
            curves.append(Curve(label=f"l = {larger:g}", x=tuple(faster), y=tuple(seconds)))
        base = ask.seconds(BASELINE, between)
        curves.append(Curve(label="DDP, 16 bits", x=tuple(faster), y=(base,) * len(faster)))
    return Sweep(
        name="codec",
        title=f"A codec k times as fast as {chosen}'s, for l k times the bytes",
        x_name="k, times as fast",
        y_name="seconds of a step",
        curves=tuple(curves),
        note="In closed form: T_comp + T_encdec / k + T_comm(l k b), compression after backward.",
    )


def _batch(ask: _Question, between: LinkClass) -> Sweep:
    hosts, backward_s = ask.profile.cluster.hosts, ask.profile.computation.backward_s
    buckets = cut(ask.plan("dense").raw_nbytes, _BUCKET_NBYTES)
    times = _spread(0.25, 16.0, 25)
    curves: list[Curve] = []
    for rate in (1e8, 1e9, 1e10, 2.5e10):
        link = dataclasses.replace(between, beta=rate / 8)

        def comm(nbytes: float, link: LinkClass = link) -> float:
            return ring_all_reduce_s(nbytes, hosts, link)

        ratios = tuple(required_ratio(backward_s * each, buckets, comm, within=WITHIN) for each in times)
        curves.append(Curve(label=f"{rate / 1e9:g} Gbit/s", x=tuple(times), y=ratios))
    return Sweep(
        name="batch",
        title=f"The ratio that scales to within {WITHIN:.0%} of linear",
        x_name="times the batch",
        y_name="compression ratio, free of cost",
        curves=tuple(curves),
        note="In closed form: the least R with max(T_comp, (k-1) T_comm(b/R)) + T_comm(b_hat/R) small enough.",
        marked=1.0,
    )
