"""From a population at its end to the result: the answer, the estimates, the warnings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from guided_smc.diagnostics import (
    FEWEST_FAMILIES,
    Families,
    divergence,
    diversity,
    log_evidence_error,
    mean,
)
from guided_smc.options import GRAPH_FAILED
from guided_smc.population import Population, Status
from guided_smc.potentials import Tilt
from guided_smc.resampling import normalise
from guided_smc.results import (
    Diversity,
    FinishReason,
    Particle,
    Result,
    RewardEstimate,
    Step,
    T,
)

_POOR_COVER = -2.0  # of `Population.coverage`
_DOUBTFUL = 0.01  # of the probability; less that was refused without being sure is not told

_REASONS: dict[int, FinishReason] = {
    Status.LIVE: "failed",
    Status.STOPPED: "stop",
    Status.CUT: "length",
    Status.DEAD: "failed",
    Status.DEAD_AT_CAP: "length",
}


def result(population: Population[T]) -> Result[T]:
    """Select the answer and report everything."""
    request, scores = population.request, population.scores
    log_w = population.comparable_log_w
    weights = normalise(log_w)
    shares = _shares(population, weights)
    log_evidence = population.total_log_evidence - float(np.log(1 + population.restarts))
    names = population.names
    steps = [step for step in population.steps if step.start == population.restarts]
    lineage = _lineage(steps, population.n)
    per_token = _token_log_probabilities(steps, lineage)
    particles = tuple(
        Particle(
            text=population.text(s, True),
            token_ids=population.token_ids(s),
            finish_reason=_REASONS[int(population.status[s])],
            log_weight=float(log_w[s]),
            weight=float(weights[s]),
            share=float(shares[s]),
            log_p=float(population.log_p[s]),
            log_q=float(population.log_q[s]),
            token_log_p=per_token[s][0],
            token_log_q=per_token[s][1],
            log_potentials={n: float(scores.log_psi[s, i]) for i, n in enumerate(names)},
            rewards={
                n: float(scores.rewards[s, i])
                for i, n in enumerate(names)
                if not np.isnan(scores.rewards[s, i])
            },
            ancestors=tuple(lineage[:, s].tolist()),
        )
        for s in range(population.n)
    )
    selected = _select(population, shares, particles)
    if selected:
        best = selected[0]
        finish_reason = particles[best].finish_reason
    else:
        best = int(np.argmax(population.last_finite_log_w))
        at_cap = bool(np.any(population.status == Status.DEAD_AT_CAP))
        finish_reason = "length" if at_cap else "failed"
    families = Families(population.family, population.luck)
    kl = rewards = log_evidence_std_error = None
    if selected:
        counts = weights > 0
        log_p = np.where(counts, population.log_p, 0.0)
        ratio = (population.options.power - 1.0) * log_p + scores.log_psi.sum(axis=1)
        kl = divergence(ratio, population.total_log_evidence, weights, families)
        rewards = _rewards(population, weights, families, best)
        if not population.restarts:
            log_evidence_std_error = log_evidence_error(weights, families)
    spread = diversity(weights, families, lineage, tuple(p.text for p in particles))
    return Result(
        index=request.index,
        text=particles[best].text,
        token_ids=particles[best].token_ids,
        finish_reason=finish_reason,
        log_evidence=log_evidence,
        log_evidence_std_error=log_evidence_std_error,
        kl=kl,
        rewards=rewards or {},
        diversity=spread,
        particles=particles,
        selected=selected,
        steps=tuple(population.steps),
        usage=population.usage,
        seed=request.seed,
        restarts=population.restarts,
        warnings=(*request.warnings, *_warnings(population, spread)),
        constraint=request.language,
        token_texts=_token_texts(population),
        _parse=request.parse,
        _key=request.value_key,
    )


def _lineage(steps: Sequence[Step], n: int) -> np.ndarray:
    """int64 `[steps, N]`: slot of each final particle's ancestor at each step.

    N is the final one; a step's slots are as many as it had particles.
    """
    lineage = np.empty((len(steps), n), dtype=np.int64)
    slots = np.arange(n)
    for t in range(len(steps) - 1, -1, -1):
        slots = np.asarray(steps[t].ancestors)[slots]
        lineage[t] = slots
    return lineage


def _token_log_probabilities(
    steps: Sequence[Step], lineage: np.ndarray
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Log p and log q̃ of every token of each final particle, end tokens included."""
    found = []
    for slots in lineage.T.tolist():
        own = list(zip(steps, slots, strict=True))
        log_p = tuple(x for step, s in own for x in step.token_log_p[s])
        log_q = tuple(x for step, s in own for x in step.token_log_q[s])
        found.append((log_p, log_q))
    return found


def _token_texts(population: Population[T]) -> dict[int, bytes]:
    tokens = {t for step in population.steps for drawn in step.tokens for t in drawn}
    return {t: population.vocabulary.tokens[t] or b"" for t in sorted(tokens)}


def _rewards(
    population: Population[T],
    weights: np.ndarray,
    families: Families,
    best: int,
) -> dict[str, RewardEstimate]:
    potentials, scores = population.request.potentials, population.scores
    tilts = [i for i, p in enumerate(potentials) if isinstance(p, Tilt)]
    counts = weights > 0
    tilt = np.where(counts, scores.log_psi[:, tilts].sum(axis=1), 0.0)
    untilted = normalise(np.where(counts, np.log(np.where(counts, weights, 1.0)) - tilt, -np.inf))
    names = population.names
    found: dict[str, RewardEstimate] = {}
    for i in tilts:
        values = scores.rewards[:, i]
        found[names[i]] = RewardEstimate(
            tilted=mean(values, weights, families),
            untilted=mean(values, untilted, families),
            chosen=float(values[best]),
        )
    return found


def _shares(population: Population[T], weights: np.ndarray) -> np.ndarray:
    """float64 `[N]`: how likely the method makes each particle the answer; all 0 if all are dead.

    SMC and importance sampling draw from the weights. The others do what they are known for, with
    candidates of positive weight: they look at rewards alone, or at nothing.
    """
    alive = weights > 0
    method = population.options.method
    if method in ("smc", "importance") or not alive.any():
        return weights
    if method == "token_masking":
        return alive / alive.sum()
    potentials = population.request.potentials
    tilts = [i for i, p in enumerate(potentials) if isinstance(p, Tilt)]
    tilt = np.where(alive, population.scores.log_psi[:, tilts].sum(axis=1), -np.inf)
    if method == "soft_best_of_n":
        return normalise(tilt)
    top = alive & (tilt == tilt.max())
    return top / top.sum()


def _select(
    population: Population[T], shares: np.ndarray, particles: Sequence[Particle]
) -> tuple[int, ...]:
    if population.all_dead:
        return ()
    # Drawn whatever the way of selection, so that it does not change the particles' draws.
    u = population.rng.random()
    select = population.options.select
    if select == "sample":
        cdf = np.cumsum(shares)
        drawn = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
        return (min(drawn, int(np.flatnonzero(shares)[-1])),)
    if select == "best":
        return (int(np.argmax(shares)),)
    total: dict[Hashable, float] = {}
    heaviest: dict[Hashable, int] = {}
    for s in np.flatnonzero(shares).tolist():
        key = population.request.value_key(particles[s].text)
        total[key] = total.get(key, 0.0) + float(shares[s])
        if key not in heaviest or shares[s] > shares[heaviest[key]]:
            heaviest[key] = s
    ranked = tuple(heaviest[k] for k in sorted(total, key=lambda k: -total[k]))
    return ranked[:1] if select == "vote" else ranked


def _warnings(population: Population[T], spread: Diversity) -> list[str]:
    """What the outcome says."""
    request, options = population.request, population.options
    found = list(request.warnings_of_loss if population.cut_short else ())
    if population.all_dead and request.languages:
        found.append(
            f"every particle died under {' & '.join(request.languages)}: perhaps no text satisfies "
            "all of them (guided_smc.grammars.sample_members looks for one without a model)"
        )
    if population.given_up and population.unmasked is not None:
        found.append(
            f"{len(population.given_up)} draw(s) gave up after {population.unmasked.max_rejected} "
            "tokens that the constraint refused, with up to "
            f"{max(population.given_up):.2g} of the probability untried: what they did not find "
            f"counts as impossible, and log_evidence may be too low; {population.unmasked.remedy}"
        )
    doubted = [share for share in population.doubted if share >= _DOUBTFUL]
    if doubted:
        found.append(
            f"near max_tokens, {len(doubted)} draw(s) refused tokens with up to {max(doubted):.2g} "
            "of the probability because no end was found behind them in time, though not every end "
            "was tried: log_evidence may be too low; raise max_tokens"
        )
    free = request.constraint is None and options.power == 1.0
    if free and population.coverage < _POOR_COVER:
        found.append(
            f"the draft's tokens have changed log_evidence by {population.coverage:.1f} where 0 is "
            "exact: the draft hardly ever says what the target would; lower block_size, raise "
            "n_particles, or use a closer draft"
        )
    tilted = any(isinstance(p, Tilt) and p.beta != 0 for p in request.potentials)
    if tilted and options.n_particles == 1:
        found.append(
            "with one particle a reward changes nothing: there is nothing to choose from; raise "
            "n_particles"
        )
    elif tilted and 0 < spread.independent < FEWEST_FAMILIES:
        found.append(
            f"the answers are {spread.independent:.1f} independent ones in effect: nearly all "
            "particles go back to one, so this run cannot tell how far it is from the posterior; "
            "raise n_particles, use islands, or lower beta or the reward's steering"
        )
    if options.n_particles > 1 and not population.all_dead:
        found += _idle_rewards(population)
    failed = [where for where in population.usage.steps_on if GRAPH_FAILED in where]
    return found + [f"steps ran {where}" for where in failed]


def _idle_rewards(population: Population[T]) -> list[str]:
    """What to say of rewards that no particle had more of than another, at no step."""
    steps = [step for step in population.steps if step.start == population.restarts]
    found = []
    for name, potential in zip(population.names, population.request.potentials, strict=True):
        if not isinstance(potential, Tilt) or potential.beta == 0:
            continue
        told = [{x for x in step.rewards.get(name, ()) if x is not None} for step in steps]
        if all(len(values) <= 1 for values in told):
            last = "".join(f"{value:g}" for value in told[-1]) if told else ""
            found.append(
                f"reward {name!r} has changed nothing: at each step it was the same for every "
                f"particle{f' ({last} in the end)' if last else ''}; raise n_particles, or reward "
                "what the model says more often"
            )
    return found
