"""What each number of particles and block size gives on this machine: predicted, and measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from guided_smc.adaptive import PRIOR_VARIANCE, DraftEstimate, best_block_size
from guided_smc.costs import CostModel
from guided_smc.options import BlockSize, Options

if TYPE_CHECKING:
    from guided_smc.api import LM

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short letter to a friend about a walk by the sea.",
)
"""What is measured where no prompts are given: answers to these go on for a while."""


@dataclass
class Setting:
    """A number of particles with a block size, and what was measured of them.

    Attributes:
        n_particles: N.
        block_size: K, or `"auto"`.
        rates: Tokens of the answer per second, prefill not counted, of each run.
        ess_shares: Mean of ESS / N over the steps of each run.
        estimates: What each run that drafted found of the draft.
        block_sizes: Of all steps.
    """

    n_particles: int
    block_size: BlockSize
    rates: list[float] = field(default_factory=list)
    ess_shares: list[float] = field(default_factory=list)
    estimates: list[DraftEstimate] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float | None:
        """Tokens/s returned: the median over the runs; None before the first."""
        return median(self.rates) if self.rates else None

    @property
    def ess_share(self) -> float | None:
        """ESS / N, the mean over the runs."""
        return fmean(self.ess_shares) if self.ess_shares else None

    @property
    def effective_rate(self) -> float | None:
        """Tokens/s times ESS: what N particles bring, counted by what their weights leave."""
        if self.rate is None or self.ess_share is None:
            return None
        return self.rate * self.ess_share * self.n_particles


@dataclass(frozen=True)
class Table:
    """The grid of settings.

    Attributes:
        costs: By which rates are predicted.
        options: Of the runs.
        settings: N by N, in the order of the block sizes.
    """

    costs: CostModel
    options: Options
    settings: tuple[Setting, ...]

    @classmethod
    def of(
        cls,
        costs: CostModel,
        options: Options,
        particles: Sequence[int],
        block_sizes: Sequence[BlockSize],
    ) -> Table:
        """With nothing measured yet."""
        return cls(costs, options, tuple(Setting(n, k) for n in particles for k in block_sizes))

    @property
    def particles(self) -> list[int]:
        """The numbers of particles, each once."""
        return list(dict.fromkeys(s.n_particles for s in self.settings))

    def predicted_rate(self, setting: Setting) -> float | None:
        """Tokens/s returned; None for `"auto"`, whose block size changes."""
        if setting.block_size == "auto":
            return None
        k = setting.block_size
        return (k + 1) / float(self.costs.step_seconds(setting.n_particles, k))

    def estimate(self, n_particles: int) -> DraftEstimate | None:
        """The mean of what was found of the draft with N particles; None if it never drafted."""
        found = [e for s in self.settings if s.n_particles == n_particles for e in s.estimates]
        if not found:
            return None
        return DraftEstimate(
            fmean(e.draft_variance for e in found), fmean(e.bonus_variance for e in found)
        )

    def auto_choice(self, n_particles: int) -> int:
        """The block size that `"auto"` comes to with what was found."""
        if not self.costs.draft:
            return 0
        return best_block_size(
            self.costs,
            self.estimate(n_particles) or DraftEstimate(PRIOR_VARIANCE),
            rows=n_particles,
            ess_threshold=self.options.ess_threshold,
            remaining=self.options.max_tokens,
            most=self.options.max_tokens - 1,
        )

    def recommended(self, n_particles: int) -> Setting | None:
        """The setting of N particles with the most effective tokens per second.

        A single particle has an ESS of 1 whatever its weight, so that no measurement tells what
        drafting costs it: there it is the block size nearest to what `"auto"` chooses.
        """
        measured = [s for s in self.settings if s.n_particles == n_particles and s.rates]
        if n_particles == 1:
            choice = self.auto_choice(1)
            fixed = [s for s in measured if s.block_size != "auto"]
            return min(fixed, key=lambda s: abs(int(s.block_size) - choice), default=None)
        return max(measured, key=lambda s: s.effective_rate or 0.0, default=None)


def measure(
    table: Table, lm: LM, prompts: Iterable[Any], *, repeats: int, seed: int, **settings: Any
) -> Iterator[Setting]:
    """Run every setting on every prompt, `repeats` times; yields each setting after its run.

    Settings take turns, so that what the machine does meanwhile hits all of them, and so that a
    table that is cut short is as even as can be.

    Args:
        table: Is filled.
        lm: The model.
        prompts: As `LM.generate` takes them.
        repeats: Rounds.
        seed: Of the first round; each round has its own.
        settings: Further arguments of `LM.generate`.
    """
    prompts = list(prompts)
    for i in range(repeats):
        for prompt in prompts:
            for setting in table.settings:
                _run(setting, lm, prompt, table.options, seed=seed + i, **settings)
                yield setting


def _run(setting: Setting, lm: LM, prompt: Any, options: Options, **settings: Any) -> None:
    start = time.perf_counter()
    result = lm.generate(
        prompt,
        options=options,
        n_particles=setting.n_particles,
        block_size=setting.block_size,
        **settings,
    )
    seconds = time.perf_counter() - start - result.usage.seconds["prefill"]
    setting.rates.append(len(result.token_ids) / seconds)
    setting.ess_shares.append(fmean(s.ess / len(s.log_weights) for s in result.steps))
    setting.block_sizes += [s.block_size for s in result.steps]
    usage = result.usage
    if usage.draft_variance is not None and usage.bonus_variance is not None:
        setting.estimates.append(DraftEstimate(usage.draft_variance, usage.bonus_variance))
