"""Ranks plans for a model on a cluster by predicted step time; "no compression" is one of them, and often wins."""

import dataclasses as dc
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from thinwire.advisor.apart import Apart, simulate_apart
from thinwire.advisor.findings import rate_text, time_text, warnings
from thinwire.advisor.probe import RECIPES, plan_for
from thinwire.advisor.profile import Cluster, Profile
from thinwire.advisor.simulate import ONE_STREAM, SERVED, THINWIRE, Exchanged, Step, simulate
from thinwire.aggregators import Dense
from thinwire.aggregators.checks import typical_contract
from thinwire.compressors import Unbiased, is_exact
from thinwire.errors import ProfileError, RecipeError
from thinwire.plan import Plan, PlannedParam

SCHEMA = 2
DENSE, SIXTEEN_BIT = "dense", ("dense:fp16", "fp16")
BUCKET_CAPS_MB = (None, 1.0, 4.0, 8.0)
"""Of `DistributedDataParallel`; None is its default, 25 MiB after a first bucket of 1 MiB."""

WORTH = 0.05  # a plan that is less than this faster than the best of 16 bits and dense is not worth having
APART_STEPS = 10  # up to so many steps apart the risk is "medium", beyond "high"
CLOSE = 0.02  # plans so near each other are equally fast: the one with the least risk is better

Risk = Literal["none", "low", "medium", "high"]
RISKS: tuple[Risk, ...] = ("none", "low", "medium", "high")


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One plan, and what is predicted of it.

    Attributes:
        recipe: as `attach` takes it, after "servers:N/" with N servers on every host; of a local method its name.
        bucket_cap_mb: DDP's, the best of some; None is its default.
        step_s: seconds.
        speedup_vs_ddp: over plain DDP with its best bucket size.
        speedup_vs_16bit: over the faster of two ways to send 16 bits, each with its best bucket size.
        exposed_comm_s: seconds of a step that are neither computing nor hidden behind it.
        wire_nbytes: bytes that the busiest rank sends in a step.
        extra_memory_nbytes: of residuals and the like, on the rank that has most.
        risk: to accuracy: a class, by what is lost, not a measurement. none: exact. low: at most 1 % of the squared
            norm, nothing kept. medium: noise, or two bits an element and more with error feedback, or up to ten steps
            apart. high: fewer bits, or more steps apart.
        reason: why it is as fast as it is, in a sentence.
        sync_every: optimizer steps from exchange to exchange; more than 1 only with local methods, of which all figures
            are means over the steps.
    """

    recipe: str
    bucket_cap_mb: float | None
    step_s: float
    speedup_vs_ddp: float
    speedup_vs_16bit: float
    exposed_comm_s: float
    wire_nbytes: int
    extra_memory_nbytes: int
    risk: Risk
    reason: str
    sync_every: int = 1


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What `advise` says.

    Attributes:
        plans: the fastest first.
        best: the one to take, of those that exchange in every step: others change the training itself.
        pays: whether it compresses.
        verdict: that in a sentence or two.
        free: what helps without compressing anything.
        left_out: recipes that cannot be used here, and why.
        assumptions: of the profile.
    """

    plans: tuple[Advice, ...]
    best: Advice
    pays: bool
    verdict: str
    free: tuple[str, ...]
    left_out: dict[str, str]
    assumptions: tuple[str, ...]

    @property
    def every_step(self) -> tuple[Advice, ...]:
        """Those that exchange in every step."""
        return tuple(plan for plan in self.plans if plan.sync_every == 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema": SCHEMA,
            "plans": [dc.asdict(plan) for plan in self.plans],
            "best": self.best.recipe,
            "pays": self.pays,
            "verdict": self.verdict,
            "free": list(self.free),
            "left_out": self.left_out,
            "assumptions": list(self.assumptions),
        }


@dc.dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its messages by bucket size."""

    recipe: str
    plan: Plan
    exchanged: dict[float | None, Exchanged]

    @staticmethod
    def of(recipe: str, profile: Profile) -> "Candidate":
        """Plan a recipe for a profile.

        Raises:
            RecipeError: an unknown recipe.
            ProfileError: the number of ranks is too large for it, or its kernels were not measured.
        """
        plan = plan_for(profile.computation, profile.cluster, recipe)
        if plan is None:
            raise ProfileError(f"there is no room for the contributions of {profile.cluster.world_size} ranks")
        exchanged = {
            cap: Exchanged.of(plan, profile, bucket_cap_nbytes=None if cap is None else cap * 2**20)
            for cap in BUCKET_CAPS_MB
        }
        return Candidate(recipe, plan, exchanged)

    def predict(self, profile: Profile, cap: float | None) -> Step:
        """Simulate a step; only links and times may differ from the profile that it was planned for."""
        # Plain DDP issues one all-reduce after the other.
        thinwire = SERVED if self.plan.options.num_servers else THINWIRE
        return simulate(self.exchanged[cap], profile, driving=ONE_STREAM if self.plan.is_dense else thinwire)

    def best(self, profile: Profile) -> tuple[float | None, Step]:
        """Return the best bucket size, DDP's default where it is as good, and the step with it."""
        steps = {cap: self.predict(profile, cap) for cap in BUCKET_CAPS_MB}
        cap = min(steps, key=lambda cap: steps[cap].step_s)
        return (None, steps[None]) if steps[None].step_s <= 1.01 * steps[cap].step_s else (cap, steps[cap])


def advise(
    profile: Profile,
    recipes: Sequence[str] = RECIPES,
    on_recipe: Callable[[str], None] = lambda recipe: None,
    *,
    apart: Sequence[Apart] = (),
) -> Report:
    """Predict a step with every recipe, each with the bucket size that suits it, and rank them.

    Args:
        profile: cluster, model, kernels.
        recipes: to compare, with `dense` and 16 bits, which are always among them.
        on_recipe: called before each is predicted.
        apart: local methods to rank with them.

    Raises:
        RecipeError: an unknown recipe.
        ProfileError: kernels of the baselines were not measured.
    """
    candidates: dict[str, Candidate] = {}
    left_out: dict[str, str] = {}
    for recipe in dict.fromkeys([DENSE, *SIXTEEN_BIT, *recipes]):
        on_recipe(recipe)
        try:
            candidates[recipe] = Candidate.of(recipe, profile)
        except ProfileError as error:
            if recipe in (DENSE, *SIXTEEN_BIT):
                raise
            left_out[recipe] = str(error)
        except RecipeError as error:
            raise RecipeError(f"{recipe}: {error}") from error
    steps = {recipe: candidate.best(profile) for recipe, candidate in candidates.items()}
    dense_s = steps[DENSE][1].step_s
    half_s = min(steps[recipe][1].step_s for recipe in SIXTEEN_BIT)
    plans: list[Advice] = []
    for recipe, (cap, step) in steps.items():
        plan = candidates[recipe].plan
        plans.append(
            Advice(
                recipe=recipe,
                bucket_cap_mb=cap,
                step_s=step.step_s,
                speedup_vs_ddp=dense_s / step.step_s,
                speedup_vs_16bit=half_s / step.step_s,
                exposed_comm_s=step.exposed_s,
                wire_nbytes=round(float(step.sent_nbytes.max())),
                extra_memory_nbytes=max(plan.residual_nbytes(rank) for rank in _ranks(plan)),
                risk=risk_of(plan),
                reason=_reason(plan, step, steps[DENSE][1], profile),
            )
        )
    best = _choose(_ranked(plans))
    for method in apart:
        on_recipe(method.name)
        try:
            plans.append(_advice_apart(method, profile, dense_s, half_s))
        except ProfileError as error:
            left_out[method.name] = str(error)
    plans = _ranked(plans)
    pays = best.recipe != DENSE
    return Report(
        plans=tuple(plans),
        best=best,
        pays=pays,
        verdict=_verdict(best, [plan for plan in plans if plan.sync_every == 1], profile) + _apart(best, plans),
        free=tuple(_free(profile, candidates[DENSE], best, steps[DENSE])),
        left_out=left_out,
        assumptions=profile.assumptions,
    )


def _ranked(plans: Sequence[Advice]) -> list[Advice]:
    return sorted(plans, key=lambda plan: (plan.step_s, RISKS.index(plan.risk)))


def _advice_apart(apart: Apart, profile: Profile, dense_s: float, half_s: float) -> Advice:
    step = simulate_apart(apart, profile)
    each_s, meanwhile = step.exposed_s * apart.sync_every, ""
    if apart.overlap:
        meanwhile = f", while {apart.overlap} steps go on"
    parts = "the model" if len(apart.parts) == 1 else f"each of {len(apart.parts)} parts of it"
    numel = sum(param.info.numel for param in apart.plan.params)
    steps_apart: Risk = "medium" if apart.sync_every <= APART_STEPS else "high"
    risk = RISKS[max(RISKS.index(steps_apart), RISKS.index(risk_of(apart.plan)))]
    return Advice(
        recipe=apart.name,
        bucket_cap_mb=None,
        step_s=step.step_s,
        speedup_vs_ddp=dense_s / step.step_s,
        speedup_vs_16bit=half_s / step.step_s,
        exposed_comm_s=step.exposed_s,
        wire_nbytes=round(float(step.sent_nbytes.max())),
        extra_memory_nbytes=apart.nbytes_per_element * numel
        + max(apart.plan.residual_nbytes(rank) for rank in _ranks(apart.plan)),
        risk=risk,
        reason=f"exchanges {parts} once in {apart.sync_every} steps{meanwhile}, and waits {time_text(each_s)} in all",
        sync_every=apart.sync_every,
    )


def _ranks(plan: Plan) -> range:
    """Ranks that may differ in what they keep; of very many the first stand for all, since owners are dealt in turn."""
    return range(min(plan.world_size, 64))


def risk_of(plan: Plan) -> Risk:
    """Return the class of the plan's kind with the most risk."""
    found = {_risk(param) for param in plan.params}
    return next(risk for risk in reversed(RISKS) if risk in found)


def _risk(param: PlannedParam) -> Risk:
    aggregator = param.aggregator
    contracts = [typical_contract(kind) for kind in (aggregator.up, aggregator.down)]
    if isinstance(aggregator, Dense) and aggregator.wire_dtype is not None:
        return "low"
    if param.reason or all(map(is_exact, contracts)):
        return "none"
    if aggregator.feedback is None:
        if all(getattr(contract, "delta", 0.0) >= 0.99 for contract in contracts):
            return "low"
        return "medium" if all(isinstance(c, Unbiased) and c.omega <= 1 for c in contracts) else "high"
    sent = sum(p.aggregator.sent_once_nbytes(p.spec) for p in param.partitions)
    return "medium" if 8 * sent >= 2 * param.info.numel else "high"


def _choose(plans: Sequence[Advice]) -> Advice:
    """Return the one to take: the least risky of the fastest, if they are worth it, else plain DDP."""
    fastest = plans[0].step_s
    close = [plan for plan in plans if plan.step_s <= (1 + CLOSE) * fastest]
    best = min(close, key=lambda plan: (RISKS.index(plan.risk), plan.step_s))
    # Every step down the ladder of risk has to be worth it.
    for safer in sorted(plans, key=lambda plan: (RISKS.index(plan.risk), plan.step_s)):
        if RISKS.index(safer.risk) < RISKS.index(best.risk) and safer.step_s <= best.step_s / (1 - WORTH):
            return safer
    return best


def _reason(plan: Plan, step: Step, dense: Step, profile: Profile) -> str:
    """Say why a plan takes what it takes."""
    dense_hides = dense.exposed_s <= WORTH * dense.step_s
    if plan.params[0].aggregator.recipe() == DENSE and plan.is_dense:
        if dense_hides:
            return "the exchange hides behind backward as it is"
        return f"{time_text(step.wire_s)} on the wire, of which {time_text(step.exposed_s)} do not hide behind backward"
    ratio = float(dense.sent_nbytes.max() / max(step.sent_nbytes.max(), 1.0))
    saved_s = dense.step_s - step.step_s
    sends = f"sends {ratio:.3g} times less" if ratio >= 1 else f"sends {1 / ratio:.3g} times more"
    kernels = f"its kernels take {time_text(step.codec_s)} of a core"
    if ratio < 1:
        return f"{sends} than DDP on {profile.cluster.world_size} ranks"
    if dense_hides:
        return f"{sends}, but there is nothing to gain: DDP's exchange hides behind backward"
    if saved_s < WORTH * dense.step_s:
        result = f"saves {time_text(saved_s)} only" if saved_s >= 0 else f"takes {time_text(-saved_s)} longer"
        return f"{sends}, but {kernels}, and it {result}"
    if step.exposed_s <= WORTH * step.step_s:
        return f"{sends}, {kernels}, and nearly all of it hides behind backward"
    slowest = "the wire" if step.wire_s >= step.codec_s else "the processor"
    return f"{sends}, {kernels}; {slowest} decides: {time_text(step.exposed_s)} do not hide behind backward"


def _verdict(best: Advice, plans: Sequence[Advice], profile: Profile) -> str:
    dense = next(plan for plan in plans if plan.recipe == DENSE)
    if best.recipe == DENSE:
        other = next((plan for plan in plans if plan.recipe != DENSE), dense)
        gain = dense.step_s / other.step_s - 1
        if gain <= 0:
            return f"No: nothing beats plain DDP here ({time_text(dense.step_s)} a step)."
        return (
            f"No: plain DDP takes {time_text(dense.step_s)} a step, and the fastest plan, {other.recipe}, would save "
            f"{100 * (1 - 1 / (1 + gain)):.1f} %, which is not worth its risk ({other.risk})."
        )
    text = (
        f"Yes: {best.recipe} takes {time_text(best.step_s)} a step instead of {time_text(dense.step_s)} "
        f"({best.speedup_vs_ddp:.2f} times as fast as DDP, {best.speedup_vs_16bit:.2f} times as fast as with 16 bits); "
        f"risk to accuracy: {best.risk}."
    )
    computing = profile.computation.compute_s
    if best.exposed_comm_s > computing:
        text += f" Even so {100 * best.exposed_comm_s / best.step_s:.0f} % of a step are spent waiting."
    return text


def _apart(best: Advice, plans: Sequence[Advice]) -> str:
    """Name the safest of the fastest local methods, where they are worth it."""
    local = [plan for plan in plans if plan.sync_every > 1 and plan.step_s < (1 - WORTH) * best.step_s]
    if not local:
        return ""
    close = [plan for plan in local if plan.step_s <= (1 + CLOSE) * local[0].step_s]
    chosen = min(close, key=lambda plan: (plan.sync_every, RISKS.index(plan.risk), plan.step_s))
    return (
        f" If ranks may train apart for {chosen.sync_every} steps, {chosen.recipe} takes {time_text(chosen.step_s)} a "
        f"step; that changes the training, so compare losses (risk: {chosen.risk})."
    )


def _free(profile: Profile, dense: Candidate, best: Advice, dense_best: tuple[float | None, Step]) -> list[str]:
    """Return what to do before compressing anything, and what compressing cannot do."""
    found = list(warnings(profile.cluster))
    default, (cap, step) = dense.predict(profile, None), dense_best
    if cap is not None and step.step_s < 0.97 * default.step_s:
        found.append(
            f"plain DDP takes {time_text(step.step_s)} with bucket_cap_mb={cap:g} and {time_text(default.step_s)} with "
            "its default"
        )
    computing = profile.computation.compute_s
    if step.exposed_s <= WORTH * step.step_s:
        return found
    several = 4
    found.append(
        f"accumulate: with {several} micro-batches to an exchange (thinwire.accumulate) plain DDP takes "
        f"{time_text(computing + step.exposed_s / several)} for each instead of {time_text(step.step_s)}"
    )
    twice = _with_twice_the_batch(profile)
    double_s = dense.predict(twice, cap).step_s
    found.append(
        f"larger batch: twice as many examples, if computing then takes twice as long, make {time_text(double_s / 2)} "
        f"for as many as now take {time_text(step.step_s)}"
    )
    found.append(
        "where the model has BatchNorm, DDP sends its buffers in every forward pass: broadcast_buffers=False spares "
        "it, if each rank may keep its own statistics"
    )
    if best.exposed_comm_s > 0.1 * computing:
        every = math.ceil(best.exposed_comm_s / (0.1 * computing))
        found.append(
            f"synchronise less often: with {best.recipe}, an exchange every {every} steps (local SGD) would cost a "
            f"tenth of computing; in every step it costs {100 * best.exposed_comm_s / computing:.0f} %"
        )
    return found


def _with_twice_the_batch(profile: Profile) -> Profile:
    computation = profile.computation
    return dc.replace(
        profile,
        computation=dc.replace(
            computation,
            forward_s=2 * computation.forward_s,
            backward_s=2 * computation.backward_s,
            parameters=tuple(dc.replace(p, ready_s=2 * p.ready_s) for p in computation.parameters),
        ),
    )


def at_rate(profile: Profile, factor: float) -> Profile:
    """Return the profile with links between hosts, and collectives across them, `factor` times as fast."""
    cluster = profile.cluster
    fits = cluster.collectives
    if cluster.hosts > 1:
        fits = tuple(dc.replace(fit, beta=factor * fit.beta, points=()) for fit in fits)
    faster: Cluster = dc.replace(
        cluster,
        between=dc.replace(cluster.between, beta=factor * cluster.between.beta),
        exceptions=tuple(dc.replace(pair, beta=factor * pair.beta) for pair in cluster.exceptions),
        collectives=fits,
    )
    return dc.replace(profile, cluster=faster)


def sweep(profile: Profile, recipes: Sequence[str], factors: Sequence[float]) -> dict[str, list[tuple[float, float]]]:
    """Return, by recipe, (bytes per second between hosts, seconds of a step) along a range of rates."""
    found: dict[str, list[tuple[float, float]]] = {}
    profiles = [at_rate(profile, factor) for factor in factors]
    for recipe in recipes:
        candidate = Candidate.of(recipe, profile)
        found[recipe] = [(other.cluster.between.beta, candidate.best(other)[1].step_s) for other in profiles]
    return found


def describe_profile(profile: Profile) -> str:
    """Return what is advised on, in a line."""
    cluster, computation = profile.cluster, profile.computation
    gpus = f" of {cluster.ranks_per_host} ranks" if cluster.ranks_per_host > 1 else ""
    return (
        f"{profile.model or 'a model'}, {sum(p.numel for p in computation.parameters):,} parameters; {cluster.hosts} "
        f"hosts{gpus}, {rate_text(cluster.between.beta)}, {time_text(cluster.between.alpha_s)} one way; computing "
        f"takes {time_text(computation.compute_s)} a step"
    )
