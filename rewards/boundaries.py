"""Where unfinished texts are cut for rewards that speak of whole sentences, lines or fields.

A cut depends on the text alone, and once it is behind a boundary it never moves back in front of it
as the text grows. So a score is held from one boundary to the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from guided_smc.errors import OptionError
from guided_smc.rewards.partial_json import last_closed

CHOICES = ("step", "sentence", "line", "field", "end")

_SENTENCE_END = re.compile(
    r"""(?P<stop>[.!?…]+)["'”’»)\]*_]*(?=\s)|[。！？]+["'”’」』）]*|(?<=\S)(?=[ \t]*\n[ \t]*\n)"""
)
_NO_END = re.compile(
    r"""
    (?: (?<!\w) [^\W\d_]                      # an initial
      | (?<!\w) (?: Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|cf|e\.g|i\.e|No|Fig )
      | ^ [ \t]* \d+                          # the number of an item in a list
    ) $""",
    re.VERBOSE | re.MULTILINE,
)
_LOOK_BACK = 16


def check_on(on: object) -> str:
    """One of the choices.

    Raises:
        OptionError: It is another; with the choices.
    """
    if not isinstance(on, str) or on not in CHOICES:
        known = ", ".join(f'"{choice}"' for choice in CHOICES)
        raise OptionError(f"on must be one of {known}; got {on!r}")
    return on


def sentence_ends(text: str) -> Iterator[int]:
    """Where whole sentences end: behind the stop and closing quotes, ascending.

    An end is a stop with whitespace behind it, a full-width stop, or an empty line. Not one is a
    decimal point, and neither is the dot of an initial, of a few common abbreviations, or of the
    number of an item in a list.
    """
    for found in _SENTENCE_END.finditer(text):
        if found["stop"] == ".":
            before = text[max(0, found.start() - _LOOK_BACK) : found.start()]
            if _NO_END.search(before):
                continue
        yield found.end()


def last_sentence(text: str) -> int | None:
    """Where the last whole sentence ends; None before any."""
    return max(sentence_ends(text), default=None)


def last_line(text: str) -> int | None:
    """Where the last whole line that is not blank ends, in front of its line break."""
    end = len(text[: text.rfind("\n") + 1].rstrip())
    return end or None


CUTS: dict[str, Callable[[str], int | None]] = {
    "step": len,
    "sentence": last_sentence,
    "line": last_line,
    "field": last_closed,
}
"""Length of what is scored of an unfinished text; None before the first boundary."""
