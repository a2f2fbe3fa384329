"""Constraints that can only say whether a text may still become a member: no masks, one question.

A `PrefixConstraint` reads text from left to right by a *cursor*, whatever it needs to remember of
the text so far. The engine draws tokens by rejection, so that few of them are asked about.

Tokens are bytes, and a token may end in the middle of a character. The constraint is asked about
whole characters; what is begun must be the beginning of some UTF-8 character, and of one that may
come next as far as the constraint knows. Tokens without any bytes are never viable: they would go
on for ever.
"""

from __future__ import annotations

from abc import abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np

from guided_smc.errors import OptionError, PotentialError
from guided_smc.potentials import CompiledConstraint, Constraint
from guided_smc.vocabulary import Vocabulary

MAX_REJECTED = 2000
"""Tokens that a draw tries in vain before it gives the particle up."""

_REMEMBERED = 8192
"""Answers that a constraint keeps for other particles at the same place."""

Answer = TypeVar("Answer")


class PrefixConstraint(Constraint):
    """A language that is known by its prefixes.

    Attributes:
        max_rejected: Tokens that a draw tries in vain before it gives the particle up. The result
            then carries a warning.
    """

    max_rejected: int = MAX_REJECTED

    @abstractmethod
    def begin(self) -> Hashable:
        """The cursor in front of a text. Cursors are never changed, and differ where they must."""

    @abstractmethod
    def extend(self, cursor: Any, text: str) -> Hashable | None:
        """The cursor after more text, at least one character; None if no member begins like this.

        None is final: nothing that goes on from there is a member. A cursor may turn out hopeless
        later, which costs particles and no exactness.
        """

    @abstractmethod
    def complete(self, cursor: Any) -> bool:
        """Whether the text in front of the cursor is a member."""

    def begins(self, cursor: Any, begun: bytes) -> bool:
        """Whether some character whose UTF-8 begins like this may come next; True if not known.

        Where nothing else is viable, the tokens that end within a character are all that is left,
        and what follows them is not viable either: a constraint that can say more should.
        """
        return True

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        """Bind to a vocabulary."""
        return CompiledPrefixes(self, vocabulary)


class CompiledPrefixes:
    """A `PrefixConstraint` over the tokens of a vocabulary. Remembers answers."""

    def __init__(self, constraint: PrefixConstraint, vocabulary: Vocabulary) -> None:
        self.max_rejected = constraint.max_rejected
        self.remedy = "raise the constraint's max_rejected"
        self.begin = constraint.begin
        self.extend = lru_cache(_REMEMBERED)(constraint.extend)
        self.complete = lru_cache(_REMEMBERED)(constraint.complete)
        self.begins = lru_cache(_REMEMBERED)(constraint.begins)
        self._tokens = vocabulary.tokens
        self._ordinary = vocabulary.ordinary

    def start(self) -> PrefixState:
        """The state before the first token."""
        return PrefixState(self, self.begin(), b"")

    def fill_masks(self, states: Sequence[PrefixState], bitmask: np.ndarray) -> None:
        """Let everything pass: only `viable` knows."""
        bitmask.fill(-1)

    def judges(self, state: PrefixState) -> bool:
        """Whether the mask is not the whole answer: always."""
        return True

    def viable(self, state: PrefixState, token: int) -> bool:
        """Whether the text can still be completed after the token."""
        return self.after(state.cursor, state.begun, token) is not None

    def after(self, cursor: Hashable, begun: bytes, token: int) -> tuple[Hashable, bytes] | None:
        """Cursor and begun character after a token."""
        data = self._tokens[token] if self._ordinary[token] else None
        if cursor is None or not data:
            return None
        data = begun + data
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            return None
        begun = data[used:]
        if begun[:1] == b"\xed" and begun[1:2] > b"\x9f":
            return None  # a surrogate, which the codec notices a byte later
        if text:
            cursor = self.extend(cursor, text)
        if cursor is None or (begun and not self.begins(cursor, begun)):
            return None
        return cursor, begun


class PrefixState:
    """Where one particle stands: behind a text, and perhaps in the middle of a character.

    A refused token kills the state.
    """

    __slots__ = ("_compiled", "begun", "cursor")

    def __init__(self, compiled: CompiledPrefixes, cursor: Hashable, begun: bytes) -> None:
        self._compiled = compiled
        self.cursor = cursor  # None: dead
        self.begun = begun

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member."""
        return self.cursor is not None and not self.begun and self._compiled.complete(self.cursor)

    def fork(self) -> PrefixState:
        """An independent copy."""
        return PrefixState(self._compiled, self.cursor, self.begun)

    def advance(self, token: int) -> bool:
        """Consume one ordinary token. False if no member begins like this."""
        after = self._compiled.after(self.cursor, self.begun, token)
        self.cursor, self.begun = (None, b"") if after is None else after
        return after is not None

    def forced(self) -> list[int]:
        """Nothing: what is forced is not known."""
        return []


class Predicate(PrefixConstraint):
    """The texts that a user's functions accept. See `predicate`."""

    def __init__(
        self,
        viable: Callable[[str], bool],
        complete: Callable[[str], bool] | None,
        name: str,
        max_rejected: int,
        ascii_only: bool,
    ) -> None:
        self.name = name
        self.max_rejected = max_rejected
        self._ascii_only = ascii_only
        self._viable = viable
        self._complete = viable if complete is None else complete

    def begin(self) -> str:
        """The cursor is the text itself."""
        return ""

    def extend(self, cursor: str, text: str) -> str | None:
        """Ask about the longer text."""
        longer = cursor + text
        if self._ascii_only and not text.isascii():
            return None
        return longer if self._ask("viable", self._viable, longer) else None

    def complete(self, cursor: str) -> bool:
        """Ask whether the text may end here."""
        return self._ask("complete", self._complete, cursor)

    def begins(self, cursor: str, begun: bytes) -> bool:
        """Not asked: there may be thousands of characters that begin like this."""
        return not self._ascii_only

    def _ask(self, question: str, function: Callable[[str], bool], text: str) -> bool:
        try:
            answer = function(text)
        except Exception as error:
            raise PotentialError(
                f"predicate {self.name!r} raised {type(error).__name__}: {error}; `{question}` was "
                f"asked about {text!r}",
                potential=self.name,
                text=text,
            ) from error
        if not isinstance(answer, (bool, np.bool_)):
            raise PotentialError(
                f"predicate {self.name!r} answered {answer!r} where `{question}` was asked about "
                f"{text!r}; it must be True or False",
                potential=self.name,
                text=text,
            )
        return bool(answer)


def predicate(
    viable: Callable[[str], bool],
    complete: Callable[[str], bool] | None = None,
    *,
    name: str | None = None,
    max_rejected: int = MAX_REJECTED,
    ascii_only: bool = False,
) -> Predicate:
    """A constraint from functions of the text: a parser, a compiler, a rule of your own.

    Answers may depend on the text alone; each is asked for once and remembered for a while.

    Args:
        viable: Whether some member begins with this text. True where that is not known: a text
            that turns out hopeless later only costs a particle. Never asked about the empty text.
        complete: Whether this text is a member; asked about viable texts, and the empty one. The
            same as `viable` if None.
        name: What messages call it; the function's own name by default.
        max_rejected: Tokens to try at one place before a particle is given up, with a warning.
        ascii_only: Allow no character outside ASCII. Worth saying where it is so: otherwise a
            token that ends in the middle of such a character has to pass, and may lead nowhere.

    Returns:
        A constraint, to be passed as `output_type` or multiplied into `potential`.

    Raises:
        OptionError: An argument is not callable, or the number is less than 1.
    """
    for what, function in (("viable", viable), ("complete", complete)):
        if not callable(function) and (what == "viable" or function is not None):
            raise OptionError(f"`{what}` must be a function of a text, got {function!r}")
    if max_rejected < 1:
        raise OptionError(f"max_rejected must be at least 1, got {max_rejected}")
    name = name or cast(str, getattr(viable, "__name__", type(viable).__name__))
    return Predicate(viable, complete, name, max_rejected, ascii_only)
