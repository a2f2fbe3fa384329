"""The potentials' scores of one prompt's particles, and what they add to the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from guided_smc.errors import PotentialError
from guided_smc.potentials import Completion, Potential, Tilt
from guided_smc.resampling import effective_sample_size, normalise

_BISECTIONS = 30
_LEFT = 0.5
"""Share of the particles that an adaptive tilt leaves counting, unless the threshold of
resampling is lower."""

Complete = Callable[[int, bool], Completion]
"""From a slot, and whether its text is finished, to what a potential is given."""


class Scores:
    """Present score of each of P potentials for each of N slots.

    Args:
        potentials: P of them.
        n: N.
        islands: M, how many populations of N / M slots in a row there are.
        steer: Whether tilts score unfinished texts. If not, they speak at the end only.
        ess_threshold: Of resampling: an adaptive tilt goes as far as makes it happen.

    Attributes:
        log_psi: float64 `[N, P]`; 0 to begin with.
        rewards: float64 `[N, P]`, R of finished texts; NaN for other texts and potentials.
        last_rewards: float64 `[N, P]`, R as it was last asked for, of unfinished texts too; NaN
            where it was not.
        finished: bool `[N]`, whether it has the complete scores.
        fractions: float64 `[M, P]`, how far an adaptive β has come, in [0, 1].
    """

    def __init__(
        self,
        potentials: Sequence[Potential],
        n: int,
        *,
        islands: int,
        steer: bool,
        ess_threshold: float,
    ) -> None:
        self.potentials = potentials
        self.islands = islands
        self.steer = steer
        self.left = min(ess_threshold, _LEFT)
        self.log_psi = np.zeros((n, len(potentials)))
        self.rewards = np.full((n, len(potentials)), np.nan)
        self.last_rewards = np.full((n, len(potentials)), np.nan)
        self.finished = np.zeros(n, dtype=bool)
        self.fractions = np.zeros((islands, len(potentials)))

    def follow(self, ancestors: np.ndarray) -> None:
        """Each slot goes on with the scores of its ancestor."""
        self.log_psi = self.log_psi[ancestors]
        self.rewards = self.rewards[ancestors]
        self.last_rewards = self.last_rewards[ancestors]
        self.finished = self.finished[ancestors]

    def update(
        self, log_w: np.ndarray, growing: Sequence[int], ended: Sequence[int], completion: Complete
    ) -> None:
        """Score slots that have changed: `log w += log ψ(new) − log ψ(old)`, in place.

        A finished text gets the complete score. Slots that reach weight 0 are not asked further.

        Args:
            log_w: float64 `[N]`.
            growing: Slots whose texts are unfinished.
            ended: Slots whose texts are finished now.
            completion: Makes what a potential is given.

        Raises:
            PotentialError: A potential raised, or returned NaN, +inf or the wrong number.
        """
        self.finished[list(ended)] = True
        for i, potential in enumerate(self.potentials):
            tilt = potential if isinstance(potential, Tilt) else None
            chosen = [s for s in ended if log_w[s] > -np.inf]
            if chosen:
                texts = [completion(s, True) for s in chosen]
                if tilt is not None:
                    rewards = _ask(tilt, tilt.rewards, texts)
                    self.rewards[chosen, i] = self.last_rewards[chosen, i] = rewards
                    new = _weights(tilt, rewards, texts, [tilt.beta] * len(texts))
                else:
                    new = _log_scores(potential, potential.log_complete, texts)
                self._set(log_w, chosen, i, new)
            chosen = [s for s in growing if log_w[s] > -np.inf]
            if not chosen or not potential.scores_prefixes or (tilt and not self.steer):
                continue
            texts = [completion(s, False) for s in chosen]
            if tilt is None:
                new = _log_scores(potential, potential.log_prefix, texts)
            else:
                rewards = _ask(tilt, tilt.prefix_rewards, texts)
                self.last_rewards[chosen, i] = rewards
                if tilt.adaptive:
                    betas = self._adapt(log_w, chosen, i, tilt, rewards, texts)
                else:
                    betas = [tilt.prefix_beta(text) for text in texts]
                new = _weights(tilt, rewards, texts, betas)
            self._set(log_w, chosen, i, new)

    @property
    def lookahead(self) -> int:
        """How many next tokens of each particle are to be scored before one is drawn."""
        return max((tilt.lookahead for _, tilt in self._looking), default=0)

    @property
    def _looking(self) -> list[tuple[int, Tilt]]:
        return [
            (i, p)
            for i, p in enumerate(self.potentials)
            if isinstance(p, Tilt) and p.lookahead and self.steer and p.scores_prefixes
        ]

    def ahead(self, texts: Sequence[tuple[int, Completion, bool]]) -> np.ndarray:
        """`log ψ(x v) − log ψ(x)` of the tilts that look ahead, float64, one for each text.

        A text that would end has β_t's part of its score alone, as those that go on, unless all end
        now: else ends would be drawn for what they have ahead of the others in β.

        Args:
            texts: Slots, each with a text that it may have next, and whether all end now.

        Raises:
            PotentialError: As `update`.
        """
        gained = np.zeros(len(texts))
        for i, tilt in self._looking:
            # Particles of one ancestry have most of what comes next in common.
            known: dict[tuple[Any, ...], int] = {}
            at = [known.setdefault((c.token_ids, c.finished), len(known)) for _, c, _ in texts]
            first = np.unique(at, return_index=True)[1]
            rewards = np.zeros(len(known))
            for finished, ask in ((True, tilt.rewards), (False, tilt.prefix_rewards)):
                which = [j for j in first.tolist() if texts[j][1].finished == finished]
                if which:
                    found = _ask(tilt, ask, [texts[j][1] for j in which])
                    rewards[[at[j] for j in which]] = found
            size = len(self.log_psi) // self.islands
            for j, (slot, completion, all_end) in enumerate(texts):
                if all_end:
                    beta = tilt.beta
                elif tilt.adaptive:
                    beta = float(self.fractions[slot // size, i]) * tilt.beta
                else:
                    beta = tilt.prefix_beta(completion)
                new = tilt.weigh(float(rewards[at[j]]), completion, beta)
                gained[j] += new - self.log_psi[slot, i]
        return gained

    def told(
        self, names: Sequence[str]
    ) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float | None, ...]]]:
        """For the record, by the names of the potentials: the score of each slot; and of those
        that have one, R, None where nobody has asked for it.
        """
        log_psi = {name: tuple(self.log_psi[:, i].tolist()) for i, name in enumerate(names)}
        rewards = {
            names[i]: tuple(None if r != r else r for r in self.last_rewards[:, i].tolist())
            for i, potential in enumerate(self.potentials)
            if isinstance(potential, Tilt)
        }
        return log_psi, rewards

    def held_back(self, growing: Completion) -> np.ndarray:
        """What a resampling is not to count yet, float64 `[N]`: to be added to the log-weights.

        A finished text has its whole score, where one that goes on has β_t's part of it, or nothing
        yet. Compared as they are, the first texts to end would take the places of all others, or
        lose theirs to them. So their scores are tempered like those of the others.

        Args:
            growing: One of the texts that go on: they are equally long.
        """
        held = np.zeros(len(self.log_psi))
        for i, potential in enumerate(self.potentials):
            part = self._part(i, potential, growing)
            held += (part - 1.0) * np.where(self._whole(i), self.log_psi[:, i], 0.0)
        return held

    def _whole(self, i: int) -> np.ndarray:
        """Bool `[N]`: which slots have a complete score, not −inf."""
        return self.finished & np.isfinite(self.log_psi[:, i])

    def _part(self, i: int, potential: Potential, growing: Completion) -> Any:
        """The part of its score that a potential gives to texts that go on: a number, or one for
        each slot.
        """
        if not potential.scores_prefixes:
            return 0.0
        if not isinstance(potential, Tilt):
            return 1.0
        if potential.adaptive:
            return np.repeat(self.fractions[:, i], len(self.log_psi) // self.islands)
        return potential.prefix_beta(growing) / potential.beta if potential.beta else 0.0

    def _set(self, log_w: np.ndarray, slots: list[int], i: int, new: np.ndarray) -> None:
        log_w[slots] += new - self.log_psi[slots, i]
        self.log_psi[slots, i] = new

    def _adapt(
        self,
        log_w: np.ndarray,
        slots: list[int],
        i: int,
        tilt: Tilt,
        rewards: np.ndarray,
        texts: list[Completion],
    ) -> list[float]:
        """β of each text: in each island as far on the way to `tilt.beta` as lets the ESS fall to
        where particles are resampled, and never back.

        The choice may look at all particles, since each remembers the score that it was given.
        Del Moral, Doucet & Jasra, "An adaptive sequential Monte Carlo method for approximate
        Bayesian computation" (2012), choose temperatures so.
        """
        size = len(log_w) // self.islands
        where = np.asarray(slots)
        for m in range(self.islands):
            island = slice(m * size, (m + 1) * size)
            mine = np.flatnonzero(where // size == m)
            if not len(mine):
                continue
            base = log_w[where[mine]] - self.log_psi[where[mine], i]
            finished = self._whole(i)[island]
            others, theirs = log_w[island][finished], self.log_psi[island, i][finished]

            def ess(
                fraction: float,
                mine: np.ndarray = mine,
                base: np.ndarray = base,
                others: np.ndarray = others,
                theirs: np.ndarray = theirs,
            ) -> float:
                betas = [fraction * tilt.beta] * len(mine)
                own = base + _weights(tilt, rewards[mine], [texts[j] for j in mine], betas)
                tempered = others + (fraction - 1.0) * theirs
                return effective_sample_size(normalise(np.concatenate([own, tempered])))

            self.fractions[m, i] = _rise(ess, self.fractions[m, i], self.left * size)
        return (self.fractions[where // size, i] * tilt.beta).tolist()


def _rise(ess: Callable[[float], float], least: float, enough: float) -> float:
    """The fraction from `least` to 1 at which the ESS falls below `enough`; 1 if it does not."""
    if ess(1.0) >= enough:
        return 1.0
    if ess(least) < enough:
        return least
    low, high = least, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if ess(middle) >= enough else (low, middle)
    return high


def _weights(
    tilt: Tilt, rewards: np.ndarray, texts: Sequence[Completion], betas: Sequence[float]
) -> np.ndarray:
    weighed = map(tilt.weigh, rewards.tolist(), texts, betas)
    return np.fromiter(weighed, dtype=np.float64, count=len(texts))


def _log_scores(
    potential: Potential,
    ask: Callable[[Sequence[Completion]], Sequence[float]],
    texts: list[Completion],
) -> np.ndarray:
    scores = _ask(potential, ask, texts)
    bad = np.isnan(scores) | (scores == np.inf)
    if bad.any():
        j = int(np.flatnonzero(bad)[0])
        raise PotentialError(
            f"potential {potential.name!r} returned {scores[j]} for {texts[j].text!r}; "
            "a log score must be finite or -inf",
            potential=potential.name,
            text=texts[j].text,
        )
    return scores


def _ask(
    potential: Potential,
    ask: Callable[[Sequence[Completion]], Sequence[float]],
    texts: list[Completion],
) -> np.ndarray:
    """One number for each text, float64."""
    try:
        scores = np.asarray(ask(texts), dtype=np.float64)
    except PotentialError:
        raise
    except Exception as error:
        raise PotentialError(
            f"potential {potential.name!r} raised {type(error).__name__}: {error}; it was "
            f"given {len(texts)} text(s), the first {texts[0].text!r}",
            potential=potential.name,
            text=texts[0].text,
        ) from error
    if scores.shape != (len(texts),):
        raise PotentialError(
            f"potential {potential.name!r} returned scores of shape {scores.shape} for "
            f"{len(texts)} text(s), the first {texts[0].text!r}",
            potential=potential.name,
            text=texts[0].text,
        )
    return scores
