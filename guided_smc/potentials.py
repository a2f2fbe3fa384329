"""What a user may multiply into the target: scores and constraints, one weight.

The posterior is `π(x) ∝ p(x | prompt)^α · Π_i Ψ_i(x)`. A potential gives

- `log_complete`: `log Ψ(x)` of finished texts,
- `log_prefix`: `log ψ(x_1..t)` of unfinished ones. −inf promises that every extension is −inf; a
  potential with nothing to say about prefixes returns 0. Prefix scores steer the particles and
  telescope away: the finished weight holds the complete score alone, whatever they were.

Potentials multiply: `a * b` is the product of their factors. A `Constraint` is the potential
`1[x ∈ L]` that can also name the tokens which keep a prefix completable (its mask), so that the
engine proposes from the masked model and puts the mask's normaliser into the weight. One that can
only be asked about a token at a time is `Unmasked`: the engine then draws by rejection. Constraints
also intersect: `a & b` is a constraint again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from guided_smc.errors import PotentialError
from guided_smc.vocabulary import Vocabulary


@dataclass(frozen=True)
class Completion:
    """A text that a potential is asked about.

    Attributes:
        prompt: The prompt as the user gave it: a string, a list of chat messages, or token ids.
        token_ids: The generated tokens, end token excluded.
        text: Their text. Cut before a stop string; of an unfinished text, without a UTF-8
            character that is only begun.
        finished: Whether the text is complete.
        vocabulary: The model's tokens.
        columns: What else belongs to the prompt, by name, such as a reference answer.
        max_tokens: The length cap of the run.
    """

    prompt: Any
    token_ids: tuple[int, ...]
    text: str
    finished: bool
    vocabulary: Vocabulary = field(repr=False, compare=False)
    columns: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    max_tokens: int | None = field(default=None, repr=False, compare=False)


class Potential(ABC):
    """A factor `Ψ ≥ 0` of the posterior, in log space and batched over texts."""

    name: str = "potential"

    @abstractmethod
    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """`log Ψ(x)` for finished texts, one float each: finite or −inf."""

    def log_prefix(self, completions: Sequence[Completion]) -> Sequence[float]:
        """`log ψ(x_1..t)` for unfinished texts; 0 where there is nothing to say yet."""
        return [0.0] * len(completions)

    @property
    def scores_prefixes(self) -> bool:
        """Whether `log_prefix` says anything; if False the engine does not ask it."""
        return type(self).log_prefix is not Potential.log_prefix

    def factors(self) -> tuple[Potential, ...]:
        """The potentials whose product this is."""
        return (self,)

    def __mul__(self, other: Potential) -> Potential:
        if not isinstance(other, Potential):
            return NotImplemented
        return Product(self, other)


class Product(Potential):
    """The product of potentials; nested products are flattened."""

    def __init__(self, *potentials: Potential) -> None:
        self._factors = tuple(f for p in potentials for f in p.factors())
        self.name = " * ".join(f.name for f in self._factors)

    def factors(self) -> tuple[Potential, ...]:
        """The factors, in the order in which they were multiplied."""
        return self._factors

    @property
    def scores_prefixes(self) -> bool:
        """Whether any factor scores prefixes."""
        return any(f.scores_prefixes for f in self._factors)

    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """Sum of the factors' complete scores."""
        columns = [f.log_complete(completions) for f in self._factors]
        return [sum(row) for row in zip(*columns, strict=True)]

    def log_prefix(self, completions: Sequence[Completion]) -> Sequence[float]:
        """Sum of the factors' prefix scores."""
        columns = [f.log_prefix(completions) for f in self._factors]
        return [sum(row) for row in zip(*columns, strict=True)]


class Tilt(Potential):
    """`Ψ = exp(β·R(x))`: a score with a value R of its own, which results report.

    Attributes:
        beta: β of finished texts, finite.
        adaptive: Whether the engine chooses β of unfinished texts, from 0 up to `beta`: as large as
            leaves enough particles that count. If not, it is `prefix_beta`.
        bounds: Least and largest R, where they are known.
        lookahead: How many of the likeliest next tokens are scored before one of them is drawn.
    """

    beta: float = 1.0
    lookahead: int = 0
    adaptive: bool = False
    bounds: tuple[float, float] | None = None

    @abstractmethod
    def rewards(self, completions: Sequence[Completion]) -> Sequence[float]:
        """R of finished texts, one float each. −inf makes the weight 0 (with β > 0).

        Raises:
            PotentialError: R cannot be had.
        """

    def prefix_rewards(self, completions: Sequence[Completion]) -> Sequence[float]:
        """What can be said of R of unfinished texts; 0 where that is nothing.

        With `scores_prefixes` False the engine does not ask. Errors as in `rewards`.
        """
        return [0.0] * len(completions)

    @property
    def scores_prefixes(self) -> bool:
        """Whether `prefix_rewards` says anything."""
        return type(self).prefix_rewards is not Tilt.prefix_rewards

    def prefix_beta(self, completion: Completion) -> float:
        """β of an unfinished text. The finished weight has `beta`, whatever this was."""
        return self.beta

    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """`β·R(x)`. Errors as in `rewards`, also where that is NaN or +inf."""
        rewards = self.rewards(completions)
        return [self.weigh(r, c, self.beta) for r, c in zip(rewards, completions, strict=True)]

    def log_prefix(self, completions: Sequence[Completion]) -> Sequence[float]:
        """`β_t·R` of the texts so far. Errors as in `log_complete`."""
        if not self.scores_prefixes:
            return [0.0] * len(completions)
        rewards = self.prefix_rewards(completions)
        return [
            self.weigh(r, c, self.prefix_beta(c)) for r, c in zip(rewards, completions, strict=True)
        ]

    def weigh(self, reward: float, completion: Completion, beta: float) -> float:
        """`beta · reward`, where 0 · (−inf) is 0.

        Raises:
            PotentialError: That is NaN or +inf.
        """
        log_weight = 0.0 if beta == 0 and not math.isnan(reward) else beta * reward
        if math.isnan(log_weight) or log_weight == math.inf:
            what = "not a number" if math.isnan(reward) else f"and beta is {beta:g}: infinite"
            raise PotentialError(
                f"the reward {self.name!r} returned {reward!r}, {what}; given the text "
                f"{completion.text[:200]!r}",
                potential=self.name,
                text=completion.text,
            )
        return log_weight


class ConstraintState(Protocol):
    """Where one particle stands in the constraint's language."""

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member of the language, so that it may end here."""

    def fork(self) -> ConstraintState:
        """An independent copy."""

    def advance(self, token: int) -> bool:
        """Consume one ordinary token. False if no member of the language begins like this."""

    def forced(self) -> list[int]:
        """Tokens that are the only way on from here (empty where there is a choice)."""


class CompiledConstraint(Protocol):
    """A constraint bound to a vocabulary."""

    def start(self) -> ConstraintState:
        """The state before the first token."""

    def fill_masks(self, states: Sequence[Any], bitmask: np.ndarray) -> None:
        """Write the tokens that keep each prefix completable.

        Args:
            states: States that this constraint made (`start`, then `fork` and `advance`).
            bitmask: int32 NumPy array `[len(states), ceil(V / 32)]`, overwritten; bit `v % 32`
                of word `v // 32` is token `v`. Only bits of ordinary tokens count: the engine sets
                those of end tokens from `accepting` and clears special and padded ids.
        """


@runtime_checkable
class Unmasked(CompiledConstraint, Protocol):
    """A compiled constraint whose masks may let tokens pass that cannot be completed.

    What the mask lets through, `viable` judges. The engine draws from it by rejection and estimates
    the normaliser (see `guided_smc.rejection`), so that the weights stay proper.

    Attributes:
        max_rejected: Tokens that one draw tries in vain before the particle is given up.
        remedy: What users can do when that happens.
    """

    max_rejected: int
    remedy: str

    def judges(self, state: Any) -> bool:
        """Whether `viable` may refuse what the mask of a state lets through.

        May depend on the prefix alone, like `viable`. Where it says no, the mask is taken as it is.
        """

    def viable(self, state: Any, token: int) -> bool:
        """Whether the prefix of `state` can still be completed after an ordinary token.

        The answer may depend on the prefix and the token alone. True wherever `advance` is.
        """


@runtime_checkable
class Pulling(Unmasked, Protocol):
    """One that says which tokens are worth proposing, so that fewer are drawn in vain."""

    def pull(self, state: Any) -> tuple[Any, float] | None:
        """Tokens to prefer, as an array of ids, and the factor, above 0, by which all others are
        proposed less often; None to propose as the model does. The weights make up for it.
        """

    def known(self, state: Any) -> Sequence[int]:
        """Tokens that are viable for sure, so that a draw that gives up has something to take."""

    def doubted(self, state: Any) -> Sequence[int] | None:
        """Tokens that `viable` has refused at a state without being sure; None if nothing is known
        that could complete the prefix.
        """


class Constraint(Potential):
    """`Ψ = 1[x ∈ L]`, `ψ = 1[some member of L begins with the prefix]`."""

    name = "constraint"

    shows_ends: bool = False
    """Whether its states, bound to any vocabulary, may be asked thousands of questions to find out
    how a text can end."""

    @abstractmethod
    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """Bind to a vocabulary. Compiled forms should be cached.

        Raises:
            ConstraintError: The language cannot be compiled, with the place and the reason.
        """

    def check(self) -> Potential | None:
        """What the mask cannot say of a text, as a score to multiply in."""
        return None

    def notes(self) -> tuple[str, ...]:
        """What users should know of how it is enforced; goes into the result's warnings."""
        return ()

    def parse(self, text: str) -> Any:
        """The typed value of a member of the language."""
        return text

    def value_key(self, text: str) -> Hashable:
        """Equal for texts whose values are equal; `vote` adds the weights of equal keys."""
        return text

    def __and__(self, other: Constraint) -> Constraint:
        """Texts that are in both languages; the value is that of the first."""
        if isinstance(other, Constraint):
            return Intersection(self, other)
        if isinstance(other, Potential):
            raise TypeError(
                f"& joins constraints; {other.name!r} is a score: multiply by it with *"
            )
        raise TypeError(
            f"& joins constraints, and {other!r} is none yet: make it one with json_schema(...), "
            "regex(...), choice(...) or lark(...)"
        )

    def log_complete(self, completions: Sequence[Completion]) -> Sequence[float]:
        """0 for members of the language, −inf for others."""
        return [self._log_indicator(c, complete=True) for c in completions]

    def log_prefix(self, completions: Sequence[Completion]) -> Sequence[float]:
        """0 for prefixes that can still be completed, −inf for others."""
        return [self._log_indicator(c, complete=False) for c in completions]

    def _log_indicator(self, completion: Completion, *, complete: bool) -> float:
        state = self.compile(completion.vocabulary).start()
        viable = all(state.advance(token) for token in completion.token_ids)
        return 0.0 if viable and (state.accepting or not complete) else -float("inf")


class Intersection(Constraint):
    """Texts that are in every one of several languages (`a & b`); nested ones are flattened.

    The mask is the intersection of the masks. That is exact for the weights; a prefix may survive
    that each language could complete, but no text that all share: it dies later, with weight 0.
    """

    def __init__(self, *constraints: Constraint) -> None:
        self.constraints: tuple[Constraint, ...] = tuple(
            part
            for c in constraints
            for part in (c.constraints if isinstance(c, Intersection) else (c,))
        )
        self.name = " & ".join(c.name for c in self.constraints)

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """Compile every part."""
        return intersected([c.compile(vocabulary) for c in self.constraints])

    def check(self) -> Potential | None:
        """The checks of all parts."""
        checks = [check for c in self.constraints if (check := c.check()) is not None]
        return Product(*checks) if checks else None

    def notes(self) -> tuple[str, ...]:
        """The notes of all parts."""
        return tuple(note for c in self.constraints for note in c.notes())

    def parse(self, text: str) -> Any:
        """The value as the first constraint sees it."""
        return self.constraints[0].parse(text)

    def value_key(self, text: str) -> Hashable:
        """The key of the first constraint."""
        return self.constraints[0].value_key(text)


def intersected(parts: list[CompiledConstraint]) -> CompiledConstraint:
    """The intersection of constraints that are bound to one vocabulary."""
    unmasked = [i for i, part in enumerate(parts) if isinstance(part, Unmasked)]
    return _UnmaskedIntersection(parts, unmasked) if unmasked else _CompiledIntersection(parts)


class _CompiledIntersection:
    def __init__(self, parts: list[CompiledConstraint]) -> None:
        self.parts = parts

    def start(self) -> _IntersectionState:
        return _IntersectionState([p.start() for p in self.parts])

    def fill_masks(self, states: Sequence[_IntersectionState], bitmask: np.ndarray) -> None:
        one = np.empty_like(bitmask)
        bitmask.fill(-1)
        for i, part in enumerate(self.parts):
            part.fill_masks([s.states[i] for s in states], one)
            bitmask &= one


class _UnmaskedIntersection(_CompiledIntersection):
    """First the masks of all parts, and then the judgement of those that need to be asked."""

    def __init__(self, parts: list[CompiledConstraint], unmasked: list[int]) -> None:
        super().__init__(parts)
        self.unmasked = [(i, part) for i in unmasked if isinstance(part := parts[i], Unmasked)]
        self.max_rejected = min(part.max_rejected for _, part in self.unmasked)
        self.remedy = self.unmasked[0][1].remedy

    def judges(self, state: _IntersectionState) -> bool:
        return any(part.judges(state.states[i]) for i, part in self.unmasked)

    def viable(self, state: _IntersectionState, token: int) -> bool:
        return all(part.viable(state.states[i], token) for i, part in self.unmasked)


class _IntersectionState:
    def __init__(self, states: list[ConstraintState]) -> None:
        self.states = states

    @property
    def accepting(self) -> bool:
        return all(s.accepting for s in self.states)

    def fork(self) -> _IntersectionState:
        return _IntersectionState([s.fork() for s in self.states])

    def advance(self, token: int) -> bool:
        return all([s.advance(token) for s in self.states])

    def forced(self) -> list[int]:
        return max((s.forced() for s in self.states), key=len)
