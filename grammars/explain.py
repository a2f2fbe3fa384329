"""Why a text does not satisfy a constraint: the place where it dies, and what was allowed there.

The constraint is asked about the text byte by byte, without a model. A text dies where no further
text could make it a member any more: at the first character that the mask refuses, or with which
the check (what the mask does not know, see `Constraint.check`) gives it up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from guided_smc.errors import OptionError
from guided_smc.grammars.characters import Allowed, allowed_next
from guided_smc.grammars.matching import every_byte
from guided_smc.grammars.schema.refusals import Reasoned, Refusal
from guided_smc.potentials import Completion, Constraint, ConstraintState, Intersection, Potential

Verdict = Literal["accepted", "refused", "incomplete"]

_SHOWN = 100
"""Characters of a line that are shown around the place."""


@dataclass(frozen=True)
class Explanation:
    """What a constraint says of a text.

    Attributes:
        text: The text.
        verdict: `"accepted"`; `"refused"`: no member begins like this, or the text is complete
            and none; `"incomplete"`: a beginning of members that is no member itself.
        offset: Characters in front of the place: of the first character that is too much, or
            the text's length.
        byte_offset: The same in bytes of UTF-8.
        line, column: Of the place, from 1.
        allowed: What may come there, as far as the mask knows.
        refused_by: The names of the constraints that refuse the text, or of their checks.
        checked: Whether it is a check that refuses, and not the mask.
        refusal: Which value a check refuses and why, where it can say so.
    """

    text: str = field(repr=False)
    verdict: Verdict
    offset: int
    byte_offset: int
    line: int
    column: int
    allowed: Allowed
    refused_by: tuple[str, ...] = ()
    checked: bool = False
    refusal: Refusal | None = None

    @property
    def accepted(self) -> bool:
        """Whether the text is a member."""
        return self.verdict == "accepted"

    @property
    def reason(self) -> str:
        """Why the text is no member, in one line."""
        if self.accepted:
            return "accepted"
        if self.verdict == "incomplete":
            because = f" ({self._of_the_check})" if self.checked else ""
            return (
                f"the text is a valid beginning, but ends too early{because}; it could go on with "
                f"{replace(self.allowed, end=False)}"
            )
        if self.checked:
            return self._of_the_check
        if self.offset == len(self.text):
            return "no member begins like this"
        found = Allowed(frozenset(self.text[self.offset]))
        if self.allowed.end and not self.allowed.characters:
            return f"{found} comes after the end"
        return f"{found} is not allowed here; allowed: {self.allowed}"

    @property
    def place(self) -> str:
        """The place in words."""
        return (
            f"line {self.line}, column {self.column} (character {self.offset}, byte "
            f"{self.byte_offset})"
        )

    def __str__(self) -> str:
        """Verdict and place, the line with a mark under the place, and the reason."""
        if self.accepted:
            return "accepted"
        where = "ends too early at" if self.verdict == "incomplete" else "refused at"
        line, mark = self._marked()
        return f"{where} {self.place}\n  {line}\n  {mark}\n{self.reason}"

    @property
    def _of_the_check(self) -> str:
        return str(self.refusal or f"refused by {', '.join(self.refused_by)}")

    def _marked(self) -> tuple[str, str]:
        """The line of the place, shortened around it, and a caret under the place."""
        begin = self.offset - (self.column - 1)
        line = self.text[begin:].split("\n", 1)[0]
        first = max(0, self.column - 1 - _SHOWN // 2)
        shown = line[first : first + _SHOWN]
        before = "... " if first else ""
        after = " ..." if first + _SHOWN < len(line) else ""
        at = self.column - 1 - first
        plain = "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in shown)
        # Tabs stand in the mark's line too, so that it is as wide as the text in front of it.
        blank = "".join("\t" if c == "\t" else " " for c in plain[:at])
        return before + plain + after, " " * len(before) + blank + "^"


def explain(constraint: Constraint, text: str) -> Explanation:
    """Say whether a text is a member of a constraint's language and, if not, where it dies.

    Args:
        constraint: Of any kind. No model is needed.
        text: The text; not shortened or stripped.

    Returns:
        The verdict with the place, and what was allowed there.

    Raises:
        OptionError: The text holds half of a surrogate pair, so it has no bytes.
        ConstraintError: The constraint's limits are exceeded on the way.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"the text holds half of a surrogate pair at character {error.start}, which is no "
            "text; take it out"
        ) from None
    compiled = constraint.compile(every_byte())
    state = compiled.start()
    offset = _advance(state, text)
    alive = offset == len(text)
    whole = alive and state.accepting
    check = constraint.check()
    dead = None if check is None else _dead_at(check, text[:offset])
    if dead is not None:
        offset = dead - 1  # the character with which it died
    if dead is not None or not alive:  # forks on the way would cost more than to begin anew
        state = compiled.start()
        _advance(state, text[:offset])
    if check is not None and dead is not None:
        return _made(text, "refused", offset, allowed_next(compiled, state), check, text[:dead])
    allowed = allowed_next(compiled, state)
    if whole and (check is None or check.log_complete([_completion(text, True)])[0] > -math.inf):
        return _made(text, "accepted", offset, allowed)
    if not alive:
        names = _refusing(constraint, text, offset)
        return _made(text, "refused", offset, allowed, names=names)
    verdict: Verdict = "incomplete" if allowed.characters else "refused"
    if whole and check is not None:
        return _made(text, verdict, offset, allowed, check, text, finished=True)
    return _made(text, verdict, offset, allowed, names=(constraint.name,))


def _advance(state: ConstraintState, text: str) -> int:
    """Advance by a text; returns how many characters were taken."""
    for i, character in enumerate(text):
        if not all(state.advance(byte) for byte in character.encode()):
            return i
    return len(text)


def _dead_at(check: Potential, text: str) -> int | None:
    """The length of the shortest beginning that a check gives up; None if it does not."""
    if not check.scores_prefixes:
        return None

    def dead(length: int) -> bool:
        return check.log_prefix([_completion(text[:length], False)])[0] == -math.inf

    if not text or not dead(len(text)):
        return None
    low, high = 0, len(text)  # −inf stays −inf, so it can be searched for by halves
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if dead(middle) else (middle, high)
    return high


def _completion(text: str, finished: bool) -> Completion:
    return Completion("", tuple(text.encode()), text, finished, every_byte())


def _made(
    text: str,
    verdict: Verdict,
    offset: int,
    allowed: Allowed,
    check: Potential | None = None,
    checked: str = "",
    *,
    names: Sequence[str] = (),
    finished: bool = False,
) -> Explanation:
    refusal = None
    if check is not None:
        names, refusal = _why(check, checked, finished)
    before = text[:offset]
    return Explanation(
        text=text,
        verdict=verdict,
        offset=offset,
        byte_offset=len(before.encode()),
        line=before.count("\n") + 1,
        column=offset - (before.rfind("\n") + 1) + 1,
        allowed=allowed,
        refused_by=tuple(names),
        checked=check is not None,
        refusal=refusal,
    )


def _why(check: Potential, text: str, finished: bool) -> tuple[list[str], Refusal | None]:
    """The factors of a check that refuse, and why the first that can say so does."""
    asked = [_completion(text, finished)]
    names, reasons = [], []
    for factor in check.factors():
        score = factor.log_complete(asked) if finished else factor.log_prefix(asked)
        if score[0] == -math.inf:
            names.append(factor.name)
            reason = factor.why(text, finished=finished) if isinstance(factor, Reasoned) else None
            reasons += [] if reason is None else [reason]
    return names, reasons[0] if reasons else None


def _refusing(constraint: Constraint, text: str, offset: int) -> list[str]:
    """The parts of an intersection that refuse the character at an offset."""
    if not isinstance(constraint, Intersection):
        return [constraint.name]
    data, names = text[: offset + 1].encode(), []
    for part in constraint.constraints:
        state = part.compile(every_byte()).start()
        if not all(state.advance(byte) for byte in data):
            names.append(part.name)
    return names
