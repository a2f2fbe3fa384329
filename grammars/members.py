"""Random members of a constraint's language, without a model: to see what a schema lets through.

A text grows character by character, of kinds that make texts people would write, and after a
random length it turns to whatever closes it: quotes, brackets, the end. Which characters close most
eagerly is drawn anew for each text, since that depends on the grammar. A text that comes to a dead
end, or grows too long, is given up and another one begun, with more patience each few times.

What a check wants and no mask knows, as the values that an array `contains` or the `propertyNames`
of an object, is hardly ever met character by character. So whole values of such subschemas are
drawn first, as suggestions, and tried where a value may begin.
"""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

from guided_smc.errors import ConstraintError, OptionError
from guided_smc.grammars.characters import next_bytes
from guided_smc.grammars.matching import Limits, every_byte
from guided_smc.grammars.schema.json_schema import JsonSchema
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.grammars.schema.refusals import Reasoned
from guided_smc.potentials import Completion, Constraint, Intersection

MAX_CHARACTERS = 2000
"""Of a member, unless something else is asked for."""

_TRIES_EACH = 8
_PATIENCE = tuple(
    p for p in (20, 40, 80, 160, 320, 640, 1280, math.inf) for _ in range(_TRIES_EACH)
)
"""Characters that each try for one member may take beyond its turn."""

_GROWTH = 30.0
"""Characters after which a text turns to its end, on average."""

_KINDS: tuple[tuple[str, float, float], ...] = (
    (string.ascii_letters, 6.0, 2.0),
    (string.digits, 3.0, 2.0),
    ("\"'`", 2.0, 0.0),
    (")]}>", 2.0, 1.0),
    ("([{<", 1.5, 4.0),
    (",:;=.-", 2.0, 3.0),
    ("\\", 0.1, 5.0),
    (" ", 0.4, 3.5),
    ("\n", 0.1, 4.0),
    ("".join(map(chr, range(32))) + "\x7f", 0.01, 5.0),
)
"""Characters, how much of a growing text they make, and how late they come when it closes."""

_MOST_SUGGESTING = 16
"""Subschemas of which values are suggested, and listed values that are."""

_SUGGESTED_EACH = 4
_LONGEST_SUGGESTION = 200
_DEEPEST = 3
"""Suggestions within suggestions."""

_EAGERNESS = (0.0, 0.2, 0.5, 0.8)
"""How often a text takes a suggestion where one fits: one of these for each text."""

_OTHER = (1.0, 2.5)
_BEYOND_ASCII = (0.2, 4.0)


_BEFORE_VALUES = frozenset("[{,: \n")


def _table() -> tuple[list[int], list[float], list[float]]:
    """Kind, share and rank of each byte."""
    kinds, shares, ranks = [], [], []
    for byte in range(256):
        kind, share, rank = len(_KINDS), *_OTHER
        if byte >= 128:
            kind, share, rank = len(_KINDS) + 1, *_BEYOND_ASCII
        for i, (characters, *numbers) in enumerate(_KINDS):
            if chr(byte) in characters and kind >= len(_KINDS):
                kind, (share, rank) = i, numbers
        kinds.append(kind)
        shares.append(share)
        ranks.append(rank)
    return kinds, shares, ranks


_KIND, _SHARE, _RANK = _table()


def sample_members(
    constraint: Constraint,
    n: int,
    *,
    seed: int | None = None,
    max_characters: int = MAX_CHARACTERS,
) -> list[str]:
    """Random members of a constraint's language; they may repeat.

    Every member can come up, but with no probability worth naming: this shows what a constraint
    allows, not what a model would say.

    Args:
        constraint: Of any kind, whose check is asked too.
        n: How many.
        seed: The same seed gives the same members; None draws one.
        max_characters: Of each member at most. About 30 characters after its beginning a member
            turns to what closes it.

    Raises:
        OptionError: A number is too small.
        ConstraintError: No member was found in some tries, or the constraint's limits were
            exceeded.
    """
    if n < 0:
        raise OptionError(f"n must be at least 0, got {n}")
    if max_characters < 0:
        raise OptionError(f"max_characters must be at least 0, got {max_characters}")
    return list(_members(constraint, n, random.Random(seed), max_characters, 0))


def _members(
    constraint: Constraint, n: int, draw: random.Random, most: int, depth: int
) -> Iterator[str]:
    suggestions = _suggestions(constraint, draw, depth) if n else []
    first = 0  # what was far too little for the last member will be for the next
    for _ in range(n):
        member, tries = _member(constraint, draw, most, first, suggestions)
        yield member
        first = max(0, tries - tries % _TRIES_EACH - _TRIES_EACH)


def _member(
    constraint: Constraint, draw: random.Random, most: int, first: int, suggestions: list[str]
) -> tuple[str, int]:
    """A member, and which try it was; the first one is that of a number."""
    longest, refused = "", ("", False)
    for i, patience in enumerate(_PATIENCE[first:], first):
        walk = _Walk(constraint, draw, most, patience, suggestions)
        if walk.go():
            return walk.text, i
        longest = max(longest, walk.text, key=len)
        refused = walk.refused or refused
    tried = f", with {len(suggestions)} values of its subschemas as suggestions" * bool(suggestions)
    raise ConstraintError(
        f"{shorten(constraint.name)}: no member of up to {most} characters was found in "
        f"{len(_PATIENCE) - first} tries{tried} (the longest beginning: {shorten(longest)!r}"
        f"{_because(constraint, *refused)}); allow longer ones, or look whether there are any"
    )


def _because(constraint: Constraint, text: str, finished: bool) -> str:
    """Why the check refused a text, in words; nothing where it did not or cannot say so."""
    check = constraint.check()
    for factor in check.factors() if check is not None and text else ():
        if isinstance(factor, Reasoned) and (why := factor.why(text, finished=finished)):
            return f"; of the last one the check says: {shorten(str(why))}"
    return ""


def _suggestions(constraint: Constraint, draw: random.Random, depth: int) -> list[str]:
    """Values that the check of a schema may want, as JSON."""
    if isinstance(constraint, Intersection):
        return [s for part in constraint.constraints for s in _suggestions(part, draw, depth)]
    # Of a union of schemas, and of what else is not itself one, nothing is known.
    if not isinstance(constraint, JsonSchema) or not constraint.relaxed or depth > _DEEPEST:
        return []
    root = constraint.schema
    found: list[str] = []
    wanted: list[Any] = []
    waiting: list[Any] = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            lists = [part.get("enum"), part.get("required"), [part.get("const")]]
            values = [value for each in lists if isinstance(each, list) for value in each]
            found += [
                json.dumps(value, ensure_ascii=False) for value in values if value is not None
            ]
            wanted += [part[keyword] for keyword in _WANTING if keyword in part]
            if isinstance(names := part.get("propertyNames"), dict):
                wanted.append({**names, "type": "string"})
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    found = found[:_MOST_SUGGESTING]
    for schema in wanted[:_MOST_SUGGESTING]:
        found += _values_of(schema, root, constraint.limits, draw, depth)
    return list(dict.fromkeys(found))


_WANTING = ("contains", "if")
"""Keywords whose subschemas some value has to fit, or is judged by."""


def _values_of(
    schema: Any, root: Any, limits: Limits, draw: random.Random, depth: int
) -> list[str]:
    """Some values of a subschema; none where it cannot stand alone, or where none are found."""
    if isinstance(schema, dict):
        around = {k: root[k] for k in ("$schema", "$defs", "definitions") if k in root}
        schema = {**around, **schema}
    try:
        alone = JsonSchema(schema, whitespace="compact", limits=limits)
        return list(_members(alone, _SUGGESTED_EACH, draw, _LONGEST_SUGGESTION, depth + 1))
    except ConstraintError:
        return []


class _Walk:
    """One try.

    Args:
        constraint: The language.
        draw: Random numbers.
        most: Characters at most.
        patience: Characters at most after the turn to the end.
        suggestions: Texts to try as a whole where a value may begin.

    Attributes:
        text: So far.
        refused: The last longer text that the check refused, and whether it was a whole one.
    """

    def __init__(
        self,
        constraint: Constraint,
        draw: random.Random,
        most: int,
        patience: float,
        suggestions: list[str],
    ) -> None:
        self._compiled: Any = constraint.compile(every_byte())
        self._check = constraint.check()
        self._draw = draw
        self._turn = min(draw.expovariate(1 / _GROWTH), most / 4)
        self._most = min(most, self._turn + patience)
        # Mostly in the order of the ranks; sometimes quite another one, for odd grammars.
        spread = 0.9 if draw.random() < 0.7 else 4.0
        self._eager = [rank + spread * draw.random() for rank in _RANK]
        self._liking = [draw.lognormvariate(0.0, 0.7) for _ in range(len(_KINDS) + 2)]
        if draw.random() < 0.3:
            self._liking[:2] = [20.0, 20.0]  # letters and digits: words and numbers
        self._suggestions = suggestions
        self._eagerness = draw.choice(_EAGERNESS) if suggestions else 0.0
        self.text = ""
        self.refused: tuple[str, bool] | None = None

    def go(self) -> bool:
        """Whether a member was reached."""
        state = self._compiled.start()
        while True:
            closing = len(self.text) >= self._turn
            if state.accepting and (closing or self._draw.random() < 0.2) and self._is_member():
                return True
            after = self._step(state, closing) if len(self.text) < self._most else None
            if after is None:
                return bool(state.accepting) and self._is_member()
            state = after

    def _step(self, state: Any, closing: bool) -> Any:
        """The state after one more character, or after a suggestion; None at a dead end."""
        if self._eagerness and (not self.text or self.text[-1] in _BEFORE_VALUES):
            after = self._suggested(state)
            if after is not None:
                return after
        for byte in self._order(next_bytes(self._compiled, state), closing):
            after = state.fork()
            if not after.advance(byte):
                continue
            data = bytes([byte]) if byte < 128 else self._finished(bytes([byte]), after)
            if data is None:
                continue
            longer = self.text + data.decode()
            if self._may_go_on(longer):
                self.text = longer
                return after
        return None

    def _suggested(self, state: Any) -> Any:
        """The state after one of the suggestions; None if none is taken."""
        if self._draw.random() >= self._eagerness:
            return None
        suggestion = self._draw.choice(self._suggestions)
        after = state.fork()
        data = suggestion.encode(errors="surrogatepass")  # which no mask takes
        longer = self.text + suggestion
        if len(longer) > self._most or not all(map(after.advance, data)):
            return None
        if not self._may_go_on(longer):
            return None
        self.text = longer
        return after

    def _finished(self, data: bytes, state: Any) -> bytes | None:
        """A whole character from its first byte on; None if none was found."""
        while True:
            try:
                data.decode()
                return data
            except UnicodeDecodeError:
                pass
            allowed = next_bytes(self._compiled, state)
            self._draw.shuffle(allowed)
            for byte in allowed:
                after = state.fork()
                if 0x80 <= byte < 0xC0 and after.advance(byte):
                    data += bytes([byte])
                    state.advance(byte)
                    break
            else:
                return None

    def _order(self, allowed: Sequence[int], closing: bool) -> Iterator[int]:
        """Bytes in the order in which they are tried."""
        # What comes again and again closes nothing.
        stuck = len(self.text) >= 6 and len(set(self.text[-6:])) == 1
        if closing and not stuck and self._draw.random() < 0.9:
            yield from sorted(allowed, key=self._eager.__getitem__)
            return
        by_kind: dict[int, list[int]] = {}
        for byte in allowed:
            by_kind.setdefault(_KIND[byte], []).append(byte)
        while by_kind:
            kinds = list(by_kind)
            weights = [_SHARE[by_kind[kind][0]] * self._liking[kind] for kind in kinds]
            (kind,) = self._draw.choices(kinds, weights)
            members = by_kind[kind]
            yield members.pop(self._draw.randrange(len(members)))
            if not members:
                del by_kind[kind]

    def _may_go_on(self, text: str) -> bool:
        if self._check is None or not self._check.scores_prefixes:
            return True
        return self._taken(text, False, self._check.log_prefix([_completion(text, False)]))

    def _is_member(self) -> bool:
        if self._check is None:
            return True
        return self._taken(
            self.text, True, self._check.log_complete([_completion(self.text, True)])
        )

    def _taken(self, text: str, finished: bool, scores: Sequence[float]) -> bool:
        if scores[0] == -math.inf:
            self.refused = text, finished
        return scores[0] > -math.inf


def _completion(text: str, finished: bool) -> Completion:
    return Completion("", tuple(text.encode()), text, finished, every_byte())
