"""Numbers that a grammar would spell differently, while they are being written.

A number is followed as it is written as long as the grammar takes that, and read as what it stands
for when it ends: `1.50` as `1.5`, `12e1` as `120`. An exponent may come where the digits in front
of it are, or begin, a number that the grammar takes: `12e-1` is refused where only numbers up to 10
may stand. Otherwise no digit could be refused any more, since an exponent may always make up for
it; and a model would be led into numbers that only an exponent can save.
"""

from __future__ import annotations

from guided_smc.grammars.matching import GrammarState
from guided_smc.grammars.schema.spelling import BEGUN, MOST_DIGITS, NUMBER, written_out
from guided_smc.grammars.schema.spelling_tokens import SpellingTokens


class BegunNumber:
    """A number that has been begun, whatever is written of it so far.

    Args:
        before: The grammar's state in front of it; not changed.
        tokens: Of the grammar.
    """

    def __init__(self, before: GrammarState, tokens: SpellingTokens) -> None:
        self._before = before
        self._tokens = tokens
        self._possible: dict[str, bool] = {}
        self._ends: dict[str, GrammarState | None] = {}
        self._most_zeros: dict[str, int] = {}

    def ended(self, text: str, native: GrammarState) -> GrammarState | None:
        """The grammar's state if the number ends so; not to be changed. None if it cannot.

        Args:
            text: The number.
            native: The grammar's state behind it as it is written.
        """
        if text not in self._ends:
            self._ends[text] = self._end(text, native)
        return self._ends[text]

    def goes_on(self, text: str) -> bool:
        """Whether what the grammar does not take may become a number that it spells differently."""
        text = text.replace("E", "e")
        if text not in self._possible:
            self._possible[text] = self._may_go_on(text)
        return self._possible[text]

    def _end(self, text: str, native: GrammarState) -> GrammarState | None:
        written = written_out(text)
        if written is not None and written != text:
            as_written_out = self._before.fork()
            if self._tokens.feed(as_written_out, written.encode()):
                return as_written_out
        complete = NUMBER.fullmatch(text) is not None
        return native.fork() if complete and native.alive else None

    def _may_go_on(self, text: str) -> bool:
        match = BEGUN.fullmatch(text)
        if match is None:
            return False
        sign, whole, fraction, exponent = match.groups()
        mantissa = written_out(sign + (whole or "0") + (fraction or "").rstrip("."))
        if mantissa is None:
            return False
        if exponent is None or mantissa == "0":
            return self._may_be(mantissa)
        if not self._tokens.takes(self._before, mantissa.encode()):
            return False
        return self._may_have_exponent(mantissa, exponent[1:])

    def _may_be(self, number: str | None) -> bool:
        """Whether this number, as the grammar writes it, may come and end."""
        return number is not None and self._tokens.may_end(self._before, number.encode())

    def _may_have_exponent(self, mantissa: str, begun: str) -> bool:
        """Whether a mantissa becomes a number with some exponent that begins so."""
        sign = begun[:1] if begun[:1] in ("+", "-") else ""
        digits = begun[len(sign) :]
        minus = mantissa[: mantissa[0] == "-"]
        whole, _, fraction = mantissa[len(minus) :].partition(".")
        figures = (whole + fraction).lstrip("0")
        near = range(-len(whole), len(fraction) + 1)  # the point does not leave the figures
        if not digits:
            likely = (n for n in sorted(near, key=abs) if _has(sign, n))
            return (
                any(self._may_be(written_out(f"{mantissa}e{n}")) for n in likely)
                or (sign != "-" and self._may_end_with_zeros(minus + figures))
                or (
                    sign != "+"
                    and self._may_end_behind_zeros(
                        f"{minus}0.", (whole + fraction if whole != "0" else fraction).rstrip("0")
                    )
                )
            )
        most = len(fraction) + self._zeros(minus + figures)
        least = -len(whole) - self._zeros(f"{minus}0.")
        first = int(digits[:9])
        for longer in range(4):
            for size in range(first * 10**longer, (first + 1) * 10**longer):
                if size > max(most, -least):
                    break
                power = -size if sign == "-" else size
                if least <= power <= most and self._may_be(written_out(f"{mantissa}e{power}")):
                    return True
        return False

    def _may_end_with_zeros(self, beginning: str) -> bool:
        """Whether a number that begins so may end behind zeros."""
        native = self._before.fork()
        tokens = self._tokens
        if not tokens.feed(native, beginning.encode()):
            return False
        for _ in range(MOST_DIGITS - len(beginning.lstrip("-"))):
            if not tokens.feed(native, b"0"):
                return False
            if tokens.may_end(native, b""):
                return True
        return False

    def _may_end_behind_zeros(self, beginning: str, figures: str) -> bool:
        """Whether a number that begins so may end with these figures behind zeros."""
        native = self._before.fork()
        tokens, end = self._tokens, figures.encode()
        if not tokens.feed(native, beginning.encode()):
            return False
        for _ in range(MOST_DIGITS - len(figures)):
            if not tokens.feed(native, b"0"):
                return False
            if tokens.may_end(native, end):
                return True
        return False

    def _zeros(self, beginning: str) -> int:
        """How many zeros the grammar takes behind the beginning of a number."""
        if beginning not in self._most_zeros:
            data = beginning.encode()
            taken = self._tokens.takes_of(self._before, data + b"0" * MOST_DIGITS)
            self._most_zeros[beginning] = max(0, taken - len(data))
        return self._most_zeros[beginning]


def _has(sign: str, power: int) -> bool:
    return power >= 0 if sign == "+" else power <= 0 if sign == "-" else True
