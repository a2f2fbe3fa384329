r"""JSON in all its spellings, over a grammar that knows one.

llguidance takes names and constants letter by letter as they stand in the schema, an integer
without a fraction, and a number with bounds without an exponent. So a text stands for the same text
in the usual spelling (see `spelling`), which the grammar judges: it is given what escapes and
numbers spell. Where a text goes on in the usual spelling, its mask is the grammar's own. The few
tokens that spell something else at such a place are asked about one by one, many of them through
one look at the mask, since what they spell was made a token of the grammar's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from guided_smc.grammars.matching import CompiledGrammar, GrammarState, check_shape, only_way
from guided_smc.grammars.schema.begun_numbers import BegunNumber
from guided_smc.grammars.schema.spelling import DELETE, Kind, Way, written_out
from guided_smc.grammars.schema.spelling_tokens import has, run_of, spelling_tokens
from guided_smc.vocabulary import Vocabulary

Place = Kind | Literal["dead"]


class SpeltState:
    """Where one particle stands: in the grammar, in the usual spelling, and in an escape or number.

    Attributes:
        kind: Where the text ends: `outside` of strings, in a `string`, an `escape`, a `number`; or
            `dead`.
        text: Of the escape or number so far.
        native: In the grammar, behind all in front of an escape; behind a number as it is written
            (dead if the grammar knows no such spelling).
        number: The number that is not at its end.
    """

    __slots__ = ("_compiled", "kind", "native", "number", "text")

    def __init__(
        self,
        compiled: CompiledSpelling,
        native: GrammarState,
        kind: Place = "outside",
        text: str = "",
        number: BegunNumber | None = None,
    ) -> None:
        self._compiled = compiled
        self.native = native
        self.kind: Place = kind
        self.text = text
        self.number = number

    @property
    def accepting(self) -> bool:
        """Whether the text so far is a member of the language."""
        if self.kind == "number":
            ended = self.ended()
            return ended is not None and ended.accepting
        return self.kind == "outside" and self.native.accepting

    @property
    def alive(self) -> bool:
        """Whether some member of the language begins like the text."""
        return self.kind != "dead"

    @property
    def as_written(self) -> bool:
        """Whether the grammar knows the number that the text ends in just like that."""
        return self.native.alive and written_out(self.text) == self.text

    def fork(self) -> SpeltState:
        """An independent copy."""
        return SpeltState(self._compiled, self.native.fork(), self.kind, self.text, self.number)

    def advance(self, token: int) -> bool:
        """Consume one ordinary token. False if no member of the language begins like this.

        Raises:
            ConstraintError: The parser exceeded its limits.
        """
        piece = self._compiled.tokens.own.piece(token)
        if not piece or self.kind == "dead":
            taken = False
        elif self.kind == "number":
            taken = self._in_number(piece)
        else:
            taken = self._take(self._compiled.tokens.way(self.kind, self.text, piece), token)
        if not taken:
            self.kind = "dead"
        return taken

    def allowed_bits(self) -> int:
        """The mask as the bits of a number, for vocabularies of few tokens; without other spellings
        where the text may go on in the usual one.

        Raises:
            ConstraintError: The mask would cost more than the limits allow.
        """
        compiled = self._compiled
        if self.kind == "string" or self.kind == "outside":
            return self.native.allowed_bits() & compiled.own_bits
        mask = np.empty((1, len(compiled.tokens.own_bits)), dtype=np.int32)
        compiled.fill_usual_masks([self], mask)
        return int.from_bytes(mask.tobytes(), "little")

    def completed_by(self, data: bytes) -> bool:
        """Whether the text becomes a member of the language by these bytes. Errors as `advance`."""
        compiled = self._compiled
        if self.kind == "string" or self.kind == "outside":
            way = compiled.tokens.way(self.kind, "", data)
            if way is None:
                return False
            if way.literal and way.kind == "outside":
                return self.native.completed_by([compiled.tokens.byte_ids[byte] for byte in data])
        state = self.fork()
        ids = compiled.tokens.own.ids
        return all(state.advance(ids[bytes([b])][0]) for b in data) and state.accepting

    def forced(self) -> list[int]:
        """The tokens that are the only way on, as far as there is no choice and no end."""
        return only_way(self._compiled.fill_masks, self, len(self._compiled.tokens.own_bits))

    def ended(self) -> GrammarState | None:
        """The grammar's state if the number ends here; not to be changed. None if it cannot."""
        assert self.number is not None
        return self.number.ended(self.text, self.native)

    def _in_number(self, piece: bytes) -> bool:
        tokens = self._compiled.tokens
        assert self.number is not None
        run = run_of(piece)
        self.text += run.decode()
        tokens.feed(self.native, run)
        if len(run) == len(piece):
            return self.native.alive or self.number.goes_on(self.text)
        ended = self.ended()
        if ended is None:
            return False
        self.native, self.number = ended.fork(), None
        return self._take(tokens.way("outside", "", piece[len(run) :]), None)

    def _take(self, way: Way | None, token: int | None) -> bool:
        if way is None:
            return False
        tokens = self._compiled.tokens
        self.kind, self.text = way.kind, way.text
        if way.kind == "number":
            if not tokens.feed(self.native, way.head):
                return False
            self.number = BegunNumber(self.native.fork(), tokens)
            return tokens.feed(self.native, way.text.encode()) or self.number.goes_on(way.text)
        if way.literal and token is not None:
            return self.native.advance(token)
        if not tokens.feed(self.native, way.head):
            return False
        return way.kind != "escape" or tokens.may_become(self.native, way.text)


class CompiledSpelling:
    """A grammar of JSON in the usual spelling, for JSON in all its spellings.

    Args:
        bind: Binds the grammar to a vocabulary.
        vocabulary: The model's tokens.
    """

    def __init__(self, bind: Callable[[Vocabulary], CompiledGrammar], vocabulary: Vocabulary):
        self.tokens = spelling_tokens(vocabulary)
        self.grammar = bind(self.tokens.extended)
        self.own_bits = int.from_bytes(self.tokens.own_bits.tobytes(), "little")

    def start(self) -> SpeltState:
        """The state before the first token."""
        return SpeltState(self, self.grammar.start())

    def fill_masks(self, states: Sequence[SpeltState], bitmask: np.ndarray) -> None:
        """Write the tokens that keep each prefix completable; none for a dead or complete one.

        Args:
            states: States of this grammar.
            bitmask: int32 array `[len(states), ceil(V / 32)]`, overwritten. Bits of special
                and padded ids are always 0.

        Raises:
            ConstraintError: A mask would cost more than the limits allow.
        """
        self._fill(states, bitmask, usual_only=False)

    def fill_usual_masks(self, states: Sequence[SpeltState], bitmask: np.ndarray) -> None:
        """`fill_masks`, but for other spellings where the text may go on in the usual one."""
        self._fill(states, bitmask, usual_only=True)

    # -- masks ------------------------------------------------------------------------------------

    def _fill(self, states: Sequence[SpeltState], bitmask: np.ndarray, *, usual_only: bool) -> None:
        check_shape(bitmask, len(states), len(self.tokens.own_bits))
        asked = [state.native for state in states]
        further: dict[int, int] = {}  # rows of a second state, by the first one's
        for i, state in enumerate(states):
            if state.kind == "number" or state.kind == "escape":
                second = self._second(state)
                if second is not None:
                    further[i] = len(asked)
                    asked.append(second)
        rows = self._rows(asked)
        own_bits, width = self.tokens.own_bits, bitmask.shape[1]
        for i, state in enumerate(states):
            row, out = rows[i], bitmask[i]
            np.bitwise_and(row[:width], own_bits, out=out)
            if state.kind == "string" or state.kind == "outside":
                if not usual_only:
                    self._add_odd(state, row, out)
            elif state.kind == "number":
                behind = (asked[further[i]], rows[further[i]]) if i in further else None
                if state.as_written:
                    behind = state.native, row
                self._in_number(state, behind, out, usual_only=usual_only)
            elif state.kind == "escape":
                escaped = rows[further[i]] if i in further else None
                self._in_escape(state, row, escaped, out)
            else:
                out[:] = 0

    def _second(self, state: SpeltState) -> GrammarState | None:
        """Another state of the grammar whose mask is needed: behind a number, or a backslash."""
        if state.kind == "number":
            ended = None if state.as_written else state.ended()
            return None if ended is None else ended.fork()  # others may share it
        if state.kind != "escape" or state.text != "\\":
            return None
        escaped = state.native.fork()
        self.tokens.feed(escaped, b"\\")
        return escaped

    def _rows(self, asked: list[GrammarState]) -> np.ndarray:
        rows = np.empty((len(asked), self.grammar.tokens.words), dtype=np.int32)
        self.grammar.fill_rows(asked, rows)
        return rows

    def _own(self, row: np.ndarray) -> np.ndarray:
        """The bits of the model's own tokens, a copy."""
        return row[: len(self.tokens.own_bits)] & self.tokens.own_bits

    def _add_odd(self, state: SpeltState, row: np.ndarray, out: np.ndarray) -> None:
        """Add the tokens that spell something else, outside of escapes and numbers."""
        odd = self.tokens.odd[state.kind]
        mask, unsure = odd.possible(row)
        out |= mask
        if not unsure:
            return
        behind: dict[bytes, tuple[GrammarState, np.ndarray]] = {b"": (state.native, row)}
        for group in unsure:
            way, tokens = odd.ways[group], odd.tokens[group]
            if way.kind != "escape":
                possible = self._tries(state, tokens[0])
            else:
                if way.head not in behind:
                    native = state.native.fork()
                    self.tokens.feed(native, way.head)
                    behind[way.head] = native, native.mask()
                native, mask = behind[way.head]
                allowed = self.tokens.next_bytes(mask)
                possible = self.tokens.may_become(native, way.text, allowed)
            if possible:
                _set(out, tokens)

    def _tries(self, state: SpeltState, token: int) -> bool:
        return state.fork().advance(int(token))

    def _in_number(
        self,
        state: SpeltState,
        behind: tuple[GrammarState, np.ndarray] | None,
        out: np.ndarray,
        *,
        usual_only: bool,
    ) -> None:
        tokens = self.tokens
        out &= tokens.numeric
        ends = False
        if behind is not None:
            native, after = behind
            more = self._own(after)
            if not usual_only:
                self._add_odd(SpeltState(self, native), after, more)
            out |= more & ~tokens.numeric
            ends = native.accepting or tokens.ends_by(after)
        if usual_only and (ends or out.any()):
            return
        text = state.text
        if "e" in text or "E" in text:
            lists = [] if state.native.alive else [tokens.signed]
        elif "." in text:
            lists = [tokens.zeros, tokens.powers]
        elif text == "-":
            lists = [tokens.zero_first, tokens.points, tokens.powers]
        else:
            lists = [tokens.points, tokens.powers]
        found = []
        for token in np.concatenate(lists) if lists else ():
            if not has(out, token):
                simple = tokens.simple.get(int(token))
                sure = simple is not None and ends and text[-1:].isdigit()
                if sure or (simple != "." and self._goes_on(state, token)):
                    found.append(token)
        _set(out, found)

    def _goes_on(self, state: SpeltState, token: int) -> bool:
        """Whether a token may come in a number, if the grammar does not take it as it is."""
        piece = self.tokens.own.piece(token)
        if len(run_of(piece)) == len(piece):
            assert state.number is not None
            return state.number.goes_on(state.text + piece.decode())
        return self._tries(state, token)

    def _in_escape(
        self, state: SpeltState, row: np.ndarray, escaped: np.ndarray | None, out: np.ndarray
    ) -> None:
        tokens, allowed = self.tokens, self.tokens.next_bytes(row)
        if escaped is not None:
            out &= tokens.slashes
            out |= self._own(escaped) & tokens.short_escapes
            found = []
            for token, way, look, behind in tokens.after_backslash:
                if look is not None and has(escaped if behind else row, look):
                    possible = True
                elif way.kind == "escape" and not way.head:
                    possible = tokens.may_become(state.native, way.text, allowed)
                else:
                    decided = look is not None and way.kind in ("string", "outside")
                    possible = not decided and self._tries(state, token)
                if possible:
                    found.append(token)
        elif len(state.text) in (6, 7):  # half of a pair
            out[:] = 0
            start = b"\\u"[len(state.text) - 6 :]
            found = [
                token
                for token in tokens.own.by_first_byte[start[0]].tolist()
                if tokens.own.piece(token)[: len(start)] == start[: len(tokens.own.piece(token))]
                and self._tries(state, token)
            ]
        else:
            out[:] = tokens.own.mask(self._in_hex(state, allowed))
            return
        _set(out, found)

    def _in_hex(self, state: SpeltState, allowed: int) -> list[int]:
        """The tokens that may come among the digits of an escape."""
        tokens = self.tokens
        complete, begun = tokens.within_escape(state.text)
        possible: list[int] = []
        for spelt, found in complete:
            if spelt != DELETE and not allowed >> spelt[0] & 1:
                continue
            if not len(found.rests):
                if (len(spelt) == 1 and spelt != DELETE) or tokens.takes(state.native, spelt):
                    possible += found.alone
            else:
                native = state.native.fork()
                if not tokens.feed(native, spelt):
                    continue
                possible += found.alone
                possible += found.with_rest[tokens.all_taken(native, found.rests)].tolist()
            possible += [token for token in found.others if self._tries(state, token)]
        for escape, found in begun:
            if tokens.may_become(state.native, escape, allowed):
                possible += found.alone
                # Behind half of a pair the other half may follow.
                possible += [token for token in found.halves if self._tries(state, token)]
        return possible


def _set(mask: np.ndarray, tokens: Iterable[int]) -> None:
    unsigned = mask.view(np.uint32)
    for token in tokens:
        unsigned[token >> 5] |= 1 << (token & 31)
