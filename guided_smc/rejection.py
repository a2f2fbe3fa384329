"""Draws under a constraint that has no mask: it can only be asked whether one token is viable.

Adaptive weighted rejection sampling (Lipkin et al., arXiv 2504.05410), with an estimator of the
normaliser of our own. Tokens are drawn *without* replacement from weights `w`, each is tested, and
what is refused is never drawn again. The token taken, x, is the first viable one. Let A be the
viable tokens and `Z = w(A)`.

**Properly weighted**: `E[Ẑ · 1(token = v)] = w(v) · 1[v ∈ A]`. Then `w(x) / Ẑ` may stand in a
weight where the probability of the proposal would: as `q̃(x)` of a draft, and for the target itself
as the factor Ẑ that a mask would have computed. Whatever else is drawn goes into Ẑ, as follows.

First the few heaviest tokens are tested whatever comes; let K be the viable ones among them, R the
total weight without the refused ones. Then tokens are drawn until two are accepted, the first put
back before the second is drawn. Let `v_1 .. v_m` be those refused on the way, `R_i` the weight
left when i of them are gone, and j how many were refused before x; y is the second accepted token.

1. The accepted tokens are independent draws from `w / Z`, whatever is refused: x has the right law.
2. Given x and `v_1 .. v_j`, the next draw is viable with probability `Z / R_j`. So both
   `R_j · 1[it is viable]` and `z + R_j · 1[it is viable, and not in K ∪ {x}]`, with
   `z = w(K ∪ {x})`, have the mean Z, and so has every mixture
   `U = λ_j z + R_j · 1[j = m] · (1 − λ_j · 1[y ∈ K ∪ {x}])` whose λ_j depends on x and
   `v_1 .. v_j` alone.
3. A path has probability `Π_i w(v_i) / R_{i−1} · w(x) / R_j · w(y) / R_m`. So given x, y and all
   `v_1 .. v_m`, j is distributed as `1 / R_j`, and the mean of U over it is

       Ẑ = [ Σ_j λ_j z / R_j  +  1 − λ_m · 1[y ∈ K ∪ {x}] ] / Σ_j 1 / R_j        (j = 0 .. m)

With λ = 0 this is `1 / Σ_j 1/R_j`, which is exact where everything is viable; with λ = 1 it is
exact where nothing but K and x is. λ_j is the share of refusals among what was tested until x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from guided_smc.population import Population

SURVEYED = 8
"""The heaviest tokens are tested whatever is drawn, so many at most ..."""

SURVEYED_SHARE = 0.02
"""... and only those that hold this share of the weight."""

_SORTED_FIRST = 64


@dataclass(frozen=True)
class Draw:
    """A token, properly weighted.

    Attributes:
        token: The viable token; −1 where none was found.
        total: Ẑ, an unbiased estimate of the weight of all viable tokens; 0 where none was found.
        calls: Tokens that were tested.
        untried: The share of the weight that was left when the draw was given up, else 0.
    """

    token: int
    total: float
    calls: int
    untried: float = 0.0


class Arrivals:
    """Draws without replacement, by the times at which independent exponential clocks ring.

    Args:
        weights: float64 `[n]`, positive: the rates.
        rng: Where the times come from.
    """

    def __init__(self, weights: np.ndarray, rng: np.random.Generator) -> None:
        self._weights = weights
        self._rng = rng
        self._times = rng.standard_exponential(len(weights)) / weights
        self._order = self._in_order()
        self._next = next(self._order, None)
        self._again: tuple[float, int] | None = None

    def _in_order(self) -> Iterator[int]:
        n = len(self._times)
        head = np.argpartition(self._times, _SORTED_FIRST)[:_SORTED_FIRST] if n > 128 else None
        if head is not None:
            yield from head[np.argsort(self._times[head])].tolist()
        order = np.argsort(self._times)
        yield from (order if head is None else order[~np.isin(order, head)]).tolist()

    def take(self) -> int | None:
        """The index of the next one; None if no more is there."""
        if self._again is not None and (
            self._next is None or self._times[self._next] > self._again[0]
        ):
            index, self._again = self._again[1], None
            return index
        index_or_none, self._next = self._next, next(self._order, None)
        return index_or_none

    def put_back(self, index: int) -> None:
        """Make the one just taken drawable again: its clock has no memory."""
        wait = self._rng.standard_exponential() / self._weights[index]
        self._again = (float(self._times[index] + wait), index)


def draw_viable(
    weights: np.ndarray,
    viable: Callable[[int], bool],
    rng: np.random.Generator,
    *,
    free: Sequence[int] = (),
    max_rejected: int,
) -> Draw:
    """Draw one viable token from the weights, and an estimate of the weight of all of them.

    A draw that gives up takes one of the tokens that are known to be viable, with their weight as
    the estimate, which is right for those. For others the estimate is then too low in the mean, by
    the probability of giving up.

    Args:
        weights: float `[V]`, not normalised; tokens of weight 0 are never tested.
        viable: The test. Not asked twice about one token.
        rng: Of this draw.
        free: Tokens that are known to be viable.
        max_rejected: Give up when so many have been refused in vain.
    """
    support = np.flatnonzero(weights)
    w = weights[support].astype(np.float64)
    known = {i: True for i in np.flatnonzero(np.isin(support, np.array(free, dtype=int))).tolist()}
    calls = 0

    def test(i: int) -> bool:
        nonlocal calls
        if i not in known:
            calls += 1
            known[i] = viable(int(support[i]))
        return known[i]

    total = w.sum()
    heavy = np.flatnonzero(w >= SURVEYED_SHARE * total)
    for i in heavy[np.argsort(-w[heavy], kind="stable")][:SURVEYED].tolist():
        test(i)
    good = {i for i, fine in known.items() if fine}
    bad = [i for i, fine in known.items() if not fine]
    rest = w.copy()  # what may still be drawn, 0 once refused
    rest[bad] = 0.0
    alive = np.flatnonzero(rest)
    arrivals = Arrivals(rest[alive], rng)

    remaining = _Left(rest)
    left = [remaining.value]  # R_j
    x: int | None = None
    y: int | None = None
    while y is None and len(left) <= max_rejected:
        taken = arrivals.take()
        if taken is None:
            break
        i = int(alive[taken])
        if not test(i):
            left.append(remaining.without(i))
        elif x is None:
            x = i
            arrivals.put_back(taken)
        else:
            y = i
    if x is None:
        untried = left[-1] / total if len(left) > max_rejected else 0.0
        if not good:
            return Draw(-1, 0.0, calls, untried)
        chances = w[list(good)]
        x = list(good)[int(rng.choice(len(good), p=chances / chances.sum()))]
        return Draw(int(support[x]), float(chances.sum()), calls, untried)
    good.add(x)
    # If it has been given up after x, no second token is known, and j < m: no chance of j = m.
    inverse = 1.0 / np.array(left if y is not None else left[:-1])
    refused = len(bad) + np.arange(len(inverse))
    mix = refused / (refused + len(good))  # λ_j
    z = float(w[list(good)].sum())
    second = 0.0 if y is None else 1.0 - (mix[-1] if y in good else 0.0)
    estimate = (z * float(mix @ inverse) + second) / float(inverse.sum())
    return Draw(int(support[x]), estimate, calls)


class _Left:
    """The sum of weights from which one after the other is taken, without cancellation.

    Args:
        weights: float64 `[n]`; what is taken becomes 0.
    """

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = weights
        self._summed = self.value = float(weights.sum())

    def without(self, index: int) -> float:
        self.value -= float(self._weights[index])
        self._weights[index] = 0.0
        if self.value < 1e-3 * self._summed:
            self._summed = self.value = float(self._weights.sum())
        return self.value


def redraw(
    rows: Iterable[tuple[int, Population[Any], int]],
    weights: torch.Tensor,
    mask: torch.Tensor,
    uniforms: np.ndarray,
    tokens: torch.Tensor,
    total: torch.Tensor,
    *,
    draft: bool,
) -> dict[int, Exception]:
    """Draw for rows whose masks are not the whole constraint, in place of what was drawn.

    A draft has to reach what the target can. So where it gives no weight to any viable token, it
    draws from the rest of the mask with equal weights.

    Args:
        rows: Row, population and slot of each; those of populations that are `unmasked` are drawn.
        weights: float32 `[R, W]`, as of `sampling.masked_weights`; 0 outside the mask. Rows that
            were drawn from with other weights are overwritten by them.
        mask: bool `[R, V]`.
        uniforms: float64 `[R, ...]`: the first seeds the generator of its row's draw.
        tokens: int64 `[R]`, overwritten.
        total: float64 `[R]`, overwritten by Ẑ in the unit of the weights; 0 where none was found.
        draft: Whether the weights are a draft's.

    Returns:
        What the constraint raised, by row.
    """
    errors: dict[int, Exception] = {}
    for r, population, slot in rows:
        constraint, eos = population.unmasked, population.vocabulary.eos_ids
        if constraint is None:
            continue
        found = Draw(-1, 0.0, 0)
        try:
            if not judged(population, slot):
                continue
            state = population.states[slot]
            row = model_row = weights[r].cpu().numpy()
            if np.isnan(row).any():
                continue
            pulling = population.pulling
            if pulling is not None and (pull := pulling.pull(state)) is not None:
                favourite = int(row.argmax())
                if favourite not in eos and not constraint.viable(state, favourite):
                    row = _pulled(row, *pull)
                    weights[r] = torch.from_numpy(row).to(weights)
            rng = np.random.default_rng(int(uniforms[r, :1].view(np.uint64)[0]))
            found = _draw_for(population, slot, row, rng)
            if draft and found.token < 0 and not found.untried:
                others = torch.zeros_like(weights[r])
                others[: mask.shape[-1]] = mask[r].to(others)
                others[weights[r] > 0] = 0.0
                weights[r] = others
                found = _draw_for(population, slot, others.cpu().numpy(), rng)
            _doubt(population, slot, model_row)
        except Exception as error:
            errors[r] = error
        tokens[r], total[r] = max(found.token, 0), found.total
    return errors


def judged(population: Population[Any], slot: int) -> bool:
    """Whether a particle's tokens have to be tested, and a mask is not all there is to them."""
    constraint = population.unmasked
    if constraint is None:
        return False
    if constraint.judges(population.states[slot]):
        return True
    _doubt(population, slot, None)
    return False


def _pulled(weights: np.ndarray, tokens: np.ndarray, share: float) -> np.ndarray:
    """Weights, those of all but some tokens by a share of what they were."""
    pulled = weights * np.float32(share)
    pulled[tokens] = weights[tokens]
    return pulled


def _doubt(population: Population[Any], slot: int, weights: np.ndarray | None) -> None:
    """Note how much of the weight was refused without being sure."""
    constraint, state = population.pulling, population.states[slot]
    if constraint is None:
        return
    doubted = constraint.doubted(state)
    if doubted is None:
        population.doubted.append(1.0)
    elif doubted and weights is not None:
        refused = np.unique(np.array(doubted, dtype=int))
        population.doubted.append(float(weights[refused].sum() / weights.sum()))


def _draw_for(
    population: Population[Any], slot: int, weights: np.ndarray, rng: np.random.Generator
) -> Draw:
    constraint, state = population.unmasked, population.states[slot]
    assert constraint is not None
    known = () if population.pulling is None else population.pulling.known(state)
    found = draw_viable(
        weights,
        lambda token: constraint.viable(state, token),
        rng,
        free=(*population.vocabulary.eos_ids, *known),
        max_rejected=constraint.max_rejected,
    )
    population.usage.constraint_calls += found.calls
    if found.untried:
        population.given_up.append(found.untried)
    return found
