"""Sums, multiples, clipped and scaled rewards.

β and its schedule belong to the whole, so that a part must not have one of its own. Every part
keeps its own time to speak; one that is silent adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from guided_smc.errors import OptionError
from guided_smc.potentials import Completion
from guided_smc.rewards.base import Memo, Reward, as_number


class Composed(Reward):
    """A function of other rewards' values."""

    def __init__(
        self, parts: Sequence[Reward], name: str, bounds: tuple[float, float] | None
    ) -> None:
        super().__init__(name=name, bounds=bounds)
        for part in parts:
            _check_part(part)
        self.parts = tuple(parts)
        self.on = self._common_on()

    def score(self, completions: Sequence[Completion]) -> Sequence[float]:
        """R of finished texts."""
        return self.rewards(completions)

    @property
    def scores_prefixes(self) -> bool:
        """Whether any part says something of unfinished texts, and it counts."""
        return self.beta != 0 and any(part.scores_prefixes for part in self.parts)

    def _common_on(self) -> str | None:
        """What all parts agree on; None where they speak at different times."""
        times = {part.on for part in self.parts}
        return times.pop() if len(times) == 1 else None

    def _limit(self, timeout: float | None) -> None:
        self.parts = tuple(part.with_(timeout=timeout) for part in self.parts)

    def _speak_on(self, on: str) -> None:
        self.parts = tuple(part.with_(on=on) for part in self.parts)
        self.on = on


class Sum(Composed):
    """`Σ_i weight_i · R_i + offset`.

    Attributes:
        weights: One for each part.
        offset: Added where any part speaks.
        named: Whether its name was chosen: then it stays one part in other sums.
    """

    def __init__(self, parts: Sequence[Reward], weights: Sequence[float], offset: float) -> None:
        self.weights = tuple(weights)
        self.offset = offset
        self.named = False
        super().__init__(
            parts, _sum_name(parts, weights, offset), _sum_bounds(parts, weights, offset)
        )

    def _rename(self, name: str) -> None:
        self.name, self.named = name, True

    def _evaluate(
        self, completions: Sequence[Completion], memo: Memo, finished: bool
    ) -> list[float | None]:
        columns = [part.evaluate(completions, memo, finished=finished) for part in self.parts]
        return [self._add(row) for row in zip(*columns, strict=True)]

    def _add(self, row: tuple[float | None, ...]) -> float | None:
        spoken = [(w, v) for w, v in zip(self.weights, row, strict=True) if v is not None]
        if not spoken:
            return None
        return self.offset + sum(_multiple(w, v) for w, v in spoken)


class Mapped(Composed):
    """A function of the value of one reward. A silent one stays silent."""

    def __init__(
        self,
        part: Reward,
        fn: Callable[[float], float],
        name: str,
        bounds: tuple[float, float] | None,
    ) -> None:
        super().__init__([part], name, bounds)
        self.fn = fn

    def _evaluate(
        self, completions: Sequence[Completion], memo: Memo, finished: bool
    ) -> list[float | None]:
        values = self.parts[0].evaluate(completions, memo, finished=finished)
        return [None if v is None else self.fn(v) for v in values]


def total(terms: Sequence[tuple[float, Any]]) -> Any:
    """The sum of multiples of rewards and numbers; sums in it are flattened.

    Raises:
        OptionError: A weight is not finite, or a reward has a β, schedule or lookahead of its own.
    """
    parts: list[Reward] = []
    weights: list[float] = []
    offset = 0.0
    for weight, term in terms:
        if isinstance(term, Reward):
            if not math.isfinite(weight):
                raise OptionError(f"the weight of {term.name!r} must be finite, got {weight!r}")
            _check_part(term)
            if isinstance(term, Sum) and not term.named:
                parts += term.parts
                weights += [weight * w for w in term.weights]
                offset += weight * term.offset
            else:
                parts.append(term)
                weights.append(weight)
            continue
        number = as_number(term)
        if number is None:
            return NotImplemented
        if not math.isfinite(number):
            raise OptionError(f"only a finite number can be added to a reward, got {number!r}")
        offset += weight * number
    return Sum(parts, weights, offset)


def clipped(part: Reward, low: Any, high: Any) -> Reward:
    """See `Reward.clip`."""
    least = -math.inf if low is None else as_number(low)
    most = math.inf if high is None else as_number(high)
    if least is None or most is None or not least <= most:
        raise OptionError(f"clip takes two numbers, low and high, got {low!r} and {high!r}")
    own = part.bounds or (-math.inf, math.inf)
    bounds = (min(max(own[0], least), most), max(min(own[1], most), least))
    name = f"clip({part.name}, {least:g}, {most:g})"
    known = bounds if all(map(math.isfinite, bounds)) else None
    return Mapped(part, lambda value: min(max(value, least), most), name, known)


def normalised(part: Reward) -> Reward:
    """See `Reward.normalised`."""
    if part.bounds is None:
        raise OptionError(
            f"the bounds of {part.name!r} are not known: give bounds=(least, largest) where it is "
            "made, or use standardised(mean, std) or clip(low, high) first"
        )
    low, high = part.bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise OptionError(f"the bounds of {part.name!r} are {part.bounds}: not finite and apart")
    name = f"normalised({part.name})"
    return Mapped(part, lambda value: (value - low) / (high - low), name, (0.0, 1.0))


def standardised(part: Reward, mean: Any, std: Any) -> Reward:
    """See `Reward.standardised`."""
    centre, scale = as_number(mean), as_number(std)
    if centre is None or scale is None or not math.isfinite(centre) or not 0 < scale < math.inf:
        raise OptionError(
            f"standardised takes a finite mean and a standard deviation above 0, got {mean!r} and "
            f"{std!r}"
        )
    bounds = None
    if part.bounds is not None:
        bounds = ((part.bounds[0] - centre) / scale, (part.bounds[1] - centre) / scale)
    name = f"standardised({part.name})"
    return Mapped(part, lambda value: (value - centre) / scale, name, bounds)


def _check_part(part: Reward) -> None:
    if part.beta != 1.0:
        raise OptionError(
            f"the reward {part.name!r} has beta={part.beta:g}, and beta belongs to the whole: "
            "write a weight in front of it (0.7 * reward), and (...).with_(beta=...) around all"
        )
    if part.schedule != "constant":
        raise OptionError(
            f"the reward {part.name!r} has schedule={part.schedule!r}, and the schedule belongs to "
            "the whole: write (...).with_(schedule=...) around all"
        )
    if part.lookahead:
        raise OptionError(
            f"the reward {part.name!r} has lookahead={part.lookahead}, and the lookahead belongs "
            "to the whole: write (...).with_(lookahead=...) around all"
        )


def _multiple(weight: float, value: float) -> float:
    return 0.0 if weight == 0 else weight * value


def _sum_name(parts: Sequence[Reward], weights: Sequence[float], offset: float) -> str:
    pieces: list[str] = []
    for weight, part in zip(weights, parts, strict=True):
        size = abs(weight)
        piece = part.name if size == 1 else f"{size:g}*{_bracketed(part)}"
        if pieces:
            piece = f"{'-' if weight < 0 else '+'} {piece}"
        elif weight < 0:
            piece = f"-{piece}"
        pieces.append(piece)
    if offset:
        pieces.append(f"{'-' if offset < 0 else '+'} {abs(offset):g}")
    return " ".join(pieces)


def _bracketed(part: Reward) -> str:
    return f"({part.name})" if " " in part.name and not part.name.endswith(")") else part.name


def _sum_bounds(
    parts: Sequence[Reward], weights: Sequence[float], offset: float
) -> tuple[float, float] | None:
    low = high = offset
    for weight, part in zip(weights, parts, strict=True):
        if part.bounds is None:
            return None
        ends = [_multiple(weight, bound) for bound in part.bounds]
        low += min(ends)
        high += max(ends)
    return None if math.isnan(low) or math.isnan(high) else (low, high)
