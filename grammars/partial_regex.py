r"""Regular expressions with lookaround, backreferences, recursion and the like, by prefixes.

The `regex` package can say whether a text may still grow into a match (`partial=True`): what it
does is to answer "yes" where it would have to look behind the end of the text. That is never wrong
about a text that can be completed, but for tests that the end itself answers: `$` holds there, and
so do `\b` and `\B`, though a longer text would decide otherwise. Those are rewritten into
lookaheads, which look behind the end like everything else. What cannot be rewritten is refused by
name.

A lookaround or a backreference may make a text hopeless before partial matching sees it; such a
particle dies a few tokens later.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import regex

from guided_smc.errors import ConstraintError, UnsupportedConstraintError
from guided_smc.grammars.matching import Limits, check_size
from guided_smc.grammars.predicates import MAX_REJECTED, PrefixConstraint
from guided_smc.grammars.schema.keywords import shorten
from guided_smc.grammars.worker import compiled_in_worker

TIMEOUT_S = 2.0
"""Seconds that one match may take."""

_BOUNDARY = r"(?:(?<=\w)(?!\w)|(?<!\w)(?=\w))"
_NO_BOUNDARY = r"(?:(?<=\w)(?=\w)|(?<!\w)(?!\w))"
_WORD_START = r"(?:(?<!\w)(?=\w))"
_WORD_END = r"(?:(?<=\w)(?!\w))"
_END = r"(?:(?![\s\S]))"
_END_OR_LAST_NEWLINE = r"(?:(?=\n?(?![\s\S])))"
_END_OF_LINE = r"(?:(?=\n|(?![\s\S])))"

_REWRITTEN = {
    r"\b": _BOUNDARY,
    r"\B": _NO_BOUNDARY,
    r"\m": _WORD_START,
    r"\M": _WORD_END,
    r"\Z": _END,
    r"\z": _END,
}
_REFUSED_ESCAPES = {
    r"\G": "where the search began",
    r"\K": "a match that begins later",
    r"\R": "a line break of one or two characters",
    r"\X": "a grapheme, whose end depends on what follows",
    r"\L": "a named list",
}
_REFUSED_FLAGS = {
    "b": (regex.BESTMATCH, "best match"),
    "e": (regex.ENHANCEMATCH, "enhance match"),
    "f": (regex.FULLCASE, "full case-folding"),
    "p": (regex.POSIX, "leftmost longest match"),
    "r": (regex.REVERSE, "searching backwards"),
    "w": (regex.WORD, "Unicode word boundaries"),
    "V1": (regex.VERSION1, "version 1 behaviour"),
}

_PIECE = re.compile(
    r"""
      (?P<comment> \(\?\#[^)]*\) )
    | (?P<flags> \(\?(?P<on>[a-zA-Z0-9]+)(?:-[a-zA-Z]+)?[:)] )
    | (?P<verb> \(\*[A-Z]+\) )
    | (?P<set> \[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\] )
    | (?P<named> \\[pPNxuUg](?:\{[^}]*\}|<[^>]*>)? )
    | (?P<escape> \\. )
    | (?P<fuzzy> \{(?!\d*,?\d*\})[^{}]*[eids][^{}]*\} )
    | (?P<end> \$ )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


def without_tests_of_the_end(pattern: str, flags: int) -> str:
    """The same language, with lookaheads in place of what the end of the text would answer.

    Raises:
        UnsupportedConstraintError: Something else depends on what follows, or is not regular
            matching (fuzzy, reversed).
    """
    for letter, (bit, what) in _REFUSED_FLAGS.items():
        if flags & bit:
            raise _refused(letter, what, "as a flag")
    pieces = list(_PIECE.finditer(pattern))
    multiline = bool(flags & regex.MULTILINE) or any(
        "m" in piece["on"] for piece in pieces if piece["flags"]
    )
    scoped = any(p["flags"] and "m" in p["on"] and p[0].endswith(":") for p in pieces)
    if scoped and any(piece["end"] for piece in pieces):
        raise _refused("$", "with multi-line mode for a part of the pattern", "in it")
    rewritten = []
    for piece in pieces:
        text = piece[0]
        if piece["flags"]:
            for letter, (_, what) in _REFUSED_FLAGS.items():
                if letter in piece["on"]:
                    raise _refused(text, what, f"at {piece.start()}")
        elif piece["escape"] and text in _REFUSED_ESCAPES:
            raise _refused(text, _REFUSED_ESCAPES[text], f"at {piece.start()}")
        elif piece["fuzzy"]:
            raise _refused(text, "fuzzy matching", f"at {piece.start()}")
        elif piece["escape"]:
            text = _REWRITTEN.get(text, text)
        elif piece["end"]:
            text = _END_OF_LINE if multiline else _END_OR_LAST_NEWLINE
        rewritten.append(text)
    return "".join(rewritten)


_PLAIN_ESCAPE = re.compile(r"\\(?:[wWdDsSbBmMAZzntrfv]|[1-9](?!\d)|[^\w])")
_KINDS = (r"\d", r"[^\W\d]", r"\s", r"[^\w\s]")


def tells_kinds_apart(pattern: str, flags: int) -> bool:
    r"""Whether a look at the pattern shows that it treats characters outside ASCII by kind alone.

    The kinds are those of `\w`, `\d` and `\s`. Characters that a backreference may mean apart.
    """
    plain = pattern.isascii() and not flags & regex.IGNORECASE
    for piece in _PIECE.finditer(pattern):
        if piece["flags"]:
            plain &= "i" not in piece["on"]
        elif piece["named"]:
            plain = False
        elif piece["escape"] or piece["set"]:
            plain &= "[:" not in piece[0]
            for escape in re.finditer(r"\\.", piece[0], re.DOTALL):
                plain &= bool(_PLAIN_ESCAPE.match(pattern, piece.start() + escape.start()))
    return plain


def to_try(begun: bytes, text: str) -> list[str]:
    """A character of each kind whose UTF-8 begins like this, and all those of the text that do."""
    own = {c for c in text if not c.isascii() and c.encode().startswith(begun)}
    return [*_one_of_each_kind(begun), *sorted(own)]


@lru_cache(1024)
def _one_of_each_kind(begun: bytes) -> tuple[str, ...]:
    width, bits, least = next(
        (width, begun[0] & mask, least)
        for width, mask, least in ((2, 0x1F, 0x80), (3, 0x0F, 0x800), (4, 0x07, 0x10000))
        if begun[0] < 0x100 - (0x80 >> width)
    )
    for byte in begun[1:]:
        bits = bits << 6 | byte & 0x3F
    missing = 6 * (width - len(begun))
    codes = range(max(bits << missing, least), min((bits + 1) << missing, 0x110000))
    characters = "".join(chr(c) for c in codes if not 0xD800 <= c < 0xE000)
    # What `regex` takes for a letter and what `re` does differ a little: one of each.
    found = [search(kind, characters) for search in (regex.search, re.search) for kind in _KINDS]
    return tuple({match[0]: None for match in found if match})


def _refused(keyword: str, what: str, where: str) -> UnsupportedConstraintError:
    return UnsupportedConstraintError(
        f"regex: {keyword!r} {where} ({what}) cannot be judged on the beginning of a text; write "
        "the pattern without it",
        keyword=keyword,
    )


class PartialRegex(PrefixConstraint):
    """The texts that a pattern of the `regex` package matches as a whole.

    Args:
        pattern: In the syntax of the `regex` package, which is that of `re` and more.
        flags: Of that package, such as `regex.IGNORECASE`.
        max_rejected: Tokens to try at one place before a particle is given up, with a warning.
        limits: What an untrusted pattern may cost.
        reason: Why it has no masks; said in the result's `warnings`.

    Attributes:
        pattern: As it was given.
        engine: What enforces it.

    Raises:
        ConstraintError: The pattern is invalid, or beyond the limits.
        UnsupportedConstraintError: It asks for something that cannot be judged on prefixes.
    """

    shows_ends = True

    engine: Literal["partial"] = "partial"

    def __init__(
        self,
        pattern: str,
        flags: int = 0,
        *,
        max_rejected: int = MAX_REJECTED,
        limits: Limits | None = None,
        reason: str | None = None,
    ) -> None:
        limits = compiled_in_worker(limits or Limits(), PartialRegex, pattern, flags)
        check_size(pattern, "the regular expression", limits)
        self.pattern = pattern
        self._reason = reason
        self.name = f"regex {shorten(repr(pattern), 60)}"
        self.max_rejected = max_rejected
        self._by_kind = tells_kinds_apart(pattern, flags)
        try:
            regex.compile(pattern, flags)
        except (regex.error, RecursionError) as error:
            raise ConstraintError(f"regex: {error}, in {shorten(repr(pattern))}") from error
        self._compiled = regex.compile(
            without_tests_of_the_end(pattern, flags), flags | regex.VERSION0
        )

    def notes(self) -> tuple[str, ...]:
        """Why tokens are drawn by rejection, where that was not asked for."""
        if self._reason is None:
            return ()
        return (f"{self.name}: {self._reason}, so tokens are drawn by rejection",)

    def begin(self) -> str:
        """The cursor is the text itself."""
        return ""

    def extend(self, cursor: str, text: str) -> str | None:
        """The longer text, if it may grow into a match.

        Raises:
            ConstraintError: Matching took too long.
        """
        longer = cursor + text
        return longer if self._match(longer, partial=True) else None

    def complete(self, cursor: str) -> bool:
        """Whether the text is a match.

        Raises:
            ConstraintError: Matching took too long.
        """
        return self._match(cursor, partial=False)

    def begins(self, cursor: str, begun: bytes) -> bool:
        """Whether a character that begins like this may come next, where the pattern tells."""
        if not self._by_kind:
            return True
        return any(self.extend(cursor, c) is not None for c in to_try(begun, cursor))

    def _match(self, text: str, *, partial: bool) -> bool:
        try:
            found = self._compiled.fullmatch(text, partial=partial, timeout=TIMEOUT_S)
        except TimeoutError as error:
            raise ConstraintError(
                f"{self.name}: matching the text so far ({len(text)} characters) took more than "
                f"{TIMEOUT_S:g} seconds; write the pattern with less backtracking"
            ) from error
        return found is not None
