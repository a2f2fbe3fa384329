"""Numbers that a grammar would spell differently, while they are being written.

A number is followed as it is written as long as the grammar takes that, and read as what it stands
for when it ends: `1.50` as `1.5`, `12e1` as `120`. An exponent may come where the digits in front
of it are, or begin, a number that the grammar takes: `12e-1` is refused where only numbers up to 10
may stand. Otherwise no digit could be refused any more, since an exponent may always make up for
it; and a model would be led into numbers that only an exponent can save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from guided_smc.grammars.matching import GrammarState
from guided_smc.grammars.spelling import BEGUN, MOST_DIGITS, NUMBER, written_out
from guided_smc.grammars.spelling_tokens import SpellingTokens


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
        return any(map(self._may_be, self._with_exponent(mantissa, exponent[1:])))

    def _may_be(self, number: str | None) -> bool:
        """Whether this number, as the grammar writes it, may come and end."""
        return number is not None and self._tokens.may_end(self._before, number.encode())

    def _with_exponent(self, mantissa: str, begun: str) -> Iterator[str | None]:
        """What a mantissa becomes with the exponents that begin so, as far as the grammar goes."""
        sign = begun[:1] if begun[:1] in ("+", "-") else ""
        digits = begun[len(sign) :]
        whole, _, fraction = mantissa.lstrip("-").partition(".")
        if not digits:
            likely: Iterable[int] = (0, 1, 2, 3, -1, -2, -3)
            yield from (written_out(f"{mantissa}e{n}") for n in likely if _has(sign, n))
        figures = mantissa[: mantissa[0] == "-"] + (whole + fraction).lstrip("0")
        zeros = self._zeros(figures)
        most = len(fraction) + zeros
        least = -len(whole) - self._zeros(mantissa[: mantissa[0] == "-"] + "0.")
        if not digits:
            every = sorted(range(least, most + 1), key=abs)
            yield from (written_out(f"{mantissa}e{n}") for n in every if _has(sign, n))
            return
        first = int(digits[:9])
        for longer in range(4):
            for size in range(first * 10**longer, (first + 1) * 10**longer):
                if size > max(most, -least):
                    break
                power = -size if sign == "-" else size
                if least <= power <= most:
                    yield written_out(f"{mantissa}e{power}")

    def _zeros(self, beginning: str) -> int:
        """How many zeros the grammar takes behind the beginning of a number."""
        data = beginning.encode()
        return max(0, self._tokens.takes_of(self._before, data + b"0" * MOST_DIGITS) - len(data))


def _has(sign: str, power: int) -> bool:
    return power >= 0 if sign == "+" else power <= 0 if sign == "-" else True
