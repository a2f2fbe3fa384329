"""A constraint that is a grammar of llguidance: what `regex` and `lark` share."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from guided_smc.errors import ConstraintError
from guided_smc.grammars.matching import CompiledGrammar, Limits, every_byte
from guided_smc.potentials import CompiledConstraint, Constraint
from guided_smc.vocabulary import Vocabulary


class Grammar(Constraint):
    """Texts of a grammar.

    Args:
        source: In llguidance's dialect of Lark, with `EXACT_MASKS`.
        name: What messages call it.
        limits: What it may cost.
        levels: How deep the compiler may have to recurse.

    Attributes:
        compiled_from: What llguidance is given.

    Raises:
        GrammarError: It does not compile within the limits.
        ConstraintError: No text belongs to it.
    """

    shows_ends = True

    def __init__(self, source: str, *, name: str, limits: Limits, levels: int = 0) -> None:
        self.name = name
        self.limits = limits
        self.compiled_from = source
        self._levels = levels
        self._compiled: WeakKeyDictionary[Vocabulary, CompiledGrammar] = WeakKeyDictionary()
        # Over plain bytes, so that a bad grammar is known before there is a model.
        compiled = self._bind(every_byte())
        state = compiled.start()
        first = np.empty((1, 9), dtype=np.int32)
        compiled.fill_masks([state], first)
        if not state.accepting and not first.any():
            raise ConstraintError(f"{name}: no text satisfies it")

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """Bind to a vocabulary; done once for each.

        Raises:
            ConstraintError: The grammar is too large for this vocabulary.
        """
        return self._bind(vocabulary)

    def _bind(self, vocabulary: Vocabulary) -> CompiledGrammar:
        if vocabulary not in self._compiled:
            self._compiled[vocabulary] = CompiledGrammar(
                self.compiled_from, vocabulary, self.limits, self.name, levels=self._levels
            )
        return self._compiled[vocabulary]


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a text is a member of a constraint's language."""
    state = constraint.compile(every_byte()).start()
    return all(state.advance(byte) for byte in text.encode()) and state.accepting
