"""A grammar bound to a vocabulary, through llguidance: the states and masks of its texts.

llguidance never raises: a bad grammar, a limit or an illegal token leaves an error in the matcher
and a mask that looks ordinary. Everything here asks for that error.

Masks are exact: every token that keeps the text completable, not only the canonical split of a
forced text, because the engine's weights need the whole normaliser `Σ p(v)·m(v)`.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from guided_smc.errors import ConstraintError, OptionError
from guided_smc.vocabulary import Vocabulary

EXACT_MASKS = '%llguidance {"no_forcing": true}\n'
"""First line of every Lark grammar. Without it llguidance allows only the canonical tokens of a
forced text, which would cut the others out of the posterior."""

_LEVELS_ANYWHERE = 30
_MOST_LEVELS = 20_000
_BYTES_PER_LEVEL = 16_384  # two to three times what was measured
_stack_size_lock = threading.Lock()

_MOST_FORCED = 64
"""Tokens that one call of `forced` looks ahead at most."""


@dataclass(frozen=True)
class Limits:
    """What a schema, pattern or grammar may cost.

    Compiling takes milliseconds as a rule, but there is no telling: `Limits.untrusted()` has it
    tried in another process first, which can be stopped.

    Attributes:
        max_bytes: Of its source text.
        max_depth: Of nested arrays and objects in a schema. Beyond about 120 none can be read,
            whatever the limit. A `$ref` nests nothing.
        max_grammar_symbols: Of the compiled grammar.
        max_lexer_fuel: Work to compile its patterns (about 50 000 a millisecond).
        max_mask_fuel: Work of the patterns at one mask (about 14 000 a millisecond).
        max_mask_items: Work of the parser at one mask (about 20 000 a millisecond); a tenth of it
            at one place of the text.
        max_lexer_states: States of its patterns, all masks together.
        max_check_steps: Subschemas that may apply to one value, and references (`$ref`) that are
            followed to check it (about 20 a millisecond).
        max_compile_seconds: What compiling may take; None: as long as it takes.
        max_compile_memory: Bytes that compiling may need; None: as many as it needs. On Linux
            only. Either of these two has it compiled in a worker first (see `worker`).
    """

    max_bytes: int = 1_000_000
    max_depth: int = 64
    max_grammar_symbols: int = 500_000
    max_lexer_fuel: int = 1_000_000
    max_mask_fuel: int = 200_000
    max_mask_items: int = 50_000
    max_lexer_states: int = 250_000
    max_check_steps: int = 20_000
    max_compile_seconds: float | None = None
    max_compile_memory: int | None = None

    @classmethod
    def untrusted(cls, **changes: Any) -> Limits:
        """Limits for what strangers hand in: 5 seconds and, on Linux, 1 GiB to compile it.

        Args:
            changes: Other values of any attributes.
        """
        memory = 1 << 30 if sys.platform == "linux" else None
        return cls(**{"max_compile_seconds": 5.0, "max_compile_memory": memory, **changes})

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise OptionError(f"{field.name} must be positive, got {value}")

    def for_llguidance(self) -> LLParserLimits:
        """The part that llguidance watches."""
        return LLParserLimits(
            initial_lexer_fuel=self.max_lexer_fuel,
            step_lexer_fuel=self.max_mask_fuel,
            step_max_items=self.max_mask_items,
            max_items_in_row=self.max_mask_items // 10,
            max_grammar_size=self.max_grammar_symbols,
            max_lexer_states=self.max_lexer_states,
            verbose_errors=False,
        )


def check_size(source: str, what: str, limits: Limits) -> None:
    """Raise for a source that is longer than the limits allow, or that is no Unicode text.

    Raises:
        ConstraintError: With the reason.
    """
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise ConstraintError(f"{what} holds half of a surrogate pair") from None
    if size > limits.max_bytes:
        raise ConstraintError(f"{what} has {size} bytes, more than the limit of {limits.max_bytes}")


class GrammarError(ConstraintError):
    """llguidance refuses a grammar.

    Attributes:
        reason: In its words, on one line.
        line: Of the grammar, from 1; None where the message names none.
    """

    def __init__(self, name: str, message: str) -> None:
        self.reason = _reason(message)
        place = re.match(r"(?:at )?(\d+)\(\d+\): ", message)
        self.line = int(place[1]) if place else None
        super().__init__(f"{name}: {self.reason}")


class CompiledGrammar:
    """A Lark grammar (with `EXACT_MASKS`) bound to a vocabulary.

    Args:
        grammar: The grammar in llguidance's dialect.
        vocabulary: The model's tokens.
        limits: What its masks may cost.
        name: What messages call the constraint.
        levels: How deep the compiler may have to recurse.

    Raises:
        ConstraintError: The grammar does not compile within the limits.
    """

    def __init__(
        self,
        grammar: str,
        vocabulary: Vocabulary,
        limits: Limits,
        name: str,
        *,
        levels: int = 0,
    ) -> None:
        self.name = name
        self.tokens = _tokens(vocabulary)
        tokenizer, budget = self.tokens.tokenizer, limits.for_llguidance()
        self._start = _with_stack_for(
            levels, lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=budget)
        )
        if self._start.is_error():
            raise GrammarError(name, self._start.get_error())
        warnings = self._start.get_grammar_warnings()
        if warnings:  # something would be silently loosened
            raise GrammarError(name, warnings[0])

    def start(self) -> GrammarState:
        """The state before the first token."""
        return GrammarState(self, self._start.deep_copy())

    def fill_masks(self, states: Sequence[GrammarState], bitmask: np.ndarray) -> None:
        """Write the tokens that keep each prefix completable; none for a dead or complete one.

        Args:
            states: States of this grammar.
            bitmask: int32 array `[len(states), ceil(V / 32)]`, overwritten. Bits of special and
                padded ids are always 0.

        Raises:
            ConstraintError: A mask would cost more than the limits allow.
        """
        check_shape(bitmask, len(states), self.tokens.words)
        target = np.ascontiguousarray(bitmask)
        self.fill_rows(states, target)
        np.bitwise_and(target, self.tokens.ordinary_bits, out=bitmask)

    def fill_rows(self, states: Sequence[GrammarState], rows: np.ndarray) -> None:
        """`fill_masks`, but contiguous rows in which bits of tokens that are not ordinary may be
        set, too.
        """
        words = self.tokens.words
        live = [(s.matcher, i) for i, s in enumerate(states) if s.growing]
        if len(live) < len(states):
            rows.fill(0)
        if len(live) == 1:  # faster than the executor
            ((matcher, i),) = live
            matcher.unsafe_compute_mask_ptr(rows.ctypes.data + 4 * words * i, 4 * words)
        elif live:
            _executor().unsafe_compute_mask_ptr(live, rows.ctypes.data, 4 * words, len(states))
        for matcher, _ in live:
            if matcher.is_error():
                self.check_limits(matcher)

    def check_limits(self, matcher: LLMatcher) -> None:
        """Raise if llguidance gave up on a text that may be fine.

        Raises:
            ConstraintError: The limits were hit.
        """
        # Its other error says that the text cannot be continued with this vocabulary.
        if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):
            raise ConstraintError(
                f"{self.name}: too complex to go on at this place of the text: "
                f"{_reason(matcher.get_error())}; raise its `limits` or simplify it"
            )


def check_shape(bitmask: np.ndarray, rows: int, words: int) -> None:
    """Raise for what cannot hold the masks of so many states."""
    if bitmask.shape != (rows, words) or bitmask.dtype != np.int32:
        raise ValueError(
            f"bitmask must be int32 of shape {(rows, words)}, "
            f"got {bitmask.dtype} of shape {tuple(bitmask.shape)}"
        )


class GrammarState:
    """Where one particle stands in the grammar's language.

    A refused token kills the state: it accepts nothing more. Forks made before live on.
    """

    __slots__ = ("_grammar", "alive", "matcher")

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher, alive: bool = True) -> None:
        self._grammar = grammar
        self.matcher = matcher
        self.alive = alive

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member of the language."""
        return self.alive and self.matcher.is_accepting()

    @property
    def growing(self) -> bool:
        """Whether there may be a next token: neither dead nor complete."""
        return self.alive and not self.matcher.is_stopped()

    def fork(self) -> GrammarState:
        """An independent copy."""
        if not self.alive:
            return GrammarState(self._grammar, self.matcher, alive=False)
        return GrammarState(self._grammar, self.matcher.deep_copy())

    def advance(self, token: int) -> bool:
        """Consume one ordinary token. False if no member of the language begins like this.

        Raises:
            ConstraintError: The parser exceeded its limits.
        """
        if not self.growing or not self._grammar.tokens.is_ordinary(token):
            self.alive = False
        # A refused token leaves no error in the matcher with `try`, as it does with `consume`:
        # so an error that is there after it is a limit.
        elif self.matcher.try_consume_tokens([token]) != 1:
            self.alive = False
            self._grammar.check_limits(self.matcher)
        return self.alive

    def allowed_bits(self) -> int:
        """The mask as the bits of a number, for vocabularies of few tokens.

        Raises:
            ConstraintError: The mask would cost more than the limits allow.
        """
        if not self.growing:
            return 0
        bits = int.from_bytes(self.matcher.compute_bitmask(), "little")
        self._grammar.check_limits(self.matcher)
        return bits

    def completed_by(self, tokens: Iterable[int]) -> bool:
        """Whether the text becomes a member of the language by these tokens. Errors as `takes`."""
        tokens = [*tokens]
        if not tokens or not self.growing:
            return not tokens and self.accepting
        if not all(map(self._grammar.tokens.is_ordinary, tokens)):
            return False
        return self.takes([*tokens, self._grammar.tokens.eos_id]) > len(tokens)

    def advance_all(self, tokens: list[int]) -> bool:
        """Consume ordinary tokens. False if no member of the language begins like this.

        Raises:
            ConstraintError: The parser exceeded its limits.
        """
        if not self.growing or self.matcher.try_consume_tokens(tokens) != len(tokens):
            self.alive = False
            self._grammar.check_limits(self.matcher)
        return self.alive

    def takes(self, tokens: list[int]) -> int:
        """How many of these tokens could be consumed next; the last may be an end token.

        Raises:
            ConstraintError: The parser exceeded its limits.
        """
        if not self.growing:
            return 0
        taken: int = self.matcher.validate_tokens(tokens)
        if taken < len(tokens):
            self._grammar.check_limits(self.matcher)
        return taken

    def mask(self) -> np.ndarray:
        """The tokens that keep the text completable, as bits: int32 `[ceil(V / 32)]`."""
        mask = np.empty((1, self._grammar.tokens.words), dtype=np.int32)
        self._grammar.fill_masks([self], mask)
        return mask[0]

    def forced(self) -> list[int]:
        """The tokens that are the only way on, as far as there is no choice and no end."""
        return only_way(self._grammar.fill_masks, self, self._grammar.tokens.words)


def only_way(fill_masks: Callable[[Any, np.ndarray], None], state: Any, words: int) -> list[int]:
    """The tokens that are the only way on from a state, as far as there is no choice and no end.

    Args:
        fill_masks: Writes the masks of states.
        state: The state; not changed.
        words: Of a mask.
    """
    mask = np.empty((1, words), dtype=np.int32)
    ahead = state
    forced: list[int] = []
    while len(forced) < _MOST_FORCED and not ahead.accepting:
        fill_masks([ahead], mask)
        token = _only_bit(mask[0])
        if token is None:
            break
        if ahead is state:
            ahead = state.fork()
        forced.append(token)
        ahead.advance(token)
    return forced


def _with_stack_for(levels: int, compile_grammar: Callable[[], LLMatcher]) -> LLMatcher:
    """Compile, if need be on a thread whose stack is large enough for the recursion.

    llguidance recurses without a guard, and an overflow of the stack ends the process.

    Raises:
        ConstraintError: No stack is large enough.
    """
    if levels <= _LEVELS_ANYWHERE:
        return compile_grammar()
    if levels > _MOST_LEVELS:
        raise ConstraintError(
            f"the schema refers from definition to definition up to {levels} levels deep, more "
            f"than the {_MOST_LEVELS} that can be compiled"
        )
    compiled: list[LLMatcher] = []
    with _stack_size_lock:
        ordinary = threading.stack_size(levels * _BYTES_PER_LEVEL)
        try:
            thread = threading.Thread(target=lambda: compiled.append(compile_grammar()))
            thread.start()
        finally:
            threading.stack_size(ordinary)
    thread.join()
    return compiled[0]


def _reason(message: str) -> str:
    """The reason in an error of llguidance, which goes on with positions and the source."""
    lines = [line.strip() for line in message.strip().split("\n")]
    if lines[0].endswith("regex parse error:"):
        return next((line for line in lines if line.startswith("error:")), lines[0])
    return lines[0]


def _only_bit(words: np.ndarray) -> int | None:
    """The one bit that is set in an int32 mask `[W]`; None if there is none or a choice."""
    nonzero = np.flatnonzero(words)
    if len(nonzero) != 1:
        return None
    index = int(nonzero[0])
    word = int(words[index]) & 0xFFFF_FFFF
    return None if word & (word - 1) else 32 * index + word.bit_length() - 1


def _alike() -> list[str]:
    """Tokens that a mask may take all at once: llguidance's own, and those of names."""
    space, *others = LLTokenizer.general_slices()
    return [space, "[a-zA-Z_][a-zA-Z0-9_]*", "[a-zA-Z0-9_]+", *others]


class _Tokens:
    """What llguidance needs to know of a vocabulary. Holds no reference to it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ordinary = vocabulary.ordinary
        self._ordinary = ordinary.tolist()
        self._bytes = tuple(
            # 0xFF is llguidance's mark of a special token, and never part of UTF-8 text.
            (token or b"") if plain else b"\xff<special %d>" % i
            for i, (token, plain) in enumerate(zip(vocabulary.tokens, self._ordinary, strict=True))
        )
        self.eos_id = vocabulary.eos_ids[0]
        padded = np.zeros(-(-len(ordinary) // 32) * 32, dtype=bool)
        padded[: len(ordinary)] = ordinary
        packed = np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)
        self.ordinary_bits = packed  # [ceil(V / 32)]
        self.words = len(packed)

    def is_ordinary(self, token: int) -> bool:
        return 0 <= token < len(self._ordinary) and self._ordinary[token]

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        wrapped = TokenizerWrapper(_BytesOnly(self._bytes, self.eos_id))
        return LLTokenizer(wrapped, slices=_alike())


class _BytesOnly:
    """The tokenizer that `TokenizerWrapper` wants; nothing is ever encoded without forcing."""

    bos_token_id = None

    def __init__(self, tokens: tuple[bytes, ...], eos_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_id
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        return []


@cache
def every_byte() -> Vocabulary:
    """One token for each byte: to try a grammar, or ask it about a text, without a model."""
    return Vocabulary([bytes([i]) for i in range(256)] + [b""], eos_ids=[256])


_tokens_of: WeakKeyDictionary[Vocabulary, _Tokens] = WeakKeyDictionary()
_shared_executor: list[LLExecutor] = []


def _tokens(vocabulary: Vocabulary) -> _Tokens:
    if vocabulary not in _tokens_of:
        _tokens_of[vocabulary] = _Tokens(vocabulary)
    return _tokens_of[vocabulary]


def _executor() -> LLExecutor:
    if not _shared_executor:
        _shared_executor.append(LLExecutor())
    return _shared_executor[0]
