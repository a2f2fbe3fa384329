"""What a tilt buys and what it costs: mean reward against KL, beside best-of-N.

The *frontier* of a reward is the curve of `E_π[R]` over `KL(π‖p)` for the tilted posteriors
`π ∝ p · exp(β·R)`: no law that is as near to p has a larger mean reward. Best-of-N, soft best-of-N
and a finite number of particles stay on it or below.

KL is measured from p under the same constraint, if there is one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from guided_smc.errors import GuidedSMCError, OptionError
from guided_smc.options import Options, check_beta, columns_of_each, make_options
from guided_smc.results import ErrorEvent, Estimate, Result, ResultEvent, RewardEstimate

if TYPE_CHECKING:
    from guided_smc.api import LM

BETAS = (0.0, 0.5, 1.0, 2.0, 4.0)

_RESAMPLING = (
    *("ess_threshold", "resampling", "islands", "block_size", "draft_temperature"),
    *("target_ess", "min_particles", "max_particles"),
)

_DRAWS = 128  # of other candidates, to estimate the law of soft best-of-N


@dataclass(frozen=True)
class Point:
    """A way to choose an answer, over all prompts.

    Attributes:
        method: `"smc"`, `"best_of_n"` or `"soft_best_of_n"`.
        beta: β; None for best-of-N, which has none.
        n: Particles, or candidates.
        reward: Mean R of the answer: over prompts, and in each over what might have been chosen.
        kl: Nats from the model, under the constraint: of the posterior for SMC; for best-of-N
            `log n − (n−1)/n`, which is an upper bound where rewards tie (Beirami et al.,
            "Theoretical guarantees on the best-of-n alignment policy", 2024); for soft best-of-N
            as estimated from the candidates. To these two comes how far a constraint's token
            masking draws their candidates from where the model would, under the constraint.
        tilted: `E_π[R]`, for SMC.
        independent: Effective number of independent answers, mean over prompts, for SMC.
        target_tokens: Drawn from the target, mean over prompts.
        prompts: How many prompts had an answer.
    """

    method: Literal["smc", "best_of_n", "soft_best_of_n"]
    beta: float | None
    n: int
    reward: Estimate
    kl: Estimate
    target_tokens: float
    prompts: int
    tilted: Estimate | None = None
    independent: float | None = None


@dataclass
class Sweep:
    """Runs over values of β, and what they come to.

    Attributes:
        name: Of the reward.
        betas: β of each SMC run.
        n_particles: Particles of each run, and candidates of each best-of-N.
        results: By β, the results of the prompts by their index. Under None are the candidates:
            drawn without a tilt and without resampling.
        failed: Prompts without an answer, by β.
        errors: What went wrong with some of these.
    """

    name: str
    betas: tuple[float, ...]
    n_particles: int
    results: dict[float | None, dict[int, Result[Any]]] = field(default_factory=dict, repr=False)
    failed: dict[float | None, int] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)

    @property
    def points(self) -> tuple[Point, ...]:
        """The frontier, best-of-n for n = 1, 2, 4, ... N, and soft best-of-N at each β above 0."""
        candidates = self.results.get(None, {})
        found = [self._smc(beta) for beta in self.betas if self.results.get(beta)]
        if candidates:
            sizes = {2**k for k in range(int(math.log2(self.n_particles)) + 1)}
            found += [self._best_of(n) for n in sorted(sizes | {self.n_particles})]
            if self.n_particles > 1:
                found += [self._soft_best_of(beta) for beta in self.betas if beta != 0]
        return tuple(found)

    def _smc(self, beta: float) -> Point:
        results = self.results[beta]
        plain = self.results.get(None, {})
        kl, tilted = [], []
        for i, r in results.items():
            assert r.kl is not None
            # From p under the constraint: less what the constraint alone costs.
            kl.append(r.kl.value + (plain[i].log_evidence if i in plain else 0.0))
            tilted.append(_reward(r).tilted.value)
        runs = list(results.values())
        alone = _reward(runs[0]).tilted.std_error
        return Point(
            method="smc",
            beta=beta,
            n=self.n_particles,
            reward=_over_prompts([expected_reward(r) for r in runs], alone),
            kl=_over_prompts(kl, runs[0].kl.std_error if runs[0].kl else None),
            tilted=_over_prompts(tilted, alone),
            independent=float(np.mean([r.diversity.independent for r in runs])),
            target_tokens=float(np.mean([r.usage.particle_tokens for r in runs])),
            prompts=len(runs),
        )

    def _best_of(self, n: int) -> Point:
        return self._choice(
            "best_of_n",
            n,
            None,
            lambda pool: (best_of(pool.rewards, n), math.log(n) - (n - 1) / n),
        )

    def _soft_best_of(self, beta: float) -> Point:
        return self._choice(
            "soft_best_of_n",
            self.n_particles,
            beta,
            lambda pool: soft_best_of(pool.rewards, beta),
        )

    def _choice(
        self,
        method: Literal["best_of_n", "soft_best_of_n"],
        n: int,
        beta: float | None,
        choose: Callable[[Pool], tuple[np.ndarray, float]],
    ) -> Point:
        """A choice among candidates, with the chance of each and its KL from their law."""
        means, kls = [], []
        for result in self.results[None].values():
            pool = candidates(result)
            share, kl = choose(pool)
            means.append(_mean(pool.rewards, share))
            kls.append(kl + _mean(pool.log_excess, share))
        tokens = [r.usage.particle_tokens for r in self.results[None].values()]
        return Point(
            method=method,
            beta=beta,
            n=n,
            reward=_over_prompts(means, None),
            kl=_over_prompts(kls, None),
            target_tokens=float(np.mean(tokens)) * n / self.n_particles,
            prompts=len(means),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data: the points, and what was swept."""
        return {
            "reward": self.name,
            "betas": list(self.betas),
            "n_particles": self.n_particles,
            "failed": [{"beta": beta, "prompts": n} for beta, n in self.failed.items() if n],
            "points": [asdict(point) for point in self.points],
        }

    def save(self, path: str | Path) -> None:
        """Write a file by its suffix: `.json` for the data, `.png` or `.svg` for the plot.

        Raises:
            OptionError: Another suffix, or matplotlib is missing.
        """
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        elif suffix in (".png", ".svg", ".pdf"):
            from guided_smc.plotting import draw_frontier

            draw_frontier(self, path)
        else:
            raise OptionError(f"{str(path)!r} must end in .json, .png, .svg or .pdf")


def measure(
    sweep: Sweep,
    lm: LM,
    prompts: Sequence[Any],
    reward: Any,
    *,
    each: Sequence[Mapping[str, Any]] | None = None,
    max_rows: int = 64,
    **settings: Any,
) -> Iterator[Result[Any] | Exception]:
    """Run every β and the candidates on every prompt; yields each result as it is put down, and
    the error of a prompt that failed: the others go on.

    Args:
        sweep: Is filled. Its runs with β are SMC; all use the same seeds.
        lm: The model.
        prompts: As `LM.generate` takes a list of them.
        reward: As `LM.request` takes it. Its own β is not used.
        each: Further arguments of `LM.request` for each prompt.
        max_rows: Most particles at once.
        settings: Further arguments of `LM.request` for all prompts.

    Raises:
        OptionError, PromptError, ConstraintError: What cannot work, before anything runs.
    """
    requests = []
    runs: list[float | None] = [None, *sweep.betas]
    for run, beta in enumerate(runs):
        for i, prompt in enumerate(prompts):
            given = {**settings, **(each[i] if each else {}), "n_particles": sweep.n_particles}
            request = lm.request(
                prompt,
                index=i,
                reward=reward,
                beta=beta or 0.0,
                **(_of_candidates(given) if beta is None else given),
            )
            request.index = run * len(prompts) + i
            requests.append(request)
    for event in lm.run(requests, max_rows=max_rows):
        if isinstance(event, (ErrorEvent, ResultEvent)):
            beta, i = runs[event.index // len(prompts)], event.index % len(prompts)
        if isinstance(event, ErrorEvent):
            sweep.failed[beta] = sweep.failed.get(beta, 0) + 1
            sweep.errors.append(event.error)
            yield event.error
        if isinstance(event, ResultEvent):
            if event.result.selected:
                sweep.results.setdefault(beta, {})[i] = event.result
            else:
                sweep.failed[beta] = sweep.failed.get(beta, 0) + 1
            yield event.result


def _of_candidates(given: dict[str, Any]) -> dict[str, Any]:
    """The same request without what resampling and drafting alone take."""
    options = make_options(given.get("options")).model_dump(exclude_unset=True)
    options |= {name: value for name, value in given.items() if name in Options.model_fields}
    others = {k: v for k, v in given.items() if k not in options and k != "options"}
    kept = {name: value for name, value in options.items() if name not in _RESAMPLING}
    return {**others, **kept, "method": "importance"}


def check_betas(betas: Iterable[Any]) -> tuple[float, ...]:
    """Values of β, each once, ascending.

    Raises:
        OptionError: One is not finite, or there is none.
    """
    found = tuple(sorted({check_beta(beta) for beta in betas}))
    if not found:
        raise OptionError("betas must name at least one value")
    return found


def run(
    lm: LM,
    prompts: Sequence[Any],
    reward: Any,
    betas: Iterable[float],
    n_particles: int,
    **settings: Any,
) -> Sweep:
    """`LM.sweep`, of a list of prompts."""
    if not prompts:
        raise OptionError("a sweep needs at least one prompt")
    for name in ("beta", "method", "select"):
        if name in settings:
            raise OptionError(f"{name} is the sweep's own; leave it out")
    columns = settings.pop("columns", None)
    if columns is not None:
        settings["each"] = [{"columns": one} for one in columns_of_each(columns, len(prompts))]
    sweep = Sweep(_name(reward), check_betas(betas), n_particles)
    for outcome in measure(sweep, lm, prompts, reward, **settings):
        if isinstance(outcome, Exception):
            raise outcome
    if not any(sweep.results.values()):
        raise GuidedSMCError(
            "no prompt of the sweep had an answer; try one of them with generate to see why"
        )
    return sweep


def _name(reward: Any) -> str:
    name = getattr(reward, "name", None) or getattr(reward, "__name__", None)
    return name or type(reward).__name__


def _key(result: Result[Any]) -> str:
    """The name of the reward that was swept: requests put it last."""
    return list(result.rewards)[-1]


def _reward(result: Result[Any]) -> RewardEstimate:
    """What became of it."""
    return result.rewards[_key(result)]


def expected_reward(result: Result[Any]) -> float:
    """Mean R of what might have been chosen."""
    key = _key(result)
    return math.fsum(p.share * p.rewards[key] for p in result.particles if p.share > 0)


@dataclass(frozen=True)
class Pool:
    """Finished candidates of one prompt, as they were drawn.

    Attributes:
        rewards: float64 `[n]`, R.
        log_excess: float64 `[n]`, by how much each is likelier to be drawn than under the model and
            the constraint: token masking draws so, and a mean of this is what it adds to a KL. 0
            without a constraint.
    """

    rewards: np.ndarray
    log_excess: np.ndarray


def candidates(result: Result[Any]) -> Pool:
    """Of a run without a tilt and without resampling."""
    key = _key(result)
    alive = [p for p in result.particles if p.weight > 0]
    log_weights = np.array([p.log_weight for p in alive])
    return Pool(np.array([p.rewards[key] for p in alive]), result.log_evidence - log_weights)


def best_of(rewards: np.ndarray, n: int) -> np.ndarray:
    """How likely each candidate is to be the largest of n, over all choices of n among them."""
    n = min(n, len(rewards))
    choices = math.comb(len(rewards), n)
    share = np.empty(len(rewards))
    share[np.argsort(rewards, kind="stable")] = [
        math.comb(i, n - 1) / choices for i in range(len(rewards))
    ]
    return share


def soft_best_of(rewards: np.ndarray, beta: float, *, seed: int = 0) -> tuple[np.ndarray, float]:
    """How likely each candidate is to be drawn by `exp(β·R)` among them, and the KL of the answer's
    law from theirs.

    A candidate's density rises by `E[N e^{βR} / (e^{βR} + Σ e^{βR'})]`, over the N − 1 others;
    these are drawn anew from the other candidates. (With itself among them the KL came out a sixth
    too low at N = 8, without by a twentieth too high, for normal and Poisson rewards.)
    """
    n = len(rewards)
    log_tilt = beta * rewards
    tilt = np.exp(log_tilt - log_tilt.max()) if np.isfinite(log_tilt.max()) else np.ones(n)
    if n == 1:
        return np.ones(1), 0.0
    rng = np.random.default_rng(seed)
    density = np.zeros(n)
    for i in np.flatnonzero(tilt):
        others = rng.choice(np.delete(tilt, i), size=(_DRAWS, n - 1)).sum(axis=1)
        density[i] = np.mean(n * tilt[i] / (tilt[i] + others))
    density /= density.mean()
    log_density = np.log(np.where(density > 0, density, 1.0))
    return tilt / tilt.sum(), float(np.mean(density * log_density))


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    """`Σ w v`, where a weight of 0 takes away infinities."""
    counts = weights > 0
    return float(weights[counts] @ values[counts])


def _over_prompts(values: Sequence[float], alone: float | None) -> Estimate:
    """Mean over prompts; its error by how they differ, or that within the run of a single one."""
    if len(values) == 1:
        return Estimate(values[0], alone)
    mean = float(np.mean(values))
    if not math.isfinite(mean):
        return Estimate(mean, None)
    return Estimate(mean, float(np.std(values, ddof=1)) / math.sqrt(len(values)))
