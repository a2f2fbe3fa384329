"""Whether languages that are intersected share a text, as far as that can be decided.

Two patterns or choices whose automata are small share a text if some pair of states is reached
together in which both accept. Of a short list of texts each can be asked about. Of what is left,
such as two grammars, it cannot be known before a text is found.
"""

from __future__ import annotations

from itertools import combinations
from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.errors import ConstraintError
from guided_smc.grammars.automata import ByteAutomaton
from guided_smc.grammars.choice import Choice
from guided_smc.grammars.grammar import accepts
from guided_smc.grammars.output_types import _Typed
from guided_smc.grammars.predicates import PrefixConstraint
from guided_smc.grammars.regex import Regex
from guided_smc.potentials import Constraint, Intersection

_MOST_PAIRS = 5000
"""Pairs of states that are looked at: about 0.1 seconds."""

_MOST_TEXTS = 1000

_known: WeakKeyDictionary[Constraint, WeakKeyDictionary[Constraint, bool]] = WeakKeyDictionary()


def refuse_disjoint(constraint: Constraint) -> None:
    """Raise for an intersection in which two languages share no text, where that is decided.

    Raises:
        ConstraintError: With the names of both.
    """
    if not isinstance(constraint, Intersection):
        return
    for one, other in combinations(constraint.constraints, 2):
        known = _known.setdefault(one, WeakKeyDictionary())
        if other not in known:
            known[other] = _disjoint(one, other)
        if known[other]:
            raise ConstraintError(
                f"no text satisfies both {one.name} and {other.name}: loosen one of them, or leave "
                "it out"
            )


def _disjoint(one: Constraint, other: Constraint) -> bool:
    """Whether two languages are known to share no text."""
    one, other = (c.language if isinstance(c, _Typed) else c for c in (one, other))
    automata = [c.over_bytes for c in (one, other) if isinstance(c, Regex | Choice)]
    if len(automata) == 2 and automata[0] is not None and automata[1] is not None:
        return _share_none(automata[0], automata[1])
    for listed, asked in ((one, other), (other, one)):
        # What a user's function takes for an answer is not known.
        if isinstance(listed, Choice) and not isinstance(asked, PrefixConstraint):
            texts = list(listed.texts)
            return len(texts) <= _MOST_TEXTS and not any(accepts(asked, text) for text in texts)
    return False


def _share_none(a: ByteAutomaton, b: ByteAutomaton) -> bool:
    """Whether two automata accept no text in common; False where there is too much to look at."""
    found, waiting = {(0, 0)}, [(0, 0)]
    while waiting:
        s, t = waiting.pop()
        if a.accepting[s] and b.accepting[t]:
            return False
        after = a.transitions[s].astype(np.int64) * (b.refused + 1) + b.transitions[t]
        alive = (a.transitions[s] != a.refused) & (b.transitions[t] != b.refused)
        for pair in np.unique(after[alive]).tolist():
            place = divmod(pair, b.refused + 1)
            if place not in found:
                if len(found) >= _MOST_PAIRS:
                    return False
                found.add(place)
                waiting.append(place)
    return True
