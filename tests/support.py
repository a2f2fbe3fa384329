"""Exact posteriors on small table models, computed without the engine."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from guided_smc.costs import CostModel
from guided_smc.models.table import TableModel, TableSession
from guided_smc.options import BlockSize, make_options
from guided_smc.potentials import Constraint, Potential
from guided_smc.request import Request
from guided_smc.results import ErrorEvent, Result, ResultEvent
from guided_smc.vocabulary import Vocabulary

Text = tuple[int, ...]

VOCABULARY = Vocabulary([b"a", b"b", b"c", b"d", b"", b""], eos_ids=[4], special_ids=[4, 5])
"""Four letters, an end token, and a control token that no constrained text may hold."""


class Language(Constraint):
    """The texts for which `member` holds, among all texts up to `longest` tokens.

    The mask is exact: a token is allowed if some member begins with the prefix and the token.
    """

    name = "language"

    def __init__(self, member: Callable[[str], bool], longest: int) -> None:
        self.member = member
        self.longest = longest

    def compile(self, vocabulary: Vocabulary) -> _CompiledLanguage:
        ordinary = [int(i) for i in np.flatnonzero(vocabulary.ordinary)]
        members = {
            text
            for n in range(self.longest + 1)
            for text in itertools.product(ordinary, repeat=n)
            if self.member(vocabulary.decode(text))
        }
        return _CompiledLanguage(members)


class _CompiledLanguage:
    def __init__(self, members: set[Text]) -> None:
        self.members = members
        self.next: dict[Text, set[int]] = defaultdict(set)
        for text in members:
            for n, token in enumerate(text):
                self.next[text[:n]].add(token)

    def start(self) -> _LanguageState:
        return _LanguageState(self, ())

    def fill_masks(self, states: Sequence[_LanguageState], bitmask: np.ndarray) -> None:
        for row, state in enumerate(states):
            bitmask[row] = 0
            for v in self.next.get(state.text, ()):
                bitmask[row, v // 32] |= 1 << (v % 32)


class _LanguageState:
    def __init__(self, language: _CompiledLanguage, text: Text) -> None:
        self.language = language
        self.text = text

    @property
    def accepting(self) -> bool:
        return self.text in self.language.members

    def fork(self) -> _LanguageState:
        return _LanguageState(self.language, self.text)

    def advance(self, token: int) -> bool:
        viable = token in self.language.next.get(self.text, ())
        self.text = (*self.text, token)
        return viable

    def forced(self) -> list[int]:
        return []


class Score(Potential):
    """`log Ψ = score(text)`, also on prefixes if asked."""

    def __init__(self, score: Callable[[str], float], *, prefixes: bool, name: str = "score"):
        self.score = score
        self.prefixes = prefixes
        self.name = name

    @property
    def scores_prefixes(self) -> bool:
        return self.prefixes

    def log_complete(self, completions):
        return [self.score(c.text) for c in completions]

    def log_prefix(self, completions):
        return [self.score(c.text) for c in completions]


def transformed(row: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """What temperature, top-k, top-p and min-p make of a distribution, the slow way."""
    p = np.where(row > 0, row, 0.0) ** (1.0 / temperature)
    p = p / p.sum()
    order = sorted(range(len(p)), key=lambda v: -p[v])
    if top_k:
        for v in order[top_k:]:
            p[v] = 0.0
        p = p / p.sum()
    if top_p < 1.0:
        mass = 0.0
        for v in order:
            if mass >= top_p:
                p[v] = 0.0
            mass += p[v]
        p = p / p.sum()
    if min_p:
        p[p < min_p * p.max()] = 0.0
        p = p / p.sum()
    return p


def exact(
    model: TableModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    member: Callable[[str], bool] | None = None,
    score: Callable[[str], float] | None = None,
    power: float = 1.0,
    **transform: float,
) -> dict[Text, float]:
    """Unnormalised posterior of every text, by enumeration.

    Without a constraint a text of `max_tokens` tokens is cut there; with one it has to end.
    """
    vocabulary = model.vocabulary
    eos = list(vocabulary.eos_ids)
    mass: dict[Text, float] = {}

    def psi(text: Text) -> float:
        return math.exp(score(vocabulary.decode(text))) if score else 1.0

    def visit(text: Text, p: float) -> None:
        if member is None and len(text) == max_tokens:
            mass[text] = p * psi(text)
            return
        row = transformed(model.probabilities((*prompt, *text)), **transform)
        if member is None or member(vocabulary.decode(text)):
            # The bonus draw treats end tokens one by one, as the model does.
            ends = sum(float(row[e]) ** power for e in eos)
            if ends > 0:
                mass[text] = p * ends * psi(text)
        if len(text) < max_tokens:
            for v in np.flatnonzero(row):
                plain = member is None or vocabulary.ordinary[v]
                if v not in eos and plain:
                    visit((*text, int(v)), p * float(row[v]) ** power)

    visit((), 1.0)
    return mass


def request(
    model: TableModel,
    prompt: Sequence[int],
    *,
    index: int = 0,
    constraint: Constraint | None = None,
    potentials: Iterable[Potential] = (),
    seed: int = 0,
    block_size: BlockSize = 0,
    costs: CostModel | None = None,
    **options,
) -> Request:
    """A request as the API would make it, but with nothing filled in behind one's back."""
    return Request(
        index=index,
        prompt=tuple(prompt),
        prompt_ids=list(prompt),
        options=make_options(None, seed=seed, block_size=block_size, max_restarts=0, **options),
        potentials=tuple(potentials),
        constraint=constraint.compile(model.vocabulary) if constraint else None,
        parse=lambda text: text,
        value_key=lambda text: text,
        costs=costs,
    )


def results(events) -> list[Result]:
    """Results in the order of their index; raises the first error."""
    found = {}
    for event in events:
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, ResultEvent):
            found[event.index] = event.result
    return [found[i] for i in sorted(found)]


def untimed(result: Result) -> dict:
    """A result as plain data, without what a clock said."""
    record = result.to_dict()
    del record["usage"]["seconds"]
    for step in record["steps"]:
        del step["seconds"]
    return record


def unnormalised(result: Result) -> dict[Text, float]:
    """The run's estimate of each text's unnormalised probability: `Ẑ · W` by text."""
    estimate: dict[Text, float] = defaultdict(float)
    if result.log_evidence > -math.inf:
        for particle in (p for p in result.particles if p.weight > 0):
            estimate[particle.token_ids] += math.exp(result.log_evidence) * particle.weight
    return estimate


class FollowingTable(TableModel):
    """A table as a draft that reads the target's rows, as the int8 twin reads its cache."""

    def follow(self, target):
        return _FollowingSession(self, target)


class _FollowingSession(TableSession):
    def __init__(self, model: TableModel, target: TableSession) -> None:
        super().__init__(model)
        self.target = target

    def begin_block(self) -> None:
        self.rows = list(self.target.rows)


def chi_square(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """In standard deviations above its mean; tokens of probability 0 must not occur."""
    counts = torch.bincount(tokens, minlength=len(p))
    assert len(counts) == len(p) and not counts[p == 0].any()
    likely = p > 0
    expected = len(tokens) * p[likely]
    square = float(((counts[likely] - expected) ** 2 / expected).sum())
    freedom = int(likely.sum()) - 1
    return (square - freedom) / math.sqrt(2 * freedom)
